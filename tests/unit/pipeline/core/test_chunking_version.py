"""A generation's documents are cut in one way as long as it lives, whichever release cuts them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import pytest

from pipeline.core.chunking import chunk
from pipeline.core.model import ChunkParams

WORDS = [
    "the",
    "valve",
    "water",
    "gate",
    "flow",
    "meter",
    "level",
    "pump",
    "reads",
    "opens",
    "closes",
    "before",
    "after",
    "while",
    "never",
    "slowly",
]


def _words(seed: int, count: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * i * 31 + i * 5) % len(WORDS)] for i in range(count))


def _sentences(seed: int, count: int) -> str:
    return " ".join(f"{_words(seed + i, 5 + (seed + i * 3) % 11).capitalize()}." for i in range(count))


def _function(name: str, body: str) -> str:
    return f"{name} {{\n" + "".join(f"    {body}({i});\n" for i in range(40)) + "}\n\n"


PROSE = "\n\n".join(_sentences(i, 3 + i % 5) for i in range(40))
TEXTS = {
    "text/plain": PROSE,
    "text/markdown": "\n\n".join(
        f"{'#' * (1 + i % 3)} {_words(i, 3)}\n\n{_sentences(i, 6)}\n\n- {_words(i, 6)}\n- {_words(i + 1, 9)}\n\n"
        f"```\n{_words(i, 20)}\n```\n\n| a | b |\n| - | - |\n| {_words(i, 2)} | {_words(i, 4)} |"
        for i in range(12)
    ),
    "text/x-rst": "\n\n".join(
        f"Title {i}\n=======\n\n{_sentences(i, 6)}\n\n::\n\n    {_words(i, 9)}" for i in range(12)
    ),
    "text/csv": "id,note\n" + "".join(f"{i},{_words(i, 12)}\n" for i in range(80)),
    "application/x-ndjson": "".join(json.dumps({"id": i, "note": _words(i, 12)}) + "\n" for i in range(80)),
    "application/json": json.dumps({f"key {i}": {"note": _words(i, 12)} for i in range(60)}, indent=2),
    "text/x-python": "\n\n".join(
        f"def function_{i}(value):\n" + "".join(f"    {w} = call(value)\n" for w in _words(i, 30).split())
        for i in range(12)
    ),
    "text/x-go": "package main\n\n" + "".join(_function(f"func f{i}()", "call") for i in range(6)),
    "text/x-java": "class A {\n" + "".join(_function(f"void f{i}()", "call") for i in range(6)) + "}\n",
}
FIRST = {
    "text/plain": "681fe2a3941dc516",
    "text/markdown": "3e690f516d9403fe",
    "text/x-rst": "e6de6a6f9c611224",
    "text/csv": "300655778f61896a",
    "application/x-ndjson": "1b2f0f26ca1a6eed",
    "application/json": "3c185d2874cdf8f5",
    "text/x-python": "0deb02b9222b42dd",
    "text/x-go": "2da1f4d3607debfd",
    "text/x-java": "96319481070d7991",
}
CUTS = {1: FIRST, 2: FIRST}
"""By ``ChunkParams.version`` and media type: digest of the chunks' spans. A released version's cuts never change. The
second one cuts as the first, and embeds titles."""


def count_tokens(texts: Sequence[str]) -> list[int]:
    """Words instead of a model's tokens, so that no vocabulary has a say."""
    return [len(text.split()) for text in texts]


def _digest(text: str, media_type: str, version: int) -> str:
    params = ChunkParams(target=100, min_tokens=40, max_tokens=128, version=version)
    chunks = chunk(text, media_type, params=params, count_tokens=count_tokens)
    assert len(chunks) > 3
    return hashlib.sha256(json.dumps([chunk.spans for chunk in chunks]).encode()).hexdigest()[:16]


@pytest.mark.parametrize("version", CUTS)
def test_chunks_of_each_released_chunking_version_do_not_change(version: int) -> None:
    """Otherwise every edit in a large document would embed all its chunks again, without a generation that says so."""
    assert {kind: _digest(text, kind, version) for kind, text in TEXTS.items()} == CUTS[version], (
        "a generation of this version exists: raise ChunkParams.version, cut in the new way only from that version on,"
        " and add what it cuts here"
    )


def test_new_generations_use_the_newest_chunking_version() -> None:
    assert ChunkParams().version == max(CUTS)
