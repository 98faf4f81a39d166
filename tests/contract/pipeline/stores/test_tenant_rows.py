"""Rows divided by tenant in Postgres itself (docs/adr/0053): what a statement that forgot its condition shows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from hashlib import md5, sha256
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import psycopg
import pytest
import pytest_asyncio
from pgvector import HalfVector
from structlog.testing import capture_logs

from canary.telemetry import CanaryMetrics
from canary.worker import Canaries
from deploy.local.stack import Stack
from pipeline.core import publication
from pipeline.core.canary import Canary
from pipeline.core.conversations import made_by
from pipeline.diagnosis import story
from pipeline.diagnosis.ledger import UNDIVIDED as NOT_DIVIDED
from pipeline.diagnosis.ledger import ledger_report
from pipeline.ledger import generations
from pipeline.runtime.settings import CanarySettings, PostgresSettings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.postgres import (
    GENERATIONS_LOCK,
    Connection,
    Pool,
    create_chunk_table,
    divide_rows,
    migrate,
    migrations,
    open_pool,
    refusal,
)
from pipeline.stores.vectors import copy, of_ids
from query.access import callers as access
from query.access import documents as reading
from query.access import facets, freshness, published
from query.access.callers import Caller, Readable
from query.access.filters import NONE, Filters
from query.access.tenant_rows import read_rows_of, rows_of
from query.access.verify import describe, verify
from query.answers import review
from query.evaluation import golden, promotion
from query.http.serve import warn_if_undivided
from query.modes import documents as whole
from query.modes import history as conversations
from query.modes import history as past
from query.modes import survey
from query.preview import overlaying, preview
from query.preview.model import Edit, ProposedDocument
from query.retrieval import cache, vectors
from query.retrieval.vectors import NeighbourQuery, Tuning
from query.standing import table as standing
from query.standing.words import Words
from tests.support.deploy.roles_kit import define_roles, logins, run_file
from tests.support.pipeline.tenant_rows_kit import Ids, Mutating, connected, empty, fill, ids_of, sites
from tests.support.query.library import Library, WordEmbedder, deletion, document
from tests.support.query.readers_kit import another_team

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

HELD, OTHER = "anna", "berta"

UNDIVIDED = {"index_state", "audit_differences", "connectors"}
"""Rows of tenants that the query service reads across them: ids and numbers, and the operators' connectors (by
columns). Another one needs a reason in docs/adr/0053, and undivided_tables() to name it."""
NOBODYS = {
    "schema_migrations",
    "fence",
    "generations",
    "builds",
    "keyword_indexes",
    "producers",
    "producer_keys",
    "audit_runs",
    "embedding_days",
    "eval_runs",
    "shadow_agreement",
}
"""Readable to the query service, and of no tenant."""


@dataclass
class Place:
    library: Library
    """As an administrator."""
    logins: dict[str, str]

    @property
    def query(self) -> str:
        return self.logins["penstock_query"]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def place(stack: Stack) -> AsyncIterator[Place]:
    async with Library.create(stack, WordEmbedder()) as library:
        admin = library.settings.postgres.dsn.get_secret_value()
        define_roles(admin)
        for tenant in (HELD, OTHER):
            await fill(library, tenant, made_by(library.generation))
        with logins(admin) as dsns:
            yield Place(library, dsns)


@pytest_asyncio.fixture(loop_scope="module")
async def pool(place: Place) -> AsyncIterator[Pool]:
    async with open_pool(PostgresSettings(dsn=place.query), "queries") as pool:  # type: ignore[arg-type]
        yield pool


# Every statement without its tenant condition


STANDING = [UUID(md5(b"standing%d" % n, usedforsecurity=False).hexdigest()) for n in (1, 2, 3)]
"""A question to read, one to write, and one to remove: what the first connection writes, the other would wait for."""


def new_answer(ids: Ids) -> standing.NewAnswer:
    """The standing question again, made from the documents of both tenants."""
    chunks = [(n, chunk, document) for n, (chunk, document) in enumerate(ids.chunks.items(), 1)]
    return standing.NewAnswer(STANDING[1], "ann", "Q", {}, [], None, "g1", chunks, None)


async def statements(connection: Any, library: Library, ids: Ids, taken: str) -> None:
    """Everything that the query side asks about tenants' rows, with what belongs to both of them."""
    caller = Caller(HELD, frozenset({"wiki/staff", f"wiki/of-{HELD}"}))
    generation = library.generation
    may = Readable(ids.access, ("wiki/staff",), ())
    narrow = Filters(sources=("wiki",), authors=("ann",))
    scope = survey.ReadScope(generation, HELD, caller.tags, ids.access, NONE)
    offered = [cache.ChunkKey(chunk, document) for chunk, document in ids.chunks.items()]
    vector = await library.embedder.embed_query("text")
    ask: list[Callable[[], Awaitable[Any]]] = [
        lambda: access.identify(connection, HELD, principals=["ann"], tags=["staff"]),
        lambda: access.readable(connection, caller),
        lambda: facets._count(connection, caller, may, ["team"], NONE, {"team": "keyword"}),
        lambda: facets.count_all(connection, caller),
        lambda: cache.changed_since(connection, taken, generation.name, caller, may),
        lambda: survey.access_ids_of(connection, may, ("wiki",)),
        lambda: survey.survey(connection, scope, max_tokens=None),
        lambda: survey.coverage(connection, scope),
        lambda: connection.execute(*survey.build_coverage(scope, max(ids.documents))),
        lambda: whole.read(connection, scope, ids.documents, budget_tokens=100),
        lambda: whole.readable_ids(connection, scope, ids.documents),
        lambda: golden.promoted(connection, HELD),
        lambda: overlaying.read(
            connection, caller, generation, Edit("wiki", [ProposedDocument(f"{HELD}.md"), ProposedDocument("a")], [""])
        ),
        lambda: preview._names(connection, HELD, ids.documents),
        lambda: past.needs_vector(connection, HELD, "bob"),
        lambda: past.readable_answers(connection, caller, list(ids.answers)),
        lambda: conversations.history(connection, caller, "ann", 1000),
        lambda: conversations.history(connection, caller, "bob", 1000, question=(generation, vector)),
        lambda: conversations.history(connection, caller, "bob", 1000),
        lambda: reading.facets(connection, caller),
        lambda: connection.execute(
            reading._FACETS,
            {"ids": list(ids.access), "tenant": HELD, "of_a_set": 100, "documents": 100, "values": 50},
        ),
        lambda: review.list_pending(connection, caller),
        lambda: standing.rows(connection, HELD, "ann"),
        lambda: standing.count(connection, HELD, "ann"),
        lambda: standing.summaries(connection, caller, "ann"),
        lambda: standing.sources(connection, caller, [STANDING[0]]),
        lambda: standing._entered(connection, caller, [STANDING[0]]),
        lambda: standing.embed_again(connection, HELD, STANDING[0], HalfVector([0.1] * 65), generation.name, Words()),
        lambda: standing.store(connection, HELD, new_answer(ids)),
        lambda: standing.remove(connection, HELD, "ann", STANDING[2]),
        lambda: published.pending(connection, caller, [publication.content(id_, 1) for id_ in ids.documents]),
        lambda: freshness.certificates(connection, HELD, may, (), generation.name),
        lambda: promotion.candidates(connection, promotion.Asker(HELD, tags=("staff",))),
        lambda: golden.load(connection, HELD),
        lambda: golden.delete(connection, HELD, "Q"),
        *(lambda id_=id_: reading.read(connection, caller, id_) for id_ in ids.documents),  # type: ignore[misc]
        *(lambda id_=id_: reading.may_read(connection, caller, id_) for id_ in ids.documents),  # type: ignore[misc]
        *(lambda id_=id_: review.resolve(connection, HELD, id_, "right") for id_ in ids.answers),  # type: ignore[misc]
        *(
            lambda id_=id_: review.store_feedback(  # type: ignore[misc]
                connection, caller, [sha256(b"bob").digest()], review.Feedback("up", answer_id=id_)
            )
            for id_ in ids.answers
        ),
        lambda: connection.execute(
            review._DELETE_OLDER,
            {
                "tenant": HELD,
                "giver": b"",
                "earlier": [sha256(b"ann").digest()],
                "subject": sha256(b"s").digest(),
                "most": 1,
            },
        ),
    ]
    few = Tuning(always_exact_rows=len(ids.documents) // 2)
    for filters in (NONE, narrow):
        ask.append(lambda filters=filters: verify(connection, generation.name, caller, offered, filters))  # type: ignore[misc]
        query = NeighbourQuery(generation, caller, may, filters)
        counted = replace(query, generation=replace(generation, sketched=False))
        ask.append(lambda query=counted: vectors.choose_scan(connection, query, limit=1, tuning=few))  # type: ignore[misc]
        for verified in (False, True):
            query = replace(query, verified=verified)
            ask += [
                lambda query=query, scan=scan: connection.execute(
                    *vectors.build(query, vector, scan, limit=50, walked=50)
                )  # type: ignore[misc]
                for scan in ("exact", "sketched", "graph", "whole graph")
            ]
    for question in ask:
        await question()


async def test_a_statement_without_its_tenant_condition_shows_and_changes_no_row_of_another_tenant(
    place: Place,
) -> None:
    """Each is asked without its conditions in a transaction of one tenant, first beside another one's rows, then
    without those: nobody could tell which."""
    # The analysis worker, whose login is not held to a tenant, runs them.
    of_the_worker = {f"query/standing/{name}.py" for name in ("task", "renewal", "word_index")}
    known = sorted(
        (site for site in sites("query") if site.file not in of_the_worker), key=lambda site: (site.file, site.text)
    )
    library, ids = place.library, await ids_of(place.library)
    await library.execute("ANALYZE documents, chunks_g1")  # as autovacuum may at any time
    seen: list[list[tuple[str, Any]]] = []
    async with connected(place.query) as held, connected(library.settings.postgres.dsn.get_secret_value()) as free:
        taken = await cache.snapshot(free)
        await library.execute(
            "UPDATE index_state SET settled_at = now()"
            " WHERE document_id IN (SELECT id FROM documents WHERE tenant = %s)",
            OTHER,
        )
        covered, leaking = set(), set()
        for _ in range(2):
            await free.rollback()
            mutating = Mutating(held, free, known)
            async with held.transaction(force_rollback=True):
                await held.execute("SELECT set_config('penstock.tenant', %s, true)", [HELD])
                await statements(mutating, library, ids, taken)
            seen.append(mutating.results)
            covered |= mutating.covered
            leaking |= mutating.leaking
            await empty(library, OTHER)
    await fill(library, OTHER, made_by(library.generation))
    both, alone = seen
    for (statement, shown), (_, without) in zip(both, alone, strict=True):
        assert shown == without, statement
    assert set(known) - covered == set(), "statements with a tenant condition that `statements` does not ask"
    assert set(known) - leaking == set(), "without policies these show no more without their condition: is it one?"


async def test_statements_by_id_find_no_row_of_another_tenant(place: Place) -> None:
    """By ids alone: a chunk's text, its embedding, where it stands, a document's story."""
    ids, generation = await ids_of(place.library), place.library.generation
    [mine] = {len(ids.chunks) // 2}
    offered = [cache.ChunkKey(chunk, document) for chunk, document in ids.chunks.items()]
    async with connected(place.query) as connection:
        await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [HELD])
        assert len(await of_ids(connection, generation, list(ids.chunks))) == mine
        near = await vectors.of_entries(
            connection, generation, list(ids.chunks), np.ones(generation.dimensions, dtype=np.float32), limit=1_000
        )
        assert len(near) == mine
        assert len(await describe(connection, generation.name, offered)) == mine  # type: ignore[arg-type]
        stories = [await story.read(connection, id_) for id_ in ids.documents]
        assert sum(story.document is not None for story in stories) == mine
        assert {story.document.identity.tenant for story in stories if story.document} == {HELD}
        assert await story.find(connection, OTHER, ["1.md"]) == []
        assert (await access.readable(connection, Caller(OTHER, frozenset({"wiki/staff"})))).access_ids == ()


VOTE = (
    "INSERT INTO answer_feedback (tenant, giver, subject, answer_id, verdict)"
    " VALUES (%s, '\\x01'::bytea, '\\x02'::bytea, %s, 'up')"
)


async def test_writing_a_row_of_another_tenant_is_refused(place: Place) -> None:
    async with connected(place.query) as connection:
        await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [HELD])
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await connection.execute(VOTE, [OTHER, uuid4()])
        await connection.rollback()
        await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [HELD])
        await connection.execute(VOTE, [HELD, uuid4()])
        await connection.rollback()


