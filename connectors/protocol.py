"""The common types of connectors: published events, problems, and reports of sweeps.

Laws for a connector: events are hints, sweeps are authoritative. ``observed_at`` is stamped before the source is read.
The checkpoint advances only after Kafka has acknowledged. Only a completed sweep deletes. Access that is not known for
certain is not published.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

Kind = Literal["upserted", "access", "deleted"]
MAX_NAMED = 5
"""The most accounts, projects or repositories that the message of a problem names."""


@dataclass(frozen=True, slots=True)
class Published:
    """One event that Kafka has acknowledged."""

    external_id: str
    version: int
    kind: Kind
    observed_at: datetime


@dataclass(frozen=True, slots=True)
class Problem:
    """A document that could not be published, or a condition that an operator should look at. ``code`` is a bounded
    label."""

    path: str
    code: str
    message: str

    def __str__(self) -> str:
        """One line: what, where, what to do."""
        return f"{printable(self.path)}: {self.message}"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a sweep."""

    listed: int
    """Documents listed so far; grows while the source is listed."""
    done: int


@dataclass(slots=True)
class ScanReport:
    """The result of one sweep."""

    published: list[Published] = field(default_factory=list)
    unchanged: list[tuple[str, int]] = field(default_factory=list)
    """(external id, its version as last published)"""
    problems: list[Problem] = field(default_factory=list)

    @property
    def deleted(self) -> list[Published]:
        return [event for event in self.published if event.kind == "deleted"]

    def after(self, earlier: ScanReport) -> ScanReport:
        """Merge with the report of an earlier sweep: everything that was published, what neither has changed, and the
        problems of this one."""
        ids = {event.external_id for event in self.published}
        before = [event for event in earlier.published if event.external_id not in ids]
        ids |= {event.external_id for event in before}
        return ScanReport(before + self.published, [u for u in self.unchanged if u[0] not in ids], self.problems)


def printable(text: str) -> str:
    """Return a name as one line that any terminal and log can show."""
    safe = text.encode("utf-8", "backslashreplace").decode()
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in safe)


def some(names: Collection[str]) -> str:
    """Return the first of these names, for a problem's message, and how many more there are."""
    shown = sorted(names)[:MAX_NAMED]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
