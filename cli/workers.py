"""``penstock worker``: the workers of the stages and of the analysis, one in a process or all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pipeline.observability.metrics import Metrics
from pipeline.runtime import process
from pipeline.runtime.settings import Settings

if TYPE_CHECKING:
    from pipeline.analysis.conflicts import Conflicts
    from query.standing.task import StandingTask

Name = Literal["detect", "vectors", "keywords", "analysis"]
ALL: tuple[Name, ...] = ("detect", "vectors", "keywords", "analysis")
"""The workers of ``penstock worker all``, one process for a small machine. The connectors' and the canary's are not
among them: what they talk to is outside, or must be measured from outside."""


async def run(name: Literal[Name, "all"], settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises Misconfigured when the settings make the work impossible."""
    names = ALL if name == "all" else (name,)
    await process.run(name, settings, lambda metrics: [_worker(worker, settings, metrics) for worker in names])


def _worker(name: Name, settings: Settings, metrics: Metrics) -> process.Worker:
    """Build a worker. The imports are here because the process of another one does not need them."""
    if name == "analysis":
        from pipeline.analysis.worker import AnalysisWorker

        return AnalysisWorker(analysis_tasks(), settings, metrics)
    from pipeline.stream.worker import StreamWorker

    return StreamWorker(name, settings, metrics)


def analysis_tasks() -> tuple[type[Conflicts], type[StandingTask]]:
    """Return the tasks of ``penstock worker analysis``."""
    from pipeline.analysis.conflicts import Conflicts
    from query.standing.task import StandingTask

    return Conflicts, StandingTask
