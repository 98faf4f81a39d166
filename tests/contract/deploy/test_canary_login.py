"""The canary's login on the real Postgres: it finds canaries as the worker does, and reads nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import uuid4

import psycopg
import pytest
import pytest_asyncio

from canary.question import WORDS, Reference
from canary.telemetry import CanaryMetrics
from canary.watch import STORES, Watch
from canary.worker import SCHEMA, Canaries
from deploy.local.stack import Stack
from pipeline.core.canary import PRINCIPAL, Canary
from pipeline.ledger import generations
from pipeline.ledger.generation_tables import drop_table
from pipeline.runtime.settings import CanarySettings, PostgresSettings
from pipeline.stores.leader import leading
from pipeline.stores.postgres import CANARY_LOCK, EVAL_LOCK, create_chunk_table, divide_rows, open_pool
from query.retrieval.search import Search
from query.settings import RetrievalSettings
from tests.contract.deploy.test_roles import Place
from tests.support.deploy.roles_kit import define_roles, logins
from tests.support.pipeline.tenant_rows_kit import connected
from tests.support.query.library import Library, WordEmbedder, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

CANARIES = [Canary("anna", "wiki"), Canary("berta", "mail")]
ROWS = {
    "documents": 2,
    "overview_canaries": 2,
    "access_sets": 2,
    "manifests": 2,
    "chunks_g1": 2,
    "connector_freshness": 1,
}
"""The rows that each view of ``canaries`` shows it."""
VIEWS = {f"canaries.{name}" for name in ROWS}
OF_NOBODY = {"schema_migrations", "fence", "generations", "keyword_indexes"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def place(stack: Stack) -> AsyncIterator[Place]:
    async with Library.create(stack, WordEmbedder()) as library:
        admin = library.settings.postgres.dsn.get_secret_value()
        define_roles(admin)
        for tenant, source in (("anna", "wiki"), ("berta", "mail")):
            await library.put(
                *(
                    document(f"{n}.md", f"What only {tenant} may read in note {n}.", tenant=tenant, source=source)
                    for n in range(3)
                ),
                document(
                    "canary",
                    f"{WORDS} Canary of{tenant}.",
                    tenant=tenant,
                    source=f"canary.{source}",
                    acl_tags=[f"user:{PRINCIPAL}"],
                ),
            )
            await library.execute(
                "INSERT INTO connectors (tenant, source, kind) VALUES (%s, %s, 'notes')", tenant, source
            )
        for source in ("wiki", "canary.wiki"):
            await library.execute(
                "INSERT INTO connector_freshness (tenant, source, epoch, tracked_since, every_seconds)"
                " VALUES ('anna', %s, 1, now(), 60)",
                source,
            )
        async with library.pool.connection() as connection:
            await generations.check_model(connection, library.generation, library.embedder)
        with logins(admin) as dsns:
            yield Place(library, dsns)


@asynccontextmanager
async def canarys(place: Place) -> AsyncIterator[psycopg.AsyncConnection]:
    async with connected(place.logins["penstock_canaries"]) as connection:
        await connection.execute(f"SET search_path = {SCHEMA}, public".encode())
        yield connection


def settings_of(place: Place) -> PostgresSettings:
    return PostgresSettings(dsn=place.logins["penstock_canaries"])  # type: ignore[arg-type]  # pydantic makes it a secret


async def readable_tables(place: Place) -> set[str]:
    rows = await place.library.execute(
        "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace IN (SELECT oid FROM pg_namespace"
        " WHERE nspname IN ('public', 'canaries', 'readers', 'tenant_readers', 'trail'))"
        " AND c.relkind IN ('r', 'p', 'v', 'm')"
        " AND has_any_column_privilege('penstock_canaries', c.oid, 'SELECT, INSERT, UPDATE')"
        " AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'e')"
    )
    return {name for (name,) in rows}


async def test_the_canary_finds_its_documents_in_both_stores_with_a_login_of_its_own(place: Place) -> None:
    async with open_pool(settings_of(place), schema=SCHEMA) as pool:
        settings = RetrievalSettings(cached_queries=0, feedback=False, cosine_floor=-1)
        search = Search(pool, place.library.es, Reference(pool), settings=settings)
        watch = Watch(search, None, CanaryMetrics(), CanarySettings())  # type: ignore[arg-type]
        for canary in CANARIES:
            for store in STORES:
                assert await watch._returns(canary, store, f"of{canary.tenant}"), (canary, store)
                assert not await watch._returns(Canary("anna", "nothing"), store, "ofanna")
        canaries = Canaries(pool, watch, CanaryMetrics(), CanarySettings(every_seconds=1))
        async with pool.connection() as connection:
            assert sorted(await canaries._left(connection), key=lambda one: one.tenant) == CANARIES
            assert await canaries._desired(connection) == CANARIES
        await search.aclose()


async def test_the_canarys_login_reads_no_document_text_or_vector_of_another_source(place: Place) -> None:
    """It had the login of the query service, with which it read every tenant."""
    assert await readable_tables(place) == {*VIEWS, *OF_NOBODY, "connectors"}
    mine = [id_ for (id_,) in await place.library.execute("SELECT id FROM documents WHERE source LIKE 'canary.%%'")]
    [(every,)] = await place.library.execute("SELECT count(*) FROM documents")
    assert (len(mine), every) == (2, 8)
    async with canarys(place) as connection:
        for tenant in (None, "", "anna", "berta"):
            if tenant is not None:
                await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [tenant])
            for table, shown in ROWS.items():
                cursor = await connection.execute(f"SELECT count(*) FROM {table}".encode())
                assert await cursor.fetchall() == [(shown,)], (table, tenant)
            cursor = await connection.execute("SELECT DISTINCT document_id FROM chunks_g1 WHERE embedding IS NOT NULL")
            assert {id_ for (id_,) in await cursor.fetchall()} == set(mine)
            cursor = await connection.execute(
                "SELECT tag FROM readable_sets('anna', ARRAY['wiki/staff', %s])", [f"canary.wiki/user:{PRINCIPAL}"]
            )
            assert await cursor.fetchall() == [(f"canary.wiki/user:{PRINCIPAL}",)]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT text FROM document_bodies",
        "SELECT groups FROM memberships",
        "SELECT changes_cursor FROM connectors",
        "SELECT FROM document_events",
        "SELECT FROM index_state",
        "SELECT FROM conversation_pairs",
        "SELECT FROM answer_reviews",
        "SELECT FROM standing_questions",
        "SELECT FROM eval_queries",
        "SELECT FROM uploads",
        "SELECT title FROM public.documents",
        "SELECT text FROM public.chunks_g1",
        "SELECT acl_tags FROM public.access_sets",
        "SELECT FROM public.overview_canaries",
        "SELECT FROM overview_documents",
        "SELECT FROM readers.documents",
        "SELECT FROM ledger_documents('anna', 'wiki', '00000000-0000-0000-0000-000000000000', 10)",
        "SELECT FROM trail.records",
        "INSERT INTO trail.heads DEFAULT VALUES",
        "UPDATE documents SET title = 'mine'",
        "DELETE FROM chunks_g1",
        "SELECT pg_advisory_lock(7300002)",
        f"SELECT lead_query_service({EVAL_LOCK})",
        "SELECT bind_canaries()",
        "SELECT show_canaries_of('chunks_g1')",
        "SELECT undivide_rows()",
    ],
)
async def test_the_canarys_login_is_refused_what_a_canary_does_not_need(place: Place, statement: str) -> None:
    async with connected(place.logins["penstock_canaries"]) as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await connection.execute(statement.encode())


async def test_one_canary_process_leads_until_it_resigns_with_its_own_login(place: Place) -> None:
    async with connected(place.logins["penstock_canaries"]) as first, connected(place.logins["penstock_query"]) as old:
        async with leading(first, CANARY_LOCK) as leads:
            assert leads
            async with leading(old, CANARY_LOCK) as leads_too:
                assert not leads_too
        async with leading(old, CANARY_LOCK) as leads_then:
            assert leads_then


async def test_the_canary_sees_its_own_rows_of_a_new_generations_chunk_table_from_the_first_one(place: Place) -> None:
    later = replace(place.library.generation, name="g2", state="building", chunk_table="chunks_g2")
    async with place.library.pool.connection() as connection:
        await create_chunk_table(connection, later)
        await create_chunk_table(connection, later)  # as a build that is taken up again
        await connection.execute("INSERT INTO chunks_g2 SELECT * FROM chunks_g1")
    async with canarys(place) as connection:
        with pytest.raises(psycopg.errors.RaiseException, match="no generation"):
            await connection.execute("SELECT FROM chunks_g2")
    await place.library.execute(
        "INSERT INTO generations SELECT (jsonb_populate_record(g, jsonb_build_object('name', 'g2', 'state', 'building',"
        " 'chunk_table', 'chunks_g2'))).* FROM generations g WHERE name = 'g1'"
    )
    async with canarys(place) as connection:
        cursor = await connection.execute("SELECT count(*), count(DISTINCT ctid) FROM chunks_g2")
        assert await cursor.fetchall() == [(2, 2)]
    async with place.library.pool.connection() as connection:
        await drop_table(connection, "chunks_g2")
        await connection.execute("DELETE FROM generations WHERE name = 'g2'")
    assert await readable_tables(place) == {*VIEWS, *OF_NOBODY, "connectors"}


async def test_a_version_before_these_views_can_drop_a_chunk_table(place: Place) -> None:
    later = replace(place.library.generation, name="g3", state="building", chunk_table="chunks_g3")
    async with place.library.pool.connection() as connection:
        await create_chunk_table(connection, later)
        await connection.execute("DROP TABLE chunks_g3")
        await drop_table(connection, "chunks_g3")


async def test_the_canarys_login_sees_canaries_alone_while_rows_are_not_divided(place: Place) -> None:
    settings = place.library.settings.postgres
    await place.library.execute("SELECT undivide_rows()")
    try:
        assert await readable_tables(place) == {*VIEWS, *OF_NOBODY, "connectors"}
        async with canarys(place) as connection:
            for table, shown in ROWS.items():
                cursor = await connection.execute(f"SELECT count(*) FROM {table}".encode())
                assert await cursor.fetchall() == [(shown,)], table
        assert "are divided" in (await divide_rows(settings))[-1]
        assert await divide_rows(settings) == []
        assert await readable_tables(place) == {*VIEWS, *OF_NOBODY, "connectors"}
    finally:
        define_roles(settings.dsn.get_secret_value())


async def test_the_canarys_login_cannot_find_out_letter_by_letter_what_other_sources_hold(place: Place) -> None:
    """Postgres compared texts before it looked at the policy, and EXPLAIN ANALYZE said how many rows were left."""
    await place.library.execute(
        "INSERT INTO documents (id, tenant, source, external_id, seq, version, observed_at, access_id, title)"
        " SELECT gen_random_uuid(), 'anna', 'hr', 'dismissal ' || n, 1000000 + n, 1000000 + n, now(),"
        " (SELECT min(id) FROM access_sets), 'dismissal ' || n FROM generate_series(1, 3000) n"
    )
    try:
        await place.library.execute("ANALYZE")
        relations = [name for name in await readable_tables(place) if name not in OF_NOBODY]
        columns = await place.library.execute(
            "SELECT a.attrelid::regclass::text, quote_ident(a.attname), a.atttypid::regtype::text FROM pg_attribute a"
            " WHERE a.attrelid::regclass::text = ANY (%s) AND a.attnum > 0 AND has_column_privilege("
            " 'penstock_canaries', a.attrelid, a.attnum, 'SELECT')",
            relations,
        )
        assert {type_ for _, _, type_ in columns} > {"text", "uuid", "bigint", "text[]", "timestamp with time zone"}
        [(theirs,)] = await place.library.execute("SELECT id FROM documents WHERE source = 'hr' LIMIT 1")
        guesses = {
            "text": [("'dismissal 1'", "'dismissal 3'"), ("'xxx'", "'xxy'"), ("'What'", "'Whau'"), ("'hr'", "'hr'")],
            "uuid": [(f"'{id_}'", f"'{id_}'") for id_ in (theirs, uuid4())],
            "bigint": [("1000001", "1003000"), ("9000000", "9000001")],
            "text[]": [("'{wiki}'", "'{wiki/z}'"), ("'{x}'", "'{y}'")],
        }
        async with canarys(place) as connection:
            for name, column, type_ in columns:
                if name == "connectors":  # all of its rows are shown
                    continue
                for way in ("enable_material", "enable_seqscan", "enable_indexscan"):
                    seen = set()
                    for low, high in guesses.get(type_, []):
                        await connection.execute(f"SET LOCAL {way} = off".encode())
                        cursor = await connection.execute(
                            f"EXPLAIN (ANALYZE, BUFFERS OFF, TIMING OFF, SUMMARY OFF) SELECT FROM {name}"
                            f" WHERE {column} BETWEEN {low}::{type_} AND {high}::{type_}".encode()
                        )
                        plan = [line for (line,) in await cursor.fetchall() if low not in line and "Memory" not in line]
                        seen.add("\n".join(plan))
                        await connection.rollback()
                    assert len(seen) < 2, (name, column, way, seen)
    finally:
        await place.library.execute("DELETE FROM documents WHERE source = 'hr'")
