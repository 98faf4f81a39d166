"""The material of an answer, on real servers: every mode, its limits, and notes about what is missing."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from pipeline.core.identity import document_id
from pipeline.embedding.tokens import byte_pairs
from pipeline.runtime.settings import ElasticsearchSettings
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Connection
from query.access.callers import Caller
from query.access.filters import Filters
from query.embedding.embedders import QueryEmbedder
from query.model import BadQuery
from query.modes import documents as reading
from query.modes import gather as gathering
from query.modes import survey as surveying
from query.modes.budget import PASSAGE_TOKENS
from query.modes.decide import Coverage
from query.modes.documents import ChunkedDocument
from query.modes.gather import Modes
from query.modes.material import Material, Question
from query.modes.survey import ReadScope, coverage
from query.retrieval.search import Search
from query.settings import ChatSettings, RetrievalSettings
from tests.support.query.leak_paths import BrokenModel
from tests.support.query.library import Library, WordEmbedder, access, deletion, document
from topics.messages import DocumentUpserted

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

START = datetime(2026, 5, 1, tzinfo=UTC)


def modes(
    library: Library, *, budget: int = 30_000, personal: str = "", search: Search | None = None, window: int = 128_000
) -> Modes:
    settings = RetrievalSettings(
        standard_tokens=budget, extended_tokens=5 * budget, personal_sources=frozenset({personal} - {""})
    )
    return Modes(search or library.search, library.pool, settings, ChatSettings(window_tokens=window))


async def gather(library: Library, caller: Caller, question: Question | None = None, **settings: object) -> Material:
    return await modes(library, **settings).gather(question or Question("tide of the harbour"), caller, "standard")  # type: ignore[arg-type]


def note(tenant: str, n: int, words: int = 60, **fields: object) -> DocumentUpserted:
    """About ``words`` tokens; the larger n, the newer."""
    text = f"# Note {n}\n\n" + f"tide{n} harbour " * (words // 2)
    return document(f"{n}.md", text, tenant=tenant, source_modified_at=START + timedelta(days=n), **fields)


def documents_of(material: Material) -> list[str]:
    return list(dict.fromkeys(r.passage.external_id for r in material.passages))


def step(material: Material, name: str) -> dict[str, object]:
    [one] = [s for s in material.steps if s.name == name]
    return dict(one.facts)


def id_of(event: DocumentUpserted) -> UUID:
    return document_id(event.tenant, event.source, event.external_id)


# Whole documents


async def test_documents_that_fit_the_budget_are_read_whole_in_reading_order(library: Library, tenant: str) -> None:
    long = "# A\n\n" + "".join(f"## Part {n}\n\n" + f"Berth {n} of the harbour. " * 60 for n in range(6))
    notes = [note(tenant, 1), note(tenant, 2), document("0.md", long, tenant=tenant, source_modified_at=START)]
    await library.put(*notes)
    response = await gather(library, await library.caller(tenant, "staff"))
    assert (response.mode, response.whole, response.relevant, response.notes) == ("long_context", True, True, [])
    assert documents_of(response) == ["2.md", "1.md", "0.md"], "the newest first"
    read = "".join(r.text for r in response.passages if r.passage.external_id == "0.md")
    assert "".join(read.split()) == "".join(long.split()), "every word once, whatever chunks repeat"
    assert [r.passage.chunk_index for r in response.passages if r.passage.external_id == "0.md"] == list(
        range(len(response.passages) - 2)
    )
    assert response.passages[0].headings == ("Note 2",)
    assert step(response, "long_context") | {"tokens": 0} == {
        "budget_tokens": 30_000,
        "fits": True,
        "documents": 3,
        "tokens": 0,
    }
    assert step(response, "mode")["mode"] == "long_context"
    counted = sum(byte_pairs().count([r.text for r in response.passages])) + PASSAGE_TOKENS * len(response.passages)
    assert step(response, "read") == {
        "documents": 3,
        "passages": len(response.passages),
        "tokens": counted,
        "budget_tokens": 30_000,
    }


async def test_slightly_more_than_fits_the_budget_keeps_the_newest_documents_with_a_note(
    library: Library, tenant: str
) -> None:
    await library.put(*(note(tenant, n) for n in range(10)))
    caller = await library.caller(tenant, "staff")
    size = step(await gather(library, caller), "long_context")["tokens"]
    assert isinstance(size, int)
    response = await gather(library, caller, budget=round(size / 1.2))
    assert response.mode == "long_context"
    kept = documents_of(response)
    assert kept == [f"{n}.md" for n in range(9, 9 - len(kept), -1)]
    assert 4 <= len(kept) < 10
    [said] = response.notes
    assert said.startswith(f"the newest {len(kept)} of 10 documents fit")
    assert step(response, "read")["tokens"] <= round(size / 1.2)  # type: ignore[operator]
    assert (await gather(library, caller, budget=round(size / 1.4))).mode == "hybrid"


async def test_the_budget_never_exceeds_the_chat_models_window(library: Library, tenant: str) -> None:
    await library.put(*(note(tenant, n, 400) for n in range(8)))
    caller = await library.caller(tenant, "staff")
    assert (await gather(library, caller)).mode == "long_context"
    small = await gather(library, caller, window=3_000)
    assert small.mode == "hybrid"
    assert (
        step(small, "long_context") == {"budget_tokens": 971, "fits": False, "more": True}
        or step(small, "long_context")["budget_tokens"]
        == 3_000 - 1_024 - 1_000 - byte_pairs().count(["tide of the harbour"])[0]
    )


async def test_a_caller_of_the_extended_class_has_a_larger_budget(library: Library, tenant: str) -> None:
    await library.put(*(note(tenant, n, 200) for n in range(6)))
    caller = await library.caller(tenant, "staff")
    one = modes(library, budget=600)
    assert (await one.gather(Question("tide"), caller, "standard")).mode == "hybrid"
    assert (await one.gather(Question("tide"), caller, "extended")).mode == "long_context"


async def test_a_collection_or_filters_limit_what_is_read(library: Library, tenant: str) -> None:
    await library.put(
        note(tenant, 1), note(tenant, 2, source="drive", author="ann"), note(tenant, 3, source="drive", author="bob")
    )
    caller = await library.caller(tenant, "staff")
    for question, expected in (
        (Question("q", collection="drive"), ["3.md", "2.md"]),
        (Question("q", collection="nosuch"), []),
        (Question("q", filters=Filters(authors=("ann",))), ["2.md"]),
        (Question("q", filters=Filters(media_types=("text/*",))), ["3.md", "2.md", "1.md"]),
        (Question("q", filters=Filters(media_types=("image/*",))), []),
        (Question("q", filters=Filters(since=START + timedelta(days=2))), ["3.md", "2.md"]),
        (Question("q", filters=Filters(before=START + timedelta(days=2))), ["1.md"]),
    ):
        gathered = await gather(library, caller, question)
        assert (gathered.mode, documents_of(gathered)) == ("long_context", expected), question
        assert gathered.relevant == bool(expected)


# Named documents


async def test_documents_named_in_a_question_are_read_whole_in_that_order(library: Library, tenant: str) -> None:
    notes = [note(tenant, n, 300) for n in range(4)]
    await library.put(*notes)
    caller = await library.caller(tenant, "staff")
    named = Question("tide", documents=tuple(id_of(n) for n in (notes[2], notes[0], notes[2])))
    response = await gather(library, caller, named, budget=400)
    assert (response.mode, response.whole) == ("focused", True)
    assert documents_of(response) == ["2.md"]
    [said] = response.notes
    assert said == "1 of 2 documents fit, the last one without its end, the budget of 400 tokens" or said.startswith(
        "1 of 2 documents fit"
    )
    response = await gather(library, caller, named)
    assert documents_of(response) == ["2.md", "0.md"]
    assert response.notes == []
    explicit = await gather(library, caller, Question("tide", mode="hybrid", documents=named.documents))
    assert set(documents_of(explicit)) == {"0.md", "2.md"}
    assert explicit.mode == "hybrid"


async def test_naming_an_unreadable_document_gives_the_same_result_as_naming_a_missing_one(
    library: Library, tenant: str
) -> None:
    other = f"{tenant}-other"
    readable, secret, foreign, gone = (
        note(tenant, 1),
        note(tenant, 2, acl_tags=["board"]),
        note(other, 3),
        note(tenant, 4),
    )
    revoked, restricted = note(tenant, 5), note(tenant, 6, required_tags=["restriction"])
    await library.put(readable, secret, foreign, gone, revoked, restricted)
    await library.accept(deletion(gone), access(revoked, ["board"]))
    caller = await library.caller(tenant, "staff")

    async def response_of(unknown: UUID) -> tuple[object, ...]:
        response = await gather(library, caller, Question("tide", documents=(id_of(readable), unknown)))
        return documents_of(response), response.notes, [(s.name, s.facts) for s in response.steps], response.relevant

    expected = await response_of(uuid4())
    assert expected[:2] == (["1.md"], ["1 of the 2 documents named could not be found among what you may read"])
    for event in (secret, foreign, gone, revoked, restricted):
        assert await response_of(id_of(event)) == expected
    nothing = await gather(library, caller, Question("tide", documents=(id_of(secret),)))
    assert (list(nothing.passages), nothing.relevant) == ([], False)
    assert nothing.notes == ["the document named could not be found among what you may read"]
    assert documents_of(await gather(library, caller)) == ["1.md"]


async def test_of_very_long_documents_is_read_what_may_have_room(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen documents of 20,000 chunks each kept everybody else waiting for two seconds, of which one had room."""
    lines = "".join(f"- berth {n}\n" for n in range(16_000))
    long = [document(f"{n}.md", f"{n}\n\n{lines}", tenant=tenant, media_type="text/markdown") for n in range(4)]
    ids = await library.accept(*long, note(tenant, 9))
    caller = await library.caller(tenant, "staff")
    read, portions = reading.read, list[list[int]]()

    async def watched(*given: Any, **named: Any) -> list[ChunkedDocument]:
        documents = await read(*given, **named)
        portions.append([len(d.parts) for d in documents])
        return documents

    monkeypatch.setattr(reading, "read", watched)
    named = Question("berth", documents=(ids[4], *ids[:4]))
    small = await gather(library, caller, named, budget=6_400)
    assert portions == [[1, 101, 101, 101, 101]], "a passage counts as 64 tokens at least"
    assert documents_of(small) == ["9.md", "0.md"]
    assert small.notes == ["2 of 5 documents fit, the last one without its end, the budget of 6400 tokens"]
    portions.clear()
    monkeypatch.setattr(reading, "CHUNKS_PER_STATEMENT", 250)
    assert (await gather(library, caller, named, budget=6_400)).passages == small.passages
    assert portions == [[1, 101, 101]]


