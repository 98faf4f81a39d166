"""Reads and lists threads, also those of channels that the app can no longer read ("lost" channels).

Slack does not distinguish a channel that the app was removed from and one that was deleted. Both are closed to
everybody at once, but their documents are deleted only after ``forget_lost_after_hours``, so that removing the app by
mistake and inviting it again loses nothing. The last listing of each channel is stored on disk, because Slack no longer
lists such channels. If that folder is lost, their documents are missing from the next listing, and the sweep's guard
and ``fetch`` decide about them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from connectors.errors import BadData
from connectors.portions import pages_of
from connectors.set_aside import UNEXPECTED, Failures, SetAside, each, reading_data
from connectors.slack.access import Channel, Directory, User, channel_group, workspace_group, workspace_tag
from connectors.slack.archive import Archive, is_complete
from connectors.slack.client import Absent, Api, Object, TooManyRows
from connectors.slack.content import (
    document,
    external_id,
    is_document,
    last_change,
    listed,
    split_id,
    tag,
    thread_ts,
    too_large,
)
from connectors.slack.files import Files
from connectors.slack.options import SlackOptions
from connectors.source import (
    Cursor,
    CursorExpired,
    Document,
    Entry,
    Gone,
    Group,
    Listed,
    Memory,
    Page,
    Unlisted,
    Unreadable,
)
from connectors.web import ServerFailed
from pipeline.core.errors import Retryable

_ID = re.compile(r"[CG][A-Z0-9]{1,40}")
Row = tuple[str, str]
"""(external id, revision)"""


class StoredListings:
    """The last complete listing of each channel, in files. It blocks, so call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "channels"

    def channels(self) -> list[str]:
        """Return the ids of the channels that have a stored listing."""
        if not self._folder.is_dir():
            return []
        return sorted(path.stem for path in self._folder.glob("*.json") if _ID.fullmatch(path.stem))

    def write(self, channel: str, rows: Sequence[Row]) -> None:
        """Store a channel's complete listing."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, part = self._path(channel), self._path(channel).with_suffix(".part")
        text = json.dumps(rows)
        if path.exists() and path.read_text() == text:
            return
        part.write_text(text)
        os.replace(part, path)

    def read(self, channel: str) -> list[Row]:
        """Return a channel's stored listing; a missing or damaged file counts as empty."""
        try:
            rows = json.loads(self._path(channel).read_text())
        except (FileNotFoundError, ValueError):
            return []
        return [(str(id), str(revision)) for id, revision in rows]

    def forget(self, channels: Collection[str]) -> None:
        for channel in channels:
            self._path(channel).unlink(missing_ok=True)

    def _path(self, channel: str) -> Path:
        if not _ID.fullmatch(channel):
            raise ValueError("no channel id")
        return self._folder / f"{channel}.json"


HOUR_SECONDS = 3_600.0


