"""The interface for other teams' query services in Postgres: the views, the two functions, and a role with no further
rights."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psycopg
import pytest
import pytest_asyncio
from pgvector import HalfVector
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from deploy.local.stack import Stack
from pipeline.core.canary import PRINCIPAL, Canary
from pipeline.core.errors import Misconfigured
from pipeline.ledger import generations
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores import postgres
from pipeline.stores.postgres import create_chunk_table, migration, point_readers_at
from query.access.callers import identify
from tests.support.query.leak_paths import Paths
from tests.support.query.leaks import Model, World
from tests.support.query.library import Library, WordEmbedder, access, deletion, document
from tests.support.query.readers_kit import another_team

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "readers" / "postgres.v1.json").read_text())
VIEWS = [name for name, columns in GOLDEN.items() if isinstance(columns, dict)]
REFUSED = psycopg.errors.InsufficientPrivilege


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def paths(stack: Stack) -> AsyncIterator[Paths]:
    async with Paths.open(stack) as paths:
        yield paths


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def library(paths: Paths) -> Library:
    return paths.library


async def shown(library: Library, view: str = "documents", column: str = "external_id") -> set[object]:
    return {value for (value,) in await library.execute(f"SELECT {column} FROM readers.{view} WHERE tenant = 'acme'")}


# The role


async def test_the_reader_role_reads_the_published_views_and_nothing_else(library: Library) -> None:
    await library.put(document("role.md", "Text of the harbour."))
    rows = await library.execute(
        "SELECT c.oid::regclass::text, c.relkind::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname IN ('public', 'readers') AND c.relkind IN ('r', 'v', 'm', 'S')"
    )
    others = {name for name, _ in rows} - {f"readers.{view}" for view in VIEWS}
    assert {"document_bodies", "memberships", "dead_letters", "chunks_g1", "ledger_seq", "uploads"} <= others
    async with another_team(library) as team:
        for view in VIEWS:
            assert await (await team.execute(f"SELECT * FROM readers.{view} LIMIT 1".encode())).fetchall()
        for name in others:
            with pytest.raises(REFUSED):
                await team.execute(f"SELECT * FROM {name}".encode())
        for statement in (
            "UPDATE readers.documents SET title = ''",
            "DELETE FROM readers.chunks",
            "INSERT INTO readers.generation (name) VALUES ('g9')",
            "CREATE TABLE public.mine ()",
            "CREATE TABLE readers.mine ()",
            "SELECT point_readers_at('document_bodies', 'g1')",
            "DROP VIEW readers.chunks",
            "CREATE OR REPLACE VIEW readers.generation AS SELECT 1",
        ):
            with pytest.raises((REFUSED, psycopg.errors.ObjectNotInPrerequisiteState)):
                await team.execute(statement.encode())


async def test_only_the_reader_role_may_call_the_functions(library: Library) -> None:
    name = f"passer_{secrets.token_hex(4)}"
    await library.execute(f"CREATE ROLE {name}")
    try:
        for function in (
            "readers.access_of(text,text)",
            "readers.nearest(halfvec,text,text[],int)",
            "point_readers_at(text,text)",
        ):
            [(may,)] = await library.execute("SELECT has_function_privilege(%s, %s, 'EXECUTE')", name, function)
            assert not may, function
    finally:
        await library.execute(f"DROP ROLE {name}")


async def test_migrating_without_the_right_to_create_roles_says_what_to_run(library: Library) -> None:
    """The role is all databases' of a server, so another one of its kind is looked for."""
    role, owner = f"reader_{secrets.token_hex(4)}", f"owner_{secrets.token_hex(4)}"
    database = f"o{secrets.token_hex(5)}"
    admin = conninfo_to_dict(library.settings.postgres.dsn.get_secret_value())
    async with await psycopg.AsyncConnection.connect(make_conninfo(**admin), autocommit=True) as connection:
        await connection.execute(f"CREATE ROLE {owner} LOGIN PASSWORD 'owner' NOSUPERUSER NOCREATEROLE".encode())
        await connection.execute(f"CREATE DATABASE {database} OWNER {owner} TEMPLATE template0".encode())
        inside = make_conninfo(**{**admin, "dbname": database})
        async with await psycopg.AsyncConnection.connect(inside, autocommit=True) as inner:
            await inner.execute("CREATE EXTENSION vector")
    settings = PostgresSettings(dsn=make_conninfo(inside, user=owner, password="owner"))  # type: ignore[arg-type]
    migrations = [migration(m.name, m.statements.replace("penstock_reader", role)) for m in postgres.migrations()]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(postgres, "migrations", lambda: migrations)
            with pytest.raises(Misconfigured, match=f"`CREATE ROLE {role} NOLOGIN`"):
                await postgres.migrate(settings)
            await library.execute(f"CREATE ROLE {role} NOLOGIN")
            assert await postgres.migrate(settings) == [m.name for m in migrations]
    finally:
        async with await psycopg.AsyncConnection.connect(make_conninfo(**admin), autocommit=True) as connection:
            for statement in (
                f"DROP DATABASE {database} WITH (FORCE)",
                f"DROP ROLE {owner}",
                f"DROP ROLE IF EXISTS {role}",
            ):
                await connection.execute(statement.encode())


