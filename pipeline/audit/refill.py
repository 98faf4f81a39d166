"""Repairing a keyword index that changed without the ledger: it was recreated, restored from a snapshot, or promoted
from a stale copy. It is compared with the ledger and filled again; nothing is embedded. The reasons are in
docs/adr/0043-a-keyword-index-that-changed.md."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from time import monotonic
from typing import get_args
from uuid import UUID

import structlog
from elasticsearch import AsyncElasticsearch

from pipeline.audit import reading as ledger
from pipeline.audit.background import LIMITS
from pipeline.audit.compare import NOWHERE
from pipeline.audit.examine import Examiner, Verdict, ranges_end
from pipeline.audit.repair import LANE, Repairer
from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.model import Generation
from pipeline.core.throttle import rest_after
from pipeline.kafka.producer import Producer
from pipeline.ledger import generations, repair
from pipeline.observability.metrics import Metrics
from pipeline.stages.hints import send_hints
from pipeline.stores import index_fence
from pipeline.stores.elasticsearch import translated as es_translated
from pipeline.stores.index_fence import Change, Known, change
from pipeline.stores.keywords import Keywords
from pipeline.stores.leader import lead_transaction
from pipeline.stores.postgres import INDEX_LOCK, Connection, Pool, translated

log = structlog.get_logger()

LOOK_SECONDS = 20.0
"""Time between two checks of each index. The documentation promises that a change is detected within a minute."""
CONFIRM_SECONDS = 2.0
"""Pause between the check that finds a change and the one that confirms it: a node that was disconnected may answer
with an old state for a moment."""
TURN_SECONDS = 1.0
"""Pause between two attempts to become the leader, or two checks whether all entries were written again."""
PROCESSOR_SHARE = 0.5
"""The share of one processor that this may take from all servers and the worker together. It is higher than in
``pipeline.audit.background``, because keyword search does not work meanwhile."""
_STATES = ("active", "previous", "building")
"""The order in which the generation is chosen whose documents an index is compared with, where several share it: their
entries are the same."""


class IndexGuard:
    """Detects that a keyword index is not the one that the ledger filled, and repairs it.

    Law: such an index is searched again only after every document was compared with it, and every wrong or pending
    entry was written again, since the change was detected.
    """

    def __init__(
        self,
        pool: Pool,
        es: AsyncElasticsearch,
        keywords: Keywords,
        producer: Producer,
        metrics: Metrics,
        *,
        repairs: bool = True,
        look_seconds: float = LOOK_SECONDS,
        confirm_seconds: float = CONFIRM_SECONDS,
    ) -> None:
        """repairs: whether to repair; False: only report changes."""
        self._pool = pool
        self._es = es
        self._keywords = keywords
        self._producer = producer
        self._metrics = metrics
        self._repairs = repairs
        self._look_seconds = look_seconds
        self._confirm_seconds = confirm_seconds
        for kind in get_args(Change):  # at zero, so that the first one is an increase
            metrics.index_changes.labels(change=kind)

    async def run(self) -> BaseException:
        """Check and repair until cancelled. A failure is logged, and tried again at the next check."""
        while True:
            wait = self._look_seconds
            try:
                if await self.look() and self._repairs:
                    wait = min(wait, await self.turn())
            except PenstockError as error:
                log.warning("keyword_index_not_compared", reason=str(error)[:200])
            await asyncio.sleep(wait)

    async def look(self) -> list[Known]:
        """Check the index of every generation; returns those that must not be searched. Raises Retryable,
        Misconfigured."""
        with translated("keyword index"):
            async with self._pool.connection() as connection:
                indexes = {g.keyword_index for g in await generations.writable(connection)}
        failure: PenstockError | None = None
        for index in sorted(indexes):
            try:
                if why := await self._compare(index):
                    await asyncio.sleep(self._confirm_seconds)
                    await self._compare(index, confirming=why)
            except PenstockError as error:  # of this index alone, for example while it is being rebuilt
                failure = error
        with translated("keyword index"):
            async with self._pool.connection() as connection:
                fenced = await index_fence.fenced(connection)
        self._metrics.index_fenced.set(bool(fenced))
        if failure is not None and not fenced:
            raise failure
        return fenced

    async def _compare(self, index: str, *, confirming: Change | None = None) -> Change | None:
        """How the index differs from the recorded one; None: it does not, or the change was recorded now. confirming:
        the change that an earlier check has found; without it none is recorded."""
        with translated("keyword index"):
            async with self._pool.connection() as connection:
                known = await index_fence.load(connection, index)
        with es_translated(f"look at index {index}"):
            now = await index_fence.look(self._es, index)
        with translated("keyword index"):
            async with self._pool.connection() as connection:
                if known is None:
                    await index_fence.accept_first(connection, index, now)
                elif (why := change(known, now)) is None:
                    await index_fence.remember(connection, known, now)
                elif confirming is None:
                    return why
                elif await index_fence.fence(connection, known, now, why):
                    self._metrics.index_changes.labels(change=why).inc()
                    log.error("keyword_index_changed", index=index, change=why, remedy="penstock audit --repair")
        return None

    async def turn(self) -> float:
        """Compare a page of documents with an index that changed, unless another worker does, or accept the index.
        Returns the seconds until there may be another turn. Raises Retryable, Misconfigured."""
        began = monotonic()
        with translated("keyword index"):
            async with self._pool.connection() as connection, connection.transaction():
                if not await lead_transaction(connection, INDEX_LOCK):
                    return TURN_SECONDS
                fenced = await index_fence.fenced(connection)
                failures: list[PenstockError] = []
                for known in fenced:
                    try:
                        async with connection.transaction():
                            await self._require_unchanged(known)
                            if not known.compared:
                                await self._page(connection, known)
                                return rest_after(monotonic() - began, PROCESSOR_SHARE)
                            if await index_fence.accept(connection, known):
                                log.info("keyword_index_accepted", index=known.index)
                    except PenstockError as error:  # of this index alone: the others go on
                        log.warning("keyword_index_not_compared", index=known.index, reason=str(error)[:200])
                        failures.append(error)
        if failures and len(failures) == len(fenced):
            raise failures[0]
        return TURN_SECONDS

    async def _require_unchanged(self, known: Known) -> None:
        """Raises Retryable when the index changed again, or some of its shards are missing."""
        with es_translated(f"look at index {known.index}"):
            now = await index_fence.look(self._es, known.index)
        index_fence.require_all(known, now)
        if why := change(known, now):
            raise Retryable(f"look at index {known.index}: it changed again ({why})", service="elasticsearch")

    async def _page(self, connection: Connection, known: Known) -> None:
        """Compare one page of documents. connection: is in the transaction that records the position."""
        using = [g for g in await generations.writable(connection) if g.keyword_index == known.index]
        if not using:
            return  # the last generation that used it was retired meanwhile
        generation = min(using, key=lambda g: _STATES.index(g.state))
        examiner = Examiner(self._pool, self._es, generation, LIMITS)
        if known.position is None:
            await examiner.refresh()
        documents = await examiner.following(known.position)
        repairer = Repairer(examiner, self._keywords, self._producer)
        to_reopen: list[Verdict] = []
        strangers: list[UUID] = []
        async with aclosing(examiner.examine(ranges_end(documents, known.position), documents)) as verdicts:
            async for verdict in verdicts:
                if verdict.desired is None:
                    if "keywords" in verdict.strangers and verdict.document != NOWHERE:
                        strangers.append(verdict.document)
                elif not _is_right(verdict):
                    to_reopen.append(verdict)
        await repairer.remove_entries(strangers)
        if to_reopen:
            await self._reopen(generation, to_reopen)
        await index_fence.record_compared(connection, known, documents[-1] if documents else None)

    async def _reopen(self, generation: Generation, verdicts: list[Verdict]) -> None:
        """Make these documents pending with all their entries. This includes documents that have changed since they
        were compared, because their sink has written only the entries that were new to it."""
        with translated("keyword index"):
            async with self._pool.connection() as connection, connection.transaction():
                await ledger.standings(connection, generation, [v.document for v in verdicts], lock=True)
                await repair.reopen_all_keywords(
                    connection, generation.name, [(v.document, v.highest, v.entries) for v in verdicts]
                )
        await send_hints(
            self._producer, [(v.desired.identity, generation.name, LANE) for v in verdicts if v.desired is not None]
        )

    async def finish(self, wait_seconds: float) -> bool:
        """Compare all documents with the changed indexes, and wait up to ``wait_seconds`` for the sinks. Returns
        whether all indexes are searched again. Raises Retryable, Misconfigured."""
        waited_since: float | None = None
        while fenced := await self.look():
            if all(known.compared for known in fenced):
                waited_since = waited_since or monotonic()
                if monotonic() - waited_since > wait_seconds:
                    return False
            await asyncio.sleep(min(TURN_SECONDS, await self.turn()))
        return True


def _is_right(verdict: Verdict) -> bool:
    """Whether the index holds the confirmed entries of a document. A pending document does not count as right: its sink
    would write only what differs from the entries that were confirmed before the index changed. For a document without
    a state nothing is confirmed."""
    desired = verdict.desired
    assert desired is not None
    state = desired.states.get("keywords")
    if state is None:
        return not verdict.entries
    settled = state.settled and not desired.stale
    return settled and not any(difference.store == "keywords" for difference in verdict.differences)
