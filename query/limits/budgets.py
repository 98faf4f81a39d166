"""Daily budgets and rates per minute across all processes of the query service (docs/adr/0051-shares.md).

Usage is stored in Postgres. A process takes a portion of a budget in advance, a hundredth, and requests the next one
when that is used up. It therefore writes only once in many requests, and all processes together never hold more than
the budget. Tokens and money, which are known only afterwards, are reserved by their typical use and settled at the end.
When a process stops, it returns what it holds, and no process can return anything else.
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
from uuid import uuid4

import structlog

from pipeline.core.errors import PenstockError, Retryable
from pipeline.runtime.tasks import cancel_and_wait, time_limit
from pipeline.stores.postgres import Pool, translated
from query.auth.identity import Identity
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
RECORD_SECONDS = 15.0
"""The interval of recording use without a limit or beyond a portion, which a killed process may lose."""
RETRY_SECONDS = 1.0
"""The shortest time between two requests to Postgres for an exhausted budget or during an outage."""
WARN_RATIO = 0.8
IDLE = timedelta(minutes=10)
"""After this time without a request, a process gives back what it holds of a caller's budget, and forgets the caller:
a service may ask for any number of people."""
RATES_OF_A_SERVICE = 20
"""The rate of all people together for whom a service asks, in rates of one: it may name any number of people."""
STORED_BYTES_OF_A_REQUEST = 8_192
"""A request that stores more counts as one request for each of these towards the rate of its caller (ADR 119). The
usual ones store less: a search with a hundred results 5.5 kB."""
MIN_MONEY = 1e-6
"""The least money that must be left for a search."""


class Amounts(NamedTuple):
    requests: float = 0.0
    tokens: float = 0.0
    money: float = 0.0


NO_AMOUNTS = Amounts()
Ceilings = Sequence[float | None]


class BudgetUsage(NamedTuple):
    since: datetime
    granted: Amounts
    used: Amounts
    """The use by all processes, including their portions."""


class Ledger(Protocol):
    """The shared account of all processes."""

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
        """Add what was spent in the span that began at ``since`` (negative: returned), then grant what is requested as
        far as it stays below ``ceilings``. holding: the part of earlier grants that this process still holds; only that
        can be returned later. Laws: all processes together are never granted more than the ceilings, and no process
        returns more than it holds. Raises Retryable."""


class Subject(NamedTuple):
    """The owner of a budget. caller: empty for the whole tenant."""

    tenant: str
    caller: str
    span: Span


@dataclass(slots=True)
class _Portion:
    """The part of a budget that this process holds; negative amounts are owed to it."""

    since: datetime | None = None
    left: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    reserved: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """The amounts that accounts have taken out of ``left`` until they are closed."""
    ceilings: Ceilings = (None, None, None)
    used: Amounts = NO_AMOUNTS
    """The use by all processes, as of the last request to Postgres."""
    empty_until: float = 0.0
    used_at: datetime | None = None
    """The time of the last request."""
    warned: bool = False
    counts: bool = True
    """Whether tokens and money are counted; a rate counts only requests."""
    extra: float = 0.0
    """The requests of this span, and owed from the one before, that stand for stored bytes."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def lacks(self, needed: Amounts) -> list[int]:
        """The indexes of the limited amounts that are not available."""
        return [
            n
            for n, (ceilings, left, need) in enumerate(zip(self.ceilings, self.left, needed, strict=True))
            if ceilings is not None and need > 0 and left < need
        ]

    def charge(self, amounts: Amounts) -> None:
        for n, amount in enumerate(amounts):
            self.left[n] -= amount

    def reserve(self, amounts: Amounts) -> None:
        for n, amount in enumerate(amounts):
            self.left[n] -= amount
            self.reserved[n] += amount

    def release(self, amounts: Amounts, *, used: Amounts) -> None:
        """End a reservation, of which ``used`` is not available again."""
        for n, (amount, gone) in enumerate(zip(amounts, used, strict=True)):
            self.left[n] += amount - gone
            self.reserved[n] -= amount

    def charge_extra(self, requests: float) -> None:
        self.left[0] -= requests
        self.extra += requests

    def spans(self) -> float:
        """How many spans it is kept for: at least until nothing is owed any more for stored bytes."""
        return 2 + self.extra / (self.ceilings[0] or 1.0)

    def begin(self, since: datetime) -> None:
        self.since, self.used, self.warned, self.empty_until = since, NO_AMOUNTS, False, 0.0
        self.left, self.reserved, self.extra = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0.0

    def owes(self) -> Amounts:
        return Amounts(*(max(0.0, -left) for left in self.left))

    def holding(self) -> Amounts:
        """The part of its grants that this process still holds. Reservations are included: most of them return."""
        return Amounts(*(max(0.0, left + held) for left, held in zip(self.left, self.reserved, strict=True)))

    def ratios(self) -> list[float]:
        """The used share of each budget; 0 without a limit."""
        return [
            0.0 if ceilings is None else used / ceilings if ceilings else 1.0
            for used, ceilings in zip(self.used, self.ceilings, strict=True)
        ]


