"""Change notifications.

https://learn.microsoft.com/en-us/graph/change-notifications-delivery-webhooks
https://learn.microsoft.com/en-us/graph/change-notifications-lifecycle-events

A subscription on a drive lives 30 days at most and is prolonged before that. Microsoft Graph proves by a request with a
``validationToken`` that the address accepts notifications, and each notification carries the subscription's secret.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from connectors.push import Registration, Registrations, digest, is_authentic
from connectors.sharepoint.client import Graph
from connectors.sharepoint.reading import Drive
from connectors.source import Memory, Reaction, Refused, Request
from connectors.web import Answered, Missing

SUBSCRIPTIONS = "subscriptions"
LIFETIME = timedelta(minutes=42_300)
"""The longest lifetime of a subscription on drive items (graph/api/resources/subscription, "Subscription lifetime")."""
MAX_TOKEN_CHARACTERS = 2_048
ACCEPTED = 202
"""The status that Microsoft Graph expects within 10 seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription(Registration):
    """A subscription on one drive."""

    renew_before: ClassVar[timedelta] = timedelta(days=3)
    drive: str


class Subscriptions:
    """Creates, renews and deletes the subscriptions, one for each drive."""

    def __init__(self, graph: Graph, memory: Memory, now: Callable[[], datetime]) -> None:
        self._graph = graph
        self._stored = Registrations(Subscription, memory, SUBSCRIPTIONS)
        self._now = now
        self._being_created = 0
        self._ended: set[str] = set()
        """Subscriptions that Microsoft Graph says it has removed."""
        self._to_renew: set[str] = set()
        """Subscriptions that Microsoft Graph requires to be renewed now."""

    async def renew(self, drives: Sequence[Drive], address: str) -> datetime | None:
        """Create missing subscriptions, prolong expiring ones, then delete those that are no longer needed. Return when
        to call again. Raises the first refusal, after all other drives have a subscription."""
        ended, self._ended = self._ended, set()
        stored = [entry for entry in await self._stored.load() if entry.id not in ended]
        refused: Answered | None = None
        ids = {drive.id for drive in drives}
        needed = {entry.drive: entry for entry in stored if entry.drive in ids and entry.address == address}
        for drive in drives:
            try:
                current = await self._current(needed.get(drive.id), drive, address)
            except Answered as error:
                refused = refused or error
                continue
            if current != needed.get(drive.id):
                needed[drive.id] = current
                stored = [entry for entry in stored if entry.id != current.id] + [current]
                await self._stored.save(stored)  # before anything else can fail: an unknown one could not be deleted
        for entry in [entry for entry in stored if needed.get(entry.drive) != entry]:
            await self._delete(entry)
            stored.remove(entry)
            await self._stored.save(stored)
        if refused is not None:
            raise refused
        return min((entry.renewal for entry in needed.values()), default=None)

    async def _current(self, known: Subscription | None, drive: Drive, address: str) -> Subscription:
        now = self._now()
        if known is not None and known.renewal > now and known.id not in self._to_renew:
            return known
        end = now + LIFETIME
        if known is not None and known.end > now:
            try:
                answer = await self._graph.renew_subscription(known.id, _text(end))
                self._to_renew.discard(known.id)
                return replace(known, opened=now.isoformat(), expires=_end(answer, end).isoformat())
            except Missing:
                pass  # Microsoft Graph has ended it
        secret = secrets.token_urlsafe(48)
        body = {
            "changeType": "updated",
            "notificationUrl": address,
            "lifecycleNotificationUrl": address,
            "resource": f"/drives/{drive.id}/root",
            "expirationDateTime": _text(end),
            "clientState": secret,
        }
        self._being_created += 1
        try:
            answer = await self._graph.subscribe(body)
        finally:
            self._being_created -= 1
        return Subscription(
            id=str(answer["id"]),
            drive=drive.id,
            address=address,
            digest=digest(secret),
            opened=now.isoformat(),
            expires=_end(answer, end).isoformat(),
        )

    async def _delete(self, entry: Subscription) -> None:
        if entry.end <= self._now():
            return
        try:
            await self._graph.unsubscribe(entry.id)
        except Missing:
            return  # it has expired

    async def reaction(self, request: Request) -> tuple[Reaction, bool]:
        """Return the reaction to a request, and whether the subscriptions have to be renewed now. Raises Refused."""
        if (token := request.query.get("validationToken")) is not None:
            # Only while we create a subscription: nobody else may have this server repeat a text.
            if not self._being_created or len(token) > MAX_TOKEN_CHARACTERS:
                raise Refused("a validation that no subscription has caused")
            return Reaction(answer=token.encode()), False
        entries = _notifications(request.body)
        stored = {entry.id: entry for entry in await self._stored.load()}
        now = self._now()
        if not entries or not all(
            is_authentic(str(entry.get("clientState") or ""), stored.get(str(entry.get("subscriptionId"))), now)
            for entry in entries
        ):
            raise Refused("not a notification of a subscription: its id or clientState is unknown, or it has ended")
        events = {str(entry["subscriptionId"]): entry.get("lifecycleEvent") for entry in entries}
        self._ended |= {id_ for id_, event in events.items() if event == "subscriptionRemoved"}
        self._to_renew |= {id_ for id_, event in events.items() if event == "reauthorizationRequired"}
        return Reaction(changes=True, status=ACCEPTED), bool(self._ended or self._to_renew)


def _notifications(body: bytes) -> list[Mapping[str, Any]]:
    try:
        entries = json.loads(body)["value"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return []
    return entries


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _end(answer: Mapping[str, Any], requested: datetime) -> datetime:
    try:
        end = datetime.fromisoformat(str(answer.get("expirationDateTime", "")))
    except ValueError:
        return requested
    return end if end.tzinfo else end.replace(tzinfo=UTC)
