"""Times as people type them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import typer

_SPAN = re.compile(r"(\d{1,6})\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def past_moment(text: str) -> datetime:
    """``2h`` ago, or an ISO 8601 time (local where it names no zone). Raises BadParameter."""
    try:
        if span := _SPAN.fullmatch(text.strip()):
            return datetime.now(UTC) - timedelta(**{_UNITS[span[2]]: int(span[1])})
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{text!r} is not a time: write 30m, 2h, 7d or 2026-11-20T08:00") from error