async def test_without_a_tenant_setting_no_row_of_any_tenant_is_visible(place: Place) -> None:
    """Every table that is divided, and every table that should be: a new one says which it is."""
    rows = await place.library.execute(
        "SELECT c.relname, EXISTS (SELECT FROM pg_policy WHERE polrelid = c.oid AND polname = 'rows_of_a_tenant'),"
        " has_table_privilege('penstock_query', c.oid, 'SELECT') FROM pg_class c"
        " WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')"
        " AND has_any_column_privilege('penstock_query', c.oid, 'SELECT, INSERT, UPDATE')"
    )
    divided = {name for name, is_divided, _ in rows if is_divided}
    assert {name for name, is_divided, _ in rows if not is_divided} == UNDIVIDED | NOBODYS
    assert {"documents", "document_bodies", "chunks_g1", "access_sets", "memberships", "answer_reviews"} < divided
    async with connected(place.query) as connection:
        for tenant, share in ((None, 0), ("", 0), ("nobody", 0), (HELD, 2)):
            if tenant is not None:
                await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [tenant])
            for name in sorted(divided):
                cursor = await connection.execute(f"SELECT count(*) FROM {name}".encode())
                [[shown]] = await cursor.fetchall()
                [[there]] = await place.library.execute(f"SELECT count(*) FROM {name}")
                assert there > 0, f"nothing to hide in {name}: fill() knows nothing of it"
                assert shown == (there // share if share else 0), (tenant, name)


async def test_the_overview_of_all_tenants_documents_contains_no_names(place: Place) -> None:
    async with connected(place.query) as connection:
        cursor = await connection.execute("SELECT count(*), count(external_id) FROM overview_documents")
        [(documents, named)] = await cursor.fetchall()
    assert (documents, named) == (await _count_all(place), 0)


async def test_the_tenant_setting_is_cleared_when_a_connection_returns_to_the_pool(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PostgresSettings(dsn=place.query, pool_max_size=1)  # type: ignore[arg-type]
    async with open_pool(settings, "queries") as pool:

        async def seen() -> int:
            async with pool.connection() as connection:
                assert not connection.autocommit
                cursor = await connection.execute("SELECT count(*) FROM documents")
                [[count]] = await cursor.fetchall()
            return int(count)

        async def use(how: Callable[[Connection], Awaitable[Any]]) -> None:
            async with rows_of(pool, HELD) as connection:
                cursor = await connection.execute("SELECT count(*) FROM documents")
                assert (await cursor.fetchall())[0][0] == 12
                await how(connection)

        async def fail(connection: Connection) -> None:
            await connection.execute("SELECT 1 / 0")

        async def stop(connection: Connection) -> None:
            raise asyncio.CancelledError

        async def end(connection: Connection) -> None:
            await connection.commit()
            cursor = await connection.execute("SELECT count(*) FROM documents")
            assert (await cursor.fetchall())[0][0] == 0

        await use(lambda connection: connection.execute("SELECT 1"))
        assert await seen() == 0
        for broken, error in ((fail, psycopg.errors.DivisionByZero), (stop, asyncio.CancelledError)):
            with pytest.raises(error):
                await use(broken)
            assert await seen() == 0
        late = asyncio.create_task(use(lambda connection: connection.execute("SELECT pg_sleep(30)")))
        await asyncio.sleep(0.3)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert await seen() == 0
        await use(end)
        assert await seen() == 0

        async def cancelled_in_rollback(connection: Connection) -> None:
            rollback = connection.rollback

            async def done_and_cancelled() -> None:
                await rollback()
                raise asyncio.CancelledError

            monkeypatch.setattr(connection, "rollback", done_and_cancelled)
            raise ValueError

        with pytest.raises(asyncio.CancelledError):
            await use(cancelled_in_rollback)
        monkeypatch.undo()
        assert await seen() == 0


async def test_nothing_of_a_tenant_remains_on_a_connection_that_read_its_rows(place: Place) -> None:
    settings = PostgresSettings(dsn=place.query, pool_max_size=1)  # type: ignore[arg-type]
    async with open_pool(settings, "queries") as pool:

        async def use(statement: str) -> None:
            async with read_rows_of(pool, HELD) as connection:
                for _ in range(2):  # the second statement is of the same transaction
                    cursor = await connection.execute("SELECT count(*) FROM documents")
                    assert (await cursor.fetchall())[0][0] == 12
                await (await connection.execute(statement.encode())).fetchall()

        async def require_nothing() -> None:
            async with pool.connection() as connection:
                assert not connection.autocommit
                cursor = await connection.execute("SELECT count(*) FROM documents")
                assert (await cursor.fetchall())[0][0] == 0

        await use("SELECT 1")
        await require_nothing()
        with pytest.raises(psycopg.errors.DivisionByZero):
            await use("SELECT 1 / 0")
        await require_nothing()
        late = asyncio.create_task(use("SELECT pg_sleep(30)"))
        await asyncio.sleep(0.3)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        await require_nothing()


async def test_a_search_whose_client_leaves_costs_the_pool_no_other_connection(place: Place) -> None:
    """All connections were replaced for each client that left."""
    settings = PostgresSettings(dsn=place.query, pool_max_size=3)  # type: ignore[arg-type]
    async with open_pool(settings, "queries") as pool:

        async def use(statement: str, started: asyncio.Event) -> None:
            async with read_rows_of(pool, HELD) as connection:
                backends.add(connection.pgconn.backend_pid)
                started.set()
                await (await connection.execute(statement.encode())).fetchall()

        backends = set[int]()
        events = [asyncio.Event() for _ in range(3)]
        works = [asyncio.create_task(use("SELECT pg_sleep(1)", started)) for started in events]
        await asyncio.gather(*(started.wait() for started in events), *works)
        assert len(backends) == 3
        late = asyncio.create_task(use("SELECT pg_sleep(30)", started := asyncio.Event()))
        await started.wait()
        await cancel_and_wait([late])
        with pytest.raises(psycopg.errors.DivisionByZero):
            await use("SELECT 1 / 0", asyncio.Event())
        events = [asyncio.Event() for _ in range(3)]
        before, backends = backends, set()
        works = [asyncio.create_task(use("SELECT pg_sleep(1)", started)) for started in events]
        await asyncio.gather(*(started.wait() for started in events), *works)
        assert len(before & backends) == 1, "of three, those of the two searches are replaced"


async def test_a_search_that_failed_leaves_no_statement_that_seems_to_be_prepared(place: Place) -> None:
    """psycopg took a statement for prepared that came after the one that failed: searches on the connection were
    errors with status 500."""
    settings = PostgresSettings(dsn=place.query, pool_max_size=1)  # type: ignore[arg-type]
    async with open_pool(settings, "queries") as pool:

        async def use(*statements: str) -> None:
            async with read_rows_of(pool, HELD) as connection:
                for cursor in [await connection.execute(statement.encode()) for statement in statements]:
                    await cursor.fetchall()

        for _ in range(5):  # the next time it is prepared
            await use("SELECT 7")
        with pytest.raises(psycopg.errors.DivisionByZero):
            await use("SELECT 1 / 0", "SELECT 7")
        await use("SELECT 7")


@pytest.mark.parametrize("of", [rows_of, read_rows_of])
async def test_a_tenants_name_is_never_interpreted_as_sql(
    pool: Pool, of: Callable[[Pool, str], AbstractAsyncContextManager[Connection]]
) -> None:
    for name in (f"x', true), set_config('penstock.tenant', '{HELD}", f"{HELD}\x00", "\\", "'; COMMIT; --", "\ud800"):
        async with of(pool, name) as connection:
            cursor = await connection.execute("SELECT count(*) FROM documents")
            assert (await cursor.fetchall())[0][0] == 0


async def test_canaries_left_by_a_killed_process_are_visible_to_the_query_services_login(
    place: Place, pool: Pool, tenant: str
) -> None:
    await place.library.put(document("canary", "It sings.", tenant=tenant, source="canary.wiki"))
    canaries = Canaries(pool, None, CanaryMetrics(), CanarySettings())  # type: ignore[arg-type]
    async with pool.connection() as connection:
        assert Canary(tenant, "wiki") in await canaries._left(connection)
    await place.library.execute("UPDATE documents SET deleted_at = now() WHERE tenant = %s", tenant)
    async with pool.connection() as connection:
        assert Canary(tenant, "wiki") not in await canaries._left(connection)


# Everybody else


async def test_the_worker_role_sees_every_row_with_unchanged_query_plans(place: Place) -> None:
    statement = (
        "EXPLAIN (COSTS OFF) SELECT * FROM documents d JOIN chunks_g1 c ON c.document_id = d.id"
        " JOIN manifests m ON m.document_id = d.id WHERE d.tenant = 'anna' ORDER BY d.id"
    )
    plans = []
    for dsn in (place.logins["penstock_worker"], place.library.settings.postgres.dsn.get_secret_value()):
        async with connected(dsn) as connection:
            cursor = await connection.execute(statement.encode())
            plans.append(await cursor.fetchall())
            cursor = await connection.execute("SELECT count(*) FROM chunks_g1")
            assert await cursor.fetchall() == await place.library.execute("SELECT count(*) FROM chunks_g1")
    assert plans[0] == plans[1]


async def test_the_chunk_table_of_a_new_generation_has_row_policies_from_its_first_row(place: Place) -> None:
    later = replace(place.library.generation, name="g2", state="building", chunk_table="chunks_g2")
    async with place.library.pool.connection() as connection:
        await generations.add(connection, later)
        await create_chunk_table(connection, later)
        await connection.execute("INSERT INTO chunks_g2 SELECT * FROM chunks_g1")
    async with connected(place.query) as connection:
        for tenant, shown in ((HELD, 12), ("", 0)):
            await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [tenant])
            cursor = await connection.execute("SELECT count(*) FROM chunks_g2")
            assert (await cursor.fetchall())[0][0] == shown
    await place.library.execute("DROP TABLE chunks_g2")
    await place.library.execute("DELETE FROM generations WHERE name = 'g2'")


async def test_a_chunk_table_of_the_previous_version_takes_rows_and_is_counted_by_its_index_alone(place: Place) -> None:
    """Every row of such a table was read to compare its tenant, before it was counted: 40,000 took 189 ms, not 48."""
    older = replace(place.library.generation, name="g2", state="building", chunk_table="chunks_g2", sketched=False)
    ids = await ids_of(place.library)
    async with place.library.pool.connection() as connection:
        await generations.add(connection, older)
        await connection.execute(
            "CREATE TABLE chunks_g2 (LIKE chunks_g1 INCLUDING DEFAULTS); ALTER TABLE chunks_g2 DROP COLUMN tenant,"
            " ADD PRIMARY KEY (id); CREATE INDEX chunks_g2_document ON chunks_g2 (document_id);"
            " SELECT divide_as_documents('chunks_g2')"
        )
        await copy(connection, place.library.generation, older, dict.fromkeys(ids.chunks, ids.access[0]))
        cursor = await connection.execute("SELECT count(*) FROM chunks_g2 WHERE tenant = %s", [HELD])
        assert await cursor.fetchone() == (12,)
    async with connected(place.query) as connection:
        for tenant, shown in ((HELD, 12), ("", 0)):
            await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [tenant])
            cursor = await connection.execute("SELECT count(*) FROM chunks_g2")
            assert await cursor.fetchone() == (shown,)
        await connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
        cursor = await connection.execute("EXPLAIN SELECT count(*) FROM chunks_g2 WHERE document_id = ANY('{}')")
        assert "Index Only Scan using chunks_g2_document" in "\n".join(line for (line,) in await cursor.fetchall())
    await place.library.execute("DROP TABLE chunks_g2")
    await place.library.execute("DELETE FROM generations WHERE name = 'g2'")


