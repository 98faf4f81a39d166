"""When a source's activities run again."""

from __future__ import annotations

import asyncio
import gc
import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from connectors.runner import activity
from connectors.runner.activity import Activity, pause_seconds
from pipeline.core.errors import Retryable
from pipeline.runtime.tasks import gather_or_cancel


async def test_an_activity_runs_again_after_one_of_its_concurrent_reads_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The activity ended without a word, and the source stood still until the worker was started anew."""
    monkeypatch.setattr(activity, "RETRY_BASE_SECONDS", 0.0)
    runs, answered = 0, asyncio.Event()

    async def away() -> None:
        await asyncio.sleep(0)
        if runs == 1:
            raise Retryable("away")

    async def run(_: frozenset[str]) -> Mapping[str, Any]:
        nonlocal runs
        runs += 1
        await gather_or_cancel(away(), asyncio.sleep(0))
        return {}

    async def done(_: list[int], __: Mapping[str, Any]) -> None:
        answered.set()

    going = asyncio.Event()
    going.set()
    one = Activity("events", run, every_seconds=None, attention_seconds=1.0, on_done=done, not_paused=going)
    task = asyncio.create_task(one.loop())
    one.trigger(command=1)
    waiting = asyncio.create_task(answered.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert not task.done()
    assert runs == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failed_run_leaves_only_what_it_has_not_finished_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "RETRY_BASE_SECONDS", 0.0)
    runs: list[frozenset[str]] = []
    answered = asyncio.Event()

    async def run(arguments: frozenset[str]) -> None:
        runs.append(arguments)
        if len(runs) == 1:
            events.finish(["a", "b"])
            events.trigger("b")  # it has changed once more
            raise Retryable("away")

    async def done(_: list[int], __: Mapping[str, Any]) -> None:
        answered.set()

    going = asyncio.Event()
    going.set()
    events = Activity("events", run, every_seconds=None, attention_seconds=1.0, on_done=done, not_paused=going)
    task = asyncio.create_task(events.loop())
    events.trigger("a", "b", "c", command=1)
    await asyncio.wait_for(answered.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runs == [frozenset("abc"), frozenset("bc")]


async def test_an_activity_cancelled_before_its_first_run_leaves_no_unawaited_coroutine() -> None:
    async def run(words: frozenset[str]) -> Mapping[str, Any]:
        raise AssertionError("never started")

    async def done(_asks: list[int], _outcome: Mapping[str, Any]) -> None: ...

    goes_on = asyncio.Event()
    goes_on.set()
    activity = Activity("events", run, every_seconds=None, attention_seconds=1.0, on_done=done, not_paused=goes_on)
    loop = asyncio.create_task(activity.loop())
    await asyncio.sleep(0)
    activity.trigger("first", command=1)
    asyncio.get_running_loop().call_soon(loop.cancel)  # after the run's task was made, before it starts
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(asyncio.CancelledError):
            await loop
        del loop, activity
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


async def test_access_grows_old_while_a_part_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alert about old access rights has to fire: nobody notices who loses access in a space that cannot be read."""
    moments = map(str, itertools.count())
    monkeypatch.setattr(activity, "_now", lambda: next(moments))
    set_aside, finished = 0, asyncio.Queue[None]()

    async def run(_: frozenset[str]) -> Mapping[str, Any]:
        return {"listed": 3, "set_aside": set_aside}

    async def done(_: list[int], __: Mapping[str, Any]) -> None:
        finished.put_nowait(None)

    going = asyncio.Event()
    going.set()
    sweep = Activity("sweep", run, every_seconds=None, attention_seconds=1.0, on_done=done, not_paused=going)
    task = asyncio.create_task(sweep.loop())

    async def last_success(command: int) -> str | None:
        sweep.trigger(command=command)
        await finished.get()
        while sweep.status.state != "idle":
            await asyncio.sleep(0)
        return sweep.status.succeeded_at

    complete = await last_success(1)
    set_aside = 1
    assert await last_success(2) == complete
    set_aside = 0
    assert await last_success(3) != complete
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("run", "pause"), [(0.0, 150.0), (50.0, 100.0), (75.0, 75.0), (128.0, 75.0), (150.0, 75.0), (400.0, 75.0)]
)
def test_an_interval_counts_from_one_beginning_to_the_next(run: float, pause: float) -> None:
    """A sweep of a minute and a half was followed by a whole interval: a withdrawn right was as old as both."""
    assert pause_seconds(150.0, after=run) == pause