# What has no embedding yet


async def test_documents_not_yet_in_any_store_are_read_whole(library: Library, tenant: str) -> None:
    await library.accept(note(tenant, 1))
    gathered = await gather(library, await library.caller(tenant, "staff"))
    assert (gathered.mode, documents_of(gathered)) == ("long_context", ["1.md"])


async def test_with_more_than_20_percent_not_embedded_documents_are_read_whole_or_by_keyword(
    library: Library, tenant: str
) -> None:
    """4 of 20 are 20 %: still found by both. 5 of 21 are more."""
    await library.put(*(note(tenant, n, 120) for n in range(16)))
    caller = await library.caller(tenant, "staff")
    await library.keywords.converge(
        library.generation, await library.accept(*(note(tenant, n, 120) for n in range(16, 20)))
    )
    tokens = step(await gather(library, caller), "long_context")["tokens"]
    assert isinstance(tokens, int)
    tight = round(tokens / 3)

    response = await gather(library, caller, budget=tight)
    assert (response.mode, response.notes) == ("hybrid", [])
    assert step(response, "embedded") == {"missing_percent": 20, "chunks": 20, "missing": 4}

    ids = await library.accept(note(tenant, 20, 120))
    await library.keywords.converge(library.generation, ids)
    response = await gather(library, caller, Question("tide20 harbour"), budget=tight)
    assert (response.mode, documents_of(response)[0]) == ("keyword", "20.md")
    assert response.notes == ["24 % of the passages have no embedding yet: only keyword search was used"]
    assert step(response, "embedded") == {"missing_percent": 24, "chunks": 21, "missing": 5}

    trimmed = await gather(library, caller, budget=round(tokens / 1.5))
    assert (trimmed.mode, documents_of(trimmed)[0]) == ("long_context", "20.md")
    assert trimmed.notes[0].startswith("the newest ")
    assert trimmed.notes[1:] == ["24 % of the passages have no embedding yet"]

    await library.converge(*ids)
    assert (await gather(library, caller, budget=tight)).mode == "hybrid"


