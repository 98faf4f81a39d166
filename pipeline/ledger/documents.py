"""Detect's side of the ledger: lock documents, read what is known of them, and write their desired state.

A *superseded* revision has lost by version although it was observed later than the winner. It is stored, because a
delete that was observed between the two may still arrive, and then it wins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from pipeline.core.fold import State
from pipeline.core.identity import access_digest
from pipeline.core.metadata_keys import terms
from pipeline.core.model import STORES, Generation, Lane, Manifest
from pipeline.ledger.metadata_keys import Declared, declared
from pipeline.stores.postgres import Connection

EVENTS_PER_DOCUMENT = 16
"""How many of a document's newest events document_events holds, as a ring."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A document's identity, as its source names it."""

    id: UUID
    tenant: str
    source: str
    external_id: str


@dataclass(frozen=True, slots=True)
class Known:
    """A document's row in the ledger."""

    state: State
    seq: int = 0
    event_count: int = 0
    media_type: str | None = None
    title: str = ""
    access_id: int | None = None
    pending: bool = False
    """Whether a store has not reached the desired state. Then even an event that changes nothing sends hints."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A document's metadata, as its newest accepted upsert has it.

    Each field but ``metadata`` is a column of the same name in ``documents`` and in ``superseded``. A new field comes
    last and has a default, for which it does not change the hash of a document (``pipeline.core.identity.meta_hash``).
    """

    title: str
    source_url: str | None
    author: str | None
    media_type: str
    source_modified_at: datetime | None
    metadata: Mapping[str, object]


FIELD_COLUMNS = tuple(f.name for f in fields(Fields) if f.name != "metadata")
REVISION_COLUMNS = ("version", "observed_at", "content_hash", "meta_hash", *FIELD_COLUMNS, "metadata", "text")
"""The columns of ``superseded`` after the document's id."""


@dataclass(frozen=True, slots=True)
class DocumentEvent:
    """One line of a document's history."""

    kind: str
    outcome: str
    version: int | None
    observed_at: datetime
    seq: int | None
    lane: Lane


@dataclass(frozen=True, slots=True)
class Accepted:
    """Detect's decision for one document, after folding a batch of its events."""

    identity: Identity
    before: Known
    state: State
    lane: Lane
    draws_seq: bool
    history: tuple[DocumentEvent, ...]
    changed_at: datetime | None = None
    """When the source changed, for freshness."""
    fields: Fields | None = None
    """New metadata; None: unchanged."""
    text: str | None = None
    """New normalised text; None: unchanged."""
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    """New manifest by generation; where it is absent the old one stays."""
    erased: bool = False
    """True if it was deleted, so that its text and manifests are erased."""


async def lock(connection: Connection, identities: Sequence[Identity]) -> dict[UUID, Known]:
    """Lock these documents' rows until the caller's transaction ends, and read them. A missing row is inserted as a
    stub.

    The locks are taken in the order of the ids, as everywhere, so that two workers with the same documents (during a
    rebalance) do not deadlock.
    """
    ordered = sorted({i.id: i for i in identities}.values(), key=lambda i: i.id)
    ids = [i.id for i in ordered]
    await connection.execute(
        "INSERT INTO documents (id, tenant, source, external_id)"
        " SELECT * FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::text[]) ON CONFLICT (id) DO NOTHING",
        [ids, [i.tenant for i in ordered], [i.source for i in ordered], [i.external_id for i in ordered]],
    )
    cursor = await connection.execute(
        "SELECT id, version, observed_at, content_hash, meta_hash, deleted_floor, deleted_at, access_observed_at,"
        " access_id, seq, event_count, media_type, title FROM documents WHERE id = ANY(%s) ORDER BY id FOR UPDATE",
        [ids],
    )
    return await _known(connection, await cursor.fetchall())


