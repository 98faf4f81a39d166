"""The keywords stage: make a generation's Elasticsearch index return exactly the desired entries.

Documents are claimed before a bulk request and confirmed after a refresh. A worker that finds at the end that something
newer was accepted puts its entries back into *claimed* and makes the document pending again. This protects against a
worker that was paused between its check and its write; no grace period of the server would. A bulk request whose sender
does not get so far, because it died or got no answer, is recorded with the claim, and ``LateBulks`` undoes it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from uuid import UUID

import structlog

from pipeline.core.diff import Diff, diff_keywords
from pipeline.core.errors import PenstockError, Poison
from pipeline.core.identity import keyword_hash
from pipeline.core.model import Generation, Lane
from pipeline.embedding.port import Vectors
from pipeline.ledger import bulks, work
from pipeline.ledger import entry as entry_of
from pipeline.ledger.bulks import Entry, OpenBulk
from pipeline.ledger.work import Work
from pipeline.observability.metrics import Metrics
from pipeline.stages import entry_vectors
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.hints import read_hint
from pipeline.stages.manifests import Chunker
from pipeline.stages.sink import Generations, set_aside
from pipeline.stages.stage import FinalStage, Incoming, used
from pipeline.stores.keywords import Keywords, Outcome, Write
from pipeline.stores.postgres import Connection, Pool, translated
from topics.registry import INDEX_BACKFILL, INDEX_LIVE, Topic

log = structlog.get_logger()


MAX_PLANNED_CHARACTERS = 8 * 2**20
"""The characters of the chunks that are planned at once, beyond which a batch is written in parts. Their texts and
entries are in memory, and take five times as much: 64 documents of 4 MiB would take more than a gigabyte, and are cut
for two minutes, in which the worker does nothing else."""


MAX_COMMON_BYTES = 512 * 2**20
"""The bytes of what all entries of a document repeat, beyond which the document is set aside. 4 MiB of text with a
thousand tags of 500 characters took 3 GB and more in the index; with a thousand people of usual names 200 MB."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The desired entries of one document (hashes by chunk), and the operations that lead to them."""

    work: Work
    entries: Mapping[UUID, int]
    writes: tuple[Write, ...]
    without_vector: frozenset[UUID] = frozenset()
    """The chunks whose entries carry no vector."""
    refusal: str = ""
    """Why its entries are not written."""

    @property
    def touched(self) -> tuple[UUID, ...]:
        """The chunks whose entries are written or deleted."""
        return tuple(w.id for w in self.writes)

    @property
    def written(self) -> int:
        return sum(w.body is not None for w in self.writes)


@dataclass(frozen=True, slots=True)
class _Claimed:
    """The plans of one bulk request, whose documents are claimed."""

    plans: Sequence[_Plan]
    bulk: UUID | None
    """The id of its record among the open bulks. None: it only deletes entries, which is correct however late."""
    send_before: float
    """The latest time at which it may be sent, on time.monotonic()."""


