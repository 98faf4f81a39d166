"""The background audit in the detect workers: it compares small pages at one rate over all workers, and reports its
findings as a metric."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from time import monotonic
from uuid import UUID

import structlog
from elasticsearch import AsyncElasticsearch

from pipeline.audit import runs
from pipeline.audit.compare import KINDS, PLACES, Kind, Place
from pipeline.audit.examine import Examiner, Finding, ranges_end
from pipeline.audit.reading import Limits
from pipeline.audit.repair import Repairer
from pipeline.audit.runs import Run
from pipeline.audit.sample import sample
from pipeline.audit.walk import SECOND_LOOK_SECONDS, Page, Suspects, note
from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation
from pipeline.core.throttle import rest_after
from pipeline.kafka.producer import Producer
from pipeline.ledger import generations
from pipeline.observability import lineage
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import AuditSettings
from pipeline.stores import datasets
from pipeline.stores.keywords import Keywords
from pipeline.stores.leader import lead_transaction
from pipeline.stores.postgres import AUDIT_LOCK, Connection, Pool, translated

log = structlog.get_logger()

Counts = Mapping[tuple[Place, Kind], tuple[int, int]]

LIMITS = Limits(documents=200, chunks=500, body_bytes=2_000_000, page=600)
"""The size of a page: the entries of its documents fit into one response of Elasticsearch, so that it is one request to
each store (docs/adr/0040-an-audit-of-everything-in-an-hour.md). With 25 documents each cost twice the processor
time."""
PROCESSOR_SHARE = 0.25
"""The share of one processor that the audit may take from all servers and workers together. They work for a page one
after another, so a page cannot have taken more processor time than its duration."""
SAMPLED_ROWS = 1
"""The number of rows that are searched for in the vector index with each page."""
RECHECKED_DOCUMENTS = 10
"""The number of documents that differed before and are compared again with each page, so that the metric follows a
repair sooner than a round later."""
SUSPECTS_A_PAGE = 1_000
"""The most documents of a page that are compared a second time, for which the page's transaction waits. Only very many
documents that the ledger does not know exceed it; the next round reports more of them."""
IDLE_SECONDS = 5.0
"""Between two attempts to become the leader."""


class BackgroundAudit:
    """Compares all documents with the stores, again and again. It runs in every detect worker; an advisory lock makes
    one of them the leader. Position and rate are stored in Postgres, so that the next leader continues."""

    def __init__(
        self,
        pool: Pool,
        es: AsyncElasticsearch,
        producer: Producer,
        metrics: Metrics,
        settings: AuditSettings,
        *,
        limits: Limits = LIMITS,
        second_look_seconds: float = SECOND_LOOK_SECONDS,
    ) -> None:
        self._pool = pool
        self._es = es
        self._producer = producer
        self._metrics = metrics
        self._settings = settings
        self._limits = limits
        self._second_look = second_look_seconds
        self._again_after: UUID | None = None

    async def run(self) -> BaseException:
        """Audit until cancelled. A failure is logged, and the audit continues after IDLE_SECONDS."""
        while True:
            wait = IDLE_SECONDS
            try:
                if self._settings.documents_per_second > 0:
                    wait = min(IDLE_SECONDS, await self.turn())
            except PenstockError as error:
                log.warning("audit_failed", reason=str(error)[:200])
            await asyncio.sleep(wait)

    async def turn(self) -> float:
        """Compare a page if one is due and no other worker is the leader; returns the seconds until the next turn.
        Raises Retryable, Misconfigured."""
        with translated("background audit"):
            async with self._pool.connection() as connection, connection.transaction():
                is_leader = await lead_transaction(connection, AUDIT_LOCK)
                done, wait = await self._page(connection) if is_leader else (None, IDLE_SECONDS)
            began = monotonic()
            if done is not None:
                await self._repair(*done)
            async with self._pool.connection() as connection:
                await self._measure(connection)
                if done is not None:
                    wait += rest_seconds(0, monotonic() - began, self._settings.documents_per_second)
                    await runs.put_off(connection, done[1].id, wait)
        return wait

    async def _page(self, connection: Connection) -> tuple[tuple[Examiner, Run, list[Finding]] | None, float]:
        run, due = await runs.background(connection)
        began_round = False
        if run is None:
            name, due = await runs.next_round(connection)
            if name is not None and not due:
                run = await runs.start(connection, name, "background")
                began_round = True
        if run is None or due:
            return None, due
        generation = {g.name: g for g in await generations.writable(connection)}.get(run.generation)
        if generation is None:  # retired since the run was looked up
            return None, IDLE_SECONDS
        if began_round:
            self._reported(connection, run, generation).begin()
        examiner = Examiner(self._pool, self._es, generation, self._limits)
        began = monotonic()
        later, findings, waited_seconds = await self._look(examiner, run, generation)
        finished = later.position == run.position
        await runs.save(connection, later, findings, finished=finished)
        documents = later.documents - run.documents
        worked_seconds = monotonic() - began - waited_seconds
        wait = rest_seconds(documents, worked_seconds, self._settings.documents_per_second)
        await runs.put_off(connection, run.id, wait)
        self._metrics.audited.inc(documents)
        if finished and lineage.is_on():
            self._reported(connection, run, generation, await runs.counts(connection, run.id)).complete()
        return (examiner, later, findings), wait

    def _reported(
        self, connection: Connection, run: Run, generation: Generation, counts: Counts | None = None
    ) -> lineage.Run:
        """A round as a run in lineage: the leader that completes it need not be the one that began it."""
        stores = datasets.vectors(connection, generation), datasets.keywords(self._es, generation)
        ledger = datasets.ledger(connection)
        return lineage.Run(
            f"audit.{generation.name}.background",
            "AUDIT",
            lineage.shared_id("audit", ledger.namespace, ledger.name, run.id),
            [ledger, *(stores if counts is None else datasets.compared(*stores, counts, KINDS))],
        )

    async def _repair(self, examiner: Examiner, run: Run, findings: list[Finding]) -> None:
        """Log the findings of a page that is saved, repair them if the settings say so, and compare their documents
        again."""
        for finding in findings:
            log.warning(
                "document_diverged",
                document=str(finding.document),
                generation=run.generation,
                store=finding.store,
                kind=finding.kind,
                chunks=finding.chunks,
            )
        repairer = Repairer(examiner, Keywords(self._es), self._producer)
        if self._settings.repair != "none" and findings:
            unreachable = {f.document for f in findings if f.kind == "unreachable"}
            documents, embed = {f.document for f in findings}, self._settings.repair == "all"
            await repairer.request_repairs(documents, unreachable, embed=embed)
        async with self._pool.connection() as connection:
            again = await runs.differing(connection, run.id, self._again_after, RECHECKED_DOCUMENTS)
        self._again_after = again[-1] if len(again) == RECHECKED_DOCUMENTS else None
        if again:
            await repairer.compare_again(run.id, again)

    async def _look(self, examiner: Examiner, run: Run, generation: Generation) -> tuple[Run, list[Finding], float]:
        """Compare one page. Returns the run after it (with the same position if the round is complete), the findings,
        and the seconds spent only waiting."""
        documents = await examiner.following(run.position)
        suspects = Suspects(examiner, second_look_seconds=self._second_look)
        seen = Page()
        async with aclosing(examiner.examine(ranges_end(documents, run.position), documents)) as verdicts:
            async for verdict in verdicts:
                note(verdict, seen)
                if not verdict.clean and len(suspects) < SUSPECTS_A_PAGE:
                    suspects.add(verdict.document)
        findings = await suspects.confirmed()
        if generation.state != "building":
            findings += (await sample(self._pool, generation, SAMPLED_ROWS)).unreachable
        later = replace(
            run,
            position=documents[-1] if documents else run.position,
            documents=run.documents + seen.documents,
            chunks=run.chunks + seen.chunks,
            pending=run.pending + len(seen.pending),
        )
        return later, findings, suspects.waited_seconds

    async def _measure(self, connection: Connection) -> None:
        counts = await runs.divergent(connection)
        for store in PLACES:
            for kind in KINDS:
                self._metrics.divergent.labels(store=store, kind=kind).set(counts.get((store, kind), 0))
        self._metrics.audit_age.set(await runs.age_seconds(connection))


def rest_seconds(documents: int, worked_seconds: float, documents_per_second: float) -> float:
    """The seconds to rest after this work, so that neither the rate nor the share of a processor is exceeded."""
    return max(documents / documents_per_second, rest_after(worked_seconds, PROCESSOR_SHARE))
