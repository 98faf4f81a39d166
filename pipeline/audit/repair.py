"""Repair: for each difference request the least that makes the sinks converge again. Only missing vectors are embedded;
keyword entries are made from the stored texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from uuid import UUID

from psycopg import sql

from pipeline.audit import reading as ledger
from pipeline.audit import runs
from pipeline.audit.compare import NOWHERE, Desired, Kind, Place
from pipeline.audit.examine import Examiner, Finding, Verdict
from pipeline.audit.sample import reach
from pipeline.core.model import Lane, Store
from pipeline.kafka.producer import Producer
from pipeline.ledger import repair, work
from pipeline.ledger.documents import Identity
from pipeline.stages.hints import send_hints
from pipeline.stores.keywords import Keywords, Write
from pipeline.stores.postgres import Connection, translated

REPAIR_PAGE_DOCUMENTS = 200
LANE: Lane = "backfill"
"""Repairs are backfill, because there can be millions of them, and changes must not wait for them."""
POLL_SECONDS = 0.25
ROUNDS = 3
"""The most rounds of a repair. One repair can uncover another difference: an entry under a wrong document must first be
removed there, before its own document can be repaired."""

Ids = Collection[UUID]


@dataclass(frozen=True, slots=True)
class RepairResult:
    """The result of a repair."""

    requested: int = 0
    """The number of documents for which a repair was requested."""
    waited_seconds: float = 0.0
    unsettled: int = 0
    """The number of them that the sinks have not repaired yet."""
    idle: bool = False
    """Whether no document was repaired during the wait, probably because no worker is running."""


class Repairer:
    """Requests repairs, and waits for the sinks, which do the writing. It deletes only wrong rows, and the chunks of
    documents that the ledger does not know, because no sink would ever handle those."""

    def __init__(self, examiner: Examiner, keywords: Keywords, producer: Producer) -> None:
        self._examiner = examiner
        self._pool = examiner.pool
        self._generation = examiner.generation
        self._keywords = keywords
        self._producer = producer

    async def repair(
        self,
        run: int,
        *,
        wait_seconds: float,
        progress: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> RepairResult:
        """Repair the differences of a run, wait for the sinks, and compare again; at most ROUNDS times while that finds
        other differences. Afterwards the run's differences say which are repaired. Raises Retryable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        total = RepairResult()
        for _ in range(ROUNDS):
            requested = unsettled = 0
            idle = False
            async for documents in self._left(run):
                requested += await self.request_repairs(documents, await self._unreachable(run, documents))
            if requested:
                unsettled, idle = await self._settled(run, deadline, progress)
            async for documents in self._left(run):
                await self.compare_again(run, documents)
            total = RepairResult(
                max(total.requested, requested), wait_seconds - max(0.0, deadline - loop.time()), unsettled, idle
            )
            if not requested or unsettled or not await self._repairable(run):
                break
        return total

    async def _left(self, run: int) -> AsyncGenerator[list[UUID], None]:
        after: UUID | None = None
        while True:
            with translated("repair"):
                async with self._pool.connection() as connection:
                    page = await runs.differing(connection, run, after, REPAIR_PAGE_DOCUMENTS)
            if not page:
                return
            yield page
            after = page[-1]

    async def _unreachable(self, run: int, documents: Sequence[UUID]) -> set[UUID]:
        with translated("repair"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT document_id FROM audit_differences WHERE run_id = %s AND kind = 'unreachable'"
                    " AND NOT repaired AND document_id = ANY(%s)",
                    [run, list(documents)],
                )
                return {id_ for (id_,) in await cursor.fetchall()}

    async def _repairable(self, run: int) -> bool:
        """Whether another round could repair more. A damaged text is never repaired."""
        with translated("repair"):
            async with self._pool.connection() as connection:
                counts = await runs.counts(connection, run)
        return any(left for (_, kind), (_, left) in counts.items() if kind != "rotten_body")

    # Requesting repairs

    async def request_repairs(self, documents: Iterable[UUID], unreachable: Ids = (), *, embed: bool = True) -> int:
        """Compare these documents again and request their repairs; returns the number of documents for which anything
        was done. embed: also request repairs for which the model may have to embed."""
        done = 0
        hints: list[tuple[Identity, str, Lane]] = []
        for document in unreachable:
            done += await self._insert_again(document)
        async with aclosing(self._examiner.confirmed(d for d in documents if d != NOWHERE)) as verdicts:
            async for verdict in verdicts:
                if verdict.desired is None:
                    done += await self._remove([verdict.document], verdict.strangers)
                elif await self._request_one(verdict, verdict.desired, embed=embed):
                    done += verdict.document not in unreachable
                    hints.append((verdict.desired.identity, self._generation.name, LANE))
        await send_hints(self._producer, hints)
        return done

    async def _request_one(self, verdict: Verdict, desired: Desired, *, embed: bool) -> bool:
        """Request the repairs of one document; returns whether a sink has something to do now."""
        ids = {(d.store, d.kind): d.chunks for d in verdict.differences}
        if not embed:
            ids = without_embedding(ids)
        if not ids:
            return False
        with translated("repair"):
            async with self._pool.connection() as connection, connection.transaction():
                now = await ledger.standings(connection, self._generation, [verdict.document], lock=True)
                if now.get(verdict.document) != desired.standing:
                    return False  # it moved: the sinks see to it
                if ("ledger", "rotten_body") in ids:
                    await repair.forget_content(connection, verdict.document)
                if ("ledger", "stale_manifest") in ids:
                    await repair.forget_manifest(connection, self._generation.name, verdict.document)
                for store in _stores_to_repair(ids, desired):
                    await self._converge_again(connection, verdict, store, ids)
        return bool(_stores_to_repair(ids, desired))

    async def _converge_again(
        self, connection: Connection, verdict: Verdict, store: Store, ids: dict[tuple[Place, Kind], tuple[UUID, ...]]
    ) -> None:
        name = self._generation.name
        if store == "vectors":
            await repair.delete_rows(connection, self._generation, ids.get(("vectors", "wrong_text"), ()))
            await repair.correct_tenant(connection, self._generation, ids.get(("vectors", "wrong_access"), ()))
        seq = await repair.want_again(connection, name, store, verdict.document, above=verdict.highest)
        if store == "vectors":
            return
        suspect_ids = {i for (where, _), chunk_ids in ids.items() if where == "keywords" for i in chunk_ids}
        if ("keywords", "no_state") in ids:  # the index may hold any of them: all are claimed
            suspect_ids |= set(await self._keywords.versions(self._generation.keyword_index, verdict.document))
        # No longer confirmed, so that what is wanted of it is written again; claimed, so that the rest is deleted.
        await work.reopen_keywords(connection, name, [(verdict.document, seq, sorted(suspect_ids - {NOWHERE}))])

    async def _insert_again(self, document: UUID) -> bool:
        """Insert all rows of a document again that the vector index does not find."""
        with translated("repair"):
            async with self._pool.connection() as connection:
                ids = await _rows_of(connection, self._generation.chunk_table, document)
            lost = [i for i in ids if (await reach(self._pool, self._generation, [i])).unreachable]
            async with self._pool.connection() as connection, connection.transaction():
                await ledger.standings(connection, self._generation, [document], lock=True)
                return bool(await repair.insert_rows_again(connection, self._generation, lost))

    async def remove_entries(self, documents: Sequence[UUID]) -> None:
        """Delete the entries of documents that the ledger does not know, unless it knows them by now. Many are deleted
        together, because each refresh of the index takes time."""
        for first in range(0, len(documents), REPAIR_PAGE_DOCUMENTS):
            await self._remove(documents[first : first + REPAIR_PAGE_DOCUMENTS], ("keywords",))

    async def _remove(self, documents: Sequence[UUID], strangers: Collection[str]) -> bool:
        """Delete the chunks of documents that the ledger does not know from the stores. Returns whether there were
        any."""
        with translated("repair"):
            async with self._pool.connection() as connection, repair.unheard_of(connection, documents) as unknown:
                if not unknown:
                    return False
                if "vectors" in strangers:
                    for document in unknown:
                        await repair.delete_rows_of(connection, self._generation, document)
                if "keywords" in strangers:
                    index = self._generation.keyword_index
                    versions: dict[UUID, int] = {}
                    for document in unknown:
                        versions |= await self._keywords.versions(index, document)
                    seq = await repair.draw(connection, max(versions.values(), default=0))
                    await self._keywords.apply([Write(index, i, seq, None) for i in versions])
                    await self._keywords.refreshed(index)  # so that the next audit does not find them
        return True

    # Waiting, and comparing again

    async def _settled(self, run: int, deadline: float, progress: Callable[[int, int], None]) -> tuple[int, bool]:
        """Wait for the sinks. Returns the number of documents that are still pending, and whether that number has not
        changed at all."""
        loop = asyncio.get_running_loop()
        first = waiting = await self._unsettled(run)
        while waiting:
            progress(first - waiting, first)
            if loop.time() >= deadline:
                break
            await asyncio.sleep(POLL_SECONDS)
            waiting = await self._unsettled(run)
        return waiting, bool(waiting) and waiting == first

    async def _unsettled(self, run: int) -> int:
        with translated("repair"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT count(DISTINCT s.document_id) FROM audit_differences a"
                    " JOIN index_state s ON s.document_id = a.document_id AND s.generation = %s AND s.seq < s.want_seq"
                    " WHERE a.run_id = %s AND NOT a.repaired AND a.kind <> 'rotten_body' AND s.attempts = 0",
                    [self._generation.name, run],
                )
                row = await cursor.fetchone()
        return int(row[0]) if row else 0

    async def compare_again(self, run: int, documents: Sequence[UUID]) -> None:
        """Compare these documents again and update the run's differences. Those of pending documents stay as they
        are."""
        unreachable = await self._unreachable(run, documents)
        with translated("repair"):
            async with self._pool.connection() as connection:
                standings = await ledger.standings(connection, self._generation, documents)
        waiting = {d for d, (_, states) in standings.items() if any(not s.settled for s in states.values())}
        seen = [d for d in documents if d not in waiting and d != NOWHERE]
        async with aclosing(self._examiner.confirmed(seen)) as verdicts:
            left = [finding async for verdict in verdicts for finding in verdict.findings]
        for document in unreachable - waiting:
            left += await self._still_unreachable(document)
        with translated("repair"):
            async with self._pool.connection() as connection, connection.transaction():
                await runs.replace(connection, run, seen, left)

    async def _still_unreachable(self, document: UUID) -> Sequence[Finding]:
        with translated("repair"):
            async with self._pool.connection() as connection:
                ids = await _rows_of(connection, self._generation.chunk_table, document)
        return (await reach(self._pool, self._generation, ids)).unreachable