async def peek(connection: Connection, ids: Sequence[UUID]) -> dict[UUID, Known]:
    """Read the rows of these documents without a lock. A missing one is absent."""
    cursor = await connection.execute(
        "SELECT id, version, observed_at, content_hash, meta_hash, deleted_floor, deleted_at, access_observed_at,"
        " access_id, seq, event_count, media_type, title FROM documents WHERE id = ANY(%s)",
        [list(ids)],
    )
    return await _known(connection, await cursor.fetchall())


async def _known(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> dict[UUID, Known]:
    access_ids = list({row[8] for row in rows if row[8] is not None})
    cursor = await connection.execute(
        "SELECT id, acl_tags, required_tags FROM access_sets WHERE id = ANY(%s)", [access_ids]
    )
    access = {row[0]: (tuple(row[1]), tuple(row[2])) for row in await cursor.fetchall()}
    cursor = await connection.execute(
        "SELECT DISTINCT document_id FROM index_state WHERE document_id = ANY(%s) AND seq < want_seq",
        [[row[0] for row in rows]],
    )
    pending = {row[0] for row in await cursor.fetchall()}
    known = {}
    for id_, version, observed, content, meta, floor, deleted, access_observed, access_id, seq, events, *rest in rows:
        acl, required = access.get(access_id, ((), ()))
        state = State(version, observed, content, meta, floor, deleted, access_observed, acl, required)
        media, title = rest
        known[id_] = Known(state, seq, events, media, title or "", access_id, id_ in pending)
    return known


async def draw_seqs(connection: Connection, befores: Sequence[Known]) -> list[int]:
    """Draw a new sequence number for each of these documents. It is greater than any drawn before, and greater than the
    document's own, which may be ahead of the sequence after a backup was restored."""
    cursor = await connection.execute("SELECT nextval('ledger_seq') FROM generate_series(1, %s)", [len(befores)])
    return [max(drawn, before.seq + 1) for (drawn,), before in zip(await cursor.fetchall(), befores, strict=True)]


async def intern_access(
    connection: Connection, access_sets: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]]
) -> dict[tuple[str, tuple[str, ...], tuple[str, ...]], int]:
    """The ids of these access sets (tenant, acl_tags, required_tags). New ones are inserted."""
    keyed = sorted({(tenant, access_digest(acl, req)): (tenant, acl, req) for tenant, acl, req in access_sets}.items())
    if not keyed:
        return {}
    await connection.cursor().executemany(
        "INSERT INTO access_sets (tenant, digest, acl_tags, required_tags) VALUES (%s, %s, %s, %s)"
        " ON CONFLICT (tenant, digest) DO NOTHING",
        [(tenant, digest, list(acl), list(req)) for (tenant, digest), (_, acl, req) in keyed],
    )
    cursor = await connection.execute(
        "SELECT a.tenant, a.digest, a.id FROM access_sets a"
        " JOIN unnest(%s::text[], %s::bytea[]) AS w (tenant, digest) USING (tenant, digest)",
        [[tenant for (tenant, _), _ in keyed], [digest for (_, digest), _ in keyed]],
    )
    ids = {(tenant, digest): id_ for tenant, digest, id_ in await cursor.fetchall()}
    return {value: ids[key] for key, value in keyed}


