"""Reads a source as its runner does, for tests that compare the result with what people see in the source."""

from __future__ import annotations

from collections.abc import Collection

from connectors.source import Cursor, Document, Entry, Group, Listed, Source


async def everything(source: Source, cursor: Cursor | None = None) -> dict[str, Entry]:
    return {entry.external_id: entry async for page in source.full(cursor) for entry in page.entries}


async def changed(source: Source, cursor: Cursor | None) -> tuple[dict[str, Entry], Cursor]:
    """Return the changes, and the cursor of the next poll."""
    assert cursor is not None, "the source has no log of changes"
    results: dict[str, Entry] = {}
    async for page in source.changes(cursor):
        results |= {entry.external_id: entry for entry in page.entries}
        cursor = page.cursor
    return results, cursor


async def listing(source: Source) -> dict[str, Listed]:
    """Return everything that is listed, without the parts that could not be."""
    entries = [entry async for page in source.slim() for entry in page]
    return {entry.external_id: entry for entry in entries if isinstance(entry, Listed)}


async def one(source: Source, external_id: str) -> Entry:
    [entry] = await source.fetch([external_id])
    return entry


async def read(source: Source, external_id: str) -> Document:
    entry = await one(source, external_id)
    assert isinstance(entry, Document), entry
    return entry


async def groups(source: Source, tags: Collection[str] | None = None) -> dict[str, Group]:
    return {group.tag: group async for group in source.groups(tags)}
