"""A second look with what the first one found: pseudo-relevance feedback, no larger model needed.

The question's vector moves towards the best passages' (Rocchio, 1971), and words that are typical of them are asked for
besides its own (after Lavrenko and Croft's relevance models, 2001). Each passage counts by how far the fusion put it
below the first, so that one clear hit stays the one clear hit. Typical means: frequent in them, rare among all that was
found. Only what the asker may read has a say; no index's statistics do. Measured: docs/evaluation.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from uuid import UUID

import numpy as np
from psycopg import sql

from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.stores.postgres import Connection
from query.confidence import COMMON

PASSAGES = 5
"""That the vector moves towards."""
WORD_PASSAGES = 3
"""That words are taken from: further down they are about something else."""
WORDS = 20
WORDS_WEIGHT = 2.0
"""Of all of these words together, one of the question's own being 1."""

_WORD = re.compile(r"[^\W\d_]{3,}")
_APART = {n: " " for n in range(128) if not chr(n).isalpha()}
"""For ASCII, where that is four times as fast."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A passage that has a say, and how much: the weights of all of them are 1 together."""

    chunk_id: UUID
    text: str
    weight: float


def weighed(found: Sequence[tuple[UUID, str, float]]) -> list[Weighed]:
    """found: chunk, text and score of the fusion (standard deviations), best first."""
    first = found[:PASSAGES]
    shares = [exp(score - first[0][2]) for _, _, score in first]
    return [Weighed(id_, text, share / sum(shares)) for (id_, text, _), share in zip(first, shares, strict=True)]


def moved(vector: Vectors, passages: Sequence[Weighed], embeddings: Mapping[UUID, Vectors]) -> Vectors:
    """The question's vector half way to the passages' mean; float32, unit length. A passage whose embedding is gone
    meanwhile has no say."""
    here = np.asarray(vector, dtype=np.float32)
    for passage in passages:
        if passage.chunk_id in embeddings:
            here = here + passage.weight * embeddings[passage.chunk_id]
    length = float(np.linalg.norm(here))
    return np.asarray(here / length if length else vector, dtype=np.float32)


def typical(passages: Sequence[Weighed], background: Sequence[str]) -> dict[str, float]:
    """Words of the passages and what each is worth, together WORDS_WEIGHT at most. background: the texts of everything
    that was found."""
    worth: dict[str, float] = {}
    first = passages[:WORD_PASSAGES]
    theirs = {word for passage in first for word in _words(passage.text)}
    frequency = Counter(word for text in background for word in theirs.intersection(_all_words(text)))
    whole = sum(passage.weight for passage in first)
    for passage in first:
        words = _words(passage.text)
        for word in words:
            rare = log(1 + len(background) / max(1, frequency[word]))
            worth[word] = worth.get(word, 0.0) + passage.weight / whole / len(words) * rare
    best = sorted(worth, key=lambda word: (-worth[word], word))[:WORDS]
    total = sum(worth[word] for word in best)
    return {word: WORDS_WEIGHT * worth[word] / total for word in best}


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text.lower()) if word not in COMMON]


def _all_words(text: str) -> list[str]:
    """In lower case, shorter ones too: hundreds of texts are looked through in every search."""
    lowered = text.lower()
    return lowered.translate(_APART).split() if lowered.isascii() else _WORD.findall(lowered)


async def embeddings(
    connection: Connection, generation: Generation, passages: Sequence[Weighed]
) -> dict[UUID, Vectors]:
    """As the generation holds them. Raises psycopg.Error."""
    cursor = await connection.execute(
        sql.SQL("SELECT id, embedding FROM {chunks} WHERE id = ANY(%s::uuid[])").format(
            chunks=sql.Identifier(generation.chunk_table)
        ),
        [[passage.chunk_id for passage in passages]],
        binary=True,  # as text, 1,536 numbers are parsed one by one
    )
    return {
        id_: np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value, dtype=np.float32)
        for id_, value in await cursor.fetchall()
    }