async def write(
    connection: Connection, accepted: Sequence[Accepted], generations: Sequence[Generation], *, grace_seconds: float
) -> dict[UUID, int]:
    """Write the decisions for one batch; returns the new sequence number of each document whose stores must follow.

    generations: those that are not retired. grace_seconds: how long the sweeper leaves new live work to the hints. The
    caller holds the rows' locks and the shared generations lock.
    """
    drawing = sorted((a for a in accepted if a.draws_seq), key=lambda a: a.identity.id)  # the sinks' lock order
    drawn = await draw_seqs(connection, [a.before for a in drawing]) if drawing else []
    seqs = {a.identity.id: seq for a, seq in zip(drawing, drawn, strict=True)}
    access = await intern_access(
        connection, [(a.identity.tenant, a.state.acl_tags, a.state.required_tags) for a in accepted if _has_access(a)]
    )
    with_fields = [a for a in accepted if a.fields is not None]
    keys = await declared(connection, {a.identity.tenant for a in with_fields}) if with_fields else {}
    async with connection.pipeline():
        cursor = connection.cursor()
        if without_fields := [a for a in accepted if a.fields is None]:
            await cursor.executemany(
                _UPDATE_STATE, [(*_state_row(a, seqs, access), a.identity.id) for a in without_fields]
            )
        if with_fields:
            await cursor.executemany(
                _UPDATE_STATE_AND_FIELDS,
                [(*_state_row(a, seqs, access), *_fields_row(a, keys), a.identity.id) for a in with_fields],
            )
        if bodies := [a for a in accepted if a.text is not None or a.fields is not None]:
            await cursor.executemany(_UPSERT_BODY, [_body_row(a) for a in bodies])
        manifests = [(a, name, m) for a in accepted for name, m in a.manifests.items()]
        if manifests:
            await cursor.executemany(UPSERT_MANIFEST, [manifest_row(a.identity.id, n, m) for a, n, m in manifests])
        if erased := [a.identity.id for a in accepted if a.erased]:
            await cursor.execute("DELETE FROM manifests WHERE document_id = ANY(%s)", [erased])
            await cursor.execute(
                "UPDATE document_bodies SET text = '', metadata = '{}' WHERE document_id = ANY(%s)", [erased]
            )
            await cursor.execute("UPDATE documents SET keys = '{}' WHERE id = ANY(%s) AND keys <> '{}'", [erased])
        if seqs:
            await cursor.executemany(
                _WANT,
                [
                    (a.identity.id, generation.name, store, seqs[a.identity.id], grace_seconds * _GRACE_FACTORS[a.lane])
                    for generation in generations
                    for store in STORES
                    for a in drawing
                ],
            )
        history = [
            (a.identity.id, (a.before.event_count + n) % EVENTS_PER_DOCUMENT, *_event_row(h, seqs.get(a.identity.id)))
            for a in accepted
            for n, h in list(enumerate(a.history))[-EVENTS_PER_DOCUMENT:]
        ]
        await cursor.executemany(_UPSERT_EVENT, history)
    return seqs


_GRACE_FACTORS: dict[Lane, float] = {"live": 1.0, "backfill": 10.0}
"""Multiples of ``grace_seconds``: hints of a first load wait long in their topic without being lost."""


def _has_access(a: Accepted) -> bool:
    return a.state.access_observed_at is not None


_STATE = """
    UPDATE documents SET version = %s, observed_at = %s, content_hash = %s, meta_hash = %s, deleted_floor = %s,
        deleted_at = %s, access_observed_at = %s, access_id = %s, seq = %s, event_count = event_count + %s,
        lane = CASE WHEN %s THEN %s ELSE lane END,
        received_at = CASE WHEN %s THEN clock_timestamp() ELSE received_at END,
        changed_at = CASE WHEN %s THEN %s ELSE changed_at END
"""
_UPDATE_STATE = f"{_STATE} WHERE id = %s"
_UPDATE_STATE_AND_FIELDS = f"""
    {_STATE}, {", ".join(f"{column} = %s" for column in FIELD_COLUMNS)}, keys = %s, external_id = %s, erased_at = NULL
    WHERE id = %s
"""
"""It writes the external id again, because retention erases it some time after a document was deleted."""
_UPSERT_BODY = """
    INSERT INTO document_bodies AS b (document_id, text, metadata) VALUES (%s, coalesce(%s, ''), coalesce(%s, '{}'))
    ON CONFLICT (document_id) DO UPDATE SET
        text = coalesce(%s, b.text), metadata = coalesce(%s, b.metadata)
"""
UPSERT_MANIFEST = """
    INSERT INTO manifests (document_id, generation, content_hash, chunk_ids, token_counts, spans, headings)
    VALUES (%s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (document_id, generation) DO UPDATE SET content_hash = excluded.content_hash,
        chunk_ids = excluded.chunk_ids, token_counts = excluded.token_counts, spans = excluded.spans,
        headings = excluded.headings
"""
_WANT = """
    INSERT INTO index_state AS s (document_id, generation, store, want_seq, next_at)
    VALUES (%s, %s, %s, %s, clock_timestamp() + make_interval(secs => %s))
    ON CONFLICT (document_id, generation, store) DO UPDATE SET
        want_seq = greatest(excluded.want_seq, s.want_seq), next_at = excluded.next_at, attempts = 0, error = NULL,
        pending_since = CASE WHEN s.seq < s.want_seq THEN s.pending_since ELSE clock_timestamp() END
"""
_UPSERT_EVENT = """
    INSERT INTO document_events (document_id, slot, kind, outcome, version, observed_at, seq, lane)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (document_id, slot) DO UPDATE SET kind = excluded.kind, outcome = excluded.outcome,
        version = excluded.version, observed_at = excluded.observed_at, seq = excluded.seq, lane = excluded.lane,
        at = clock_timestamp()
"""