# The views


async def test_the_views_and_functions_match_the_golden_file(library: Library) -> None:
    """Columns may be added at the end; those of the golden file stay as they are, in this order."""
    for view in VIEWS:
        rows = await library.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            f" WHERE attrelid = 'readers.{view}'::regclass AND attnum > 0 ORDER BY attnum"
        )
        promised = list(GOLDEN[view].items())
        assert [tuple(row) for row in rows][: len(promised)] == promised
    for function in ("access_of", "nearest"):
        [(records,)] = await library.execute(
            "SELECT format('(%%s) → %%s', pg_get_function_arguments(oid), pg_get_function_result(oid)) FROM pg_proc"
            " WHERE pronamespace = 'readers'::regnamespace AND proname = %s",
            function,
        )
        assert records == GOLDEN[function]


async def test_the_views_hide_deleted_unindexed_and_unreadable_documents(library: Library) -> None:
    kept, gone, closed = (document(f"shown {n}.md", f"Anchor and buoy {n}.") for n in range(3))
    await library.put(kept, gone, closed)
    await library.accept(document("shown new.md", "Not in the stores yet."))
    assert {"shown 0.md", "shown 1.md", "shown 2.md"} <= await shown(library)
    assert "shown new.md" not in await shown(library) | await shown(library, "chunks")
    for messages in (deletion(gone), access(closed, [])):
        await library.accept(messages)  # the stores have not followed
    for view in ("documents", "chunks"):
        names = await shown(library, view)
        assert "shown 0.md" in names
        assert not {"shown 1.md", "shown 2.md"} & names


async def test_a_pending_document_is_shown_as_pending_with_its_current_access(library: Library) -> None:
    before = document("way.md", "The crane lifts.", metadata={"team": "docks"})
    [id_] = await library.accept(before)
    await library.converge(id_)
    row = (
        "SELECT pending, partial, chunks, acl_tags, metadata, indexed_at IS NOT NULL FROM readers.documents"
        " WHERE id = %s"
    )
    assert await library.execute(row, id_) == [(False, False, 1, ["wiki/staff"], {"team": "docks"}, True)]
    await library.accept(access(before, ["board"]))
    assert await library.execute(row, id_) == [(True, False, 1, ["wiki/board"], {"team": "docks"}, True)]
    assert await library.execute("SELECT acl_tags FROM readers.chunks WHERE doc_id = %s", id_) == [(["wiki/board"],)]


async def test_the_chunks_view_has_all_chunks_in_reading_order(library: Library) -> None:
    text = "".join(f"# Part {n}\n\n{f'dock {n} ' * 80}.\n\n" for n in range(5))
    [id_] = await library.accept(document("long.md", text))
    await library.converge(id_)
    rows = await library.execute(
        "SELECT c.chunk_index, c.text, c.token_count, c.headings, c.source || c.external_id, c.title = d.title,"
        " d.chunks FROM readers.chunks c JOIN readers.documents d ON d.id = c.doc_id"
        " WHERE doc_id = %s ORDER BY chunk_index",
        id_,
    )
    assert [row[0] for row in rows] == list(range(rows[0][6]))
    assert len(rows) > 2
    assert {row[3][0] for row in rows} == {f"Part {n}" for n in range(5)}
    assert all(tokens > 0 and place == "wikilong.md" and same for _, _, tokens, _, place, same, _ in rows)


async def test_a_cut_over_switches_the_views_atomically_including_views_built_on_them(library: Library) -> None:
    """To a model of another dimension; the old table may go as soon as it is done."""
    await library.put(document("cut.md", "The gull."))
    await library.execute("CREATE VIEW theirs AS SELECT id, text, embedding FROM readers.chunks")
    dimensions = "SELECT DISTINCT vector_dims(embedding) FROM theirs"
    old, new = (
        library.generation,
        replace(
            library.generation,
            name="g2",
            state="building",
            dimensions=3,
            chunk_table="chunks_g2",
            model="other",
        ),
    )
    async with library.pool.connection() as connection:
        await generations.add(connection, new)
        await create_chunk_table(connection, new)
        await connection.execute(
            "INSERT INTO chunks_g2"
            " SELECT id, document_id, access_id, created_at, text, '[1,2,3]'::halfvec FROM chunks_g1"
        )
        await connection.execute(
            "INSERT INTO manifests SELECT document_id, 'g2', content_hash, chunk_ids, token_counts, spans, headings"
            " FROM manifests WHERE generation = 'g1'"
        )
        await connection.commit()
        for states, generation in (
            (((old, "retired"), (new, "active")), new),
            (((new, "retired"), (old, "active")), old),
        ):
            before = await library.execute(dimensions)
            for item, state in states:
                await connection.execute("UPDATE generations SET state = %s WHERE name = %s", [state, item.name])
            await point_readers_at(connection, generation)
            assert (await library.execute("SELECT model FROM readers.generation")) != [(generation.model,)]
            await connection.commit()
            assert await library.execute(dimensions) == [(generation.dimensions,)] != before
            assert await library.execute("SELECT model FROM readers.generation") == [(generation.model,)]
    await library.execute("DROP VIEW theirs")
    await library.execute("DELETE FROM manifests WHERE generation = 'g2'")
    await library.execute("DELETE FROM generations WHERE name = 'g2'")
    await library.execute("DROP TABLE chunks_g2")