class Account:
    """The account of one request, to which its use is charged; it is settled at the end. Work that the request
    began, and that other requests wait for too, is charged to it even if its client has left: leaving early does not
    make it free."""

    def __init__(self, reserved: Sequence[tuple[_Portion, Amounts]]) -> None:
        """reserved: the amounts that were reserved of each portion."""
        self._reserved = [(portion, amounts, portion.since) for portion, amounts in reserved]
        self._portions = [portion for portion, _ in reserved]
        self._stored = 0

    def charge(self, tokens: int, money: float, stored: int = 0) -> None:
        before, self._stored = self._extra_requests(), self._stored + stored
        for portion in self._portions:
            if portion.counts:
                portion.charge(Amounts(0, tokens, money))
            else:
                portion.charge_extra(self._extra_requests() - before)

    def _extra_requests(self) -> int:
        return max(0, math.ceil(self._stored / STORED_BYTES_OF_A_REQUEST) - 1)

    def close(self, *, refund: bool = False) -> None:
        """Return what was reserved, because actual use has been charged. refund: the request did not run and does not
        count."""
        for portion, amounts, since in self._reserved:
            if portion.since == since:  # else its span has ended
                portion.release(amounts, used=NO_AMOUNTS if refund else Amounts(amounts.requests))
        self._reserved = []


