"""Budgets by day and rates by minute that hold across all processes of the query service (docs/adr/0051-shares.md).

What is used is kept in Postgres. A process takes a portion in advance, a hundredth of a budget, and asks again when
that is used up: so it writes once in many requests, and what all processes hold together is never more than the budget.
What is known only afterwards (tokens, money) is reserved by what an answer usually takes, and settled at its end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Literal, NamedTuple, Protocol

import structlog

from pipeline.core.errors import PenstockError, Retryable
from pipeline.runtime.tasks import cancel_and_wait, time_limit
from pipeline.stores.postgres import Pool, translated
from query.auth.identity import Who
from query.limits.concurrency import Kind
from query.limits.quotas import Quotas
from query.problems import Problem
from query.service import Service
from query.settings import QuerySettings
from query.telemetry import QueryMetrics

log = structlog.get_logger()

Span = Literal["day", "minute"]
SPANS: dict[Span, timedelta] = {"day": timedelta(days=1), "minute": timedelta(minutes=1)}
NAMES = ("requests", "tokens", "money")
PORTION_OF_A_DAY, PORTION_OF_A_MINUTE = 0.01, 0.1
NOTE_SECONDS = 15.0
"""What a process that is killed may leave uncounted of what has no limit, or was used beyond a portion."""
EMPTY_SECONDS = 1.0
"""Who had nothing left is not looked up again sooner."""
WARN_RATIO = 0.8
LEAST_MONEY = 1e-6
"""What a search wants to be left."""


class Amounts(NamedTuple):
    requests: float = 0.0
    tokens: float = 0.0
    money: float = 0.0


NOTHING = Amounts()
Most = Sequence[float | None]


class Used(NamedTuple):
    since: datetime
    given: Amounts
    used: Amounts
    """By all processes, or given to them."""


class Ledger(Protocol):
    """Where all processes count together."""

    async def use(
        self, subject: Subject, *, since: datetime | None, spent: Amounts, wanted: Amounts, most: Most
    ) -> Used:
        """Add what was spent in the span that began at ``since`` (negative: given back), then take what is wanted as
        far as there is any left below ``most``. Law: what is given to all processes together is never more than most.
        Raises Retryable."""


class Subject(NamedTuple):
    """Whose budget it is. caller: empty for the whole tenant."""

    tenant: str
    caller: str
    span: Span


@dataclass(slots=True)
class _Portion:
    """What this process holds of a budget, or owes it where it is negative."""

    since: datetime | None = None
    left: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    most: Most = (None, None, None)
    used: Amounts = NOTHING
    """By all processes, when it was last asked."""
    empty_until: float = 0.0
    warned: bool = False
    counts: bool = True
    """Tokens and money; a rate is of requests alone."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def lacks(self, needed: Amounts) -> list[int]:
        """Indexes of the amounts that have a limit and are not there."""
        return [
            n
            for n, (most, left, need) in enumerate(zip(self.most, self.left, needed, strict=True))
            if most is not None and need > 0 and left < need
        ]

    def take(self, needed: Amounts, sign: int = 1) -> None:
        for n, need in enumerate(needed):
            self.left[n] -= sign * need

    def owes(self) -> Amounts:
        return Amounts(*(max(0.0, -left) for left in self.left))

    def ratios(self) -> list[float]:
        """Of each budget, how much of it is used; 0 where there is no limit."""
        return [
            0.0 if most is None else used / most if most else 1.0
            for used, most in zip(self.used, self.most, strict=True)
        ]


class Account:
    """One request's. What it spends is charged here, and settled at its end."""

    def __init__(self, taken: Sequence[tuple[_Portion, Amounts]]) -> None:
        """taken: what was reserved of each portion."""
        self._taken = [(portion, amounts, portion.since) for portion, amounts in taken]

    def charge(self, tokens: int, money: float) -> None:
        for portion, _, _ in self._taken:
            if portion.counts:
                portion.take(Amounts(0, tokens, money))

    def close(self, *, refund: bool = False) -> None:
        """What was reserved was charged by now, or is free again. refund: it was not worked on, and does not count."""
        for portion, amounts, since in self._taken:
            if portion.since == since:  # else its day is over
                portion.take(amounts if refund else amounts._replace(requests=0), -1)
        self._taken = []


