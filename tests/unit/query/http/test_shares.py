"""The order of requests: shares of tenants and callers, by the rules of query/limits/fair_queue.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from query.limits.fair_queue import IDLE_SECONDS, OVERCOMMIT_FACTOR, Shares, Ticket

TENANTS, CALLERS = ("acme", "globex", "initech"), ("ann", "bob", "eve")
SEATS, LARGEST = 12, 4


@dataclass
class World:
    """Shares, and what a careful observer knows of them."""

    shares: Shares
    now: float = 0.0
    waiting: list[Ticket] = field(default_factory=list)
    running: list[Ticket] = field(default_factory=list)

    def join(self, tenant: str, caller: str, cost: int = 1) -> Ticket:
        ticket = Ticket(tenant, caller, cost)
        self.waiting.append(ticket)
        turn = self.shares.join(ticket, self.now)
        if turn.refused is not None:
            self.waiting.remove(turn.refused)
        self._started(turn.started)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        (self.running if ticket.started else self.waiting).remove(ticket)
        self._started(self.shares.leave(ticket, self.now).started)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._started(self.shares.advance(self.now).started)

    def _started(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self.waiting.remove(ticket)
            self.running.append(ticket)

    def held(self, tenant: str) -> int:
        return sum(ticket.cost for ticket in self.running if ticket.tenant == tenant)


def world(capacity: int, weights: dict[str, float] | None = None, largest: int = LARGEST) -> World:
    of = weights or {}
    return World(Shares(capacity, waiting=SEATS, largest=largest, weight=lambda tenant: of.get(tenant, 1.0)))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from(TENANTS), st.sampled_from(CALLERS), st.integers(1, LARGEST)),
        st.tuples(st.just("leave"), st.integers(0, 100)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.1, IDLE_SECONDS, 1.0])),
    ),
    max_size=80,
)


def play(of: World, steps: list[tuple]) -> None:  # type: ignore[type-arg]
    for what, *given_ in steps:
        there = of.running + of.waiting
        if what == "join":
            of.join(*given_)
        elif what == "wait":
            of.wait(*given_)
        elif there:
            of.leave(there[given_[0] % len(there)])
        check(of)


def check(of: World) -> None:
    held = sum(ticket.cost for ticket in of.running)
    assert of.shares.held == held
    assert of.shares.waiting == len(of.waiting) <= SEATS
    capacity = of.shares._capacity
    assert held < OVERCOMMIT_FACTOR * capacity + LARGEST
    if of.waiting:
        assert of.running, "somebody waits for nothing"


@given(STEPS, st.integers(2, 20), st.fixed_dictionaries({name: st.floats(0.25, 8) for name in TENANTS}))
def test_slots_are_neither_lost_nor_counted_twice(
    steps: list[tuple],
    capacity: int,
    weights: dict[str, float],  # type: ignore[type-arg]
) -> None:
    of = world(capacity, weights)
    play(of, steps)
    for ticket in [*of.running, *of.waiting]:
        of.leave(ticket)
    assert (of.shares.held, of.shares.waiting) == (0, 0)


@given(STEPS, st.integers(2, 20))
def test_no_slot_stays_empty_while_a_request_waits(steps: list[tuple], capacity: int) -> None:  # type: ignore[type-arg]
    of = world(capacity)
    play(of, steps)
    of.wait(IDLE_SECONDS)
    assert not of.waiting or of.shares.held >= capacity


@given(STEPS, st.integers(2, 20), st.sampled_from(TENANTS), st.sampled_from(CALLERS))
def test_a_waiting_request_is_served_after_a_bounded_number_of_others(
    steps: list[tuple],
    capacity: int,
    tenant: str,
    caller: str,  # type: ignore[type-arg]
) -> None:
    of = world(capacity)
    play(of, steps)
    mine = of.join(tenant, caller, LARGEST)
    before = sum(t.tenant == tenant and t.caller == caller for t in of.waiting) if mine in of.waiting else 0
    ended = 0
    while mine in of.waiting:
        for other in TENANTS:  # all the others ask without end
            for who in CALLERS:
                if (other, who) != (tenant, caller) and len(of.waiting) < SEATS:
                    of.join(other, who, LARGEST)
        of.leave(of.running[0])
        ended += 1
        assert ended <= (before + 1) * LARGEST * len(TENANTS) * len(CALLERS) + OVERCOMMIT_FACTOR * capacity


def test_a_single_caller_may_use_all_slots_of_an_idle_process() -> None:
    of = world(8)
    for _ in range(4):
        of.join("acme", "ann", 4)
    assert of.held("acme") == 8


def test_slots_borrowed_by_one_tenant_do_not_make_another_wait() -> None:
    of = world(8)
    for n in range(10):
        of.join("globex", f"caller-{n}", 4)
    assert of.held("globex") == 8
    of.join("acme", "ann", 4)
    assert of.held("acme") == 4
    of.leave(next(t for t in of.running if t.tenant == "globex"))
    assert of.held("globex") == 4, "it gives back what it had borrowed"
    of.join("acme", "ann", 4)
    assert of.held("acme") == 4, "more than its share is not given while others wait"


def test_a_slot_is_reserved_briefly_for_a_caller_that_returns() -> None:
    of = world(8)
    for n in range(10):
        of.join("globex", f"caller-{n}", 4)
    for _ in range(5):
        mine = of.join("acme", "ann", 4)
        assert mine.started
        of.leave(mine)
        for ticket in [t for t in of.running if t.tenant == "globex"]:
            of.leave(ticket)
            of.join("globex", str(ticket.caller), 4)
        assert of.held("globex") == 4
        of.wait(IDLE_SECONDS / 2)
    assert of.shares.next_advance_at() is not None
    of.wait(IDLE_SECONDS)
    assert of.held("globex") == 8, "whoever does not come back is not waited for"


def test_slots_are_shared_by_the_weights_of_tenants() -> None:
    of = world(12, {"acme": 2.0}, largest=1)
    given_: Counter[str] = Counter()
    for tenant in ("acme", "globex"):
        for caller in CALLERS:
            of.join(tenant, caller)
            of.join(tenant, caller)
    for _ in range(600):
        for tenant in ("acme", "globex"):
            for caller in CALLERS:
                if not any(t.tenant == tenant and t.caller == caller for t in of.waiting):
                    of.join(tenant, caller)
        ended = of.running[0]
        given_[ended.tenant] += 1
        of.leave(ended)
    assert 1.8 < given_["acme"] / given_["globex"] < 2.2


def test_a_full_queue_drops_the_newest_request_of_the_longest_queue() -> None:
    of = world(1, largest=1)
    for _ in range(1 + SEATS):
        of.join("globex", "bot")
    assert len(of.waiting) == SEATS
    newest = of.waiting[-1]
    turn = of.shares.join(Ticket("acme", "ann"), of.now)
    assert (turn.refused, turn.exceeds_share) == (newest, True)


def test_a_full_queue_of_equal_callers_rejects_the_newcomer() -> None:
    of = world(1, largest=1)
    for n in range(1 + SEATS):
        of.join("acme", f"caller-{n}")
    late = Ticket("acme", "late")
    turn = of.shares.join(late, of.now)
    assert (turn.refused, turn.exceeds_share) == (late, False)
