"""Measures how long one caller's searches take during another tenant's full load.

    python -m bench.shares [--chunks 10000] [--seconds 10] [--rounds 3] [--processes 1 2] [--json FILE]

A library of two tenants on the running local stack (``penstock up --no-workers``; bench/load_library.py), and the
query service as one process or several (bench/load_service.py) with its default shares. Tenant B is one caller that
waits for each answer before it asks again. Tenant A has CALLERS callers with EACH requests at a time, which come back a
tenth of a second after they were sent away. B alone and B beside A are measured in turns, so that both have the same
machine. With several processes each client goes from one to the next, as behind a balancer.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import structlog

from bench.load_corpus import Corpus, WordVectors
from bench.load_library import filled
from bench.load_runs import percentile, tag
from bench.load_service import served
from bench.machine import moment

CALLERS, EACH = 16, 4
PAUSE_SECONDS = 0.1
WARM_SECONDS = 3.0
RESULTS = Path(__file__).parent / "results" / "shares.json"


@dataclass
class Measurements:
    answered: list[float] = field(default_factory=list)
    """Seconds of each response with status 200."""
    statuses: Counter[int] = field(default_factory=Counter)

    def row(self, seconds: float) -> dict[str, Any]:
        return {
            "per_second": round(len(self.answered) / seconds, 1),
            "p50_ms": percentile(self.answered, 50),
            "p95_ms": percentile(self.answered, 95),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
        }


def secret(name: str) -> str:
    return hashlib.sha256(f"shares {name}".encode()).hexdigest()


def keys() -> str:
    ends = (datetime.now(UTC) + timedelta(days=7)).date()
    return "\n".join(
        f'[{name}]\nexpires = {ends}\nsha256 = "{hashlib.sha256(secret(name).encode()).hexdigest()}"\n'
        f'tenant = "{name[0]}"\ntags = ["wiki/{tag("100 %")}"]\n'
        for name in ("b", *(f"a{n}" for n in range(CALLERS)))
    )


async def ask(
    session: aiohttp.ClientSession,
    addresses: list[str],
    name: str,
    questions: Iterator[str],
    until: float,
    measurements: Measurements,
) -> None:
    """Send one request after another, to the addresses in turn."""
    for address in cycle(addresses):
        if perf_counter() >= until:
            return
        began = perf_counter()
        headers = {"X-Api-Key": secret(name)}
        async with session.post(f"{address}/v1/search", json={"query": next(questions)}, headers=headers) as answer:
            await answer.read()
        measurements.statuses[answer.status] += 1
        if answer.status == 200:
            measurements.answered.append(perf_counter() - began)
        else:
            await asyncio.sleep(PAUSE_SECONDS)


async def turn(
    addresses: list[str], questions: Iterator[str], seconds: float, a: Measurements | None, b: Measurements
) -> None:
    """Run one turn. a: None if B is alone."""
    until = perf_counter() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        asking = [ask(session, addresses, "b", questions, until, b)]
        if a is not None:
            asking += [
                ask(session, addresses, f"a{n}", questions, until, a) for n in range(CALLERS) for _ in range(EACH)
            ]
        await asyncio.gather(*asking)


async def measure(addresses: list[str], questions: Iterator[str], seconds: float, rounds: int) -> dict[str, Any]:
    await turn(addresses, questions, WARM_SECONDS, Measurements(), Measurements())
    alone, concurrent, crowd = Measurements(), Measurements(), Measurements()
    for _ in range(rounds):
        await turn(addresses, questions, seconds, None, alone)
        await turn(addresses, questions, seconds, crowd, concurrent)
    whole = rounds * seconds
    rows = {"b_alone": alone.row(whole), "b_beside_a": concurrent.row(whole), "a": crowd.row(whole)}
    ratios = {
        f"{q}_ratio": round(rows["b_beside_a"][f"{q}_ms"] / rows["b_alone"][f"{q}_ms"], 2)
        for q in ("p50", "p95")
        if rows["b_beside_a"][f"{q}_ms"] is not None
    }
    return {**rows, **ratios}


async def main(options: argparse.Namespace) -> None:
    corpus = Corpus()
    vectors = WordVectors(options.dimensions, corpus)
    report: dict[str, Any] = {**moment(), "cpus": os.cpu_count(), "chunks": options.chunks, "runs": []}
    async with AsyncExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        await closing.enter_async_context(filled(corpus, vectors, options.chunks, folder, ("a", "b")))
        file = folder / "shares.toml"
        file.write_text(keys())
        for processes in options.processes:
            async with AsyncExitStack() as serving:
                settings = {"PENSTOCK_AUTH_KEYS_FILE": str(file), **dict(options.set)}
                addresses = [
                    (await serving.enter_async_context(served(folder, options.dimensions, settings)))[0]
                    for _ in range(processes)
                ]
                load = round(os.getloadavg()[0], 1)
                measured = await measure(addresses, corpus.questions(17), options.seconds, options.rounds)
                load_after = round(os.getloadavg()[0], 1)
                report["runs"].append({"processes": processes, "load": [load, load_after], **measured})
                print(json.dumps(report["runs"][-1]))
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=10_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="of the service")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=lambda text: tuple(text.split("=", 1)),
        help="a setting of the service, for comparing",
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    asyncio.run(main(parser.parse_args()))
