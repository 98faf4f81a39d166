"""Computes what the ledger and both stores must hold from the documents alone, and compares it with what they hold.

Every column and every field of the mapping is either compared here or named in NOT_COMPARED with its reason;
``tests/faults/test_oracle.py`` fails when one is added that nobody has decided about.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any, Protocol
from uuid import UUID, uuid5

import numpy as np
from numpy.typing import NDArray
from pgvector import Vector

from pipeline.core.chunking import chunk
from pipeline.core.identifiers import terms, words_of_names
from pipeline.core.languages import language_of
from pipeline.core.model import Chunk, CountTokens, Generation
from pipeline.core.normalise import MESSAGES_TYPE, normalise
from pipeline.core.sketch import sketches
from pipeline.embedding.choose import token_counter
from pipeline.ledger import generations
from pipeline.runtime.settings import Settings, dist
from pipeline.stores.postgres import open_pool
from topics.messages import DocumentUpserted

VECTOR_TOLERANCE = 0.002
"""halfvec keeps 11 bits of each number, none of which is above 1."""
SKETCH_TOLERANCE = 0.05
"""The share of a sketch's bits that may differ from those of the stored vector: it is made before that is rounded."""
MOST_TITLED_CHUNKS = 3
"""The most chunks of a document that are embedded with its title."""
DOCUMENTS = UUID("9f2c1c2e-6a4c-5d0b-9d8e-0a8c7a3d5b11")
"""The namespace of document ids: other teams compute them, so it never changes."""

COMPARED: Mapping[str, tuple[str, ...]] = {
    "documents": (
        "id",
        "tenant",
        "source",
        "external_id",
        "version",
        "observed_at",
        "deleted_at",
        "content_hash",
        "meta_hash",
        "title",
        "source_url",
        "author",
        "media_type",
        "source_modified_at",
        "erased_at",
        "keys",
    ),
    "access_sets": ("tenant", "digest", "acl_tags", "required_tags"),
    "document_bodies": ("document_id", "text", "metadata"),
    "manifests": ("document_id", "generation", "content_hash", "chunk_ids", "token_counts", "spans", "headings"),
    "chunks": ("id", "document_id", "tenant", "text"),
    "keywords": (
        "document_id",
        "tenant",
        "source",
        "external_id",
        "title",
        "title_words",
        "headings",
        "text",
        "identifiers",
        "acl_tags",
        "required_tags",
        "required_count",
        "source_url",
        "author",
        "media_type",
        "source_modified_at",
        "metadata",
        "keys",
        "analysed",
    ),
}
"""Table (``chunks``: the active generation's; ``keywords``: its index) → what of it is compared by value."""

NOT_COMPARED: Mapping[str, Mapping[str, str]] = {
    "documents": {
        "seq": "drawn from a sequence; the audit and the simulation check its order",
        "announced_seq": "compared with seq by tests/faults/machine.py",
        "deleted_floor": "only its effect is defined: which upsert counts",
        "access_observed_at": "only its effect is defined: which access is in force",
        "access_id": "a reference: the access set that it leads to is compared",
        "received_at": "our own clock",
        "changed_at": "measures freshness, decides nothing",
        "lane": "says how the newest event came, decides nothing",
        "event_count": "numbers the ring of document_events",
    },
    "access_sets": {"id": "drawn from a sequence"},
    "document_bodies": {},
    "manifests": {},
    "chunks": {
        "access_id": "a reference: the access set that it leads to is compared",
        "embedding": "compared with the model's vector within VECTOR_TOLERANCE, where `vector` is given",
        "sketch": "compared with that of the embedding within SKETCH_TOLERANCE",
        "created_at": "our own clock",
        "in_graph": "where a row is looked for: tests/contract/pipeline/stores/test_graph.py",
    },
    "keywords": {},
}


class Stores(Protocol):
    """Where to look: a Space, or anything alike."""

    settings: Settings

    async def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]: ...

    async def entries(self) -> dict[UUID, dict[str, Any]]:
        """Every entry that Elasticsearch returns, by chunk id."""
        ...


