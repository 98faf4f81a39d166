"""A library of any size for load measurements: made-up prose about made-up topics, and vectors made of its words.

Words have Zipf's frequencies, each topic has words of its own, each document one topic. A text's vector is the sum of
its words' (a random direction a word, the rarer the longer): passages of one topic are near each other, as a model's
are, and a question's vector costs next to nothing. Everything follows from a seed.

The directions are not spread evenly over the dimensions, for a model's are not either: all-MiniLM-L6-v2 on Cranfield
uses 44 of its 384 (participation ratio of the covariance's eigenvalues), evenly spread words 258. A graph finds its
way the worse the more there are (docs/load.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pipeline.embedding.port import Embedded, Vectors

VOCABULARY, TOPICS, TOPIC_WORDS = 20_000, 400, 40
TOPIC_SHARE = 0.3
"""Share of a text's words that belong to its topic."""
DECAY = 0.45
"""The n-th coordinate of a direction is ∝ n^-DECAY: a participation ratio of about 40 at 384 dimensions."""
_SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]


def word(n: int) -> str:
    """Return the n-th most frequent word."""
    digits = []
    n += len(_SYLLABLES)
    while n:
        n, digit = divmod(n, len(_SYLLABLES))
        digits.append(_SYLLABLES[digit])
    return "".join(digits) + "n"


@dataclass
class Corpus:
    seed: int = 1

    @cached_property
    def words(self) -> list[str]:
        return [word(n) for n in range(VOCABULARY)]

    @cached_property
    def _frequencies(self) -> NDArray[np.float64]:
        weights = 1 / (10.0 + np.arange(VOCABULARY))
        return weights / weights.sum()

    @cached_property
    def topics(self) -> NDArray[np.int64]:
        """The numbers of each topic's words, without the thousand most frequent ones; shape (TOPICS, TOPIC_WORDS)."""
        dice = np.random.default_rng(self.seed)
        return dice.integers(1_000, VOCABULARY, (TOPICS, TOPIC_WORDS))

    def _draw(self, dice: np.random.Generator, topic: int, count: int, share: float) -> list[str]:
        common = dice.choice(VOCABULARY, count, p=self._frequencies)
        own = self.topics[topic][dice.integers(0, TOPIC_WORDS, count)]
        return [self.words[n] for n in np.where(dice.random(count) < share, own, common)]

    def text(self, number: int, words: int) -> str:
        """Return a document: paragraphs of eight sentences, each under a heading."""
        dice = np.random.default_rng((self.seed, 1, number))
        drawn = iter(self._draw(dice, number % TOPICS, words + 16, TOPIC_SHARE))
        paragraphs, left = [], words
        while left > 0:
            lengths = dice.integers(7, 18, 8)
            sentences = [" ".join(w for _, w in zip(range(length), drawn, strict=False)) for length in lengths]
            paragraphs.append(" ".join(s.capitalize() + "." for s in sentences if s))
            left -= int(lengths.sum())
        return "\n\n".join(f"## Part {n}\n\n{p}" for n, p in enumerate(paragraphs, start=1))

    def questions(self, seed: int) -> Iterator[str]:
        """Yield questions without end, hardly two alike: four to nine words, half of them of one topic."""
        dice = np.random.default_rng((self.seed, 2, seed))
        while True:
            yield " ".join(self._draw(dice, int(dice.integers(TOPICS)), int(dice.integers(4, 10)), 0.5))


class WordVectors:
    """An embedder (pipeline/embedding/port.py) of any dimension, without a model."""

    model = "word-vectors"
    revision = "1"
    input_window = 8_192
    document_prefix = ""
    query_prefix = ""

    def __init__(self, dimensions: int, corpus: Corpus) -> None:
        self.dimensions = dimensions
        self._scale = np.arange(1, dimensions + 1) ** -DECAY
        self._known: dict[str, Vectors] = {}
        self._words = corpus.words
        self._rank = {w: n for n, w in enumerate(corpus.words)}

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        return Embedded(np.array([self.vector(text) for text in texts], dtype=np.float32))

    async def embed_query(self, text: str) -> Vectors:
        return self.vector(text)

    async def aclose(self) -> None:
        pass

    @cached_property
    def _table(self) -> Vectors:
        """The vectors of the vocabulary, by rank: float32 (VOCABULARY, dimensions)."""
        return np.array([self._drawn(w) for w in self._words], dtype=np.float32)

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """The vectors of many texts: float32 (len(texts), dimensions), as ``vector`` makes them, in a tenth of the
        time. Words that are not in the vocabulary are not kept, for there may be any number of them."""
        rows = np.empty((len(texts), self.dimensions), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            words = re.findall(r"\w+", text.lower()) or ["nothing"]
            ranks = [self._rank.get(w, -1) for w in words]
            np.sum(self._table[[rank for rank in ranks if rank >= 0]], axis=0, out=row)
            for w, rank in zip(words, ranks, strict=True):
                if rank < 0:
                    row += self._drawn(w)
            row /= np.linalg.norm(row)
        return rows

    def vector(self, text: str) -> Vectors:
        """float32 (dimensions,), unit length."""
        words = re.findall(r"\w+", text.lower()) or ["nothing"]
        total = np.sum([self._of(w) for w in words], axis=0)
        return np.asarray(total / np.linalg.norm(total), dtype=np.float32)

    def _of(self, word: str) -> Vectors:
        if word not in self._known:
            self._known[word] = self._drawn(word)
        return self._known[word]

    def _drawn(self, word: str) -> Vectors:
        rare = 1 / (1 + 200 / (10 + self._rank.get(word, VOCABULARY)))
        dice = np.random.default_rng(crc32(word.encode()))
        return np.asarray(rare * self._scale * dice.standard_normal(self.dimensions), dtype=np.float32)
