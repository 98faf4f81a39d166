"""Content that lost by version although it was observed later: it stands again when a delete in between turns up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from pipeline.ledger.documents import Fields
from pipeline.stores.postgres import Connection

KEPT = 8
"""Most superseded upserts of one document, because each holds a whole text. A source that counts backwards would need
any number: each was observed later than the one before, under a lower version, and wins after a delete in between. The
ones observed last are kept: a delete that arrives late then never ends a document that was observed after it. Where the
exact winner was forgotten, the next one that was observed stands."""


@dataclass(frozen=True, slots=True)
class Superseded:
    version: int
    observed_at: datetime
    content_hash: bytes
    meta_hash: bytes
    fields: Fields
    text: str


async def load(connection: Connection, ids: Collection[UUID]) -> dict[UUID, list[Superseded]]:
    """What is kept of these documents."""
    if not ids:
        return {}
    cursor = await connection.execute(
        "SELECT document_id, version, observed_at, content_hash, meta_hash, title, source_url, author, media_type,"
        " source_modified_at, metadata, text FROM superseded WHERE document_id = ANY(%s)",
        [list(ids)],
    )
    found: dict[UUID, list[Superseded]] = {}
    for id_, *rest in await cursor.fetchall():
        found.setdefault(id_, []).append(_superseded(rest))
    return found


def _superseded(row: Sequence[Any]) -> Superseded:
    version, observed, content, meta, title, url, author, kind, modified, metadata, text = row
    fields = Fields(title or "", url, author, kind or "text/plain", modified, metadata)
    return Superseded(version, observed, content, meta, fields, text)


async def current(connection: Connection, ids: Collection[UUID]) -> dict[UUID, Superseded]:
    """What the ledger holds of these documents now, as far as they are alive."""
    if not ids:
        return {}
    cursor = await connection.execute(f"SELECT {_CURRENT} AND d.deleted_at IS NULL", [list(ids)])
    return {id_: _superseded(rest) for id_, *rest in await cursor.fetchall()}


async def keep_current(connection: Connection, ids: Collection[UUID]) -> None:
    """Keep what the ledger holds of these documents now, before something else is written over it."""
    if ids:
        await connection.execute(f"INSERT INTO superseded AS s SELECT {_CURRENT} {_GREATER_STAYS}", [list(ids)])


async def keep(connection: Connection, kept: Mapping[UUID, Sequence[Superseded]]) -> None:
    rows = [
        (
            id_, s.version, s.observed_at, s.content_hash, s.meta_hash, s.fields.title, s.fields.source_url,
            s.fields.author, s.fields.media_type, s.fields.source_modified_at, Jsonb(dict(s.fields.metadata)), s.text,
        )
        for id_, several in kept.items()
        for s in several
    ]  # fmt: skip
    if rows:
        places = ", ".join(["%s"] * len(rows[0]))
        await connection.cursor().executemany(
            f"INSERT INTO superseded AS s VALUES ({places}) {_GREATER_STAYS}".encode(),  # noqa: S608 — placeholders and a constant of this module
            rows,
        )


_CURRENT = """
    d.id, d.version, d.observed_at, d.content_hash, d.meta_hash, d.title, d.source_url, d.author, d.media_type,
    d.source_modified_at, b.metadata, b.text
    FROM documents d JOIN document_bodies b ON b.document_id = d.id
    WHERE d.id = ANY(%s) AND d.version IS NOT NULL AND d.content_hash IS NOT NULL
"""
_GREATER_STAYS = """
    ON CONFLICT (document_id, observed_at, version) DO UPDATE SET content_hash = excluded.content_hash,
        meta_hash = excluded.meta_hash, title = excluded.title, source_url = excluded.source_url,
        author = excluded.author, media_type = excluded.media_type, source_modified_at = excluded.source_modified_at,
        metadata = excluded.metadata, text = excluded.text
    WHERE (excluded.content_hash, excluded.meta_hash) > (s.content_hash, s.meta_hash)
"""
"""Of two that were observed together under one version, as in the order of content: whichever came first."""


async def prune(connection: Connection, ids: Collection[UUID]) -> int:
    """Forget what no delete can bring back any more, after the documents' rows were written: an upsert that another one
    of no lower version was observed with or after. What is left of a document falls in version as it rises in
    observed_at. Returns how many more were forgotten because a document had more than KEPT."""
    cursor = await connection.execute(
        """
        WITH judged AS (
            SELECT s.document_id, s.observed_at, s.version, coalesce(s.observed_at <= greatest(
                d.deleted_floor, CASE WHEN d.deleted_at IS NULL THEN d.observed_at END,
                max(s.observed_at) OVER (PARTITION BY s.document_id ORDER BY s.version DESC, s.observed_at DESC
                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
            ), false) AS beaten
            FROM superseded s JOIN documents d ON d.id = s.document_id WHERE s.document_id = ANY(%s)
        ), ranked AS (
            SELECT *, count(*) FILTER (WHERE NOT beaten) OVER (PARTITION BY document_id ORDER BY observed_at DESC)
                AS place
            FROM judged
        ), gone AS (
            DELETE FROM superseded s USING ranked r
            WHERE (s.document_id, s.observed_at, s.version) = (r.document_id, r.observed_at, r.version)
              AND (r.beaten OR r.place > %s)
            RETURNING r.beaten
        )
        SELECT count(*) FROM gone WHERE NOT beaten
        """,
        [list(ids), KEPT],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0
