"""Excerpts: the part of a passage that has most of the question's words."""

from __future__ import annotations

import pytest

from query.answers import sentences
from query.answers.sentences import MAX_QUOTATION_CHARACTERS, Terms, excerpt, terms_of

QUESTION = terms_of("How many days of travel are paid at the rate of 120?")


def test_an_excerpt_is_the_part_with_most_words_and_numbers_of_the_question() -> None:
    filler = "Nothing is said about it here at all. " * 20
    middle = "Travel is paid. The rate is 120 for all days."
    hits, text = excerpt(QUESTION, f"{filler}{middle} {filler}")
    assert hits == 5
    assert middle in text
    assert len(text) <= MAX_QUOTATION_CHARACTERS


def test_a_word_that_a_passage_repeats_counts_once() -> None:
    assert excerpt(QUESTION, "Travel. Travel! Travel? Travel.")[0] == 1


@pytest.mark.parametrize("sentence", ["。", "1. ", "? [1]", "! "])
def test_each_sentence_of_a_passage_is_analysed_once(monkeypatch: pytest.MonkeyPatch, sentence: str) -> None:
    """A passage of very short sentences was analysed hundreds of times."""
    text, analysed = sentence * 2_000, 0

    def counting(part: str) -> Terms:
        nonlocal analysed
        analysed += len(part)
        return terms_of(part)

    monkeypatch.setattr(sentences, "terms_of", counting)
    excerpt(QUESTION, text)
    assert 0 < analysed <= len(text)