class Meter:
    """The budgets of a process."""

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
        self._typical_use = typical_use(settings)
        self._record_now = asyncio.Event()
        self._outage: Retryable | None = None
        """The last error of the ledger, which is raised again until ``_outage_until``."""
        self._outage_until = 0.0
        for n, name in enumerate(NAMES):
            for of in ("tenant", "caller"):
                metrics.budget_used.labels(name, of).set_function(partial(self._highest_ratio, n, of))

    async def admit(self, identity: Identity, kind: Kind) -> Account:
        """Count a request and reserve its typical use. Raises Problem (429) and Retryable."""
        needed = self._typical_use[kind]
        quota = self._quotas.of(identity.tenant)
        name = service = f"{identity.kind}:{identity.key or identity.principal or ''}"
        if identity.kind == "delegated":  # one of a service's people does not use up what the others have
            name += f":{identity.principal}"
        of_caller = quota.caller.amounts
        budgets: list[tuple[Subject, Ceilings, Amounts]] = [
            (Subject(identity.tenant, name, "minute"), (self._rate, None, None), Amounts(1)),
            (Subject(identity.tenant, "", "day"), quota.amounts, needed),
        ]
        if name != service:  # first, so that a person for whom it may not ask now takes no memory
            most = float(RATES_OF_A_SERVICE * self._rate)
            budgets.insert(0, (Subject(identity.tenant, service, "minute"), (most, None, None), Amounts(1)))
        if any(ceilings is not None for ceilings in of_caller):
            budgets.append((Subject(identity.tenant, name, "day"), of_caller, needed))
        reserved: list[tuple[_Portion, Amounts]] = []
        try:
            for subject, ceilings, need in budgets:
                reserved.append(await self._take(subject, ceilings, need))
        except BaseException:
            Account(reserved).close(refund=True)
            raise
        return Account(reserved)

    async def run(self) -> None:
        """Record use in the ledger until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._record_now.wait(), RECORD_SECONDS)
            self._record_now.clear()
            await self.record_use()
            now = self._clock()
            self._portions = {
                subject: portion
                for subject, portion in self._portions.items()
                if portion.since is None
                or portion.lock.locked()
                or (
                    now < portion.since + portion.spans() * SPANS[subject.span]
                    and not self._is_over(subject, portion, now)
                )
            }

    def _is_over(self, subject: Subject, portion: _Portion, now: datetime) -> bool:
        """Whether this is the portion of an idle caller that holds nothing, is owed nothing and shows nobody that a
        budget is nearly used."""
        return self._is_idle(subject, portion, now) and not any((*portion.left, *portion.reserved))

    def _is_idle(self, subject: Subject, portion: _Portion, now: datetime) -> bool:
        is_callers = bool(subject.caller) and subject.span == "day"
        was_used = portion.used_at is not None and now < portion.used_at + IDLE
        return is_callers and not was_used and max(portion.ratios()) < WARN_RATIO

    async def record_use(self, *, all_of_it: bool = False) -> None:
        """Record what is owed to the ledger; all_of_it: also return what is held, as what idle callers hold. An outage
        only delays it."""
        now = self._clock()
        for subject, portion in list(self._portions.items()):
            if subject.span != "day":
                continue
            async with portion.lock:
                returns = all_of_it or self._is_idle(subject, portion, now)
                spent = Amounts(*(-left for left in portion.left)) if returns else portion.owes()
                if not any(spent):
                    continue
                try:
                    await self._use(subject, portion, spent=spent, requested=NO_AMOUNTS)
                except PenstockError as error:
                    log.warning("usage_not_recorded", reason=str(error)[:200])
                    return

    async def aclose(self) -> None:
        await self.record_use(all_of_it=True)

    async def _take(self, subject: Subject, ceilings: Ceilings, needed: Amounts) -> tuple[_Portion, Amounts]:
        """The portion, and the amounts that were reserved of it; nothing is reserved of an amount without a limit."""
        portion = self._portions.setdefault(subject, _Portion(counts=subject.span == "day"))
        portion.used_at = self._clock()
        needed = Amounts(*(need if n == 0 or ceilings[n] is not None else 0.0 for n, need in enumerate(needed)))
        async with portion.lock:
            self._begin(subject, portion, ceilings)
            while lacking := portion.lacks(needed):
                now = asyncio.get_running_loop().time()
                if now < portion.empty_until:
                    raise self._exhausted(subject, portion, lacking[0])
                requested = self._request(subject, portion, needed, lacking)
                if now < self._outage_until and self._outage is not None:
                    raise self._outage.with_traceback(None)
                try:
                    granted = await self._use(subject, portion, spent=portion.owes(), requested=requested)
                except Retryable as error:  # requests waiting for the lock fail at once
                    self._outage, self._outage_until = error, asyncio.get_running_loop().time() + RETRY_SECONDS
                    raise
                # Whole grants, and too little all the same: others were charged in the meantime.
                short = any(part < whole for part, whole in zip(granted, requested, strict=True))
                portion.empty_until = now + RETRY_SECONDS if short and portion.lacks(needed) else 0.0
            portion.reserve(needed)
            if any(owed and limit is not None for owed, limit in zip(portion.owes(), portion.ceilings, strict=True)):
                self._record_now.set()
            return portion, needed

    def _begin(self, subject: Subject, portion: _Portion, ceilings: Ceilings) -> None:
        """Begin a new span. It starts with nothing but, for a rate, a first portion, so that rare callers cause no
        writes."""
        if portion.ceilings != tuple(ceilings):
            portion.ceilings, portion.empty_until = tuple(ceilings), 0.0
        began = _beginning(subject.span, self._clock())
        if portion.since is None or portion.since < began:
            # A few large requests at once may store more than a span admits.
            spans = 0 if portion.since is None else (began - portion.since) / SPANS[subject.span]
            owed = max(0.0, portion.extra - spans * (ceilings[0] or 0.0))
            portion.begin(began)
            portion.left[0] = self._first(subject, ceilings)
            portion.charge_extra(owed)

    def _first(self, subject: Subject, ceilings: Ceilings) -> float:
        return _portion(ceilings[0], PORTION_OF_A_MINUTE) if subject.span == "minute" else 0.0

    def _request(self, subject: Subject, portion: _Portion, needed: Amounts, lacking: Sequence[int]) -> Amounts:
        share = PORTION_OF_A_MINUTE if subject.span == "minute" else PORTION_OF_A_DAY
        amounts = [0.0, 0.0, 0.0]
        for n in lacking:
            least = 1.0 if n == 0 else needed[n]
            amounts[n] = max(
                _portion(portion.ceilings[n], share) if n < 2 else share * (portion.ceilings[n] or 0), least
            )
            amounts[n] -= max(0.0, portion.left[n])
        return Amounts(*amounts)

    async def _use(self, subject: Subject, portion: _Portion, *, spent: Amounts, requested: Amounts) -> Amounts:
        """Report and request; returns what was granted."""
        ceilings = list(portion.ceilings)
        if subject.span == "minute" and ceilings[0] is not None:
            ceilings[0] -= self._first(subject, ceilings)  # so that a single process keeps exactly to the rate
        for n, amount in enumerate(spent):
            portion.left[n] += amount
        try:
            usage = await self._ledger.use(
                subject,
                since=portion.since,
                spent=spent,
                holding=portion.holding(),
                requested=requested,
                ceilings=ceilings,
            )
        except BaseException:
            for n, amount in enumerate(spent):
                portion.left[n] -= amount
            raise
        if portion.since is None or portion.since < usage.since:  # the server's clock is ahead
            portion.since, portion.reserved = usage.since, [0.0, 0.0, 0.0]
        for n, amount in enumerate(usage.granted):
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
        return usage.granted

    def _highest_ratio(self, n: int, of: str) -> float:
        """The used share of today's most used budget."""
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
        # Beyond the rate of a minute, what was stored is owed in the next ones.
        owed = max(0.0, portion.extra + 1 - (portion.ceilings[n] or 0.0))
        spans = max(1, math.ceil(owed / (portion.ceilings[n] or 1.0)))
        ends = _beginning(subject.span, now) + spans * span
        wait = {"Retry-After": str(max(1, math.ceil((ends - now).total_seconds())))}
        if subject.span == "minute":
            self._metrics.shed.labels("rate").inc()
            most = f"{portion.ceilings[n]:.0f}"
            return Problem("rate-limited", f"limit of {most} requests per minute exceeded", headers=wait)
        self._metrics.shed.labels("budget").inc()
        whose = "this caller's" if subject.caller else "the tenant's"
        what = "spending budget" if n == 2 else f"budget of {portion.ceilings[n]:,.0f} {NAMES[n]}"
        return Problem(
            "budget-exhausted",
            f"{whose} {what} per day is exhausted; it resets at {ends:%Y-%m-%d %H:%M} UTC",
            headers=wait,
        )


