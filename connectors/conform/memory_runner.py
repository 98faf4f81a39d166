"""A runner on lists instead of Postgres and Kafka: the real crawl, sweep and comparison, for any source."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, cast

from connectors.clock import Clock
from connectors.errors import BadData
from connectors.runner.compare import Row
from connectors.runner.crawl import Crawl
from connectors.runner.isolate import Isolated, groups_one_by_one
from connectors.runner.publish import Publisher
from connectors.runner.rows import Holder, SweepRow
from connectors.runner.state import FullState, ReadProgress
from connectors.runner.sweep import Sweep
from connectors.set_aside import SetAside, reading_data
from connectors.source import Cursor, Group, Source
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.kafka.producer import Delivery, Stored
from topics.messages import AccessChanged, AnyMessage, DocumentDeleted, DocumentUpserted
from topics.registry import Topic

ATTEMPTS = 5
"""Runs of an activity before its error counts."""


class InMemory:
    """``connectors.source.Memory`` as a dictionary, which outlives a source."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}

    async def get(self, name: str) -> Any | None:
        return self.stored.get(name)

    async def put(self, name: str, value: Any | None) -> None:
        self.stored[name] = value
        if value is None:
            del self.stored[name]


def nothing(*_: object) -> None:
    """Stands for what the other activities do."""


