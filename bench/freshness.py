"""Measures freshness under load: edits of mixed sizes at a steady pace, during a backfill in the other lane.

    python -m bench.freshness [--seconds 600] [--rate 100] [--backfill 100000] [--json]

A running system (bench.running), filled first. An edit's time counts from the moment before it is published until the
ledger says that the slower store returns it, or something newer (each edit counts, also one that was overtaken).
Probes are really searched for, in both stores, from the same moment until the answer holds the new word. Memory is each
worker's RSS, every five seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
import psutil
import psycopg
from rich.console import Console
from rich.table import Table

from bench.load_corpus import Corpus
from bench.running import FOR_LONG, Running, machine, running, spread
from pipeline.kafka.client import deliver, producer
from pipeline.kafka.producer import Producer
from pipeline.runtime.settings import KafkaSettings
from topics.messages import DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, Topic

WORDS = (60, 60, 200, 200, 700, 1_850)
"""Sizes of the edited documents, in turn: one chunk to twenty."""
BACKFILL_WORDS, BACKFILL_CHUNKS = 1_850, 19
PAGE = 50
POLL_SECONDS, MEMORY_SECONDS, PROBE_SECONDS, SEARCH_SECONDS = 1.0, 5.0, 2.0, 0.25
MAX_PROBE_SECONDS, LAST_SECONDS = 60.0, 120.0

SETTLED = """
    SELECT d.external_id, d.version, extract(epoch FROM v.settled_at)::float, extract(epoch FROM k.settled_at)::float
    FROM documents d
    JOIN index_state v ON v.document_id = d.id AND v.store = 'vectors'
    JOIN index_state k ON k.document_id = d.id AND k.store = 'keywords'
    WHERE d.tenant = %s AND d.source = %s AND v.seq >= v.want_seq AND k.seq >= k.want_seq AND d.external_id = ANY(%s)
