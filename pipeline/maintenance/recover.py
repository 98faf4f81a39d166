"""recover: a ledger that was restored from a backup, or lost its end in a failover, catches up with Kafka, which is
ahead of it. See docs/recovery.md.

Every step may be repeated; what is already done is done again to no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Literal, Protocol

from elasticsearch import AsyncElasticsearch

from pipeline.conversations.record import Conversations
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.fence import State
from pipeline.core.model import STORES, Lane, Store
from pipeline.core.producers import CODES
from pipeline.kafka.groups import GroupBusy, Groups, Log, group, groups, translate_offset_errors
from pipeline.ledger import generations
from pipeline.runtime.settings import Settings
from pipeline.stages.detect import Detect
from pipeline.stages.identities import Identities
from pipeline.stores import fence
from pipeline.stores.elasticsearch import connect
from pipeline.stores.elasticsearch import translated as es_translated
from pipeline.stores.keywords import Keywords
from pipeline.stores.postgres import Connection, Pool, open_pool, permit_long, translated
from topics.registry import Topic

LEAVE_SECONDS = 5.0
"""How long members that were just stopped may take to leave their group."""
LAG_WINDOW_SECONDS = 600.0
"""The last events before the backup, over so long, show how far behind detect was then."""
FAILOVER_MARGIN = timedelta(hours=1)
"""Before the last change that a promoted standby knows: another partition may have lagged so far behind that one."""
POLL_SECONDS = 0.3
LOOK_SECONDS = 10.0
BEGINNING = datetime.fromtimestamp(0, UTC)

Phase = Literal["replaying", "converging"]
Partition = tuple[str, int]


class OnProgress(Protocol):
    def __call__(self, phase: Phase, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class RaisedSequence:
    """ledger_seq, before and after."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Rewound:
    """The moments that detect and identities go back to."""

    records: int
    """The number of records that are read again."""
    since: datetime
    """The start from which documents are read again: TIME, or earlier where detect lagged behind at the backup."""
    missing: tuple[str, ...]
    """One line for each partition that no longer has all of these records."""
    until: Mapping[str, Mapping[Partition, int]]
    """stage → partition → the offset at which it has caught up."""


@dataclass(frozen=True, slots=True)
class Convergence:
    failed: int
    """Documents that were set aside. Both stores hold everything else."""


