"""Contradictions and repetitions as a caller may see them: only those of which it may read both passages now."""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg import sql

from pipeline.core.addresses import openable
from pipeline.core.conflicts import Kind
from pipeline.ledger import conflicts, generations
from pipeline.ledger.conflicts import Listed, State
from pipeline.stores.postgres import Connection
from query.access.callers import Caller, readable
from query.model import BadQuery

MOST_LISTED = 200
MOST_SOURCES = 50
AROUND = 160
"""How many characters are quoted before and after a place."""

_CURSOR = struct.Struct(">q16s")
"""The time of the last conflict of a page, in microseconds, and its id."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Quotes = dict[UUID, tuple[str, str]]
"""Conflict → what both passages say at its first place."""


async def visible(
    connection: Connection,
    caller: Caller,
    *,
    state: State | None = "open",
    kinds: Sequence[Kind] | None = None,
    sources: Sequence[str] | None = None,
    document: str | None = None,
    id_: UUID | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> list[Listed]:
    """The conflicts of the caller's tenant of which it may read both documents, the newest first. cursor: the end of
    the previous page (``cursor_after``). Raises BadQuery for a cursor that is none."""
    after = None if cursor is None else _place(cursor)
    access_ids = (await readable(connection, caller)).access_ids
    if not access_ids:
        return []
    return await conflicts.standing(
        connection,
        caller.tenant,
        access_ids=access_ids,
        state=state,
        kinds=kinds,
        sources=sources,
        document=document,
        id_=id_,
        after=after,
        limit=limit,
    )


async def every(
    connection: Connection, tenant: str, *, cursor: str | None = None, limit: int = 50, **chosen: Any
) -> list[Listed]:
    """All conflicts of the tenant, for an operator, who sees no text. chosen: as in ``conflicts.standing``. Raises
    BadQuery for a cursor that is none."""
    after = None if cursor is None else _place(cursor)
    return await conflicts.standing(connection, tenant, access_ids=None, after=after, limit=limit, **chosen)


def cursor_after(listed: Sequence[Listed], limit: int) -> str | None:
    """Where the next page begins; None where this one, of at most ``limit``, is the last."""
    if len(listed) < limit or not listed:
        return None
    last = listed[-1]
    return urlsafe_b64encode(_CURSOR.pack((last.at - _EPOCH) // timedelta(microseconds=1), last.id.bytes)).decode()


def _place(cursor: str) -> tuple[datetime, UUID]:
    try:
        microseconds, id_ = _CURSOR.unpack(urlsafe_b64decode(cursor.encode()))
        return _EPOCH + timedelta(microseconds=microseconds), UUID(bytes=id_)
    except (ValueError, struct.error, OverflowError) as error:
        raise BadQuery("the cursor is not one of a list of conflicts") from error


async def quotes(connection: Connection, of: Sequence[Listed]) -> Quotes:
    """The texts of the passages of these conflicts, of which the caller may read both: around the first place, or their
    beginning."""
    generation = await generations.active(connection)
    cursor = await connection.execute(
        sql.SQL("SELECT id, text FROM {} WHERE id = ANY(%s::uuid[])").format(sql.Identifier(generation.chunk_table)),
        [[chunk for listed in of for chunk in (listed.chunk_a, listed.chunk_b)]],
    )
    texts: dict[UUID, str] = dict(await cursor.fetchall())
    quoted: Quotes = {}
    for listed in of:
        a, b = texts.get(listed.chunk_a), texts.get(listed.chunk_b)
        if a is not None and b is not None:
            _, of_a, of_b = listed.places[0] if listed.places else ("", (0, 0), (0, 0))
            quoted[listed.id] = (_around(a, *of_a), _around(b, *of_b))
    return quoted


def _around(text: str, start: int, end: int) -> str:
    before, after = max(0, start - AROUND), end + AROUND
    return f"{'…' if before else ''}{text[before:after].strip()}{'…' if after < len(text) else ''}"


async def decide(connection: Connection, caller: Caller, id_: UUID, state: State) -> bool:
    """Dismiss or accept a conflict, or open it again. False: there is none that the caller may see."""
    if not await visible(connection, caller, state=None, id_=id_):
        return False
    await conflicts.decide(connection, caller.tenant, id_, state)
    return True


def conflict_json(listed: Listed, quoted: tuple[str, str] | None) -> dict[str, Any]:
    """A conflict as HTTP, MCP and the command line show it."""
    return {
        "id": str(listed.id),
        "kind": listed.kind,
        "state": listed.state,
        "documents": [str(listed.document_a), str(listed.document_b)],
        "passages": [str(listed.chunk_a), str(listed.chunk_b)],
        "sources": [listed.source_a, listed.source_b],
        "external_ids": [listed.external_id_a, listed.external_id_b],
        "titles": [listed.title_a, listed.title_b],
        "source_urls": [openable(listed.source_url_a), openable(listed.source_url_b)],
        "older": listed.older_side,
        "places": [{"kind": kind, "spans": [of_a, of_b]} for kind, of_a, of_b in listed.places],
        "quotes": None if quoted is None else list(quoted),
        "at": listed.at.isoformat(),
    }
