"""An edit → an overlay: resolved in the ledger, chunked like a published document, and embedded where it is new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import numpy as np
from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import Misconfigured, Poison
from pipeline.core.identity import content_hash, document_id
from pipeline.core.model import Generation, Manifest
from pipeline.core.normalise import clean, normalise
from pipeline.core.titles import EmbeddedChunk, embedded_title, embedding_texts
from pipeline.embedding.port import Embedder, Vectors
from pipeline.ledger.entry import content_fields, cut
from pipeline.stages.manifests import build_manifest
from pipeline.stores.postgres import Connection
from query.access.callers import Caller
from query.access.verify import Detail
from query.model import BadQuery, Passage
from query.preview.model import MAX_DOCUMENTS, MAX_NEW_CHUNKS, Edit, EditedDocument, ProposedDocument, State
from query.retrieval.overlay import NewChunk, Overlay
from query.retrieval.scoring import analyse

TEXTS_A_REQUEST = 64
MAX_CHARACTERS = 4_000_000
"""The longest text of a document: more than MAX_NEW_CHUNKS hold. A page of HTML may be a hundred times as long as
text."""


@dataclass(frozen=True, slots=True)
class LedgerDocument:
    """A document that the caller may read, as the ledger has it."""

    passage: Passage
    """It is of no particular chunk."""
    path: str | None
    content_hash: bytes | None
    manifest: Manifest | None
    """None: it is not chunked yet."""


_READ = """
    SELECT d.id, d.external_id, d.source, coalesce(d.title, ''), d.source_url, d.author, d.media_type,
        d.source_modified_at, b.metadata->>'path', d.content_hash, m.content_hash, m.chunk_ids, m.headings
    FROM documents d
    JOIN access_sets a ON a.id = d.access_id AND a.tenant = d.tenant
    LEFT JOIN document_bodies b ON b.document_id = d.id
    LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = %(generation)s
    WHERE d.tenant = %(tenant)s AND d.source = %(source)s AND d.deleted_at IS NULL AND d.version IS NOT NULL
      AND a.acl_tags && %(tags)s::text[] AND a.required_tags <@ %(tags)s::text[]
      AND (d.external_id = ANY(%(ids)s::text[]) OR b.metadata->>'path' = ANY(%(paths)s::text[])
           OR EXISTS (
               SELECT FROM unnest(%(folders)s::text[]) f
               WHERE starts_with(b.metadata->>'path', f) OR starts_with(d.external_id, f)
           ))
    LIMIT %(most)s
