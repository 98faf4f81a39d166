"""The conclusion of ``why`` for every state that a document can be in."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from pipeline.core import identity
from pipeline.diagnosis.story_model import (
    Access,
    Context,
    DeadLetter,
    Document,
    Event,
    GenerationProgress,
    Person,
    Published,
    Queue,
    Source,
    StoreDifference,
    StoreProgress,
    Story,
)
from pipeline.diagnosis.story_verdict import STATES, judge
from pipeline.ledger.documents import Identity

AT = datetime(2026, 11, 20, 8, 30, tzinfo=UTC)
LATER = AT + timedelta(minutes=5)
DOCUMENT = Document(
    Identity(uuid4(), "acme", "wiki", "a.md"),
    7,
    7,
    3,
    AT,
    b"h",
    "A",
    None,
    None,
    "text/markdown",
    None,
    AT,
    AT,
    None,
    "live",
)
SETTLED = StoreProgress("settled", 7, 7, AT)
PENDING = StoreProgress("pending", 6, 7, None, AT)
PUT_OFF = StoreProgress("pending", 6, 7, None, AT, LATER, 0, "the embedding server answers 429")
FAILED = StoreProgress("failed", 6, 7, None, AT, LATER, 3, "the row is too big")
READERS = Access(("wiki/staff",), (), AT)
CREATED = Event(AT, "document.upserted.v1", "created", 3, AT, 7, "live")
LETTER = DeadLetter("documents.live.v1:3:9", "detect", "invalid", "title: too long", LATER)
SOURCE = Source("acme", "wiki", "confluence", False, True, None, {}, 1.0)
ITEM = Published("a.md", 3, False, None, None, AT, AT, AT)
DETECT = Queue("detect", "documents.live.v1", 3, 12, 1)


def story(vectors: StoreProgress = SETTLED, keywords: StoreProgress = SETTLED, chunks: int = 2) -> Story:
    return Story(DOCUMENT, READERS, (CREATED,), (GenerationProgress("g1", True, chunks, vectors, keywords),))


def published(**changes: object) -> Context:
    return Context("a.md", replace(SOURCE, item=replace(ITEM, **changes)), queues=(DETECT,))  # type: ignore[arg-type]


NOTHING = Story(None)
INGESTED = Context(
    "/a.pdf",
    Source(
        "acme",
        identity.INGESTED,
        "ingest",
        False,
        True,
        None,
        {},
        None,
        item=replace(ITEM, external_id="/a.pdf", version=None, problem_code="broken", problem_message="is damaged"),
    ),
)
WELL = story()
CASES: list[tuple[str, Story, Context, str, str | None]] = [
    ("unknown", NOTHING, Context("a.md"), "no event about it has ever arrived", "penstock ingest"),
    ("unknown", NOTHING, Context("a.md", SOURCE), "has never listed it", "connector run wiki --document a.md"),
    (
        "unknown",
        NOTHING,
        Context("a.md", inactive=(replace(SOURCE, paused=True),)),
        "wiki (paused)",
        "penstock connector status",
    ),
    ("unknown", NOTHING, published(gone=True), "published its deletion before", "connector run wiki"),
    (
        "refused",
        NOTHING,
        published(problem_code="needs_ocr", problem_message="pictures"),
        "needs_ocr: pictures",
        "with a version that has text",
    ),
    ("refused", NOTHING, INGESTED, "`penstock ingest` skipped it when it last read it", "penstock ingest /a.pdf"),
    ("source_paused", NOTHING, Context("a.md", replace(SOURCE, paused=True)), "is paused", "connector resume wiki"),
    (
        "source_failing",
        NOTHING,
        Context("a.md", replace(SOURCE, activities={"changes": {"state": "waiting", "reason": "429"}})),
        "changes: 429",
        "connector check wiki",
    ),
    (
        "source_not_running",
        NOTHING,
        Context("a.md", replace(SOURCE, silent_seconds=None)),
        "nothing runs connector",
        "penstock worker connectors",
    ),
    ("source_loading", NOTHING, Context("a.md", replace(SOURCE, loaded=False)), "first load", "connector status wiki"),
    ("queued", NOTHING, published(), "12 records of partition 3 of documents.live.v1", "penstock status"),
    ("queued", NOTHING, replace(published(), queues=()), "is the detect worker running?", "penstock status"),
    (
        "queued",
        NOTHING,
        replace(published(), queues=(replace(DETECT, members=0),)),
        "no detect worker runs",
        "penstock worker detect",
    ),
    (
        "queued",
        NOTHING,
        replace(published(), outages={"detect": "waiting for postgres for 9 s (refused)"}),
        "is stalled: waiting for postgres",
        "penstock status",
    ),
    (
        "lost",
        NOTHING,
        replace(published(), queues=(replace(DETECT, behind=0),)),
        "has read all of its partition",
        "penstock recover",
    ),
    ("dead_letter", Story(None, dead=(LETTER,)), Context(), "invalid: title: too long", "penstock dead show"),
    (
        "dismissed",
        Story(None, dead=(replace(LETTER, dismissed_at=LATER, dismissed_by="ann", dismissed_reason="a test"),)),
        Context(),
        "ann dismissed the last one",
        "--undo",
    ),
    ("replayed", Story(None, dead=(replace(LETTER, replayed_at=LATER),)), Context(), "has not arrived", "status"),
    ("stub", replace(WELL, document=replace(DOCUMENT, version=None)), Context(), "only a change of access", "publish"),
    (
        "deleted",
        replace(WELL, document=replace(DOCUMENT, deleted_at=LATER)),
        published(gone=True),
        "by connector wiki",
        "penstock connector run wiki --document a.md",
    ),
    (
        "deleted",
        replace(
            WELL,
            document=replace(DOCUMENT, deleted_at=LATER),
            events=(CREATED, Event(LATER, "document.deleted.v1", "deleted", 4, LATER, 8, "live")),
        ),
        Context(),
        "by an event of source wiki",
        "publish it again from source wiki",
    ),
    ("nobody", replace(WELL, access=Access((), (), AT)), Context(), "nobody may read it", "give it readers"),
    ("no_generation", replace(WELL, generations=()), Context(), "no active generation", "penstock migrate"),
    ("waiting", story(PENDING), Context(), "waiting for vectors since 2026-11-20 08:30:00", "penstock status"),
    ("waiting", story(replace(PENDING, before=41)), Context(), "41 documents before it", "penstock status"),
    (
        "waiting",
        story(keywords=PENDING),
        Context(queues=(Queue("keywords", "index.live.v1", 2, 5, 0),)),
        "no keywords worker runs; it is found by vectors only",
        "penstock worker keywords",
    ),
    (
        "waiting",
        story(PENDING),
        Context(queues=(Queue("vectors", "index.live.v1", 2, 5, 2),)),
        "5 records to read in partition 2",
        "penstock status",
    ),
    (
        "stands_still",
        story(PENDING),
        Context(outages={"vectors": "waiting for embeddings for 40 s (429)"}),
        "vectors is stalled: waiting for embeddings for 40 s (429)",
        "restore that service",
    ),
    ("failed", story(FAILED), Context(), "failed 3 times", "penstock audit --repair"),
    (
        "waiting",
        story(PUT_OFF),
        Context(),
        "(the embedding server answers 429), next attempt at 2026",
        "penstock status",
    ),
    ("empty", story(chunks=0), Context(), "its text is empty", "publish it with text"),
    (
        "differs",
        WELL,
        Context(differences=(StoreDifference("g1", "vectors", "missing", "a desired chunk is not in the store", 1),)),
        "vectors: a desired chunk is not in the store (1 of 2 chunks)",
        "penstock audit --repair",
    ),
    (
        "differs",
        WELL,
        Context(differences=(StoreDifference("g1", "ledger", "rotten_body", "the stored text is gone", 0),)),
        "the stored text is gone",
        "publish it again",
    ),
    (
        "unreadable",
        WELL,
        Context(person=Person(("eve",), False, (), ())),
        "hold none of its access tags (wiki/st",
        "add eve to one of wiki/staff",
    ),
    (
        "unreadable",
        WELL,
        Context(source=SOURCE, person=Person(("ann",), False, ("wiki/staff",), ("wiki/nda",))),
        "lack the required wiki/nda",
        "then `penstock connector run wiki`",
    ),
    ("partial", story(replace(SETTLED, state="partial", refused=1)), Context(), "1 of its 2 chunks can never", None),
    ("searchable", WELL, Context(), "both stores hold its 2 chunks", None),
    ("searchable", WELL, Context(person=Person(("ann",), True, ("wiki/staff",), ())), "both stores hold", None),
    ("searchable", replace(WELL, dead=(LETTER,)), Context(), "not its newest version", "penstock dead replay"),
]


@pytest.mark.parametrize(("state", "story", "context", "says", "step"), CASES)
def test_every_document_state_has_its_reason_and_next_step(
    state: str, story: Story, context: Context, says: str, step: str | None
) -> None:
    verdict = judge(story, context)
    assert verdict.state == state
    assert says in verdict.reason
    assert "\n" not in verdict.reason
    assert verdict.searchable == (state in ("searchable", "partial", "unreadable"))
    assert (verdict.next is None) == (step is None)
    assert (step or "") in (verdict.next or "")


def test_every_state_has_a_test_case_and_a_row_in_the_documentation() -> None:
    assert {state for state, *_ in CASES} == set(STATES)
    page = (Path(__file__).parents[4] / "docs" / "why.md").read_text()
    assert [state for state in STATES if f"| `{state}` |" not in page] == []


@pytest.mark.parametrize(
    ("context", "note"),
    [
        (published(version=4), "version 4 was published and has not been processed yet: 12 records"),
        (published(gone=True), "has published its deletion, which has not been processed yet"),
        (
            published(problem_code="too_large", problem_message="9 MiB"),
            "too_large: 9 MiB): the stores hold",
        ),
        (Context(source=replace(SOURCE, paused=True)), "newer changes are read after `penstock connector resume wiki`"),
        (
            Context(source=replace(SOURCE, silent_seconds=60.0)),
            "newer changes are not read: start `penstock worker connectors`",
        ),
        (
            Context(source=replace(SOURCE, activities={"sweep": {"state": "needs attention", "reason": "denied"}})),
            "cannot read its source at present (sweep: denied)",
        ),
        (
            Context(
                source=replace(
                    SOURCE,
                    item=replace(ITEM, unlisted_since=LATER),
                    guard={"missing": 80, "published": 100, "at": LATER.isoformat()},
                )
            ),
            "nothing is deleted until you run `penstock connector run wiki --allow-mass-delete`",
        ),
        (Context(superseded=(2,)), "version 2 was observed later, but lost to version 3"),
        (Context(differences=(StoreDifference("g1", "keywords", "orphan", "surplus", 1),)), "no query shows that"),
        (Context(away=("Kafka: refused",)), "not checked: Kafka: refused"),
    ],
)
def test_a_searchable_document_gets_a_note_for_each_problem_around_it(context: Context, note: str) -> None:
    verdict = judge(WELL, context)
    assert verdict.searchable
    assert any(note in item for item in verdict.notes), verdict.notes


def test_a_document_that_matches_its_source_gets_no_note() -> None:
    assert judge(WELL, Context(source=replace(SOURCE, item=ITEM), queues=(DETECT,))).notes == ()


def test_a_stale_event_and_another_generation_are_noted() -> None:
    stale = replace(WELL, events=(CREATED, Event(LATER, "document.upserted.v1", "stale", 2, AT, 7, "live")))
    assert "was stale" in judge(stale).notes[0]
    other = GenerationProgress("g0", False, 2, SETTLED, SETTLED, "previous")
    waits = story(PENDING)
    verdict = judge(replace(waits, generations=(*waits.generations, other)))
    assert verdict.notes == ("generation g0 (previous) holds it, but queries use g1",)


def test_a_document_ingested_by_hand_is_described_in_terms_of_penstock_ingest() -> None:
    """No connector is paused, away or asked: a person ran a command."""
    verdict = judge(WELL, INGESTED)
    assert verdict.notes == (
        "`penstock ingest` cannot publish its present content (broken: is damaged): the stores hold older content",
    )
    assert INGESTED.source is not None
    assert INGESTED.source.item is not None
    sound = replace(INGESTED.source.item, version=3, problem_code=None)
    queued = judge(NOTHING, replace(INGESTED, source=replace(INGESTED.source, item=sound)))
    assert (queued.state, "penstock ingest` published version 3" in queued.reason) == ("queued", True)
    gone = replace(WELL, document=replace(DOCUMENT, deleted_at=LATER))
    assert judge(gone, INGESTED).next == "publish it again from source wiki"
