"""What both stores must hold, computed from the documents alone, and what they do hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from pipeline.core.chunking import chunk
from pipeline.core.identity import EVERYONE, chunk_ids, document_id, qualify
from pipeline.core.model import CountTokens, Generation
from pipeline.core.normalise import normalise
from pipeline.embedding.choose import token_counter
from pipeline.ledger import generations
from pipeline.settings import Settings, dist
from pipeline.stores.postgres import open_pool
from topics.messages import DocumentUpserted

VECTOR_TOLERANCE = 0.002
"""halfvec keeps 11 bits of each number, none of which is above 1."""


class Stores(Protocol):
    """Where to look: a Space, or anything alike."""

    settings: Settings

    async def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]: ...

    async def entries(self) -> dict[UUID, dict[str, Any]]:
        """Every entry that Elasticsearch returns, by chunk id."""
        ...


@dataclass(frozen=True)
class Expected:
    document: UUID
    text: str
    title: str
    author: str | None
    metadata: str
    acl: tuple[str, ...]
    required: tuple[str, ...] = ()


@cache
def _counter(generation: Generation) -> CountTokens:
    return token_counter(generation, dist() / "models")


def wanted_chunks(generation: Generation, message: DocumentUpserted) -> dict[UUID, Expected]:
    """The chunks that a document must have, none where nobody may read it."""
    id_ = document_id(message.tenant, message.source, message.external_id)
    text, media_type = normalise(message.content, message.media_type)
    chunks = chunk(text, media_type, params=generation.params, count_tokens=_counter(generation))
    acl, required = (qualify(message.source, tags) for tags in (message.acl_tags, message.required_tags))
    if not acl:
        return {}
    metadata = _flat(message.metadata)
    return {
        i: Expected(id_, c.text, message.title, message.author, metadata, acl, required)
        for i, c in zip(chunk_ids(id_, [c.text for c in chunks]), chunks, strict=True)
    }


async def assert_equal(
    space: Stores,
    documents: Iterable[DocumentUpserted],
    *,
    vector: Callable[[str], NDArray[np.float32]] | None = None,
    refused: Callable[[str], bool] = lambda text: False,
) -> int:
    """Both stores hold exactly the chunks of these documents, with their text, title, author, metadata and access;
    returns how many.

    vector: what the model makes of a text; each row's embedding must be that. refused: texts that the model never
    takes, which only keyword search has.
    """
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        generation = await generations.active(connection)
    wanted: dict[UUID, Expected] = {}
    for message in documents:
        wanted |= wanted_chunks(generation, message)
    embeddable = {i: e for i, e in wanted.items() if not refused(e.text)}

    rows = await space.query(
        "SELECT c.id, c.document_id, c.text, d.title, d.author, b.metadata, a.acl_tags, a.required_tags,"
        f" c.embedding::real[] FROM {generation.chunk_table} c JOIN documents d ON d.id = c.document_id"
        " LEFT JOIN document_bodies b ON b.document_id = d.id LEFT JOIN access_sets a ON a.id = c.access_id"
    )
    in_vectors = {
        id_: Expected(document, text, title, author, _flat(metadata), tuple(acl), tuple(required))
        for id_, document, text, title, author, metadata, acl, required, _ in rows
    }
    in_keywords = {id_: _entry(e) for id_, e in (await space.entries()).items()}
    _compare("vectors", in_vectors, embeddable)
    _compare("keywords", in_keywords, wanted)
    if vector is not None:
        for id_, _, text, *_, embedding in rows:
            off = float(np.abs(np.asarray(embedding, dtype=np.float32) - vector(text)).max())
            assert off < VECTOR_TOLERANCE, f"vectors: chunk {id_} has the embedding of another text (off by {off:.3f})"
    return len(wanted)


def _entry(e: Mapping[str, Any]) -> Expected:
    required = tuple(tag for tag in e["required_tags"] if tag != EVERYONE)
    assert e["required_count"] == len(required) + 1, "keywords: required_count is not the number of required_tags"
    return Expected(
        UUID(e["document_id"]), e["text"], e["title"], e["author"], _flat(e["metadata"]), tuple(e["acl_tags"]), required
    )


def _flat(metadata: Mapping[str, object] | None) -> str:
    return repr(sorted((metadata or {}).items()))


def _compare(name: str, held: Mapping[UUID, Expected], wanted: Mapping[UUID, Expected]) -> None:
    assert not (lost := wanted.keys() - held.keys()), f"{name} lack {len(lost)} of {len(wanted)} chunks"
    assert not (extra := held.keys() - wanted.keys()), f"{name} hold {len(extra)} chunks that nobody wants"
    wrong = [i for i in wanted if held[i] != wanted[i]]
    assert not wrong, f"{name}: {len(wrong)} chunks differ, e.g. {held[wrong[0]]} instead of {wanted[wrong[0]]}"
