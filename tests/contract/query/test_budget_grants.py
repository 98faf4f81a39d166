"""With the query service's login, a process can return its own unused grant once, and nothing else (migration 0049)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores.postgres import open_pool
from query.auth.identity import Identity
from query.limits.budgets import NO_AMOUNTS, Amounts, Meter, PostgresLedger, Subject
from query.limits.quotas import Quotas
from query.problems import Problem
from query.settings import QuerySettings, ServeSettings
from query.telemetry import QueryMetrics
from tests.support.deploy.roles_kit import define_roles, logins
from tests.support.query.library import Library, WordEmbedder
from tests.support.query.metered_chat import metered_chat

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

NONE = (0, 0, 0)
LIMITS = (1_000, 1_000_000, 100)
Three = Sequence[float | None]


def floats(amounts: Three) -> list[float | None]:
    return [None if amount is None else float(amount) for amount in amounts]


@dataclass
class Login:
    """The query service's own, on the real Postgres."""

    dsn: str
    owner: Library

    async def settle(
        self,
        tenant: str,
        secret: UUID | None,
        *,
        spent: Three = NONE,
        holding: Three = NONE,
        desired: Three = NONE,
        most: Three = LIMITS,
        since: datetime | None = None,
        span: str = "day",
    ) -> list[float]:
        """Return the amounts that were granted."""
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            cursor = await connection.execute(
                "SELECT given FROM settle_budget("
                "%s, '', %s, %s, %s, %s::float8[], %s::float8[], %s::float8[], %s::float8[])",
                [tenant, span, secret, since, *map(floats, (spent, holding, desired, most))],
            )
            [[given]] = await cursor.fetchall()
        return list(given)

    async def use_as_before(self, tenant: str, *, spent: Three = NONE, desired: Three = NONE) -> list[float]:
        """By the function that the version before calls."""
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            cursor = await connection.execute(
                "SELECT given FROM use_budget(%s, '', 'day', NULL, %s::float8[], %s::float8[], %s::float8[])",
                [tenant, *map(floats, (spent, desired, LIMITS))],
            )
            [[given]] = await cursor.fetchall()
        return list(given)

    async def used(self, tenant: str) -> tuple[float, float, float]:
        [row] = await self.owner.execute(
            "SELECT requests, tokens, money FROM query_use WHERE tenant = %s AND span = 'day'", tenant
        )
        return row

    async def holders(self, tenant: str) -> int:
        [(count,)] = await self.owner.execute(
            "SELECT cardinality(holders) FROM query_use WHERE tenant = %s AND span = 'day'", tenant
        )
        return count


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def login(stack: Stack) -> AsyncIterator[Login]:
    async with Library.create(stack, WordEmbedder()) as library:
        admin = library.settings.postgres.dsn.get_secret_value()
        define_roles(admin)
        with logins(admin) as dsns:
            yield Login(dsns["penstock_query"], library)


# What a process that was taken over tries


async def test_a_grant_is_returned_only_once(login: Login, tenant: str) -> None:
    other, mine = uuid4(), uuid4()
    await login.settle(tenant, other, desired=(500, 5_000, 50))
    assert await login.settle(tenant, mine, desired=(10, 100, 1)) == [10, 100, 1]
    for _ in range(3):
        await login.settle(tenant, mine, spent=(-10, -100, -1))
        assert await login.used(tenant) == (500, 5_000, 50)


async def test_no_more_than_the_grant_is_returned(login: Login, tenant: str) -> None:
    other, mine = uuid4(), uuid4()
    await login.settle(tenant, other, spent=(300, 0, 0), desired=(200, 5_000, 50))
    await login.settle(tenant, mine, desired=(10, 100, 1))
    await login.settle(tenant, mine, spent=(-1e300, -101, float("-inf")))
    assert await login.used(tenant) == (500, 5_000, 50)


@pytest.mark.parametrize("secret", [None, UUID(int=0), uuid4()], ids=["no secret", "nil", "another"])
async def test_the_grant_of_another_process_cannot_be_returned(login: Login, tenant: str, secret: UUID | None) -> None:
    await login.settle(tenant, uuid4(), desired=(500, 5_000, 50))
    await login.settle(tenant, secret, spent=(-500, -5_000, -50))
    assert await login.used(tenant) == (500, 5_000, 50)


async def test_a_grant_of_one_budget_cannot_be_returned_to_another(login: Login, tenant: str) -> None:
    mine = uuid4()
    await login.settle(tenant, mine, desired=(500, 5_000, 50))
    await login.settle(f"{tenant}x", mine, spent=(7, 7, 7))
    await login.settle(f"{tenant}x", mine, spent=(-7, -7, -7))
    assert await login.used(f"{tenant}x") == (7, 7, 7)


