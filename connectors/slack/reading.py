"""Reading threads: everything, what changed, and these."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from connectors.slack.api import Absent, Api, Object
from connectors.slack.archive import Archive, completes
from connectors.slack.directory import Directory
from connectors.slack.losses import Losses
from connectors.slack.options import SlackOptions
from connectors.slack.people import Channel
from connectors.slack.threads import document, external_id, is_document, newest, root, split_id
from connectors.source import Cursor, CursorExpired, Entry, Gone, Page

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
                yield Page(entries, {
                    "at": at, "seen": seen, "began": began, "now_seen": dict(now_seen),
                    "after": channel.id if last else after,
                })  # fmt: skip
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