"""
"""Selects what both stores have of a tenant, a source and external ids: version, and when each store had it."""


@dataclass
class Load:
    """The load on the system, and its measurements."""

    run: Running
    sender: Producer
    corpus: Corpus
    tenant: str = "default"
    source: str = "live"
    """The source of the documents that are edited."""
    texts: list[str] = field(default_factory=list)
    """Texts of the documents that are edited."""
    waiting: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By document: edits that are not settled, as (version, when it was published)."""
    fresh: dict[str, list[float]] = field(default_factory=lambda: {"both": [], "vectors": [], "keywords": []})
    probes: dict[str, list[float]] = field(default_factory=lambda: {"vector": [], "keyword": []})
    missed: int = 0
    memory: dict[str, list[int]] = field(default_factory=dict)
    most_outside: int = 0
    behind: float = 0.0
    """The longest delay of the publisher itself, in seconds."""

    def tags(self, _name: str) -> list[str]:
        """Return the access tags of a document."""
        return ["staff", f"user:{getpass.getuser()}"]

    async def publish(self, documents: Sequence[tuple[str, str]], topic: Topic, source: str | None = None) -> None:
        now = datetime.now(UTC)
        await deliver(
            self.sender.send(
                topic,
                DocumentUpserted(
                    tenant=self.tenant,
                    source=source or self.source,
                    external_id=name,
                    version=time.time_ns(),
                    observed_at=now,
                    source_modified_at=now,
                    title=name,
                    content=text,
                    media_type="text/markdown",
                    acl_tags=self.tags(name),
                ),
            )
            for name, text in documents
        )

    async def fill(self, documents: int) -> None:
        self.texts = [self.corpus.text(n, WORDS[n % len(WORDS)]) for n in range(documents)]
        named = [(f"{n}.md", text) for n, text in enumerate(self.texts)]
        for start in range(0, documents, PAGE):
            await self.publish(named[start : start + PAGE], DOCUMENTS_BACKFILL)
        while self._pending("live") or self._count("live") < documents:  # noqa: ASYNC110  another process works
            await asyncio.sleep(0.5)

    def _count(self, source: str) -> int:
        return int(self.run.sql("SELECT count(*) FROM documents WHERE source = %s", source)[0][0])

    def _pending(self, source: str) -> int:
        [(count,)] = self.run.sql(
            "SELECT count(*) FROM index_state s JOIN documents d ON d.id = s.document_id"
            " WHERE s.seq < s.want_seq AND d.source = %s",
            source,
        )
        return int(count)

    async def edit(self, rate: float, until: float, *, seed: int = 1) -> int:
        """Edit one word of one document after another at a steady pace. Returns the number of edits. seed: other edits
        for another seed."""
        dice, began, sent = random.Random(seed), time.monotonic(), 0
        order = dice.sample(range(len(self.texts)), len(self.texts))
        sending: set[asyncio.Task[None]] = set()
        while (now := time.monotonic()) < until:
            due = began + sent / rate
            self.behind = max(self.behind, now - due)
            if now < due:
                await asyncio.sleep(due - now)
            n = order[sent % len(order)]
            words = self.texts[n].split(" ")
            words[dice.randrange(len(words))] = f"edit{seed}n{sent}n"
            self.texts[n] = " ".join(words)
            sent += 1
            task = asyncio.create_task(self._edit_one(f"{n}.md", self.texts[n]))
            sending.add(task)
            task.add_done_callback(sending.discard)
        await asyncio.gather(*sending)
        return sent

    async def _edit_one(self, name: str, text: str) -> None:
        self.waiting.setdefault(name, []).append((time.time_ns(), time.time()))
        await self.publish([(name, text)], DOCUMENTS_LIVE)

    async def record_settled(self) -> None:
        async with await psycopg.AsyncConnection.connect(
            self.run.endpoint("postgres", "dsn"), autocommit=True
        ) as connection:
            while True:
                names = list(self.waiting)
                cursor = await connection.execute(SETTLED.encode(), [self.tenant, self.source, names])
                for name, version, vectors, keywords in await cursor.fetchall():
                    # A version is newer than its edit's note, so it includes all edits noted before.
                    for noted, when in self.waiting.pop(name):
                        if noted > version:
                            self.waiting.setdefault(name, []).append((noted, when))
                            continue
                        for store, at in (
                            ("both", max(vectors, keywords)),
                            ("vectors", vectors),
                            ("keywords", keywords),
                        ):
                            self.fresh[store].append(max(0.0, at - when))
                cursor = await connection.execute("SELECT count(*) FROM chunks_g1 WHERE NOT in_graph")
                [(outside,)] = await cursor.fetchall()
                self.most_outside = max(self.most_outside, outside)
                await asyncio.sleep(POLL_SECONDS)

    async def probe(self) -> None:
        """Edit one document after another and search for each."""
        client = httpx.AsyncClient(
            base_url=self.run.endpoint("serve", "url"), headers=self.run.bearer(), timeout=30, trust_env=False
        )
        async with client:
            number = 0
            while True:
                number += 1
                text = f"The probe {number} measures what probe{number}n needs to be found by anybody."
                began = time.monotonic()
                await self.publish([(f"probe-{number % 20}.md", text)], DOCUMENTS_LIVE, source="probe")
                await asyncio.gather(*(self._search_until_visible(client, mode, text, began) for mode in self.probes))
                await asyncio.sleep(PROBE_SECONDS)

    async def _search_until_visible(self, client: httpx.AsyncClient, mode: str, text: str, began: float) -> None:
        while time.monotonic() - began < MAX_PROBE_SECONDS:
            answer = await client.post("/v1/search", json={"query": text, "mode": mode, "top": 50})
            if answer.status_code == 200 and any(text in result["text"] for result in answer.json()["results"]):
                self.probes[mode].append(time.monotonic() - began)
                return
            await asyncio.sleep(SEARCH_SECONDS)
        self.missed += 1

    def old(self, chunks: int) -> list[tuple[str, str]]:
        """Make the texts of the backfill. Done before the measurement, because it takes processor time."""
        return [
            (f"old-{n}.md", self.corpus.text(1_000_000 + n, BACKFILL_WORDS)) for n in range(chunks // BACKFILL_CHUNKS)
        ]

    async def backfill(self, texts: Sequence[tuple[str, str]]) -> None:
        for start in range(0, len(texts), PAGE):
            await self.publish(texts[start : start + PAGE], DOCUMENTS_BACKFILL, source="old")

    async def sample_memory(self, workers: Mapping[str, psutil.Process]) -> None:
        while True:
            for name, process in workers.items():
                self.memory.setdefault(name, []).append(round(process.memory_info().rss / 2**20))
            await asyncio.sleep(MEMORY_SECONDS)


@asynccontextmanager
async def alongside(*work: Any) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run coroutines while the block runs. Their errors are raised at its end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for error in failed:
            if error is not None:
                raise error


async def measure(run: Running, options: argparse.Namespace) -> dict[str, Any]:
    kafka = KafkaSettings(bootstrap=run.endpoint("kafka", "bootstrap"))
    async with producer(kafka) as sender:
        load = Load(run, sender, Corpus())
        await load.fill(options.documents)
        filled = run.settle_graph()
        old = load.old(options.backfill)
        workers = {w["name"]: psutil.Process(w["pid"]) for w in run.penstock("status")["workers"]}
        began = time.monotonic()
        async with alongside(load.record_settled(), load.probe(), load.sample_memory(workers), load.backfill(old)):
            edits = await load.edit(options.rate, began + options.seconds)
            took = time.monotonic() - began
            while load.waiting and time.monotonic() - began - took < LAST_SECONDS:  # noqa: ASYNC110  record_settled() ends it
                await asyncio.sleep(POLL_SECONDS)
        [(done,)] = run.sql(
            "SELECT coalesce(sum(cardinality(m.chunk_ids)), 0) FROM manifests m"
            " JOIN documents d ON d.id = m.document_id"
            " JOIN index_state s ON s.document_id = d.id AND s.store = 'vectors' AND s.seq >= s.want_seq"
            " WHERE d.source = 'old'"
        )
    return {
        "seconds": round(took, 1),
        "edits": edits,
        "edits_per_s": round(edits / took, 1),
        "publisher_behind_s": round(load.behind, 2),
        "freshness": {of: spread(times) for of, times in load.fresh.items()},
        "freshness_p99_s": spread(load.fresh["both"])["p99"],
        "never_settled": sum(map(len, load.waiting.values())),
        "probes": {mode: spread(times) for mode, times in load.probes.items()},
        "probes_missed": load.missed,
        "backfilled_chunks": int(done),
        "backfill_chunks": options.backfill,
        "documents": options.documents,
        "graph_after_filling_s": filled,
        "most_outside": load.most_outside,
        "memory_mib": {
            name: {"first": seen[0], "last": seen[-1], "most": max(seen)} for name, seen in load.memory.items()
        },
        "memory_mib_every_5_s": load.memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Freshness at a steady pace of edits, during a backfill.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=100.0, help="edits a second")
    parser.add_argument("--backfill", type=int, default=100_000, help="chunks in the other lane; 0: none")
    parser.add_argument("--documents", type=int, default=3_000, help="that are edited")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    options = parser.parse_args()
    with running("freshness", FOR_LONG) as run:
        result = {"machine": machine(), **asyncio.run(measure(run, options))}
    if options.json:
        print(json.dumps(result))
        return
    table = Table(title=f"{result['edits_per_s']} edits a second", show_header=False)
    for key, value in result.items():
        if key != "memory_mib_every_5_s":
            table.add_row(key, str(value))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