@dataclass(frozen=True)
class Expected:
    """One document: its row in each table of the ledger, and each of its chunks in both stores."""

    ledger: Mapping[str, Mapping[str, Any]]
    """Table → column → value."""
    chunks: Mapping[UUID, Mapping[str, Any]]
    """Chunk id → its row, without its vector."""
    embedded: Mapping[UUID, str]
    """Chunk id → the text that its vector is computed from."""
    entries: Mapping[UUID, Mapping[str, Any]]
    """Chunk id → its whole entry in Elasticsearch."""


@cache
def _counter(generation: Generation) -> CountTokens:
    return token_counter(generation, dist() / "models")


def document_id(message: DocumentUpserted) -> UUID:
    return uuid5(DOCUMENTS, f"{message.tenant}/{message.source}/{message.external_id}")


def desired_chunks(generation: Generation, message: DocumentUpserted) -> Mapping[UUID, Mapping[str, Any]]:
    """The chunks that a document must have, none where nobody may read it."""
    return expected(generation, message).chunks


def expected(generation: Generation, message: DocumentUpserted, count_tokens: CountTokens | None = None) -> Expected:
    """Everything that is stored of a document, from its message. count_tokens: default, the generation's.

    The product is asked for the normalised text, the places to cut it at, the count of tokens, the identifiers in it
    and the languages of its chunks; ids, hashes, headings of plain Markdown, spans and all other fields are computed
    here.
    """
    id_ = document_id(message)
    text, media_type, all_chunks = _cut(generation, message.content, message.media_type, count_tokens)
    acl, required = (
        sorted({f"{message.source}/{t}" for t in tags}) for tags in (message.acl_tags, message.required_tags)
    )
    chunks = all_chunks if acl else ()
    titled = generation.params.version > 1 and len(all_chunks) <= MOST_TITLED_CHUNKS and media_type != MESSAGES_TYPE
    title = message.title if titled else ""
    ids = list(_chunk_ids(id_, [c.text for c in chunks], title))
    digest = hashlib.sha256(text.encode()).digest()
    modified = message.source_modified_at
    fields: dict[str, Any] = {
        "tenant": message.tenant,
        "source": message.source,
        "external_id": message.external_id,
        "title": message.title,
        "source_url": message.source_url,
        "author": message.author,
        "media_type": media_type,
    }
    meta = [
        message.title,
        message.source_url,
        message.author,
        media_type,
        modified and modified.timestamp(),
        dict(message.metadata),
    ]
    common = {
        **fields,
        "document_id": str(id_),
        "acl_tags": acl,
        "required_tags": ["*", *required],
        "required_count": len(required) + 1,
        "metadata": dict(message.metadata),
        "source_modified_at": modified and _hour(modified),
    }
    return Expected(
        ledger={
            "documents": {
                **fields,
                "id": id_,
                "version": message.version,
                "observed_at": message.observed_at,
                "deleted_at": None,
                "erased_at": None,
                "content_hash": digest,
                "meta_hash": _json_hash(meta),
                "source_modified_at": modified,
                "keys": [],  # no tenant of these tests declares any
            },
            "access_sets": {
                "tenant": message.tenant,
                "digest": _json_hash([acl, required]),
                "acl_tags": acl,
                "required_tags": required,
            },
            "document_bodies": {"document_id": id_, "text": text, "metadata": dict(message.metadata)},
            "manifests": {
                "document_id": id_,
                "generation": generation.name,
                "content_hash": digest,
                "chunk_ids": ids,
                "token_counts": [c.token_count for c in chunks],
                "spans": [[list(span) for span in c.spans] for c in chunks],
                "headings": [list(c.headings) for c in chunks],
            },
        },
        chunks={
            i: {"id": i, "document_id": id_, "tenant": message.tenant, "text": c.text}
            for i, c in zip(ids, chunks, strict=True)
        },
        embedded={i: f"{title}\n{c.text}" if title else c.text for i, c in zip(ids, chunks, strict=True)},
        entries={
            i: {
                **common,
                "text": c.text,
                "headings": list(c.headings),
                "identifiers": _identifiers("\n".join((message.title, *c.headings, c.text))),
                **_title_words(message.title),
                **_analysed(message.title, c),
            }
            for i, c in zip(ids, chunks, strict=True)
        },
    )


