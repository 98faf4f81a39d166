"""The tasks of ``penstock worker analysis``."""

from __future__ import annotations

from cli.workers import analysis_tasks
from pipeline.analysis.tasks import TOPICS


def test_every_task_whose_lag_the_status_shows_runs_in_the_worker() -> None:
    assert [task.name for task in analysis_tasks()] == list(TOPICS)
