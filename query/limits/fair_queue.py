"""Who goes next: places shared out fairly among tenants, and a tenant's among its callers. Pure: it has no clock.

A place is held from the start of a request to its end; what a request holds is its cost. The rules:

1. A share is the capacity by weight among the tenants that are there, and a tenant's evenly among its callers. Who is
   there: whoever holds a place, waits, or had a place within the last KEEP_SECONDS.
2. Whoever holds less than its share starts, as long as all others hold no more than theirs; what somebody holds beyond
   its share is borrowed, and does not keep the others waiting (in all at most twice the capacity is held).
3. Whoever holds its share or more may borrow what is left of the capacity, but for one place for each caller that had
   one a moment ago and will probably ask again (at most half of the capacity). So an idle machine is one caller's.
4. Among those who may start, the one that has been given least goes first (start-time fair queueing: Goyal, Vin and
   Cheng, SIGCOMM 1996), first by tenant, then by caller; one caller's requests go in the order of their arrival.
5. Who finds the waiting room full takes the seat of the newest request of the longest queue (McKenney, "Stochastic
   Fairness Queueing", INFOCOM 1990), unless that queue is its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

KEEP_SECONDS = 0.25
"""A program that waits for one answer and then asks again has asked by then."""
OVERCOMMIT = 2
"""So many times the capacity are held at most, while what was borrowed is not given back yet."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request for a place."""

    tenant: str
    caller: Hashable
    cost: int = 1
    started: bool = False


@dataclass(slots=True)
class _Caller:
    waiting: deque[Ticket] = field(default_factory=deque)
    held: int = 0
    running: int = 0
    finish: float = 0.0
    """Virtual time at which what it was given so far ends."""
    seen: float = -inf
    """When it last had a place."""

    @property
    def demand(self) -> int:
        return self.running + len(self.waiting)


@dataclass(slots=True)
class _Tenant:
    weight: float
    callers: dict[Hashable, _Caller] = field(default_factory=dict)
    finish: float = 0.0
    virtual: float = 0.0
    """Among its callers."""

    @property
    def held(self) -> int:
        return sum(caller.held for caller in self.callers.values())

    @property
    def waiting(self) -> int:
        return sum(len(caller.waiting) for caller in self.callers.values())

    @property
    def demand(self) -> int:
        return sum(caller.demand for caller in self.callers.values())


class Turn(NamedTuple):
    started: list[Ticket]
    refused: Ticket | None = None
    """Sent away, for the waiting room is full …"""
    over: bool = False
    """… and it has more than its share there."""


