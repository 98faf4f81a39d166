"""Budgets across processes: what is counted, and who is sent away (query/limits/budgets.py)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.runtime.tasks import cancel_and_wait
from query.auth.identity import Identity
from query.limits.budgets import (
    RATES_OF_A_SERVICE,
    STORED_BYTES_OF_A_REQUEST,
    Amounts,
    BudgetUsage,
    Ceilings,
    Meter,
    Subject,
    typical_use,
)
from query.limits.quotas import Quotas, parse
from query.problems import Problem
from query.settings import ChatSettings, QuerySettings, ServeSettings
from query.telemetry import QueryMetrics
from tests.support.query.metered_chat import metered_chat

ANN, BOB = Identity("token", "acme", "ann"), Identity("token", "acme", "bob")
OTHER = Identity("token", "globex", "ann")
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


@dataclass
class Row:
    since: datetime
    used: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    settled: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    held: dict[UUID, list[float]] = field(default_factory=dict)


@dataclass
class Table:
    """A model of the function of migration 0049 (compared by tests/contract/query/test_budgets.py)."""

    now: datetime = NOON
    rows: dict[Subject, Row] = field(default_factory=dict)
    request_count: int = 0
    away: bool = False
    refused: int = 0

    async def use(
        self,
        subject: Subject,
        *,
        secret: UUID,
        since: datetime | None,
        spent: Amounts,
        holding: Amounts,
        requested: Amounts,
        ceilings: Ceilings,
    ) -> BudgetUsage:
        if self.away:
            self.refused += 1
            raise Retryable("Postgres is away")
        self.request_count += 1
        began = self.now.replace(second=0) if subject.span == "minute" else self.now.replace(hour=0, minute=0, second=0)
        row = self.rows.get(subject)
        if row is None or row.since != began:
            row = self.rows[subject] = Row(began)
        mine = row.held.setdefault(secret, [0.0, 0.0, 0.0]) if subject.span == "day" else None
        if since is None or since == began:
            for n in range(3):
                row.used[n] += max(0.0, spent[n])
                row.settled[n] += max(0.0, spent[n])
                if mine is not None:
                    mine[n] = max(0.0, mine[n] + min(0.0, spent[n]))
                    row.settled[n] += max(0.0, mine[n] - holding[n])
                    mine[n] = min(mine[n], holding[n])
            if mine is not None and min(spent) < 0:
                row.used = [
                    settled + sum(held[n] for held in row.held.values()) for n, settled in enumerate(row.settled)
                ]
        granted = [0.0, 0.0, 0.0]
        for n, limit in enumerate(ceilings):
            if limit is not None:
                granted[n] = max(0.0, min(requested[n], limit - row.used[n]))
            row.used[n] += granted[n]
            of = row.settled if mine is None else mine
            of[n] += granted[n]
        return BudgetUsage(began, Amounts(*granted), Amounts(*row.used))

    def used(self, tenant: str, caller: str = "") -> Amounts:
        return Amounts(*self.rows[Subject(tenant, caller, "day")].used)


class LedgerOf:
    """The table as one process reaches it."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._secret = uuid4()

    async def use(
        self,
        subject: Subject,
        *,
        since: datetime | None,
        spent: Amounts,
        holding: Amounts,
        requested: Amounts,
        ceilings: Ceilings,
    ) -> BudgetUsage:
        return await self._table.use(
            subject,
            secret=self._secret,
            since=since,
            spent=spent,
            holding=holding,
            requested=requested,
            ceilings=ceilings,
        )


def process(table: Table, limits: str, tmp_path: Path, *, rate: int = 1_000_000, chat: bool = False) -> Meter:
    path = tmp_path / "limits.toml"
    path.write_text(limits)
    settings = QuerySettings(
        serve=ServeSettings(requests_per_minute=rate), chat=metered_chat() if chat else ChatSettings()
    )
    return Meter(LedgerOf(table), Quotas(path), settings, QueryMetrics(), clock=lambda: table.now)


