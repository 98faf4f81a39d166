"""Where a document comes from, as far as a story tells it: its connector, and what that knows of the document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

SILENT_SECONDS = 15.0
"""A runner gives a sign of life every second. Agrees with connectors.operate (a test compares them)."""


@dataclass(frozen=True, slots=True)
class Published:
    """What the connector's own table says of the document."""

    external_id: str
    version: int | None
    """The last one published; None: never."""
    gone: bool
    """Its delete was published."""
    problem_code: str | None
    problem_message: str | None
    """Why it cannot be published as it is now."""
    content_at: datetime | None
    """When what is known of its content was asked for."""
    access_at: datetime | None
    seen_at: datetime
    """When a read, or a listing that showed a change, last wrote this; 1970: never. Sweeps that find it unchanged do
    not."""
    difference: str | None = None
    """The kind of the last difference between what was published and what the ledger had accepted; None: none ever …"""
    difference_at: datetime | None = None
    """… and when it was found."""
    in_doubt_since: datetime | None = None
    """It is published again at the next look at the source."""
    unlisted_since: datetime | None = None
    """The newest sweeps lack it, from the one that began then, and were held back from deleting it."""


INGESTED = "folder"
"""The source that `penstock ingest` and `watch` speak for; no connector may be called so. Agrees with
pipeline.cli.readers (a test compares them)."""


@dataclass(frozen=True, slots=True)
class Source:
    """The connector that a document comes from, as its runner wrote it down; or `penstock ingest`, which has no runner
    and writes down its documents alone."""

    tenant: str
    name: str
    kind: str
    paused: bool
    loaded: bool
    """Its first load has come to its end."""
    guard: Mapping[str, Any] | None
    """A sweep that wanted to delete too much: missing, published, at."""
    activities: Mapping[str, Mapping[str, Any]]
    """By name: state, reason, since, succeeded_at (RFC 3339)."""
    silent_seconds: float | None
    """Since its runner's last sign of life; None: none runs it."""
    cursor: object | None = None
    """How far changes were read; None: never started, or not for this role to see."""
    item: Published | None = None

    @property
    def by_hand(self) -> bool:
        """Somebody runs `penstock ingest` or `watch`: nothing follows it by itself."""
        return self.name == INGESTED

    @property
    def speaker(self) -> str:
        """Who publishes its documents, for a sentence."""
        return "`penstock ingest`" if self.by_hand else f"connector {self.name}"

    @property
    def state(self) -> Literal["by hand", "not running", "paused", "failing", "loading", "following"]:
        if self.by_hand:
            return "by hand"
        if self.silent_seconds is None or self.silent_seconds > SILENT_SECONDS:
            return "not running"
        if self.paused:
            return "paused"
        if self.trouble is not None:
            return "failing"
        return "following" if self.loaded else "loading"

    @property
    def trouble(self) -> str | None:
        """Its worst activity and why it does not work."""
        for wanted in ("needs attention", "waiting"):
            for name, one in self.activities.items():
                if one.get("state") == wanted:
                    return f"{name}: {one.get('reason')}"
        return None

    @property
    def asked_at(self) -> str | None:
        """When the source last answered well, RFC 3339."""
        known = [str(one["succeeded_at"]) for one in self.activities.values() if one.get("succeeded_at")]
        return max(known, default=None)

    @property
    def held_back(self) -> bool:
        """A sweep no longer listed the document, and deletes nothing because it would be too much at once."""
        return (
            self.guard is not None
            and self.item is not None
            and not self.item.gone
            and self.item.version is not None
            and self.item.unlisted_since is not None
        )
