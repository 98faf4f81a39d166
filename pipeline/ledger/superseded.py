"""Content that lost by version although it was observed later: it stands again when a delete in between turns up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from psycopg.types.json import Jsonb

from pipeline.ledger.documents import Fields
from pipeline.stores.postgres import Connection

KEPT = 8
"""Of one document, those of the highest versions: a source that counts backwards must not fill the table."""


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
    for (
        id_,
        version,
        observed,
        content,
        meta,
        title,
        url,
        author,
        kind,
        modified,
        metadata,
        text,
    ) in await cursor.fetchall():
        fields = Fields(title or "", url, author, kind or "text/plain", modified, metadata)
        found.setdefault(id_, []).append(Superseded(version, observed, content, meta, fields, text))
    return found


async def keep_current(connection: Connection, ids: Collection[UUID]) -> None:
    """Keep what the ledger holds of these documents now, before something else is written over it."""
    if ids:
        await connection.execute(
            "INSERT INTO superseded SELECT d.id, d.version, d.observed_at, d.content_hash, d.meta_hash, d.title,"
            " d.source_url, d.author, d.media_type, d.source_modified_at, b.metadata, b.text"
            " FROM documents d JOIN document_bodies b ON b.document_id = d.id"
            " WHERE d.id = ANY(%s) AND d.version IS NOT NULL AND d.content_hash IS NOT NULL ON CONFLICT DO NOTHING",
            [list(ids)],
        )


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
            f"INSERT INTO superseded VALUES ({places}) ON CONFLICT DO NOTHING".encode(), rows
        )


async def prune(connection: Connection, ids: Collection[UUID]) -> None:
    """Forget what no delete can bring back any more, after the documents' rows were written."""
    await connection.execute(
        """
        DELETE FROM superseded s USING documents d
        WHERE d.id = s.document_id AND d.id = ANY(%s) AND (s.observed_at <= d.deleted_floor
            OR (d.deleted_at IS NULL AND s.observed_at <= d.observed_at)
            OR (SELECT count(*) FROM superseded o WHERE o.document_id = s.document_id AND o.version > s.version) >= %s)
        """,
        [list(ids), KEPT],
    )