async def count_admitted(meter: Meter, who: Identity, ceilings: int = 10_000) -> int:
    """How many searches are let in until one is not."""
    for n in range(ceilings):
        try:
            (await meter.admit(who, "search")).close()
        except Problem:
            return n
    return ceilings


async def test_processes_together_admit_exactly_the_budget_with_few_writes(tmp_path: Path) -> None:
    table = Table()
    two = [process(table, "[default]\nrequests_per_day = 1000", tmp_path) for _ in range(2)]
    done = 0
    for n in range(990):  # the last portions may lie with the other one
        (await two[n % 2].admit(ANN, "search")).close()
        done += 1
    assert table.request_count < 110
    for meter in two:
        done += await count_admitted(meter, ANN)
    assert done == 1000
    assert await count_admitted(two[0], OTHER, 3) == 3, "another tenant has its own"


async def test_an_exhausted_daily_budget_is_reported_with_the_start_of_the_next_day(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "[tenant.acme.caller]\nrequests_per_day = 2", tmp_path)
    assert await count_admitted(meter, ANN) == 2
    with pytest.raises(Problem) as refused:
        await meter.admit(ANN, "read")
    assert (refused.value.kind, refused.value.headers["Retry-After"]) == ("budget-exhausted", str(12 * 3600))
    assert "2026-11-24 00:00 UTC" in refused.value.detail
    assert await count_admitted(meter, BOB) == 2
    table.now += timedelta(days=1)
    assert await count_admitted(meter, ANN) == 2


async def test_a_stopping_process_returns_its_portion_and_a_starting_one_continues(
    tmp_path: Path,
) -> None:
    table, limits = Table(), "[default]\nrequests_per_day = 1000"
    meter = process(table, limits, tmp_path)
    assert await count_admitted(meter, ANN, 3) == 3
    assert table.used("acme").requests == 10, "a portion was taken"
    await meter.aclose()
    assert table.used("acme").requests == 3
    assert await count_admitted(process(table, limits, tmp_path), ANN) == 997


async def test_tokens_and_money_are_reserved_and_settled_after_the_answer(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "[default]\ntokens_per_day = 10_000\nmoney_per_day = 100", tmp_path, chat=True)
    answers = [await meter.admit(ANN, "answer") for _ in range(10)]
    with pytest.raises(Problem) as refused:
        await meter.admit(BOB, "answer")
    assert "10,000 tokens" in refused.value.detail
    await meter.admit(BOB, "search")
    for account in answers:
        account.charge(400, 0.4)
        account.close()
        account.close()
    await meter.aclose()
    assert table.used("acme").tokens == 4_000
    assert table.used("acme").money == pytest.approx(4, abs=0.1)


async def test_a_request_is_charged_for_what_it_began_although_its_client_has_left(tmp_path: Path) -> None:
    """The embedding of a query goes on, because others may wait for it: whoever left at once had it for nothing."""
    table = Table()
    meter = process(table, "[default]\nmoney_per_day = 100", tmp_path)
    account = await meter.admit(ANN, "search")
    account.close()
    account.charge(0, 0.5)
    await meter.aclose()
    assert table.used("acme").money == pytest.approx(0.5)


async def test_a_charge_during_the_request_of_a_portion_does_not_refuse_the_next_answer(tmp_path: Path) -> None:
    """Tokens were lacking and requested. When they were granted, money was lacking too, of which there was enough."""
    table = Table()
    meter = process(table, "[default]\ntokens_per_day = 100_000\nmoney_per_day = 250", tmp_path, chat=True)
    first = await meter.admit(ANN, "answer")
    requests, use = [], table.use

    async def charged_meanwhile(*arguments: Any, **amounts: Any) -> BudgetUsage:
        usage = await use(*arguments, **amounts)
        if not requests:
            first.charge(0, 1.1)
        requests.append(amounts["requested"])
        return usage

    table.use = charged_meanwhile  # type: ignore[method-assign]
    second = await meter.admit(ANN, "answer")
    assert [(request.tokens > 0, request.money > 0) for request in requests] == [(True, False), (False, True)]
    second.close()
    first.close()
    await meter.aclose()
    assert table.used("acme").money == pytest.approx(1.1)


