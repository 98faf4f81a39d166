"""Computes what both stores must hold and what each person may be shown, from the events alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import numpy as np

from pipeline.core.identity import EVERYONE, chunk_ids, document_id, qualify
from pipeline.core.normalise import normalise
from query.access.callers import identify
from query.access.verify import verify
from tests.faults.model import Event, outcome
from tests.faults.story import UNEMBEDDABLE
from tests.simulation.changes import NAMES, cut
from tests.simulation.database import Connection, Nobody
from tests.simulation.kafka import PARTITIONS
from tests.simulation.statements import find
from topics.codec import decode
from topics.messages import DocumentIndexed, DocumentUpserted, IdentityChanged
from topics.registry import DEAD_LETTERS, DOCUMENTS_INDEXED

if TYPE_CHECKING:
    from tests.simulation.world import World

TENANT, SOURCE = "acme", "wiki"
MOST_TITLED_CHUNKS = 3
"""The most chunks of a document that are embedded with its title."""


class Candidate(NamedTuple):
    """A candidate that a store offers."""

    chunk_id: UUID
    document_id: UUID


@dataclass(frozen=True)
class Expected:
    """One chunk as it shall stand in both stores."""

    document: UUID
    text: str
    title: str
    author: str | None
    media_type: str
    metadata: str
    acl: tuple[str, ...]
    required: tuple[str, ...]


class Oracle:
    """Law: a query returns exactly what the accepted events allow this person at this moment, and after calm both
    stores hold exactly what the published events say."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._offered: dict[UUID, UUID] = {}
        """The document of every chunk that was ever desired."""
        self.embedded: dict[UUID, str] = {}
        """The text that the vector of each of them is computed from."""

    def published(self, event: Event) -> None:
        """Remember the chunks of everything that was ever published: a query is offered all of them."""
        if isinstance(event, DocumentUpserted):
            id_ = _id(event.external_id)
            chunks = chunks_of(event.model_copy(update={"acl_tags": ["anybody"]}))
            self._offered |= dict.fromkeys(chunks, id_)
            titled = len(chunks) <= MOST_TITLED_CHUNKS
            self.embedded |= {i: f"{c.title}\n{c.text}" if titled else c.text for i, c in chunks.items()}

    def query(self, person: str, tag: str) -> None:
        """Ask as this person, with a tag besides, for every chunk that there ever was, with the product's own checks.
        No time passes meanwhile: the answer is a register read."""
        world = self._world
        world.tally["queries"] += 1
        accepted = [event for _, event in world.accepted]
        expected: dict[UUID, Expected] = {}
        for name in NAMES:
            expected |= chunks_of(outcome(_of(name, accepted)))
        shown = _run(self._ask(person, tag))
        held = _groups(person, accepted) | {f"{SOURCE}/{tag}", f"{SOURCE}/user:{person}"}
        may = {i for i, e in expected.items() if held & set(e.acl) and held >= set(e.required)}
        assert not (leaked := shown - may), f"LEAKED: {person} with {tag} is shown {len(leaked)} chunks, may see none"
        assert not (hidden := may - shown), (
            f"HIDDEN: {person} with {tag} is not shown {len(hidden)} of {len(may)} chunks"
        )

    async def _ask(self, person: str, tag: str) -> set[UUID]:
        connection: Any = Connection(self._world.database, Nobody(), find)
        caller = await identify(connection, TENANT, principals=[person], tags=[f"{SOURCE}/{tag}"])
        offered = [Candidate(i, d) for i, d in self._offered.items()]
        answer = set(await verify(connection, self._world.generation.name, caller, offered))
        connection.abandon()
        return answer

    def finally_equal(self, *, undisturbed: bool) -> None:
        """Both stores, compared field by field; what was announced, set aside and erased. undisturbed: nothing failed,
        so hints alone had to do."""
        world = self._world
        expected: dict[UUID, Expected] = {}
        for name in NAMES:
            expected |= chunks_of(world.expected(name))
        tables = world.database.tables
        rows = {}
        for (id_,), row in tables["chunks"].items():
            rows[id_] = self._row(row)
            assert np.allclose(row["embedding"].to_list(), _vector(self.embedded.get(id_, ""))), (
                f"WRONG: chunk {id_} has another text's vector"
            )
        entries = {UUID(id_): _entry(body) for id_, body in world.index.standing().items()}
        _compare("vectors", rows, {i: e for i, e in expected.items() if e.text != UNEMBEDDABLE})
        _compare("keywords", entries, expected)
        for person in ("ann", "bob"):
            for tag in ("staff", "board"):
                self.query(person, tag)
        if world.connected is not None:
            world.connected.finally_equal(undisturbed=undisturbed)
        self._erased()
        self._set_aside()
        if not world.tally["lost tail"]:  # numbers that were lost are drawn again
            self._announced()
        assert not undisturbed or world.metrics.rescued.count == world.rescued, (
            "NEEDLESS: a sweeper had to send hints again although nothing failed"
        )
        assert not world.needless, f"NEEDLESS: embedded although their vectors stood there: {world.needless}"

    def _erased(self) -> None:
        tables = self._world.database.tables
        for (id_,), row in tables["documents"].items():
            if row["deleted_at"] is not None and (body := tables["document_bodies"].get((id_,))) is not None:
                assert not body["text"], f"UNDEAD: the ledger keeps the text of {row['external_id']}, which is deleted"
                assert (id_, self._world.generation.name) not in tables["manifests"], "UNDEAD: the manifest of a delete"

    def _set_aside(self) -> None:
        world = self._world
        listed = {id_ for (id_,) in world.database.tables["dead_letters"]}
        assert not (lost := set(world.unreadable) - listed), f"LOST: {len(lost)} records that nobody can read"
        sent = sum(len(world.broker.logs[DEAD_LETTERS.name, n]) for n in range(PARTITIONS))
        assert sent >= len(world.unreadable), "LOST: a record that nobody can read is not on the dead letters' topic"

    def _announced(self) -> None:
        """The newest announcement of a document tells what it is now."""
        world = self._world
        newest: dict[str, tuple[int, str]] = {}
        for n in range(PARTITIONS):
            for _, value, headers in world.broker.logs[DOCUMENTS_INDEXED.name, n]:
                message = decode(value, headers)
                assert isinstance(message, DocumentIndexed)
                if message.state != "revoked":  # on the way: another one follows
                    newest[message.external_id] = max(
                        newest.get(message.external_id, (0, "")), (message.seq, message.state)
                    )
        for name in NAMES:
            document = world.expected(name)
            chunks = chunks_of(document)
            expected = document is not None and bool(document.acl_tags)
            partial = any(e.text == UNEMBEDDABLE for e in chunks.values())
            state = "partial" if partial else "searchable" if expected else "retired"
            row = world.database.tables["documents"].get((_id(name),))
            if row is not None and row["seq"]:
                announced_state = newest.get(name, (0, "nothing"))[1]
                assert announced_state == state, f"UNTOLD: {name} is {state}, and announced was {announced_state}"

    def _row(self, row: Any) -> Expected:
        tables = self._world.database.tables
        d, b = tables["documents"][row["document_id"],], tables["document_bodies"][row["document_id"],]
        access = next(a for a in tables["access_sets"].values() if a["id"] == row["access_id"])
        return Expected(
            row["document_id"],
            row["text"],
            d["title"],
            d["author"],
            d["media_type"],
            _flat(b["metadata"]),
            tuple(access["acl_tags"]),
            tuple(access["required_tags"]),
        )


