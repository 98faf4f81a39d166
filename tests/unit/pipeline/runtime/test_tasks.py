"""Tasks that were cancelled have ended, also one that missed it; and those that run together end together."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.runtime import tasks


async def test_a_task_that_swallows_its_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_SECONDS", 0.01)
    met = 0

    async def deaf() -> None:
        nonlocal met
        while met < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                met += 1

    async def failing() -> None:
        raise ValueError

    running = [asyncio.create_task(deaf()), asyncio.create_task(failing())]
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.cancel_and_wait(running), 10)
    assert (met, [task.done() for task in running]) == (3, [True, True])


async def test_cancelling_no_tasks_is_not_an_error() -> None:
    await tasks.cancel_and_wait([])


async def test_a_cancelled_task_has_time_for_its_cleanup() -> None:
    order: list[str] = []

    async def orderly() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            order.append("done")

    task = asyncio.create_task(orderly())
    await asyncio.sleep(0)
    await tasks.cancel_and_wait([task])
    assert order == ["done"]


async def test_gather_or_cancel_returns_results_in_order_and_cancels_the_others_on_failure() -> None:
    began: list[str] = []
    left: list[str] = []

    async def work(name: str, seconds: float) -> str:
        began.append(name)
        try:
            await asyncio.sleep(seconds)
        finally:
            left.append(name)
        return name

    async def fails() -> str:
        raise ValueError("no")

    assert await tasks.gather_or_cancel(work("slow", 0.01), work("fast", 0)) == ["slow", "fast"]
    assert began == ["slow", "fast"]
    with pytest.raises(ValueError, match="no"):
        await tasks.gather_or_cancel(work("endless", 3600), fails())
    assert left == ["fast", "slow", "endless"]


async def test_gather_or_cancel_lets_cancelled_tasks_finish_their_cleanup() -> None:
    tidy: list[str] = []

    async def holds() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            tidy.append("put back")

    both = asyncio.create_task(tasks.gather_or_cancel(holds(), asyncio.sleep(3600)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both
    assert tidy == ["put back"]
