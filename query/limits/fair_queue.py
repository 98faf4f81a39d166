"""Fair assignment of slots to tenants, and of a tenant's slots to its callers. Pure: it has no clock.

A request holds capacity, its cost, from its start to its end. The rules:

1. The capacity is divided by weight among the present tenants, and a tenant's share evenly among its present callers. A
   caller is present if it holds capacity, waits, or held capacity within the last IDLE_SECONDS.
2. A caller that holds less than its share starts as long as the others hold no more than theirs. Capacity beyond a
   share is borrowed and does not make others wait (in total, at most OVERCOMMIT_FACTOR times the capacity is held).
3. A caller that holds its share or more may borrow unused capacity, except for one slot for each present caller without
   requests, which will probably send the next one (at most half of the capacity). One caller can thus use an otherwise
   idle machine.
4. Among the callers that may start, the one that has received least is first (start-time fair queueing: Goyal, Vin and
   Cheng, SIGCOMM 1996), by tenant and then by caller; requests of one caller start in the order of their arrival.
5. A request that meets a full queue replaces the newest request of the longest queue (McKenney, "Stochastic Fairness
   Queueing", INFOCOM 1990), unless that queue is its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

IDLE_SECONDS = 0.25
"""How long a caller without requests stays present: a program that sends requests one after another sends its next
request within this time."""
OVERCOMMIT_FACTOR = 2
"""The most capacity that is held, as a multiple, until borrowed capacity is returned."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request for a slot."""

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
    """The virtual time at which the capacity that it has received so far ends."""
    seen: float = -inf
    """When it last held a slot."""

    @property
    def demand(self) -> int:
        return self.running + len(self.waiting)


@dataclass(slots=True)
class _Tenant:
    weight: float
    callers: dict[Hashable, _Caller] = field(default_factory=dict)
    finish: float = 0.0
    virtual: float = 0.0
    """The virtual time among its callers."""

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
    """The request that is refused because the queue is full."""
    exceeds_share: bool = False
    """Whether the refused request's tenant or caller has more than its share of the queue."""


class Shares:
    """The slots of one resource. Times are in seconds of any monotonic clock."""

    def __init__(self, capacity: int, *, waiting: int, largest: int = 1, weight: Callable[[str], float]) -> None:
        """waiting: the length of the queue. largest: the highest cost of a request; one request of this cost is never
        borrowed capacity. weight: returns a tenant's weight, more than 0."""
        self._capacity = capacity
        self._queue_length = waiting
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
        """Request a slot. The ticket starts, waits, or is refused."""
        self._forget(now)
        tenant = self._tenants.setdefault(ticket.tenant, _Tenant(1.0))
        tenant.weight = self._weight(ticket.tenant)
        tenant.callers.setdefault(ticket.caller, _Caller()).waiting.append(ticket)
        started = self._start(now)
        if self.waiting <= self._queue_length:
            return Turn(started)
        refused = self._last_of_longest_queue(ticket)
        exceeds_share = self.exceeds_share(refused)
        self._tenants[refused.tenant].callers[refused.caller].waiting.remove(refused)
        self._forget(now)
        return Turn(started, refused, exceeds_share)

    def leave(self, ticket: Ticket, now: float) -> Turn:
        """Release a slot, or stop waiting. A ticket that has left already may leave again."""
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
        return self.advance(now)

    def advance(self, now: float) -> Turn:
        """Start the tickets that may start because time has passed."""
        self._forget(now)
        return Turn(self._start(now))

    def next_advance_at(self) -> float | None:
        """When a waiting ticket may start although no other leaves; None if never."""
        if not self.waiting:
            return None
        return min((c.seen + IDLE_SECONDS for _, c in self._callers() if not c.demand), default=None)

    def exceeds_share(self, ticket: Ticket) -> bool:
        """Whether its tenant's demand exceeds the average of the present tenants, or its caller's demand that of the
        tenant's other callers. With equal demands, none does."""
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
            caller_share = share / len(tenant.callers)
            own = self._largest * ceil(caller_share / self._largest)  # what is rounded up is not borrowed
            by_callers = sum(max(0.0, caller.held - own) for caller in tenant.callers.values())
            borrowed += max(by_callers, tenant.held - max(share, self._largest))
            if tenant.held - by_callers < share:
                entitled += [(tenant, c) for c in tenant.callers.values() if c.waiting and c.held < caller_share]
        if entitled and held - borrowed < self._capacity and held < OVERCOMMIT_FACTOR * self._capacity:
            return min(entitled, key=_order)
        reserved = self._largest * sum(not caller.demand for _, caller in self._callers())
        if held + min(reserved, self._capacity // 2) < self._capacity:
            return min(waiting, key=_order)
        return None

    def _last_of_longest_queue(self, newcomer: Ticket) -> Ticket:
        """The newest ticket of the longest queue; among equally long queues, the newcomer's own."""
        tenant = max(
            self._tenants.items(), key=lambda item: (item[1].waiting / item[1].weight, item[0] == newcomer.tenant)
        )[1]
        caller = max(tenant.callers.items(), key=lambda item: (len(item[1].waiting), item[0] == newcomer.caller))[1]
        return caller.waiting[-1]

    def _forget(self, now: float) -> None:
        """Remove callers that have no requests and were not active within IDLE_SECONDS."""
        for name, tenant in list(self._tenants.items()):
            for id_, caller in list(tenant.callers.items()):
                if not caller.demand and now >= caller.seen + IDLE_SECONDS:  # the same expression as in next_advance_at
                    del tenant.callers[id_]
            if not tenant.callers:
                del self._tenants[name]


def _order(of: tuple[_Tenant, _Caller]) -> tuple[float, float]:
    tenant, caller = of
    return tenant.finish, caller.finish
