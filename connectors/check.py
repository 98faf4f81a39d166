"""``penstock connector check``: what is missing, asked of each source, before any of them runs."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from connectors.protocol import Problem
from connectors.runner.activity import explained
from connectors.runner.plan import Plan
from connectors.source import Context
from pipeline.core.errors import Misconfigured, Retryable

CHECK_SECONDS = 60.0


class Nothing:
    """A ``Memory`` that remembers for as long as the check takes."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    async def get(self, name: str) -> Any | None:
        return self._values.get(name)

    async def put(self, name: str, value: Any | None) -> None:
        self._values[name] = value


async def check_all(plans: Sequence[Plan], events_url: str | None) -> dict[str, list[Problem]]:
    """name → problems, side by side. Raises nothing that a source does: that is a problem, too."""
    found = await asyncio.gather(*(_check(plan, events_url) for plan in plans))
    return {plan.name: problems for plan, problems in zip(plans, found, strict=True)}


async def _check(plan: Plan, events_url: str | None) -> list[Problem]:
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        context = Context(
            name=plan.name, tenant=plan.tenant, memory=Nothing(), folder=Path(folder),
            events_url=plan.events_url(events_url),
        )  # fmt: skip
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                source = plan.make(context)
                try:
                    return list(await source.check())
                finally:
                    await source.close()
        except TimeoutError:
            return [Problem(plan.name, "no_answer", f"it did not answer within {CHECK_SECONDS:.0f} s")]
        except Misconfigured as error:
            return [Problem(plan.name, "misconfigured", explained(error))]
        except Retryable as error:
            return [Problem(plan.name, "unavailable", explained(error))]
        except Exception as error:  # noqa: BLE001 # a source is somebody else's code
            return [Problem(plan.name, "fault", explained(error))]
