"""Reads documents in portions where all of them together would take too much memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from connectors.room import TooMuchText, bounded
from connectors.source import Cursor, Entry, Page

Item = TypeVar("Item")
Made = TypeVar("Made")


async def in_portions(
    items: Sequence[Item], read: Callable[[Sequence[Item]], Awaitable[Sequence[Made]]]
) -> AsyncGenerator[tuple[Sequence[Item], Sequence[Made]], None]:
    """Yield what ``read`` makes of the items: of all at once, or of a few at a time if that takes more memory than
    MAX_HELD_BYTES. What was yielded is not held any more when the next items are read."""
    start, size = 0, len(items)
    while start < len(items):
        portion = items[start : start + size]
        try:
            with bounded(is_divisible=len(portion) > 1) as room:
                made = await read(portion)
        except TooMuchText:
            if len(portion) == 1:
                raise
            size = max(1, min(len(portion) // 2, room.fitting if room is not None else 1))
            continue
        yield portion, made
        start += len(portion)


async def pages_of(
    items: Sequence[Item],
    read: Callable[[Sequence[Item]], Awaitable[Sequence[Entry]]],
    cursor: Cursor,
    *,
    began: datetime | None = None,
) -> AsyncGenerator[Page, None]:
    """Yield what ``read`` makes of the items, usually as a single page. cursor: the one after all of them. began: when
    the source was asked for the items, if what it said then is in the entries."""
    done = 0
    async with aclosing(in_portions(items, read)) as portions:
        async for portion, entries in portions:
            if done and began is not None:
                entries = [entry if entry.read_at else replace(entry, read_at=began) for entry in entries]
            done += len(portion)
            yield Page(entries, cursor if done == len(items) else None)
    if not items:
        yield Page((), cursor)