async def test_canaries_are_hidden_from_other_teams(library: Library) -> None:
    """Found in review: each stood in other teams' views, and every user carried a tag more for it."""
    canary, beside = Canary("cn", "wiki"), document("beside.md", "Anchor and buoy.", tenant="cn")
    await library.put(canary.published("Anchor and buoy.", "4f2a", beside.observed_at, 1), beside)
    for view in ("documents", "chunks"):
        assert await library.execute(f"SELECT source FROM readers.{view} WHERE tenant = 'cn'") == [("wiki",)]
    assert await library.execute("SELECT readers.access_of('cn', 'ann')") == [(["wiki/user:ann"],)]
    assert (await library.caller("cn", "crew", principals=["ann"])).tags == {"wiki/user:ann", "wiki/crew"}
    reader = await library.caller("cn", principals=[PRINCIPAL])
    response = await library.search.search("anchor", reader, mode="keyword")
    assert [result.passage.source for result in response.results] == [canary.source]


# The functions, against the rule written down in plain Python


async def test_a_query_by_sql_finds_exactly_the_documents_a_principal_may_read(paths: Paths) -> None:
    worlds, request_count, count = [World(900 + n, f"sql{n}") for n in range(4)], 0, 0
    models = {id(world): Model() for world in worlds}
    question = HalfVector(WordEmbedder()._vector("harbour ledger"))
    async with another_team(paths.library) as team:
        for part in ("first", "then"):
            for world in worlds:
                models[id(world)].learn(*getattr(world, part))
            await paths.library.converge(*await paths.learn(e for world in worlds for e in getattr(world, part)))
            for world in worlds:
                for asker in world.askers:
                    for principal in (*asker.principals, "nobody in particular"):
                        alone = replace(asker, principals=(principal,), tags=())
                        cursor = await team.execute("SELECT readers.access_of(%s, %s)", [asker.tenant, principal])
                        [(tags,)] = await cursor.fetchall()
                        async with paths.library.pool.connection() as connection:
                            caller = await identify(connection, asker.tenant, principals=[principal])
                        assert set(tags) == caller.tags, (world, alone)
                        cursor = await team.execute(
                            "SELECT c.tenant, c.source, c.external_id FROM readers.nearest(%s, %s, %s, 200) n"
                            " JOIN readers.chunks c USING (id)",
                            [question, asker.tenant, tags],
                        )
                        keys = {tuple(row) for row in await cursor.fetchall()}
                        assert keys == set(models[id(world)].readable(alone)), (world, alone)
                        request_count, count = request_count + 1, count + len(keys)
    assert request_count > 80
    assert count > 80, "worlds in which nobody reads anything prove nothing"


async def test_nearest_returns_the_nearest_chunks_and_applies_a_revocation_at_once(library: Library) -> None:
    one, two = document("near 1.md", "keel keel mast", tenant="nt"), document("near 2.md", "oar net pier", tenant="nt")
    await library.put(one, two)
    statement = (
        "SELECT d.external_id, n.distance FROM readers.nearest(%s, 'nt', %s) n"
        " JOIN readers.documents d ON d.id = n.doc_id ORDER BY n.distance"
    )
    query = HalfVector(WordEmbedder()._vector("keel"))
    rows = await library.execute(statement, query, ["wiki/staff"])
    assert [name for name, _ in rows] == ["near 1.md", "near 2.md"]
    text = (await library.execute("SELECT embedding FROM readers.chunks WHERE external_id = 'near 1.md'"))[0][0]
    cosine = float(np.dot(text.to_numpy(), query.to_numpy()))
    assert rows[0][1] == pytest.approx(1 - cosine, abs=0.01)
    await library.accept(access(one, ["board"]))
    assert [name for name, _ in await library.execute(statement, query, ["wiki/staff"])] == ["near 2.md"]
    assert await library.execute(statement, query, []) == []
