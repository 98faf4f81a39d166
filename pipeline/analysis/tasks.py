"""The tasks that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from pipeline.analysis.task import Services, Task
from topics.registry import DOCUMENTS_INDEXED, IDENTITIES, Topic

TASKS: Mapping[str, tuple[tuple[Topic, ...], str]] = {
    "conflicts": ((DOCUMENTS_INDEXED,), "pipeline.analysis.conflicts:Conflicts"),
    "standing": ((DOCUMENTS_INDEXED, IDENTITIES), "query.standing.task:StandingTask"),
}
"""Name → the topics that the task reads, and ``module:class``. The class is constructed with the process's Services;
its module is imported only where the task runs, because `penstock status` reads the names and topics alone."""


def build(services: Services) -> list[Task]:
    """All tasks, in the order of TASKS."""
    return [_class(place)(services) for _, place in TASKS.values()]


def _class(place: str) -> Callable[[Services], Task]:
    module, _, name = place.partition(":")
    return cast("Callable[[Services], Task]", getattr(import_module(module), name))
