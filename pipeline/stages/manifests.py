"""Building manifests: detect chunks a changed text, and a sink chunks a document whose manifest is missing or stale."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from uuid import UUID

from pipeline.core.identity import chunk_ids
from pipeline.core.model import CountTokens, Generation, Manifest, Store
from pipeline.core.titles import embedded_title
from pipeline.ledger import work
from pipeline.ledger.documents import UPSERT_MANIFEST, manifest_row
from pipeline.ledger.work import Work
from pipeline.stores.postgres import Connection

Counters = Callable[[Generation], CountTokens]
LARGE_CHARACTERS, LARGE_AT_ONCE = 1_000_000, 2
"""How many texts of so many characters are converted and cut at the same time in one stage. Each takes up to 300 MB
meanwhile, and those of sixteen lanes take more memory than a worker has."""


class LargeTexts:
    """The places for large texts. Belongs to one event loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(LARGE_AT_ONCE)

    def place(self, texts: Sequence[str]) -> AbstractAsyncContextManager[object]:
        """Around work on these texts: it holds a place if one of them is large."""
        return self.place_for(max(map(len, texts), default=0))

    def place_for(self, characters: int) -> AbstractAsyncContextManager[object]:
        """The same around work on texts that together have so many characters."""
        return self._places if characters > LARGE_CHARACTERS else nullcontext()


def build_manifest(
    document: UUID,
    title: str,
    text: str,
    media_type: str,
    digest: bytes,
    generation: Generation,
    count_tokens: CountTokens,
) -> Manifest:
    """Chunk a text as the generation prescribes. digest: the text's content hash. Runs in a thread, for it may take
    seconds."""
    # Here, because importing the parsers takes 0.1 s, and sinks rarely need them.
    from pipeline.core.chunking import chunk
    from pipeline.stages.source_parser import source_parser

    chunks = chunk(
        text, media_type, params=generation.params, count_tokens=count_tokens, parse_code=source_parser().parse
    )
    return Manifest(
        digest,
        chunk_ids(
            document, [c.text for c in chunks], embedded_title(title, media_type, len(chunks), generation.params)
        ),
        tuple(c.spans for c in chunks),
        tuple(c.token_count for c in chunks),
        tuple(c.headings for c in chunks),
    )


class Chunker:
    """Builds the manifests that are missing or stale in a sink's work, as detect would have built them; for example
    those of a generation that was added after its documents were accepted."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._large = LargeTexts()

    async def complete(
        self, connection: Connection, generation: Generation, works: Sequence[Work], store: Store
    ) -> list[Work]:
        """Return this work with every manifest built from the document's current text. A document whose text changes
        meanwhile is absent from the result."""
        stale = [w for w in works if w.needs_chunking]
        if not stale:
            return list(works)
        bodies = await work.bodies(connection, stale)
        await connection.commit()  # no transaction stays open while texts are chunked, which may take seconds
        built = []
        for w in stale:
            if w.identity.id in bodies and w.content_hash is not None:
                text, digest, count = bodies[w.identity.id][0], w.content_hash, self.counters(generation)
                async with self._large.place([text]):
                    manifest = await asyncio.to_thread(
                        build_manifest, w.identity.id, w.title, text, w.media_type, digest, generation, count
                    )
                built.append((w, manifest))
        for w, manifest in built:
            async with connection.transaction():
                # Under the document's lock: a newer manifest, which detect may have written meanwhile, must stay.
                cursor = await connection.execute(
                    "SELECT content_hash, media_type, title FROM documents WHERE id = %s FOR UPDATE", [w.identity.id]
                )
                row = await cursor.fetchone()
                if row is not None and (row[0], row[1] or w.media_type, row[2] or "") == (
                    w.content_hash,
                    w.media_type,
                    w.title,
                ):
                    await connection.execute(UPSERT_MANIFEST, manifest_row(w.identity.id, generation.name, manifest))
        reread = await work.load(connection, generation.name, store, [w.identity.id for w in works])
        return [w for w in reread if not w.needs_chunking]