class Shares:
    """The places of one resource. Times are any clock's that does not go back, in seconds."""

    def __init__(
        self, capacity: int, *, waiting: int, largest: int = 1, weight: Callable[[str], float] = lambda _: 1.0
    ) -> None:
        """waiting: seats of the waiting room. largest: the highest cost of a request; one such request is nobody's
        borrowing. weight: a tenant's, more than 0."""
        self._capacity = capacity
        self._seats = waiting
        self._largest = largest
        self._weight = weight
        self._tenants: dict[str, _Tenant] = {}
        self._virtual = 0.0

    @property
    def held(self) -> int:
        return sum(tenant.held for tenant in self._tenants.values())

    @property
    def waiting(self) -> int:
        return sum(tenant.waiting for tenant in self._tenants.values())

    def join(self, ticket: Ticket, now: float) -> Turn:
        """Ask for a place. The ticket is started, or waits, or is the one that is refused."""
        self._forget(now)
        tenant = self._tenants.setdefault(ticket.tenant, _Tenant(1.0))
        tenant.weight = self._weight(ticket.tenant)
        tenant.callers.setdefault(ticket.caller, _Caller()).waiting.append(ticket)
        started = self._start(now)
        if self.waiting <= self._seats:
            return Turn(started)
        refused = self._last_of_the_longest(ticket)
        over = self.is_over(refused)
        self._tenants[refused.tenant].callers[refused.caller].waiting.remove(refused)
        self._forget(now)
        return Turn(started, refused, over)

    def leave(self, ticket: Ticket, now: float) -> Turn:
        """Give a place back, or wait no more. A ticket that has left already may leave again."""
        tenant = self._tenants.get(ticket.tenant)
        caller = tenant.callers.get(ticket.caller) if tenant else None
        if caller is None:
            return Turn([])
        if ticket.started:
            ticket.started = False
            caller.held -= ticket.cost
            caller.running -= 1
            caller.seen = now
        elif ticket in caller.waiting:
            caller.waiting.remove(ticket)
        return self.look(now)

    def look(self, now: float) -> Turn:
        """Start whoever may start because time has passed."""
        self._forget(now)
        return Turn(self._start(now))

    def look_at(self) -> float | None:
        """When somebody who waits may be let in though nobody leaves."""
        if not self.waiting:
            return None
        return min((c.seen + KEEP_SECONDS for _, c in self._callers() if not c.demand), default=None)

    def is_over(self, ticket: Ticket) -> bool:
        """Whether its tenant asks for more than the others do on average, or its caller for more than its tenant's
        other callers do. Nobody is where all ask for the same."""
        tenant = self._tenants.get(ticket.tenant)
        caller = tenant.callers.get(ticket.caller) if tenant else None
        if tenant is None or caller is None:
            return False
        tenants = [t for t in self._tenants.values() if t.demand]
        average = sum(t.demand for t in tenants) / max(1e-9, sum(t.weight for t in tenants))
        callers = [c for c in tenant.callers.values() if c.demand]
        return (len(tenants) > 1 and tenant.demand / tenant.weight > average) or (
            caller.demand * len(callers) > tenant.demand
        )

    def _callers(self) -> Iterator[tuple[_Tenant, _Caller]]:
        return ((tenant, caller) for tenant in self._tenants.values() for caller in tenant.callers.values())

    def _start(self, now: float) -> list[Ticket]:
        started = []
        while (waiting := self._next()) is not None:
            tenant, caller = waiting
            ticket = caller.waiting.popleft()
            ticket.started = True
            self._virtual = max(self._virtual, tenant.finish)
            tenant.finish = self._virtual + ticket.cost / tenant.weight
            tenant.virtual = max(tenant.virtual, caller.finish)
            caller.finish = tenant.virtual + ticket.cost
            caller.held += ticket.cost
            caller.running += 1
            caller.seen = now
            started.append(ticket)
        return started

    def _next(self) -> tuple[_Tenant, _Caller] | None:
        waiting = [(tenant, caller) for tenant, caller in self._callers() if caller.waiting]
        if not waiting:
            return None
        held, borrowed, entitled = self.held, 0.0, []
        weights = sum(tenant.weight for tenant in self._tenants.values())
        for tenant in self._tenants.values():
            share = self._capacity * tenant.weight / weights
            of_each = share / len(tenant.callers)
            own = self._largest * ceil(of_each / self._largest)  # what is rounded up is not borrowed
            by_callers = sum(max(0.0, caller.held - own) for caller in tenant.callers.values())
            borrowed += max(by_callers, tenant.held - max(share, self._largest))
            if tenant.held - by_callers < share:
                entitled += [(tenant, c) for c in tenant.callers.values() if c.waiting and c.held < of_each]
        if entitled and held - borrowed < self._capacity and held < OVERCOMMIT * self._capacity:
            return min(entitled, key=_order)
        kept = self._largest * sum(not caller.demand for _, caller in self._callers())
        if held + min(kept, self._capacity // 2) < self._capacity:
            return min(waiting, key=_order)
        return None

    def _last_of_the_longest(self, newcomer: Ticket) -> Ticket:
        """Of equally long queues the newcomer's own."""
        tenant = max(
            self._tenants.items(), key=lambda item: (item[1].waiting / item[1].weight, item[0] == newcomer.tenant)
        )[1]
        caller = max(tenant.callers.items(), key=lambda item: (len(item[1].waiting), item[0] == newcomer.caller))[1]
        return caller.waiting[-1]

    def _forget(self, now: float) -> None:
        """Those who have nothing here and did not come back in time."""
        for name, tenant in list(self._tenants.items()):
            for id_, caller in list(tenant.callers.items()):
                if not caller.demand and now >= caller.seen + KEEP_SECONDS:  # as look_at() says it
                    del tenant.callers[id_]
            if not tenant.callers:
                del self._tenants[name]


def _order(of: tuple[_Tenant, _Caller]) -> tuple[float, float]:
    tenant, caller = of
    return tenant.finish, caller.finish
