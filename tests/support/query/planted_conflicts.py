"""Conflicts between documents of a random world, whoever may read them, and which of them a plain filter shows."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from uuid import UUID, uuid4

from pipeline.core.identity import document_id
from tests.support.query.leaks import DocumentKey, Living
from tests.support.query.library import Library


@dataclass(frozen=True)
class Planted:
    """A conflict that the analysis could have stored before accesses changed, with the texts of that time."""

    id: UUID
    sides: tuple[Living, Living]

    def stands_for(self, readable: Mapping[DocumentKey, Living]) -> bool:
        return all(side.key in readable and readable[side.key].content == side.content for side in self.sides)


async def plant(library: Library, living: Collection[Living], dice: random.Random) -> list[Planted]:
    """Store a conflict for each pair of documents of one tenant, and for some of two, whose row is the first one's."""
    pairs = list(combinations(sorted(living, key=lambda document: document.key), 2))
    within = [pair for pair in pairs if pair[0].key[0] == pair[1].key[0]]
    across = [pair for pair in pairs if pair[0].key[0] != pair[1].key[0]]
    planted = []
    for sides in [*within, *dice.sample(across, min(len(across), 10))]:
        conflict = Planted(uuid4(), sides)
        stored = await library.execute(
            "INSERT INTO conflicts (id, tenant, generation, kind, document_a, document_b, chunk_a, chunk_b, places)"
            " SELECT %s, a.tenant, g.name, 'number', a.document_id, b.document_id, a.chunk, b.chunk,"
            " '[[\"number\", [0, 4], [0, 4]]]' FROM generations g"
            " JOIN LATERAL (SELECT d.tenant, m.document_id, m.chunk_ids[1] AS chunk FROM manifests m"
            "  JOIN documents d ON d.id = m.document_id WHERE m.generation = g.name AND d.id = %s) a ON true"
            " JOIN LATERAL (SELECT m.document_id, m.chunk_ids[1] AS chunk FROM manifests m"
            "  WHERE m.generation = g.name AND m.document_id = %s) b ON true"
            " WHERE g.state = 'active' AND a.chunk IS NOT NULL AND b.chunk IS NOT NULL RETURNING id",
            conflict.id,
            *(document_id(*side.key) for side in conflict.sides),
        )
        planted += [conflict] if stored else []
    return planted


def check_conflicts(
    shown: Sequence[Mapping[str, Any]],
    planted: Sequence[Planted],
    readable: Mapping[DocumentKey, Living],
    *,
    exactly: bool,
) -> None:
    """Check the conflicts of a response: none but those whose passages the caller may both read, and if ``exactly``
    all of them."""
    expected = {str(conflict.id): conflict for conflict in planted if conflict.stands_for(readable)}
    ids = {entry["id"] for entry in shown}
    assert ids == set(expected) if exactly else ids <= set(expected)
    for entry in shown:
        sides = expected[entry["id"]].sides
        assert entry["documents"] == [str(document_id(*side.key)) for side in sides]
        assert list(zip(entry["sources"], entry["external_ids"], strict=True)) == [side.key[1:] for side in sides]
        for quote, side in zip(entry["quotes"] or (), sides, strict=bool(entry["quotes"])):
            assert quote.removesuffix("…") in side.content
