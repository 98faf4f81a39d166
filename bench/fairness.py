"""Measures how long one tenant's revocations take during another tenant's flood of bad or valid records.

    python -m bench.fairness [--seconds 60] [--rate 1000] [--beside nothing bad valid] [--json]

A running system (bench.running). One tenant shares documents and takes the access back, some a second; a revocation's
time counts from the moment before it is published until the ledger has accepted it, from when on no query shows the
document. First alone, then during ``rate`` bad records a second of another tenant (documents from a clock that is six
minutes ahead), then during as many valid small documents. ``processor_ms_per_record``: the processor time of detect for
each record of the flood, including the revocations, which says more than seconds on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import psycopg
from rich.console import Console
from rich.table import Table

from bench.freshness import alongside
from bench.load_corpus import Corpus
from bench.running import FOR_LONG, Running, machine, running, spread
from pipeline.kafka.client import deliver, producer
from pipeline.kafka.producer import Producer
from pipeline.runtime.settings import KafkaSettings
from topics.messages import AccessChanged, DocumentUpserted
from topics.registry import DOCUMENTS_LIVE

REVOCATIONS_PER_SECOND = 4.0
DOCUMENTS = 400
"""Documents of the tenant whose revocations are timed; each is revoked again after a hundred seconds."""
WORDS = 60
POLL_SECONDS, TICK_SECONDS = 0.1, 0.05
LAST_SECONDS = 300.0
"""Longest wait for the last revocations."""
AHEAD = timedelta(minutes=6)
FLOODS = ("nothing", "bad", "valid")

Flood = Callable[[int], DocumentUpserted]


def document(tenant: str, name: str, content: str, *, ahead: timedelta = timedelta(0)) -> DocumentUpserted:
    return DocumentUpserted(
        tenant=tenant,
        source="files",
        external_id=name,
        version=time.time_ns(),
        observed_at=datetime.now(UTC) + ahead,
        title=name,
        content=content,
        media_type="text/markdown",
        acl_tags=["staff"],
    )


class Quiet:
    """The tenant whose revocations are timed."""

    def __init__(self, run: Running, sender: Producer) -> None:
        self._run = run
        self._sender = sender
        self._number = 0
        self.waiting: dict[str, tuple[datetime, float]] = {}
        """By document: when it was observed, and when that was published by ``time.monotonic()``."""
        self.took: list[float] = []

    async def share(self, corpus: Corpus) -> None:
        names = [f"{n}.md" for n in range(DOCUMENTS)]
        await deliver(
            self._sender.send(DOCUMENTS_LIVE, document("quiet", name, corpus.text(n, WORDS)))
            for n, name in enumerate(names)
        )
        while self._shared() < DOCUMENTS:  # noqa: ASYNC110  another process counts
            await asyncio.sleep(POLL_SECONDS)

    def _shared(self) -> int:
        return int(self._run.sql("SELECT count(*) FROM documents WHERE tenant = 'quiet'")[0][0])

    async def revoke(self, seconds: float) -> None:
        """Revoke one document after another at a steady pace."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            name = f"{self._number % DOCUMENTS}.md"
            self._number += 1
            observed = datetime.now(UTC)
            self.waiting[name] = observed, time.monotonic()
            await deliver(
                [
                    self._sender.send(
                        DOCUMENTS_LIVE,
                        AccessChanged(
                            tenant="quiet",
                            source="files",
                            external_id=name,
                            observed_at=observed,
                            acl_tags=["boss"],
                        ),
                    )
                ]
            )
            await asyncio.sleep(1 / REVOCATIONS_PER_SECOND)

    async def record_accepted(self) -> None:
        dsn = self._run.endpoint("postgres", "dsn")
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            while True:
                cursor = await connection.execute(
                    "SELECT external_id, access_observed_at FROM documents"
                    " WHERE tenant = 'quiet' AND external_id = ANY(%s)",
                    [list(self.waiting)],
                )
                for name, accepted in await cursor.fetchall():
                    observed, began = self.waiting[name]
                    if accepted >= observed:
                        del self.waiting[name]
                        self.took.append(time.monotonic() - began)
                await asyncio.sleep(POLL_SECONDS)


async def flood(sender: Producer, made: Flood, rate: float, seconds: float) -> int:
    """Send ``rate`` records per second at a steady pace. Returns how many were sent."""
    began, sent = time.monotonic(), 0
    while (passed := time.monotonic() - began) < seconds:
        due = int(rate * passed) - sent
        await deliver(sender.send(DOCUMENTS_LIVE, made(sent + n)) for n in range(due))
        sent += due
        await asyncio.sleep(TICK_SECONDS)
    return sent


async def phase(run: Running, sender: Producer, made: Flood | None, options: argparse.Namespace) -> dict[str, Any]:
    quiet = Quiet(run, sender)
    await quiet.share(Corpus())
    [detect] = [psutil.Process(w["pid"]) for w in run.penstock("status")["workers"] if w["name"] == "detect"]
    before, sent = detect.cpu_times(), 0
    async with alongside(quiet.record_accepted()):
        if made is None:
            await quiet.revoke(options.seconds)
        else:
            sent, _ = await asyncio.gather(
                flood(sender, made, options.rate, options.seconds), quiet.revoke(options.seconds)
            )
        ended = time.monotonic()
        while quiet.waiting and time.monotonic() - ended < LAST_SECONDS:  # noqa: ASYNC110  record_accepted() ends it
            await asyncio.sleep(POLL_SECONDS)
    after = detect.cpu_times()
    took = after.user + after.system - before.user - before.system
    [(letters,)] = run.sql("SELECT count(*) FROM dead_letters")
    return {
        "revocations_s": spread(quiet.took),
        "never_accepted": len(quiet.waiting),
        "flood_records_per_s": round(sent / options.seconds, 1),
        "dead_letters": int(letters),
        "processor_ms_per_record": round(took / sent * 1000, 2) if sent else None,
    }


async def measure(run: Running, options: argparse.Namespace) -> dict[str, Any]:
    text = Corpus().text(0, WORDS)
    floods: dict[str, Flood | None] = {
        "nothing": None,
        "bad": lambda n: document("loud", f"bad-{n}.md", text, ahead=AHEAD),
        "valid": lambda n: document("loud", f"{n}.md", f"{text} number{n}n"),
    }
    async with producer(KafkaSettings(bootstrap=run.endpoint("kafka", "bootstrap"))) as sender:
        return {name: await phase(run, sender, floods[name], options) for name in options.beside}


def main() -> None:
    parser = argparse.ArgumentParser(description="One tenant's revocations during another tenant's flood.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each flood")
    parser.add_argument("--rate", type=float, default=1_000.0, help="records a second of the flood")
    parser.add_argument("--beside", nargs="+", choices=FLOODS, default=FLOODS, help="which floods")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    options = parser.parse_args()
    with running("fairness", FOR_LONG) as run:
        result = {"machine": machine(), "beside": asyncio.run(measure(run, options))}
    if options.json:
        print(json.dumps(result))
        return
    table = Table(
        "beside",
        "revocations",
        "p50 s",
        "p99 s",
        "max s",
        "never",
        "flood records/s",
        "dead letters",
        "detect ms/record",
    )
    for name, flooded in result["beside"].items():
        took = flooded["revocations_s"]
        cells = (
            took["count"],
            took["p50"],
            took["p99"],
            took["max"],
            flooded["never_accepted"],
            flooded["flood_records_per_s"],
            flooded["dead_letters"],
            flooded["processor_ms_per_record"],
        )
        table.add_row(name, *map(str, cells))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
