"""An OpenAI-compatible embeddings server whose vectors mean something: a text's is the sum of its words'.

Two of them with other names are two models: the same word lies elsewhere in each. As a process:
``python -m tests.fakes.words --model NAME --dimensions N``.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tests.fakes.openai import FakeOpenAI, Faults

_WORD = re.compile(r"\w+")


class FakeWords(FakeOpenAI):
    def vector(self, text: str, dimensions: int | None = None) -> NDArray[np.float32]:
        rows = [_word(self.model, self.dimensions, word) for word in _WORD.findall(text.casefold())] or [
            _word(self.model, self.dimensions, "")
        ]
        row = np.sum(rows, axis=0)[: dimensions or self.dimensions]
        return (row / np.linalg.norm(row)).astype(np.float32)


@cache
def _word(model: str, dimensions: int, word: str) -> NDArray[np.float64]:
    seed = int.from_bytes(hashlib.sha256(f"{model}\n{word}".encode()).digest()[:8])
    return np.random.default_rng(seed).standard_normal(dimensions)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.words", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="words")
    parser.add_argument("--dimensions", type=int, default=256)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    args = parser.parse_args()
    faults = Faults(latency_seconds=args.latency_ms / 1000)
    FakeWords(model=args.model, dimensions=args.dimensions, faults=faults).run(port=args.port, path="/v1")


if __name__ == "__main__":
    main()
