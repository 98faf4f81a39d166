"""Measures how many webhooks a second the worker of the connectors takes: the HTTP server, the signature, the check for
repeats, and the reaction, without what it reads afterwards.

    python -m bench.events [--events 10000] [--connections 32] [--rounds 3] [--json]

Signed events of Confluence Cloud, each about another page, from a process of its own as fast as its connections permit.
``processor_ms`` is the server's processor time for an event; an event's ``milliseconds`` are those of its HTTP
response, from a sender that never waits between two. The whole connector: ``python -m bench.connectors``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.running import machine, spread
from connectors.confluence.options import ConfluenceOptions
from connectors.confluence.source import Confluence
from connectors.conform.memory_runner import InMemory
from connectors.fakes.confluence import requests
from connectors.fakes.confluence_state import State
from connectors.http import Parts, app
from connectors.runner.instance import Instance
from connectors.set_aside import SetAside
from connectors.source import Context, Reaction, Request
from pipeline.kafka.producer import Producer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.http_server import served

SECRET = "secret"


class Receiver:
    """A connector that does nothing but receive."""

    plan = SimpleNamespace(name="wiki")

    def __init__(self, source: Confluence) -> None:
        self._source = source
        self.pages: set[str] = set()

    async def on_event(self, request: Request) -> Reaction:
        reaction = await self._source.on_event(request)
        self.pages.update(reaction.ids)
        return reaction


def events(count: int) -> list[Request]:
    """Make signed events, each about a page that has just been edited."""
    state = State()
    author = state.add_user("ann").account_id
    state.add_space("ENG")
    pages = [state.add_page("ENG", f"Page {n}", "<p>Text.</p>", author=author) for n in range(count)]
    state.events.clear()
    for page in pages:
        state.edit(page.id, body="<p>Other text.</p>")
    return requests(state.events, SECRET, cloud=True)


def send(address: str, sent: Sequence[Request], connections: int) -> tuple[float, list[float], dict[int, int]]:
    """Send events over so many connections. Returns the seconds, each event's milliseconds, and the statuses."""
    return asyncio.run(_send(address, sent, connections))


async def _send(address: str, sent: Sequence[Request], connections: int) -> tuple[float, list[float], dict[int, int]]:
    milliseconds, statuses, waiting = list[float](), Counter[int](), iter(sent)

    async def connection(client: aiohttp.ClientSession) -> None:
        for event in waiting:
            began = time.perf_counter()
            async with client.post("/v1/events/wiki", data=event.body, headers=dict(event.headers)) as response:
                await response.read()
            milliseconds.append(1_000 * (time.perf_counter() - began))
            statuses[response.status] += 1

    async with aiohttp.ClientSession(address, connector=aiohttp.TCPConnector(limit=connections)) as client:
        began = time.perf_counter()
        await asyncio.gather(*(connection(client) for _ in range(connections)))
        return time.perf_counter() - began, milliseconds, dict(statuses)


async def measure(count: int, connections: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as sender,
    ):
        options = ConfluenceOptions.model_validate(
            {"base_url": "http://127.0.0.1:1/wiki", "email": "a@acme.example", "token": "t", "webhook_secret": SECRET}
        )
        context = Context(name="wiki", tenant="acme", memory=InMemory(), folder=Path(folder), set_aside=SetAside())
        source = Confluence(options, context)
        receiver = Receiver(source)
        parts = Parts({"wiki": cast(Instance, receiver)}, {}, cast(Producer, None), Metrics())
        sent = events(count)
        async with served(app(parts)) as address:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(sender, send, address, sent[:connections], connections)  # it has started
            receiver.pages.clear()
            sent = events(count)  # not those that were received already
            processor = time.process_time()
            seconds, milliseconds, statuses = await loop.run_in_executor(sender, send, address, sent, connections)
            processor = time.process_time() - processor
        await source.close()
    return {
        "per_second": round(count / seconds),
        "statuses": statuses,
        "pages_to_read": len(receiver.pages),
        "milliseconds": spread(milliseconds),
        "processor_ms": round(1_000 * processor / count, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Webhooks that the worker of the connectors takes in a second.")
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    options = parser.parse_args()
    rounds = [asyncio.run(measure(options.events, options.connections)) for _ in range(options.rounds)]
    result = {"machine": machine(), "events": options.events, "connections": options.connections, "rounds": rounds}
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        return
    table = Table(title=f"{options.events:,} events over {options.connections} connections")
    for name in rounds[0]:
        table.add_column(name.replace("_", " "))
    for measured in rounds:
        table.add_row(*(str(value) for value in measured.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