async def test_pending_documents_of_others_do_not_affect_the_callers_mode(library: Library, tenant: str) -> None:
    await library.put(*(note(tenant, n, 120) for n in range(10)))
    caller = await library.caller(tenant, "staff")
    before = await gather(library, caller, budget=300)
    await library.accept(*(note(tenant, n, 120, acl_tags=["board"]) for n in range(50, 70)))
    after = await gather(library, caller, budget=300)
    assert before.mode == after.mode == "hybrid"
    assert step(before, "embedded") == step(after, "embedded") == {"missing_percent": 0, "chunks": 10, "missing": 0}


async def test_an_edit_counts_only_its_changed_chunks_as_not_embedded(library: Library, tenant: str) -> None:
    long = [f"## Part {n}\n\n" + f"Berth {n} of the harbour has {n} cranes. " * 40 for n in range(12)]
    await library.put(document("a.md", "\n\n".join(long), tenant=tenant))
    await library.accept(document("a.md", "\n\n".join([*long[:11], "## Part 11\n\nNew words."]), tenant=tenant))
    gathered = await gather(library, await library.caller(tenant, "staff"), budget=300)
    facts = step(gathered, "embedded")
    assert facts["missing"] in (1, 2)
    assert gathered.mode == "hybrid"


# Found passages


