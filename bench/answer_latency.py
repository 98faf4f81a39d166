"""Measures how long an answer takes over HTTP, with a rerank server and a chat model of realistic latency.

    python -m bench.answer_latency [--chunks 50000] [--dimensions 384] [--answers 40] [--library FOLDER] [--json FILE]

The library and the service are those of ``bench.query_load``. The rerank server takes 300 ms a request; the chat model
400 ms to its first token and 10 ms for each of about 150 (tests/fakes). Answers are streamed (SSE) to clients that wait
for one before they request the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from bench.load_corpus import Corpus, WordVectors
from bench.load_library import filled
from bench.load_runs import key, percentile
from bench.load_service import served
from tests.fakes.chat import FakeChat
from tests.fakes.chat_faults import Faults
from tests.fakes.rerank import FakeRerank

RERANK_SECONDS, FIRST_TOKEN_SECONDS, TOKEN_SECONDS, TOKENS = 0.3, 0.4, 0.01, 150
CLIENTS = (1, 4, 8)
RESULTS = Path(__file__).parent / "results" / "answer_latency.json"


class Talkative(FakeChat):
    """Repeats the fake's answer until it has the length of a real one, each sentence with its citation."""

    def _text(self, body: dict[str, Any]) -> str:
        words = super()._text(body).split()
        return " ".join((words * (TOKENS // len(words) + 1))[:TOKENS])


@dataclass
class Run:
    """The seconds of each answer, from the request's first byte."""

    clients: int
    sources: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    complete: list[float] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=dict)
    degraded: Counter[str] = field(default_factory=Counter)
    """Steps that were left out."""
    grounded: int = 0
    tokens: int = 0

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"clients": self.clients, "answers": len(self.complete)}
        for name in ("sources", "first_token", "complete"):
            seconds: Sequence[float] = getattr(self, name)
            row[name] = {f"p{q}_ms": percentile(seconds, q) for q in (50, 95, 99)}
        return row | {
            "tokens": round(self.tokens / max(1, len(self.complete))),
            "grounded": self.grounded,
            "degraded": dict(self.degraded),
            "steps_p50_ms": {name: round(sorted(times)[len(times) // 2], 1) for name, times in self.steps.items()},
        }


async def ask(session: aiohttp.ClientSession, question: str, run: Run) -> None:
    began = perf_counter()
    event, has_token = "", False
    async with session.post(
        "/v1/answers", json={"question": question, "stream": True}, headers={"X-Api-Key": key("100 %")}
    ) as answer:
        answer.raise_for_status()
        async for raw in answer.content:
            name, _, value = raw.decode().rstrip("\n").partition(": ")
            if name == "event":
                event = value
            elif name == "data" and event == "sources":
                run.sources.append(perf_counter() - began)
            elif name == "data" and event == "delta":
                if not has_token:
                    run.first_token.append(perf_counter() - began)
                has_token = True
            elif name == "data" and event == "done":
                run.complete.append(perf_counter() - began)
                note(json.loads(value), run)
            elif name == "data" and event == "error":
                raise SystemExit(f"the service could not answer: {value}")


def note(done: Mapping[str, Any], run: Run) -> None:
    run.grounded += done["grounded"]
    run.tokens += len(done["answer"].split())
    for step in done["steps"]:
        run.steps.setdefault(step["step"], []).append(step["took_ms"])
        run.degraded[step["step"]] += bool(step.get("degraded"))


async def press(address: str, questions: Iterator[str], clients: int, answers: int) -> Run:
    run = Run(clients)

    async def client() -> None:
        for _ in range(answers // clients):
            await ask(session, next(questions), run)

    async with aiohttp.ClientSession(address, connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**24) as session:
        await asyncio.gather(*(client() for _ in range(clients)))
    run.degraded = +run.degraded
    return run


async def main(chunks: int, dimensions: int, answers: int, held: Path | None, written: Path) -> None:
    corpus = Corpus()
    before = os.getloadavg()[0]
    async with AsyncExitStack() as closing:
        folder = held or Path(closing.enter_context(tempfile.TemporaryDirectory()))
        if held is None:
            await closing.enter_async_context(filled(corpus, WordVectors(dimensions, corpus), chunks, folder))
        faults = Faults(latency_seconds=FIRST_TOKEN_SECONDS, token_seconds=TOKEN_SECONDS)
        chat = await closing.enter_async_context(Talkative(faults=faults))
        reranker = await closing.enter_async_context(FakeRerank())
        reranker.faults.latency_seconds = RERANK_SECONDS
        settings = {
            "PENSTOCK_RERANK_URL": reranker.url(),
            "PENSTOCK_RERANK_MODEL": reranker.model,
            "PENSTOCK_CHAT_BASE_URL": chat.url,
            "PENSTOCK_CHAT_MODEL": chat.model,
            "PENSTOCK_CHAT_API_KEY": "any",
        }
        address, _ = await closing.enter_async_context(served(folder, dimensions, settings))
        questions = corpus.questions(13)
        await press(address, questions, 2, 6)  # warm
        rows = []
        for clients in CLIENTS:
            rows.append((await press(address, questions, clients, answers)).row())
            print(json.dumps(rows[-1], ensure_ascii=False))
    report = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "load_average": {"before": round(before, 1), "after": round(os.getloadavg()[0], 1)},
        "rerank_seconds": RERANK_SECONDS,
        "first_token_seconds": FIRST_TOKEN_SECONDS,
        "token_seconds": TOKEN_SECONDS,
        "tokens": TOKENS,
        "runs": rows,
    }
    written.parent.mkdir(exist_ok=True)
    written.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=50_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--answers", type=int, default=40, help="of each run")
    parser.add_argument("--library", type=Path, help="folder of one that python -m bench.load_library holds")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    asyncio.run(main(options.chunks, options.dimensions, options.answers, options.library, options.json))