async def test_row_policies_do_not_change_the_plans_of_a_search(place: Place) -> None:
    """The walk through the graph asks for a document's tenant only of the rows that it returns; where the statement has
    the condition itself, the server's is asked once."""
    generation, ids = place.library.generation, await ids_of(place.library)
    query = NeighbourQuery(generation, Caller(HELD, frozenset({"wiki/staff"})), Readable(ids.access[:1], (), ()))
    vector = await place.library.embedder.embed_query("text")
    async with connected(place.query) as connection:
        await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [HELD])
        plans = {}
        for scan in ("graph", "exact"):
            await vectors.configure(connection, generation, scan, limit=50, timeout_seconds=30, tuning=Tuning())  # type: ignore[arg-type]
            await connection.execute("SET LOCAL enable_seqscan = off")
            statement, values = vectors.build(query, vector, scan, limit=50, walked=50)  # type: ignore[arg-type]
            cursor = await connection.execute(
                f"EXPLAIN (ANALYZE, TIMING OFF, BUFFERS OFF) {statement.as_string(connection)}".encode(), values
            )
            plans[scan] = "\n".join(line for (line,) in await cursor.fetchall())
    assert "Index Scan using chunks_g1_hnsw" in plans["graph"]
    assert "Index Scan using chunks_g1_waiting" in plans["graph"]
    [asks] = re.findall(r"documents_pkey on documents d \(.*loops=(\d+)", plans["graph"]) or [0]
    assert int(asks) <= len(ids.chunks) // 2
    assert "One-Time Filter: ((InitPlan 1).col1 = 'anna'::text)" in plans["exact"]
    # By either index of the documents, as the statistics of the moment have it.
    assert re.search(r"(Index Cond|Filter): .*tenant = 'anna'::text", plans["exact"].split("InitPlan 1")[-1])