async def test_earlier_use_is_settled_and_cannot_be_returned(login: Login, tenant: str) -> None:
    """A process that is compromised in the afternoon cannot undo the usage of the morning, which was granted to the
    same process."""
    mine = uuid4()
    for _ in range(50):
        await login.settle(tenant, mine, holding=(1, 0, 0.25), desired=(9, 100, 0.75))
    before = await login.used(tenant)
    assert before == (450, 5_000, 37.5)
    await login.settle(tenant, mine, spent=(-450, -5_000, -37.5), holding=(450, 5_000, 37.5))
    assert await login.used(tenant) == (440, 4_900, 36.5)


async def test_reported_use_cannot_be_returned(login: Login, tenant: str) -> None:
    mine = uuid4()
    await login.settle(tenant, mine, spent=(500, 5_000, 50))
    await login.settle(tenant, mine, spent=(-500, -5_000, -50), holding=(500, 5_000, 50))
    assert await login.used(tenant) == (500, 5_000, 50)


@pytest.mark.parametrize("since", ["yesterday", "tomorrow"])
async def test_a_grant_of_another_day_cannot_be_returned(login: Login, tenant: str, since: str) -> None:
    mine, other = uuid4(), uuid4()
    [(today,)] = await login.owner.execute("SELECT date_trunc('day', clock_timestamp(), 'UTC')")
    day = today + timedelta(days=-1 if since == "yesterday" else 1)
    await login.settle(tenant, mine, desired=(500, 5_000, 50))
    await login.settle(tenant, mine, spent=(-500, -5_000, -50), since=day)
    assert await login.used(tenant) == (500, 5_000, 50)
    await login.owner.execute("UPDATE query_use SET since = since - interval '1 day' WHERE tenant = %s", tenant)
    await login.settle(tenant, other, spent=(30, 30, 3), since=today)
    await login.settle(tenant, mine, spent=(-500, -5_000, -50), since=today)
    assert await login.used(tenant) == (30, 30, 3), "what was given yesterday is worth nothing today"


async def test_nothing_of_a_rate_per_minute_can_be_returned(login: Login, tenant: str) -> None:
    mine = uuid4()
    now = datetime.now(UTC)
    if now.second > 50:  # the minute of the clock must not end in the middle
        await asyncio.sleep(61 - now.second)
    await login.settle(tenant, mine, desired=(40, 0, 0), span="minute")
    await login.settle(tenant, mine, spent=(-40, 0, 0), span="minute")
    assert await login.settle(tenant, mine, desired=(40, 0, 0), most=(50, None, None), span="minute") == [10, 0, 0]


NAN = float("nan")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (place, value)
        for place in ("spent", "holding", "desired", "most")
        for value in (NAN, None)
        if (place, value) != ("most", None)
    ],
)
@pytest.mark.parametrize("n", range(3))
async def test_nan_null_and_missing_amounts_are_refused(
    login: Login, tenant: str, place: str, value: float | None, n: int
) -> None:
    mine, amounts = uuid4(), [1.0, 1.0, 1.0]
    await login.settle(tenant, mine, spent=(500, 5_000, 50))
    request: dict[str, Any] = {place: [value if i == n else amount for i, amount in enumerate(amounts)]}
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        await login.settle(tenant, mine, **request)
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        await login.settle(tenant, mine, **{place: amounts[:n] if place != "most" else [NAN] * 3})
    assert await login.used(tenant) == (500, 5_000, 50)


@pytest.mark.parametrize("huge", [1e16, 1e300])
async def test_use_is_not_lost_in_the_rounding_of_a_very_large_grant(login: Login, tenant: str, huge: float) -> None:
    """As floating-point numbers, what was used and 1e300 are 1e300, and 1e300 given back would leave nothing."""
    used, mine = (123.0, 45_678.0, 50.000_05), uuid4()
    await login.settle(tenant, uuid4(), spent=used)
    for _ in range(3):
        await login.settle(tenant, mine, desired=[huge] * 3, most=[huge] * 3)
        assert min(await login.used(tenant)) >= 1e14
        await login.settle(tenant, mine, spent=[-huge] * 3)
        assert await login.used(tenant) == used
    await login.settle(tenant, mine, spent=(huge, 0, 0))
    await login.settle(tenant, uuid4(), spent=(huge, 0, 0))
    assert await login.settle(tenant, uuid4(), desired=(1, 1, 1)) == [0, 1, 1], "it may use a budget up"


