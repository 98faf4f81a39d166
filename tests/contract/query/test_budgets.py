"""Shares and budgets on real services: one tenant at full load, several processes, restarts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from cli.main import app as cli
from deploy.local.stack import Stack
from pipeline.ledger.personal import Scope, erase
from pipeline.maintenance.retention import Retention
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import RetentionSettings
from query.limits import budgets
from query.limits.budgets import NO_AMOUNTS, Amounts, PostgresLedger, Subject
from query.settings import ChatSettings
from tests.fakes.chat import FakeChat
from tests.support.deploy.roles_kit import define_roles, logins
from tests.support.processes import serving
from tests.support.query.http_kit import as_, problem, service_over, write_keys
from tests.support.query.library import Library, WordEmbedder, document
from tests.support.query.mcp_kit import call, connected
from tests.unit.query.test_meter import LedgerOf, Table

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

QUERY = {"query": "harbour"}
WHO = ("ann", "bob", "eve", "dan")
QUESTION = {"question": "When does the harbour open?", "mode": "hybrid"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        for tenant in ("acme", "globex"):
            await library.put(
                document(
                    "harbour.md", "The harbour opens at nine.", tenant=tenant, acl_tags=[f"user:{who}" for who in WHO]
                )
            )
        yield library


@pytest_asyncio.fixture(loop_scope="module")
async def chat() -> AsyncIterator[FakeChat]:
    async with FakeChat() as chat:
        yield chat


def model(chat: FakeChat) -> ChatSettings:
    return ChatSettings(
        base_url=chat.url,
        model=chat.model,
        timeout_seconds=60,
        first_token_seconds=60,
        context_tokens=900,
        answer_tokens=100,
        price_per_million_prompt_tokens=1_000,
        price_per_million_answer_tokens=2_000,
    )


def limits(folder: Path, text: str) -> dict[str, Path]:
    (folder / "limits.toml").write_text(text)
    return {"limits_file": folder / "limits.toml"}


async def used(library: Library, tenant: str, caller: str = "") -> tuple[float, float, float]:
    rows = await library.execute(
        "SELECT requests, tokens, money FROM query_use WHERE tenant = %s AND caller = %s AND span = 'day'",
        tenant,
        caller,
    )
    return rows[0] if rows else (0, 0, 0)


# Shares


async def test_one_tenant_at_full_load_does_not_block_another_tenant(library: Library, chat: FakeChat) -> None:
    """Before, four callers with eight slow answers each took every place of the process."""
    chat.faults.latency_seconds = 60
    async with service_over(library, chat=model(chat), serve={"answers_at_once": 16, "waiting_seconds": 60}) as (
        client,
        service,
    ):
        sample = service.metrics.registry.get_sample_value
        crowd = [
            asyncio.create_task(client.post("/v1/answers", json=QUESTION, headers=as_(WHO[n % 4], "globex")))
            for n in range(24)
        ]
        searching = None
        try:
            async with asyncio.timeout(120):
                while chat.stats.open < 16 or not sample("penstock_query_waiting"):
                    await asyncio.sleep(0.05)
            searching = asyncio.create_task(flood(client, [as_(f"s{n}", "globex") for n in range(8)]))
            for _ in range(5):
                answer = await client.post("/v1/search", json=QUERY, headers=as_("ann", "acme"))
                assert (answer.status_code, len(answer.json()["results"])) == (200, 1)
                read = await client.get("/v1/facets", headers=as_("ann", "acme"))
                assert read.status_code == 200
            async with connected(str(client.base_url).rstrip("/"), headers=as_("ann", "acme")) as mcp:
                assert (await call(mcp, "search", query="harbour"))["results"]
            chat.faults.latency_seconds = 0
            answer = await client.post("/v1/answers", json=QUESTION, headers=as_("ann", "acme"))
            assert (answer.status_code, answer.json()["grounded"]) == (200, True)
            assert not crowd[0].done(), "the other tenant's answers are still being written"
        finally:
            tasks = [*crowd, *([searching] if searching is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def flood(client: httpx.AsyncClient, callers: list[dict[str, str]]) -> None:
    """Four searches at a time of each caller, without end."""

    async def ask(headers: dict[str, str]) -> None:
        while True:
            answer = await client.post("/v1/search", json=QUERY, headers=headers)
            assert answer.status_code in (200, 429, 503)
            await asyncio.sleep(0.05 if answer.status_code != 200 else 0)

    await asyncio.gather(*(ask(headers) for headers in callers for _ in range(4)))


# Budgets


async def test_an_exhausted_request_budget_is_a_429_with_the_time_of_its_end(
    library: Library, tenant: str, tmp_path: Path
) -> None:
    file = limits(tmp_path, f'[tenant."{tenant}".caller]\nrequests_per_day = 2')
    async with service_over(library, serve=file) as (client, service):
        for _ in range(2):
            assert (await client.get("/v1/me", headers=as_("ann", tenant))).status_code == 200
        refused = await client.get("/v1/me", headers=as_("ann", tenant))
        assert problem(refused) == (429, "budget-exhausted")
        assert 0 < int(refused.headers["Retry-After"]) <= 86_400
        assert "00:00 UTC" in refused.json()["detail"]
        over_mcp = await client.post("/mcp", json={}, headers=as_("ann", tenant))
        assert problem(over_mcp) == (429, "budget-exhausted")
        assert (await client.get("/v1/me", headers=as_("bob", tenant))).status_code == 200
        sample = service.metrics.registry.get_sample_value
        assert sample("penstock_query_shed_total", {"reason": "budget"}) == 2
        assert sample("penstock_query_budget_used_ratio", {"budget": "requests", "of": "caller"}) == 1
        (tmp_path / "limits.toml").write_text(f'[tenant."{tenant}".caller]\nrequests_per_day = 3')
        assert (await client.get("/v1/me", headers=as_("ann", tenant))).status_code == 200, "the file is read again"


async def test_an_exhausted_token_budget_ends_answers_but_not_searches(
    library: Library, chat: FakeChat, tmp_path: Path
) -> None:
    before = await used(library, "globex")
    ceilings = before[1] + 2_000
    file = limits(tmp_path, f"[tenant.globex]\ntokens_per_day = {ceilings}")
    async with service_over(library, chat=model(chat), serve=file) as (client, service):
        statuses = []
        while not statuses or statuses[-1] == 200:
            answer = await client.post("/v1/answers", json=QUESTION, headers=as_("ann", "globex"))
            statuses.append(answer.status_code)
        assert problem(answer) == (429, "budget-exhausted")
        assert "tokens" in answer.json()["detail"]
        assert (await client.post("/v1/search", json=QUERY, headers=as_("ann", "globex"))).status_code == 200
        sample = service.metrics.registry.get_sample_value
        counted = sum(
            sample("penstock_query_tokens_total", {"kind": kind, "model": chat.model}) or 0
            for kind in ("prompt", "answer")
        )
        money = sample("penstock_query_answer_cost_total", {"model": chat.model})
    after = await used(library, "globex")
    assert 0 < counted <= 2_000
    assert after[1] - before[1] == counted
    assert after[2] - before[2] == pytest.approx(money)


async def test_an_exhausted_token_budget_ends_the_answers_of_tools_too(
    library: Library, chat: FakeChat, tmp_path: Path
) -> None:
    """Calls of tools counted as searches, also of those that have a model write an answer."""
    before = await used(library, "globex")
    file = limits(tmp_path, f"[tenant.globex]\ntokens_per_day = {before[1] + 2_000}")
    async with service_over(library, chat=model(chat), serve=file) as (client, _):
        asking = as_("eve", "globex")
        async with connected(str(client.base_url).rstrip("/"), headers=asking) as mcp:
            refusals: list[str] = []
            while not refusals and len(chat.requests) < 40:
                kept = await mcp.call_tool("standing_keep", {"question": QUESTION["question"]})
                refusals += [part.text for part in kept.content if kept.is_error]
            assert refusals, "40 answers were written"
            assert "tokens per day is exhausted" in refusals[0]
            assert (await call(mcp, "search", query="harbour"))["results"]
    after = await used(library, "globex")
    assert 0 < after[1] - before[1] <= 2_000


async def test_answers_of_tools_are_shared_out_with_the_others(library: Library, chat: FakeChat) -> None:
    chat.faults.latency_seconds = 60
    serve = {"answers_at_once": 2, "waiting_seconds": 2, "concurrent": 2}
    async with (
        service_over(library, chat=model(chat), serve=serve) as (client, _),
        connected(str(client.base_url).rstrip("/"), headers=as_("dan", "globex")) as mcp,
    ):
        keep = "standing_keep", {"question": QUESTION["question"]}
        writing = [asyncio.create_task(mcp.call_tool(*keep)) for _ in range(2)]
        try:
            async with asyncio.timeout(60):
                while chat.stats.open < 2:
                    await asyncio.sleep(0.05)
            refused = await asyncio.wait_for(mcp.call_tool(*keep), 30)
            assert (refused.is_error, chat.stats.open) == (True, 2)
            search = await client.post("/v1/search", json=QUERY, headers=as_("ann", "acme"))
            assert search.status_code == 200, "who waits to write holds no slot of a search"
        finally:
            chat.faults.latency_seconds = 0
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)


async def test_a_client_that_leaves_a_stream_is_charged_for_the_models_tokens(library: Library, chat: FakeChat) -> None:
    """Else whoever leaves just before the end would have its answers for nothing."""
    chat.faults.token_seconds = 0.2
    async with service_over(library, chat=model(chat)) as (client, _):
        request = client.stream("POST", "/v1/answers", json={**QUESTION, "stream": True}, headers=as_("ann", "acme"))
        async with request as answer:
            async for line in answer.aiter_lines():
                if line.startswith("event: delta"):
                    break
    assert (await used(library, "acme"))[1] > 100


async def test_without_limits_usage_is_counted_by_tenant_and_shown_by_penstock_budget(
    library: Library, tenant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service_over(library) as (client, _):
        for name in ("ann", "bob", "bob"):
            await client.get("/v1/me", headers=as_(name, tenant))
    assert await used(library, tenant) == (3, 0, 0)
    library.write_home(tmp_path)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    file = limits(tmp_path, f'[tenant."{tenant}"]\nrequests_per_day = 4')["limits_file"]
    arguments = ["budget", "--tenant", tenant, "--limits", str(file)]
    output = await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, "--json"])
    [row] = json.loads(output.stdout)
    assert (row["tenant"], row["caller"]) == (tenant, None)
    assert row["requests"] == {"used": 3, "budget": 4, "ratio": 0.75}
    assert row["tokens"] == {"used": 0, "budget": None, "ratio": None}
    shown = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert "3 of 4" in shown.stdout
    assert "75%" in shown.stdout


# Several processes


@asynccontextmanager
async def process(
    library: Library, folder: Path, env: dict[str, str]
) -> AsyncIterator[tuple[httpx.AsyncClient, psutil.Process]]:
    """`penstock serve` as an operator starts it."""
    folder.mkdir(exist_ok=True)
    library.write_home(folder)
    given = {
        **os.environ,
        "PENSTOCK_HOME": str(folder),
        "PENSTOCK_EMBEDDING_PROVIDER": "openai",
        "PENSTOCK_EMBEDDING_BASE_URL": "http://127.0.0.1:1/v1",
        "PENSTOCK_EMBEDDING_API_KEY": "none",
        **env,
    }
    async with serving(given) as (address, started), httpx.AsyncClient(base_url=address, timeout=60) as client:
        yield client, psutil.Process(started.pid)


async def test_processes_share_a_budget_and_a_restarted_one_continues_with_it(
    library: Library, tenant: str, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.toml", bot={"key": "k-1", "tenant": tenant, "tags": ["wiki/staff"]})
    file = limits(tmp_path, f'[tenant."{tenant}"]\nrequests_per_day = 300')["limits_file"]
    env = {
        "PENSTOCK_AUTH_KEYS_FILE": str(keys),
        "PENSTOCK_SERVE_LIMITS_FILE": str(file),
        "PENSTOCK_SERVE_REQUESTS_PER_MINUTE": "100000",
    }
    headers = {"X-Api-Key": "k-1"}

    async def ask(client: httpx.AsyncClient, ceilings: int) -> int:
        for n in range(ceilings):
            if (await client.get("/v1/me", headers=headers)).status_code != 200:
                return n
        return ceilings

    async with process(library, tmp_path / "a", env) as (a, _):
        async with process(library, tmp_path / "b", env) as (b, killed):
            assert await asyncio.gather(ask(a, 100), ask(b, 100)) == [100, 100]
            assert 200 <= (await used(library, tenant))[0] <= 206
            killed.kill()
            await asyncio.to_thread(killed.wait)
        async with process(library, tmp_path / "b", env) as (again, _):
            together = sum(await asyncio.gather(ask(a, 100), ask(again, 100)))
            assert 100 - 3 <= together <= 100, "what the killed one held is lost, and no more"
            refused = await again.get("/v1/me", headers=headers)
            assert problem(refused) == (429, "budget-exhausted")
    assert (await used(library, tenant))[0] <= 300


async def test_a_rate_limit_is_shared_by_two_processes_up_to_one_portion(library: Library, tenant: str) -> None:
    rate = {"requests_per_minute": 40}
    async with service_over(library, serve=rate) as (a, _), service_over(library, serve=rate) as (b, _):
        now = datetime.now(UTC)
        if now.second > 45:  # the minute of the clock must not end in the middle
            await asyncio.sleep(60 - now.second)
        taken = [0, 0]
        for n, client in ((0, a), (1, b)):
            while (answer := await client.get("/v1/me", headers=as_("ann", tenant))).status_code == 200:
                taken[n] += 1
            assert problem(answer) == (429, "rate-limited")
        assert taken == [40, 4]


# The table


@pytest.mark.parametrize(
    ("path", "body", "size"),
    [
        ("/v1/search", QUERY, 300),  # a record of the audit trail has 700 and more
        ("/v1/answers", QUESTION | {"keep": True}, 500),
        ("/v1/answers", QUESTION | {"stream": True}, 300),
        ("/v1/standing", None, 300),
    ],
)
async def test_what_a_request_stores_counts_towards_the_rate_of_its_caller(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object] | None, size: int
) -> None:
    monkeypatch.setattr(budgets, "STORED_BYTES_OF_A_REQUEST", size)
    await library.put(document("harbour.md", "The harbour opens at nine.", tenant=tenant, acl_tags=["user:ann"]))
    async with service_over(library, serve={"requests_per_minute": 40}) as (client, _):
        admitted = 0
        while admitted < 40:
            response = await client.request("POST" if body else "GET", path, json=body, headers=as_("ann", tenant))
            if response.status_code != 200:
                assert problem(response) == (429, "rate-limited")
                break
            admitted += 1
    assert 10 <= admitted < 30


async def test_the_postgres_budget_ledger_behaves_like_the_model_of_the_unit_tests(
    library: Library, tenant: str
) -> None:
    table = Table()
    pairs = [(PostgresLedger(library.pool, 60), LedgerOf(table)) for _ in range(2)]
    day = Subject(tenant, "", "day")
    [(midnight,)] = await library.execute("SELECT date_trunc('day', clock_timestamp(), 'UTC')")
    table.now = midnight + timedelta(seconds=1)
    yesterday = midnight - timedelta(days=1)
    for who, since, spent, holding, requested, ceilings in (
        (0, None, NO_AMOUNTS, NO_AMOUNTS, Amounts(3, 50), (10, 60, None)),
        (1, midnight, Amounts(2, 5, 0.5), NO_AMOUNTS, Amounts(3, 50, 9), (10, 60, None)),
        (0, midnight, Amounts(-1, -40), Amounts(1, 10), Amounts(100), (10, 60, 1)),
        (1, midnight, Amounts(-5, -5), Amounts(9, 9, 9), NO_AMOUNTS, (10, 60, 1)),
        (1, yesterday, Amounts(-5, 7, 7), NO_AMOUNTS, Amounts(1, 1, 1), (10, 60, 1)),
        (0, midnight, Amounts(-100, 0, 5), NO_AMOUNTS, Amounts(4, 0, 1), (10, None, 1)),
        (0, midnight, Amounts(-4, -50), NO_AMOUNTS, Amounts(9), (10, None, 1)),
        (1, midnight, NO_AMOUNTS, Amounts(1), Amounts(0, 4), (10, 60, 1)),
        (1, midnight, Amounts(-5, -9, -3), NO_AMOUNTS, Amounts(2, 2, 2), (20, 80, 9)),
    ):
        request = {"since": since, "spent": spent, "holding": holding, "requested": requested, "ceilings": ceilings}
        ledger, model = pairs[who]
        assert await ledger.use(day, **request) == await model.use(day, **request)
    await library.execute("UPDATE query_use SET since = since - interval '1 day' WHERE tenant = %s", tenant)
    request = {"spent": Amounts(9), "holding": Amounts(9), "requested": Amounts(4), "ceilings": (10, None, None)}
    granted = await pairs[0][0].use(day, since=yesterday, **request)
    assert (granted.since, granted.used.requests) == (midnight, 4)


async def test_concurrent_budget_requests_are_granted_no_more_than_the_ceiling(library: Library, tenant: str) -> None:
    ledger = PostgresLedger(library.pool, 60)
    requests = [
        ledger.use(
            Subject(tenant, "", "day"),
            since=None,
            spent=NO_AMOUNTS,
            holding=NO_AMOUNTS,
            requested=Amounts(7),
            ceilings=(100, None, None),
        )
        for _ in range(20)
    ]
    assert sum(gathered.granted.requests for gathered in await asyncio.gather(*requests)) == 100


async def test_the_query_services_login_can_record_usage_but_not_change_it(library: Library, tenant: str) -> None:
    admin = library.settings.postgres.dsn.get_secret_value()
    define_roles(admin)
    with logins(admin) as dsn, psycopg.connect(dsn["penstock_query"], autocommit=True) as connection:
        connection.execute("SELECT use_budget(%s, '', 'day', NULL, '{1,0,0}', '{0,0,0}', '{NULL,NULL,NULL}')", [tenant])
        for statement in (
            "SELECT * FROM query_use",
            "UPDATE query_use SET requests = 0",
            "DELETE FROM query_use",
            "INSERT INTO query_use (tenant, caller, span, since) VALUES ('x', '', 'day', now())",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
    assert (await used(library, tenant))[0] == 1


async def test_old_usage_of_callers_is_erased_by_retention(library: Library, tenant: str) -> None:
    await library.execute(
        "INSERT INTO query_use (tenant, caller, span, since) SELECT %s, caller, 'day', now() - age::interval"
        " FROM (VALUES ('token:ann', '31 days'), ('token:bob', '29 days')) v (caller, age)",
        tenant,
    )
    await Retention(library.pool, Metrics(), RetentionSettings()).turn()
    assert await library.execute("SELECT caller FROM query_use WHERE tenant = %s", tenant) == [("token:bob",)]


async def test_a_persons_use_through_a_service_is_forgotten_with_the_person(library: Library, tenant: str) -> None:
    for caller in ("token:ann", "delegated:bot:ann", "delegated:bot:joann", "delegated:bot", "key:ann"):
        await library.execute(
            "INSERT INTO query_use (tenant, caller, span, since) VALUES (%s, %s, 'day', now())", tenant, caller
        )
    async with library.pool.connection() as connection:
        await erase(connection, "person", Scope(tenant, person="ann"))
    rows = await library.execute("SELECT caller FROM query_use WHERE tenant = %s ORDER BY caller", tenant)
    assert [caller for (caller,) in rows] == ["delegated:bot", "delegated:bot:joann", "key:ann"]


async def test_the_workers_login_cannot_delete_todays_usage(library: Library, tenant: str) -> None:
    admin = library.settings.postgres.dsn.get_secret_value()
    define_roles(admin)
    await library.execute("SELECT use_budget(%s, '', 'day', NULL, '{1,0,0}', '{0,0,0}', '{NULL,NULL,NULL}')", tenant)
    with logins(admin) as dsn, psycopg.connect(dsn["penstock_worker"], autocommit=True) as connection:
        connection.execute("SELECT FROM erase_use_by_age(-1, 500)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("DELETE FROM query_use")
    assert (await used(library, tenant))[0] == 1


async def test_penstock_budget_works_with_the_query_services_login(
    library: Library, tenant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = library.settings.postgres.dsn.get_secret_value()
    define_roles(admin)
    await library.execute("SELECT use_budget(%s, '', 'day', NULL, '{1,0,0}', '{0,0,0}', '{NULL,NULL,NULL}')", tenant)
    file = limits(tmp_path, "[default]\nrequests_per_day = 4\n")["limits_file"]
    with logins(admin) as dsn:
        monkeypatch.setenv("PENSTOCK_POSTGRES_DSN", dsn["penstock_query"])
        output = await asyncio.to_thread(
            CliRunner().invoke, cli, ["budget", "--tenant", tenant, "--limits", str(file), "--json"]
        )
    assert output.exit_code == 0, output.output
    assert [entry["requests"]["used"] for entry in json.loads(output.stdout)] == [1]
