"""The pure parts of a preview: the document that an edit means, and how often a phrase occurs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from uuid import uuid4

import pytest

from pipeline.core.errors import Retryable
from pipeline.core.model import Manifest
from pipeline.stages.manifests import build_manifest
from query.access.callers import Caller
from query.evaluation.golden import Golden
from query.model import BadQuery, Passage, SearchResults, Step
from query.preview import overlaying
from query.preview.model import Edit, ProposedDocument
from query.preview.overlaying import LedgerDocument, match, overlay
from query.preview.preview import _ask
from query.retrieval import overlay as overlays
from query.retrieval.overlay import OverlaidStores, Overlay
from query.retrieval.scoring import (
    Analysed,
    AnalysedEntry,
    FieldStatistics,
    Gained,
    KeywordQuery,
    gained,
    sloppy_frequency,
    stored_length,
)
from query.retrieval.search import Search
from query.retrieval.stores import Stores, Timeouts
from tests.support.pipeline.generations import generation
from tests.support.query.library import WordEmbedder


def known(external_id: str, path: str | None = None) -> LedgerDocument:
    id_ = uuid4()
    return LedgerDocument(Passage(id_, id_, external_id, "wiki", external_id, None, 0), path, b"", Manifest(b""))


def matched(edit: Edit, *documents: LedgerDocument) -> list[tuple[str, str | None, bool]]:
    """Path, external id of the counterpart, and whether it is deleted."""
    return [
        (of.proposed.path, of.known and of.known.passage.external_id, of.proposed.content is None)
        for of in match(edit, documents)
    ]


def test_an_external_id_outweighs_a_path_and_a_path_an_id_that_equals_it() -> None:
    documents = known("a.md", "moved.md"), known("1", "a.md"), known("b.md")
    one = Edit("wiki", [ProposedDocument("a.md", "text", external_id="a.md")])
    assert matched(one, *documents) == [("a.md", "a.md", False)]
    assert matched(Edit("wiki", [ProposedDocument("a.md", "text")]), *documents) == [("a.md", "1", False)]
    assert matched(Edit("wiki", [ProposedDocument("b.md", "text")]), *documents) == [("b.md", "b.md", False)]
    assert matched(Edit("wiki", [ProposedDocument("c.md", "text")]), *documents) == [("c.md", None, False)]


def test_a_path_of_two_documents_is_refused() -> None:
    with pytest.raises(BadQuery, match="2 documents"):
        match(Edit("wiki", [ProposedDocument("a.md")]), [known("1", "a.md"), known("2", "a.md")])


async def test_an_edit_with_too_many_new_chunks_is_refused_before_the_rest_of_it_is_chunked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page of 1 MB that is a hundred times as long as text was chunked for a minute, and refused then."""
    monkeypatch.setattr(overlaying, "MAX_NEW_CHUNKS", 1)
    monkeypatch.setattr(overlaying, "MAX_CHARACTERS", 2_000)
    chunked = []

    def counting(*arguments: Any) -> Manifest:
        chunked.append(arguments[0])
        return build_manifest(*arguments)

    monkeypatch.setattr(overlaying, "build_manifest", counting)

    async def lay(*contents: str) -> None:
        edit = Edit("wiki", [ProposedDocument(f"{n}.html", c, "", "text/html") for n, c in enumerate(contents)])
        caller = Caller("acme", frozenset({"staff"}))
        await overlay(cast(Any, None), WordEmbedder(), generation(), caller, edit, match(edit, []))

    with pytest.raises(BadQuery, match="more than 1 new chunks"):
        await lay("<p>One.", "<p>Two.", "<p>Three.")
    assert len(chunked) == 2
    with pytest.raises(BadQuery, match=r"0\.html: its text has more than 2,000 characters"):
        await lay("<table><tr><td colspan=1000>x")
    assert len(chunked) == 2


@pytest.mark.parametrize(
    ("folder", "deleted"),
    [("guide", {"guide/b.md"}), ("guide/", {"guide/b.md"}), ("", {"guide/b.md", "guides.md"}), ("/srv", {"/srv/c.md"})],
)
def test_documents_below_a_folder_that_the_edit_lacks_are_deleted(folder: str, deleted: set[str]) -> None:
    edit = Edit("wiki", [ProposedDocument("guide/a.md", "text")], [folder])
    documents = [known("1", "guide/a.md"), known("2", "guide/b.md"), known("3", "guides.md"), known("/srv/c.md")]
    expected = deleted | ({"/srv/c.md"} if folder == "" else set())
    assert {path for path, _, is_deleted in matched(edit, *documents) if is_deleted} == expected


