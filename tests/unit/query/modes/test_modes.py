"""The choice of a mode, the amount that fits, and reading of whole documents without the text that their chunks
repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.chunking import chunk
from pipeline.core.model import ChunkParams, Span
from pipeline.embedding.tokens import byte_pairs
from query.access.filters import Filters
from query.model import AnswerMode, BadQuery, CallerClass, Passage, Result
from query.modes.budget import PASSAGE_TOKENS, PROMPT_TOKENS, budget_tokens
from query.modes.decide import (
    MAX_MISSING_SHARE,
    MAX_OVER_BUDGET,
    SLIGHTLY_OVER,
    Coverage,
    Decision,
    Known,
    Size,
    decide,
    max_tokens,
)
from query.modes.documents import Packer, Part, parts
from query.modes.filters import MAX_DOCUMENTS_PER_QUESTION, effective_filters
from query.modes.gather import interleave
from query.modes.material import Question
from query.settings import ChatSettings, RetrievalSettings
from tests.support.portion import portion

# The decision

BUDGET = 1_000
HALF, ALL, QUARTER_OVER, DOUBLE, HUGE = (Size(n, 3, True) for n in (500, 1_000, 1_250, 2_000, 50_000))
ENDLESS = Size(3_000, 9, False)
SOME, MANY = Coverage(100, 20), Coverage(100, 21)


@pytest.mark.parametrize(
    ("known", "mode"),
    [
        ({"size": HALF}, "long_context"),
        ({"size": ALL}, "long_context"),
        ({"size": QUARTER_OVER}, "long_context"),
        ({"size": Size(0, 0, True)}, "long_context"),
        ({"size": Size(1_251, 3, True), "coverage": SOME}, "hybrid"),
        ({"size": Size(1_251, 3, True), "coverage": MANY}, "long_context"),
        ({"size": DOUBLE, "coverage": MANY}, "long_context"),
        ({"size": Size(2_001, 3, True), "coverage": MANY}, "keyword"),
        ({"size": HUGE, "coverage": SOME}, "hybrid"),
        ({"size": HUGE, "coverage": Coverage(0, 0)}, "hybrid"),
        ({"size": HUGE, "coverage": SOME, "personal": True}, "semantic"),
        ({"size": HUGE, "coverage": MANY, "personal": True}, "keyword"),
        ({"size": HALF, "personal": True}, "long_context"),
        ({"size": ENDLESS, "coverage": SOME}, "hybrid"),
        ({"size": ENDLESS, "coverage": MANY}, "keyword"),
        ({"size": Size(10, 1, False), "coverage": SOME}, "hybrid"),
        ({"documents_named": True}, "focused"),
        ({"documents_named": True, "size": HALF}, "focused"),
    ],
)
def test_the_mode_is_chosen_by_size_coverage_and_collection(known: dict[str, object], mode: str) -> None:
    decision = decide(Known(BUDGET, **known))  # type: ignore[arg-type]
    assert isinstance(decision, Decision)
    assert decision.mode == mode


sizes = st.builds(Size, st.integers(0, 5_000), st.integers(0, 50), st.booleans())
coverages = st.integers(0, 100).flatmap(lambda n: st.builds(Coverage, st.just(n), st.integers(0, n), st.booleans()))
knowns = st.builds(
    Known, st.integers(0, 2_000), st.none(), st.booleans(), st.booleans(), st.none() | sizes, st.none() | coverages
)


@given(knowns, st.sampled_from(get_args(AnswerMode)))
def test_an_explicitly_requested_mode_is_used_without_gathering_facts(known: Known, mode: AnswerMode) -> None:
    decision = decide(replace(known, explicit=mode))
    assert isinstance(decision, Decision)
    assert decision.mode == mode


@given(knowns, sizes, coverages)
def test_each_fact_is_requested_at_most_once_and_only_when_it_matters(
    known: Known, size: Size, coverage: Coverage
) -> None:
    """The answer is the same as if all had been known from the beginning."""
    facts = {"size": known.size or size, "coverage": known.coverage or coverage}
    requests: list[str] = []
    so_far = known
    while isinstance(expected := decide(so_far), str):
        assert getattr(so_far, expected) is None
        requests.append(expected)
        so_far = replace(so_far, **{expected: facts[expected]})
    assert len(requests) == len(set(requests))
    assert expected == decide(replace(known, **facts))


@given(knowns, sizes, coverages)
def test_an_incomplete_survey_never_leads_to_long_context(known: Known, size: Size, coverage: Coverage) -> None:
    known = replace(known, documents_named=False, size=replace(size, complete=False), coverage=coverage)
    decision = decide(known)
    assert isinstance(decision, Decision)
    assert decision.mode != "long_context"


@given(sizes, coverages, st.integers(0, 2_000))
def test_counting_may_stop_at_the_maximum_without_changing_the_mode(
    size: Size, coverage: Coverage, budget: int
) -> None:
    """Beyond ``most_tokens`` it does not matter how much there is, nor whether all of it was counted."""
    over = replace(size, tokens=max_tokens(budget) + 1 + size.tokens)
    known = Known(budget, coverage=coverage)
    assert decide(replace(known, size=over)) == decide(replace(known, size=replace(over, complete=False)))


def test_the_thresholds_match_the_documentation() -> None:
    assert (SLIGHTLY_OVER, MAX_MISSING_SHARE, MAX_OVER_BUDGET) == (1.25, 0.20, 2.0)


# The budget


@settings(deadline=None)  # the first one loads the encoding
@given(
    st.text(max_size=200),
    st.sampled_from(get_args(CallerClass)),
    st.integers(2_048, 300_000),
    st.integers(16, 9_000),
)
def test_the_budget_leaves_room_for_question_prompt_and_answer(
    question: str, caller_class: CallerClass, window: int, answer: int
) -> None:
    retrieval = RetrievalSettings()
    budget = budget_tokens(question, caller_class, retrieval, ChatSettings(window_tokens=window, answer_tokens=answer))
    question_tokens = byte_pairs().count([question])[0]
    assert 0 <= budget <= (150_000 if caller_class == "extended" else 30_000)
    assert budget == 0 or budget + question_tokens + answer + PROMPT_TOKENS <= window


# Reading whole documents

texts = st.lists(
    st.sampled_from(
        [
            "# Harbour\n\n",
            "The harbour has two cranes and a lock. " * 6,
            "\n\n",
            "| a | b |\n| - | - |\n",
            "| 1 | 2 |\n" * 9,
            "Rain.\n",
            "## Tides\n\n",
            "Ebb and flood follow each other, twice a day. " * 4,
            "```\nx = 1\n```\n",
            "é🙂 ",
        ]
    ),
    max_size=30,
).map("".join)


@settings(max_examples=portion(40), deadline=None)
@given(texts, st.sampled_from([0.0, 0.175, 0.3]))
def test_the_parts_of_a_document_hold_its_text_once_in_order(text: str, overlap: float) -> None:
    params = ChunkParams(target=40, min_tokens=16, max_tokens=64, overlap=overlap)
    chunks = chunk(text, "text/markdown", params=params, count_tokens=lambda some: [len(t.split()) for t in some])
    passages = list(parts(text, [uuid4() for _ in chunks], [c.spans for c in chunks], [c.headings for c in chunks]))
    assert "".join("".join(p.text for p in passages).split()) == "".join(text.split())
    assert [p.chunk_index for p in passages] == sorted({p.chunk_index for p in passages})


def test_repeated_spans_of_chunks_are_left_out_of_the_parts() -> None:
    text = "header|one|two"
    spans: list[list[Span]] = [[(0, 10)], [(0, 7), (10, 14)], [(0, 7)]]
    ids = [uuid4() for _ in spans]
    assert list(parts(text, ids, spans, [["H"], [], []])) == [
        Part(ids[0], 0, "header|one", ("H",)),
        Part(ids[1], 1, "|two", ()),
    ]


def part(words: int) -> Part:
    return Part(uuid4(), 0, "w " * words, ())


def count(some: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in some]


@given(st.lists(st.lists(st.integers(1, 90), max_size=80), max_size=6), st.integers(0, 6_000))
def test_packing_fills_the_budget_in_order_without_exceeding_it(documents: list[list[int]], budget: int) -> None:
    packer = Packer(budget, count)
    for document in documents:
        packer.add(part(words) for words in document)
        if packer.is_full:
            break
    flat = [words for document in documents for words in document]
    kept = [len(p.text.split()) for taken in packer.taken for p in taken]
    assert kept == flat[: len(kept)]
    assert packer.tokens == sum(kept) + PASSAGE_TOKENS * len(kept) <= budget
    if packer.is_full:
        assert packer.tokens + flat[len(kept)] + PASSAGE_TOKENS > budget
    else:
        assert kept == flat


def result(n: int) -> Result:
    return Result(Passage(uuid4(), uuid4(), str(n), "s", "", None, 0), "", 0.0, {})


@given(st.integers(0, 45), st.integers(0, 12))
def test_best_and_recent_results_are_interleaved_in_their_order(best: int, recent: int) -> None:
    by_meaning, by_time = [result(n) for n in range(best)], [result(n) for n in range(recent)]
    mixed = interleave(by_meaning, by_time)
    assert [r for r in mixed if r in by_meaning] == by_meaning
    assert [r for r in mixed if r in by_time] == by_time
    if best >= 8 and recent >= 2:
        assert sum(r in by_time for r in mixed[:10]) == 2


# What a question is narrowed to


def test_a_collection_becomes_a_source_filter_and_named_documents_narrow_a_search() -> None:
    one = uuid4()
    assert effective_filters(Question("q", collection="wiki")) == Filters(sources=("wiki",))
    assert effective_filters(Question("q", collection="wiki", filters=Filters(sources=("a", "wiki")))).sources == (
        "wiki",
    )
    assert effective_filters(Question("q", documents=(one,))) == Filters()
    assert effective_filters(Question("q", mode="hybrid", documents=(one,))) == Filters(documents=(one,))


@pytest.mark.parametrize(
    "question",
    [
        Question("q", mode="focused"),
        Question("q", documents=tuple(uuid4() for _ in range(MAX_DOCUMENTS_PER_QUESTION + 1))),
        Question("q", collection="wiki", filters=Filters(sources=("drive",))),
        Question("q", collection="wi\x00ki"),
        Question("q", mode="hybrid", documents=(uuid4(),), filters=Filters(documents=(uuid4(),))),
    ],
)
def test_a_contradictory_question_is_rejected(question: Question) -> None:
    with pytest.raises(BadQuery):
        effective_filters(question)
