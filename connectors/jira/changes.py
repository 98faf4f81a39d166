"""Events that Jira sends, and the cursor over changes. Pure.

https://developer.atlassian.com/cloud/jira/platform/webhooks/ and
https://developer.atlassian.com/server/jira/platform/webhooks/. Webhooks with a secret are signed; an automation rule
can only send the secret along. Jira's search lags behind, so every poll overlaps the previous one, and the cursor holds
the updates that it saw there. Only durations are used, so the clocks need not agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from connectors.atlassian import progress_of
from connectors.source import Cursor, Reaction, Refused, Request

MAX_SEEN_UPDATES = 20_000
"""The cursor holds at most this many updates. Older ones are read again, and are then recognized as unchanged."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the changes of a site were read: the content of the cursor."""

    polled_at: datetime
    """When the last complete poll began, by the local clock."""
    seen: Mapping[str, str]
    """Id of an issue → time of its update, for each in the last complete poll and each that the current one has read.
    """

    @classmethod
    def from_cursor(cls, cursor: Cursor) -> Progress:
        """Raises CursorExpired for a cursor in another format."""
        return progress_of(cursor, cls)

    @property
    def cursor(self) -> Cursor:
        return {"at": self.polled_at.isoformat(), "seen": dict(self.seen)}

    def unread(self, updates: Mapping[str, str]) -> list[str]:
        """Return the issues with updates that were not seen yet, in the order of ``updates``."""
        return [id for id, at in updates.items() if self.seen.get(id) != at]

    def with_read(self, updates: Mapping[str, str]) -> Progress:
        return Progress(self.polled_at, {**self.seen, **updates})

    def completed(self, at: datetime, updates: Mapping[str, str]) -> Progress:
        """Return the progress after a poll that began at ``at`` and read everything that its last search returned."""
        return Progress(at, dict(list(updates.items())[-MAX_SEEN_UPDATES:]))


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    """Such as ``jira:issue_updated`` or ``comment_deleted``."""
    issue: str | None
    """The id of the issue that it concerns."""
    sent_at: Any
    """The event's own time stamp, unparsed; None: it has none."""


def parse(request: Request) -> Event:
    """Parse a verified event. Raises Refused when the body is no JSON object."""
    try:
        body = json.loads(request.body)
    except ValueError as error:
        raise Refused("an event is not valid JSON") from error
    if not isinstance(body, dict):
        raise Refused("an event is not a JSON object")
    issue = body.get("issue")
    id = str(issue.get("id") or "") if isinstance(issue, Mapping) else ""
    return Event(
        str(body.get("webhookEvent") or body.get("event") or ""),
        id if id.isascii() and id.isdecimal() and len(id) < 20 else None,
        body.get("timestamp"),
    )


def reaction(event: Event) -> Reaction:
    """Return the reaction to an event. It names the issue alone: the poll that it causes finds the issue's comments and
    files, and the sweep those of a deleted one."""
    ids = () if event.issue is None else (event.issue,)
    noun, _, verb = event.name.removeprefix("jira:").partition("_")
    match noun:
        case "issue" if verb == "deleted":
            return Reaction(ids=ids, sweep=True)
        case "issue" if verb in ("created", "updated"):
            return Reaction(ids=ids, changes=True)
        case "comment" if verb == "deleted":
            return Reaction(ids=ids, changes=True, sweep=not ids)
        case "comment" | "attachment":
            return Reaction(ids=ids, changes=True)
        case "project":
            return Reaction(sweep=True)
        case _:
            return Reaction()