async def test_a_personal_collection_is_searched_by_vector_and_by_recency(library: Library, tenant: str) -> None:
    await library.put(*(note(tenant, n, 60, source="diary") for n in range(60)), note(tenant, 99))
    caller = await library.caller(tenant, "staff")
    response = await gather(library, caller, Question("tide7", collection="diary"), budget=300, personal="diary")
    assert (response.mode, response.whole, response.notes) == ("semantic", False, [])
    assert response.budget_tokens == 300, "of the caller's class, and not that of a few passages"
    names = [r.passage.external_id for r in response.passages]
    assert len(names) == len(set(names)), "found by both is shown once"
    assert "99.md" not in names
    assert {f"{n}.md" for n in range(50, 60)} <= set(names), "the ten newest"
    assert names[0] == "7.md"
    assert 40 <= len(names) <= 50
    assert names[4] in {f"{n}.md" for n in range(50, 60)}, "a small context holds something new"
    other = await gather(library, caller, Question("tide7"), budget=300, personal="diary")
    assert (other.mode, other.budget_tokens) == ("hybrid", None), "not all of it is personal"


async def pumps(library: Library, tenant: str) -> Caller:
    """Forty old reports, a new one that says less about it, and a newer one that only the board may read."""
    now = datetime.now(UTC)
    text = "Report {}: the pump of the reactor. The pump of the reactor was serviced. "
    reports = [
        document(f"{n}.md", text.format(n) * 4, tenant=tenant, source_modified_at=now - timedelta(days=400 + n))
        for n in range(40)
    ]
    leak = "In the canteen somebody read this report aloud: a pump of the reactor leaks. Soup was served. " * 4
    await library.put(
        *reports,
        document("leak.md", leak, tenant=tenant, source_modified_at=now - timedelta(hours=2)),
        document("board.md", leak, tenant=tenant, source_modified_at=now - timedelta(hours=1), acl_tags=["board"]),
        document("menu.md", "Soup, bread and cheese.", tenant=tenant, source_modified_at=now - timedelta(minutes=9)),
    )
    return await library.caller(tenant, "staff")


