"""Push channels, and the work that an instance starts without a request.

https://developers.google.com/workspace/drive/api/guides/push. A channel lives a week at most and cannot be prolonged:
before it ends another one with a new id takes over. Changes may call for sweeps and groups, and grants end at their
time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from connectors.google_drive.client import Api
from connectors.google_drive.reading import Corpus, Kept
from connectors.source import Memory, Reaction, Refused, Request
from connectors.web import Answered, Missing
from pipeline.core.errors import Misconfigured, Retryable

CHANNELS = "channels"
LIFE = timedelta(days=7)
"""The longest that Google grants a channel on changes; by itself it would be an hour."""
RENEW_BEFORE = timedelta(hours=12)
SHORT = 0.2
"""Google may grant less than was asked for: then the last fifth is left for renewing."""
REMEMBERED = 1_000
"""Message numbers of a channel, for telling duplicates. Forgetting one costs a poll."""


@dataclass(frozen=True, slots=True)
class Channel:
    """As kept in Memory: of its secret only the digest, so that reading the table lets nobody speak for Google."""

    id: str
    corpus: str
    address: str
    resource: str
    digest: str
    opened: str
    expires: str

    @property
    def end(self) -> datetime:
        return datetime.fromisoformat(self.expires)

    @property
    def renewal(self) -> datetime:
        opened = datetime.fromisoformat(self.opened)
        return self.end - min(RENEW_BEFORE, (self.end - opened) * SHORT)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Channels:
    """One channel for each log of changes."""

    def __init__(self, api: Api, memory: Memory, now: Callable[[], datetime]) -> None:
        self._api = api
        self._memory = memory
        self._now = now
        self._seen: dict[str, deque[str]] = {}

    async def _kept(self) -> list[Channel]:
        return [Channel(**one) for one in await self._memory.get(CHANNELS) or []]

    async def _keep(self, channels: Sequence[Channel]) -> None:
        await self._memory.put(CHANNELS, [asdict(one) for one in channels] or None)

    async def renew(self, corpora: Collection[Corpus], address: str) -> datetime | None:
        """Opens what is missing or about to end, then stops what is no longer needed; returns when to come again.
        Raises the first refusal, when all the others are open."""
        kept, now = await self._kept(), self._now()
        keys = {corpus.key for corpus in corpora}
        good = [one for one in kept if one.address == address and one.corpus in keys and one.renewal > now]
        refused: dict[str, Answered] = {}
        for corpus in corpora:
            if all(one.corpus != corpus.key for one in good):
                try:
                    opened = await self._open(corpus, address)
                except Answered as error:
                    refused[corpus.key] = error
                    continue
                good.append(opened)
                kept.append(opened)
                await self._keep(kept)  # before anything else can fail: it has to be stopped one day
        for old in [one for one in kept if one not in good and one.corpus not in refused]:
            await self._stop(old)
            kept.remove(old)
            await self._keep(kept)
        if refused:
            raise next(iter(refused.values()))
        return min((one.renewal for one in good), default=None)

    async def _open(self, corpus: Corpus, address: str) -> Channel:
        secret, id_, now = secrets.token_urlsafe(32), str(uuid.uuid4()), self._now()
        token = str((await self._api.start_page_token(corpus.drive))["startPageToken"])
        asked = {
            "id": id_,
            "type": "web_hook",
            "address": address,
            "token": secret,
            "expiration": str(int((now + LIFE).timestamp() * 1000)),
        }
        answer: Mapping[str, Any] = await self._api.watch(corpus.drive, token, asked)
        end = datetime.fromtimestamp(int(answer["expiration"]) / 1000, UTC) if "expiration" in answer else now + LIFE
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
            return  # it has ended by itself

    async def reaction(self, request: Request) -> Reaction:
        """Raises Refused."""
        id_ = request.headers.get("x-goog-channel-id", "")
        secret = digest(request.headers.get("x-goog-channel-token", ""))
        channel = next((one for one in await self._kept() if one.id == id_), None)
        proven = hmac.compare_digest(secret, channel.digest if channel else digest(""))
        if channel is None or not proven or channel.end <= self._now():
            raise Refused("not a notification of a channel of ours: its id or its token is another, or it has ended")
        if request.headers.get("x-goog-resource-state") == "sync":
            return Reaction()  # "the channel is open"
        number = request.headers.get("x-goog-message-number", "")
        seen = self._seen.setdefault(id_, deque(maxlen=REMEMBERED))
        if number and number in seen:
            return Reaction()
        seen.append(number)
        return Reaction(changes=True)


log = structlog.get_logger()

React = Callable[[Reaction], Awaitable[None]]
Renew = Callable[[], Awaitable[datetime | None]]
"""Keeps the channels open, and says when to be called again."""

LOOK_SECONDS = 15.0
"""How often the end of a grant is looked for: a reader keeps an ended grant about so long."""
AGAIN = timedelta(minutes=5)
"""Until a document that should have been read again is asked for again, and a refused channel is tried again."""


class Listener:
    def __init__(self) -> None:
        self._groups: set[str] = set()
        self._sweep = False
        self._wish = asyncio.Event()
        self._asked: dict[str, datetime] = {}

    def groups(self, tags: Collection[str]) -> None:
        self._groups |= set(tags)
        self._wish.set()

    def sweep(self) -> None:
        self._sweep = True
        self._wish.set()

    async def run(
        self,
        react: React,
        kept: Kept,
        now: Callable[[], datetime],
        renew: Renew | None,
        *,
        source: str,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """Until cancelled. renew None: nothing can be sent to us."""
        renewal: datetime | None = None
        while True:
            if renew is not None and (renewal is None or renewal <= now()):
                renewal = await _renewed(renew, source) or now() + AGAIN
            ended = self._not_asked(await kept.due(now()), now())
            groups, sweep = self._groups, self._sweep
            self._groups, self._sweep = set(), False
            self._wish.clear()
            if ended or groups or sweep:
                await react(Reaction(ids=ended, groups=groups, sweep=sweep))
            try:
                async with asyncio.timeout(look_seconds):
                    await self._wish.wait()
            except TimeoutError:
                continue

    def _not_asked(self, ids: Sequence[str], now: datetime) -> list[str]:
        self._asked = {id_: at for id_, at in self._asked.items() if now - at < AGAIN}
        new = [id_ for id_ in ids if id_ not in self._asked]
        self._asked |= dict.fromkeys(new, now)
        return new


async def _renewed(renew: Renew, source: str) -> datetime | None:
    """None: not now. Polling goes on in any case."""
    try:
        return await renew()
    except (Retryable, Misconfigured, Answered) as error:
        log.warning("google_drive", source=source, code="channel", problem=str(error))
        return None
