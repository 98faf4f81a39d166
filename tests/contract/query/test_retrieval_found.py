"""Results of a search on real servers: by identifier, as whole passages, beyond withheld ones, or none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.core.errors import Retryable
from query.embedding.embedders import QueryEmbedder
from query.model import MODES, Mode
from query.retrieval import ranking
from query.retrieval import search as retrieval
from query.retrieval import stores as offers
from query.retrieval.search import Search, Timeouts
from tests.support.query.library import Library, WordEmbedder, access, deletion, document
from tests.support.query.retrieval_kit import find, names

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


# Identifiers

NAMED = ("PROJ-4821", "ERR_CONN_RESET", "0x80070057", "config.yaml", "src/app/main.py", "v2.3.1")


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("mode", ["hybrid", "keyword"])
async def test_the_document_with_the_exact_identifier_is_ranked_first(
    library: Library, tenant: str, name: str, mode: Mode
) -> None:
    """Decoys hold its parts more often, or something that only looks like it."""
    parts = re.sub(r"[-_/.]|(?<=\dx)", " ", name)
    cut, longer = name[:-1], f"{name}7"
    await library.put(
        document("parts.md", f"How to fix it: {parts}. " * 6, tenant=tenant),
        document("cut.md", f"How to fix {cut}: " * 4, tenant=tenant, title=f"Fix {parts}"),
        document("longer.md", f"How to fix {longer} and {longer}.", tenant=tenant),
        document("around.md", f"How to fix x{name} and {name}_b.", tenant=tenant),
        document("it.md", f"Among many other words of a long report somebody mentions {name} once.", tenant=tenant),
    )
    for query in (name, f"how to fix {name}?", f"how to fix ({name.lower()})"):
        assert names(await find(library, tenant, query, mode=mode))[0] == "it.md", query


async def test_an_identifier_is_searchable_by_its_parts_and_its_path_suffix(library: Library, tenant: str) -> None:
    await library.put(
        document("a.md", "The start is in services/gateway/bootstrap.py now.", tenant=tenant),
        document("b.md", "It ends with ERR_SOCKET_CLOSED.", tenant=tenant),
        document("c.md", "Nothing of the kind.", tenant=tenant),
    )
    for query, expected in (
        ("bootstrap.py", "a.md"),
        ("gateway/bootstrap.py", "a.md"),
        ("bootstrap", "a.md"),
        ("socket closed", "b.md"),
    ):
        assert names(await find(library, tenant, query, mode="keyword"))[0] == expected, query


# As whole passages


async def test_neighbouring_chunks_are_merged_into_one_result_without_repeated_text(
    library: Library, tenant: str
) -> None:
    sentences = [f"Sentence {n} tells of the weir number {n} and of its gate." for n in range(40)]
    text = " ".join(sentences)
    await library.put(document("long.md", text, tenant=tenant), document("b.md", "A weir elsewhere.", tenant=tenant))
    response = await find(library, tenant, "weir gate sentence", top=5)
    merged = [r for r in response.results if len(r.chunk_ids) > 1]
    assert merged
    for result in merged:
        assert result.passage.external_id == "long.md"
        assert result.text in text, "in reading order, and what both chunks hold stands once"
    manifest = await library.execute(
        "SELECT m.chunk_ids FROM manifests m JOIN documents d ON d.id = m.document_id"
        " WHERE d.tenant = %s AND d.external_id = 'long.md'",
        tenant,
    )
    order = {chunk: n for n, chunk in enumerate(manifest[0][0])}
    places = [order[chunk] for chunk in merged[0].chunk_ids]
    assert places == list(range(places[0], places[0] + len(places)))


async def test_identical_passages_of_other_documents_are_listed_only_if_readable(library: Library, tenant: str) -> None:
    text = "The tide table of the harbour is kept by the harbour master and printed twice a year in the small office."
    await library.put(
        document("one.md", text, tenant=tenant, title="One"),
        document("two.md", text, tenant=tenant, title="Two"),
        document("secret.md", text, tenant=tenant, title="Secret", acl_tags=["board"]),
    )
    [result] = (await find(library, tenant, "tide table harbour master")).results
    assert sorted([result.passage.title, *(twin.title for twin in result.also)]) == ["One", "Two"]
    both = await library.caller(tenant, "staff", "board")
    [result] = (await library.search.search("tide table harbour master", both)).results
    assert len(result.also) == 2


async def test_many_identical_passages_do_not_hide_the_results_after_them(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "CANDIDATES", 4)
    monkeypatch.setattr(retrieval, "SPARE", 1)
    notice = "Quay notice: the quay is closed, the quay is closed, the quay is closed."
    copies = [document(f"copy{n}.md", notice, tenant=tenant, title="Notice") for n in range(30)]
    others = [
        document(f"o{n}.md", f"Plan {n} mentions one quay among quite a few words.", tenant=tenant) for n in (1, 2)
    ]
    await library.put(*copies, *others)
    for mode in MODES:
        response = await find(library, tenant, "quay closed", mode=mode, top=3)
        assert sorted(names(response)[1:]) == ["o1.md", "o2.md"], mode
        assert len(response.results[0].also) == 29


# Nothing relevant


async def test_an_unrelated_question_is_reported_as_not_relevant_without_results(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "MEASURED", {"words": 0.5})  # words in common are a cosine here
    await library.put(document("a.md", "Cranes lift containers from the quay.", tenant=tenant))
    noise = await find(library, tenant, "bread recipe with cranes")
    assert (noise.relevant, names(noise)) == (False, [])
    [step] = [step for step in noise.steps if step.name == "confidence"]
    assert step.facts["relevant"] is False
    right = await find(library, tenant, "cranes lift containers")
    assert (right.relevant, names(right)) == (True, ["a.md"])
    assert names(await find(library, tenant, "containers")) == ["a.md"], "all of the question's words stand there"


# Past what is withheld


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["deleted", "revoked", "edited"])
async def test_many_withheld_candidates_do_not_hide_the_readable_results(
    library: Library, tenant: str, mode: Mode, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stores still offer all of them, and first."""
    monkeypatch.setattr(retrieval, "CANDIDATES", 4)
    monkeypatch.setattr(retrieval, "SPARE", 1)
    monkeypatch.setattr(offers, "MAX_CANDIDATES_PER_ROUND", 10)
    gone = [document(f"g{n}.md", f"Beacon beacon beacon {n}.", tenant=tenant) for n in range(45)]
    left = [
        document(f"left{n}.md", f"Note {n} mentions a beacon once among quite a few other words.", tenant=tenant)
        for n in range(3)
    ]
    await library.put(*gone, *left)
    moved: dict[str, Sequence[Any]] = {
        "deleted": [deletion(d) for d in gone],
        "revoked": [access(d, ["board"]) for d in gone],
        "edited": [document(d.external_id, "Something else altogether.", tenant=tenant) for d in gone],
    }
    await library.accept(*moved[how])
    assert sorted(names(await find(library, tenant, "beacon", mode=mode, top=3))) == sorted(d.external_id for d in left)


async def test_a_store_that_offers_only_withheld_candidates_times_out_as_degraded(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "CANDIDATES", 2)
    monkeypatch.setattr(retrieval, "SPARE", 1)
    monkeypatch.setattr(offers, "MAX_CANDIDATES_PER_ROUND", 3)
    gone = [document(f"g{n}.md", f"Buoy buoy buoy {n}.", tenant=tenant) for n in range(12)]
    await library.put(*gone, document("left.md", "A note on some buoy among quite a few other words.", tenant=tenant))
    await library.accept(*(deletion(d) for d in gone))
    impatient = Search(library.pool, library.es, QueryEmbedder(WordEmbedder), timeouts=Timeouts(keywords=5, vectors=5))
    monkeypatch.setattr(offers, "perf_counter", iter(range(0, 10_000, 100)).__next__)
    response = await find(library, tenant, "buoy", top=1, search=impatient)
    assert names(response) == ["left.md"]
    assert response.degraded == ("Elasticsearch did not answer within 10 s",)
    with pytest.raises(Retryable, match="within 10 s"):
        await find(library, tenant, "buoy", top=1, mode="keyword", search=impatient)
