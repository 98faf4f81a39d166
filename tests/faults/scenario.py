"""One scenario: random changes of a dozen documents, faults in between, calm, then the oracle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, TypeVar

from tests.faults import tally
from tests.faults.breakage import Fault, finish_recovery
from tests.faults.model import outcome
from tests.faults.story import KINDS, UNEMBEDDABLE, Story
from tests.faults.watch import Watch
from tests.faults.world import World
from tests.support.pipeline.oracle import assert_equal
from topics.messages import DocumentUpserted

DOCUMENTS = 12
MOST_MORE = 40
AT_ONCE = 5
"""Scenarios that share the workers and each other's faults; each has documents of its own."""
CALM_SECONDS = 180.0
"""A killed worker's session (6 s), a breaker's longest pause (30 s), one document's being set aside (60 s), new
partitions seen (30 s), and a log that moved (30 s)."""
SLOWEST = "seconds from the last fault to both stores settled, at most"


@dataclass
class Past:
    """What the scenarios before have left in the space: the oracle looks at all of it."""

    documents: list[DocumentUpserted] = field(default_factory=list)


@dataclass
class Scenario:
    """One seed's changes of its own documents, its faults, and somebody who asks meanwhile."""

    seed: int
    faults: Sequence[Fault]

    def __post_init__(self) -> None:
        self.story = Story(
            "acme", [f"s{self.seed}-{n}" for n in range(DOCUMENTS)], datetime.now(UTC) - timedelta(hours=1)
        )

    @property
    def disturbs_the_workers(self) -> bool:
        return bool(self.faults)

    def __str__(self) -> str:
        return ", ".join(fault.__name__ for fault in self.faults) or "no fault"  # type: ignore[attr-defined]

    async def play(self, world: World, watch: Watch) -> None:
        """Until its faults are over. Faults of several scenarios may overlap."""
        rng, story = Random(self.seed), self.story
        watching = asyncio.create_task(watch.run())
        breaking = [
            asyncio.create_task(later(world, fault, Random(rng.random()), rng.random() * 2)) for fault in self.faults
        ]
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
        finally:
            watch.enough = True
            await watching
            await ended(breaking)


AnyScenario = TypeVar("AnyScenario", bound=Scenario)


async def play(world: World, past: Past, scenarios: Sequence[Scenario]) -> None:
    """All of them at once, then calm, then the oracle. Raises AssertionError when a law is broken."""
    watches = [Watch(world.space, world.search, Random(scenario.seed)) for scenario in scenarios]
    rescued, partitions_lost = world.rescued(), world.partitions_lost()
    try:
        async with asyncio.TaskGroup() as playing:
            for scenario, watch in zip(scenarios, watches, strict=True):
                playing.create_task(scenario.play(world, watch))
        world.mend()
        await world.revive()
        await finish_recovery(world)
        await world.finish_rebuild()
        calm = time.monotonic()
        await world.settled(CALM_SECONDS)
        tally.DONE[SLOWEST] = max(tally.DONE[SLOWEST], round(time.monotonic() - calm))
    finally:
        world.mend()
    events = [events for scenario in scenarios for events in scenario.story.events.values() if events]
    tally.DONE["changes"] += sum(map(len, events))
    tally.DONE["scenarios (processes)"] += len(scenarios)
    leaks = [leak for watch in watches for leak in watch.leaks]
    assert not leaks, f"leaks: {leaks[:3]}"
    again = world.rescued() - rescued
    tally.DONE["hints rescued by the sweeper"] += again
    disturbed = any(scenario.disturbs_the_workers for scenario in scenarios)
    assert again == 0 or disturbed or world.partitions_lost() > partitions_lost, (
        f"{again} hints were lost though nothing broke"
    )
    past.documents += [document for of_one in events if (document := outcome(of_one)) is not None]
    await _compare(world, past)
    embedded = world.model.stats.inputs
    world.published += [("live", event) for of_one in events for event in of_one]
    await world.publish_again()
    await world.settled(CALM_SECONDS)
    needless = world.model.stats.inputs - embedded
    tally.FOUND["needlessly embedded"] += needless
    assert not needless, f"{needless} texts were embedded again though nothing has changed"


def rounds(scenarios: Sequence[AnyScenario]) -> list[list[AnyScenario]]:
    """Those whose faults leave the workers alone together, the others AT_ONCE at a time: in a round of which no worker
    is disturbed, no hint may be lost."""
    calm = [scenario for scenario in scenarios if not scenario.disturbs_the_workers]
    rest = [scenario for scenario in scenarios if scenario.disturbs_the_workers]
    together = [rest[n : n + AT_ONCE] for n in range(0, len(rest), AT_ONCE)]
    return [calm, *together] if calm else together


def report(capsys: Any, layer: str, scenarios: Sequence[Scenario], seconds: float) -> None:
    tally.SECONDS[layer] += seconds
    with capsys.disabled():
        for scenario in scenarios:
            print(f"\n{layer}, seed {scenario.seed}: {scenario}", end="")
        print(f"\n{layer}: {len(scenarios)} at once in {seconds:.1f} s", end=" ", flush=True)


def replay(scenarios: Sequence[Scenario], file: str) -> str:
    """How to play these again, as a note to a failure. Those that shared the world with one another come together."""
    seeds = [scenario.seed for scenario in scenarios]
    names = "; ".join(f"{scenario.seed}: {scenario}" for scenario in scenarios)
    return (
        f"scenarios {names}. Replay: FAULTS_SEED={min(seeds)} FAULTS_SCENARIOS={max(seeds) - min(seeds) + 1}"
        f" .venv/bin/pytest tests/faults/{file} -k random"
    )


async def ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what still runs, and wait for it."""
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def later(world: World, fault: Fault, rng: Random, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await fault(world, rng)


async def _compare(world: World, past: Past) -> None:
    try:
        await assert_equal(
            world.space, past.documents, vector=world.model.vector, refused=lambda text: UNEMBEDDABLE in text
        )
    except AssertionError as error:
        kind = "lost" if "lack" in str(error) else "orphaned" if "nobody wants" in str(error) else "undead"
        tally.FOUND[kind] += 1
        raise
    letters = await world.space.query("SELECT stage, code, message FROM dead_letters")
    assert not letters, f"dead letters that nobody meant: {letters[:3]}"