class KeywordSink(FinalStage):
    """Writes keyword entries to Elasticsearch.

    Law (that of ``Stage``): ``handle`` may be called again with the same records, at any time, in any process.
    """

    name = "keywords"
    topics: dict[Lane, Topic] = {"live": INDEX_LIVE, "backfill": INDEX_BACKFILL}  # noqa: RUF012

    def __init__(
        self,
        pool: Pool,
        keywords: Keywords,
        generations: Callable[[], Awaitable[Mapping[str, Generation]]],
        chunker: Chunker,
        announcer: Announcer,
        dead: DeadLetters,
        metrics: Metrics,
        *,
        batch_size: int,
    ) -> None:
        self._pool = pool
        self._keywords = keywords
        self._generations = Generations("keywords", pool, generations, metrics)
        self._chunker = chunker
        self._announcer = announcer
        self._dead = dead
        self._metrics = metrics
        self.batch_size = batch_size

    async def handle(self, batch: Sequence[Incoming]) -> None:
        await self._generations.serve(batch, self.converge)

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        try:
            document, generation = read_hint(record)
        except Poison:  # the record is no hint, and so names no document
            await self._dead.add(record, stage=self.name, error=error)
            return
        await set_aside(self._pool, "keywords", document, generation, error, self._metrics)

    async def converge(self, generation: Generation, ids: Sequence[UUID]) -> None:
        """Make the index equal to the ledger for these documents, and announce those that both stores hold. Raises
        Retryable, and Poison when nothing can be written."""
        open_ids = list(ids)
        with self._keywords.writing(generation.keyword_index):
            while open_ids and (claimed := await self._plan(generation, open_ids)):
                finished = await self._apply(generation, claimed)
                open_ids = [i for i in open_ids if i not in finished]
        await self._announcer.announce(ids)

    async def _plan(
        self, generation: Generation, ids: Sequence[UUID], lost_before: Mapping[UUID, int] | None = None
    ) -> _Claimed | None:
        """Claim the pending documents among these, and plan their entries; None: there is nothing to do. lost_before:
        the documents without a text, and their want_seq, in the call before."""
        send_before = monotonic() + SEND_SECONDS
        with translated("keywords"):
            async with self._pool.connection() as connection:
                works = await work.load(connection, generation.name, "keywords", ids)
                works = await self._chunker.complete(connection, generation, works, "keywords")
                works = _first(await entry_vectors.ready(connection, generation, works))
                if not works:
                    return None  # all are confirmed or wait for their vectors, or the generation is retired
                bodies = await work.bodies(connection, [w for w in works if w.chunk_ids])
                plans = await self._plans(connection, generation, works, bodies)
                claimed = await work.claim(
                    connection, generation.name, [(p.work.identity.id, p.work.want_seq, p.touched) for p in plans]
                )
                plans_claimed = [p for p in plans if p.work.identity.id in claimed]
                bulk = await _open_bulk(connection, generation.keyword_index, plans_claimed)
        lost = {w.identity.id: w.want_seq for w in works if w.chunk_ids and w.identity.id not in bodies}
        if not claimed and lost and lost == lost_before:
            raise Poison("no_progress", "nothing could be written: its text is not in the ledger (see the audit)")
        if not plans_claimed:
            return await self._plan(generation, ids, lost)  # something newer was accepted for all of them
        return _Claimed(plans_claimed, bulk, send_before)

    async def _plans(
        self,
        connection: Connection,
        generation: Generation,
        works: Sequence[Work],
        bodies: Mapping[UUID, tuple[str, Mapping[str, object]]],
    ) -> list[_Plan]:
        """Plan the documents whose texts are there. A document of which a row was deleted meanwhile is absent too."""
        there = [w for w in works if not w.chunk_ids or w.identity.id in bodies]
        held = await entry_vectors.held(connection, generation, [w.identity.id for w in there if w.chunk_ids])
        diffs = [_diff(w, bodies.get(w.identity.id, ("", {}))[1], held.get(w.identity.id, ())) for w in there]
        carrying = [
            i for w, d in zip(there, diffs, strict=True) for i in d.diff.write if i in held.get(w.identity.id, ())
        ]
        vectors = await entry_vectors.of_chunks(connection, generation, carrying)
        gone = {i for i in carrying if i not in vectors}
        return [
            _plan(generation, w, d, *bodies.get(w.identity.id, ("", {})), vectors)
            for w, d in zip(there, diffs, strict=True)
            if gone.isdisjoint(d.diff.write)
        ]

    async def _apply(self, generation: Generation, claimed: _Claimed) -> set[UUID]:
        """Write, refresh and confirm. Returns the documents that the index holds as desired, or that were set aside."""
        plans = claimed.plans
        writes = [w for p in plans for w in p.writes]
        outcomes: dict[UUID, Outcome] = {}
        if writes:
            patient = all(p.work.lane == "backfill" for p in plans)
            done = await self._keywords.apply(writes, patient=patient, send_before=claimed.send_before)
            outcomes = dict(zip((w.id for w in writes), done, strict=True))
            await self._keywords.refreshed(generation.keyword_index, patient=patient)
            used("elasticsearch")
        refused = {p.work.identity.id: p.refusal for p in plans if p.refusal}
        refused |= {
            p.work.identity.id: o.reason for p in plans for w in p.writes if (o := outcomes[w.id]).result == "refused"
        }
        for document, reason in refused.items():
            await set_aside(
                self._pool, "keywords", document, generation.name, Poison("entry_refused", reason), self._metrics
            )
        answered = None if any(o.unsure for o in outcomes.values()) else claimed.bulk
        plans = [p for p in plans if p.work.identity.id not in refused]
        return await self._confirm(generation, plans, outcomes, answered) | set(refused)

    async def _confirm(
        self, generation: Generation, plans: Sequence[_Plan], outcomes: Mapping[UUID, Outcome], answered: UUID | None
    ) -> set[UUID]:
        """Confirm the documents that have not changed meanwhile and whose entries the index has not refused as too old;
        returns them. The others become pending again. answered: the open bulk of which every operation was answered."""
        by_id = {p.work.identity.id: p for p in plans}
        ahead = {}
        with translated("keywords"):
            async with self._pool.connection() as connection:
                async with connection.transaction():
                    wants = await work.lock_wants(connection, generation.name, "keywords", list(by_id))
                    moved = [p for i, p in by_id.items() if wants.get(i) != p.work.want_seq]
                    still = [p for i, p in by_id.items() if wants.get(i) == p.work.want_seq]
                    ahead = {
                        p.work.identity.id: max(_versions_ahead(p, outcomes))
                        for p in still
                        if _versions_ahead(p, outcomes)
                    }
                    lacking = {p.work.identity.id: p.without_vector for p in still if p.without_vector}
                    again = ahead.keys() | await entry_vectors.gained(connection, generation, lacking)
                    reached = [p for p in still if p.work.identity.id not in again]
                    await work.confirm_keywords(
                        connection,
                        generation.name,
                        [(p.work.identity.id, p.work.want_seq, p.entries, p.written) for p in reached],
                    )
                    await work.reopen_keywords(
                        connection,
                        generation.name,
                        [(p.work.identity.id, p.work.want_seq, p.touched) for p in moved],
                    )
                    if answered is not None:
                        await bulks.record_answered(connection, answered)
                for document, version in ahead.items():  # the index is ahead of the ledger: draw a higher seq for it
                    async with connection.transaction():
                        await work.raise_want(connection, generation.name, "keywords", document, version)
                    log.warning("index_ahead_of_ledger", document=str(document), version=version)
        self._metrics.moved.labels(sink="keywords").inc(len(moved))
        self._metrics.written.labels(sink="keywords").inc(sum(p.written for p in reached))
        self._metrics.deleted.labels(sink="keywords").inc(sum(len(p.writes) - p.written for p in reached))
        return {p.work.identity.id for p in reached}