class Recovery:
    """The steps, in their order: ``require_stopped``, ``accept("rewinding")``, ``raise_sequence``, ``rewind``,
    ``accept("replaying")``, ``replayed``, ``refused``, ``look_again``, ``accept("open")``, ``settled``."""

    def __init__(
        self,
        pool: Pool,
        es: AsyncElasticsearch,
        consumers: Groups,
        *,
        index_prefix: str = "",
        on_progress: OnProgress = lambda phase, done, total: None,
    ) -> None:
        self._pool = pool
        self._es = es
        self._consumers = consumers
        self._index_prefix = index_prefix
        self._progress = on_progress

    async def require_stopped(self) -> None:
        """Raises Misconfigured while a detect worker runs: what it commits would undo the rewinding."""
        deadline = monotonic() + LEAVE_SECONDS
        while True:
            with translate_offset_errors():
                hosts = {host for stage in REWOUND for host in await self._consumers.members(group(stage))}
            if not hosts:
                return
            if monotonic() > deadline:
                raise Misconfigured(
                    f"detect workers run on {', '.join(sorted(hosts))}: stop them (one that was killed is forgotten"
                    " after PENSTOCK_STREAM_SESSION_TIMEOUT_SECONDS, 45), then run this again"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def accept(self, state: State) -> None:
        """The ledger is this server's from now on, and is used for what the state allows (``core.fence``). Raises
        Misconfigured on a standby."""
        with translated("recover"):
            async with self._pool.connection() as connection:
                await fence.accept(connection, state)

    async def before_failover(self) -> datetime:
        """A moment before whatever a failover may have lost; the beginning of time in an empty ledger."""
        with translated("recover"):
            async with self._pool.connection() as connection:
                await permit_long(connection)
                row = await (await connection.execute("SELECT max(at) FROM document_events")).fetchone()
        return row[0] - FAILOVER_MARGIN if row and row[0] else BEGINNING

    async def raise_sequence(self) -> RaisedSequence:
        """Numbers drawn from now on are above every version that Elasticsearch holds: else each write would be refused
        and tried again. Raises Misconfigured when an index that the ledger names is gone."""
        highest = 0
        with translated("recover"):
            async with self._pool.connection() as connection:
                living = await generations.writable(connection)
            keywords = Keywords(self._es)  # not closed: the client is not ours
            for index in {g.keyword_index for g in living}:
                with es_translated(f"look for index {index}"):
                    if not await self._es.indices.exists(index=index):
                        raise Misconfigured(
                            f"Elasticsearch has no index {index}, which the restored ledger names (a rebuild after the"
                            " backup replaced it?): run `penstock rebuild keywords`, then this again"
                        )
                    await self._es.indices.refresh(index=index)
                highest = max(highest, await keywords.highest_version(index))
            async with self._pool.connection() as connection:
                cursor = await connection.execute("SELECT last_value, (SELECT max(seq) FROM documents) FROM ledger_seq")
                row = await cursor.fetchone()
                assert row is not None
                before, drawn = int(row[0]), int(row[1] or 0)
                after = max(before, drawn, highest)
                await connection.execute(  # never back: others may draw numbers meanwhile
                    "SELECT setval('ledger_seq', %(to)s) FROM ledger_seq WHERE last_value < %(to)s", {"to": after}
                )
        return RaisedSequence(before, after)

    async def strays(self) -> list[str]:
        """Indexes with our names that belong to no generation: created after the backup, and unused now."""
        with translated("recover"):
            async with self._pool.connection() as connection:
                known = {g.keyword_index for g in await generations.every(connection)}
        with es_translated("list the indexes"):
            response = await self._es.indices.get(index=f"{self._index_prefix}chunks-g*")
        return sorted(set(response.body) - known)

    async def rewind(self, since: datetime) -> Rewound:
        """Take detect back to ``since``, or further where it lagged behind at the backup, and identities to the start
        of their (compacted) topic. Never forwards. Raises Misconfigured when a worker joined meanwhile."""
        with translated("recover"):
            async with self._pool.connection() as connection:
                floors = await _floors(connection, since)
        targets: dict[str, dict[Partition, int]] = {}
        until: dict[str, dict[Partition, int]] = {}
        missing: list[str] = []
        records = 0
        with translate_offset_errors():
            for stage, topics in REWOUND.items():
                committed = await self._consumers.committed(group(stage))
                for lane, topic in topics.items():
                    moment = floors[lane] if topic.cleanup == "delete" else BEGINNING
                    logs = await self._consumers.logs([topic.name], moment)
                    target = _targets(logs, committed)
                    targets.setdefault(stage, {}).update(target)
                    until.setdefault(stage, {}).update({p: log.end for p, log in logs.items() if log.end > log.begin})
                    records += sum(log.behind(target.get(p, committed.get(p))) for p, log in logs.items())
                    if topic.cleanup == "delete":
                        missing += _missing(logs, max(moment, BEGINNING), since)
            try:
                for stage, target in targets.items():
                    await self._consumers.commit(group(stage), target)
            except GroupBusy as error:
                raise Misconfigured(f"{error}: stop these workers, then run this again") from error
        return Rewound(records, min(floors.values()), tuple(missing), until)

    async def replayed(self, rewound: Rewound, idle: Callable[[], None]) -> None:
        """Wait until detect and identities have come back to where the topics ended. ``idle`` is called once when no
        worker is there to do it."""
        reported, looked, total = False, 0.0, rewound.records
        while True:
            left = 0
            with translate_offset_errors():
                for stage, until in rewound.until.items():
                    at = await self._consumers.committed(group(stage))
                    left += sum(max(0, end - at.get(partition, 0)) for partition, end in until.items())
                self._progress("replaying", max(0, total - left), max(total, left))
                if not left:
                    return
                if not reported and monotonic() - looked > LOOK_SECONDS:
                    looked = monotonic()
                    if not await self._consumers.members(group(Detect.name)):
                        reported = True
                        idle()
            await asyncio.sleep(POLL_SECONDS)

    async def refused(self, since: datetime) -> int:
        """Count the dead letters since then that wait because of who signed their records.

        The restored registry has no producer and no key that was added after the backup. What they published is
        refused when it is read again, revocations too. Where there were very many, a letter stands for several records
        (``stages.dead``)."""
        with translated("recover"):
            async with self._pool.connection() as connection:
                await permit_long(connection)
                cursor = await connection.execute(
                    "SELECT count(*) FROM dead_letters WHERE code = ANY(%s) AND at >= %s AND replayed_at IS NULL"
                    " AND dismissed_at IS NULL",
                    [list(CODES), since],
                )
                row = await cursor.fetchone()
        return int(row[0]) if row else 0

    async def look_again(self) -> Forgotten:
        """Have the connectors publish again what differs from the restored checkpoints, once everything is replayed.

        The checkpoints know nothing of what was published after the backup: a source that has changed back since would
        look unchanged. Raises Retryable while Postgres is away."""
        return await republish(self._pool)

    async def settled(self) -> Convergence:
        """Wait until both stores hold what the ledger wants as of now. Raises Retryable when nobody works on it."""
        first: int | None = None
        looked = monotonic()
        with translated("recover"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute("SELECT clock_timestamp()")
                row = await cursor.fetchone()
        assert row is not None
        now: datetime = row[0]
        while True:
            with translated("recover"):
                async with self._pool.connection() as connection:
                    pending, failed = await _pending(connection, now)
            left = sum(pending.values())
            first = left if first is None else first
            self._progress("converging", max(0, first - left), max(first, left))
            if not left:
                return Convergence(failed)
            if monotonic() - looked > LOOK_SECONDS:
                looked = monotonic()
                await self._require_served([store for store, count in pending.items() if count])
            await asyncio.sleep(POLL_SECONDS)

    async def _require_served(self, stores: Sequence[Store]) -> None:
        for store in stores:
            with translate_offset_errors():
                if not await self._consumers.members(group(store)):
                    raise Retryable(
                        f"the ledger has caught up, but no {store} worker runs to bring the store after it: start one"
                        f" (`penstock worker {store}`), then run `penstock audit --repair`"
                    )


REWOUND: Mapping[str, Mapping[Lane, Topic]] = {
    stage.name: stage.topics for stage in (Detect, Identities, Conversations)
}
"""The stages that write Postgres from what Kafka keeps. The sinks' groups need nothing: a hint only wakes a sink,
and whatever the ledger wants is hinted by the replay or by the sweeper."""


def _targets(logs: Mapping[Partition, Log], committed: Mapping[Partition, int]) -> dict[Partition, int]:
    """The offsets to go back to. A partition without a committed offset begins at its start anyway."""
    return {p: log.since for p, log in logs.items() if p in committed and log.since < committed[p]}


def _missing(logs: Mapping[Partition, Log], moment: datetime, since: datetime) -> list[str]:
    """Lines about partitions whose oldest record is younger than the requested moment, and that had older ones."""
    first = max(moment, since) if moment == BEGINNING else moment
    return [
        f"{topic}/{n} keeps nothing sent before {log.oldest:%Y-%m-%d %H:%M:%S} UTC: events of the"
        f" {_span((log.oldest - first).total_seconds())} before that may be missing"
        for (topic, n), log in sorted(logs.items())
        if log.begin > 0 and log.oldest is not None and log.oldest > first
    ]


def _span(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


async def _floors(connection: Connection, since: datetime) -> dict[Lane, datetime]:
    """Per lane, the moment that was certainly not handled yet: ``since``, or when the last events that the restored
    ledger handled were observed at their sources, which is earlier where detect was behind or stood still. A lane that
    it never handled anything of is read from its beginning."""
    await permit_long(connection)
    cursor = await connection.execute(
        "SELECT e.lane, min(e.observed_at) FROM document_events e"
        " JOIN (SELECT lane, max(at) AS at FROM document_events GROUP BY lane) last USING (lane)"
        " WHERE e.at >= last.at - make_interval(secs => %s) GROUP BY e.lane",
        [LAG_WINDOW_SECONDS],
    )
    observed: dict[str, datetime] = dict(await cursor.fetchall())
    lanes: tuple[Lane, Lane] = ("live", "backfill")
    return {lane: min(since, observed.get(lane, BEGINNING)) for lane in lanes}


async def _pending(connection: Connection, until: datetime) -> tuple[dict[Store, int], int]:
    """(documents that wait, by store; documents set aside) of what was wanted at ``until``."""
    cursor = await connection.execute(
        "SELECT s.store, count(*) FILTER (WHERE s.attempts = 0), count(*) FILTER (WHERE s.attempts > 0)"
        " FROM index_state s JOIN generations g ON g.name = s.generation AND g.state <> 'retired'"
        " WHERE s.seq < s.want_seq AND s.pending_since <= %s GROUP BY s.store",
        [until],
    )
    rows = {store: (waiting, failed) for store, waiting, failed in await cursor.fetchall()}
    return {s: rows.get(s, (0, 0))[0] for s in STORES}, sum(failed for _, failed in rows.values())


@asynccontextmanager
async def open_recovery(settings: Settings, on_progress: OnProgress) -> AsyncIterator[Recovery]:
    """A Recovery on connections of its own. Raises Retryable or Misconfigured."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(settings.postgres, "any"))
        es = connect(settings.elasticsearch)
        stack.push_async_callback(es.close)
        consumers = await stack.enter_async_context(groups(settings.kafka))
        yield Recovery(pool, es, consumers, index_prefix=settings.elasticsearch.index_prefix, on_progress=on_progress)


_DIFFERS = """
    SELECT i.tenant, i.source, i.external_id, d.version
    FROM connector_items i
    LEFT JOIN documents d USING (tenant, source, external_id)
    LEFT JOIN access_sets a ON a.id = d.access_id
    WHERE i.version IS NOT NULL AND NOT i.gone AND (
        d.id IS NULL OR d.deleted_at IS NOT NULL OR d.version IS DISTINCT FROM i.version
        OR a.acl_tags IS DISTINCT FROM ARRAY(SELECT DISTINCT i.source || '/' || t FROM unnest(i.acl_tags) t ORDER BY 1)
        OR a.required_tags IS DISTINCT FROM
            ARRAY(SELECT DISTINCT i.source || '/' || t FROM unnest(i.required_tags) t ORDER BY 1)
    )
"""
"""Tags as the ledger keeps them: pipeline.core.identity.qualify. An unneeded difference costs one reading."""

_PUBLISH_AGAIN = f"""
    UPDATE connector_items mine
    SET fingerprint = NULL, stat = NULL, revision = NULL, in_doubt_since = clock_timestamp(),
        version = greatest(mine.version, theirs.version)
    FROM ({_DIFFERS}) theirs
    WHERE (mine.tenant, mine.source, mine.external_id) = (theirs.tenant, theirs.source, theirs.external_id)
"""  # noqa: S608 — constants of this module
_DELETE_AGAIN = """
    UPDATE connector_items i
    SET gone = false, fingerprint = NULL, stat = NULL, revision = NULL, in_doubt_since = clock_timestamp(),
        version = greatest(i.version, d.version)
    FROM documents d
    WHERE i.gone AND d.deleted_at IS NULL AND d.version IS NOT NULL
        AND (d.tenant, d.source, d.external_id) = (i.tenant, i.source, i.external_id)
"""
"""The next sweep misses the document, asks the source, and publishes the delete again."""
_REMEMBER_AGAIN = """
    INSERT INTO connector_items (tenant, source, scope, external_id, version, swept_at, in_doubt_since)
    SELECT d.tenant, d.source, '', d.external_id, d.version, '-infinity', clock_timestamp()
    FROM documents d JOIN connector_sources s USING (tenant, source)
    WHERE d.deleted_at IS NULL AND d.version IS NOT NULL
    ON CONFLICT DO NOTHING
"""
"""`penstock ingest` and `watch` keep no row of what they deleted, and restored checkpoints none of what was published
after the backup."""
_MEMBERS_AGAIN = "UPDATE connector_principals SET digest = ''"


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The number of items that connectors publish again when they look next."""

    documents: int
    deletions: int
    principals: int


async def republish(pool: Pool) -> Forgotten:
    """Mark the documents as in doubt whose checkpoint says that they were published differently from what the ledger
    has: the connectors' next look publishes them as their source has them then. Raises Retryable.

    Kafka's topics were lost with records that nobody had read yet, or Postgres was restored and Kafka has more than the
    restored checkpoints know. The ledger forgets nothing, so only memberships are published needlessly, which costs
    nothing downstream where they did not change. Safe to repeat.
    """
    with translated("recover"):
        async with pool.connection() as connection:
            await permit_long(connection)
            await connection.execute("UPDATE connector_freshness SET equal_at = NULL, reopened_at = clock_timestamp()")
            documents = await _count(connection, _PUBLISH_AGAIN)
            deletions = await _count(connection, _DELETE_AGAIN) + await _count(connection, _REMEMBER_AGAIN)
            return Forgotten(documents, deletions, await _count(connection, _MEMBERS_AGAIN))


async def _count(connection: Connection, statement: str) -> int:
    return (await connection.execute(statement.encode())).rowcount