async def test_reservations_of_running_answers_are_returned_after_further_portions_were_taken(
    tmp_path: Path,
) -> None:
    table = Table()
    meter = process(table, "[default]\nrequests_per_day = 1000\ntokens_per_day = 100_000", tmp_path, chat=True)
    answers = [await meter.admit(ANN, "answer") for _ in range(25)]
    for n, account in enumerate(answers):
        (await meter.admit(ANN, "read")).close()
        account.charge(10 * n, 0)
        account.close(refund=n % 5 == 0)
    await meter.aclose()
    assert table.used("acme") == (25 + 20, 10 * sum(range(25)), 0)
    [row] = [row for subject, row in table.rows.items() if subject.span == "day"]
    assert not any(any(held) for held in row.held.values())


async def test_every_new_portion_settles_the_use_of_the_one_before(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "[default]\nrequests_per_day = 1000", tmp_path)
    assert await count_admitted(meter, ANN, 95) == 95
    [row] = [row for subject, row in table.rows.items() if subject.span == "day"]
    assert row.settled[0] == 90
    assert [held[0] for held in row.held.values()] == [10]


async def test_without_a_limit_usage_is_recorded_in_the_background(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "", tmp_path, chat=True)
    for _ in range(5):
        account = await meter.admit(ANN, "answer")
        account.charge(700, 0.5)
        account.close()
    assert table.request_count == 0
    table.away = True
    await meter.record_use()
    table.away = False
    await meter.record_use()
    await meter.record_use()
    assert (table.request_count, table.used("acme")) == (1, Amounts(5, 3500, 2.5))


async def test_rejected_requests_are_refunded(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "[default]\nrequests_per_day = 3", tmp_path)
    for _ in range(10):
        (await meter.admit(ANN, "search")).close(refund=True)
    assert await count_admitted(meter, ANN) == 3


async def test_during_an_outage_of_postgres_a_process_uses_up_its_portion(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "[default]\nrequests_per_day = 1000", tmp_path)
    (await meter.admit(ANN, "search")).close()
    table.away = True
    for _ in range(9):
        (await meter.admit(ANN, "search")).close()
    with pytest.raises(Retryable):
        await meter.admit(ANN, "search")
    table.away = False
    meter._outage_until = 0.0  # a second later
    assert await count_admitted(meter, ANN) == 990


async def test_during_an_outage_of_postgres_concurrent_requests_fail_after_one_attempt(tmp_path: Path) -> None:
    table = Table(away=True)
    meter = process(table, "[default]\nrequests_per_day = 1000", tmp_path)
    outcomes = await asyncio.gather(*(meter.admit(ANN, "search") for _ in range(20)), return_exceptions=True)
    assert all(isinstance(outcome, Retryable) for outcome in outcomes)
    assert table.refused == 1


async def test_a_rate_limit_holds_across_processes_up_to_a_portion_each(tmp_path: Path) -> None:
    table = Table()
    alone = process(table, "", tmp_path, rate=100)
    assert await count_admitted(alone, OTHER) == 100
    three = [process(table, "", tmp_path, rate=100) for _ in range(3)]
    together = sum([await count_admitted(meter, ANN) for meter in three])
    assert 100 <= together <= 100 + 2 * 10
    table.now += timedelta(minutes=1)
    assert await count_admitted(three[0], ANN, 10) == 10
    assert table.request_count < 60


async def test_one_of_the_people_for_whom_a_service_asks_leaves_the_others_theirs(tmp_path: Path) -> None:
    """The rate in all processes counted for the service: whoever wrote to a chat bot without a pause silenced it."""
    table = Table()
    meter = process(table, "[default.caller]\nrequests_per_day = 150", tmp_path, rate=100)
    ann, bob = (Identity("delegated", "acme", who, key="bot", scopes=("search",)) for who in ("ann", "bob"))
    assert await count_admitted(meter, ann) == 100
    assert await count_admitted(meter, bob) == 100
    table.now += timedelta(minutes=1)
    assert await count_admitted(meter, ann) == 50
    assert await count_admitted(meter, Identity("key", "acme", "ann", key="bot"), 60) == 60


