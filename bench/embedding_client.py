"""Measures the embedding client alone: its throughput with a server that takes 50 ms, and how it obeys rate limits.

python -m bench.embedding_client [--quick] [--json FILE]

Throughput: eight callers, the number of a worker's lanes, send texts of a chunk's length for some seconds. Possible are
inputs of a request · parallel requests / latency. For comparison, ``bare`` is a client that only sends prepared bytes
and discards the responses: where it is slower than what is possible, the machine (or the server) is the limit. Also
measured is the processor time of an input in the client and in the server, which is a separate process: an input of
1,536 dimensions is 2 kB of text sent and 8 kB of base64 read, and ``one_processor_per_s`` is the throughput of a client
that keeps one processor busy, whatever the latency.

Limits: a server accepts a number of requests (or tokens) per second and answers the others with 429 and a Retry-After
of whole seconds, or of milliseconds. Measured from its first refusal, because a client cannot know the limit before:
the share of the allowed requests that were answered, and the most requests in any window of WINDOW_SECONDS, including
refused ones, over the number that the limit allows in it."""

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
"""Inputs of a request and parallel requests; the last are the default settings."""
LANES = 8
TEXT_WORDS = 265
"""About 410 tokens of text."""
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
    """Return the sum of the calls' results per second, over callers that call repeatedly, after a warm-up."""
    begins = time.perf_counter() + WARM_SECONDS
    ends, done = begins + seconds, 0.0

    async def caller() -> None:
        nonlocal done
        while (began := time.perf_counter()) < ends:
            count = await call()
            ended = time.perf_counter()
            # A call that crosses an edge counts with its part inside.
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
    """A token bucket: accepts ``rate`` per second and saves up to ``room`` seconds of it."""

    rate: float
    room: float = 1.0
    _full_at: float = field(default=0.0, init=False)
    """When the bucket is full again."""

    def take(self, cost: float, now: float) -> float:
        """Take an amount, or return the seconds until there is enough. 0: taken."""
        missing = max(0.0, self._full_at - now) + cost / self.rate
        if missing > self.room:
            return missing - self.room
        self._full_at = now + missing
        return 0.0


@dataclass
class Window:
    """A sliding window: accepts ``rate`` requests in any second."""

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
    """Enforces a limit of requests or tokens (four letters each), and records the times of requests."""

    def __init__(self, bucket: Bucket | Window, unit: str, *, milliseconds: bool) -> None:
        super().__init__(LATENCY_MS / 1_000)
        self._bucket, self._unit, self._milliseconds = bucket, unit, milliseconds
        self.requested: list[float] = []
        self.accepted: list[tuple[float, float]] = []
        """The times and costs of accepted requests."""
        self.refused: list[float] = []

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await request.json()
        cost = 1.0 if self._unit == "requests" else sum(map(len, body["input"])) / 4
        now = time.monotonic()
        self.requested.append(now)
        if wait := self._bucket.take(cost, now):
            self.refused.append(now)
            header = {"retry-after-ms": f"{1_000 * wait:.0f}"} if self._milliseconds else {}
            error = {"message": "Rate limit reached", "type": "requests", "code": "rate_limit_exceeded"}
            return web.json_response(
                {"error": error}, status=429, headers={"retry-after": str(math.ceil(wait)), **header}
            )
        self.accepted.append((now, cost))
        return await super()._embeddings(request)


@dataclass(frozen=True)
class Limit:
    name: str
    rate: float
    unit: str = "requests"
    room: float = 1.0
    milliseconds: bool = False
    window: bool = False
    """Use a sliding window instead of a bucket."""


LIMITS = (
    Limit("20 requests a second, a second saved up", 20),
    Limit("20 requests a second, none saved up, milliseconds told", 20, room=0.06, milliseconds=True),
    Limit("40,000 tokens a second, a second saved up", 40_000, "tokens"),
    Limit("5 requests a second, ten seconds saved up", 5, room=10.0),
    Limit("20 requests in any second", 20, window=True),
)
INPUTS = 8


async def measure_limit(limit: Limit, seconds: float) -> dict[str, Any]:
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
    let = sum(cost for at, cost in server.accepted if begins <= at < ends)
    requested = sorted(at for at in server.requested if begins < at < ends)
    cost = sum(cost for _, cost in server.accepted) / len(server.accepted)
    window = min(WINDOW_SECONDS, seconds)
    most = max(bisect_left(requested, start + window) - n for n, start in enumerate(requested))
    return {
        "limit": limit.name,
        "answered_of_allowed": round(let / (limit.rate * seconds), 3),
        "most_asked_of_allowed": round(most * cost / (limit.rate * (window + limit.room)), 3),
        "refused": len(server.refused),
        "requests": len(server.requested),
    }


async def press(embedder: OpenAIEmbedder, server: Limited, seconds: float) -> None:
    """Run callers that send without pause until some time after the first refusal, and obey each Retry-After."""
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


def print_result(result: dict[str, Any]) -> None:
    for title, rows in (("Throughput at 50 ms", result["throughput"]), ("Limits", result["limits"])):
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*map(str, row.values()))
        console.print(table)


async def measure(quick: bool) -> dict[str, Any]:
    seconds = 2.0 if quick else 6.0
    with zero_cost(LATENCY_MS) as address:
        rows = [await throughput(address, inputs, parallel, seconds) for inputs, parallel in SHAPES]
    # Concurrently, because each mostly waits. The wait after the first refusal counts, a second for most.
    limits = await asyncio.gather(*(measure_limit(limit, 20.0 if quick else 40.0) for limit in LIMITS))
    return {"latency_ms": LATENCY_MS, "load": round(os.getloadavg()[0], 1), "throughput": rows, "limits": limits}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seconds each, twenty for the limits")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    configure(wrapper_class=make_filtering_bound_logger(logging.WARNING))  # no client would log every request
    result = asyncio.run(measure(options.quick))
    print_result(result)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
