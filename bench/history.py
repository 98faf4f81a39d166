"""Measures how many pairs a chunk of a member's history should have, and how many of the nearest chunks are read along.

    python -m bench.history

The history is made from documented members of Python's library (bench/python_docs.py), in the order of their names, as
somebody asks who works on one subject after the other: the summary, or the name, is the question, the docstring its
answer. Two kinds of questions come back to an earlier pair: ``literal``, three to six content words of its answer as
half remembered, and ``half``, the first half of the earlier question's words.

Chunks are embedded as pipeline/conversations/embed.py embeds them, with the bundled model, and compared exactly; no
server is used. The measure is the share of questions with one of their pairs among what is read along. Writes
bench/results/history.json, from which ``python -m bench.judged`` writes the table of docs/modes.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.machine import moment
from bench.python_docs import collection
from pipeline.core.conversations import pieces, render
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Embedder, Vectors
from pipeline.embedding.tokens import byte_pairs
from pipeline.embedding.vectors import unit
from pipeline.runtime.settings import EmbeddingSettings, dist
from query.modes.budget import HISTORY_SHARE
from query.settings import RetrievalSettings

RESULTS = Path(__file__).parent / "results" / "history.json"
GROUPS = (1, 2, 5, 10, 20)
"""Pairs a chunk."""
NEAREST = (5, 10)
PAIRS = 50
"""As many as five chunks of ten."""
BUDGET = int(HISTORY_SHARE * RetrievalSettings().standard_tokens)


def made() -> tuple[list[str], dict[str, list[tuple[str, set[int]]]]]:
    """The pairs of the history in order of time, and by their kinds the questions, with the pairs that answer them."""
    source = collection()
    summaries = {next(iter(query.relevant)): query.text for query in source.queries if query.kind == "summary"}
    names = sorted(name for name in source.documents if not name.startswith("topic."))
    at = {name: n for n, name in enumerate(names)}
    pairs = [render(summaries.get(name, f"What does {name} do?"), source.documents[name]) for name in names]
    literal = [
        (query.text, {at[name] for name in query.relevant if name in at})
        for query in source.queries
        if query.kind == "literal"
    ]
    half = [(_first_half(text), {at[name]}) for name, text in summaries.items()]
    return pairs, {"literal": [(text, answers) for text, answers in literal if answers], "half": half}


def _first_half(text: str) -> str:
    words = text.split()
    return " ".join(words[: (len(words) + 1) // 2])


async def measured(model: Embedder) -> dict[str, Any]:
    pairs, kinds = made()
    lines: dict[str, Any] = {}
    vectors = {
        kind: np.stack([np.ravel(await model.embed_query(text)) for text, _ in questions])
        for kind, questions in kinds.items()
    }
    for size in GROUPS:
        groups = [range(start, min(start + size, len(pairs))) for start in range(0, len(pairs), size)]
        texts = ["\n\n".join(pairs[n] for n in group) for group in groups]
        chunks = await _embedded(model, texts)
        tokens = np.array(byte_pairs().count(texts))
        lines[f"{size}"] = {
            "tokens a chunk": round(float(tokens.mean())),
            **{
                kind: _shares(
                    np.argsort(-(vectors[kind] @ chunks.T), axis=1, kind="stable"),
                    [{n // size for n in answers} for _, answers in questions],
                    tokens,
                    size,
                )
                for kind, questions in kinds.items()
            },
        }
    return {"pairs": len(pairs), "questions": {kind: len(of) for kind, of in kinds.items()}, "lines": lines}


def _shares(
    order: NDArray[np.int64], answers: Sequence[set[int]], tokens: NDArray[np.int64], size: int
) -> dict[str, float]:
    """The share of questions with an answer in each selection of the nearest chunks."""
    selections = {f"{number} nearest": [row[:number] for row in order] for number in NEAREST}
    selections[f"{PAIRS} pairs"] = [row[: PAIRS // size] for row in order]
    selections["budget"] = [row[np.cumsum(tokens[row]) <= BUDGET] for row in order]
    return {
        name: round(float(np.mean([bool(of & set(row.tolist())) for of, row in zip(answers, rows, strict=True)])), 3)
        for name, rows in selections.items()
    }


async def _embedded(model: Embedder, texts: Sequence[str]) -> Vectors:
    """The mean of each text's parts that fit into the model's window, weighted by their tokens."""
    window = model.input_window - sum(model.count_tokens([model.document_prefix]))
    means = []
    for text in texts:
        parts = pieces(text, window=window, count_tokens=model.count_tokens)
        embedded = await model.embed_documents([part for part, _ in parts])
        means.append(np.array([tokens for _, tokens in parts]) @ embedded.vectors)
    return unit(np.stack(means).astype(np.float32))


async def main() -> None:
    began = moment()
    model = embedder(EmbeddingSettings(), dist() / "models")
    try:
        results = await measured(model)
    finally:
        await model.aclose()
    RESULTS.write_text(json.dumps({**began, **results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    asyncio.run(main())
