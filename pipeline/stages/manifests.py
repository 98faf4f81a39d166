"""How a text is cut as a generation wants it: by detect, and by a sink that meets a manifest of another text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import thread_time
from uuid import UUID

from pipeline.core.identity import chunk_ids
from pipeline.core.model import CountTokens, Generation, Manifest, Store
from pipeline.ledger import work
from pipeline.ledger.documents import UPSERT_MANIFEST, manifest_row
from pipeline.ledger.work import Work
from pipeline.stores.postgres import Connection

Counters = Callable[[Generation], CountTokens]


def build_manifest(
    document: UUID, text: str, media_type: str, digest: bytes, generation: Generation, count_tokens: CountTokens
) -> Manifest:
    """Cut a text as a generation wants it. Runs in a thread."""
    from pipeline.core.chunking import chunk  # here: the parsers take a tenth of a second to import; sinks rarely cut

    chunks = chunk(text, media_type, params=generation.params, count_tokens=count_tokens, clock=thread_time)
    return Manifest(
        digest,
        chunk_ids(document, [c.text for c in chunks]),
        tuple(c.spans for c in chunks),
        tuple(c.token_count for c in chunks),
        tuple(c.headings for c in chunks),
    )


class Chunker:
    """A sink that meets a manifest cut from another text (or none) cuts the text itself, as detect would have."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    async def complete(
        self, connection: Connection, generation: Generation, works: Sequence[Work], store: Store
    ) -> list[Work]:
        """The same work, every manifest cut from the document's current text."""
        stale = [w for w in works if w.needs_chunking]
        if not stale:
            return list(works)
        bodies = await work.bodies(connection, stale)
        await connection.commit()  # cutting takes its time: no transaction waits for it
        cut = []
        for w in stale:
            if w.identity.id in bodies and w.content_hash is not None:
                text, digest, count = bodies[w.identity.id][0], w.content_hash, self._counters(generation)
                manifest = await asyncio.to_thread(
                    build_manifest, w.identity.id, text, w.media_type, digest, generation, count
                )
                cut.append((w, manifest))
        for w, manifest in cut:
            async with connection.transaction():
                # Under the document's lock: detect may have written a newer manifest meanwhile, which stands.
                cursor = await connection.execute(
                    "SELECT content_hash, media_type FROM documents WHERE id = %s FOR UPDATE", [w.identity.id]
                )
                row = await cursor.fetchone()
                if row is not None and (row[0], row[1] or w.media_type) == (w.content_hash, w.media_type):
                    await connection.execute(UPSERT_MANIFEST, manifest_row(w.identity.id, generation.name, manifest))
        reread = await work.load(connection, generation.name, store, [w.identity.id for w in works])
        return [w for w in reread if not w.needs_chunking]
