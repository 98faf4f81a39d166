"""Channels that the app was put out of: archived ones, and those that it was removed from or that were deleted.

Slack does not tell the last two apart. Both are closed to everybody at once; their documents go only after a while, so
that an app that was removed by mistake and invited again costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from connectors.slack.directory import Directory
from connectors.slack.options import SlackOptions
from connectors.slack.people import Channel
from connectors.slack.roster import Roster, Row
from connectors.slack.threads import external_id, tag
from connectors.source import Entry, Gone, Listed, Memory, Unreadable

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
                    external_id=one, code="archived", acl_tags=(tag(id),), revision=revisions.get(one),
                    message="its channel is archived, and Slack shows it to no app: what was read before stays",
                ) for one in ids
            ]  # fmt: skip
        if await self._is_over(id):
            return [Gone(one) for one in ids]
        return [
            Unreadable(
                external_id=one, code="access_lost", acl_tags=(),
                revision=_while_lost(revisions[one]) if one in revisions else None,
                message="the app is not in this channel (any more): invite it, or the document goes",
            ) for one in ids
        ]  # fmt: skip

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
