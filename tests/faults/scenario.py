"""One scenario: random changes of a dozen documents, faults in between, then everything settles and the oracle
compares."""

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
"""The number of scenarios that share the workers and each other's faults. Each has its own documents."""
CALM_SECONDS = 180.0
"""A killed worker's session (6 s), a breaker's longest pause (30 s), one document's being set aside (60 s), new
partitions seen (30 s), and a log that moved (30 s)."""
SLOWEST = "seconds from the last fault to both stores settled, at most"


@dataclass
class EarlierScenarios:
    """The documents of earlier scenarios in the same space, which the oracle compares too."""

    documents: list[DocumentUpserted] = field(default_factory=list)


@dataclass
class Scenario:
    """The changes of one seed to its own documents, its faults, and queries meanwhile."""

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
        """Make changes until the faults are over. Faults of several scenarios may overlap."""
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
            for _ in range(MOST_MORE):  # so that every fault happens during work
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


async def play(world: World, earlier: EarlierScenarios, scenarios: Sequence[Scenario]) -> None:
    """Play the scenarios together, let everything settle, and run the oracle. Raises AssertionError for a violation."""
    watches = [Watch(world.space, world.search, Random(scenario.seed)) for scenario in scenarios]
    rescued, partitions_lost = world.rescued_hints(), world.partitions_lost()
    try:
        async with asyncio.TaskGroup() as playing:
            for scenario, watch in zip(scenarios, watches, strict=True):
                playing.create_task(scenario.play(world, watch))
        world.clear_faults()
        await world.restart_workers()
        await finish_recovery(world)
        await world.finish_rebuild()
        calm = time.monotonic()
        await world.wait_until_settled(CALM_SECONDS)
        tally.DONE[SLOWEST] = max(tally.DONE[SLOWEST], round(time.monotonic() - calm))
    finally:
        world.clear_faults()
    events = [events for scenario in scenarios for events in scenario.story.events.values() if events]
    tally.DONE["changes"] += sum(map(len, events))
    tally.DONE["scenarios (processes)"] += len(scenarios)
    leaks = [leak for watch in watches for leak in watch.leaks]
    assert not leaks, f"leaks: {leaks[:3]}"
    again = world.rescued_hints() - rescued
    tally.DONE["hints rescued by the sweeper"] += again
    disturbed = any(scenario.disturbs_the_workers for scenario in scenarios)
    assert again == 0 or disturbed or world.partitions_lost() > partitions_lost, (
        f"{again} hints were lost though nothing broke"
    )
    earlier.documents += [document for events_of_one in events if (document := outcome(events_of_one)) is not None]
    await _compare(world, earlier)
    embedded = world.model.stats.inputs
    world.published += [("live", event) for events_of_one in events for event in events_of_one]
    await world.publish_again()
    await world.wait_until_settled(CALM_SECONDS)
    needless = world.model.stats.inputs - embedded
    tally.VIOLATIONS["needlessly embedded"] += needless
    assert not needless, f"{needless} texts were embedded again though nothing has changed"


def rounds(scenarios: Sequence[AnyScenario]) -> list[list[AnyScenario]]:
    """Group the scenarios into rounds: one with all that do not disturb the workers, in which no hint may be lost, and
    the others AT_ONCE at a time."""
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
    """Return how to play these scenarios again together, as a note to a failure."""
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


async def _compare(world: World, earlier: EarlierScenarios) -> None:
    try:
        await assert_equal(
            world.space, earlier.documents, vector=world.model.vector, refused=lambda text: UNEMBEDDABLE in text
        )
    except AssertionError as error:
        kind = "lost" if "lack" in str(error) else "orphaned" if "nobody wants" in str(error) else "undead"
        tally.VIOLATIONS[kind] += 1
        raise
    letters = await world.space.query("SELECT stage, code, message FROM dead_letters")
    assert not letters, f"unexpected dead letters: {letters[:3]}"