"""


async def read(connection: Connection, caller: Caller, generation: Generation, edit: Edit) -> list[LedgerDocument]:
    """The documents of the ledger that the edit may concern and that this caller may read. Raises BadQuery if there
    are too many, and psycopg.Error."""
    paths = [document.path for document in edit.documents]
    most = 4 * MAX_DOCUMENTS
    cursor = await connection.execute(
        _READ,
        {
            "generation": generation.name,
            "tenant": caller.tenant,
            "source": edit.source,
            "tags": sorted(caller.tags),
            "ids": [*paths, *(document.external_id for document in edit.documents if document.external_id)],
            "paths": paths,
            "folders": [_beginning(folder) for folder in edit.folders],
            "most": most + 1,
        },
        prepare=False,  # the best plan depends on the number of values
    )
    rows = await cursor.fetchall()
    if len(rows) > most:
        raise BadQuery(f"the folders of the edit have more than {most} documents: name fewer files, or use --git")
    return [_read(row) for row in rows]


def _read(row: Sequence[object]) -> LedgerDocument:
    id_, external_id, source, title, url, author, media_type, modified_at, path, digest, chunked, ids, headings = row
    passage = Passage(id_, id_, external_id, source, title, url, 0, author, media_type, modified_at)  # type: ignore[arg-type]
    manifest = None
    if isinstance(chunked, bytes) and isinstance(ids, list) and isinstance(headings, list):
        manifest = Manifest(chunked, tuple(ids), headings=tuple(map(tuple, headings)))
    return LedgerDocument(passage, path, digest, manifest)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Matched:
    """A document of the edit, and the one in the ledger that it replaces."""

    proposed: ProposedDocument
    known: LedgerDocument | None


def match(edit: Edit, known: Sequence[LedgerDocument]) -> list[Matched]:
    """Each document of the edit with its counterpart in the ledger: by external id where the edit names one, else by
    its path, else the one that has the path as its id; and the documents of the edit's folders that it lacks, as
    deleted ones. Pure. Raises BadQuery for a path that several documents have."""
    by_id = {document.passage.external_id: document for document in known}
    by_path: dict[str, list[LedgerDocument]] = {}
    for document in known:
        if document.path is not None:
            by_path.setdefault(document.path, []).append(document)
    matched = []
    for proposed in edit.documents:
        counterpart = by_id.get(proposed.external_id) if proposed.external_id is not None else None
        if counterpart is None:
            same_path = by_path.get(proposed.path, [])
            if len(same_path) > 1:
                raise BadQuery(
                    f"{len(same_path)} documents of {edit.source} have the path {proposed.path}: name the external_id"
                )
            counterpart = same_path[0] if same_path else by_id.get(proposed.path)
        matched.append(Matched(proposed, counterpart))
    taken = {pair.known.passage.document_id for pair in matched if pair.known is not None}
    folders = tuple(_beginning(folder) for folder in edit.folders)
    gone = [
        Matched(ProposedDocument(document.path or document.passage.external_id), document)
        for document in known
        if document.passage.document_id not in taken
        and (document.passage.external_id.startswith(folders) or (document.path or "\0").startswith(folders))
    ]
    return [*matched, *gone]


def _beginning(folder: str) -> str:
    """The beginning of every path below a folder."""
    return f"{folder.rstrip('/')}/" if folder.strip("/") else ""


@dataclass(slots=True)
class _Chunked:
    """A document that would have these chunks."""

    passage: Passage
    manifest: Manifest
    texts: Sequence[str]
    known: LedgerDocument | None
    edited: EditedDocument
    new: frozenset[UUID] = frozenset()
    rewritten: frozenset[UUID] = frozenset()
    """Chunks that the index has, under another title or heading."""

    def to_embed(self, generation: Generation) -> dict[UUID, EmbeddedChunk]:
        """The texts and titles of the chunks that the index does not have."""
        m = self.manifest
        title = embedded_title(self.passage.title, self.passage.media_type or "", len(m.chunk_ids), generation.params)
        return {
            id_: EmbeddedChunk(title, text, tokens)
            for id_, text, tokens in zip(m.chunk_ids, self.texts, m.token_counts, strict=True)
            if id_ in self.new
        }


async def overlay(
    es: AsyncElasticsearch,
    embedder: Embedder,
    generation: Generation,
    caller: Caller,
    edit: Edit,
    matched: Sequence[Matched],
    on_embedded: Callable[[int, float], None] = lambda tokens, money: None,
) -> tuple[Overlay, list[EditedDocument]]:
    """The overlay of an edit, and how each of its documents differs from the index. on_embedded: receives the tokens
    and the money that embedding its texts cost. Raises BadQuery, Retryable and Misconfigured."""
    chunked: list[_Chunked] = []
    edited: list[EditedDocument] = []
    removed: set[UUID] = set()
    new_chunks = 0
    for pair in matched:
        if pair.proposed.content is None:
            edited.append(_deleted(edit, caller, pair))
            removed.update(pair.known.manifest.chunk_ids if pair.known and pair.known.manifest else ())
            continue
        document = await asyncio.to_thread(_chunk, edit, caller, generation, embedder, pair)
        new_chunks += len(document.new)
        if new_chunks > MAX_NEW_CHUNKS:  # before the next document, which may take a second
            raise BadQuery(f"the edit has more than {MAX_NEW_CHUNKS} new chunks, the maximum: preview it in parts")
        edited.append(document.edited)
        if document.edited.state != "unchanged":
            chunked.append(document)
            before = pair.known.manifest.chunk_ids if pair.known and pair.known.manifest else ()
            removed.update(set(before) - set(document.manifest.chunk_ids))
    texts = {
        id_: text for document in chunked for id_, text in zip(document.manifest.chunk_ids, document.texts, strict=True)
    }
    new = {id_: chunk for document in chunked for id_, chunk in document.to_embed(generation).items()}
    vectors = await _embed(embedder, generation, list(new.values()), on_embedded)
    entries = {
        id_: content_fields(document.passage.title, headings, texts[id_])
        for document in chunked
        for id_, headings in zip(document.manifest.chunk_ids, document.manifest.headings, strict=True)
        if id_ in document.new or id_ in document.rewritten
    }
    return Overlay(
        passages={
            id_: replace(document.passage, chunk_id=id_, chunk_index=n)
            for document in chunked
            for n, id_ in enumerate(document.manifest.chunk_ids)
        },
        details={
            id_: Detail(spans, headings)
            for document in chunked
            for id_, spans, headings in zip(
                document.manifest.chunk_ids, document.manifest.spans, document.manifest.headings, strict=True
            )
        },
        new={id_: NewChunk(texts[id_], vector) for id_, vector in zip(new, vectors, strict=True)},
        entries=await analyse(es, generation, entries),
        texts={id_: texts[id_] for id_ in entries},
        removed=frozenset(removed),
        documents=frozenset(d.document_id for d in edited if d.state not in ("unchanged", "unknown")),
    ), edited


def _deleted(edit: Edit, caller: Caller, of: Matched) -> EditedDocument:
    external_id, id_ = _identity(edit, caller, of)
    state: State = "unknown" if of.known is None else "deleted"
    chunks = of.known.manifest.chunk_ids if of.known and of.known.manifest else ()
    return EditedDocument(of.proposed.path, external_id, id_, state, removed=len(chunks))


def _identity(edit: Edit, caller: Caller, of: Matched) -> tuple[str, UUID]:
    if of.known is not None:
        return of.known.passage.external_id, of.known.passage.document_id
    external_id = of.proposed.external_id or of.proposed.path
    return external_id, document_id(caller.tenant, edit.source, external_id)


def _chunk(edit: Edit, caller: Caller, generation: Generation, embedder: Embedder, of: Matched) -> _Chunked:
    """Runs in a thread. Raises BadQuery for a text that no store can hold."""
    try:
        present = of.known.passage.media_type if of.known else None
        text, media_type = normalise(of.proposed.content or "", of.proposed.media_type or present or "text/plain")
    except Poison as error:
        raise BadQuery(f"{of.proposed.path}: {error}") from error
    if len(text) > MAX_CHARACTERS:
        raise BadQuery(f"{of.proposed.path}: its text has more than {MAX_CHARACTERS:,} characters: shorten it")
    external_id, id_ = _identity(edit, caller, of)
    digest = content_hash(text)
    title = clean(of.proposed.title) or (of.known.passage.title if of.known else external_id)
    try:
        manifest = build_manifest(id_, title, text, media_type, digest, generation, embedder.count_tokens)
    except ModuleNotFoundError as error:
        raise Misconfigured(f"a preview chunks texts as workers do: install penstock[worker] ({error.name})") from error
    before = of.known.passage if of.known else Passage(id_, id_, external_id, edit.source, title, None, 0)
    passage = replace(before, title=title, media_type=media_type)
    old = of.known.manifest if of.known else None
    old_headings = dict(zip(old.chunk_ids, old.headings, strict=True)) if old else {}
    new = frozenset(id_ for id_ in manifest.chunk_ids if id_ not in old_headings)
    rewritten = frozenset(
        id_
        for id_, headings in zip(manifest.chunk_ids, manifest.headings, strict=True)
        if id_ in old_headings and (title != before.title or headings != old_headings[id_])
    )
    unchanged = of.known is not None and of.known.content_hash == digest and title == before.title and not new
    removed = len(set(old_headings) - set(manifest.chunk_ids))
    state: State = "unchanged" if unchanged else "new" if of.known is None else "changed"
    edited = EditedDocument(
        of.proposed.path, external_id, id_, state, len(manifest.chunk_ids), len(new), 0 if unchanged else removed
    )
    texts = [cut(text, spans) for spans in manifest.spans]
    return _Chunked(passage, manifest, texts, of.known, edited, new, rewritten)


async def _embed(
    embedder: Embedder,
    generation: Generation,
    chunks: Sequence[EmbeddedChunk],
    on_embedded: Callable[[int, float], None],
) -> list[Vectors]:
    """The vectors of new chunks, as the vector table would store them; zeros for a text that the model refuses."""
    texts, _ = await asyncio.to_thread(embedding_texts, chunks, generation, embedder.count_tokens)
    vectors: list[Vectors] = []
    for at in range(0, len(texts), TEXTS_A_REQUEST):
        embedded = await embedder.embed_documents(texts[at : at + TEXTS_A_REQUEST])
        on_embedded(embedded.tokens, embedded.money)
        vectors += list(embedded.vectors)
    if generation.vector_type == "halfvec":
        return [np.asarray(np.asarray(vector, np.float16), np.float32) for vector in vectors]
    return vectors
