"""The audit's reading of the ledger: pages of documents, and what is wanted of each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pipeline.audit.compare import NOWHERE, Standing, State, Wanted, describe
from pipeline.core.model import STORES, Generation, Manifest, Store
from pipeline.ledger.documents import Identity
from pipeline.ledger.work import Work, lock_wants
from pipeline.stores.postgres import GENERATIONS_LOCK, Connection


@dataclass(frozen=True, slots=True)
class Limits:
    """What is held in memory at once, at most; a single document may be larger alone."""

    documents: int = 200
    chunks: int = 2_000
    body_bytes: int = 8_000_000
    page: int = 500
    """Rows, or entries, that one request to a store brings."""


_SIZES = """
    SELECT d.id, coalesce(cardinality(m.chunk_ids), 0), coalesce(octet_length(b.text), 0)
    FROM ({page}) d
    LEFT JOIN manifests m ON (m.document_id, m.generation) = (d.id, %(generation)s)
    LEFT JOIN document_bodies b ON b.document_id = d.id
    ORDER BY d.id
"""
"""The page is cut first: joined before, each one would read the manifests from the beginning."""


async def next_documents(
    connection: Connection, generation: Generation, after: UUID | None, limits: Limits, *, run: int | None = None
) -> list[UUID]:
    """The next documents in the order of their ids, as many as fit the limits; ``run``: only those of its scope."""
    scope = "JOIN audit_documents s ON s.document_id = d.id AND s.run_id = %(run)s" if run is not None else ""
    cursor = await connection.execute(
        _SIZES.format(
            page=f"SELECT d.id FROM documents d {scope} WHERE d.id > %(after)s ORDER BY d.id LIMIT %(limit)s"  # noqa: S608 — literals of this function
        ).encode(),
        {"generation": generation.name, "after": after or NOWHERE, "limit": limits.documents, "run": run},
    )
    return _fitting(await cursor.fetchall(), limits)


async def fitting(connection: Connection, generation: Generation, ids: Sequence[UUID], limits: Limits) -> list[UUID]:
    """As many of these documents, from the front, as fit the limits; at least one. ``ids`` are sorted; the ledger need
    not know them."""
    front = ids[: limits.documents]
    cursor = await connection.execute(
        _SIZES.format(page="SELECT id FROM documents WHERE id = ANY(%(ids)s)").encode(),
        {"generation": generation.name, "ids": list(front)},
    )
    sizes = {id_: (chunks, size) for id_, chunks, size in await cursor.fetchall()}
    return _fitting([(i, *sizes.get(i, (0, 0))) for i in front], limits)


def _fitting(sizes: Sequence[tuple[Any, ...]], limits: Limits) -> list[UUID]:
    taken: list[UUID] = []
    chunks = size = 0
    for id_, its_chunks, its_size in sizes:
        chunks, size = chunks + its_chunks, size + its_size
        if taken and (chunks > limits.chunks or size > limits.body_bytes):
            break
        taken.append(id_)
    return taken


_WANTED = """
    SELECT d.id, d.tenant, d.source, d.external_id, d.seq, d.deleted_at IS NULL AND d.version IS NOT NULL,
        d.content_hash, d.access_id, a.acl_tags, a.required_tags, d.title, d.source_url, d.author, d.media_type,
        d.source_modified_at, d.lane, m.content_hash, m.chunk_ids, m.token_counts, m.spans, m.headings,
        b.text, b.metadata, v.want_seq, v.seq, v.refused, v.attempts, v.error, k.want_seq, k.seq, k.attempts, k.error
    FROM documents d
    LEFT JOIN access_sets a ON a.id = d.access_id
    LEFT JOIN manifests m ON (m.document_id, m.generation) = (d.id, %(generation)s)
    LEFT JOIN document_bodies b ON b.document_id = d.id
    LEFT JOIN index_state v ON (v.document_id, v.generation, v.store) = (d.id, %(generation)s, 'vectors')
    LEFT JOIN index_state k ON (k.document_id, k.generation, k.store) = (d.id, %(generation)s, 'keywords')
    WHERE d.id = ANY(%(ids)s)
