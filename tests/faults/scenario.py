"""One scenario: random changes of a dozen documents, faults in between, calm, then the oracle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random

from tests.faults import tally
from tests.faults.breakage import Fault
from tests.faults.model import outcome
from tests.faults.story import KINDS, UNEMBEDDABLE, Story
from tests.faults.watch import Watch
from tests.faults.world import World
from tests.oracle import assert_equal
from topics.messages import DocumentUpserted

DOCUMENTS = 12
MOST_MORE = 40
CALM_SECONDS = 120.0
"""A killed worker's session (6 s), a breaker's longest pause (30 s), and one document's being set aside (60 s)."""
SLOWEST = "seconds from the last fault to both stores settled, at most"


@dataclass
class Past:
    """What the scenarios before have left in the space: the oracle looks at all of it."""

    documents: list[DocumentUpserted] = field(default_factory=list)


async def play(world: World, past: Past, seed: int, faults: Sequence[Fault]) -> None:
    """Raises AssertionError when a law is broken."""
    rng = Random(seed)
    story = Story("acme", [f"s{seed}-{n}" for n in range(DOCUMENTS)], datetime.now(UTC) - timedelta(hours=1))
    watch = Watch(world.space, world.search, Random(seed))
    watching = asyncio.create_task(watch.run())
    rescued = world.rescued()
    breaking = [asyncio.create_task(_later(world, fault, Random(rng.random()), rng.random() * 2)) for fault in faults]
    try:
        for name in story.names[: DOCUMENTS // 2]:
            await world.publish(story.change("rewrite", name, rng))
        for _ in range(rng.randint(10, 25)):
            await world.publish(story.change(rng.choice(sorted(KINDS)), rng.choice(story.names), rng))
            await asyncio.sleep(rng.random() * 0.25)
        for _ in range(MOST_MORE):  # whatever breaks finds somebody at work
            if all(task.done() for task in breaking):
                break
            await world.publish(story.change(rng.choice(sorted(KINDS)), rng.choice(story.names), rng))
            await asyncio.sleep(0.2)
        await asyncio.gather(*breaking)
        world.mend()
        await world.revive()
        await world.finish_rebuild()
        calm = time.monotonic()
        await world.settled(CALM_SECONDS)
        tally.DONE[SLOWEST] = max(tally.DONE[SLOWEST], round(time.monotonic() - calm))
    finally:
        watch.enough = True
        await watching
        for task in breaking:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        world.mend()
    tally.DONE["changes"] += sum(map(len, story.events.values()))
    tally.DONE["scenarios (processes)"] += 1
    assert not watch.leaks, f"leaks: {watch.leaks[:3]}"
    again = world.rescued() - rescued
    tally.DONE["hints rescued by the sweeper"] += again
    past.documents += [d for events in story.events.values() if events and (d := outcome(events)) is not None]
    await _compare(world, past)


async def _later(world: World, fault: Fault, rng: Random, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await fault(world, rng)


async def _compare(world: World, past: Past) -> None:
    try:
        await assert_equal(
            world.space, past.documents, vector=world.model.vector, refused=lambda text: UNEMBEDDABLE in text
        )
    except AssertionError as error:
        kind = "lost" if "lack" in str(error) else "orphans" if "nobody wants" in str(error) else "resurrected"
        tally.FOUND[kind] += 1
        raise
    letters = await world.space.query("SELECT stage, code, message FROM dead_letters")
    assert not letters, f"dead letters that nobody meant: {letters[:3]}"
