"""``penstock connector run``: here, or by the worker that holds the instance; asked for in the same way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

from cli.output import progress_bars, stderr
from connectors.operate import (
    Action,
    cancel_command,
    command_outcome,
    condition,
    send_command,
    summarize,
    unapplied_token,
)
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.worker import FOLDER
from pipeline.core.errors import Misconfigured
from pipeline.kafka.client import publisher
from pipeline.observability import lineage, tracing
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import Settings, home
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.postgres import Pool, open_pool

LOOK_SECONDS = 0.2
EVERYTHING: Sequence[Sequence[Action]] = (("load",), ("changes", "groups", "sweep"))
"""The actions of a whole run, step by step; those of one step run at the same time. A sweep before the end of the load
would see a part of it."""


async def run_once(
    settings: Settings, plan: Plan, actions: Sequence[tuple[str, str | None]], *, follow: bool, quiet: bool
) -> dict[str, Any]:
    """``{"connector", "where", "ok", "outcomes": {action: counts | {"error"}}, "problems", "token"}``. The token names
    what the connector has published, in this run or before, and what may not be in both stores yet; None: too much for
    one. Raises Misconfigured when the instance cannot even start."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(settings.postgres))
        if (await summarize(pool, plan)).state == "removed":
            raise Misconfigured(f"{plan.name} was removed: run `penstock connector resume {plan.name}` first")
        here = await stack.enter_async_context(_running(settings, pool, plan))
        if (await summarize(pool, plan)).state == "paused":
            raise Misconfigured(f"{plan.name} is paused: run `penstock connector resume {plan.name}` first")
        steps = [[action] for action in actions] or [[(a, None) for a in step] for step in EVERYTHING]
        outcomes: dict[str, Mapping[str, Any]] = {}
        with progress_bars(quiet=quiet) as bars:
            bar = bars.add_task(plan.name, total=None)
            for step in steps:
                numbers = {
                    action: await send_command(pool, plan, cast("Action", action), argument)
                    for action, argument in step
                }
                try:
                    while numbers:
                        for action, number in list(numbers.items()):
                            if (result := await command_outcome(pool, number)) is not None:
                                outcomes[action] = result
                                del numbers[action]
                        bars.update(bar, description=await _doing(pool, plan, here))
                        await asyncio.sleep(LOOK_SECONDS)
                finally:
                    with contextlib.suppress(Exception):
                        for number in numbers.values():
                            await cancel_command(pool, number)
        if here is not None and outcomes.get("load") == {}:
            outcomes["load"] = here.loaded  # the load began with the instance, before it was asked for
        if follow:
            await _follow(pool, plan)
        seen = await summarize(pool, plan)
        problems = [str(p) for report in outcomes.values() for p in report.get("problems", ())]
        ok = not problems and not any("error" in report for report in outcomes.values())
        return {
            "connector": plan.name,
            "where": "here" if here else seen.row and seen.row.worker,
            "ok": ok,
            "outcomes": outcomes,
            "problems": problems,
            "token": await unapplied_token(pool, plan),
        }


@asynccontextmanager
async def _running(settings: Settings, pool: Pool, plan: Plan) -> AsyncIterator[Instance | None]:
    """Run the instance in this process. Yields it, or None if a worker runs it."""
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.running("connectors"))
        stack.enter_context(lineage.running())
        kafka = await stack.enter_async_context(publisher(settings))
        services = Services(
            postgres=settings.postgres,
            pool=pool,
            producer=kafka,
            metrics=Metrics(),
            folder=home() / FOLDER,
            events_url=settings.connectors.events_url,
        )
        instance = Instance(plan, services)
        task = asyncio.create_task(instance.run())
        try:
            while instance.source is None and not instance.runs_elsewhere:
                if instance.start.state == "needs attention":
                    raise Misconfigured(instance.start.reason or f"{plan.name} cannot start")
                await asyncio.sleep(0.05)
            if instance.runs_elsewhere:
                await cancel_and_wait([task])
            yield None if instance.runs_elsewhere else instance
        finally:
            await cancel_and_wait([task])


async def _doing(pool: Pool, plan: Plan, here: Instance | None) -> str:
    """Return the line of the progress bar."""
    if here is not None:
        busy = [
            f"{name}: {activity.status.reason or activity.status.state}"
            for name, activity in here.activities.items()
            if name != "listen" and activity.status.state not in ("idle", "paused")
        ]
        done = sum(here.published.values())
        return f"{plan.name}  {done} read  {'; '.join(busy)[:80]}"
    seen = await summarize(pool, plan)
    state, reason = condition(seen.row)
    return f"{plan.name}  {state}{f': {reason}' if reason else ''}"[:100]


async def _follow(pool: Pool, plan: Plan) -> None:
    """Print a line whenever something was published or the connector's state has changed, until Ctrl-C."""
    shown: object = None
    stderr.print(f"following {plan.name} (stop with Ctrl-C)", markup=False)
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            seen = await summarize(pool, plan)
            counts = {k: n for k, n in (seen.row.counts if seen.row else {}).items() if k not in ("unchanged", "late")}
            now = (seen.state, seen.reason, counts)
            if now != shown:
                line = ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items()))
                stderr.print(f"{seen.state}{f': {seen.reason}' if seen.reason else ''}  {line}", markup=False)
                shown = now
            await asyncio.sleep(1.0)
