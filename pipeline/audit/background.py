"""The continuous audit in the workers: small pages, one rate over all workers, and its findings as a metric."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from time import monotonic
from uuid import UUID

import structlog
from elasticsearch import AsyncElasticsearch

from pipeline.audit import runs
from pipeline.audit.compare import KINDS, PLACES
from pipeline.audit.examine import Examiner, Finding, ranges_end
from pipeline.audit.mend import Mender
from pipeline.audit.reading import Limits
from pipeline.audit.runs import Run
from pipeline.audit.sample import sample
from pipeline.audit.walk import SECOND_LOOK_SECONDS, Page, Suspects, note
from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation
from pipeline.kafka.producer import Producer
from pipeline.ledger import generations
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import AuditSettings
from pipeline.stores.keywords import Keywords
from pipeline.stores.leader import lead_transaction
from pipeline.stores.postgres import AUDIT_LOCK, Connection, Pool, translated

log = structlog.get_logger()

LIMITS = Limits(documents=200, chunks=500, body_bytes=2_000_000, page=600)
"""One request to each store where they hold what they should (docs/adr/0040-an-audit-of-everything-in-an-hour.md): the
entries of a page fit one answer of Elasticsearch. In pages of 25 a document cost twice as much processor time."""
PROCESSOR_SHARE = 0.25
"""Share of one processor, of all servers and workers together. A page waits for one of them at a time, so its duration
is the most processor time that it can have taken of all."""
SAMPLED_ROWS = 1
"""Rows of each page that must find themselves in the vector index."""
RECHECKED_DOCUMENTS = 10
"""Documents that differed before and are compared again with each page: the metric follows a repair at once, not a
whole round later."""
SUSPECTS_A_PAGE = 1_000
"""The most documents of a page that get a second comparison, which the page's transaction waits for. Only a flood of
documents that are unknown to the ledger exceeds it: the next round reports the next ones."""
IDLE_SECONDS = 5.0
"""Between two attempts to become the leader."""


class BackgroundAudit:
    """Runs in every detect worker; an advisory lock lets one of them read at a time, and position and pace are kept in
    Postgres, so that the next leader continues at the same rate."""

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
        """Audit until cancelled. Outages are waited for."""
        while True:
            wait = IDLE_SECONDS
            try:
                if self._settings.documents_per_second > 0:
                    wait = min(IDLE_SECONDS, await self.turn())
            except PenstockError as error:
                log.warning("audit_failed", reason=str(error)[:200])
            await asyncio.sleep(wait)

    async def turn(self) -> float:
        """Read a page if one is due and no other worker does; returns the seconds until there may be another.
        Raises Retryable, Misconfigured."""
        with translated("background audit"):
            async with self._pool.connection() as connection, connection.transaction():
                is_leader = await lead_transaction(connection, AUDIT_LOCK)
                done, wait = await self._page(connection) if is_leader else (None, IDLE_SECONDS)
            began = monotonic()
            if done is not None:
                await self._mend(*done)
            async with self._pool.connection() as connection:
                await self._measure(connection)
                if done is not None:
                    wait += rest_seconds(0, monotonic() - began, self._settings.documents_per_second)
                    await runs.put_off(connection, done[1].id, wait)
        return wait

    async def _page(self, connection: Connection) -> tuple[tuple[Examiner, Run, list[Finding]] | None, float]:
        run, due = await runs.background(connection)
        if run is None:
            name, due = await runs.next_round(connection)
            if name is not None and not due:
                run = await runs.start(connection, name, "background")
        if run is None or due:
            return None, due
        generation = {g.name: g for g in await generations.writable(connection)}.get(run.generation)
        if generation is None:  # retired since the run was looked up
            return None, IDLE_SECONDS
        examiner = Examiner(self._pool, self._es, generation, self._limits)
        began = monotonic()
        later, findings, waited_seconds = await self._look(examiner, run, generation)
        await runs.save(connection, later, findings, finished=later.position == run.position)
        documents = later.documents - run.documents
        worked_seconds = monotonic() - began - waited_seconds
        wait = rest_seconds(documents, worked_seconds, self._settings.documents_per_second)
        await runs.put_off(connection, run.id, wait)
        self._metrics.audited.inc(documents)
        return (examiner, later, findings), wait

    async def _mend(self, examiner: Examiner, run: Run, findings: list[Finding]) -> None:
        """After the page is saved: log the findings, repair them if settings say so, and compare them again."""
        for finding in findings:
            log.warning(
                "document_diverged",
                document=str(finding.document),
                generation=run.generation,
                store=finding.store,
                kind=finding.kind,
                chunks=finding.chunks,
            )
        mender = Mender(examiner, Keywords(self._es), self._producer)
        if self._settings.repair != "none" and findings:
            unreachable = {f.document for f in findings if f.kind == "unreachable"}
            await mender.doubt({f.document for f in findings}, unreachable, embed=self._settings.repair == "all")
        async with self._pool.connection() as connection:
            again = await runs.differing(connection, run.id, self._again_after, RECHECKED_DOCUMENTS)
        self._again_after = again[-1] if len(again) == RECHECKED_DOCUMENTS else None
        if again:
            await mender.look_again(run.id, again)

    async def _look(self, examiner: Examiner, run: Run, generation: Generation) -> tuple[Run, list[Finding], float]:
        """One page: the run as it stands after it (at the same position: the round is complete), what it found, and the
        seconds that it only waited."""
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
    """How long to rest after so much work, so that neither the pace nor the share of a processor is exceeded."""
    return max(documents / documents_per_second, worked_seconds * (1 / PROCESSOR_SHARE - 1))