def _state_row(
    a: Accepted, seqs: Mapping[UUID, int], access: Mapping[tuple[str, tuple[str, ...], tuple[str, ...]], int]
) -> tuple[Any, ...]:
    s = a.state
    key = (a.identity.tenant, s.acl_tags, s.required_tags)
    drew = a.identity.id in seqs
    return (
        s.version,
        s.observed_at,
        s.content_hash,
        s.meta_hash,
        s.deleted_floor,
        s.deleted_at,
        s.access_observed_at,
        access[key] if _has_access(a) else None,
        seqs.get(a.identity.id, a.before.seq),
        len(a.history),
        drew,
        a.lane,
        drew,
        drew,
        a.changed_at,
    )


def _fields_row(a: Accepted, keys: Declared) -> tuple[Any, ...]:
    assert a.fields is not None
    of_tenant = keys.get(a.identity.tenant, {})
    return *_values(a.fields), terms(a.fields.metadata, of_tenant), a.identity.external_id


def _values(document_fields: Fields) -> tuple[Any, ...]:
    """The values of FIELD_COLUMNS."""
    return tuple(getattr(document_fields, column) for column in FIELD_COLUMNS)


def _body_row(a: Accepted) -> tuple[Any, ...]:
    metadata = None if a.fields is None else Jsonb(dict(a.fields.metadata))
    return a.identity.id, a.text, metadata, a.text, metadata


def manifest_row(document: UUID, generation: str, manifest: Manifest) -> tuple[Any, ...]:
    return (
        document,
        generation,
        manifest.content_hash,
        list(manifest.chunk_ids),
        list(manifest.token_counts),
        Jsonb(manifest.spans),
        Jsonb(manifest.headings),
    )


def _event_row(h: DocumentEvent, seq: int | None) -> tuple[Any, ...]:
    return h.kind, h.outcome, h.version, h.observed_at, seq if h.seq is None else h.seq, h.lane


MAX_SUPERSEDED = 8
"""The most superseded revisions of one document, because each holds a whole text. A source whose versions fall would
need any number: each revision was observed later than the one before, under a lower version, and wins if a delete in
between arrives. The ones observed last are retained, so that a late delete never removes a document that was observed
after it. If the revision that should then win is no longer stored, the one observed next wins."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A revision with its text, as it is stored when it is superseded."""

    version: int
    observed_at: datetime
    content_hash: bytes
    meta_hash: bytes
    fields: Fields
    text: str


async def stored_bytes(
    connection: Connection, deleted: Collection[UUID], overwritten: Collection[UUID]
) -> dict[UUID, int]:
    """The bytes of text that a batch which deletes these documents loads of each: ``load_superseded``, and for those
    that it also upserts ``load_current``. Reads no text."""
    if not deleted:
        return {}
    cursor = await connection.execute(
        "SELECT id, sum(size)::bigint FROM ("
        "SELECT document_id AS id, octet_length(text) AS size FROM superseded WHERE document_id = ANY(%s)"
        " UNION ALL SELECT document_id, octet_length(text) FROM document_bodies WHERE document_id = ANY(%s)"
        ") stored GROUP BY id",
        [list(deleted), list(overwritten)],
    )
    return dict(await cursor.fetchall())