@lru_cache(1_000)
def _cut(
    generation: Generation, content: str, media_type: str, count_tokens: CountTokens | None
) -> tuple[str, str, tuple[Chunk, ...]]:
    """The text and its type as stored, and its chunks."""
    text, kind = normalise(content, media_type)
    chunks = chunk(text, kind, params=generation.params, count_tokens=count_tokens or _counter(generation))
    _obey_the_laws_of_chunks(text, kind, chunks, generation)
    return text, kind, tuple(chunks)


def _analysed(title: str, of: Chunk) -> dict[str, Any]:
    language = language_of(of.text)
    fields = {"title": title, "headings": list(of.headings), "text": of.text, **_title_words(title)}
    return {"analysed": {language: fields}} if language else {}


def _title_words(title: str) -> dict[str, str]:
    words = words_of_names(title)
    return {"title_words": words} if words else {}


@lru_cache(10_000)
def _identifiers(text: str) -> list[str]:
    return terms(text)


def _chunk_ids(document: UUID, texts: Sequence[str], title: str) -> Iterator[UUID]:
    before: dict[str, int] = {}
    for text in texts:
        before[text] = before.get(text, -1) + 1
        content = f"{title}\0{text}" if title else text
        yield uuid5(document, f"{hashlib.sha256(content.encode()).hexdigest()}:{before[text]}")


def _json_hash(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).digest()


