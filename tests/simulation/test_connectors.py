"""Defects that the simulation of connectors found, and progress of the simulation while a runner is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from connectors.runner.activity import Activity
from connectors.runner.reconcile import Reconcile
from connectors.runner.rows import Holder
from tests.simulation.play import simulated
from tests.simulation.scheduler import VirtualLoop, use

HOURS = 3_600.0


def run(work: Awaitable[Any]) -> VirtualLoop:
    """On the virtual clock, to its end."""
    loop = VirtualLoop()
    use(loop, 0)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(work)
    finally:
        asyncio.set_event_loop(None)
        loop.end()
    return loop


class _Suspended:
    """Stands for rows of which the first page is read while the process is suspended."""

    holder = Holder("t", "s", 1)

    def __init__(self) -> None:
        self.left = [HOURS * 5]

    async def ledger(self, *_: object) -> list[Any]:
        if self.left:
            await asyncio.sleep(self.left.pop())
        return []

    async def handled(self) -> dict[str, Any]:
        return {}

    async def nothing(self, *_: object) -> list[Any]:
        return []

    async def load(self) -> dict[Any, Any]:
        return {}

    now = find = page = ledger_lacks = published = save_reconciliation = save = mark_repaired = nothing


async def _reconcile_once() -> None:
    rows: Any = _Suspended()
    rows.rows = rows
    reconcile = Reconcile(
        rows, rows, rows, rows, rows, between_pages=lambda: None, read_again=lambda _ids, _groups: None
    )
    reconcile._tables = reconcile._rows = reconcile._stored = rows
    await reconcile.run(frozenset())


def test_a_runner_suspended_for_hours_compares_with_the_ledger_within_minutes() -> None:
    with simulated():
        assert run(_reconcile_once()).time() < HOURS * 5 + 600


def test_a_runner_suspended_for_hours_polls_within_its_interval() -> None:
    began: list[float] = []

    async def changes(_words: frozenset[str]) -> Mapping[str, Any]:
        began.append(asyncio.get_running_loop().time())
        if len(began) == 1:
            activity.trigger()  # an event of the source comes meanwhile
            await asyncio.sleep(HOURS * 5)
        return {}

    async def polled() -> None:
        task = asyncio.create_task(activity.loop())
        while len(began) < 2:
            await asyncio.sleep(1.0)
        task.cancel()

    with simulated():
        loop = VirtualLoop()
        use(loop, 0)
        asyncio.set_event_loop(loop)
        not_paused = asyncio.Event()
        not_paused.set()
        activity = Activity(
            "changes",
            changes,
            every_seconds=150.0,
            attention_seconds=60.0,
            on_done=_ignore,
            not_paused=not_paused,
            rests=True,
        )
        loop.run_until_complete(polled())
        asyncio.set_event_loop(None)
        loop.end()
    assert began[1] < HOURS * 5 + 160


async def _ignore(_asks: list[int], _outcome: Mapping[str, Any]) -> None:
    return None
