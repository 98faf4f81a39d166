"""A running vectors worker calibrates the floor of relevance of a new collection, and goes on working."""

from __future__ import annotations

from tests.e2e.test_stream import document
from tests.support.space import Space


async def test_a_vectors_worker_calibrates_a_new_collection_and_goes_on(space: Space) -> None:
    space.start("detect", "keywords", "vectors")
    plans = [document(f"{n}.md", f"Pier {n} of the harbour has {n} cranes and a store.") for n in range(12)]
    await space.publish(*plans)
    await space.settled(plans)
    await space.until("SELECT calibration IS NOT NULL FROM generations WHERE state = 'active'", within_seconds=120)
    [(calibration,)] = await space.query("SELECT calibration FROM generations WHERE state = 'active'")
    assert 5 <= calibration["chunks"] <= 12
    assert -1 <= calibration["cosine"] <= 1
    late = document("late.md", "A pier that was built later.")
    await space.publish(late)
    await space.settled([late])
