"""What is there, without text, and who may read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from connectors.slack.api import Absent, Api
from connectors.slack.directory import Directory
from connectors.slack.losses import Losses
from connectors.slack.options import SlackOptions
from connectors.slack.people import Channel, User, channel_group, workspace_group, workspace_tag
from connectors.slack.threads import is_document, listed, tag
from connectors.source import Group, Listed
from pipeline.core.errors import Retryable

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
            channel, (id for id in members if isinstance(id, str)), users, await self._directory.team(),
            trust_external_emails=self._options.trust_external_emails,
        )  # fmt: skip
