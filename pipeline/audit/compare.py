"""Comparing a document's desired state in the ledger with its actual state in the stores. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from uuid import UUID

from pipeline.core.identity import chunk_ids, content_hash
from pipeline.core.model import STORES, ChunkParams, Store
from pipeline.core.titles import embedded_title
from pipeline.ledger.documents import Identity
from pipeline.ledger.entry import cut, entries
from pipeline.ledger.work import Work
from pipeline.stores.elasticsearch import HAS_VECTOR

Place = Literal["vectors", "keywords", "ledger"]
PLACES: tuple[Place, ...] = get_args(Place)

Kind = Literal[
    "missing",
    "orphan",
    "unknown_document",
    "wrong_access",
    "wrong_text",
    "wrong_entry",
    "ahead",
    "unreachable",
    "no_state",
    "stale_manifest",
    "rotten_body",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
MEANING: Mapping[Kind, str] = {
    "missing": "a desired chunk is not in the store",
    "orphan": "the store holds a surplus chunk of a known document",
    "unknown_document": "the store holds chunks of a document that is deleted, withdrawn or unknown",
    "wrong_access": "the store's tenant or access tags are not the ledger's",
    "wrong_text": "the store's text is not the one that the manifest cuts from the body",
    "wrong_entry": "another field of the keyword entry is not the ledger's",
    "ahead": "the entry's version is above every number that the ledger drew for the document",
    "unreachable": "the row is right, but the HNSW index does not find it by its own vector",
    "no_state": "the ledger does not track the document in this store: it looked settled and was not",
    "stale_manifest": "the list of chunks is missing, of another text or title, or not what its own spans cut",
    "rotten_body": "the stored text is missing or damaged: only publishing the document again repairs that",
}

NOWHERE = UUID(int=0)
"""The document of an entry whose document id is missing or invalid."""


@dataclass(frozen=True, slots=True)
class State:
    """How far one store has reached the desired state of one document."""

    want_seq: int
    seq: int
    refused: frozenset[UUID] = frozenset()
    attempts: int = 0
    error: str | None = None

    @property
    def settled(self) -> bool:
        return self.seq >= self.want_seq


@dataclass(frozen=True, slots=True)
class Print:
    """Digests of the fields of one keyword entry."""

    text: bytes
    """The SHA-256 of its text."""
    access: bytes
    derived: bytes
    """The fields that are derived from the text. They are compared only where the text can be."""
    rest: bytes
    has_vector: bool = False

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Print:
        access = {name: entry.get(name) for name in _ACCESS}
        derived = {name: entry.get(name) for name in _DERIVED}
        rest = {name: value for name, value in entry.items() if name not in (*_ACCESS, *_DERIVED, "text", HAS_VECTOR)}
        return cls(
            text_hash(str(entry.get("text", ""))),
            _digest(access),
            _digest(derived),
            _digest(rest),
            entry.get(HAS_VECTOR) is True,
        )


_ACCESS = ("tenant", "acl_tags", "required_tags", "required_count")
_DERIVED = ("identifiers", "analysed", "title_words")


def text_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _digest(fields: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True, default=str).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the chunk table."""

    document: UUID
    id: UUID
    access_id: int
    text: bytes
    """The SHA-256 of its text."""
    tenant: str | None = None
    """None in a row that an older version wrote: the policies look up the document's."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the keyword index."""

    document: UUID
    id: UUID
    version: int
    print: Print


@dataclass(frozen=True, slots=True)
class Desired:
    """The desired state of one document in one generation, read from one snapshot of the ledger."""

    identity: Identity
    seq: int
    """The document's newest sequence number, over all stores."""
    searchable: bool
    """True if it has content, is not deleted, and somebody may read it."""
    access_id: int | None
    states: Mapping[Store, State]
    """The states by store. A store that the ledger does not track for this document is absent."""
    chunks: Mapping[UUID, Print] = field(default_factory=dict)
    rotten: bool = False
    """Whether the stored text is damaged: it does not have the content hash, so ``Print.text`` must not be compared."""
    stale: bool = False
    """Whether the manifest does not belong to this text, so that ``chunks`` must not be compared."""
    building: bool = False
    """Whether the generation is being built: it will add documents that it does not track yet."""
    vectors_in_entries: bool = False
    """Whether keyword entries carry vectors."""

    @property
    def pending(self) -> bool:
        return self.untracked_yet or any(not state.settled for state in self.states.values())

    @property
    def untracked_yet(self) -> bool:
        return self.building and self.seq > 0 and len(self.states) < len(STORES)

    @property
    def reason(self) -> str | None:
        """Why it is pending: the errors of the stores where it failed; None: it has not failed."""
        failed = [f"{store}: {s.error}" for store, s in self.states.items() if not s.settled and s.attempts]
        return "; ".join(failed) or None

    @property
    def chunks_with_vectors(self) -> Collection[UUID]:
        """The chunks whose keyword entries must carry vectors. Before the vectors are settled it is not known."""
        state = self.states.get("vectors")
        if not self.vectors_in_entries or state is None or not state.settled:
            return ()
        return self.chunks.keys() - state.refused

    @property
    def standing(self) -> Standing:
        return self.seq, dict(self.states)


