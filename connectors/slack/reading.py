"""Reads threads and lists them, also those of channels that the app can no longer read.

Slack does not distinguish a channel that the app was removed from and one that was deleted. Both are closed to
everybody at once; their documents are deleted only after a while, so that an app that was removed by mistake and
invited again costs nothing. What was last listed of each channel is stored on disk, because Slack lists nothing of such
channels. When that folder is lost, their documents are missing from a listing, and the sweep's guard and ``fetch``
decide.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from connectors.slack.access import Channel, Directory, User, channel_group, workspace_group, workspace_tag
from connectors.slack.archive import Archive, completes
from connectors.slack.client import Absent, Api, Object
from connectors.slack.content import document, external_id, is_document, listed, newest, root, split_id, tag
from connectors.slack.options import SlackOptions
from connectors.source import Cursor, CursorExpired, Entry, Gone, Group, Listed, Memory, Page, Unreadable
from pipeline.core.errors import Retryable

_ID = re.compile(r"[CG][A-Z0-9]{1,40}")
Row = tuple[str, str]
"""(external id, revision)"""


class Roster:
    """Blocking; call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "channels"

    def channels(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        return sorted(path.stem for path in self._folder.glob("*.json") if _ID.fullmatch(path.stem))

    def write(self, channel: str, rows: Sequence[Row]) -> None:
        """All of a channel, once it was listed to its end."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, part = self._path(channel), self._path(channel).with_suffix(".part")
        text = json.dumps(rows)
        if path.exists() and path.read_text() == text:
            return
        part.write_text(text)
        os.replace(part, path)

    def read(self, channel: str) -> list[Row]:
        """What is not readable is as good as lost."""
        try:
            found = json.loads(self._path(channel).read_text())
        except (FileNotFoundError, ValueError):
            return []
        return [(str(id), str(revision)) for id, revision in found]

    def forget(self, channels: Collection[str]) -> None:
        for channel in channels:
            self._path(channel).unlink(missing_ok=True)

    def _path(self, channel: str) -> Path:
        if not _ID.fullmatch(channel):
            raise ValueError("no channel id")
        return self._folder / f"{channel}.json"


HOUR = 3_600.0


class Losses:
    def __init__(self, directory: Directory, options: SlackOptions, memory: Memory, folder: Path) -> None:
        self._directory = directory
        self._options = options
        self._memory = memory
        self._roster = Roster(folder)

    async def listed(self, channel: str, rows: Sequence[Row]) -> None:
        """A channel was listed to its end."""
        await asyncio.to_thread(self._roster.write, channel, rows)

    async def channels(self) -> list[str]:
        """Those that were ever listed and not forgotten."""
        return await asyncio.to_thread(self._roster.channels)

    def is_kept(self, channel: Channel | None) -> bool:
        """A public channel that was archived: the workspace still reads it in Slack, the app does not."""
        return channel is not None and channel.is_archived and not channel.is_private and self._directory.wants(channel)

    async def known(self, id: str) -> list[Row]:
        """What was listed of a channel last: which documents, never who may read them."""
        return await asyncio.to_thread(self._roster.read, id)

    async def listing(self, id: str, channel: Channel | None, rows: Sequence[Row]) -> list[Listed]:
        """What a sweep shall see of some documents of a channel that cannot be read (any more). channel: as it is now;
        None: there is none."""
        if self.is_kept(channel):
            return [Listed(external_id=row, acl_tags=(tag(id),), revision=revision) for row, revision in rows]
        unwanted = channel is not None and not self._directory.wants(channel)
        if unwanted or await self._is_over(id):
            await asyncio.to_thread(self._roster.forget, [id])
            return []
        return [Listed(external_id=row, acl_tags=(), revision=_while_lost(revision)) for row, revision in rows]

    async def entries(self, id: str, channel: Channel | None, stamps: Sequence[str]) -> list[Entry]:
        ids = [external_id(id, ts) for ts in stamps]
        revisions = dict(await asyncio.to_thread(self._roster.read, id))
        if self.is_kept(channel):
            return [
                Unreadable(
                    external_id=one,
                    code="archived",
                    acl_tags=(tag(id),),
                    revision=revisions.get(one),
                    message="its channel is archived, and Slack shows it to no app: what was read before stays",
                )
                for one in ids
            ]
        if await self._is_over(id):
            return [Gone(one) for one in ids]
        return [
            Unreadable(
                external_id=one,
                code="access_lost",
                acl_tags=(),
                revision=_while_lost(revisions[one]) if one in revisions else None,
                message="the app is not in this channel (any more): invite it, or the document goes",
            )
            for one in ids
        ]

    async def found(self, id: str) -> None:
        """The app is in it (again)."""
        if await self._memory.get(_lost(id)) is not None:
            await self._memory.put(_lost(id), None)

    async def _is_over(self, id: str) -> bool:
        """Whether the channel was lost long enough ago. The first time that it is asked counts as the loss."""
        since = await self._memory.get(_lost(id))
        if not isinstance(since, int | float):
            since = time.time()
            await self._memory.put(_lost(id), since)
        return time.time() >= since + self._options.forget_lost_after_hours * HOUR


def _while_lost(revision: str) -> str:
    """Another one than the channel's own: when it comes back, each document is read again."""
    return f"lost:{revision}"


def _lost(id: str) -> str:
    return f"lost:{id}"


DAY = 86_400.0


class Reader:
    """Every method raises what ``Api`` raises, but for Absent."""

    def __init__(self, api: Api, directory: Directory, losses: Losses, options: SlackOptions) -> None:
        self._api = api
        self._directory = directory
        self._losses = losses
        self._options = options

    async def channels(self) -> list[Channel]:
        """Those that are read, by id."""
        found = await self._directory.channels()
        return [channel for _, channel in sorted(found.items()) if self._directory.admits(channel)]

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        """Channel by channel, each from its newest message to its oldest. A channel that the app loses meanwhile ends
        early; the sweep sees to it. What there is comes from the API's histories; an export archive only spares asking
        for the answers of each thread. Raises Misconfigured when the archive is none."""
        at, before = (None, None) if cursor is None else (_text(cursor, "channel"), _text(cursor, "before"))
        archive = await self._opened()
        try:
            for channel in await self.channels():
                if at is None or channel.id >= at:
                    stored = await asyncio.to_thread(archive.threads, channel.id) if archive else {}
                    async for page in self._history(channel, before if channel.id == at else None, stored):
                        yield page
        finally:
            if archive:
                archive.close()

    async def _history(
        self, channel: Channel, latest: str | None, stored: Mapping[str, list[Mapping[str, Any]]]
    ) -> AsyncIterator[Page]:
        while True:
            try:
                messages, after = await self._api.history(channel.id, limit=self._options.page_size, latest=latest)
            except Absent:
                return
            entries = [
                await self._met(channel, one, stored.get(one["ts"], [])) for one in messages if self._is_document(one)
            ]
            if messages:
                yield Page(entries, {"channel": channel.id, "before": min((m["ts"] for m in messages), key=float)})
            if after is None:
                return
            latest = after

    async def _met(self, channel: Channel, parent: Object, stored: list[Mapping[str, Any]]) -> Entry:
        if completes(stored, parent):
            return await self.converted(channel, [parent, *stored], parent["ts"])
        return await self._entry_or_gone(channel, parent["ts"], parent)

    async def _opened(self) -> Archive | None:
        if self._options.archive is None:
            return None
        archive = await asyncio.to_thread(Archive, self._options.archive)
        await self._directory.introduce_from(await asyncio.to_thread(archive.users))
        return archive

    # Changes

    @staticmethod
    def now() -> Cursor:
        return {"at": time.time()}

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        """Threads in which something moved since ``at`` less the overlap: their parents are looked for in the last
        ``thread_days`` before that. Threads of the overlap that a poll before has seen and that are there no longer
        are read by name. ``began`` to ``now_seen``: of a poll that was interrupted."""
        try:
            at = float(cursor["at"])
            began = float(cursor.get("began", time.time()))
            after = str(cursor.get("after", ""))
            seen: Mapping[str, Sequence[str]] = cursor.get("seen", {})
            now_seen: dict[str, list[str]] = dict(cursor.get("now_seen", {}))
            seen = {id: [str(ts) for ts in stamps] for id, stamps in seen.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CursorExpired("this cursor of changes was written by another version of the connector") from error
        since = at - self._options.overlap_seconds
        for channel in await self.channels():
            if channel.id <= after:
                continue
            try:
                moved, found = await self._moved(channel, since, seen.get(channel.id, ()))
            except Absent:
                moved, found = [], []
            keep = [ts for ts in found if float(ts) >= began - self._options.overlap_seconds]
            if keep:
                now_seen[channel.id] = keep
            size = self._options.page_size
            for start in range(0, len(moved), size):
                entries = [await self._entry_or_gone(channel, ts) for ts in moved[start : start + size]]
                last = start + size >= len(moved)
                yield Page(
                    entries,
                    {
                        "at": at,
                        "seen": seen,
                        "began": began,
                        "now_seen": dict(now_seen),
                        "after": channel.id if last else after,
                    },
                )
            after = channel.id
        yield Page((), {"at": began, "seen": now_seen})

    async def _moved(self, channel: Channel, since: float, seen: Sequence[str]) -> tuple[list[str], list[str]]:
        """(threads to read, oldest first; all parents that were met)"""
        moved: set[str] = set()
        met: set[str] = set()
        oldest = max(0.0, since - self._options.thread_days * DAY)
        latest: str | None = None
        while True:
            messages, latest = await self._api.history(
                channel.id, limit=self._options.rows_per_request, latest=latest, oldest=f"{oldest:.6f}"
            )
            for message in messages:
                if root(message) != message["ts"] and float(message["ts"]) >= since:
                    moved.add(root(message))  # an answer that was also sent to the channel: its thread may be old
                elif self._is_document(message):
                    met.add(message["ts"])
                    if newest(message) >= since:
                        moved.add(message["ts"])
            if latest is None:
                break
        moved |= {ts for ts in seen if ts not in met}
        return sorted(moved, key=float), sorted(met, key=float)

    # These

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        """A document of a channel that the app was put out of is not said to be gone before its time."""
        entries: list[Entry] = []
        wanted: dict[str, list[str]] = defaultdict(list)
        for id in dict.fromkeys(external_ids):
            parts = split_id(id)
            if parts is None:
                entries.append(Gone(id))
            else:
                wanted[parts[0]].append(parts[1])
        for channel_id, stamps in wanted.items():
            channel = await self._directory.channel(channel_id)
            if channel is not None and not self._directory.wants(channel):
                entries += [Gone(external_id(channel_id, ts)) for ts in stamps]
            elif channel is None or not channel.is_member:
                entries += await self._losses.entries(channel_id, channel, stamps)
            else:
                await self._losses.found(channel_id)
                entries += [await self._entry_or_gone(channel, ts) for ts in stamps]
        return entries

    async def _entry_or_gone(self, channel: Channel, ts: str, parent: Object | None = None) -> Entry:
        try:
            return await self.entry(channel, ts, parent)
        except Absent as absent:
            if absent.code in ("thread_not_found", "message_not_found"):
                return Gone(external_id(channel.id, ts))
            return (await self._losses.entries(channel.id, None, [ts]))[0]

    async def entry(self, channel: Channel, ts: str, parent: Object | None = None) -> Entry:
        """parent: as a history has just shown it; its answers are asked for only if there are any. Raises Absent."""
        alone = parent is not None and not parent.get("reply_count") and not parent.get("thread_ts")
        messages = [parent] if alone and parent is not None else await self._api.thread(channel.id, ts)
        return await self.converted(channel, messages, ts)

    async def converted(self, channel: Channel, messages: Sequence[Mapping[str, Any]], ts: str) -> Entry:
        """The thread with everybody by name."""
        place = await self._directory.place(channel)
        least = self._options.min_characters
        names = await self._directory.names()
        entry = document(messages, ts, place, names, min_characters=least)
        if names.missing and await self._directory.introduce(names.missing):
            entry = document(messages, ts, place, await self._directory.names(), min_characters=least)
        return entry

    def _is_document(self, message: Object) -> bool:
        return is_document(message, min_characters=self._options.min_characters)


def _text(cursor: Cursor, key: str) -> str:
    found = cursor.get(key)
    if not isinstance(found, str):
        raise CursorExpired("this cursor of a full read was written by another version of the connector")
    return found


_CHANNEL_TAG = tag("")


class Lister:
    """Both raise what ``Api`` raises, but for Absent; and Retryable when Slack's list of channels lacks one that is
    there, because a listing that is cut short must not look complete."""

    def __init__(self, api: Api, directory: Directory, losses: Losses, options: SlackOptions) -> None:
        self._api = api
        self._directory = directory
        self._losses = losses
        self._options = options

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        """From the histories alone: no thread is opened for it."""
        done: set[str] = set()
        for _, channel in sorted((await self._directory.channels()).items()):
            if not self._directory.admits(channel):
                continue
            rows: list[tuple[str, str]] = []
            try:
                async for page in self._history(channel):
                    rows += [(one.external_id, one.revision or "") for one in page]
                    yield page
            except Absent:
                continue
            done.add(channel.id)
            await self._losses.listed(channel.id, rows)
            await self._losses.found(channel.id)
        for id in await self._losses.channels():
            if id not in done:
                async for page in self._of_lost(id):
                    yield page

    async def _of_lost(self, id: str) -> AsyncIterator[Sequence[Listed]]:
        """What was listed of it before. The channel is asked for anew for each page: access that was read for an
        earlier page would be published under a stamp that is later than the reading."""
        known = await self._losses.known(id)
        for start in range(0, max(1, len(known)), self._options.rows_per_request):
            channel = await self._lost_channel(id)
            yield await self._losses.listing(id, channel, known[start : start + self._options.rows_per_request])

    async def _history(self, channel: Channel) -> AsyncIterator[Sequence[Listed]]:
        place = await self._directory.place(channel)
        least = self._options.min_characters
        latest: str | None = None
        while True:
            messages, latest = await self._api.history(channel.id, limit=self._options.rows_per_request, latest=latest)
            yield [listed(message, place) for message in messages if is_document(message, min_characters=least)]
            if latest is None:
                return

    async def _lost(self, read: Collection[str]) -> Mapping[str, Channel | None]:
        """Channels listed before and not among ``read``, each asked for by name."""
        return {id: await self._lost_channel(id) for id in await self._losses.channels() if id not in read}

    async def _lost_channel(self, id: str) -> Channel | None:
        channel = await self._directory.channel(id)
        if channel is not None and self._directory.admits(channel):
            raise Retryable("Slack's list of channels lacked one that is there: the listing is not complete")
        return channel

    async def groups(self, tags: Collection[str] | None) -> AsyncIterator[Group]:
        """Each channel's members are asked for after the list of people, and both anew."""
        team, users = await self._directory.team(), await self._directory.users()
        if tags is None or workspace_tag(team) in tags:
            yield workspace_group(team, users)
        if tags is None:
            channels = await self._directory.channels()
            read = [channel for _, channel in sorted(channels.items()) if self._directory.admits(channel)]
            lost = list((await self._lost([channel.id for channel in read])).values())
        else:
            ids = sorted(name.removeprefix(_CHANNEL_TAG) for name in tags if name.startswith(_CHANNEL_TAG))
            asked = [await self._directory.channel(id) for id in ids]
            read = [channel for channel in asked if channel is not None and self._directory.admits(channel)]
            lost = [channel for channel in asked if channel is not None and not self._directory.admits(channel)]
        for channel in read:
            if (group := await self._group(channel, users)) is not None:
                yield group
        for gone in lost:
            if gone is not None and self._losses.is_kept(gone):
                yield Group(tag(gone.id), (), of=(workspace_tag(team),))

    async def _group(self, channel: Channel, users: Mapping[str, User]) -> Group | None:
        """None: nobody, for the app may not ask (any more)."""
        try:
            members = await self._api.everything("conversations.members", "members", channel=channel.id)
        except Absent:
            return None
        return channel_group(
            channel,
            (id for id in members if isinstance(id, str)),
            users,
            await self._directory.team(),
            trust_external_emails=self._options.trust_external_emails,
        )
