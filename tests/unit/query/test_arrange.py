"""From a ranking of chunks to what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid5

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.identifiers import exact_names
from query.access.verify import Detail
from query.model import Passage, SearchResults, as_json
from query.retrieval.arrange import MAX_MERGED_CHUNKS, Hit, arrange, exact_first, joined, present, refreshed

SPACE = UUID(int=1)


def hit(document: str, index: int, text: str = "", *, score: float = 1.0, rank: int = 1) -> Hit:
    text = text or f"{document} chunk {index} says something of its own"
    passage = Passage(
        uuid5(SPACE, f"{document}/{index}"), uuid5(SPACE, document), document, "wiki", document, None, index
    )
    return Hit(passage, text, score, {"vector": rank})


def shape(hits: Sequence[Hit], *, top: int = 10, per_document: int = 2) -> list[tuple[str, list[int], list[str]]]:
    """Document, chunk indexes in reading order, twins."""
    return [
        (
            g.hits[0].passage.external_id,
            [h.passage.chunk_index for h in g.in_reading_order],
            [a.external_id for a in g.also],
        )
        for g in arrange(hits, top=top, per_document=per_document)
    ]


def test_results_keep_the_order_of_the_ranking() -> None:
    assert shape([hit("a", 0), hit("b", 5), hit("c", 2)]) == [("a", [0], []), ("b", [5], []), ("c", [2], [])]


def test_neighbouring_chunks_are_merged_in_reading_order() -> None:
    assert shape([hit("a", 4), hit("b", 0), hit("a", 3), hit("a", 5)]) == [("a", [3, 4, 5], []), ("b", [0], [])]


def test_at_most_a_limited_number_of_neighbouring_chunks_is_merged() -> None:
    groups = shape([hit("a", n) for n in range(MAX_MERGED_CHUNKS + 1)], per_document=9)
    assert groups == [("a", list(range(MAX_MERGED_CHUNKS)), []), ("a", [MAX_MERGED_CHUNKS], [])]


def test_a_merged_neighbour_does_not_count_towards_the_limit() -> None:
    assert shape([hit("a", 1), hit("a", 2), hit("b", 0)], top=2) == [("a", [1, 2], []), ("b", [0], [])]


def test_the_results_per_document_are_limited_while_other_documents_have_results() -> None:
    far_apart = [hit("a", n) for n in range(0, 60, 10)]
    others = [hit("b", 0), hit("c", 0)]
    assert [d for d, _, _ in shape([*far_apart, *others], top=4)] == ["a", "a", "b", "c"]
    assert [d for d, _, _ in shape([*far_apart, *others], top=6)] == ["a", "a", "b", "c", "a", "a"]
    assert [d for d, _, _ in shape([*far_apart, *others], top=3, per_document=1)] == ["a", "b", "c"]


LONG = " ".join(f"word{chr(97 + n % 26)} of the {chr(97 + n // 26)} sentence" for n in range(60))


def test_a_nearly_identical_passage_of_another_document_is_listed_with_the_first() -> None:
    nearly = LONG + " Thanks."
    assert shape([hit("a", 0, LONG), hit("b", 7, nearly), hit("c", 0)]) == [("a", [0], ["b"]), ("c", [0], [])]


@pytest.mark.parametrize("other", [LONG + " See PROJ-1.", LONG + " In 2025.", " ".join(reversed(LONG.split()))])
def test_passages_that_differ_in_a_number_name_or_word_order_are_not_identical(other: str) -> None:
    assert len(shape([hit("a", 0, LONG), hit("b", 0, other)])) == 2


def test_exact_names_of_similar_passages_are_extracted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share nearly all words; comparing any two of them anew held every other search up for half a minute."""
    taken: list[str] = []
    monkeypatch.setattr("query.retrieval.arrange.exact_names", lambda text: (taken.append(text), exact_names(text))[1])
    notes = [hit(f"note{n}", 0, f"{LONG} Release {n}.") for n in range(100)]
    twins = [hit(f"twin{n}", 0, h.text) for n, h in enumerate(notes)]
    assert shape([*notes, *twins], top=100) == [(f"note{n}", [0], [f"twin{n}"]) for n in range(100)]
    assert len(taken) == len(notes)