Standing = tuple[int, Mapping[Store, State]]
"""A document's seq and its states. If it is the same at two readings, nothing was accepted, confirmed or reopened in
between."""


def describe(
    w: Work,
    seq: int,
    states: Mapping[Store, State],
    body: str | None,
    metadata: Mapping[str, object] | None,
    params: ChunkParams,
    *,
    alive: bool,
    building: bool,
    vectors_in_entries: bool = False,
) -> Desired:
    """Make the desired state of one document from its rows in the ledger. body, metadata: None: they are not stored.
    params: those of the generation."""
    rotten = alive and (body is None or content_hash(body) != w.content_hash)
    stale = w.needs_chunking
    chunks: dict[UUID, Print] = {}
    if w.searchable and not stale:
        chunks = {chunk: Print.of(entry) for chunk, entry in entries(w, body or "", metadata or {})}
        if not rotten and w.manifest is not None:
            texts = [cut(body or "", spans) for spans in w.manifest.spans]
            title = embedded_title(w.title, w.media_type, len(texts), params)
            stale = chunk_ids(w.identity.id, texts, title) != w.manifest.chunk_ids
    return Desired(
        w.identity,
        seq,
        w.searchable,
        w.access_id,
        states,
        chunks,
        rotten=rotten,
        stale=stale,
        building=building,
        vectors_in_entries=vectors_in_entries,
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of one kind between one document and one store."""

    store: Place
    kind: Kind
    chunks: tuple[UUID, ...] = ()


def compare(desired: Desired, rows: Sequence[Row], held: Sequence[Entry]) -> list[Difference]:
    """All differences of a document that the ledger knows. A store in which it is pending is not compared, because its
    sink will write it anyway. held: the document's entries in the keyword index."""
    differences: list[Difference] = []
    if desired.rotten:
        differences.append(Difference("ledger", "rotten_body"))
    differences += [
        Difference(store, "no_state")
        for store in STORES
        if desired.seq > 0 and store not in desired.states and not desired.building
    ]
    if desired.stale:
        if not desired.pending and not desired.rotten:
            differences.append(Difference("ledger", "stale_manifest"))
        return differences  # the desired chunks are not known
    if _comparable(desired, "vectors"):
        differences += _vectors(desired, rows)
    if _comparable(desired, "keywords"):
        differences += _keywords(desired, held)
    return differences


def _comparable(desired: Desired, store: Store) -> bool:
    state = desired.states.get(store)
    return state.settled if state is not None else desired.seq == 0


def _vectors(desired: Desired, rows: Sequence[Row]) -> list[Difference]:
    state = desired.states.get("vectors")
    refused = state.refused if state is not None else frozenset()
    mine = [r for r in rows if r.id in desired.chunks]
    return _named(
        "vectors",
        {
            **_presence(desired, {r.id for r in rows}, refused),
            "wrong_access": [
                r.id
                for r in mine
                if r.access_id != desired.access_id or r.tenant not in (None, desired.identity.tenant)
            ],
            "wrong_text": [r.id for r in mine if not desired.rotten and r.text != desired.chunks[r.id].text],
        },
    )


def _keywords(desired: Desired, held: Sequence[Entry]) -> list[Difference]:
    mine = [(e, desired.chunks[e.id]) for e in held if e.id in desired.chunks]
    carrying = desired.chunks_with_vectors
    return _named(
        "keywords",
        {
            **_presence(desired, {e.id for e in held}, frozenset()),
            "wrong_access": [e.id for e, expected in mine if e.print.access != expected.access],
            "wrong_text": [e.id for e, expected in mine if not desired.rotten and e.print.text != expected.text],
            "wrong_entry": [
                e.id
                for e, expected in mine
                if e.print.rest != expected.rest
                or (not desired.rotten and e.print.derived != expected.derived)
                or (e.id in carrying and not e.print.has_vector)
            ],
            "ahead": [e.id for e, _ in mine if e.version > desired.seq],
        },
    )


def _presence(desired: Desired, held: set[UUID], refused: frozenset[UUID]) -> dict[Kind, Iterable[UUID]]:
    surplus = held - desired.chunks.keys()
    return {
        "missing": [i for i in desired.chunks if i not in held and i not in refused],
        "orphan" if desired.searchable else "unknown_document": sorted(surplus),
    }


def _named(store: Store, ids: Mapping[Kind, Iterable[UUID]]) -> list[Difference]:
    return [Difference(store, kind, ids_of_kind) for kind, chunks in ids.items() if (ids_of_kind := tuple(chunks))]
