"""A frequent statement reads no more from a larger ledger: plans over fifty thousand documents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from psycopg import AsyncConnection, AsyncCursor, sql

from pipeline.audit import reading, runs
from pipeline.core.model import Generation
from pipeline.diagnosis import story
from pipeline.ledger import arrivals, bulks, documents, generations, letters, work
from pipeline.stores.postgres import Connection, open_pool
from query.access import callers as access
from query.access.callers import Caller
from query.access.verify import verify
from query.retrieval import cache
from tests.support.space import Space

MOST_ROWS = 2_000
"""That any step of a plan may read."""

_LIBRARY = """
    INSERT INTO access_sets (tenant, digest, acl_tags, required_tags)
        SELECT 'acme', sha256(n::text::bytea), ARRAY['wiki/' || n], '{}' FROM generate_series(1, 100) n;
    INSERT INTO documents (id, tenant, source, external_id, seq, announced_seq, version, observed_at,
            access_observed_at, access_id, content_hash, meta_hash, title, media_type)
        SELECT md5(n::text)::uuid, 'acme', 'wiki', n || '.md', n, CASE WHEN n <= 49000 THEN n ELSE 0 END, 1, now(),
            now(), (SELECT min(id) FROM access_sets) + n % 100, sha256(n::text::bytea), '', 'Title', 'text/plain'
        FROM generate_series(1, 50000) n;
    INSERT INTO document_bodies SELECT id, 'text', '{}' FROM documents;
    INSERT INTO document_events (document_id, slot, kind, outcome, lane)
        SELECT id, 0, 'k', 'created', 'live' FROM documents;
    INSERT INTO manifests SELECT id, 'g1', content_hash, ARRAY[id], ARRAY[1], '[[[0, 4]]]', '[[]]' FROM documents;
    INSERT INTO index_state (document_id, generation, store, want_seq, seq, settled_at, next_at)
        SELECT id, 'g1', store, seq, CASE WHEN seq > 20000 THEN 0 ELSE seq END, now(), now() + interval '1 hour'
        FROM documents, unnest(ARRAY['vectors', 'keywords']) store;
    INSERT INTO superseded (document_id, version, observed_at, content_hash, meta_hash, metadata, text)
        SELECT id, 0, now() + interval '1 hour', '', '', '{}', '' FROM documents WHERE seq % 10 = 0;
    INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, document_id, tenant, source,
            external_id, first_failed_at, at, letter_partition, letter_offset, replayed_at)
        SELECT 't:0:' || n, 't', 0, n, 'detect', 'invalid', '', md5(n::text)::uuid, 'acme', 'wiki', n || '.md', now(),
            now() - n * interval '1 second', 0, n, CASE WHEN n % 10 > 0 THEN now() END
        FROM generate_series(1, 20000) n;
    ANALYZE;
"""


class Explaining:
    """A connection that looks at the plan of everything it is asked, and then does it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.most = 0
        self.plans: list[Any] = []

    async def execute(self, statement: Any, values: Any = None) -> AsyncCursor[Any]:
        return await self._connection.execute(await self.explain(statement, values), values)

    def cursor(self, *, row_factory: Any) -> ExplainingCursor:
        return ExplainingCursor(self, self._connection.cursor(row_factory=row_factory))

    async def explain(self, statement: Any, values: Any) -> bytes:
        """Look at the plan of a statement. Returns its text."""
        if isinstance(statement, sql.Composable):
            statement = statement.as_string(self._connection)
        text = statement.decode() if isinstance(statement, bytes) else statement
        if text.startswith("LOCK TABLE"):  # it reads no row, and has no plan
            return str(text).encode()
        async with self._connection.transaction(force_rollback=True):
            cursor = await self._connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}".encode(), values)
            [[plan]] = await cursor.fetchall()
        self.plans.append(plan)
        self.most = max(self.most, *(_read(node) for node in _nodes(plan[0]["Plan"])))
        return str(text).encode()


class ExplainingCursor:
    """A cursor of an ``Explaining`` connection."""

    def __init__(self, connection: Explaining, cursor: AsyncCursor[Any]) -> None:
        self._connection = connection
        self._cursor = cursor
        self.fetchall, self.fetchone = cursor.fetchall, cursor.fetchone

    async def execute(self, statement: Any, values: Any = None) -> AsyncCursor[Any]:
        return await self._cursor.execute(await self._connection.explain(statement, values), values)

    async def __aenter__(self) -> ExplainingCursor:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cursor.close()


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


def _read(node: dict[str, Any]) -> int:
    removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Join Filter", 0)
    return int((node["Actual Rows"] + removed) * node["Actual Loops"])


@pytest.fixture
async def ledger(space: Space) -> AsyncIterator[AsyncConnection[Any]]:
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        await connection.execute(_LIBRARY.encode())
        await connection.commit()
        # So small a ledger is read at a gulp where it is cheaper; what matters is what an index leads to.
        await connection.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")
        yield connection


