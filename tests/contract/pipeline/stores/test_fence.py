"""The fence on a real Postgres: what is refused, what goes on, and that it heals without a restart."""

from __future__ import annotations

import asyncio

import pytest

from connectors.runner.state import lease
from pipeline.core.errors import Fenced
from pipeline.core.fence import Use
from pipeline.generations.building import connect
from pipeline.stores import fence
from pipeline.stores import postgres as stores
from pipeline.stores.postgres import Pool, open_pool, unlimited
from tests.support.query.http_kit import World, as_, problem
from tests.support.query.library import Library, document
from tests.support.space import Space

ELSEWHERE = "UPDATE fence SET timeline = timeline + 1"
BACK = "UPDATE fence SET timeline = timeline - 1"


@pytest.fixture
async def fenced(space: Space) -> Space:
    """Its ledger was accepted on a timeline that is not the server's."""
    await space.execute(ELSEWHERE)
    return space


async def one(pool: Pool) -> int:
    async with pool.connection() as connection:
        row = await (await connection.execute("SELECT 1")).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("use", ["queries", "intake", "stores"])
async def test_the_pool_refuses_connections_until_the_ledgers_identity_is_accepted(fenced: Space, use: Use) -> None:
    messages: list[bool] = []
    async with (
        open_pool(fenced.settings.postgres, use, on_fence=messages.append) as pool,
        open_pool(fenced.settings.postgres, "any") as recovering,
    ):
        for _ in range(30):  # more often than the pool has places: each is given back
            with pytest.raises(Fenced, match="`penstock recover --failover`"):
                await one(pool)
        async with recovering.connection() as connection:
            with pytest.raises(Fenced):  # on yet another server than the one that was rewound for
                await fence.accept(connection, "open")
        async with recovering.connection() as connection:
            await fence.accept(connection, "rewinding")
            await fence.accept(connection, "open")
        assert await one(pool) == 1
    assert messages == [True] * 30 + [False]


async def test_a_recovery_admits_the_stores_first_then_intake_then_queries(space: Space) -> None:
    async def admitted() -> set[Use]:
        results: set[Use] = set()
        uses: tuple[Use, ...] = ("queries", "intake", "stores")
        for use in uses:
            async with open_pool(space.settings.postgres, use) as pool:
                try:
                    await one(pool)
                    results.add(use)
                except Fenced:
                    continue
        return results

    seen = []
    for state in ("rewinding", "replaying", "open"):
        await space.execute("UPDATE fence SET state = %s", state)
        seen.append(await admitted())
    assert seen == [{"stores"}, {"stores", "intake"}, {"stores", "intake", "queries"}]


async def test_connections_outside_the_pool_are_fenced_too(fenced: Space) -> None:
    with pytest.raises(Fenced):
        async with unlimited(fenced.settings.postgres, "graph"):
            pass
    with pytest.raises(Fenced):
        async with connect(fenced.settings.postgres):
            pass
    with pytest.raises(Fenced):
        async with lease(fenced.settings.postgres, "acme", "wiki", "folder"):
            pass
    assert await fenced.query("SELECT count(*) FROM connectors") == [(0,)]


async def test_a_pooled_connection_is_checked_against_the_fence_again_after_an_interval(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "FENCE_SECONDS", 0.2)
    async with open_pool(space.settings.postgres) as pool:
        assert await one(pool) == 1
        await space.execute(ELSEWHERE)
        await asyncio.sleep(0.3)
        with pytest.raises(Fenced):
            await one(pool)


async def test_the_fence_check_leaves_no_transaction_open(space: Space) -> None:
    async with open_pool(space.settings.postgres) as pool:
        connection = await pool.getconn()
        try:
            assert connection.info.transaction_status.name == "IDLE"
            assert not connection.autocommit
        finally:
            await pool.putconn(connection)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_fenced_query_service_answers_503_and_recovers_without_a_restart(world: World, tenant: str) -> None:
    await world.library.put(document("a.md", "The harbour.", tenant=tenant, acl_tags=["user:ann"]))

    async def search() -> tuple[int, str]:
        answer = await world.client.post("/v1/search", json={"query": "harbour"}, headers=as_("ann", tenant))
        return (200, "") if answer.status_code == 200 else problem(answer)

    async def until(expected: tuple[int, str]) -> None:
        async with asyncio.timeout(60):
            while await search() != expected:
                await asyncio.sleep(0.1)

    assert await search() == (200, "")
    await _execute_without_fence(world.library, ELSEWHERE)
    try:
        await until((503, "ledger-fenced"))
        for path in ("/v1/documents", "/v1/facets"):
            response = await world.client.get(path, headers=as_("ann", tenant))
            assert response.status_code in {404, 405, 503}
            assert "harbour" not in response.text
    finally:
        await _execute_without_fence(world.library, BACK)
    await until((200, ""))


async def _execute_without_fence(library: Library, statement: str) -> None:
    async with open_pool(library.settings.postgres, "any") as pool, pool.connection() as connection:
        await connection.execute(statement.encode())


async def test_a_connection_for_queries_keeps_its_prepared_statements_for_a_while(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepared(pool: Pool) -> bool:
        for _ in range(8):  # psycopg prepares a statement that is executed often
            await one(pool)
        async with pool.connection() as connection:
            cursor = await connection.execute("SELECT FROM pg_prepared_statements WHERE statement = 'SELECT 1'")
            return bool(await cursor.fetchall())

    monkeypatch.setattr(stores, "FENCE_SECONDS", -1.0)  # checked whenever it is handed out
    async with open_pool(space.settings.postgres, "queries") as pool:
        assert await prepared(pool)
        monkeypatch.setattr(stores, "PREPARED_SECONDS", 0.0)
        assert not await prepared(pool)
