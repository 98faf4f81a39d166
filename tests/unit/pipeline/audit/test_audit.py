"""The audit's comparison, and how the command reads times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from cli.moment import past_moment
from pipeline.audit.background import rest_seconds
from pipeline.audit.compare import KINDS, MEANING, Desired, Difference, Entry, Print, Row, State, compare, describe
from pipeline.audit.repair import without_embedding
from pipeline.core.identity import chunk_ids, content_hash, document_id
from pipeline.core.model import ChunkParams, Manifest
from pipeline.ledger.documents import Identity
from pipeline.ledger.entry import entries
from pipeline.ledger.work import Work
from pipeline.runtime.settings import AuditSettings

ID = document_id("t", "s", "x")
BODY = "One.\nTwo.\nThree."
SPANS = (((0, 4),), ((5, 9),), ((0, 4), (10, 16)))
TEXTS = ["One.", "Two.", "One.Three."]
CHUNKS = chunk_ids(ID, TEXTS, "Title")
SETTLED = State(5, 5)
PARAMS = ChunkParams()


def work(**changes: Any) -> Work:
    manifest = Manifest(content_hash(BODY), CHUNKS, SPANS, (1, 1, 2), (("A",), (), ("A", "B")))
    return replace(
        Work(
            Identity(ID, "t", "s", "x"),
            5,
            True,
            content_hash(BODY),
            7,
            ("s/staff",),
            (),
            "Title",
            None,
            None,
            "text/plain",
            None,
            manifest,
            "live",
            (),
            {},
            (),
            0,
        ),
        **changes,
    )


def desired(w: Work | None = None, body: str | None = BODY, params: ChunkParams = PARAMS, **states: State) -> Desired:
    return describe(
        w or work(),
        5,
        states or {"vectors": SETTLED, "keywords": SETTLED},  # type: ignore[arg-type]  # keyword names are stores
        body,
        {"k": 1},
        params,
        alive=True,
        building=False,
    )


def rows() -> list[Row]:
    return [Row(ID, i, 7, content_hash(text)) for i, text in zip(CHUNKS, TEXTS, strict=True)]


def stored_entries(**fields: Any) -> list[Entry]:
    return [Entry(ID, i, 5, Print.of({**e, **fields})) for i, e in entries(work(), BODY, {"k": 1})]


def test_a_manifest_of_another_title_is_stale() -> None:
    stale = [Difference("ledger", "stale_manifest")]
    assert compare(desired(work(title="Another")), rows(), stored_entries()) == stale
    assert compare(desired(params=ChunkParams(version=1)), rows(), stored_entries()) == stale


def test_stores_that_match_the_ledger_have_no_difference() -> None:
    assert compare(desired(), rows(), stored_entries()) == []
    assert set(desired().chunks) == set(CHUNKS)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"acl_tags": ["s/all"]}, "wrong_access"),
        ({"required_tags": []}, "wrong_access"),
        ({"required_count": 2}, "wrong_access"),
        ({"tenant": "u"}, "wrong_access"),
        ({"text": "Four."}, "wrong_text"),
        ({"title": "T"}, "wrong_entry"),
        ({"headings": ["Z"]}, "wrong_entry"),
        ({"identifiers": ["ERR_1"]}, "wrong_entry"),
        ({"metadata": {"k": 2}}, "wrong_entry"),
        ({"more": 1}, "wrong_entry"),
    ],
)
def test_a_differing_field_of_a_keyword_entry_is_reported_with_its_kind(fields: dict[str, Any], kind: str) -> None:
    assert [(d.store, d.kind, d.chunks) for d in compare(desired(), rows(), stored_entries(**fields))] == [
        ("keywords", kind, CHUNKS)
    ]


def test_a_row_of_another_tenant_than_its_documents_is_reported_and_one_without_is_not() -> None:
    of_tenants = [replace(row, tenant=tenant) for row, tenant in zip(rows(), ("t", None, "u"), strict=True)]
    assert compare(desired(), of_tenants, stored_entries()) == [Difference("vectors", "wrong_access", (CHUNKS[2],))]


def test_a_lone_surrogate_in_a_keyword_entry_is_a_difference_and_not_a_crash() -> None:
    assert [d.kind for d in compare(desired(), rows(), stored_entries(text="\ud800"))] == ["wrong_text"]
    assert [d.kind for d in compare(desired(), rows(), stored_entries(title="\ud800"))] == ["wrong_entry"]


def test_an_entry_may_be_of_an_older_version_and_a_newer_than_the_ledgers_is_reported_as_ahead() -> None:
    for version, kinds in ((1, []), (5, []), (6, ["ahead"])):
        entries_ = [replace(e, version=version) for e in stored_entries()]
        assert [d.kind for d in compare(desired(), rows(), entries_)] == kinds


def test_a_pending_store_is_not_compared_while_the_settled_one_is() -> None:
    pending = State(6, 5)
    assert compare(desired(vectors=pending, keywords=SETTLED), [], stored_entries()) == []
    assert compare(desired(vectors=pending, keywords=pending), [], []) == []
    [difference] = compare(desired(vectors=pending, keywords=SETTLED), [], [])
    assert (difference.store, difference.kind, len(difference.chunks)) == ("keywords", "missing", 3)


def test_a_store_without_a_recorded_state_is_a_difference_unless_its_generation_is_being_built() -> None:
    assert compare(desired(vectors=SETTLED), rows(), stored_entries()) == [Difference("keywords", "no_state")]
    building = replace(desired(vectors=SETTLED), building=True)
    assert compare(building, rows(), stored_entries()) == []
    assert building.pending, "a document that a new generation does not have yet"


def test_refused_chunks_are_not_missing() -> None:
    refused = State(5, 5, frozenset({CHUNKS[1]}))
    assert compare(desired(vectors=refused, keywords=SETTLED), [rows()[0], rows()[2]], stored_entries()) == []


def test_chunks_left_of_an_unsearchable_document_are_unknown_document_and_not_orphan() -> None:
    nobody = desired(work(acl_tags=(), searchable=False))
    differences = compare(nobody, rows()[:1], stored_entries()[:2])
    assert [(d.store, d.kind, len(d.chunks)) for d in differences] == [
        ("vectors", "unknown_document", 1),
        ("keywords", "unknown_document", 2),
    ]


@pytest.mark.parametrize("body", [None, "", BODY + "x"])
def test_a_body_with_the_wrong_hash_is_a_ledger_difference_and_texts_are_not_compared(body: str | None) -> None:
    rotten = desired(body=body)
    assert compare(rotten, rows(), stored_entries()) == [Difference("ledger", "rotten_body")]
    differences = compare(rotten, rows()[1:], stored_entries())
    assert {(d.store, d.kind) for d in differences} == {("ledger", "rotten_body"), ("vectors", "missing")}


def test_a_manifest_that_does_not_match_the_text_is_stale() -> None:
    good = work().manifest
    assert good is not None
    shifted = replace(good, spans=(((0, 3),), *SPANS[1:]))
    for manifest in (None, replace(good, content_hash=b"other"), shifted):
        assert compare(desired(work(manifest=manifest)), rows(), stored_entries()) == [
            Difference("ledger", "stale_manifest")
        ]
        assert (
            compare(desired(work(manifest=manifest), keywords=State(6, 5), vectors=SETTLED), rows(), stored_entries())
            == []
        )


def test_the_standing_differs_after_any_change_between_two_readings() -> None:
    before = desired().standing
    assert before == desired().standing
    for after in (
        replace(desired(), seq=6),
        desired(vectors=State(6, 6), keywords=SETTLED),
        desired(vectors=State(5, 4), keywords=SETTLED),
        desired(vectors=SETTLED),
    ):
        assert after.standing != before


SUBSETS = st.sets(st.integers(0, 2))


@given(SUBSETS, SUBSETS, st.integers(0, 3), st.integers(0, 3))
def test_every_missing_or_orphaned_chunk_is_counted_once(
    in_vectors: set[int], in_keywords: set[int], more_rows: int, more_entries: int
) -> None:
    surplus_rows = [Row(ID, uuid5(ID, f"r{n}"), 7, b"") for n in range(more_rows)]
    surplus = [Entry(ID, uuid5(ID, f"e{n}"), 5, stored_entries()[0].print) for n in range(more_entries)]
    differences = compare(
        desired(), [rows()[n] for n in in_vectors] + surplus_rows, [stored_entries()[n] for n in in_keywords] + surplus
    )
    counted: dict[tuple[str, str], Sequence[UUID]] = {(d.store, d.kind): d.chunks for d in differences}
    assert len(counted) == len(differences)
    expected = {
        ("vectors", "missing"): 3 - len(in_vectors),
        ("vectors", "orphan"): more_rows,
        ("keywords", "missing"): 3 - len(in_keywords),
        ("keywords", "orphan"): more_entries,
    }
    assert {key: len(ids) for key, ids in counted.items()} == {key: n for key, n in expected.items() if n}


def test_every_kind_of_difference_has_an_explanation() -> None:
    assert set(MEANING) == set(KINDS)


def test_a_past_moment_is_a_span_or_an_iso_time() -> None:
    two_hours = past_moment("2h")
    assert abs(datetime.now(UTC) - timedelta(hours=2) - two_hours) < timedelta(seconds=5)
    assert past_moment("2026-11-20T08:00:00+00:00") == datetime(2026, 11, 20, 8, tzinfo=UTC)
    naive = past_moment("2026-11-20T08:00")
    assert naive.tzinfo is not None
    for nonsense in ("yesterday", "2", "h", "-3h", "", "999999999w"):
        with pytest.raises(typer.BadParameter):
            past_moment(nonsense)


@pytest.mark.parametrize(
    ("documents", "worked_seconds", "rest"),
    [
        pytest.param(200, 0.05, 2 / 3, id="the pace"),
        pytest.param(200, 1.0, 3.0, id="a quarter of a processor"),
        pytest.param(0, 0.0, 0.0, id="nothing was there"),
    ],
)
def test_the_background_audit_rests_to_keep_its_pace_and_its_share_of_a_processor(
    documents: int, worked_seconds: float, rest: float
) -> None:
    assert rest_seconds(documents, worked_seconds, 300.0) == pytest.approx(rest)


def test_repair_without_embedding_skips_every_difference_of_a_store_that_needs_the_model() -> None:
    differences = {
        ("vectors", "missing"): (CHUNKS[0],),
        ("vectors", "wrong_access"): (CHUNKS[1],),
        ("keywords", "missing"): (CHUNKS[0],),
        ("ledger", "rotten_body"): (),
    }
    assert without_embedding(differences) == {("keywords", "missing"): (CHUNKS[0],), ("ledger", "rotten_body"): ()}
    assert without_embedding({("vectors", "wrong_access"): CHUNKS}) == {("vectors", "wrong_access"): CHUNKS}
    assert without_embedding({("ledger", "stale_manifest"): ()}) == {}


@pytest.mark.parametrize(
    ("said", "meant"), [("true", "all"), ("false", "none"), (True, "all"), ("without_embedding", "without_embedding")]
)
def test_former_boolean_values_of_the_repair_setting_are_still_accepted(said: Any, meant: str) -> None:
    assert AuditSettings(repair=said).repair == meant