async def test_a_service_that_names_ever_other_people_has_a_rate_of_its_own(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "", tmp_path, rate=10)
    people = (Identity("delegated", "acme", f"p{n}", key="bot", scopes=("search",)) for n in range(40))
    assert sum([await count_admitted(meter, who, 10) for who in people]) == RATES_OF_A_SERVICE * 10
    with pytest.raises(Problem, match="limit of 200 requests per minute"):
        await meter.admit(Identity("delegated", "acme", "another", key="bot", scopes=("search",)), "search")


async def test_people_for_whom_a_service_may_not_ask_now_take_no_memory(tmp_path: Path) -> None:
    meter = process(Table(), "", tmp_path, rate=10)
    people = [Identity("delegated", "acme", f"p{n}", key="bot", scopes=("search",)) for n in range(600)]
    assert sum([await count_admitted(meter, who, 1) for who in people]) == RATES_OF_A_SERVICE * 10
    assert len(meter._portions) == RATES_OF_A_SERVICE * 10 + 2, "and those of the tenant and the service"


async def test_a_process_forgets_people_who_ask_no_more_and_not_what_they_used(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "[default.caller]\nrequests_per_day = 300", tmp_path)
    people = [Identity("delegated", "acme", f"p{n}", key="bot", scopes=("search",)) for n in range(40)]
    for who in people:
        assert await count_admitted(meter, who, 7) == 7
    assert await count_admitted(meter, ANN) == 300
    slow = await meter.admit(people[0], "search")
    table.now += timedelta(minutes=11)
    assert await count_admitted(meter, BOB, 1) == 1
    meter._record_now.set()
    running = asyncio.create_task(meter.run())
    for _ in range(1000):
        await asyncio.sleep(0)
    await cancel_and_wait([running])
    kept = {subject.caller for subject in meter._portions if subject.span == "day"}
    assert kept == {"", "token:ann", "token:bob", "delegated:bot:p0"}, "ann's budget is used, p0's request goes on"
    assert table.rows[Subject("acme", "delegated:bot:p1", "day")].used[0] == 7
    slow.close()
    assert await count_admitted(meter, people[1]) == 293
    assert await count_admitted(meter, people[0]) == 292


async def test_who_stores_much_with_each_request_may_make_fewer(tmp_path: Path) -> None:
    """Answers from 2,000 documents, at a rate of 120 in a minute, took 5.5 GB a day of each table that records them."""
    table = Table()
    meter = process(table, "", tmp_path, rate=120)
    admitted = 0
    while admitted < 120:
        try:
            account = await meter.admit(ANN, "answer")
        except Problem:
            break
        admitted += 1
        for _ in range(2):
            account.charge(0, 0, 10 * STORED_BYTES_OF_A_REQUEST)
        account.close()
    assert admitted == 6
    assert await count_admitted(meter, BOB, 50) == 50, "others do not pay for it"