def without_embedding(ids: Mapping[tuple[Place, Kind], tuple[UUID, ...]]) -> dict[tuple[Place, Kind], tuple[UUID, ...]]:
    """Those of a document's differences that can be repaired without the model. A sink repairs its store as a whole, so
    if one difference of the vectors needs the model, the others are left with it. Pure."""
    needing = {place for place, kind in ids if (place, kind) in _MAY_EMBED}
    return {(place, kind): chunks for (place, kind), chunks in ids.items() if place not in needing}


_MAY_EMBED: Collection[tuple[Place, Kind]] = {
    ("vectors", "missing"),
    ("vectors", "wrong_text"),
    ("vectors", "no_state"),
    ("ledger", "stale_manifest"),
}


def _stores_to_repair(ids: Collection[tuple[Place, Kind]], desired: Desired) -> list[Store]:
    """The stores that have to converge again; none for a searchable document whose text is damaged, because nothing can
    be made from that."""
    if desired.rotten and desired.searchable:
        return []
    both: list[Store] = ["vectors", "keywords"]
    if ("ledger", "stale_manifest") in ids:
        return both
    return [store for store in both if any(where == store for where, _ in ids)]


async def _rows_of(connection: Connection, table: str, document: UUID) -> list[UUID]:
    cursor = await connection.execute(
        sql.SQL("SELECT id FROM {} WHERE document_id = %s ORDER BY id").format(sql.Identifier(table)), [document]
    )
    return [id_ for (id_,) in await cursor.fetchall()]