# Upgrading, and going back


async def _count_visible(connection: Connection) -> int:
    cursor = await connection.execute("SELECT count(*) FROM documents")
    [[count]] = await cursor.fetchall()
    await connection.rollback()
    return int(count)


async def _count_all(place: Place) -> int:
    [[count]] = await place.library.execute("SELECT count(*) FROM documents")
    return int(count)


async def test_rows_are_not_divided_while_a_query_service_of_the_previous_version_is_connected(place: Place) -> None:
    admin = place.library.settings.postgres
    await place.library.execute("SELECT undivide_rows()")
    async with await psycopg.AsyncConnection.connect(place.query, application_name="penstock") as older:
        [said] = await divide_rows(admin)
        assert said.startswith("rows are not divided by tenant yet: a query service of the version before is connected")
        run_file(admin.dsn.get_secret_value(), "2-grants.sql")  # nor by this
        assert await _count_visible(older) == await _count_all(place)  # it names no tenant, and goes on as before
    for _ in range(50):  # until the server has seen it go
        if (result := await divide_rows(admin)) and "are divided" in result[-1]:
            break
        await asyncio.sleep(0.1)
    assert await divide_rows(admin) == []
    async with connected(place.query) as connection:
        assert await _count_visible(connection) == 0


async def test_a_program_of_the_previous_version_does_not_start_on_divided_rows(place: Place) -> None:
    known = [migration.name for migration in migrations() if migration.name < "0041"]

    async def applied() -> dict[str, str | None]:
        return dict(await place.library.execute("SELECT name, needs FROM schema_migrations"))

    why = refusal(known, await applied())
    assert why is not None
    assert "0041_tenant_rows" in why
    await place.library.execute("SELECT undivide_rows()")
    try:
        assert refusal(known, await applied()) is None
        async with connected(place.query) as connection:
            assert await _count_visible(connection) == await _count_all(place)
        away: list[str] = []
        await ledger_report(PostgresSettings(dsn=place.query), {}, away)  # type: ignore[arg-type]
        assert NOT_DIVIDED in away
        async with open_pool(PostgresSettings(dsn=place.query), "queries") as pool:  # type: ignore[arg-type]
            with capture_logs() as logged:
                await warn_if_undivided(pool)
        assert [line["event"] for line in logged] == ["rows_undivided"]
        assert refusal([migration.name for migration in migrations()], await applied()) is None
        assert await migrate(place.library.settings.postgres) == []
    finally:
        assert await divide_rows(place.library.settings.postgres)
    async with open_pool(PostgresSettings(dsn=place.query), "queries") as pool:  # type: ignore[arg-type]
        with capture_logs() as logged:
            await warn_if_undivided(pool)
    assert logged == []


