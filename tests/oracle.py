"""What both stores must hold, computed from the documents alone, and what they do hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from uuid import UUID

from pipeline.core.chunking import chunk
from pipeline.core.identity import chunk_ids, document_id, qualify
from pipeline.core.model import CountTokens, Generation
from pipeline.core.normalise import normalise
from pipeline.embedding.choose import token_counter
from pipeline.ledger import generations
from pipeline.settings import dist
from pipeline.stores.postgres import open_pool
from tests.space import Space
from topics.messages import DocumentUpserted


@dataclass(frozen=True)
class Expected:
    document: UUID
    text: str
    title: str
    acl: tuple[str, ...]


@cache
def _counter(generation: Generation) -> CountTokens:
    return token_counter(generation, dist() / "models")


async def assert_equal(space: Space, documents: Iterable[DocumentUpserted]) -> int:
    """Both stores hold exactly the chunks of these documents, with their text, title and access; returns how many."""
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        generation = await generations.active(connection)
    wanted: dict[UUID, Expected] = {}
    for message in documents:
        id_ = document_id(message.tenant, message.source, message.external_id)
        text, media_type = normalise(message.content, message.media_type)
        chunks = chunk(text, media_type, params=generation.params, count_tokens=_counter(generation))
        acl = qualify(message.source, message.acl_tags)
        for i, c in zip(chunk_ids(id_, [c.text for c in chunks]), chunks, strict=True):
            if acl:
                wanted[i] = Expected(id_, c.text, message.title, acl)

    rows = await space.query(
        f"SELECT c.id, c.document_id, c.text, d.title, a.acl_tags FROM {generation.chunk_table} c"
        " JOIN documents d ON d.id = c.document_id LEFT JOIN access_sets a ON a.id = c.access_id"
    )
    in_vectors = {id_: Expected(document, text, title, tuple(acl)) for id_, document, text, title, acl in rows}
    entries = await space.entries()
    in_keywords = {
        id_: Expected(UUID(e["document_id"]), e["text"], e["title"], tuple(e["acl_tags"])) for id_, e in entries.items()
    }
    for name, held in (("vectors", in_vectors), ("keywords", in_keywords)):
        assert not (lost := wanted.keys() - held.keys()), f"{name} lack {len(lost)} of {len(wanted)} chunks"
        assert not (extra := held.keys() - wanted.keys()), f"{name} hold {len(extra)} chunks that nobody wants"
        wrong = [i for i in wanted if held[i] != wanted[i]]
        assert not wrong, f"{name}: {len(wrong)} chunks differ, e.g. {held[wrong[0]]} instead of {wanted[wrong[0]]}"
    return len(wanted)
