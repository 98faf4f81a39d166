"""Tests of the states of documents, for callers that wait for both stores."""

from __future__ import annotations

from uuid import UUID, uuid4

from pipeline.ledger.arrivals import arrivals
from pipeline.stores.postgres import open_pool
from tests.support.space import Space

STATES = {"settled": (7, 7, 0), "on its way": (7, 3, 0), "failed": (7, 3, 1), "of no store": None}
"""By document: want_seq, seq and attempts of one store; the other one has done its work."""


async def test_a_document_is_settled_when_both_stores_have_done_its_work(space: Space) -> None:
    ids: dict[UUID, str] = {uuid4(): name for name in STATES}
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        for id_, name in ids.items():
            await connection.execute(
                "INSERT INTO documents (id, tenant, source, external_id) VALUES (%s, 'acme', 'wiki', %s)", [id_, name]
            )
            if (state := STATES[name]) is not None:
                await connection.cursor().executemany(
                    "INSERT INTO index_state (document_id, generation, store, want_seq, seq, attempts)"
                    " VALUES (%s, 'g1', %s, %s, %s, %s)",
                    [(id_, "vectors", 7, 7, 0), (id_, "keywords", *state)],
                )
        states = await arrivals(connection, ids)
        assert await arrivals(connection, []) == {}
    assert {ids[id_]: (arrival.settled, arrival.set_aside) for id_, arrival in states.items()} == {
        "settled": (True, False),
        "on its way": (False, False),
        "failed": (False, True),
        "of no store": (True, False),
    }