# Readers by SQL that are bound to a tenant


async def bound(place: Place, name: str, tenant: str | None) -> str:
    password = uuid4().hex
    await place.library.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
    if tenant is not None:
        await place.library.execute("SELECT bind_reader(%s, %s)", name, tenant)
    dsn = place.library.settings.postgres.dsn.get_secret_value()
    return psycopg.conninfo.make_conninfo(dsn, user=name, password=password)


async def dropped(place: Place, name: str) -> None:
    await place.library.execute("SELECT unbind_reader(%s)", name)
    await place.library.execute(f"DROP ROLE {name}")


async def test_a_reader_bound_to_a_tenant_reads_only_that_tenant_and_cannot_switch(place: Place) -> None:
    name = f"team_{uuid4().hex[:8]}"
    dsn = await bound(place, name, HELD)
    vector = "[" + ",".join(["0.1"] * 64) + "]"
    try:
        async with connected(dsn) as connection:

            async def ask(statement: str, *values: object) -> list[Any]:
                return await (await connection.execute(statement.encode(), values)).fetchall()

            for attempt in (
                "SELECT 1",
                f"SET penstock.tenant = '{OTHER}'",
                f"SELECT set_config('penstock.tenant', '{OTHER}', false)",
                f"SET ROLE {name}",
            ):
                await connection.execute(attempt.encode())
                assert await ask("SELECT DISTINCT tenant FROM tenant_readers.documents") == [(HELD,)]
                assert await ask("SELECT count(*), min(tenant), max(tenant) FROM tenant_readers.chunks") == [
                    (12, HELD, HELD)
                ]
            assert await ask("SELECT count(*) FROM tenant_readers.chunks WHERE tenant = %s", OTHER) == [(0,)]
            rows = await ask("SELECT id FROM tenant_readers.nearest(%s::halfvec, '{wiki/staff}', 50)", vector)
            theirs = {id_ for (id_,) in await ask("SELECT id FROM tenant_readers.chunks")}
            assert {id_ for (id_,) in rows} == theirs
            assert await ask("SELECT tenant_readers.access_of('ann')") == [([f"wiki/of-{HELD}", "wiki/user:ann"],)]
            assert await ask("SELECT name FROM tenant_readers.generation") == [("g1",)]
            for forbidden in (
                "SELECT FROM readers.documents",
                "SELECT FROM readers.chunks",
                "SELECT FROM documents",
                f"SELECT readers.access_of('{OTHER}', 'ann')",
                "SELECT FROM tenant_readers",
                f"UPDATE tenant_readers SET tenant = '{OTHER}'",
                f"SELECT bind_reader('{name}', '{OTHER}')",
                "SET ROLE penstock_reader",
                f"SET SESSION AUTHORIZATION {place.library.pool.name and 'postgres'}",
            ):
                await connection.commit()
                with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidParameterValue)):
                    await connection.execute(forbidden.encode())
                await connection.rollback()
    finally:
        await dropped(place, name)