class LostChannels:
    """Decides what to return for the documents of channels that the app can no longer read."""

    def __init__(self, directory: Directory, options: SlackOptions, memory: Memory, folder: Path) -> None:
        self._directory = directory
        self._options = options
        self._memory = memory
        self._stored = StoredListings(folder)

    async def record(self, channel: str, rows: Sequence[Row]) -> None:
        """Store the complete listing of a channel that the app can read."""
        await asyncio.to_thread(self._stored.write, channel, rows)

    async def listed_channels(self) -> list[str]:
        """Return the ids of the channels that were listed and not forgotten."""
        return await asyncio.to_thread(self._stored.channels)

    def is_still_public(self, channel: Channel | None) -> bool:
        """True for an archived public channel: in Slack the workspace can still read it, and the app cannot."""
        return (
            channel is not None
            and channel.is_archived
            and not channel.is_private
            and self._directory.is_selected(channel)
        )

    async def last_listing(self, id: str) -> list[Row]:
        """Return a channel's last complete listing, which contains ids and revisions but no access."""
        return await asyncio.to_thread(self._stored.read, id)

    async def listing(self, id: str, channel: Channel | None, rows: Sequence[Row]) -> list[Listed]:
        """Return the entries of a sweep for some rows of a lost channel's last listing. ``channel`` is its present
        state; None: the app does not see it."""
        if self.is_still_public(channel):
            return [Listed(external_id=id_, acl_tags=(tag(id),), revision=revision) for id_, revision in rows]
        excluded = channel is not None and not self._directory.is_selected(channel)
        if excluded or await self._is_expired(id):
            await asyncio.to_thread(self._stored.forget, [id])
            return []
        return [Listed(external_id=id_, acl_tags=(), revision=_lost_revision(revision)) for id_, revision in rows]

    async def entries(self, id: str, channel: Channel | None, stamps: Sequence[str]) -> list[Entry]:
        """Return the entries of ``fetch`` for the threads with these ``ts`` in a lost channel."""
        ids = [external_id(id, ts) for ts in stamps]
        revisions = dict(await asyncio.to_thread(self._stored.read, id))
        if self.is_still_public(channel):
            return [
                Unreadable(
                    external_id=id_,
                    code="archived",
                    acl_tags=(tag(id),),
                    revision=revisions.get(id_),
                    message="its channel is archived, and Slack returns it to no app: what was read before stays",
                )
                for id_ in ids
            ]
        if await self._is_expired(id):
            return [Gone(id_) for id_ in ids]
        return [
            Unreadable(
                external_id=id_,
                code="access_lost",
                acl_tags=(),
                revision=_lost_revision(revisions[id_]) if id_ in revisions else None,
                message="the app is no member of this channel: invite it, or the document will be deleted",
            )
            for id_ in ids
        ]

    async def mark_readable(self, id: str) -> None:
        """Record that the app can read the channel (again)."""
        if await self._memory.get(_lost_key(id)) is not None:
            await self._memory.put(_lost_key(id), None)

    async def _is_expired(self, id: str) -> bool:
        """True when the channel has been lost for ``forget_lost_after_hours``, counted from the first call."""
        since = await self._memory.get(_lost_key(id))
        if not isinstance(since, int | float):
            since = time.time()
            await self._memory.put(_lost_key(id), since)
        return time.time() >= since + self._options.forget_lost_after_hours * HOUR_SECONDS


def _lost_revision(revision: str) -> str:
    """Return a revision that differs from the document's own, so that it is read again when the channel returns."""
    return f"lost:{revision}"


def _lost_key(id: str) -> str:
    return f"lost:{id}"


DAY_SECONDS = 86_400.0


async def require_alive(api: Api) -> None:
    """Raise Retryable unless Slack answers another request, so that one channel is the reason of a failure."""
    await api.call("auth.test")