async def test_hot_statements_read_few_rows_in_a_large_ledger(ledger: AsyncConnection[Any]) -> None:
    cursor = await ledger.execute("SELECT id FROM documents ORDER BY md5(id::text) LIMIT 100")
    ids = [id_ for (id_,) in await cursor.fetchall()]
    offered = [cache.ChunkKey(id_, id_) for id_ in ids]
    everybody = Caller("acme", frozenset(f"wiki/{n}" for n in range(1, 101)))
    middle = sorted(ids)[50]
    active: Generation = await generations.active(ledger)
    held = frozenset({"wiki/1"})
    everything = await access.readable(ledger, Caller("acme", held))
    taken = await cache.snapshot(ledger)
    open_bulk = bulks.OpenBulk(ids[0], active.keyword_index, [bulks.Entry(id_, id_, 1) for id_ in ids], False)
    hot: dict[str, Callable[[Any], Awaitable[Any]]] = {
        "the sweeper's look": lambda c: work.due(c, limit=500, again_in_seconds=60),
        "an open bulk": lambda c: bulks.unwanted(c, open_bulk),
        "missed announcements": lambda c: arrivals.missed_announcements(c, after=0, limit=500),
        "announcements": lambda c: arrivals.ready_to_announce(c, ids),
        "detect's look": lambda c: documents.peek(c, ids),
        "what is superseded": lambda c: documents.load_superseded(c, ids),
        "its size": lambda c: documents.stored_bytes(c, ids, ids),
        "pruning it": lambda c: documents.prune_superseded(c, ids),
        "a sink's work": lambda c: work.load(c, "g1", "vectors", ids),
        "a sink's lock": lambda c: work.lock_wants(c, "g1", "keywords", ids),
        "the audit's page": lambda c: reading.next_documents(c, active, middle, reading.Limits()),
        "the audit's documents": lambda c: reading.load(c, active, ids),
        "the audit's second comparison": lambda c: reading.standings(c, active, ids),
        "the audit's own size": lambda c: runs.background(c),
        "dead letters": lambda c: letters.page(c, letters.Filter(), after=None, limit=50),
        "more dead letters": lambda c: letters.page(c, letters.Filter(), after="t:0:1000", limit=50),
        "why": lambda c: story.read(c, ids[0]),
        "whether it arrived": lambda c: arrivals.arrivals(c, ids),
        "the last word": lambda c: verify(c, "g1", Caller("acme", held), offered),
        "the last word to a wide reader": lambda c: verify(c, "g1", everybody, offered),
        "a remembered answer's look": lambda c: cache.changed_since(c, taken, "g1", Caller("acme", held), everything),
    }
    most = {}
    for name, statement in hot.items():
        explaining = Explaining(ledger)
        await statement(explaining)
        most[name] = explaining.most
    assert {name: rows for name, rows in most.items() if rows > MOST_ROWS} == {}


@pytest.mark.slow
async def test_checking_a_cached_answer_reads_few_rows_during_a_long_open_transaction(
    space: Space, ledger: AsyncConnection[Any]
) -> None:
    """As under a backup that takes hours: whatever is settled meanwhile is newer than the oldest open transaction."""
    generation = (await generations.active(ledger)).name
    caller = Caller("acme", frozenset({"wiki/1"}))
    everything = await access.readable(ledger, caller)
    async with open_pool(space.settings.postgres) as pool, pool.connection() as long, long.transaction():
        await long.execute("SELECT pg_current_xact_id()")
        await ledger.execute("UPDATE index_state SET seq = want_seq, settled_at = now() WHERE seq < want_seq")
        await ledger.commit()
        await ledger.execute("ANALYZE index_state")
        await ledger.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")
        taken = await cache.snapshot(ledger)
        explaining: Any = Explaining(ledger)
        assert not await cache.changed_since(explaining, taken, generation, caller, everything)
        assert explaining.most <= MOST_ROWS
        # What was under way when the answer was made is seen as soon as it is committed.
        await long.execute(
            "UPDATE index_state SET settled_at = now() WHERE document_id ="
            " (SELECT id FROM documents WHERE access_id = ANY(%s) LIMIT 1)",
            [list(everything.access_ids)],
        )
        assert not await cache.changed_since(ledger, taken, generation, caller, everything)
    await ledger.commit()
    assert await cache.changed_since(ledger, taken, generation, caller, everything)


@pytest.mark.slow
async def test_a_connectors_comparison_with_the_ledger_reads_one_page_at_a_time(ledger: AsyncConnection[Any]) -> None:
    """Functions hide their plans: what counts is what was read."""
    await ledger.execute(
        "INSERT INTO memberships SELECT 'acme', 'wiki', 'p' || n, '{}', now() FROM generate_series(1, 20000) n"
    )
    await ledger.execute("UPDATE documents SET source = 'other' WHERE seq % 2 = 0")
    await ledger.commit()
    await ledger.execute("SET enable_seqscan = on")
    for statement in (
        "SELECT ledger_documents('acme', 'wiki', md5('7')::uuid, 500)",
        "SELECT ledger_documents('acme', 'nobody', md5('7')::uuid, 500)",
        "SELECT ledger_lacks(ARRAY(SELECT md5(n::text)::uuid FROM generate_series(1, 500) n))",
        "SELECT ledger_members('acme', 'wiki', 'p5', 500)",
        "SELECT ledger_lacks_members('acme', 'wiki', ARRAY(SELECT 'p' || n FROM generate_series(1, 500) n))",
    ):
        before = await _rows_read(ledger)
        await ledger.execute(statement.encode())
        assert await _rows_read(ledger) - before <= MOST_ROWS, statement


async def _rows_read(connection: AsyncConnection[Any]) -> int:
    """By this transaction so far, of all tables."""
    cursor = await connection.execute(
        "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_xact_user_tables"
    )
    [[rows]] = await cursor.fetchall()
    return int(rows)