@pytest.mark.parametrize(
    ("positions", "frequency"),
    [
        ({"red": [0], "fox": [1]}, 1.0),
        ({"red": [0], "fox": [3]}, 1 / 3),
        ({"red": [1], "fox": [0]}, 1 / 3),
        ({"red": [0, 9], "fox": [1, 10]}, 2.0),
        ({"red": [0], "fox": [60]}, 0.0),
        ({"red": [0]}, 0.0),
    ],
)
def test_a_phrase_counts_less_the_further_its_words_are_moved(
    positions: dict[str, list[int]], frequency: float
) -> None:
    assert sloppy_frequency(["red", "fox"], positions) == pytest.approx(frequency)


def test_a_word_that_a_phrase_repeats_needs_as_many_places() -> None:
    assert sloppy_frequency(["to", "be", "or", "to"], {"to": [0], "be": [1], "or": [2]}) == 0.0
    assert sloppy_frequency(["to", "be", "or", "to"], {"to": [0, 3], "be": [1], "or": [2]}) == 1.0


def test_a_length_is_stored_in_one_byte() -> None:
    assert [stored_length(n) for n in (0, 23, 39, 40, 41, 42, 100, 1_000)] == [0, 23, 39, 40, 40, 42, 96, 984]


def entry(text: str) -> AnalysedEntry:
    words = text.split()
    positions = {word: [n for n, other in enumerate(words) if other == word] for word in words}
    return AnalysedEntry(uuid4(), Analysed({"text": positions, "text.exact": positions}), frozenset())


def keywords(text: str) -> KeywordQuery:
    positions = {word: [n] for n, word in enumerate(text.split())}
    statistics = dict.fromkeys(("text", "text.exact"), FieldStatistics(10, 100))
    query = Analysed({"text": positions, "text.exact": positions}, statistics)
    return KeywordQuery([("", query)], query, [], frozenset(), [])


def test_all_entries_of_an_edit_count_in_the_statistics() -> None:
    first, second = entry("red fox"), entry("red red hen")
    of_both = gained([first, second])
    assert of_both.statistics["text"] == FieldStatistics(2, 5)
    assert of_both.frequencies["text"] == {"red": 2, "fox": 1, "hen": 1}
    query = keywords("fox")
    assert (query.score(first, Gained()) or 0) > (query.score(first, of_both) or 0) > 0, "another entry has the word"
    assert query.score(second, of_both) is None


def test_an_edit_of_twice_as_many_chunks_takes_twice_as_long_to_score() -> None:
    def steps(count: int) -> int:
        with patch.object(Analysed, "length", autospec=True, side_effect=Analysed.length) as length:
            entries = [entry("the red fox") for _ in range(count)]
            new, query = gained(entries), keywords("red fox")
            for chunk in entries:
                query.score(chunk, new)
        return length.call_count

    assert steps(200) == 2 * steps(100) > 0


async def test_other_requests_are_served_while_a_large_edit_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def query(*_: object) -> KeywordQuery:
        return keywords("red fox")

    monkeypatch.setattr(overlays, "keyword_query", query)
    es = SimpleNamespace()
    es.options = lambda **_: es
    live = Stores(cast(Any, None), cast(Any, es), Timeouts(), cast(Any, None))
    stores = OverlaidStores(live, Overlay(entries=[entry("red fox") for _ in range(50)]))
    scoring = asyncio.create_task(stores._scores(cast(Any, SimpleNamespace(generation=None)), "red fox"))
    turns = 0
    while not scoring.done():
        turns += 1
        await asyncio.sleep(0)
    assert len(scoring.result()) == 50
    assert turns >= 50


@pytest.mark.parametrize("incomplete", [0, 1, 2])
async def test_a_preview_repeats_an_incomplete_search_once(incomplete: int) -> None:
    """One slow answer of a store among those to a hundred questions had made the whole report fail."""
    slow = SearchResults(
        [], [Step("feedback", 1.0, {"degraded": True, "reason": "relevance feedback did not answer"})], 1.0
    )
    whole = SearchResults([], [], 1.0)
    answers = iter([*[slow] * incomplete, whole])

    class Searches:
        async def search(self, *_: object, **__: object) -> SearchResults:
            return next(answers)

    golden = Golden("acme", "How many days?", ())
    searched = _ask(cast(Search, Searches()), golden, *cast("tuple[Any, Any, Any]", (None, None, None)))
    if incomplete < 2:
        assert await searched is whole
    else:
        with pytest.raises(Retryable, match="incomplete: relevance feedback did not answer"):
            await searched