"""


async def load(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> dict[UUID, Wanted]:
    """What is wanted of these documents; one that the ledger does not know is absent. One statement: all of it belongs
    together. Cutting and hashing is done beside the event loop."""
    cursor = await connection.execute(_WANTED, {"generation": generation.name, "ids": list(ids)})
    rows = await cursor.fetchall()
    return await asyncio.to_thread(lambda: {row[0]: _wanted(row, generation) for row in rows})


def _wanted(row: tuple[Any, ...], generation: Generation) -> Wanted:
    (
        id_, tenant, source, external_id, seq, alive, digest, access_id, acl, required, title, source_url, author,
        media_type, modified, lane, cut_from, chunk_ids, token_counts, spans, headings, body, metadata,
        v_want, v_seq, refused, v_attempts, v_error, k_want, k_seq, k_attempts, k_error,
    ) = row  # fmt: skip
    states = _states(v_want, v_seq, refused, v_attempts, v_error, k_want, k_seq, k_attempts, k_error)
    manifest = None
    if cut_from is not None:
        manifest = Manifest(
            cut_from,
            tuple(chunk_ids),
            tuple(tuple((a, b) for a, b in chunk) for chunk in spans),
            tuple(token_counts),
            tuple(tuple(path) for path in headings),
        )
    work = Work(
        Identity(id_, tenant, source, external_id), seq, bool(alive and acl), digest, access_id, tuple(acl or ()),
        tuple(required or ()), title or "", source_url, author, media_type or "text/plain", modified, manifest, lane,
        claimed=(), confirmed={}, refused=(), attempts=0,
    )  # fmt: skip
    return describe(work, seq, states, body, metadata, alive=alive, building=generation.state == "building")


def _states(
    v_want: int | None, v_seq: int, refused: Sequence[UUID], v_attempts: int, v_error: str | None,
    k_want: int | None, k_seq: int, k_attempts: int, k_error: str | None,
) -> dict[Store, State]:  # fmt: skip
    states: dict[Store, State] = {}
    if v_want is not None:
        states["vectors"] = State(v_want, v_seq, frozenset(refused), v_attempts, v_error)
    if k_want is not None:
        states["keywords"] = State(k_want, k_seq, frozenset(), k_attempts, k_error)
    return states


_STANDINGS = """
    SELECT d.id, d.seq, v.want_seq, v.seq, v.refused, v.attempts, v.error, k.want_seq, k.seq, k.attempts, k.error
    FROM documents d
    LEFT JOIN index_state v ON (v.document_id, v.generation, v.store) = (d.id, %(generation)s, 'vectors')
    LEFT JOIN index_state k ON (k.document_id, k.generation, k.store) = (d.id, %(generation)s, 'keywords')
    WHERE d.id = ANY(%(ids)s)
"""


async def standings(
    connection: Connection, generation: Generation, ids: Sequence[UUID], *, lock: bool = False
) -> dict[UUID, Standing]:
    """Where these documents stand; one that the ledger does not know is absent. ``lock``: the documents' rows first, so
    that nothing newer is accepted while the caller's transaction lasts."""
    if lock:  # in detect's order
        await connection.execute("SELECT pg_advisory_xact_lock_shared(%s)", [GENERATIONS_LOCK])
        await connection.execute("SELECT 1 FROM documents WHERE id = ANY(%s) ORDER BY id FOR UPDATE", [list(ids)])
        for store in STORES:
            await lock_wants(connection, generation.name, store, ids)
    cursor = await connection.execute(_STANDINGS, {"generation": generation.name, "ids": list(ids)})
    return {id_: (seq, _states(*states)) for id_, seq, *states in await cursor.fetchall()}