async def test_amounts_that_overflow_are_refused(login: Login, tenant: str) -> None:
    mine, largest = uuid4(), [1.7e308] * 3
    await login.settle(tenant, mine, spent=(500, 5_000, 50))
    for requests in ({"spent": largest}, {"desired": largest, "most": largest}, {"holding": largest}):
        with pytest.raises(psycopg.errors.NumericValueOutOfRange):
            await login.settle(tenant, mine, **requests)
    assert await login.used(tenant) == (500, 5_000, 50)


async def test_infinite_amounts_only_use_a_budget_up(login: Login, tenant: str) -> None:
    mine, endless = uuid4(), [float("inf")] * 3
    await login.settle(tenant, uuid4(), spent=(500, 5_000, 50))
    await login.settle(tenant, mine, desired=endless, most=endless)
    await login.settle(tenant, mine, spent=[float("-inf")] * 3)
    assert await login.used(tenant) == (500, 5_000, 50)
    await login.settle(tenant, mine, spent=endless)
    assert await login.settle(tenant, uuid4(), desired=(1, 1, 1)) == [0, 0, 0]


async def test_negative_requests_and_limits_change_nothing(login: Login, tenant: str) -> None:
    mine = uuid4()
    await login.settle(tenant, mine, desired=(500, 5_000, 50))
    assert await login.settle(tenant, mine, holding=(500, 5_000, 50), desired=(-5, -5, -5)) == [0, 0, 0]
    assert await login.settle(tenant, mine, holding=(-5, -5, -5), most=(-5, -5, -5), desired=(1, 1, 1)) == [0, 0, 0]
    assert await login.used(tenant) == (500, 5_000, 50)


async def test_concurrent_returns_of_one_grant_count_once(login: Login, tenant: str) -> None:
    mine = uuid4()
    await login.settle(tenant, uuid4(), desired=(500, 5_000, 50))
    await login.settle(tenant, mine, desired=(10, 100, 1))
    await asyncio.gather(
        *(login.settle(tenant, mine, spent=(-6, -60, -0.75), holding=(10, 100, 1)) for _ in range(12)),
        *(login.settle(tenant, uuid4(), spent=(-6, -60, -1)) for _ in range(4)),
    )
    assert await login.used(tenant) == (500, 5_000, 50)


async def test_the_function_of_the_version_before_returns_nothing(login: Login, tenant: str) -> None:
    """It names no secret. Both versions count in the same row, and together give no more than there is."""
    mine = uuid4()
    assert await login.use_as_before(tenant, spent=(100, 0, 1), desired=(300, 0, 9)) == [300, 0, 9]
    assert await login.settle(tenant, mine, desired=(100, 50, 1)) == [100, 50, 1]
    for spent in ((-400, -50, -11), [float("-inf")] * 3, (-1e300, 0, 0)):
        assert await login.use_as_before(tenant, spent=spent) == [0, 0, 0]
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        await login.use_as_before(tenant, spent=(NAN, None, 0))
    assert await login.used(tenant) == (500, 50, 11)
    assert await login.use_as_before(tenant, desired=(900, 0, 0)) == [500, 0, 0]
    await login.settle(tenant, mine, spent=(-100, -50, -1))
    assert await login.used(tenant) == (900, 0, 10)


async def test_a_row_from_before_the_migration_is_settled(login: Login, tenant: str) -> None:
    await login.owner.execute(
        "INSERT INTO query_use (tenant, caller, span, since, requests, tokens, money)"
        " VALUES (%s, '', 'day', date_trunc('day', clock_timestamp(), 'UTC'), 500, 5000, 50)",
        tenant,
    )
    mine = uuid4()
    await login.settle(tenant, mine, spent=(-500, -5_000, -50))
    await login.settle(tenant, mine, desired=(10, 0, 0))
    await login.settle(tenant, mine, spent=(-500, -5_000, -50))
    assert await login.used(tenant) == (500, 5_000, 50)


async def test_a_grant_that_a_restored_or_erased_row_lacks_cannot_be_returned(login: Login, tenant: str) -> None:
    """A backup is from before some grants; a row may have been erased with its tenant."""
    mine = uuid4()
    await login.settle(tenant, uuid4(), spent=(500, 5_000, 50))
    await login.settle(tenant, mine, desired=(10, 100, 1))
    [backup] = await login.owner.execute("SELECT to_jsonb(u)::text FROM query_use u WHERE tenant = %s", tenant)
    await login.settle(tenant, mine, holding=(10, 100, 1), desired=(40, 400, 4))
    await login.owner.execute("DELETE FROM query_use WHERE tenant = %s", tenant)
    await login.owner.execute("INSERT INTO query_use SELECT * FROM jsonb_populate_record(NULL::query_use, %s)", *backup)
    await login.settle(tenant, mine, spent=(-50, -500, -5))
    assert await login.used(tenant) == (500, 5_000, 50)
    await login.settle(tenant, mine, desired=(10, 100, 1))
    await login.owner.execute("DELETE FROM query_use WHERE tenant = %s", tenant)
    await login.settle(tenant, mine, spent=(-10, -100, -1))
    assert await login.used(tenant) == (0, 0, 0)