@dataclass
class MemoryRunner:
    """Rows, progress and producer in one. ``published`` holds the last state of each document at the consumers."""

    source: Source
    set_aside: SetAside
    holder: Holder = field(default_factory=lambda: Holder("t", "s", 1))
    rows: dict[str, Row] = field(default_factory=dict)
    published: dict[str, DocumentUpserted] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    progress: ReadProgress = field(default_factory=lambda: ReadProgress(None, None, "due", None, {}))
    problems: list[str] = field(default_factory=list)
    """The errors that the activities ended with, as a status shows them."""
    _written: dict[str, int] = field(default_factory=dict)
    _writes: int = 0
    _swept_from: int = 0

    def __post_init__(self) -> None:
        self._clock = Clock(None)
        self._publisher = Publisher(cast(Any, self), cast(Any, self))
        self._isolated = Isolated(self.source, "s")

    @property
    def isolated(self) -> Isolated:
        """The source as it is read; made anew when a test replaces the source, as by a restart."""
        if self._isolated.source is not self.source:
            self._isolated = Isolated(self.source, "s")
        return self._isolated

    # Activities

    async def full(self) -> bool:
        self.progress = replace(self.progress, full_state="due", full_cursor=None)
        return await self._attempt(lambda: self._crawl().full(frozenset()))

    async def changes(self) -> bool:
        return await self._attempt(lambda: self._crawl().changes(frozenset()))

    async def sweep(self) -> bool:
        return await self._attempt(self._run_sweep)

    def _crawl(self) -> Crawl:
        services: Any = self.isolated, self, self._publisher, self._clock
        return Crawl(
            *services,
            between_pages=nothing,
            on_loaded=nothing,
            on_gap=nothing,
            on_fetched=nothing,
            sweep=self._run_sweep,
        )

    async def _run_sweep(self) -> Mapping[str, Any]:
        services: Any = self.isolated, self, self._publisher, self._clock
        sweep = Sweep(
            *services, set_aside=self.set_aside, between_pages=nothing, on_no_revisions=nothing, on_done=nothing
        )
        tally = await sweep.run(frozenset())
        self.problems += [problem.message for problem in sweep.problems]
        return tally

    async def groups(self) -> list[Group] | None:
        """Return all groups; None: they cannot be listed, and the memberships stay as they are."""
        groups: list[Group] = []

        async def listed() -> None:
            try:
                with reading_data():
                    groups[:] = [group async for group in self.source.groups(None)]
            except BadData:
                tags = {tag for row in self.rows.values() for tag in (*row.acl_tags, *row.required_tags)}
                groups[:], failed = await groups_one_by_one(self.source, tags)
                self.problems += [f"the holders of {tag} cannot be read: {error}" for tag, error in failed.items()]

        return groups if await self._attempt(listed) else None

    async def _attempt(self, run: Any) -> bool:
        """Run an activity again after a failure, as an instance does. Returns whether it came to its end."""
        for attempt in range(ATTEMPTS):
            try:
                await run()
            except Retryable as error:
                if attempt == ATTEMPTS - 1:
                    self.problems.append(str(error))
                if isinstance(error, Deferred):
                    await asyncio.sleep(min(1.1, error.retry_after or 0))
            except Misconfigured as error:
                self.problems.append(str(error))
                return False
            else:
                return True
        return False

    @property
    def status(self) -> str:
        """The text that ``penstock connector status`` shows."""
        problems = [*self.isolated.problems, *self.set_aside.problems("s")]
        lines = [*self.problems, *(problem.message for problem in problems)]
        lines += [f"{row.problem_code}: {row.problem_message}" for row in self.rows.values() if row.problem_code]
        return "\n".join(lines)

    # Tables

    async def find(self, ids: Collection[str]) -> dict[str, Row]:
        return {id_: self.rows[id_] for id_ in ids if id_ in self.rows}

    async def intend(self, _rows: object, _at: object, _events: object) -> None: ...

    async def save(
        self, rows: Iterable[Row], _at: datetime, *, full: Cursor | None = None, changes: Cursor | None = None
    ) -> None:
        for row in rows:
            self._writes += 1
            self.rows[row.external_id], self._written[row.external_id] = row, self._writes
        if full is not None:
            self.progress = replace(self.progress, full_cursor=full)
        if changes is not None:
            self.progress = replace(self.progress, changes_cursor=changes)

    async def now(self) -> datetime:
        self._swept_from = self._writes
        return datetime.now(UTC)

    async def sweep_page(self, _since: datetime, after: str) -> list[SweepRow]:
        return [
            SweepRow(id_, row.is_published, self._written[id_] <= self._swept_from, row.acl_tags)
            for id_, row in sorted(self.rows.items())
            if id_ > after and (not row.gone or row.version is None or row.problem_code is not None)
        ]

    async def mark_unlisted(self, _ids: object, _since: object) -> None: ...

    async def forget_unpublished(self, _ids: object, _since: object) -> None: ...

    async def read_progress(self) -> ReadProgress:
        return self.progress

    async def set_changes_cursor(self, cursor: Cursor) -> None:
        self.progress = replace(self.progress, changes_cursor=cursor)

    async def set_full_state(self, state: FullState) -> None:
        loaded = datetime.now(UTC) if state == "done" else self.progress.loaded_at
        self.progress = replace(self.progress, full_state=state, loaded_at=loaded)

    async def set_guard(self, _guard: object) -> None: ...

    async def send(self, _topic: Topic, message: AnyMessage) -> Delivery:
        if isinstance(message, DocumentUpserted):
            self.published[message.external_id] = message
        elif isinstance(message, AccessChanged):
            before = self.published[message.external_id]
            self.published[message.external_id] = before.model_copy(
                update={"acl_tags": message.acl_tags, "required_tags": message.required_tags}
            )
        elif isinstance(message, DocumentDeleted):
            self.deleted.append(message.external_id)
            del self.published[message.external_id]
        delivery: Delivery = asyncio.get_running_loop().create_future()
        delivery.set_result(Stored(0, 0))
        return delivery


def tags_of(principal: str, groups: Sequence[Group]) -> set[str]:
    """Return the tags that a principal holds."""
    held = {f"user:{principal}"} | {group.tag for group in groups if principal in group.members}
    while more := {group.tag for group in groups if held & set(group.of)} - held:
        held |= more
    return held


def readable(runner: MemoryRunner, principal: str, groups: Sequence[Group]) -> set[str]:
    """Return the documents that a principal may read."""
    held = tags_of(principal, groups)
    return {
        id_
        for id_, document in runner.published.items()
        if held & set(document.acl_tags) and held >= set(document.required_tags)
    }