class Meter:
    """One a process."""

    def __init__(
        self,
        ledger: Ledger,
        quotas: Quotas,
        settings: QuerySettings,
        metrics: QueryMetrics,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._ledger = ledger
        self._quotas = quotas
        self._rate = settings.serve.requests_per_minute
        self._metrics = metrics
        self._clock = clock
        self._portions: dict[Subject, _Portion] = {}
        self._needs = needs(settings)
        self._noting = asyncio.Event()
        self._away: Retryable | None = None
        """Why the ledger could not be asked last, and …"""
        self._away_until = 0.0
        for n, name in enumerate(NAMES):
            for of in ("tenant", "caller"):
                metrics.budget_used.labels(name, of).set_function(partial(self._most_used, n, of))

    async def admit(self, who: Who, kind: Kind) -> Account:
        """Count one more request, and reserve what it usually takes. Raises Problem (429), Retryable."""
        needed = self._needs[kind]
        quota = self._quotas.of(who.tenant)
        name = f"{who.kind}:{who.key or who.principal or ''}"
        of_caller = quota.caller.amounts
        asked: list[tuple[Subject, Most, Amounts]] = [
            (Subject(who.tenant, name, "minute"), (self._rate, None, None), Amounts(1)),
            (Subject(who.tenant, "", "day"), quota.amounts, needed),
        ]
        if any(most is not None for most in of_caller):
            asked.append((Subject(who.tenant, name, "day"), of_caller, needed))
        taken: list[tuple[_Portion, Amounts]] = []
        try:
            for subject, most, need in asked:
                taken.append(await self._take(subject, most, need))
        except BaseException:
            Account(taken).close(refund=True)
            raise
        return Account(taken)

    async def run(self) -> None:
        """Write down what is owed, until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._noting.wait(), NOTE_SECONDS)
            self._noting.clear()
            await self.note()
            now = self._clock()
            self._portions = {
                subject: portion
                for subject, portion in self._portions.items()
                if portion.since is None or portion.lock.locked() or now < portion.since + 2 * SPANS[subject.span]
            }

    async def note(self, *, all_of_it: bool = False) -> None:
        """Write down what is owed; all_of_it: and give back what is held. A Postgres that is away is waited for."""
        for subject, portion in list(self._portions.items()):
            if subject.span != "day":
                continue
            async with portion.lock:
                spent = Amounts(*(-left for left in portion.left)) if all_of_it else portion.owes()
                if not any(spent):
                    continue
                try:
                    await self._use(subject, portion, spent=spent, wanted=NOTHING)
                except PenstockError as error:
                    log.warning("usage_not_recorded", reason=str(error)[:200])
                    return

    async def aclose(self) -> None:
        await self.note(all_of_it=True)

    async def _take(self, subject: Subject, most: Most, needed: Amounts) -> tuple[_Portion, Amounts]:
        """The portion, and what was taken of it: of what has no limit nothing is reserved."""
        portion = self._portions.setdefault(subject, _Portion(counts=subject.span == "day"))
        needed = Amounts(*(need if n == 0 or most[n] is not None else 0.0 for n, need in enumerate(needed)))
        async with portion.lock:
            self._begin(subject, portion, most)
            if lacking := portion.lacks(needed):
                now = asyncio.get_running_loop().time()
                if now >= portion.empty_until:
                    wanted = self._wanted(subject, portion, needed, lacking)
                    if now < self._away_until and self._away is not None:
                        raise self._away.with_traceback(None)
                    try:
                        await self._use(subject, portion, spent=portion.owes(), wanted=wanted)
                    except Retryable as error:  # who queues behind this one's lock need not wait for the same
                        self._away, self._away_until = error, asyncio.get_running_loop().time() + EMPTY_SECONDS
                        raise
                    lacking = portion.lacks(needed)
                    portion.empty_until = now + EMPTY_SECONDS if lacking else 0.0
                if lacking:
                    raise self._exhausted(subject, portion, lacking[0])
            portion.take(needed)
            if any(owed and limit is not None for owed, limit in zip(portion.owes(), portion.most, strict=True)):
                self._noting.set()
            return portion, needed

    def _begin(self, subject: Subject, portion: _Portion, most: Most) -> None:
        """In a new span nothing is held, but for a minute's first portion: who asks rarely is never written down."""
        if portion.most != tuple(most):
            portion.most, portion.empty_until = tuple(most), 0.0
        began = _beginning(subject.span, self._clock())
        if portion.since is None or portion.since < began:
            portion.since, portion.used, portion.warned, portion.empty_until = began, NOTHING, False, 0.0
            portion.left = [self._first(subject, most), 0.0, 0.0]

    def _first(self, subject: Subject, most: Most) -> float:
        return _portion(most[0], PORTION_OF_A_MINUTE) if subject.span == "minute" else 0.0

    def _wanted(self, subject: Subject, portion: _Portion, needed: Amounts, lacking: Sequence[int]) -> Amounts:
        share = PORTION_OF_A_MINUTE if subject.span == "minute" else PORTION_OF_A_DAY
        amounts = [0.0, 0.0, 0.0]
        for n in lacking:
            least = 1.0 if n == 0 else needed[n]
            amounts[n] = max(_portion(portion.most[n], share) if n < 2 else share * (portion.most[n] or 0), least)
            amounts[n] -= max(0.0, portion.left[n])
        return Amounts(*amounts)

    async def _use(self, subject: Subject, portion: _Portion, *, spent: Amounts, wanted: Amounts) -> None:
        most = list(portion.most)
        if subject.span == "minute" and most[0] is not None:
            most[0] -= self._first(subject, most)  # one process alone keeps exactly to the rate
        for n, amount in enumerate(spent):
            portion.left[n] += amount
        try:
            usage = await self._ledger.use(subject, since=portion.since, spent=spent, wanted=wanted, most=most)
        except BaseException:
            for n, amount in enumerate(spent):
                portion.left[n] -= amount
            raise
        portion.since = max(usage.since, portion.since or usage.since)
        for n, amount in enumerate(usage.given):
            portion.left[n] += amount
        if subject.span == "day":
            portion.used = usage.used
            for n, ratio in enumerate(portion.ratios()):
                if ratio >= WARN_RATIO and not portion.warned:
                    portion.warned = True
                    of = "caller" if subject.caller else "tenant"
                    log.warning(
                        "budget_nearly_used", tenant=subject.tenant, of=of, budget=NAMES[n], used=round(ratio, 2)
                    )

    def _most_used(self, n: int, of: str) -> float:
        """Today's share of the budget of which most is used."""
        today = _beginning("day", self._clock())
        return max(
            (
                portion.ratios()[n]
                for subject, portion in self._portions.items()
                if subject.span == "day" and portion.since == today and bool(subject.caller) == (of == "caller")
            ),
            default=0.0,
        )

    def _exhausted(self, subject: Subject, portion: _Portion, n: int) -> Problem:
        now, span = self._clock(), SPANS[subject.span]
        ends = _beginning(subject.span, now) + span
        wait = {"Retry-After": str(max(1, math.ceil((ends - now).total_seconds())))}
        if subject.span == "minute":
            self._metrics.shed.labels("rate").inc()
            return Problem("rate-limited", f"limit of {self._rate} requests per minute exceeded", headers=wait)
        self._metrics.shed.labels("budget").inc()
        whose = "this caller's" if subject.caller else "the tenant's"
        what = "spending budget" if n == 2 else f"budget of {portion.most[n]:,.0f} {NAMES[n]}"
        return Problem(
            "budget-exhausted",
            f"{whose} {what} per day is exhausted; it resets at {ends:%Y-%m-%d %H:%M} UTC",
            headers=wait,
        )


def needs(settings: QuerySettings) -> dict[Kind, Amounts]:
    """What a request of each kind is let in with. Of an answer what found passages and a whole answer take; whole
    documents may take more, which is settled afterwards."""
    chat, rerank = settings.chat, settings.rerank
    search = max(LEAST_MONEY, rerank.price_per_thousand_searches / 1_000 if rerank.url else 0.0)
    if not chat.base_url and not chat.api_key:
        return {"read": Amounts(1), "search": Amounts(1, 0, search), "answer": Amounts(1, 0, search)}
    tokens = chat.context_tokens + chat.answer_tokens
    money = search + chat.money(prompt=chat.context_tokens, answer=chat.answer_tokens)
    return {"read": Amounts(1), "search": Amounts(1, 0, search), "answer": Amounts(1, tokens, money)}


def _portion(most: float | None, share: float) -> float:
    return float(max(1, math.floor((most or 0) * share)))


def _beginning(span: Span, now: datetime) -> datetime:
    start = now.astimezone(UTC).replace(second=0, microsecond=0)
    return start if span == "minute" else start.replace(hour=0, minute=0)


class PostgresLedger:
    """A ``Ledger``: the table query_use, by migration 0040's function."""

    def __init__(self, pool: Pool, seconds: float) -> None:
        """seconds: for one statement."""
        self._pool = pool
        self._seconds = seconds

    async def use(
        self, subject: Subject, *, since: datetime | None, spent: Amounts, wanted: Amounts, most: Most
    ) -> Used:
        async with time_limit(self._seconds, "Postgres"):
            with translated("budgets"):
                async with self._pool.connection() as connection:
                    cursor = await connection.execute(
                        "SELECT began, given, used"
                        " FROM use_budget(%s, %s, %s, %s, %s::float8[], %s::float8[], %s::float8[])",
                        [*subject, since, *(_floats(amounts) for amounts in (spent, wanted, most))],
                    )
                    [[began, given, used]] = await cursor.fetchall()
        return Used(began, Amounts(*given), Amounts(*used))


def _floats(amounts: Most) -> list[float | None]:
    return [None if amount is None else float(amount) for amount in amounts]


@asynccontextmanager
async def open_meter(service: Service, quotas: Quotas) -> AsyncIterator[Meter]:
    """Writes down what is used, and gives back at the end what is held."""
    meter = Meter(PostgresLedger(service.pool, service.budget.ledger), quotas, service.query, service.metrics)
    running = asyncio.create_task(meter.run(), name="budgets")
    try:
        yield meter
    finally:
        await cancel_and_wait([running])
        await meter.aclose()
