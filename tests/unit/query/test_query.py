"""Elasticsearch requests of a search, and the command's output of results."""

from __future__ import annotations

import json

import pytest

from cli.search_show import SNIPPET_CHARACTERS, search_words, snippet
from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.runtime.tasks import time_limit
from query.access.callers import Readable
from query.embedding.embedders import QueryEmbedder
from query.model import SearchResults, Step, as_json
from query.retrieval.keywords import MAX_QUERY_WORDS, MAX_REPEATS, TERMS_A_CLAUSE, build, clauses, phrase
from query.retrieval.steps import Steps

READABLE = Readable((1,), ("wiki/staff",), ("wiki/r",))


def test_the_keyword_query_filters_by_tenant_and_tags() -> None:
    tenant, acl, required = build("acme", READABLE, "x")["bool"]["filter"]
    assert tenant == {"term": {"tenant": "acme"}}
    assert acl == {"bool": {"should": [{"terms": {"acl_tags": ("wiki/staff",)}}], "minimum_should_match": 1}}
    assert required["terms_set"]["required_tags"]["terms"] == ["*", "wiki/r"]


def test_many_tags_are_split_over_several_clauses() -> None:
    tags = tuple(f"wiki/{n}" for n in range(TERMS_A_CLAUSE + 1))
    any_of = build("acme", Readable((1,), tags, ()), "x")["bool"]["filter"][1]["bool"]["should"]
    assert [len(c["terms"]["acl_tags"]) for c in any_of] == [TERMS_A_CLAUSE, 1]


def test_a_caller_without_tags_gets_a_query_that_matches_nothing() -> None:
    """Elasticsearch takes a bool without clauses for match_all, whatever its minimum_should_match."""
    assert build("acme", Readable((), (), ()), "x")["bool"]["filter"] == [{"match_none": {}}]


def test_a_very_long_query_is_truncated() -> None:
    words = clauses("how do we find the word in this text " * 700)["must"]["combined_fields"]["query"]
    assert len(words.split()) == MAX_QUERY_WORDS
    assert len(json.dumps(build("acme", READABLE, "how do we find the word in this text " * 700))) < 3_000


def test_a_failing_step_is_recorded_and_its_error_raised() -> None:
    steps = Steps()
    with pytest.raises(Retryable), steps.step("keywords"):
        raise Retryable("Elasticsearch is away")
    response = SearchResults([], steps.done, steps.took_ms)
    assert response.degraded == ("Elasticsearch is away",)
    [step] = as_json(response)["steps"]
    assert step == {
        "step": "keywords",
        "took_ms": step["took_ms"],
        "degraded": True,
        "reason": "Elasticsearch is away",
    }


def test_a_repeated_step_is_recorded_once() -> None:
    """How often a store had to be asked would tell how much was withheld."""
    steps = Steps()
    for passages in (1, 2):
        for name in ("keywords", "verify"):
            with steps.step(name) as facts:
                facts["passages"] = passages
    assert [(s.name, s.facts) for s in steps.done] == [("keywords", {"passages": 2}), ("verify", {"passages": 2})]


def test_a_successful_step_is_not_degraded() -> None:
    assert SearchResults([], [Step("verify", 1.0, {"passages": 3})], 2.0).degraded == ()


async def test_a_time_limit_raises_retryable() -> None:
    import asyncio

    with pytest.raises(Retryable, match=r"pgvector did not answer within 0\.01 s"):
        async with time_limit(0.01, "pgvector"):
            await asyncio.sleep(5)


async def test_an_unused_embedding_model_is_never_loaded() -> None:
    def load() -> object:
        raise AssertionError

    await QueryEmbedder(load).aclose()  # type: ignore[arg-type]


async def test_an_embedder_can_be_closed_after_a_failed_load() -> None:
    def load() -> object:
        raise Misconfigured("no model")

    embedder = QueryEmbedder(load)  # type: ignore[arg-type]
    with pytest.raises(PenstockError, match="no model"):
        await embedder.embed("x")
    await embedder.aclose()


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("How do loops end?", ["loop", "end"]),
        ("running tests", ["runn", "test"]),
        ("a+b (c) [x", []),
        ("C++ and naïve Café", ["naïv", "café"]),
    ],
)
def test_query_words_to_highlight_are_stemmed(query: str, words: list[str]) -> None:
    assert sorted(search_words(query)) == sorted(words)


def test_a_short_passage_is_shown_whole_on_one_line() -> None:
    assert snippet("One\n\n  two\tthree.", "two") == "One two three."


def test_a_snippet_shows_the_part_with_most_of_the_query_words() -> None:
    text = "dam " + "filler " * 200 + "the turbine of the dam is new " + "filler " * 200
    shown = snippet(text, "turbine dam")
    assert "the turbine of the dam is new" in shown
    assert shown.startswith("… ")
    assert shown.endswith(" …")
    assert len(shown) <= SNIPPET_CHARACTERS + 70


@pytest.mark.parametrize("text", ["x" * 5000, "", "日本語" * 1000, " " * 5000])
def test_a_snippet_of_any_passage_is_limited_in_length(text: str) -> None:
    assert len(snippet(text, "日本語 x")) <= SNIPPET_CHARACTERS + 70


@pytest.mark.parametrize("term", ["go ", "😀", "漢", "ก", "a①", "a،", "a.", "a\U00017000", "A a "])
def test_a_phrase_repeats_no_term_very_often(term: str) -> None:
    """A phrase of 1,500 equal terms kept a thread of Elasticsearch busy for as long as a text was made for it."""
    query = clauses(term * 1_500)["should"]["match_phrase"]["text.exact"]["query"]
    assert query.lower().count(term[0].lower()) == MAX_REPEATS


def test_the_phrase_of_a_pasted_passage_is_its_beginning() -> None:
    """Words that occur often were left out, so that those after them stood elsewhere than in the passage itself."""
    often = "We don't know it, and " * MAX_REPEATS
    assert phrase(f"{often}nobody here isn't sure that we do.") == f"{often}nobody here"
    often = "水の流れ" * MAX_REPEATS
    assert phrase(f"{often}を測る、川の装置。") == f"{often}を測る、川"


def test_the_phrase_of_a_question_is_its_text() -> None:
    question = "Don't 10.0.0.1, src/app/main.py, 釧路湿原国立公園, नमस्ते दुनिया? " + "it's that, isn't it? " * 3
    assert phrase(question) == question