def _size(fields: Mapping[str, object]) -> int:
    return len(json.dumps(fields, ensure_ascii=False).encode())


def _first(works: Sequence[Work]) -> list[Work]:
    """As many of the first documents as are planned at once."""
    left = MAX_PLANNED_CHARACTERS
    first: list[Work] = []
    for w in works:
        left -= sum(end - start for spans in w.spans.values() for start, end in spans)
        if first and left < 0:
            break
        first.append(w)
    return first


async def _open_bulk(connection: Connection, index: str, plans: Sequence[_Plan]) -> UUID | None:
    entries = [Entry(p.work.identity.id, w.id, w.version) for p in plans for w in p.writes if w.body is not None]
    return await bulks.record_open(connection, index, entries, check_in_seconds=CHECK_SECONDS) if entries else None


def _versions_ahead(plan: _Plan, outcomes: Mapping[UUID, Outcome]) -> list[int]:
    """The versions above ours with which the index holds this document's entries, although nothing newer was
    accepted."""
    stale = [outcomes[w.id] for w in plan.writes if outcomes[w.id].result == "stale"]
    return [max(o.newer_version or 0, plan.work.want_seq) for o in stale]


@dataclass(frozen=True, slots=True)
class _Difference:
    """The desired entries of one document (hashes by chunk), how they differ from the confirmed ones, and which of them
    carry no vector."""

    entries: Mapping[UUID, int]
    diff: Diff
    without_vector: frozenset[UUID]


def _diff(w: Work, metadata: Mapping[str, object], held: Collection[UUID]) -> _Difference:
    entries: dict[UUID, int] = {}
    if w.chunk_ids and w.manifest is not None:
        shared = keyword_hash(entry_of.common_fields(w, metadata))
        entries = {
            chunk: keyword_hash(str(chunk), headings, shared, *(["vector"] if chunk in held else []))
            for chunk, headings in zip(w.chunk_ids, w.manifest.headings, strict=True)
        }
    without = frozenset(i for i in entries if i not in held)
    return _Difference(entries, diff_keywords(entries, w.confirmed, w.claimed), without)


def _plan(
    generation: Generation,
    w: Work,
    difference: _Difference,
    body: str,
    metadata: Mapping[str, object],
    vectors: Mapping[UUID, Vectors],
) -> _Plan:
    diff = difference.diff
    writing = set(diff.write)
    if (size := len(writing) * _size(entry_of.common_fields(w, metadata))) > MAX_COMMON_BYTES:
        what = f"its tags, title and metadata would take {size // 2**20:,} MiB in {len(writing):,} entries"
        return _Plan(w, difference.entries, (), refusal=f"{what}: publish it with fewer of them, or in parts")
    writes = [Write(generation.keyword_index, i, w.want_seq, None) for i in diff.delete]
    if writing:
        for chunk, entry in entry_of.entries(w, body, metadata, only=writing):
            vector = entry_vectors.fields(vectors[chunk]) if chunk in vectors else {}
            writes.append(Write(generation.keyword_index, chunk, w.want_seq, {**entry, **vector}))
    return _Plan(w, difference.entries, tuple(writes), difference.without_vector)


