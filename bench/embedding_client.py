"""The embedding client alone: its throughput against a server that takes 50 ms, and its manners when it is sent away.

    python -m bench.embedding_client [--quick] [--json FILE]

Throughput: eight callers, as a worker has lanes, each with texts of a chunk's length, for some seconds. What is
possible: inputs of a request · parallel requests / latency. Beside it what a client gets here that only sends prepared
bytes and throws the answers away: where that is below what is possible, the machine (or the server) is the limit. And
the processor time that an input takes in the client and in the server, which is a process of its own: an input of 1,536
dimensions is 2 kB of text sent and 8 kB of base64 read, and ``one_processor_per_s`` is what a client comes to that
does nothing else, whatever the latency.

Limits: a server that lets a set number of requests (or tokens) through a second and answers the others 429 with a
Retry-After of whole seconds, or of milliseconds. Measured from its first refusal on, for a client cannot know a limit
before: the share of the allowed that was answered, and the most requests of any window of WINDOW_SECONDS, refused ones
included, over what the limit allows in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web
from rich.console import Console
from rich.table import Table
from structlog import configure, make_filtering_bound_logger

from bench.prose import text
from bench.zero_cost import DIMENSIONS, MODEL, ZeroCost, zero_cost
from pipeline.core.errors import Retryable
from pipeline.embedding.openai import OpenAIEmbedder
from pipeline.embedding.tokens import byte_pairs
from pipeline.runtime.settings import EmbeddingSettings

RESULTS = Path(__file__).parent / "results" / "embedding_client.json"
LATENCY_MS = 50.0
SHAPES = ((16, 4), (64, 4), (64, 16), (512, 4))
"""Inputs of a request, parallel requests; the last is what the settings are when nothing is set."""
LANES = 8
TEXT_WORDS = 265
"""About 410 tokens."""
WARM_SECONDS = 1.0
WINDOW_SECONDS = 5.0

console = Console(highlight=False)


# Throughput


@asynccontextmanager
async def client(address: str, inputs: int, parallel: int) -> AsyncIterator[OpenAIEmbedder]:
    settings = EmbeddingSettings(
        provider="openai",
        base_url=f"{address}/v1",
        dimensions=DIMENSIONS,
        model=MODEL,
        batch_inputs=inputs,
        parallel_requests=parallel,
    )
    embedder = OpenAIEmbedder(settings, byte_pairs())
    try:
        yield embedder
    finally:
        await embedder.aclose()


async def per_second(call: Callable[[], Awaitable[int]], callers: int, seconds: float) -> float:
    """What calls return, summed over callers that call again and again, a second, after a warming up."""
    begins = time.perf_counter() + WARM_SECONDS
    ends, done = begins + seconds, 0.0

    async def caller() -> None:
        nonlocal done
        while (began := time.perf_counter()) < ends:
            count = await call()
            ended = time.perf_counter()
            # Of a call across an edge, the part within.
            inside = max(0.0, min(ended, ends) - max(began, begins))
            done += count * inside / (ended - began)

    await asyncio.gather(*(caller() for _ in range(callers)))
    return done / seconds


async def throughput(address: str, inputs: int, parallel: int, seconds: float) -> dict[str, Any]:
    texts = [text(n, TEXT_WORDS) for n in range(inputs)]
    own = psutil.Process()
    model = next(child for child in own.children() if "bench.zero_cost" in child.cmdline())
    async with client(address, inputs, parallel) as embedder:

        async def embed() -> int:
            return len((await embedder.embed_documents(texts)).vectors)

        before, began = (_processor_seconds(own), _processor_seconds(model)), time.perf_counter()
        ours = await per_second(embed, max(LANES, 2 * parallel), seconds)
        took = time.perf_counter() - began
        busy, model_busy = (_processor_seconds(own) - before[0]) / took, (_processor_seconds(model) - before[1]) / took
    bare = await bare_throughput(address, texts, parallel, seconds)
    possible = inputs * parallel / (LATENCY_MS / 1_000)
    return {
        "inputs": inputs,
        "parallel": parallel,
        "tokens_a_request": sum(byte_pairs().count(texts)),
        "possible_per_s": round(possible),
        "per_s": round(ours),
        "bare_per_s": round(bare),
        "of_possible": round(ours / possible, 3),
        "of_bare": round(ours / bare, 3),
        "processors_busy": round(busy, 2),
        "processor_us_an_input": round(1e6 * busy / ours),
        "model_us_an_input": round(1e6 * model_busy / ours),
        # One processor's worth of inputs: Python reads answers on one at a time.
        "one_processor_per_s": round(ours / busy),
    }


def _processor_seconds(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


async def bare_throughput(address: str, texts: Sequence[str], parallel: int, seconds: float) -> float:
    body = json.dumps({"input": texts, "model": MODEL, "encoding_format": "base64"}).encode()
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**22) as session:

        async def post() -> int:
            async with session.post(f"{address}/v1/embeddings", data=body, headers=headers) as answer:
                answer.raise_for_status()
                await answer.read()
            return len(texts)

        return await per_second(post, parallel, seconds)


# Limits


@dataclass
class Bucket:
    """Lets ``rate`` a second through; ``room`` seconds of it may be saved up."""

    rate: float
    room: float = 1.0
    _full_at: float = field(default=0.0, init=False)
    """When the bucket is full again."""

    def take(self, cost: float, now: float) -> float:
        """Seconds until there will be enough; 0: taken."""
        missing = max(0.0, self._full_at - now) + cost / self.rate
        if missing > self.room:
            return missing - self.room
        self._full_at = now + missing
        return 0.0


@dataclass
class Window:
    """Lets ``rate`` requests through in any second."""

    rate: float
    room: float = 1.0
    _let: deque[float] = field(default_factory=deque)

    def take(self, cost: float, now: float) -> float:
        while self._let and self._let[0] <= now - 1.0:
            self._let.popleft()
        if len(self._let) + cost > self.rate:
            return self._let[0] + 1.0 - now
        self._let.append(now)
        return 0.0


class Limited(ZeroCost):
    """Keeps a limit of requests or of tokens (four letters each), and remembers when it was asked."""

    def __init__(self, bucket: Bucket | Window, unit: str, *, milliseconds: bool) -> None:
        super().__init__(LATENCY_MS / 1_000)
        self._bucket, self._unit, self._milliseconds = bucket, unit, milliseconds
        self.asked: list[float] = []
        self.let: list[tuple[float, float]] = []
        """When, and what it cost."""
        self.refused: list[float] = []

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await request.json()
        cost = 1.0 if self._unit == "requests" else sum(map(len, body["input"])) / 4
        now = time.monotonic()
        self.asked.append(now)
        if wait := self._bucket.take(cost, now):
            self.refused.append(now)
            header = {"retry-after-ms": f"{1_000 * wait:.0f}"} if self._milliseconds else {}
            error = {"message": "Rate limit reached", "type": "requests", "code": "rate_limit_exceeded"}
            return web.json_response(
                {"error": error}, status=429, headers={"retry-after": str(math.ceil(wait)), **header}
            )
        self.let.append((now, cost))
        return await super()._embeddings(request)


@dataclass(frozen=True)
class Limit:
    name: str
    rate: float
    unit: str = "requests"
    room: float = 1.0
    milliseconds: bool = False
    window: bool = False
    """So many in any second, and not a bucket."""


LIMITS = (
    Limit("20 requests a second, a second saved up", 20),
    Limit("20 requests a second, none saved up, milliseconds told", 20, room=0.06, milliseconds=True),
    Limit("40,000 tokens a second, a second saved up", 40_000, "tokens"),
    Limit("5 requests a second, ten seconds saved up", 5, room=10.0),
    Limit("20 requests in any second", 20, window=True),
)
INPUTS = 8


async def manners(limit: Limit, seconds: float) -> dict[str, Any]:
    allows = Window(limit.rate) if limit.window else Bucket(limit.rate, limit.room)
    server = Limited(allows, limit.unit, milliseconds=limit.milliseconds)
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with client(f"http://{host}:{port}", INPUTS, 4) as embedder:
            await press(embedder, server, seconds)
    finally:
        await runner.cleanup()
    begins = server.refused[0]
    ends = begins + seconds
    let = sum(cost for at, cost in server.let if begins <= at < ends)
    asked = sorted(at for at in server.asked if begins < at < ends)
    cost = sum(cost for _, cost in server.let) / len(server.let)
    window = min(WINDOW_SECONDS, seconds)
    most = max(bisect_left(asked, start + window) - n for n, start in enumerate(asked))
    return {
        "limit": limit.name,
        "answered_of_allowed": round(let / (limit.rate * seconds), 3),
        "most_asked_of_allowed": round(most * cost / (limit.rate * (window + limit.room)), 3),
        "refused": len(server.refused),
        "requests": len(server.asked),
    }


async def press(embedder: OpenAIEmbedder, server: Limited, seconds: float) -> None:
    """Callers that always want more, until that long after the first refusal; who is sent away comes back in time."""
    texts = [text(n, TEXT_WORDS) for n in range(INPUTS)]

    def over() -> bool:
        return bool(server.refused) and time.monotonic() > server.refused[0] + seconds

    async def caller() -> None:
        while not over():
            try:
                await embedder.embed_documents(texts)
            except Retryable as away:
                await asyncio.sleep(away.retry_after or 0.0)

    await asyncio.gather(*(caller() for _ in range(LANES)))


def shown(result: dict[str, Any]) -> None:
    for title, rows in (("Throughput at 50 ms", result["throughput"]), ("Limits", result["limits"])):
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*map(str, row.values()))
        console.print(table)


async def measure(quick: bool) -> dict[str, Any]:
    seconds = 2.0 if quick else 6.0
    with zero_cost(LATENCY_MS) as address:
        rows = [await throughput(address, inputs, parallel, seconds) for inputs, parallel in SHAPES]
    # Side by side: each mostly waits. The wait after the first refusal is in it, a second with most.
    limits = await asyncio.gather(*(manners(limit, 20.0 if quick else 40.0) for limit in LIMITS))
    return {"latency_ms": LATENCY_MS, "load": round(os.getloadavg()[0], 1), "throughput": rows, "limits": limits}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seconds each, twenty for the limits")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    configure(
        wrapper_class=make_filtering_bound_logger(logging.WARNING)
    )  # a line for each request is part of no client
    result = asyncio.run(measure(given.quick))
    shown(result)
    given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