class Reader:
    """Reads threads. Every method raises the errors of ``Api`` except Absent."""

    def __init__(
        self,
        api: Api,
        directory: Directory,
        lost: LostChannels,
        files: Files,
        options: SlackOptions,
        set_aside: SetAside,
    ) -> None:
        self._api = api
        self._directory = directory
        self._lost = lost
        self._files = files
        self._options = options
        self._set_aside = set_aside

    async def channels(self) -> list[Channel]:
        """Return the channels to read, in the order of their ids."""
        channels = await self._directory.channels()
        return [channel for _, channel in sorted(channels.items()) if self._directory.is_read(channel)]

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        """Read channel by channel, each from its newest message to its oldest. A channel that is lost meanwhile ends
        early, and the sweep handles it. The API's histories decide which threads exist; an export archive only saves
        the request for the replies of each. Raises Misconfigured for an unreadable archive."""
        current, before = (None, None) if cursor is None else (_text(cursor, "channel"), _text(cursor, "before"))
        archive = await self._open_archive()
        try:
            await self._directory.join()
            for channel in await self.channels():
                if current is None or channel.id >= current:
                    stored = await asyncio.to_thread(archive.threads, channel.id) if archive else {}
                    async for page in self._history(channel, before if channel.id == current else None, stored):
                        yield page
        finally:
            if archive:
                archive.close()

    async def _history(
        self, channel: Channel, latest: str | None, stored: Mapping[str, list[Mapping[str, Any]]]
    ) -> AsyncIterator[Page]:
        while True:
            began = datetime.now(UTC)
            try:
                messages, following = await self._api.history(channel.id, limit=self._options.page_size, latest=latest)
            except Absent:
                return
            except ServerFailed as error:
                await require_alive(self._api)
                self._set_aside.add("listing", f"channel {channel.id}", error)
                return
            documents, failed = await asyncio.to_thread(each, messages, self._document_in, _ts)
            for ts, reason in failed.items():
                self._set_aside.add("listing", f"thread {external_id(channel.id, ts)}", reason)
            parents = [message for message in documents if message is not None]
            if messages:
                cursor = {"channel": channel.id, "before": min((m["ts"] for m in messages), key=float)}
                read = partial(self._thread_entries, channel, stored)
                async with aclosing(pages_of(parents, read, cursor, began=began)) as pages:
                    async for page in pages:
                        yield page
            if following is None:
                return
            latest = following

    async def _thread_entries(
        self, channel: Channel, stored: Mapping[str, list[Mapping[str, Any]]], parents: Sequence[Object]
    ) -> list[Entry]:
        return [await self._thread_entry(channel, parent, stored.get(parent["ts"], [])) for parent in parents]

    async def _thread_entry(self, channel: Channel, parent: Object, stored: list[Mapping[str, Any]]) -> Entry:
        try:
            with reading_data():
                is_stored = is_complete(stored, parent)
            if is_stored:
                return await self._convert(channel, [parent, *stored], parent["ts"])
        except BadData as error:
            return _unreadable(channel, parent["ts"], error)
        return await self._entry_or_gone(channel, parent["ts"], parent)

    async def _open_archive(self) -> Archive | None:
        if self._options.archive is None:
            return None
        archive = await asyncio.to_thread(Archive, self._options.archive)
        await self._directory.add_users(await asyncio.to_thread(archive.users))
        return archive

    # Changes

    @staticmethod
    def now() -> Cursor:
        return {"at": time.time()}

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        """Read threads that changed since the cursor's ``at`` minus the overlap, among the parents of the
        ``thread_days`` before that. Threads that the previous poll saw in the overlap and that are no longer listed are
        read by id. The cursor's ``began``, ``now_seen`` and ``after`` belong to an interrupted poll."""
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
                changed, parents = await self._changed_threads(channel, since, seen.get(channel.id, ()))
            except Absent:
                changed, parents = [], []
            except ServerFailed as error:  # the sweep finds its changes
                await require_alive(self._api)
                self._set_aside.add("listing", f"channel {channel.id}", error)
                changed, parents = [], []
            keep = [ts for ts in parents if float(ts) >= began - self._options.overlap_seconds]
            if keep:
                now_seen[channel.id] = keep
            size = self._options.page_size
            for start in range(0, len(changed), size):
                progress = {
                    "at": at,
                    "seen": seen,
                    "began": began,
                    "now_seen": dict(now_seen),
                    "after": channel.id if start + size >= len(changed) else after,
                }
                read = partial(self._entries_or_gone, channel)
                async with aclosing(pages_of(changed[start : start + size], read, progress)) as pages:
                    async for page in pages:
                        yield page
            after = channel.id
        yield Page((), {"at": began, "seen": now_seen})

    async def _changed_threads(
        self, channel: Channel, since: float, seen: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Return the threads to read and all parents that were listed, both by ``ts``, oldest first."""
        changed: set[str] = set()
        parents: set[str] = set()
        oldest = max(0.0, since - self._options.thread_days * DAY_SECONDS)
        latest: str | None = None
        while True:
            messages, latest = await self._api.history(
                channel.id, limit=self._options.rows_per_request, latest=latest, oldest=f"{oldest:.6f}"
            )
            begun, touched = await asyncio.to_thread(self._changed_in, messages, since)
            parents |= begun
            changed |= touched
            if latest is None:
                break
        changed |= {ts for ts in seen if ts not in parents}
        return sorted(changed, key=float), sorted(parents, key=float)

    # By id

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        """Read these documents. A document of a lost channel is not reported as gone before the channel expires."""
        entries: list[Entry] = []
        stamps_by_channel: dict[str, list[str]] = defaultdict(list)
        for id in dict.fromkeys(external_ids):
            parts = split_id(id)
            if parts is None:
                entries.append(Gone(id))
            else:
                stamps_by_channel[parts[0]].append(parts[1])
        for channel_id, stamps in stamps_by_channel.items():
            channel = await self._directory.channel(channel_id)
            if channel is not None and not self._directory.is_selected(channel):
                entries += [Gone(external_id(channel_id, ts)) for ts in stamps]
            elif channel is None or not channel.is_member:
                entries += await self._lost.entries(channel_id, channel, stamps)
            else:
                await self._lost.mark_readable(channel_id)
                entries += await self._entries_or_gone(channel, stamps)
        return entries

    async def _entries_or_gone(self, channel: Channel, stamps: Sequence[str]) -> list[Entry]:
        return [await self._entry_or_gone(channel, ts) for ts in stamps]

    async def _entry_or_gone(self, channel: Channel, ts: str, parent: Object | None = None) -> Entry:
        try:
            return await self.entry(channel, ts, parent)
        except BadData as error:
            return _unreadable(channel, ts, error)
        except Absent as absent:
            if absent.code in ("thread_not_found", "message_not_found"):
                return Gone(external_id(channel.id, ts))
            return (await self._lost.entries(channel.id, None, [ts]))[0]

    async def entry(self, channel: Channel, ts: str, parent: Object | None = None) -> Entry:
        """Read one thread. ``parent`` is the message from a history that was just read; its replies are requested only
        if there are any. Raises Absent."""
        without_replies = parent is not None and not parent.get("reply_count") and not parent.get("thread_ts")
        try:
            messages = [parent] if without_replies and parent is not None else await self._api.thread(channel.id, ts)
        except TooManyRows as error:
            entry = await self._convert(channel, error.first, ts)
            if isinstance(entry, Document):
                return too_large(error.first[0], await self._directory.channel_info(channel))
            return entry
        return await self._convert(channel, messages, ts)

    async def _convert(self, channel: Channel, messages: Sequence[Mapping[str, Any]], ts: str) -> Entry:
        """Convert a thread, after reading the names and files that it needs. Without a file that can be read later, it
        has another revision than its listing, so that the next sweep reads it again. Raises BadData."""
        with reading_data():
            channel_info = await self._directory.channel_info(channel)
            texts, is_complete = await self._files.texts(external_id(channel.id, ts), messages)
            convert = partial(
                document, messages, ts, channel_info, min_characters=self._options.min_characters, texts=texts
            )
            names = await self._directory.names()
            entry = await asyncio.to_thread(convert, names)
            if names.missing and await self._directory.load_users(names.missing):
                entry = await asyncio.to_thread(convert, await self._directory.names())
            if isinstance(entry, Document) and not is_complete:
                return replace(entry, revision=f"{entry.revision}:incomplete")
            return entry

    def _is_document(self, message: Object) -> bool:
        """Whether a message begins a document. Blocks: those of a page of bots may be 32 MB of mentions."""
        return is_document(message, min_characters=self._options.min_characters)

    def _changed_in(self, messages: Iterable[Object], since: float) -> tuple[set[str], set[str]]:
        """Return the messages that begin documents, and the beginnings of those that have changed since then.
        Blocks, as ``_is_document`` does."""
        parents, changed = set[str](), set[str]()
        for message in messages:
            try:
                with reading_data():
                    if thread_ts(message) != message["ts"] and float(message["ts"]) >= since:
                        changed.add(thread_ts(message))  # a reply that was also sent to the channel
                    elif self._is_document(message):
                        parents.add(message["ts"])
                        if last_change(message) >= since:
                            changed.add(message["ts"])
            except BadData:
                if float(message["ts"]) >= since:  # whether an older one has changed is found by sweeps
                    parents.add(message["ts"])
                    changed.add(message["ts"])
        return parents, changed

    def _document_in(self, message: Object) -> Object | None:
        """Return a message that begins a document; None: it does not."""
        return message if self._is_document(message) else None


def _ts(message: Object) -> object:
    return message["ts"]


def _unreadable(channel: Channel, ts: str, error: BadData) -> Unreadable:
    """Return the entry of a thread whose data cannot be read. Its readers are the members of its channel."""
    return Unreadable(
        external_id=external_id(channel.id, ts),
        code=UNEXPECTED,
        message=f"{error}: it is tried again with every sweep",
        acl_tags=(tag(channel.id),),
    )


def _text(cursor: Cursor, key: str) -> str:
    value = cursor.get(key)
    if not isinstance(value, str):
        raise CursorExpired("this cursor of a full read was written by another version of the connector")
    return value


_CHANNEL_TAG = tag("")


class Lister:
    """Lists documents and groups. Raises the errors of ``Api`` except Absent, and Retryable when Slack's list of
    channels lacks one that exists, because a truncated listing must not look complete."""

    def __init__(
        self, api: Api, directory: Directory, lost: LostChannels, options: SlackOptions, set_aside: SetAside
    ) -> None:
        self._api = api
        self._directory = directory
        self._lost = lost
        self._options = options
        self._set_aside = set_aside
        self._failures = Failures()

    async def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        """List all documents from the channels' histories, without reading any thread. A channel whose history fails is
        set aside."""
        listed_ids: set[str] = set()
        failed: dict[str, ServerFailed] = {}
        await self._directory.join()
        for _, channel in sorted((await self._directory.channels()).items()):
            if not self._directory.is_read(channel):
                continue
            rows: list[tuple[str, str]] = []
            try:
                async for page in self._history(channel):
                    rows += [(entry.external_id, entry.revision or "") for entry in page if isinstance(entry, Listed)]
                    yield page
            except Absent:
                continue
            except ServerFailed as error:
                await require_alive(self._api)
                failed[channel.id] = error
                yield [Unlisted(part=f"channel {channel.id}", reason=str(error), tag=tag(channel.id))]
                continue
            listed_ids.add(channel.id)
            await self._lost.record(channel.id, rows)
            await self._lost.mark_readable(channel.id)
        if failed and not listed_ids:
            raise next(iter(failed.values()))
        for id in await self._lost.listed_channels():
            if id not in listed_ids and id not in failed:
                async for lost_page in self._lost_listing(id):
                    yield lost_page

    async def _lost_listing(self, id: str) -> AsyncIterator[Sequence[Listed]]:
        """List a lost channel from its last listing. The channel is read again for each page, because access that was
        read for an earlier page would be published with a later observation time."""
        rows = await self._lost.last_listing(id)
        for start in range(0, max(1, len(rows)), self._options.rows_per_request):
            channel = await self._lost_channel(id)
            yield await self._lost.listing(id, channel, rows[start : start + self._options.rows_per_request])

    async def _history(self, channel: Channel) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        channel_info = await self._directory.channel_info(channel)
        min_characters = self._options.min_characters
        latest: str | None = None

        def entry(message: Object) -> Listed | None:
            return listed(message, channel_info) if is_document(message, min_characters=min_characters) else None

        while True:
            messages, latest = await self._api.history(channel.id, limit=self._options.rows_per_request, latest=latest)
            entries, failed = await asyncio.to_thread(each, messages, entry, _ts)
            yield [
                *(made for made in entries if made is not None),
                *(
                    Unlisted(part=f"thread {external_id(channel.id, ts)}", reason=str(error), is_document=True)
                    for ts, error in failed.items()
                ),
            ]
            if latest is None:
                return

    async def _lost_channels(self, read: Collection[str]) -> Mapping[str, Channel | None]:
        """Return the present state of each channel that was listed before and is not among ``read``."""
        return {id: await self._lost_channel(id) for id in await self._lost.listed_channels() if id not in read}

    async def _lost_channel(self, id: str) -> Channel | None:
        channel = await self._directory.channel(id)
        if channel is not None and self._directory.is_read(channel):
            raise Retryable("Slack's list of channels lacked one that exists: the listing is not complete")
        return channel

    async def groups(self, tags: Collection[str] | None) -> AsyncIterator[Group]:
        """Yield the groups of the workspace and of channels. People are read first, then each channel's members, and
        nothing comes from a cache."""
        team, users = await self._directory.team(), await self._directory.users()
        if tags is None or workspace_tag(team) in tags:
            yield workspace_group(team, users)
        if tags is None:
            visible = await self._directory.channels()
            read = [channel for _, channel in sorted(visible.items()) if self._directory.is_read(channel)]
            lost = list((await self._lost_channels([channel.id for channel in read])).values())
        else:
            ids = sorted(name.removeprefix(_CHANNEL_TAG) for name in tags if name.startswith(_CHANNEL_TAG))
            channels = [await self._directory.channel(id) for id in ids]
            read = [channel for channel in channels if channel is not None and self._directory.is_read(channel)]
            lost = [channel for channel in channels if channel is not None and not self._directory.is_read(channel)]
        unreadable: dict[str, str] = {}
        passing: ServerFailed | None = None
        for channel in read:
            name = f"members of channel {channel.id}"
            try:
                group = await self._group(channel, users)
            except ServerFailed as error:
                if self._failures.fail(name, error):
                    unreadable[name] = f"{error}; until then it admits nobody"
                else:
                    passing = error
                continue
            self._failures.succeed(name)
            if group is not None:
                yield group
        if passing is not None:
            raise passing
        if tags is None:
            self._set_aside.replace("access", unreadable)
        for lost_channel in lost:
            if lost_channel is not None and self._lost.is_still_public(lost_channel):
                yield Group(tag(lost_channel.id), (), of=(workspace_tag(team),))

    async def _group(self, channel: Channel, users: Mapping[str, User]) -> Group | None:
        """Return a channel's group; None: the app can no longer read its members, and the tag has none."""
        try:
            members = await self._api.all_rows("conversations.members", "members", channel=channel.id)
        except Absent:
            return None
        return channel_group(
            channel,
            (id for id in members if isinstance(id, str)),
            users,
            await self._directory.team(),
            trust_external_emails=self._options.trust_external_emails,
        )