def _hour(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:00:00+00:00")


def _obey_the_laws_of_chunks(text: str, media_type: str, chunks: Sequence[Chunk], generation: Generation) -> None:
    """Check what must hold of chunks wherever they are cut."""
    held = [False] * len(text)
    for c in chunks:
        assert c.text == "".join(text[a:b] for a, b in c.spans), "a chunk's text is not what its spans hold"
        assert c.token_count <= generation.params.max_tokens, "a chunk is larger than the model's window"
        held[slice(*c.spans[-1])] = [True] * (c.spans[-1][1] - c.spans[-1][0])
    if chunks:
        assert all(ok or char.isspace() for ok, char in zip(held, text, strict=True)), (
            "a part of the text is in no chunk"
        )
    if media_type == "text/markdown" and not _DIFFICULT.search(text):
        for c in chunks:
            assert c.headings == _headings(text, c.spans[0][0]), "a chunk stands under other headings in its text"


_DIFFICULT = re.compile(
    r"^(?:\s*(?:```|~~~|[=-]{2,}|\||<|[-*+>] |\d+[.)] )| {1,3}#|\s*#+\s*$|#.*#\s*$|\t)", re.MULTILINE
)
"""Markdown in which a line that begins with # may be no heading, or something else may be one."""
_HEADING = re.compile(r"^(#{1,6})[ \t]+(\S.*)$", re.MULTILINE)


def _headings(text: str, at: int) -> tuple[str, ...]:
    """Return the headings above a place in plain Markdown, outermost first."""
    path: list[tuple[int, str]] = []
    for heading in _HEADING.finditer(text):
        if heading.start() > at:
            break
        level = len(heading[1])
        path = [*(over for over in path if over[0] < level), (level, " ".join(heading[2].split()))]
    return tuple(name for _, name in path)


async def assert_equal(
    space: Stores,
    documents: Iterable[DocumentUpserted],
    *,
    vector: Callable[[str], NDArray[np.float32]] | None = None,
    refused: Callable[[str], bool] = lambda text: False,
    count_tokens: CountTokens | None = None,
) -> int:
    """Both stores hold exactly the chunks of these documents, and the ledger and they hold every field as COMPARED
    says; returns how many chunks.

    vector: what the model makes of a text; each row's embedding must be that, of the text with its title where it has
    one. refused: texts that the model never takes, which only keyword search has. count_tokens: how tokens were
    counted; default, as the generation says.
    """
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        generation = await generations.active(connection)
    by_id = {document_id(message): expected(generation, message, count_tokens) for message in documents}
    chunks = {i: row for e in by_id.values() for i, row in e.chunks.items()}
    entries = {i: entry for e in by_id.values() for i, entry in e.entries.items()}
    embeddable = {i: row for i, row in chunks.items() if not refused(row["text"])}
    if generation.vectors == "elasticsearch":
        entries = {i: {**entry, "embedded": True} if i in embeddable else entry for i, entry in entries.items()}

    rows = await space.query(f"SELECT {_columns('chunks')}, embedding::real[] FROM {generation.chunk_table}")
    await _compare_sketches(space, generation)
    embedded = {i: text for e in by_id.values() for i, text in e.embedded.items()}
    embeddings = {row[0]: (embedded[row[0]], row[-1]) for row in rows if row[0] in embedded}
    _compare("vectors", {row[0]: _named("chunks", row[:-1]) for row in rows}, embeddable)
    _compare("keywords", await space.entries(), entries)
    await _compare_ledger(space, generation, {i: e for i, e in by_id.items() if e.chunks})
    if vector is not None:
        for id_, (text, embedding) in embeddings.items():
            off = float(np.abs(np.asarray(embedding, dtype=np.float32) - vector(text)).max())
            assert off < VECTOR_TOLERANCE, f"vectors: chunk {id_} has the embedding of another text (off by {off:.3f})"
    return len(chunks)


async def _compare_sketches(space: Stores, generation: Generation) -> None:
    if not generation.sketched:
        return
    centre = Vector.from_binary(generation.centre).to_numpy() if generation.centre is not None else None
    rows = await space.query(f"SELECT id, embedding::real[], sketch::text FROM {generation.chunk_table}")
    for id_, embedding, stored in rows:
        assert stored is not None, f"vectors: chunk {id_} has no sketch"
        made = sketches(np.asarray([embedding], dtype=np.float32), generation.sketch_bits, centre)[0]
        off = float(np.mean(made != [bit == "1" for bit in stored]))
        assert off < SKETCH_TOLERANCE, f"vectors: chunk {id_} has the sketch of another vector (off by {off:.3f})"


async def _compare_ledger(space: Stores, generation: Generation, expected: Mapping[UUID, Expected]) -> None:
    for table, statement in (
        ("documents", "SELECT {} FROM documents t WHERE t.id = ANY(%s)"),
        (
            "access_sets",
            "SELECT d.id, {} FROM documents d JOIN access_sets t ON t.id = d.access_id WHERE d.id = ANY(%s)",
        ),
        ("document_bodies", "SELECT {} FROM document_bodies t WHERE t.document_id = ANY(%s)"),
        ("manifests", "SELECT {} FROM manifests t WHERE t.document_id = ANY(%s) AND t.generation = %s"),
    ):
        parameters = [list(expected), *([generation.name] if table == "manifests" else ())]
        rows = await space.query(statement.format(_columns(table, "t.")), *parameters)
        named = {row[0]: _named(table, row[1:] if table == "access_sets" else row) for row in rows}
        _compare(table, named, {i: e.ledger[table] for i, e in expected.items()})


def _columns(table: str, prefix: str = "") -> str:
    return ", ".join(prefix + column for column in COMPARED[table])


def _named(table: str, row: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(COMPARED[table], row, strict=True))


def _compare(name: str, held: Mapping[UUID, Mapping[str, Any]], expected: Mapping[UUID, Mapping[str, Any]]) -> None:
    lost, extra = expected.keys() - held.keys(), held.keys() - expected.keys()
    assert not lost, (
        f"{name} lack {len(lost)} of {len(expected)} chunks or documents: {[expected[i] for i in lost][:3]}"
    )
    assert not extra, f"{name} hold {len(extra)} chunks that nobody wants: {[held[i] for i in extra][:3]}"
    for id_, expected_fields in expected.items():
        assert expected_fields.keys() == held[id_].keys(), (
            f"{name}: {sorted(expected_fields.keys() ^ held[id_].keys())}"
        )
        wrong = [field for field, value in expected_fields.items() if held[id_][field] != value]
        assert not wrong, f"{name}: {id_} differs in " + "; ".join(
            f"{field}: {held[id_][field]!r} instead of {expected_fields[field]!r}" for field in wrong
        )