async def test_a_row_stores_at_most_100_holders(login: Login, tenant: str) -> None:
    first, last = uuid4(), uuid4()
    await login.settle(tenant, first, desired=(1, 0, 0))
    for _ in range(99):
        await login.settle(tenant, uuid4(), desired=(1, 0, 0))
    assert await login.settle(tenant, last, desired=(5, 0, 0)) == [5, 0, 0], "it is given as much as others"
    assert await login.holders(tenant) == 100
    await login.settle(tenant, last, spent=(-5, 0, 0))
    assert (await login.used(tenant))[0] == 105
    await login.settle(tenant, first, spent=(-1, 0, 0))
    assert ((await login.used(tenant))[0], await login.holders(tenant)) == (104, 99)


async def test_another_process_with_the_same_login_cannot_read_the_secret(login: Login, tenant: str) -> None:
    settings = PostgresSettings(dsn=login.dsn)  # type: ignore[arg-type]  # pydantic makes it a secret
    async with open_pool(settings) as pool, await psycopg.AsyncConnection.connect(login.dsn) as other:
        ledger = PostgresLedger(pool, 60)
        limits = LIMITS
        await ledger.use(
            Subject(tenant, "", "day"),
            since=None,
            spent=NO_AMOUNTS,
            holding=NO_AMOUNTS,
            requested=Amounts(5),
            ceilings=limits,
        )
        cursor = await other.execute("SELECT query FROM pg_stat_activity WHERE query LIKE '%settle_budget(%'")
        seen = [query for (query,) in await cursor.fetchall()]
        assert seen, "a login sees what others of the same name run"
        assert not any(str(ledger._secret) in query or ledger._secret.hex in query for query in seen)
        for column in ("holders", "held", "settled"):
            await other.rollback()
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await other.execute(f"SELECT {column} FROM query_use".encode())
    [(stored,)] = await login.owner.execute("SELECT holders[1] FROM query_use WHERE tenant = %s", tenant)
    assert ledger._secret.bytes not in stored


# What the query service does


def meter(ledger: PostgresLedger, folder: Path, text: str) -> Meter:
    (folder / "limits.toml").write_text(text)
    settings = QuerySettings(serve=ServeSettings(requests_per_minute=1_000_000), chat=metered_chat())
    return Meter(ledger, Quotas(folder / "limits.toml"), settings, QueryMetrics())


async def test_several_processes_settle_to_the_actual_use_after_one_was_killed(
    login: Login, tenant: str, tmp_path: Path
) -> None:
    """Answers overlap, portions are taken while others are under way, and each process gives back exactly its rest."""
    who = Identity("token", tenant, "ann")
    limits = "[default]\nrequests_per_day = 1000\ntokens_per_day = 400_000\nmoney_per_day = 1000"
    settings = PostgresSettings(dsn=login.dsn)  # type: ignore[arg-type]  # pydantic makes it a secret
    async with open_pool(settings) as pool:
        meters = [meter(PostgresLedger(pool, 60), tmp_path, limits) for _ in range(4)]
        spent = 0

        async def answers(of: Meter, n: int) -> None:
            nonlocal spent
            for i in range(8):
                account = await of.admit(who, "answer")
                await asyncio.sleep(0.002 * (n % 5))
                tokens = 137 * ((n + i) % 17)  # at times more than was reserved
                account.charge(tokens, tokens / 1_024)
                account.close()
                spent += tokens

        await asyncio.gather(*(answers(of, n) for of in meters for n in range(6)))
        killed, *stopped = meters
        held = next(portion for subject, portion in killed._portions.items() if subject.span == "day")
        lost = Amounts(*held.left)
        for of in stopped:
            await of.aclose()
        used = await login.used(tenant)
        assert used[0] == 4 * 6 * 8 + lost.requests
        assert used[1] == spent + lost.tokens
        assert used[2] == pytest.approx(spent / 1_024 + lost.money)
        assert await login.holders(tenant) == 1, "of those that stopped nothing is left"

        again = meter(PostgresLedger(pool, 60), tmp_path, limits)
        more = 0
        with suppress(Problem):
            while more <= 1_000:
                (await again.admit(who, "read")).close()
                more += 1
        assert more == 1_000 - used[0], "what the killed one held is lost, and no more"
        await again.aclose()
    assert (await login.used(tenant))[0] == 1_000
