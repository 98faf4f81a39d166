"""Whether anything that was found is about the question: a floor below which "nothing relevant" is the better answer.

Two signs count, and either is enough: how near the nearest passage is by the model (its cosine), and how many of the
question's words stand in one passage. Neither depends on what the asker may not read. A store's own scores do not
serve: BM25 has no absolute scale, and the words' rarity is the whole index's. Pure. How the floors were found:
``python -m bench.confidence``, docs/adr/0019-retrieval.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from query.model import Facts

_WORD = re.compile(r"[^\W_]+(?:[._'-][^\W_]+)*")
_ENDING = re.compile(r"(?:ations?|ings?|edly|ed|ies|es|s|ly|e)$")
COMMON_WORDS = (
    "a about after all also am an and any are as at be been before being between both but by can cannot could did "
    "do does doing for from had has have having he her here his how i if in into is it its just like made make many "
    "may me might more most much must my need needed no nor not of off on one only or other our out over possible "
    "really shall she should so some such than that the their them then there these they this those through to too "
    "under until up upon us use used using very want was way we were what when where whether which while who whom "
    "whose why will with within without would yet you your "
)
COMMON = frozenset(COMMON_WORDS.split())


@dataclass(frozen=True, slots=True)
class Floor:
    """Below both, what was found is noise."""

    cosine: float
    coverage: float
    source: str
    """Where the two numbers come from."""


FLOORS: Mapping[str, Floor] = {
    "all-MiniLM-L6-v2": Floor(0.30, 0.75, "bench/confidence.py: 265 right questions, 337 wrong ones, two collections"),
}


def stems(text: str) -> set[str]:
    """The words that say something, without their most common English endings: compared, never shown."""
    words = {word.lower().removesuffix("'s") for word in _WORD.findall(text)} - COMMON
    return {_ENDING.sub("", word) if len(word) > 4 else word for word in words}


def coverage(asked: set[str], text: str) -> float:
    """Share of the asked stems that a text holds; of none, 0."""
    return len(asked & stems(text)) / len(asked) if asked else 0.0


def best_coverage(asked: set[str], texts: Iterable[str]) -> float:
    """Of any one text. A stem stands in a text only where its letters do: most texts need not be cut into words."""
    best = 0.0
    for text in texts:
        lowered = text.lower()
        if sum(stem in lowered for stem in asked) > best * len(asked):
            best = max(best, coverage(asked, text))
    return best


def judge(query: str, cosine: float | None, texts: Iterable[str], model: str) -> tuple[bool, Facts]:
    """Whether to answer, and why. cosine: of the nearest passage; None: it was not asked for or could not be.
    texts: the passages that were found, with their titles; read only as far as they are needed."""
    facts: Facts = {} if cosine is None else {"cosine": f"{cosine:.2f}"}
    floor = FLOORS.get(model)
    if floor is None or cosine is None:
        facts["floor"] = "none for this model" if floor is None else "none without a vector"
        return any(True for _ in texts), facts
    facts["floor"] = f"{floor.cosine:.2f}"
    if cosine >= floor.cosine:
        return True, facts
    best = best_coverage(stems(query), texts)
    return best >= floor.coverage, {**facts, "coverage": f"{best:.2f}", "coverage floor": f"{floor.coverage:.2f}"}