def _vector(text: str) -> Any:
    from tests.simulation.world import vector

    return vector(text)


def _run(coroutine: Any) -> Any:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a query waited")


def _of(name: str, events: Iterable[Event | IdentityChanged]) -> list[Event]:
    return [e for e in events if not isinstance(e, IdentityChanged) and e.external_id == name]


def _groups(person: str, events: Iterable[Event | IdentityChanged]) -> set[str]:
    mine = [e for e in events if isinstance(e, IdentityChanged) and e.principal == person]
    if not mine:
        return set()
    newest = max(e.observed_at for e in mine)
    groups = set.intersection(*(set(e.groups) for e in mine if e.observed_at == newest))
    return set(qualify(SOURCE, groups))


def chunks_of(document: DocumentUpserted | None) -> dict[UUID, Expected]:
    """The chunks that a document must have; none where nobody may read it."""
    if document is None or not document.acl_tags:
        return {}
    texts, media_type = _texts(document.content, document.media_type)
    id_, title = _id(document.external_id), document.title
    ids = _chunk_ids(id_, texts, title if len(texts) <= MOST_TITLED_CHUNKS else "")
    acl, required = qualify(SOURCE, document.acl_tags), qualify(SOURCE, document.required_tags)
    metadata = _flat(document.metadata)
    return {
        i: Expected(
            id_,
            text,
            title,
            document.author,
            media_type,
            metadata,
            acl,
            required,
        )
        for i, text in zip(ids, texts, strict=True)
    }


@lru_cache(10_000)
def _texts(content: str, media_type: str) -> tuple[tuple[str, ...], str]:
    text, kind = normalise(content, media_type)
    return tuple(chunk.text for chunk in cut(text)), kind


@lru_cache(10_000)
def _chunk_ids(document: UUID, texts: tuple[str, ...], title: str) -> tuple[UUID, ...]:
    return chunk_ids(document, texts, title)


@lru_cache(100)
def _id(name: str) -> UUID:
    return document_id(TENANT, SOURCE, name)


def _entry(e: dict[str, Any]) -> Expected:
    required = tuple(tag for tag in e["required_tags"] if tag != EVERYONE)
    assert e["required_count"] == len(required) + 1
    return Expected(
        UUID(e["document_id"]),
        e["text"],
        e["title"],
        e["author"],
        e["media_type"],
        _flat(e["metadata"]),
        tuple(e["acl_tags"]),
        required,
    )


def _compare(store: str, held: dict[UUID, Expected], expected: dict[UUID, Expected]) -> None:
    assert not (lost := expected.keys() - held.keys()), f"LOST: {store} lack {len(lost)} of {len(expected)} chunks"
    assert not (extra := held.keys() - expected.keys()), f"UNDEAD: {store} hold {len(extra)} chunks that nobody wants"
    wrong = [i for i in expected if held[i] != expected[i]]
    assert not wrong, f"WRONG: {store} hold {held[wrong[0]]} instead of {expected[wrong[0]]}"


def _flat(metadata: Mapping[str, Any]) -> str:
    return repr(sorted(metadata.items()))