async def test_requests_that_store_little_are_not_charged_for_it(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "", tmp_path, rate=120)
    for _ in range(119):
        account = await meter.admit(ANN, "search")
        for _ in range(2):
            account.charge(0, 0, STORED_BYTES_OF_A_REQUEST // 2)
        account.close()
    assert await count_admitted(meter, ANN) == 1


async def test_what_requests_have_stored_at_once_is_owed_in_the_next_minutes(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "", tmp_path, rate=100)
    for account in [await meter.admit(ANN, "answer") for _ in range(5)]:
        account.charge(0, 0, 51 * STORED_BYTES_OF_A_REQUEST)
        account.close()
    with pytest.raises(Problem) as refused:
        await meter.admit(ANN, "search")
    assert refused.value.headers == {"Retry-After": "120"}, "what 250 requests are owed for"
    allowed = []
    for _ in range(4):
        allowed.append(await count_admitted(meter, ANN))
        table.now += timedelta(minutes=1)
    assert allowed[:2] == [0, 0]
    assert allowed[2] <= 60
    assert allowed[3] == 100


async def test_what_is_owed_for_stored_bytes_is_not_forgotten_in_quiet_minutes(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "", tmp_path, rate=100)
    account = await meter.admit(ANN, "answer")
    account.charge(0, 0, 500 * STORED_BYTES_OF_A_REQUEST)
    account.close()
    await meter.admit(BOB, "answer")
    table.now += timedelta(minutes=3)
    meter._record_now.set()
    running = asyncio.create_task(meter.run())
    for _ in range(1000):
        await asyncio.sleep(0)
    await cancel_and_wait([running])
    assert {subject.caller for subject in meter._portions if subject.span == "minute"} == {"token:ann"}
    assert await count_admitted(meter, ANN) == 0
    table.now += timedelta(minutes=3)
    assert await count_admitted(meter, ANN) == 100


@pytest.mark.heavy
@given(
    answers=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([ANN, BOB]), st.integers(0, 3000)), max_size=60),
    ceilings=st.integers(0, 20_000),
)
def test_usage_exceeds_the_budget_only_by_what_answers_took_beyond_their_reserve(
    answers: list[tuple[int, Identity, int]], ceilings: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def play() -> None:
        table, folder = Table(), tmp_path_factory.mktemp("meter")
        meters = [process(table, f"[default]\ntokens_per_day = {ceilings}", folder, chat=True) for _ in range(3)]
        spent = beyond = 0
        for n, who, tokens in answers:
            try:
                account = await meters[n].admit(who, "answer")
            except Problem:
                continue
            account.charge(tokens, 0)
            account.close()
            spent += tokens
            beyond += max(0, tokens - 1000)
        assert spent <= ceilings + beyond
        for meter in meters:
            await meter.aclose()
        assert not spent or table.used("acme").tokens == spent

    asyncio.run(play())


async def test_the_gauge_shows_the_most_used_budget(tmp_path: Path) -> None:
    table = Table()
    meter = process(table, "[default]\nrequests_per_day = 100", tmp_path)

    def used() -> float | None:
        labels = {"budget": "requests", "of": "tenant"}
        return meter._metrics.registry.get_sample_value("penstock_query_budget_used_ratio", labels)

    assert used() == 0
    assert await count_admitted(meter, ANN, 85) == 85
    assert used() == 0.85
    table.now += timedelta(days=1)
    assert used() == 0


def test_an_answer_reserves_the_tokens_of_its_passages_and_answer() -> None:
    settings = QuerySettings(chat=ChatSettings(base_url="http://model/v1", model="m"))
    assert typical_use(settings)["answer"].tokens == 6_000 + 1_024
    assert typical_use(QuerySettings())["answer"].tokens == 0, "no model is asked"


def test_a_tenants_limits_override_the_default() -> None:
    default, named = parse(
        "[default]\nrequests_per_day = 10\ncaller = { tokens_per_day = 5 }\n[tenant.acme]\nweight = 2\n"
        "[tenant.acme.caller]\nrequests_per_day = 1\n"
    )
    assert default.amounts == (10, None, None)
    assert (named["acme"].weight, named["acme"].amounts) == (2, (10, None, None))
    assert named["acme"].caller.amounts == (1, 5, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[default]\nrequests = 3", "default.requests"),
        ("[tenant.acme]\nweight = 0", "tenant.acme.weight"),
        ("[tenant.acme]\nmoney_per_day = -1", "tenant.acme.money_per_day"),
        ("[default]\nrequests_per_day = inf", "default.requests_per_day"),
        ("[default]\ntokens_per_day = nan", "default.tokens_per_day"),
        ("requests_per_day", "not valid TOML"),
    ],
)
def test_an_invalid_limits_file_names_the_wrong_entry(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(Misconfigured, match=says):
        Quotas(path)


def test_a_limits_file_that_becomes_invalid_leaves_the_limits_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("[tenant.acme]\nrequests_per_day = 7")
    quotas = Quotas(path)
    path.write_text("[tenant.acme")
    assert quotas.of("acme").requests_per_day == 7
    path.unlink()
    assert quotas.of("acme").requests_per_day == 7
    path.write_text("[tenant.acme]\nrequests_per_day = 123")
    assert quotas.of("acme").requests_per_day == 123