INTERVAL_SECONDS = 30.0
"""Pause between two searches for bulks whose check is due."""
CHECK_SECONDS = 240.0
"""Time between two checks of one bulk. It is well below ``index.gc_deletes``
(pipeline.stores.elasticsearch.GC_DELETES), so that a delete is repeated before Elasticsearch forgets it."""
SEND_SECONDS = 3_600.0
"""A worker that has not sent a bulk this long after its claim must claim again: so late can a bulk be sent at most."""
EXPIRE_SECONDS = 86_400.0
"""How long after its claim a bulk may still arrive. A day is ample: kernels, proxies and the server's queues delay a
request by minutes."""
BULKS_PER_ROUND = 20


class LateBulks:
    """Undoes bulk requests that reach Elasticsearch long after their sender died or stopped waiting. It runs in every
    keywords worker; the workers share the checks that are due.

    Versions order all writes of one entry, but Elasticsearch remembers the version of a deleted entry for
    ``index.gc_deletes`` only. A write that is older than the delete and arrives after that is accepted: an entry of a
    deleted or revoked text, which nothing would ever remove. So a bulk whose outcome is unknown stays recorded
    (``pipeline.ledger.bulks``), and as long as it may arrive, its entries that the ledger does not want are deleted
    again. Each such delete also renews Elasticsearch's memory of it, so that a late write is normally refused. A delete
    needs no claim: at its version the ledger does not want the entry, and whatever is wanted later has a higher one.
    But the transaction that judges the entries also unconfirms them: an entry that was wanted again before its delete
    is processed would otherwise count as unchanged. See docs/adr/0039-open-bulks.md.
    """

    def __init__(
        self,
        pool: Pool,
        keywords: Keywords,
        metrics: Metrics,
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        check_seconds: float = CHECK_SECONDS,
        expire_seconds: float = EXPIRE_SECONDS,
    ) -> None:
        self._pool = pool
        self._keywords = keywords
        self._metrics = metrics
        self._interval = interval_seconds
        self._check = check_seconds
        self._expire = expire_seconds

    async def run(self) -> BaseException:
        """Check until cancelled. A check that fails is due again later."""
        while True:
            try:
                await self.check_due()
            except PenstockError as error:
                log.warning("open_bulks_not_read", reason=str(error)[:200])
            await asyncio.sleep(self._interval)

    async def check_due(self) -> int:
        """Check every bulk that is due; returns how many entries were removed. Raises Retryable or Misconfigured when
        the ledger cannot be read."""
        removed = 0
        while True:
            with translated("open bulks"):
                async with self._pool.connection() as connection:
                    taken = await bulks.due(
                        connection,
                        limit=BULKS_PER_ROUND,
                        again_in_seconds=self._check,
                        expire_after_seconds=self._expire,
                    )
            for bulk in taken:
                try:
                    removed += await self._check_one(bulk)
                except PenstockError as error:
                    log.warning("open_bulk_not_checked", index=bulk.keyword_index, reason=str(error)[:200])
            if len(taken) < BULKS_PER_ROUND:
                return removed

    async def _check_one(self, bulk: OpenBulk) -> int:
        with translated("open bulks"):
            async with self._pool.connection() as connection:
                generation = await bulks.user_of(connection, bulk.keyword_index)
                if generation is None:
                    await bulks.forget(connection, bulk.id)
                    return 0
                await work.lock_wants(connection, generation, "keywords", [entry.document for entry in bulk.entries])
                unwanted = await bulks.unwanted(connection, bulk)
                await work.reopen_keywords(
                    connection, generation, [(entry.document, entry.seq, [entry.chunk]) for entry in unwanted.confirmed]
                )
        removed = 0
        if unwanted.entries:
            deletes = [Write(bulk.keyword_index, entry.chunk, entry.seq, None) for entry in unwanted.entries]
            removed = sum(outcome.removed for outcome in await self._keywords.apply(deletes))
        if removed:
            await self._keywords.refreshed(bulk.keyword_index)
            self._metrics.late_entries.inc(removed)
            documents = {entry.document for entry in unwanted.entries}
            log.warning("late_bulk_undone", index=bulk.keyword_index, entries=removed, documents=len(documents))
        if bulk.expired and unwanted.complete:
            with translated("open bulks"):
                async with self._pool.connection() as connection:
                    await bulks.forget(connection, bulk.id)
        return removed
