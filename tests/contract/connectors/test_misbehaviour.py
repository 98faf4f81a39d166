"""Each entry of the catalogue of vendors' misbehaviour, shown by the vendor's fake to the real source and runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connectors.confluence import Confluence
from connectors.confluence.playground import ConfluenceDataCenter
from connectors.declared import options
from connectors.fakes.misbehaviour import Entry, catalogue
from connectors.google_drive import GoogleDrive
from connectors.set_aside import SetAside
from connectors.slack import Slack
from connectors.source import Context, Source
from connectors.web import Limits
from tests.support.connectors.google_drive_kit import InMemory
from tests.support.connectors.memory_runner import MemoryRunner, readable

KINDS: dict[str, Any] = {
    "confluence": Confluence,
    "confluence-data-center": ConfluenceDataCenter,
    "google_drive": GoogleDrive,
    "slack": Slack,
}
QUICK = Limits(patience_seconds=0.05, backoff_base_seconds=0.01, backoff_cap_seconds=0.02)
NAMES = ("ask", "broken", "edited", "removed", "zeal", "restricted")
ENTRIES = catalogue()


@dataclass
class Stage:
    """A playground with documents, and the instances that read it."""

    kind: str
    play: Any
    folder: Path
    ids: dict[str, str]
    made: list[Source]

    def runner(self, more: dict[str, Any]) -> MemoryRunner:
        set_aside = SetAside()
        folder = self.folder / str(len(self.made))
        folder.mkdir()
        context = Context(name="s", tenant="t", memory=InMemory(), folder=folder, set_aside=set_aside)
        cls = KINDS[self.kind]
        settings = options(cls, {**self.play.options, **more}, "s", self.play.environment)
        source = cls(settings, context, limits=QUICK)
        self.made.append(source)
        return MemoryRunner(source, set_aside)


@asynccontextmanager
async def stage(kind: str, folder: Path, *, with_file: bool) -> AsyncIterator[Stage]:
    cls = KINDS[kind]
    async with cls.playground() as play:
        ids = {name: await play.write(name, f"About {name}.\n\nIt is short.") for name in NAMES}
        await play.restrict("restricted")
        if kind.startswith("confluence"):
            play.state.add_space("OPS", groups={"staff"})
            ids["far"] = play.state.add_page("OPS", "Far", "<p>About far.</p>").id
            if with_file:  # its text is extracted in a process of its own, which takes time
                ids["file"] = play.state.attach(ids["ask"], "file.txt", b"About file.", "text/plain").id
            ids |= {"parent": play.state.items[ids["broken"]].parent, "eng": play.state.spaces["ENG"].id}
            ids["ops"] = play.state.spaces["OPS"].id
        one = Stage(kind, play, folder, ids, [])
        try:
            yield one
        finally:
            for source in one.made:
                await source.close()


QUICKLY = frozenset({"confluence-unreadable-ancestor-fails-the-batch", "confluence-dc-permissions-500"})
"""Entries that every run of the tests shows; the others take minutes together."""


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.id, marks=() if e.id in QUICKLY else pytest.mark.slow) for e in ENTRIES],
)
async def test_misbehaviour_of_a_vendor(entry: Entry, tmp_path: Path) -> None:
    with_file = any("{file}" in fault.request for fault in entry.faults) or "file" in entry.documents
    async with stage(entry.vendor, tmp_path, with_file=with_file) as one:
        play, ids = one.play, one.ids
        before = one.runner(entry.options)
        assert await before.full()
        everything = set(before.published)
        assert {ids[name] for name in NAMES} <= everything, before.status
        groups = await before.groups()
        assert groups is not None
        inside = readable(before, play.inside, groups)
        assert {ids[name] for name in NAMES} - inside == {ids["restricted"]}

        play.misbehaving.show(entry.faults, ids)
        first = one.runner(entry.options)
        loaded = await first.full()
        await play.write("edited", "It was edited.")
        await play.remove("removed")
        swept = await before.sweep() and await before.changes()
        later = await before.groups()
        if later is not None:
            groups = later
        assert play.misbehaving.shown > 0, "the fault was never shown"

        # Nothing but the removed document is deleted, and nobody may read more than before.
        assert set(before.deleted) <= {ids["removed"]}
        now = readable(before, play.inside, groups)
        assert now <= inside
        affected = {ids[name] for name in entry.documents}
        if entry.outcome == "stops":
            assert not loaded
            assert not swept
            assert before.deleted == []
            assert before.published.keys() == everything
        else:
            assert loaded, first.status
            assert swept, before.status
            assert before.deleted == [ids["removed"]], before.status
            assert before.published[ids["edited"]].content.count("It was edited.") or ids["edited"] in affected
            closed = affected if entry.outcome == "closed" else set()
            assert now == inside - {ids["removed"]} - closed, before.status
            unread = affected if entry.outcome in ("unreadable", "closed", "set-aside") else set()
            assert everything - first.published.keys() <= unread, first.status
        assert entry.says in before.status + first.status, before.status + first.status

        # Everything is read again once the service behaves.
        play.misbehaving.show((), ids)
        for runner in (first, before):
            assert await runner.sweep(), runner.status
            assert await runner.changes(), runner.status
            unread = affected - runner.published.keys() if entry.until_changed else set()
            assert runner.published.keys() == everything - {ids["removed"]} - unread
            healed = await runner.groups()
            assert healed is not None
            assert readable(runner, play.inside, healed) == inside - {ids["removed"]} - unread
            assert not runner.set_aside.reasons()


def test_the_catalogue_names_a_public_source_for_each_entry_once() -> None:
    assert len(ENTRIES) >= 60
    assert [name for name, n in Counter(entry.id for entry in ENTRIES).items() if n > 1] == []
    assert all(entry.source.startswith("https://") for entry in ENTRIES)
    assert {entry.vendor for entry in ENTRIES} <= KINDS.keys()