async def test_a_question_for_what_is_new_also_gets_the_newest_passages_about_it(library: Library, tenant: str) -> None:
    """Without configuration, in a collection that is not personal."""
    caller = await pumps(library, tenant)
    plain = await gather(library, caller, Question("Report on the pump of the reactor", "hybrid", top=5))
    assert ("leak.md" in documents_of(plain), plain.budget_tokens) == (False, None)
    assert "recent" not in [s.name for s in plain.steps]
    latest = await gather(library, caller, Question("The latest report on the pump of the reactor", "hybrid", top=5))
    assert "leak.md" in documents_of(latest)
    assert not {"menu.md", "board.md"} & set(documents_of(latest))
    assert (step(latest, "recent")["asks"], step(latest, "recent")["passages"]) == ("latest", len(latest.passages) - 5)
    assert latest.budget_tokens == 30_000, "all of them reach the model"
    assert latest.passages[4].passage.external_id == "leak.md", "a small context holds something new"


async def test_a_named_time_adds_the_passages_of_that_time_and_excludes_none(library: Library, tenant: str) -> None:
    caller = await pumps(library, tenant)
    response = await gather(
        library, caller, Question("Report on the pump of the reactor in the last 3 days", "hybrid", top=5)
    )
    assert len(documents_of(response)) == 6
    assert set(documents_of(response)) > {"leak.md"}
    facts = step(response, "recent")
    assert (facts["asks"], facts["passages"]) == ("in the last 3 days", 1)
    assert {"since", "before"} <= facts.keys()
    anything = await gather(library, caller, Question("What happened in the last 3 days?", "hybrid"))
    assert {"menu.md", "leak.md"} <= set(documents_of(anything)), "without a topic: the newest of any"
    past = Filters(before=datetime.now(UTC) - timedelta(days=30))
    filtered = Question("Report on the pump of the reactor in the last 3 days", "hybrid", filters=past, top=5)
    response = await gather(library, caller, filtered)
    assert step(response, "recent")["passages"] == 0
    assert "leak.md" not in documents_of(response)


async def test_without_the_model_a_personal_collection_is_searched_by_keyword_with_a_note(
    library: Library, tenant: str
) -> None:
    await library.put(*(note(tenant, n, 60, source="diary") for n in range(12)))
    caller = await library.caller(tenant, "staff")
    search = Search(library.pool, library.es, QueryEmbedder(BrokenModel))
    question = Question("tide7", collection="diary")
    response = await gather(library, caller, question, budget=300, personal="diary", search=search)
    assert response.mode == "keyword"
    assert "7.md" in documents_of(response)
    assert response.notes == ["keyword search was used instead of vector search: the model is overloaded (429)"]
    assert step(response, "semantic")["degraded"] is True
    assert step(response, "mode")["mode"] == "semantic"


async def test_without_elasticsearch_the_mode_still_gathers_passages_with_a_note(library: Library, tenant: str) -> None:
    await library.put(*(note(tenant, n, 60) for n in range(12)))
    caller = await library.caller(tenant, "staff")
    away = connect(ElasticsearchSettings(url="http://127.0.0.1:1"))
    search = Search(library.pool, away, QueryEmbedder(WordEmbedder))
    response = await gather(library, caller, Question("tide7"), budget=300, search=search)
    await away.close()
    assert (response.mode, documents_of(response)[0]) == ("hybrid", "7.md")
    assert any("Elasticsearch cannot be reached" in said for said in response.notes)


@pytest.mark.parametrize("mode", ["hybrid", "keyword", "vector", "semantic", "long_context"])
async def test_an_explicitly_requested_mode_is_used(library: Library, tenant: str, mode: str) -> None:
    await library.put(*(note(tenant, n, 60) for n in range(12)))
    caller = await library.caller(tenant, "staff")
    response = await gather(library, caller, Question("tide7", mode=mode), budget=400)  # type: ignore[arg-type]
    assert response.mode == mode
    assert step(response, "mode") == {"mode": mode, "reason": "requested"}
    assert "embedded" not in [s.name for s in response.steps]
    if mode == "long_context":
        assert documents_of(response)[0] == "11.md"
        assert response.notes[0].startswith("the newest ")
    else:
        assert "7.md" in documents_of(response)


