"""The tasks of ``penstock worker analysis``."""

from __future__ import annotations

from pipeline.analysis.conflicts import Conflicts
from query.standing.task import StandingTask

TASKS = (Conflicts, StandingTask)
