"""When a runner reads its source: everything is stamped before it is requested, and changes begin before the load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from connectors.clock import Clock
from connectors.runner.compare import Row
from connectors.runner.crawl import Crawl
from connectors.runner.identities import Identities
from connectors.runner.publish import Publisher
from connectors.runner.rows import SweepRow
from connectors.runner.state import FullState, ReadProgress
from connectors.runner.sweep import Sweep
from connectors.set_aside import SetAside
from connectors.source import Cursor
from tests.support.connectors.runner_world import PAGE, World, WorldSource
from tests.unit.connectors.runner.test_publish import HOLDER, Desk

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def nothing(*_: object) -> None:
    """Stands for what other activities do."""


@dataclass
class Reading(Desk):
    """A runner that reads a world. Desk is its tables and Kafka; ``answers`` are stamps of the runner's clock from when
    the source had each request, by (method, number of the page)."""

    progress: ReadProgress = field(default_factory=lambda: ReadProgress(None, None, "due", None, {}))
    answers: dict[tuple[str, int], datetime] = field(default_factory=dict)
    unlisted: list[str] = field(default_factory=list)
    """Published documents that no listing shows."""
    gaps: int = 0
    sweeps: int = 0

    def __post_init__(self) -> None:
        self.clock = Clock(None)
        self.world = World(before=self._answer)
        self._source = WorldSource(self.world, cast(Any, None))
        self.publisher = Publisher(cast(Any, self), cast(Any, self))

    async def _answer(self, method: str, number: int) -> None:
        self.answers[method, number] = self.clock.stamp()

    def publishes(self, name: str, **fields: Any) -> None:
        """The document is published, as the world has it but for these fields."""
        entry = self.world.documents[name]
        row = Row(
            external_id=name,
            version=1,
            fingerprint=b"1",
            revision=entry.revision,
            acl_tags=tuple(entry.acl_tags),
            content_at=LONG_AGO,
            access_at=LONG_AGO,
        )
        self.known[name] = replace(row, **fields)

    @property
    def crawl(self) -> Crawl:
        return Crawl(
            self._source,
            cast(Any, self),
            self.publisher,
            self.clock,
            between_pages=nothing,
            on_loaded=nothing,
            on_gap=self._note_gap,
            on_fetched=nothing,
            sweep=self._note_sweep,
        )

    @property
    def sweep(self) -> Sweep:
        return Sweep(
            self._source,
            cast(Any, self),
            self.publisher,
            self.clock,
            set_aside=SetAside(),
            between_pages=nothing,
            on_no_revisions=nothing,
            on_done=nothing,
        )

    @property
    def identities(self) -> Identities:
        runner = Identities(self._source, cast(Any, self), cast(Any, None), HOLDER, self.clock, between_pages=nothing)
        runner._tables = cast(Any, self)
        return runner

    def _note_gap(self) -> None:
        self.gaps += 1

    async def _note_sweep(self) -> Mapping[str, Any]:
        self.sweeps += 1
        return {"listed": 1}

    @property
    def stamps(self) -> dict[str, datetime]:
        """The observed_at of each message that was sent, by document or principal."""
        return {
            getattr(sent, "external_id", None) or sent.principal: sent.observed_at for _, sent in cast(Any, self.sent)
        }

    # The tables

    async def read_progress(self) -> ReadProgress:
        return self.progress

    async def set_changes_cursor(self, cursor: Cursor | None) -> None:
        self.progress = replace(self.progress, changes_cursor=cursor)

    async def set_full_state(self, state: FullState) -> None:
        self.progress = replace(self.progress, full_state=state)

    async def set_guard(self, _guard: object) -> None: ...

    async def now(self) -> datetime:
        return LONG_AGO

    async def sweep_page(self, _since: datetime, _after: str) -> list[SweepRow]:
        return [SweepRow(name, is_published=True, is_unchanged=True) for name in self.unlisted]

    async def all_groups(self) -> Mapping[str, object]:
        return {}

    async def all_published(self) -> Mapping[str, object]:
        return {}

    async def replace_groups(self, _known: object, _after: object) -> None: ...

    async def documents_by_tag(self) -> Mapping[str, int]:
        return {}


@pytest.fixture(autouse=True)
def files_are_not_extracted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def condition() -> dict[str, str]:
        return {"files": "unreachable"}

    monkeypatch.setattr("connectors.runner.sweep.condition", condition)


@pytest.mark.parametrize("method", ["full", "changes"])
async def test_each_page_is_stamped_before_it_is_requested_and_after_the_one_before(method: str) -> None:
    reading = Reading(progress=ReadProgress({"at": 0}, None, "due", None, {}))
    reading.world.fill(3 * PAGE)
    activity: Callable[..., Any] = getattr(reading.crawl, method)
    await activity(frozenset())
    assert len(reading.stamps) == 3 * PAGE
    for name, stamp in reading.stamps.items():
        page = int(name[1:]) // PAGE
        assert stamp < reading.answers[method, page]
        assert page == 0 or stamp > reading.answers[method, page - 1]


async def test_a_document_fetched_by_name_is_stamped_before_it_is_requested() -> None:
    reading = Reading()
    reading.world.fill(2)
    await reading.crawl.fetch(frozenset({"d000", "gone"}))
    assert reading.stamps["d000"] < reading.answers["fetch", 0]


async def test_the_access_that_a_listing_shows_is_stamped_before_the_page_is_requested() -> None:
    reading = Reading()
    reading.world.fill(1)
    reading.publishes("d000", acl_tags=("everyone",))
    await reading.sweep.run(frozenset())
    assert reading.stamps["d000"] < reading.answers["slim", 0]


async def test_a_changed_document_that_a_sweep_fetches_is_stamped_before_it_is_requested() -> None:
    reading = Reading(progress=ReadProgress({"at": 0}, None, "done", LONG_AGO, {}))
    reading.world.fill(1)
    reading.publishes("d000", revision="another")
    await reading.sweep.run(frozenset())
    assert reading.answers["slim", 0] < reading.stamps["d000"] < reading.answers["fetch", 0]


async def test_the_deletion_of_an_unlisted_document_is_stamped_before_it_is_requested() -> None:
    reading = Reading(unlisted=["d000"])
    reading.world.fill(1)
    reading.publishes("d000")
    reading.world.remove("d000")
    await reading.sweep.run(frozenset())
    assert [sent.kind for _, sent in reading.sent] == ["document.deleted.v1"]
    assert reading.stamps["d000"] < reading.answers["fetch", 0]


async def test_groups_are_stamped_before_they_are_requested() -> None:
    reading = Reading()
    reading.world.groups = {"staff": ({"ann"}, set())}
    await reading.identities.read_all(frozenset())
    assert reading.stamps["ann"] < reading.answers["groups", 0]


async def test_the_cursor_of_changes_is_older_than_the_first_load() -> None:
    reading = Reading()
    reading.world.fill(1)
    await reading.crawl.full(frozenset())
    assert reading.answers["start", 0] < reading.answers["full", 0]
    assert reading.progress.changes_cursor == {"at": 1}


async def test_after_an_expired_cursor_changes_are_read_from_now_on_and_a_sweep_finds_the_others() -> None:
    reading = Reading(progress=ReadProgress({"at": 0}, None, "done", LONG_AGO, {}))
    reading.world.fill(2)
    reading.world.expired_before = 1
    await reading.crawl.changes(frozenset())
    assert (reading.gaps, reading.progress.changes_cursor) == (1, {"at": 2})


async def test_a_poll_of_a_source_without_a_log_of_changes_is_a_sweep() -> None:
    reading = Reading(progress=ReadProgress(None, None, "done", LONG_AGO, {}))
    reading.world.has_log = False
    assert await reading.crawl.changes(frozenset()) == {"listed": 1}
    assert (reading.sweeps, reading.progress.changes_cursor) == (1, None)


async def test_a_source_without_a_log_of_changes_is_not_swept_before_its_first_load_is_complete() -> None:
    reading = Reading()
    reading.world.has_log = False
    assert await reading.crawl.changes(frozenset()) == {}
    assert reading.sweeps == 0


async def test_access_observed_during_an_older_request_is_saved_although_it_is_unchanged() -> None:
    """The older response, which may hold another access, would otherwise count as the newest."""
    reading = Reading()
    reading.world.fill(2)
    reading.publishes("d000")
    reading.publishes("d001")
    with reading.publisher.track_request(reading.clock.stamp(), ["d000"]):
        await reading.sweep.run(frozenset())
    assert [row.external_id for row in reading.saved] == ["d000"]
    assert reading.sent == []
