"""The words of a standing question: what a new passage has to contain to enter the context by keyword search.

BM25 of a new passage is not known to the analysis worker, which has no access to Elasticsearch. So the words of the
question that a passage contains are counted; an identifier counts for more than all of the words, as it does in the
search (``query.retrieval.keywords``). Words are stored as numbers, which differ between tenants and languages. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil

from pipeline.core.identifiers import identifiers
from pipeline.core.languages import ENGLISH, language_of, language_of_question
from query.retrieval.words import stems

MAX_WORDS = 100
"""The most words of a question that count, the longest; and as many identifiers."""
_NAME = "name"
"""The language of an identifier."""


@dataclass(frozen=True, slots=True)
class Words:
    """A passage with a weight above the floor would enter the context."""

    words: Sequence[int] = ()
    names: Sequence[int] = ()
    """Identifiers. The weight of each is one more than that of all words; the weight of a word is 1."""
    floor: int = 0


NO_WORDS = Words()


def words_of(tenant: str, question: str, passages: Iterable[str], *, is_full: bool, coverage: float) -> Words:
    """The words of a question. passages: those of its context, with their titles. is_full: whether a passage must have
    more of the words than one of these. coverage: the least share of the words of a relevant passage."""
    language = language_of_question(question)
    names = identifiers(question)[:MAX_WORDS]
    words = sorted(stems(question, language).difference(names), key=lambda word: (-len(word), word))[:MAX_WORDS]
    of_names = [_number(tenant, _NAME, name) for name in names]
    of_words = [_number(tenant, language, word) for word in words]
    floor = max(0, ceil(coverage * len(words)) - 1)
    if is_full:
        contents = [{*_numbers(tenant, text, language)} for text in passages]
        weights = [weight(of_words, of_names, content) for content in contents]
        floor = max(floor, min(weights, default=0))
    return Words(of_words, of_names, floor)


def weight(words: Sequence[int], names: Sequence[int], passage: set[int]) -> int:
    """The weight of a passage with these words and identifiers."""
    return len(passage.intersection(words)) + (len(words) + 1) * len(passage.intersection(names))


def of_passage(tenant: str, text: str) -> set[int]:
    """The words and identifiers of a passage, with its title: in English, and in its own language."""
    language = language_of(text) or ENGLISH
    return {n for name in dict.fromkeys((ENGLISH, language)) for n in _numbers(tenant, text, name)}


def _numbers(tenant: str, text: str, language: str) -> list[int]:
    words = [_number(tenant, language, word) for word in stems(text, language)]
    return words + [_number(tenant, _NAME, name) for name in identifiers(text)]


def _number(tenant: str, language: str, word: str) -> int:
    """A signed integer of 64 bits."""
    digest = blake2b(f"{tenant}\0{language}\0{word}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