async def test_a_reader_cannot_take_advisory_locks_or_write(place: Place) -> None:
    """Detect takes the lock of generations for every batch: whoever held it kept all tenants' access as it was."""
    name = f"team_{uuid4().hex[:8]}"
    one_tenants = await bound(place, name, HELD)
    try:
        async with another_team(place.library) as of_all_tenants, connected(one_tenants) as of_one:
            for connection in (of_all_tenants, of_one):
                for forbidden in (
                    f"SELECT pg_advisory_lock({GENERATIONS_LOCK})",
                    f"SELECT pg_try_advisory_xact_lock({GENERATIONS_LOCK})",
                    "SELECT lo_from_bytea(0, 'x')",
                    "SELECT lo_create(0)",
                    "SELECT pg_logical_emit_message(false, 'x', 'x')",
                    "SELECT pg_logical_emit_message(true, 'x', 'x'::bytea)",
                ):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        await connection.execute(forbidden.encode())
                    await connection.rollback()
    finally:
        await dropped(place, name)
    async with connected(place.logins["penstock_worker"]) as worker:
        await worker.execute("SELECT pg_advisory_xact_lock_shared(%s)", [GENERATIONS_LOCK])


async def test_error_messages_quote_no_other_tenants_text_to_a_bound_reader(place: Place) -> None:
    name = f"team_{uuid4().hex[:8]}"
    dsn = await bound(place, name, HELD)
    try:
        async with connected(dsn) as connection:
            nothing = (
                "SELECT count(*) FROM tenant_readers.chunks WHERE text NOT LIKE '%anna%' AND ('x' || text)::int > 0"
            )
            await connection.execute(nothing.encode())
            for leaky in (
                "SELECT count(*) FROM tenant_readers.chunks WHERE ('x' || text)::int > 0",
                "SELECT count(*) FROM tenant_readers.documents WHERE ('x' || title)::int > 0 AND 1 / 1 = 1",
            ):
                with pytest.raises(psycopg.errors.InvalidTextRepresentation, match=HELD) as quoted:
                    await connection.execute(leaky.encode())
                assert OTHER not in str(quoted.value)
                await connection.rollback()
    finally:
        await dropped(place, name)