def typical_use(settings: QuerySettings) -> dict[Kind, Amounts]:
    """The typical use of a request of each kind, which is reserved. An answer reserves retrieved passages and a whole
    answer; whole documents may use more, which is settled afterwards."""
    chat, rerank = settings.chat, settings.rerank
    search = max(MIN_MONEY, rerank.price_per_thousand_searches / 1_000 if rerank.url else 0.0)
    if not chat.base_url and not chat.api_key:
        return {"read": Amounts(1), "search": Amounts(1, 0, search), "answer": Amounts(1, 0, search)}
    tokens = chat.context_tokens + chat.answer_tokens
    money = search + chat.money(prompt=chat.context_tokens, answer=chat.answer_tokens)
    return {"read": Amounts(1), "search": Amounts(1, 0, search), "answer": Amounts(1, tokens, money)}


def _portion(ceilings: float | None, share: float) -> float:
    return float(max(1, math.floor((ceilings or 0) * share)))


def _beginning(span: Span, now: datetime) -> datetime:
    start = now.astimezone(UTC).replace(second=0, microsecond=0)
    return start if span == "minute" else start.replace(hour=0, minute=0)


class PostgresLedger:
    """A ``Ledger`` in the table query_use, through the function of migration 0049."""

    def __init__(self, pool: Pool, seconds: float) -> None:
        """seconds: the time limit of a statement."""
        self._pool = pool
        self._seconds = seconds
        self._secret = uuid4()
        """Known to this process alone: with it, it returns what it was granted. Postgres stores a digest."""

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
        async with time_limit(self._seconds, "Postgres"):
            with translated("budgets"):
                async with self._pool.connection() as connection:
                    cursor = await connection.execute(
                        "SELECT began, given, used"
                        " FROM settle_budget("
                        "%s, %s, %s, %s, %s, %s::float8[], %s::float8[], %s::float8[], %s::float8[])",
                        [*subject, self._secret, since, *map(_floats, (spent, holding, requested, ceilings))],
                    )
                    [[began, granted, used]] = await cursor.fetchall()
        return BudgetUsage(began, Amounts(*granted), Amounts(*used))


def _floats(amounts: Ceilings) -> list[float | None]:
    return [None if amount is None else float(amount) for amount in amounts]


@asynccontextmanager
async def open_meter(service: Service, quotas: Quotas) -> AsyncIterator[Meter]:
    """A meter that records use in the background and at the end returns what it holds."""
    meter = Meter(PostgresLedger(service.pool, service.budget.ledger), quotas, service.query, service.metrics)
    running = asyncio.create_task(meter.run(), name="budgets")
    try:
        yield meter
    finally:
        await cancel_and_wait([running])
        await meter.aclose()
