"""Push channels.

https://developers.google.com/workspace/drive/api/guides/push. A channel lives a week at most and cannot be prolonged:
before it expires, another one with a new id replaces it.
"""

from __future__ import annotations

import secrets
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from connectors.google_drive.client import Api
from connectors.google_drive.reading import Corpus
from connectors.push import Registration, Registrations, digest, is_authentic
from connectors.source import Memory, Reaction, Refused, Request
from connectors.web import Answered, Missing

CHANNELS = "channels"
CHANNEL_LIFETIME = timedelta(days=7)
"""The longest lifetime that Google grants a channel on changes; the default is an hour."""
MAX_REMEMBERED_MESSAGES = 1_000
"""Message numbers of a channel that are remembered to detect duplicates. Forgetting one costs a poll."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel(Registration):
    """A channel on the log of changes of one corpus."""

    renew_before: ClassVar[timedelta] = timedelta(hours=12)
    corpus: str
    resource: str


class Channels:
    """Opens, renews and stops the channels, one for each corpus."""

    def __init__(self, api: Api, memory: Memory, now: Callable[[], datetime]) -> None:
        self._api = api
        self._stored = Registrations(Channel, memory, CHANNELS)
        self._now = now
        self._seen: dict[str, deque[str]] = {}

    async def renew(self, corpora: Collection[Corpus], address: str) -> datetime | None:
        """Open missing and expiring channels, then stop those that are no longer needed. Return when to call again.
        Raises the first refusal, after all other channels are open."""
        corpora = [corpus for corpus in corpora if corpus.user is None]  # thousands of channels; polls find changes
        stored, now = await self._stored.load(), self._now()
        keys = {corpus.key for corpus in corpora}
        current = [old for old in stored if old.address == address and old.corpus in keys and old.renewal > now]
        refused: dict[str, Answered] = {}
        for corpus in corpora:
            if all(channel.corpus != corpus.key for channel in current):
                try:
                    opened = await self._open(corpus, address)
                except Answered as error:
                    refused[corpus.key] = error
                    continue
                current.append(opened)
                stored.append(opened)
                await self._stored.save(stored)  # before anything else can fail: nobody could stop an unknown one
        for old in [channel for channel in stored if channel not in current and channel.corpus not in refused]:
            await self._stop(old)
            stored.remove(old)
            await self._stored.save(stored)
        if refused:
            raise next(iter(refused.values()))
        return min((channel.renewal for channel in current), default=None)

    async def _open(self, corpus: Corpus, address: str) -> Channel:
        secret, id_, now = secrets.token_urlsafe(32), str(uuid.uuid4()), self._now()
        token = str((await self._api.start_page_token(corpus.drive))["startPageToken"])
        requested = {
            "id": id_,
            "type": "web_hook",
            "address": address,
            "token": secret,
            "expiration": str(int((now + CHANNEL_LIFETIME).timestamp() * 1000)),
        }
        answer: Mapping[str, Any] = await self._api.watch(corpus.drive, token, requested)
        end = (
            datetime.fromtimestamp(int(answer["expiration"]) / 1000, UTC)
            if "expiration" in answer
            else now + CHANNEL_LIFETIME
        )
        return Channel(
            id=id_,
            corpus=corpus.key,
            address=address,
            resource=str(answer.get("resourceId", "")),
            digest=digest(secret),
            opened=now.isoformat(),
            expires=end.isoformat(),
        )

    async def _stop(self, channel: Channel) -> None:
        if channel.end <= self._now():
            return
        try:
            await self._api.stop(channel.id, channel.resource)
        except Missing:
            return  # it has expired

    async def reaction(self, request: Request) -> Reaction:
        """Return the reaction to a notification. Raises Refused."""
        id_ = request.headers.get("x-goog-channel-id", "")
        channel = next((stored for stored in await self._stored.load() if stored.id == id_), None)
        if not is_authentic(request.headers.get("x-goog-channel-token", ""), channel, self._now()):
            raise Refused("not a notification of an open channel: its id or token is unknown, or it has ended")
        if request.headers.get("x-goog-resource-state") == "sync":
            return Reaction()  # the first notification, which says only that the channel is open
        number = request.headers.get("x-goog-message-number", "")
        seen = self._seen.setdefault(id_, deque(maxlen=MAX_REMEMBERED_MESSAGES))
        if number and number in seen:
            return Reaction()
        seen.append(number)
        return Reaction(changes=True)