def estimates(plan: Any) -> list[tuple[str, float]]:
    here = [(str(plan["Node Type"]), float(plan["Plan Rows"]))]
    return here + [row for below in plan.get("Plans", []) for row in estimates(below)]


async def test_estimates_of_a_bound_reader_tell_nothing_about_other_tenants_texts(place: Place) -> None:
    """They had the number of titles between two words, from the statistics of all tenants."""
    await place.library.execute(
        "INSERT INTO documents (id, tenant, source, external_id, seq, version, observed_at, access_id, title)"
        " SELECT gen_random_uuid(), %s, 'hr', 'dismissal ' || n, n, 1, now(), (SELECT min(id) FROM access_sets),"
        " 'dismissal ' || n FROM generate_series(1, 3000) n",
        OTHER,
    )
    name = f"team_{uuid4().hex[:8]}"
    dsn = await bound(place, name, HELD)
    try:
        await place.library.execute("ANALYZE")
        async with connected(dsn) as connection:
            for way in ("indexscan", "indexonlyscan", "bitmapscan", "nestloop", "hashjoin", "mergejoin"):
                await connection.execute(f"SET enable_{way} = off".encode())

            async def seen(view: str, condition: str) -> list[tuple[str, float]]:
                statement = f"EXPLAIN (FORMAT JSON) SELECT FROM tenant_readers.{view} WHERE {condition}"
                [(plan,)] = await (await connection.execute(statement.encode())).fetchall()
                return estimates(plan[0]["Plan"])

            for view, columns in (
                ("documents", "title external_id source source_url author tenant"),
                ("chunks", "text title external_id source source_url tenant"),
            ):
                for column in columns.split():
                    among = await seen(view, f"{column} >= 'dismissal 1' AND {column} < 'dismissal 3'")
                    assert among == await seen(view, f"{column} >= 'xxx' AND {column} < 'xxy'"), (view, column)
                    equal = await seen(view, f"{column} = '{OTHER}'")
                    assert equal == await seen(view, f"{column} = 'xxx'"), (view, column)
    finally:
        await dropped(place, name)
        await place.library.execute("DELETE FROM documents WHERE source = 'hr' AND tenant = %s", OTHER)


async def test_a_bound_reader_cannot_find_out_letter_by_letter_what_other_tenants_documents_hold(place: Place) -> None:
    """A condition was evaluated below the barrier, and EXPLAIN ANALYZE had the number of rows that were left."""
    of_others = [
        document(
            f"dismissal {n}.md",
            f"dismissal {n}",
            tenant=OTHER,
            acl_tags=[f"dismissal-{n}"],
            required_tags=[f"dismissal-{n}"],
            metadata={"dismissal": str(n)},
        )
        for n in range(10)
    ]
    name = f"team_{uuid4().hex[:8]}"
    dsn = await bound(place, name, HELD)
    try:
        await place.library.put(*of_others)
        await place.library.execute("UPDATE documents SET keys = '{dismissal}' WHERE external_id ~ 'dismissal'")
        await place.library.execute("ANALYZE")
        columns = await place.library.execute(
            "SELECT c.relname, a.attname, a.atttypid::regtype::text FROM pg_class c"
            " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 WHERE c.relname <> 'generation'"
            " AND c.relnamespace = 'tenant_readers'::regnamespace"
            " AND a.atttypid::regtype::text IN ('text', 'text[]', 'jsonb')"
        )
        assert {column for _, column, _ in columns} > {"text", "title", "acl_tags", "keys", "metadata", "headings"}
        async with connected(dsn) as connection:
            for view, column, type_ in columns:
                for ways in ("indexscan", "nestloop indexscan", "nestloop mergejoin", "hashjoin mergejoin"):
                    plans = set()
                    for guess in ("wiki/dismissal", "wiki/unrelated", "dismissal", "unrelated"):
                        condition = {
                            "text": f"{column} BETWEEN '{guess}' AND '{guess}~'",
                            "text[]": f"{column}[1] BETWEEN '{guess}' AND '{guess}~'",
                            "jsonb": f"{column} IS NOT NULL AND {column}['{guess}'] IS NOT NULL",
                        }[type_]
                        for way in ways.split():
                            await connection.execute(f"SET LOCAL enable_{way} = off".encode())
                        cursor = await connection.execute(
                            "EXPLAIN (ANALYZE, BUFFERS OFF, TIMING OFF, SUMMARY OFF)"
                            f" SELECT FROM tenant_readers.{view} WHERE {condition}".encode()
                        )
                        lines = [line for (line,) in await cursor.fetchall() if "Memory" not in line]
                        plans.add("\n".join(lines).replace(guess, ""))
                        await connection.rollback()
                    assert len(plans) == 1, (view, column, ways, plans)
    finally:
        await dropped(place, name)
        await place.library.put(*(deletion(other) for other in of_others))
        await empty(place.library, OTHER)
        await fill(place.library, OTHER, made_by(place.library.generation))


