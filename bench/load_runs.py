"""Runs clients against the query service, and prints tables of their measurements."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np
import psutil

from bench.load_corpus import Corpus

SHARES: Mapping[str, int] = {"0.1 %": 1_000, "1 %": 100, "10 %": 10, "100 %": 1}
"""By share of readable documents: one of so many may be read."""
CONCURRENCY = (1, 4, 16, 32, 64, 96, 192)
"""Clients. The service works on a few requests at once and lets 64 more wait (ServeSettings); it refuses further
ones."""
FEW = (1, 8)


def key(share: str) -> str:
    return hashlib.sha256(f"load {share}".encode()).hexdigest()


def tag(share: str) -> str:
    return f"one-in-{SHARES[share]}"


@dataclass
class Run:
    share: str
    concurrency: int
    feedback: bool = True
    seconds: float = 0.0
    answered: list[float] = field(default_factory=list)
    """Seconds of each response with status 200."""
    shed: list[float] = field(default_factory=list)
    """Seconds of each response with status 503."""
    other: Counter[int] = field(default_factory=Counter)
    """Other responses by status; 0: the connection was lost."""
    cpu_seconds: float = 0.0
    """Processor seconds of the service's process, without Postgres and Elasticsearch."""
    degraded: int = 0
    empty: int = 0
    steps: dict[str, list[float]] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        requests = len(self.answered) + len(self.shed) + self.other.total()
        return {
            "access": self.share,
            "concurrency": self.concurrency,
            "feedback": self.feedback,
            "asked": requests,
            "per_second": round(len(self.answered) / self.seconds, 1),
            "p50_ms": percentile(self.answered, 50),
            "p95_ms": percentile(self.answered, 95),
            "p99_ms": percentile(self.answered, 99),
            "shed": len(self.shed),
            "shed_p99_ms": percentile(self.shed, 99),
            "service_cpu_ms_per_request": round(1000 * self.cpu_seconds / max(1, requests), 1),
            "degraded": self.degraded,
            "empty": self.empty,
            "other": {str(status): count for status, count in self.other.items()},
            "steps_p50_ms": {name: round(float(np.median(times)), 1) for name, times in self.steps.items()},
        }


def percentile(seconds: Sequence[float], q: float) -> float | None:
    return round(1000 * float(np.percentile(seconds, q)), 1) if seconds else None


async def press(
    session: aiohttp.ClientSession, service: psutil.Process, run: Run, questions: Iterator[str], seconds: float
) -> None:
    """Run ``concurrency`` clients, each with one request at a time. A client that gets 503 retries after a tenth of a
    second, although its Retry-After is a whole one."""
    until = perf_counter() + seconds

    async def client() -> None:
        while perf_counter() < until:
            start = perf_counter()
            try:
                async with session.post(
                    "/v1/search", json={"query": next(questions)}, headers={"X-Api-Key": key(run.share)}
                ) as answer:
                    status, body = answer.status, await answer.json(content_type=None)
            except aiohttp.ClientError:
                status, body = 0, {}
            took = perf_counter() - start
            if status == 200:
                run.answered.append(took)
                run.degraded += bool(body["degraded"])
                run.empty += not body["results"]
                for step in body["steps"]:
                    run.steps.setdefault(step["step"], []).append(step["took_ms"])
            elif status == 503:
                run.shed.append(took)
                await asyncio.sleep(0.1)
            else:
                run.other[status] += 1

    began, spent = perf_counter(), sum(service.cpu_times()[:2])
    await asyncio.gather(*(client() for _ in range(run.concurrency)))
    run.seconds, run.cpu_seconds = perf_counter() - began, sum(service.cpu_times()[:2]) - spent


async def load(
    address: str, service: psutil.Process, corpus: Corpus, seconds: float, *, feedback: bool
) -> AsyncIterator[Run]:
    """Run wide access at every concurrency and narrow access at a few; without relevance feedback
    (query/retrieval/feedback.py) only wide access at a few. Yields each run."""
    questions = corpus.questions(11 if feedback else 12)
    runs = [Run("100 %", 4, feedback)]  # warm
    for share in reversed(SHARES) if feedback else ["100 %"]:
        runs += [Run(share, n, feedback) for n in (CONCURRENCY if SHARES[share] == 1 and feedback else FEW)]
    for n, run in enumerate(runs):
        # New connections: one that was idle for the server's limit may be closed just as it is used.
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(address, connector=connector) as session:
            await press(session, service, run, questions, seconds)
        print(f"  {line(run.row())}", file=sys.stderr)
        if n:
            yield run


def line(row: Mapping[str, Any]) -> str:
    def ms(name: str) -> str:
        return f"{row[name]:7.1f}" if row[name] is not None else "      –"

    return (
        f"{row['access']:>6} {row['concurrency']:>11} {row['per_second']:>9} {ms('p50_ms')} {ms('p95_ms')}"
        f" {ms('p99_ms')} {row['shed']:>6} {ms('shed_p99_ms')}"
        f"{'' if row['feedback'] else '  (no feedback)'}"
    )


def summary(report: Mapping[str, Any]) -> str:
    lines = [
        f"{'access':>6} {'concurrency':>11} {'answers/s':>9} {'p50':>7} {'p95':>7} {'p99':>7} {'shed':>6} {'p99':>7}"
    ]
    lines += [line(row) for row in report["load"]]
    lines += ["", f"{'access':>6} {'recall@10':>9} {'worst':>6} {'graph alone':>11} {'p50':>7} {'exact':>7}  scans"]
    for share, of in report["recall"].items():
        lines.append(
            f"{share:>6} {of['recall@10']:>9.3f} {of['worst']:>6.1f} {of['graph_recall@10']:>11.3f}"
            f" {of['p50_ms']:>7.1f} {of['exact_p50_ms']:>7.1f}  {of['scans']}"
        )
    return "\n".join(lines)