def test_passages_with_the_exact_identifier_of_the_query_come_first() -> None:
    hits = [hit("parts", 0, "PROJ 4821 PROJ 4821"), hit("other", 0, "PROJ-48210"), hit("it", 0, "closed PROJ-4821.")]
    assert [h.passage.external_id for h in exact_first(hits, ["proj-4821"])] == ["it", "parts", "other"]
    assert exact_first(hits, []) == hits
    titled = hit("PROJ-4821: Login", 3)
    assert exact_first([*hits[:2], titled], ["proj-4821"])[0] is titled


# One text of several chunks


TEXT = "".join(chr(0x4E00 + n) for n in range(400))
"""No character stands twice: what is doubled or lost shows."""


@given(st.lists(st.tuples(st.integers(0, 390), st.integers(1, 60)), min_size=1, max_size=6))
def test_joined_chunks_hold_every_character_once_in_order(ranges: list[tuple[int, int]]) -> None:
    spans = [(start, min(start + length, len(TEXT))) for start, length in ranges]
    text = joined([([span], TEXT[slice(*span)]) for span in spans])
    covered = sorted({n for start, end in spans for n in range(start, end)})
    assert text.replace("\n", "") == "".join(TEXT[n] for n in covered)


def test_joining_chunks_removes_overlaps_and_repeated_headers() -> None:
    header, first, second = (0, 10), (10, 30), (30, 50)
    cut = lambda *spans: (list(spans), "".join(TEXT[slice(*s)] for s in spans))  # noqa: E731
    assert joined([cut(header, first), cut(header, second)]) == TEXT[:50]
    assert joined([cut((0, 30)), cut((25, 50))]) == TEXT[:50]
    assert joined([cut((0, 30)), cut((31, 50))]) == TEXT[:30] + "\n" + TEXT[31:50]


def test_a_merged_result_has_the_best_score_and_all_chunk_ids() -> None:
    second, first = hit("a", 1, "two three", score=2.0, rank=1), hit("a", 0, "one two ", score=1.0, rank=4)
    [group] = arrange([second, first], top=5, per_document=2)
    details = {
        first.passage.chunk_id: Detail(((0, 8),), ("Top",)),
        second.passage.chunk_id: Detail(((4, 13),), ("Top", "Sub")),
    }
    result = present(group, details)
    assert (result.text, result.score, dict(result.ranks)) == ("one two three", 2.0, {"vector": 1})
    assert result.chunk_ids == (first.passage.chunk_id, second.passage.chunk_id)
    assert result.passage is second.passage
    assert result.headings == ("Top", "Sub")
    shown = as_json(SearchResults([result], [], 1.0))["results"][0]
    assert shown["chunk_ids"] == [str(id_) for id_ in result.chunk_ids]


def test_chunks_missing_from_the_manifest_are_left_out_of_a_merged_result() -> None:
    second, first = hit("a", 1, "two three"), hit("a", 0, "one two")
    [group] = arrange([second, first], top=5, per_document=2)
    result = present(group, {second.passage.chunk_id: Detail(((4, 13),), ())})
    assert (result.text, result.chunk_ids) == ("two three", (second.passage.chunk_id,))


def test_a_cached_result_shows_the_current_title_and_headings() -> None:
    one, twin = hit("a", 0, LONG), hit("b", 0, LONG)
    [group] = arrange([one, twin], top=5, per_document=2)
    id_ = one.passage.chunk_id
    result = present(group, {id_: Detail((), ("Before",))})
    assert result.headings == ("Before",)
    now = {
        h.passage.chunk_id: Passage(h.passage.chunk_id, h.passage.document_id, "x", "wiki", "New", None, 3)
        for h in (one, twin)
    }
    again = refreshed(result, now, {id_: Detail((), ("After",))})
    assert (again.passage.title, again.also[0].title, again.text) == ("New", "New", LONG)
    assert again.headings == ("After",)
    assert refreshed(result, now, {}).headings == ()
