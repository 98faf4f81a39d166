"""Laws about the misbehaviour that vendors are reported for: each entry of the catalogue
(``connectors.fakes.misbehaviour``), shown by the vendor's fake to the real source and the real crawl and sweep."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from connectors.conform.laws import require
from connectors.conform.memory_runner import InMemory, MemoryRunner, readable
from connectors.declared import options, source_class
from connectors.fakes.misbehaviour import Entry, Misbehaving, catalogue
from connectors.set_aside import SetAside
from connectors.source import Context, Group, Playground, Source
from connectors.web import Limits

NAMES = ("ask", "broken", "edited", "removed", "zeal", "restricted")
"""The documents of every playground; ``restricted`` is one that the insider may not read."""
QUICK = Limits(
    patience_seconds=0.05, backoff_base_seconds=0.01, backoff_cap_seconds=0.02, max_pause_seconds=0.02
)  # the fakes ask for no longer waits either


class MisbehavingPlayground(Playground, Protocol):
    """A playground whose service shows the entries of its kind."""

    misbehaving: Misbehaving

    async def add_places(self) -> Mapping[str, str]:
        """Add what else the entries name, such as a second space with a document. Returns the ids by name."""


@cache
def _classes() -> Mapping[str, type[Source]]:
    """Return the class that each entry concerns, by the entry's id."""
    return {entry.id: source_class(entry.kind) for entry in catalogue()}


def entries_of(kind: type[Source]) -> Mapping[str, Entry]:
    """Return the entries by id that concern a kind of source, or a variant of it that inherits from its class; none for
    a kind that the catalogue does not know."""
    return {entry.id: entry for entry in catalogue() if issubclass(_classes()[entry.id], kind)}


@dataclass
class _Stage:
    """A playground with documents, and the sources that read it."""

    kind: type[Source]
    play: MisbehavingPlayground
    folder: Path
    ids: dict[str, str]
    _sources: list[Source] = field(default_factory=list)

    def runner(self, more: Mapping[str, Any]) -> MemoryRunner:
        set_aside = SetAside()
        folder = self.folder / str(len(self._sources))
        folder.mkdir()
        context = Context(name="s", tenant="t", memory=InMemory(), folder=folder, set_aside=set_aside)
        settings = options(self.kind, {**self.play.options, **more}, "s", self.play.environment)
        limits = {"limits": QUICK} if "limits" in inspect.signature(self.kind).parameters else {}
        source = cast(Any, self.kind)(settings, context, **limits)
        self._sources.append(source)
        return MemoryRunner(source, set_aside)

    async def close(self) -> None:
        for source in self._sources:
            await source.close()


@asynccontextmanager
async def _stage(kind: type[Source], folder: Path) -> AsyncIterator[_Stage]:
    async with cast(Any, kind).playground() as play:
        ids = {name: await play.write(name, f"About {name}.\n\nIt is short.") for name in NAMES}
        await play.restrict("restricted")
        ids |= await play.add_places()
        stage = _Stage(kind, play, folder, ids)
        try:
            yield stage
        finally:
            await stage.close()


async def show(entry: Entry, folder: Path) -> str:
    """Show an entry to a source that has read everything and to one that has not; returns one line. Raises Broken.

    Whatever the entry is, nothing is deleted that was not removed, nobody may read more than before, and everything is
    read once the service behaves. folder: an empty one, for the sources.
    """
    async with _stage(_classes()[entry.id], folder) as stage:
        play, ids = stage.play, stage.ids
        before = stage.runner(entry.options)
        require(await before.full(), f"without the fault, a full read fails: {before.status}")
        everything = set(before.published)
        groups = await _groups(before)
        inside = readable(before, play.inside, groups)
        required = {ids[name] for name in NAMES if name != "restricted"}
        require(required <= inside, f"without the fault, {len(required - inside)} documents cannot be read")
        require(ids["restricted"] not in inside, "without the fault, a restricted document can be read")

        play.misbehaving.show(entry.faults, ids)
        first = stage.runner(entry.options)
        loaded = await first.full()
        await play.write("edited", "It was edited.")
        await play.remove("removed")
        swept = await before.sweep() and await before.changes()
        if (listed := await before.groups()) is not None:  # otherwise memberships stay as they are
            groups = listed
        require(play.misbehaving.shown > 0, "the fault was never shown: its request is not sent")

        wrongly = set(before.deleted) - {ids["removed"]}
        require(not wrongly, f"{len(wrongly)} documents were deleted that still exist")
        now = readable(before, play.inside, groups)
        require(now <= inside, f"{len(now - inside)} documents became readable to a principal who has no access")
        affected = {ids[name] for name in entry.documents}
        if entry.outcome == "stops":
            require(not loaded and not swept, "the instance does not report that it cannot go on")
            require(not before.deleted, "a document was deleted although nothing could be read")
            require(before.published.keys() == everything, "documents changed although nothing could be read")
        else:
            require(loaded, f"a first read does not end: {first.status}")
            require(swept, f"a sweep or poll does not end: {before.status}")
            require(before.deleted == [ids["removed"]], f"the removed document is not deleted: {before.status}")
            is_edited = "It was edited." in before.published[ids["edited"]].content
            require(is_edited or ids["edited"] in affected, f"an edit is not noticed: {before.status}")
            hidden = affected if entry.outcome == "closed" else set()
            expected = inside - {ids["removed"]} - hidden
            require(now >= expected, f"{len(expected - now)} documents cannot be read any more: {before.status}")
            require(now <= expected, f"{len(now - expected)} documents can still be read: {before.status}")
            lost = everything - first.published.keys()
            unread = affected if entry.outcome in ("unreadable", "closed", "set-aside") else set()
            require(lost <= unread, f"{len(lost - unread)} documents are missing after a first read: {first.status}")
        status = before.status + first.status
        require(entry.says in status, f"the status does not say {entry.says!r}: {status}")

        play.misbehaving.show((), ids)
        for runner in (first, before):
            await _heal(runner, play, everything - {ids["removed"]}, inside, affected if entry.until_changed else set())
    return f"{entry.outcome}: {entry.summary} ({entry.source})"


async def _heal(
    runner: MemoryRunner, play: MisbehavingPlayground, everything: set[str], inside: set[str], affected: set[str]
) -> None:
    """Require that everything is read again, without documents that are not read before they change."""
    if runner.progress.loaded_at is None:
        require(await runner.full(), f"after the fault, a first read does not end: {runner.status}")
    require(await runner.sweep(), f"after the fault, a sweep does not end: {runner.status}")
    require(await runner.changes(), f"after the fault, a poll does not end: {runner.status}")
    unread = affected - runner.published.keys()
    missing = everything - unread - runner.published.keys()
    require(not missing, f"{len(missing)} documents are missing after the fault: {runner.status}")
    require(runner.published.keys() == everything - unread, "after the fault, there are documents that were removed")
    readable_now = readable(runner, play.inside, await _groups(runner))
    require(readable_now == (inside & everything) - unread, "after the fault, readers are not the same as before")
    require(not runner.set_aside.reasons(), "after the fault, parts are still set aside")


async def _groups(runner: MemoryRunner) -> list[Group]:
    groups = await runner.groups()
    require(groups is not None, f"the groups cannot be listed: {runner.status}")
    return groups or []