@pytest.mark.parametrize("question", [Question(""), Question("q", mode="focused"), Question("q", top=0)])
async def test_an_invalid_question_is_rejected(library: Library, question: Question) -> None:
    with pytest.raises(BadQuery):
        await gather(library, Caller("t", frozenset()), question)


async def test_a_caller_without_tags_gets_no_passages(library: Library, tenant: str) -> None:
    await library.put(note(tenant, 1), note(tenant, 2, acl_tags=[]))
    for caller in (Caller(tenant, frozenset()), await library.caller(tenant, "nosuch"), Caller("x", frozenset())):
        for question in (Question("tide"), Question("tide", mode="hybrid"), Question("tide", mode="long_context")):
            gathered = await gather(library, caller, question)
            assert list(gathered.passages) == []


# What cannot be found out, or not yet


async def test_more_documents_than_the_survey_limit_rule_out_long_context(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveying, "FIRST_SURVEY_DOCUMENTS", 2)
    monkeypatch.setattr(surveying, "MAX_SURVEYED_DOCUMENTS", 5)
    await library.put(*(note(tenant, n, source="diary") for n in range(6)))
    caller = await library.caller(tenant, "staff")
    gathered = await gather(library, caller)
    assert (gathered.mode, step(gathered, "long_context")) == (
        "hybrid",
        {"budget_tokens": 30_000, "fits": False, "more": True},
    )
    with pytest.raises(BadQuery, match="name a collection or documents"):
        await gather(library, caller, Question("tide", mode="long_context"))
    personal = await gather(library, caller, Question("tide3", collection="diary"), personal="diary")
    assert personal.mode == "semantic"
    assert [said for said in personal.notes if "documents are not included" in said]
    assert step(personal, "recent")["degraded"] is True
    monkeypatch.setattr(surveying, "MAX_SURVEYED_DOCUMENTS", 6)
    assert len(documents_of(await gather(library, caller))) == 6


async def test_a_locked_ledger_delays_the_choice_of_mode_only_briefly(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await library.put(note(tenant, 1))
    caller = await library.caller(tenant, "staff")
    monkeypatch.setattr(gathering, "SURVEY_SECONDS", 0.2)
    given_up = asyncio.Event()

    async def looking(connection: Connection, scope: ReadScope) -> Coverage:
        try:
            return await coverage(connection, scope)
        finally:
            given_up.set()

    monkeypatch.setattr(gathering, "coverage", looking)
    async with library.pool.connection() as holding:
        await holding.execute("LOCK TABLE manifests IN ACCESS EXCLUSIVE MODE")
        task = asyncio.create_task(gather(library, caller))
        task.add_done_callback(lambda _: given_up.set())  # also where no connection was free in time
        await given_up.wait()
        await holding.rollback()
    response = await task
    assert (response.mode, documents_of(response)) == ("hybrid", ["1.md"])
    assert response.notes[0].startswith(
        "it could not be determined whether everything fits the budget: counting what may be read"
    )
    assert response.notes[1].startswith(
        "it could not be determined how many passages are embedded: counting what is embedded"
    )
    assert step(response, "long_context")["degraded"] is step(response, "embedded")["degraded"] is True


async def test_a_document_not_yet_chunked_is_noted_as_missing(library: Library, tenant: str) -> None:
    notes = [note(tenant, 1), note(tenant, 2)]
    await library.put(*notes)
    await library.execute("UPDATE manifests SET content_hash = '\\x00' WHERE document_id = %s", id_of(notes[0]))
    response = await gather(library, await library.caller(tenant, "staff"))
    assert documents_of(response) == ["2.md"]
    assert response.notes == ["1 document changed a moment ago and cannot be read yet"]