async def test_every_text_that_a_bound_reader_sees_is_made_above_the_barrier(place: Place) -> None:
    """A view that is made without divide_view() shows the column itself, and its statistics (ADR 109)."""
    rows = await place.library.execute(
        "SELECT c.relname || '.' || a.attname,"
        " strpos(regexp_replace(pg_get_viewdef(c.oid), '\\s+', ' ', 'g'),"
        "   format('(clock_timestamp() IS NOT NULL) THEN %%1$I ELSE NULL::%%2$s END AS %%1$I', a.attname,"
        "     a.atttypid::regtype)) > 0"
        " FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
        " WHERE c.relnamespace = 'tenant_readers'::regnamespace AND c.relkind = 'v'"
        " AND a.atttypid::regtype::text IN"
        " ('text', 'character varying', 'character', 'name', 'text[]', 'json', 'jsonb')"
        " AND c.relname <> 'generation'"  # has no rows of tenants
    )
    shown = {column for column, is_expression in rows if not is_expression}
    assert {"documents.title", "documents.keys", "chunks.text", "chunks.acl_tags"} <= {column for column, _ in rows}
    assert shown == set()


async def test_bind_reader_requires_a_tenant_and_a_role_that_does_not_see_all_tenants(place: Place) -> None:
    name = f"team_{uuid4().hex[:8]}"
    await bound(place, name, None)
    try:
        for reader, tenant, why in (
            (name, "", "name one"),
            ("nobody_at_all", HELD, "there is no role"),
            ("penstock_reader", HELD, "sees every"),
        ):
            with pytest.raises(psycopg.errors.RaiseException, match=why):
                await place.library.execute("SELECT bind_reader(%s, %s)", reader, tenant)
        # Rights without a tenant, as after its row was deleted by hand: nothing.
        await place.library.execute("SELECT bind_reader(%s, %s)", name, HELD)
        await place.library.execute("DELETE FROM tenant_readers WHERE reader = %s", name)
        dsn = place.library.settings.postgres.dsn.get_secret_value()
        password = uuid4().hex
        await place.library.execute(f"ALTER ROLE {name} PASSWORD '{password}'")
        async with connected(psycopg.conninfo.make_conninfo(dsn, user=name, password=password)) as connection:
            for view in ("documents", "chunks", "generation"):
                cursor = await connection.execute(f"SELECT count(*) FROM tenant_readers.{view}".encode())
                assert (await cursor.fetchall())[0][0] == 0
    finally:
        await dropped(place, name)


async def test_bind_reader_refuses_a_login_that_may_read_more_than_its_tenant(place: Place) -> None:
    """A login in one of these roles was bound, and read every tenant besides."""
    name = f"team_{uuid4().hex[:8]}"
    dsn = await bound(place, name, None)
    try:
        for roles in (
            "penstock_operator penstock_connectors penstock_worker penstock_query",
            "penstock_reader penstock_trail_reader pg_read_all_data pg_monitor",
            "pg_read_server_files pg_execute_server_program",
        ):
            for role in roles.split():
                await place.library.execute(f"GRANT {role} TO {name}")
                with pytest.raises(psycopg.errors.RaiseException, match="sees every tenant"):
                    await place.library.execute("SELECT bind_reader(%s, %s)", name, HELD)
                await place.library.execute(f"REVOKE {role} FROM {name}")
        for attribute in ("BYPASSRLS", "REPLICATION", "CREATEROLE", "SUPERUSER"):
            await place.library.execute(f"ALTER ROLE {name} {attribute}")
            with pytest.raises(psycopg.errors.RaiseException, match="sees every tenant"):
                await place.library.execute("SELECT bind_reader(%s, %s)", name, HELD)
            await place.library.execute(f"ALTER ROLE {name} NO{attribute}")
        await place.library.execute(f"GRANT SELECT (title) ON documents TO {name}")
        with pytest.raises(psycopg.errors.RaiseException, match="of every tenant"):
            await place.library.execute("SELECT bind_reader(%s, %s)", name, HELD)
        await place.library.execute(f"REVOKE SELECT (title) ON documents FROM {name}")
        assert await place.library.execute("SELECT count(*) FROM tenant_readers WHERE reader = %s", name) == [(0,)]
        for _ in range(2):  # again, to name another tenant
            await place.library.execute("SELECT bind_reader(%s, %s)", name, HELD)
        async with connected(dsn) as connection:
            cursor = await connection.execute("SELECT DISTINCT tenant FROM tenant_readers.documents")
            assert await cursor.fetchall() == [(HELD,)]
    finally:
        await dropped(place, name)


async def test_a_reader_of_all_tenants_reads_the_undivided_views(place: Place) -> None:
    async with another_team(place.library) as connection:
        cursor = await connection.execute("SELECT array_agg(DISTINCT tenant ORDER BY tenant) FROM readers.documents")
        assert (await cursor.fetchall())[0][0] == [HELD, OTHER]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await connection.execute("SELECT FROM tenant_readers.documents")
