"""Push channels: https://developers.google.com/workspace/drive/api/guides/push"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import urlsplit

from connectors.fakes.google_drive_corpus import Corpus
from connectors.fakes.google_drive_errors import ApiError, missing

LIFE = timedelta(hours=1)
LONGEST = timedelta(days=7)
"""Of a channel on changes; on one file a day."""


@dataclass(slots=True)
class Channel:
    id: str
    resource: str
    uri: str
    address: str
    token: str | None
    ends: datetime
    drive: str | None
    told: int
    """Number of the newest change that it was told of."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(frozen=True, slots=True)
class Notification:
    """A POST that Google sends; its body is empty. Header names in lower case."""

    address: str
    headers: Mapping[str, str]


class Channels:
    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.open: dict[str, Channel] = {}
        self._used: set[str] = set()
        self._outbox: list[Notification] = []

    def watch(self, body: Mapping[str, Any], *, drive: str | None, uri: str) -> dict[str, Any]:
        for name in ("id", "type", "address"):
            if not body.get(name):
                raise missing(name)
        if body["type"] not in ("web_hook", "webhook"):
            raise ApiError(400, "channelUnknownType", f"Unknown channel type: {body['type']}")
        address = urlsplit(str(body["address"]))
        if address.scheme != "https" and address.hostname not in ("127.0.0.1", "localhost"):
            # Google takes no http at all; this machine's own address is let through, since nothing leaves it.
            raise ApiError(400, "push.webhookUrlNotHttps", f"WebHook callback must be HTTPS: {body['address']}")
        if body["id"] in self._used:
            raise ApiError(400, "channelIdNotUnique", f"Channel id {body['id']} not unique")
        now = self._corpus.now()
        asked = body.get("expiration")
        ends = datetime.fromtimestamp(int(asked) / 1000, UTC) if asked else now + LIFE
        if ends <= now:
            raise ApiError(400, "channelExpired", "Requested expiration time is in the past")
        channel = Channel(
            id=str(body["id"]), resource=f"res-{drive or 'user'}", uri=uri, address=str(body["address"]),
            token=body.get("token"), ends=min(ends, now + LONGEST), drive=drive, told=self._newest(drive),
        )  # fmt: skip
        self._used.add(channel.id)
        self.open[channel.id] = channel
        self._outbox.append(self._notification(channel, "sync"))
        return {
            "kind": "api#channel",
            "id": channel.id,
            "resourceId": channel.resource,
            "resourceUri": channel.uri,
            "expiration": str(int(channel.ends.timestamp() * 1000)),
            **({"token": channel.token} if channel.token else {}),
        }

    def stop(self, body: Mapping[str, Any]) -> None:
        channel = self.open.get(str(body.get("id")))
        if channel is None or channel.resource != body.get("resourceId"):
            raise ApiError(404, "notFound", f"Channel '{body.get('id')}' not found for project 'penstock-test'")
        del self.open[channel.id]

    def take(self) -> list[Notification]:
        """What Google would have sent since the last call. Several changes may come as one notification."""
        for channel in list(self.open.values()):
            newest = self._newest(channel.drive)
            if channel.ends <= self._corpus.now():
                del self.open[channel.id]
            elif newest > channel.told:
                channel.told = newest
                self._outbox.append(self._notification(channel, "change"))
        sent, self._outbox = self._outbox, []
        return sent

    def _newest(self, drive: str | None) -> int:
        return max((change.number for change in self._corpus.changes if change.log == drive), default=0)

    def _notification(self, channel: Channel, state: str) -> Notification:
        headers = {
            "x-goog-channel-id": channel.id,
            "x-goog-channel-expiration": format_datetime(channel.ends.astimezone(UTC), usegmt=True),
            "x-goog-resource-id": channel.resource,
            "x-goog-resource-uri": channel.uri,
            "x-goog-resource-state": state,
            "x-goog-message-number": str(next(channel.numbers)),
            **({"x-goog-channel-token": channel.token} if channel.token else {}),
        }
        return Notification(channel.address, headers)
