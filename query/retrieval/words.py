"""The words of a question and of a passage, reduced to stems, by language. Pure.

They decide how many of the question's words a passage contains. The question's language decides which stemmer
(Snowball) reduces its words and the passages'. A language that is written without spaces is compared by pairs of
neighbouring characters. Identifiers, such as ``v2.3.1``, are compared whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache

from Stemmer import Stemmer, algorithms

from pipeline.core.languages import ENGLISH, MARKS, STOP_WORDS, language_of_question

_LETTERS = rf"(?:[^\W_]|[{MARKS}])+"
_WORD = re.compile(rf"{_LETTERS}(?:[._'’-]{_LETTERS})*")
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\u0e00-\u0e7f]+")
"""Kana, Han, Hangul and Thai."""
_OTHER = re.compile(r"[\d._'’-]")
_IDENTIFIER = re.compile(r"[\d._-]")
_ELIDED = re.compile(r"^(?:[cdjlmnst]|qu|dell|all|nell|sull|un)['’]")
"""French and Italian articles that are written with the word, as in ``l'eau``."""

_UMLAUTS = str.maketrans("äöü", "aou")


@cache
def _stemmer(language: str) -> Stemmer | None:
    """None: Snowball has no stemmer of this language, and its words are compared as they are."""
    return Stemmer(language) if language in algorithms() else None


def stems(text: str, language: str = ENGLISH) -> set[str]:
    """The content words of a text, reduced to stems. They are compared, never shown."""
    spaced = text if text.isascii() else _UNSPACED.sub(lambda run: f" {' '.join(_pairs(run[0]))} ", text)
    common = STOP_WORDS.get(language, frozenset())
    words = set(_WORD.findall(spaced.replace("İ", "i").lower())) - common
    plain = {word for word in words if not _OTHER.search(word)}
    others = {_ELIDED.sub("", word).removesuffix("'s").removesuffix("’s") for word in words - plain}
    identifiers = {word for word in others if _IDENTIFIER.search(word)}
    plain |= others - identifiers - common
    stemmer = _stemmer(language)
    return identifiers.union(stemmer.stemWords(sorted(plain)) if stemmer else plain)


def _pairs(characters: str) -> list[str]:
    return [characters[n : n + 2] for n in range(max(1, len(characters) - 1))]


def coverage(query_stems: Collection[str], text: str, language: str = ENGLISH) -> float:
    """The share of the query's stems that a text contains; 0 if the query has none."""
    return len(set(query_stems) & stems(text, language)) / len(query_stems) if query_stems else 0.0


def best_coverage(query: str, texts: Iterable[str]) -> float:
    """The highest coverage of the query's words by any of the texts. Substring search skips most texts before they are
    split into words: words of one stem begin alike, but for umlauts."""
    language = language_of_question(query)
    query_stems = stems(query, language)
    beginnings = [stem.translate(_UMLAUTS)[:3] for stem in query_stems]
    best = 0.0
    for text in texts:
        lowered = text.lower().translate(_UMLAUTS)
        if sum(beginning in lowered for beginning in beginnings) > best * len(query_stems):
            best = max(best, coverage(query_stems, text, language))
    return best
