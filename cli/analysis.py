"""``penstock worker analysis``: the tasks that there are."""

from __future__ import annotations

from pipeline.analysis import worker
from pipeline.analysis.conflicts import Conflicts
from pipeline.runtime.settings import Settings
from query.standing.task import StandingTask

TASKS = (Conflicts, StandingTask)


async def run(settings: Settings) -> None:
    """Run every task until SIGTERM or SIGINT. Raises Misconfigured when the settings make the work impossible."""
    await worker.run(settings, TASKS)