async def load_superseded(connection: Connection, ids: Collection[UUID]) -> dict[UUID, list[Superseded]]:
    """The superseded revisions of these documents."""
    if not ids:
        return {}
    cursor = await connection.execute(
        f"SELECT document_id, {', '.join(REVISION_COLUMNS)} FROM superseded WHERE document_id = ANY(%s)",  # noqa: S608 — names of this module
        [list(ids)],
    )
    by_document: dict[UUID, list[Superseded]] = {}
    for id_, *rest in await cursor.fetchall():
        by_document.setdefault(id_, []).append(_superseded(rest))
    return by_document


def _superseded(row: Sequence[Any]) -> Superseded:
    version, observed, content, meta, *values, metadata, text = row
    named = dict(zip(FIELD_COLUMNS, values, strict=True))
    named |= {"title": named["title"] or "", "media_type": named["media_type"] or "text/plain"}
    return Superseded(version, observed, content, meta, Fields(**named, metadata=metadata), text)


async def load_current(connection: Connection, ids: Collection[UUID]) -> dict[UUID, Superseded]:
    """The present revisions of these documents. Deleted ones, and those without content, are absent."""
    if not ids:
        return {}
    cursor = await connection.execute(f"SELECT {_CURRENT} AND d.deleted_at IS NULL", [list(ids)])
    return {id_: _superseded(rest) for id_, *rest in await cursor.fetchall()}


async def keep_current(connection: Connection, ids: Collection[UUID]) -> None:
    """Store the present revisions of these documents as superseded, before ``write`` replaces them."""
    if ids:
        await connection.execute(f"{_INSERT_SUPERSEDED} SELECT {_CURRENT} {_GREATER_STAYS}", [list(ids)])


async def keep_superseded(connection: Connection, revisions: Mapping[UUID, Sequence[Superseded]]) -> None:
    """Store these revisions as superseded."""
    rows = [
        (
            id_,
            s.version,
            s.observed_at,
            s.content_hash,
            s.meta_hash,
            *_values(s.fields),
            Jsonb(dict(s.fields.metadata)),
            s.text,
        )
        for id_, several in revisions.items()
        for s in several
    ]
    if rows:
        places = ", ".join(["%s"] * len(rows[0]))
        await connection.cursor().executemany(f"{_INSERT_SUPERSEDED} VALUES ({places}) {_GREATER_STAYS}", rows)


_INSERT_SUPERSEDED = f"INSERT INTO superseded AS s (document_id, {', '.join(REVISION_COLUMNS)})"
_CURRENT = f"""
    d.id, {", ".join(f"d.{column}" for column in REVISION_COLUMNS[:-2])}, b.metadata, b.text
    FROM documents d JOIN document_bodies b ON b.document_id = d.id
    WHERE d.id = ANY(%s) AND d.version IS NOT NULL AND d.content_hash IS NOT NULL
"""
_GREATER_STAYS = f"""
    ON CONFLICT (document_id, observed_at, version) DO UPDATE SET
        {", ".join(f"{column} = excluded.{column}" for column in REVISION_COLUMNS[2:])}
    WHERE (excluded.content_hash, excluded.meta_hash) > (s.content_hash, s.meta_hash)
"""
"""The revision with the greater hashes is stored, whichever of two with the same version and time of observation
arrived first: that is the order of content."""


async def prune_superseded(connection: Connection, ids: Collection[UUID]) -> int:
    """Delete the superseded revisions that no late delete can make win, after the documents' rows were written: those
    for which another revision, of the same or a higher version, was observed at the same time or later. (The versions
    of a document's remaining ones fall as their times of observation rise.) Also deletes the oldest ones beyond
    MAX_SUPERSEDED, and returns how many of those there were."""
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
        [list(ids), MAX_SUPERSEDED],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0
