"""From what the sources say to what each person is shown, with faults in everything in between.

Folder, git, Confluence and Slack are read by the real connectors' worker, a fifth source is published by ``penstock
ingest``; people ask over HTTP and MCP. Sources change back and forth while faults happen. Afterwards every person is
shown exactly what the sources say, and the history of what everybody was shown meanwhile has no revoked document in it.

Replay: FAULTS_SEED=<the scenario's> FAULTS_SCENARIOS=1 .venv/bin/pytest tests/faults/test_ends.py -k random
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

import pytest

from deploy.local.stack import Stack
from pipeline.embedding.choose import embedder
from pipeline.runtime.settings import EmbeddingSettings, dist
from query.embedding.embedders import QueryEmbedder
from tests.faults import tally
from tests.faults.breakage import (
    Fault,
    choose,
    cut,
    finish_recovery,
    kill,
    kill_connectors,
    kill_postgres,
    stop_and_continue,
    swallow,
)
from tests.faults.history import History
from tests.faults.ingest import Ingest
from tests.faults.offices import Office, Offices, offices
from tests.faults.readers import Readers, Reading, readers
from tests.faults.scenario import Scenario, ended, later, replay, report, rounds
from tests.faults.settled import shown_is_what_the_sources_say, text_with_marker
from tests.faults.world import WORKERS, World

# aiokafka forgets a connection that a dying broker cuts while it is being opened: of these tests' own admin clients.
pytestmark = [pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"), pytest.mark.slow]

NAMES_AN_OFFICE = 4
OPERATIONS = (12, 24)
MAX_OPERATIONS = 60
TAKEN_BACK_SECONDS = 4.0
GRANTING, REVOKING = ("write", "revert", "restore", "allow", "join"), ("remove", "restrict", "leave")
INVERSE = {
    "write": "revert",
    "revert": "revert",
    "remove": "restore",
    "restore": "remove",
    "restrict": "allow",
    "allow": "restrict",
    "leave": "join",
    "join": "leave",
}
STOP_SECONDS = 60.0
A_SPACE = 20
"""Scenarios that share a space."""
"""AT_ONCE scenarios have at most 100 documents, which a person's search returns. They are removed afterwards."""
FIXED: tuple[Sequence[Fault], ...] = (
    [kill_connectors, kill_postgres],
    [cut, kill, kill_connectors],
    [stop_and_continue, swallow, kill_connectors],
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(-(-tally.SCENARIOS // A_SPACE) or 1))
async def test_random_fault_scenarios_end_with_every_person_shown_what_the_sources_say(
    stack: Stack, tmp_path: Path, block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tally.SEED + block * A_SPACE
    seeds = range(first, first + min(A_SPACE, (tally.SCENARIOS or 1) - block * A_SPACE))
    chosen = [(seed, choose(Random(seed), kafka_loses=False)) for seed in seeds]
    await _play(stack, tmp_path, rounds([Ends(seed, [kill_connectors, *faults]) for seed, faults in chosen]), capsys)


@pytest.mark.timeout(900)
async def test_people_are_shown_what_the_sources_say_after_fixed_fault_scenarios(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await _play(stack, tmp_path, [[Ends(n, faults) for n, faults in enumerate(FIXED, 1)]], capsys)


@pytest.mark.timeout(900)
async def test_people_are_shown_what_the_sources_say_after_connector_deaths_without_a_sweep(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await _play(stack, tmp_path, [[Ends(1, [kill_connectors])]], capsys, sweep_after_seconds=3600)


@dataclass
class Ends(Scenario):
    """One seed's history of all sources: its own documents in each of them, its faults, and people who ask."""

    def __post_init__(self) -> None:
        self.word = f"scenario{self.seed}word"

    @property
    def disturbs_the_workers(self) -> bool:
        return any(fault is not kill_connectors for fault in self.faults)


async def _play(
    stack: Stack,
    folder: Path,
    rounds: Sequence[Sequence[Ends]],
    capsys: pytest.CaptureFixture[str],
    *,
    sweep_after_seconds: float = 10,
) -> None:
    async with offices(folder) as sources:
        world_of_all = World.create(
            stack,
            folder,
            workers=(*WORKERS, "connectors"),
            more_environment=sources.environment,
            sweep_after_seconds=sweep_after_seconds,
        )
        async with world_of_all as world, readers(world.space, _model(world)) as people:
            for scenarios in rounds:
                began = time.monotonic()
                try:
                    await _round(world, sources, people, scenarios)
                except BaseException as error:
                    error.add_note(replay(scenarios, "test_ends.py"))
                    raise
                finally:
                    report(capsys, "ends", scenarios, time.monotonic() - began)


async def _round(world: World, sources: Offices, people: Readers, scenarios: Sequence[Ends]) -> None:
    """All of these at once, then calm, then what everybody is shown and was shown meanwhile."""
    history, turn = History(), asyncio.Lock()
    rescued, partitions_lost = world.rescued(), world.partitions_lost()
    persons = sorted(sources.expected())
    readings = [Reading(world, people, history, scenario.word, persons) for scenario in scenarios]
    asking = [
        asyncio.create_task(reading.run(Random(scenario.seed)))
        for reading, scenario in zip(readings, scenarios, strict=True)
    ]
    ingest = Ingest(world, sources.shelf)
    ingesting = asyncio.create_task(ingest.run(Random(scenarios[0].seed)))
    operating = [Operating(sources, history, turn, scenario) for scenario in scenarios]

    async def take_back() -> None:
        for one in operating:
            await one.take_back()

    world.while_nobody_looks = take_back
    try:
        async with asyncio.TaskGroup() as playing:
            for one in operating:
                playing.create_task(one.play(world))
        world.mend()
        await world.revive()
        await finish_recovery(world)
        await world.finish_rebuild()
        ingest.stopped = True
        await ingesting
        world.while_nobody_looks = None
        await ingest.once()
        await shown_is_what_the_sources_say(world, people, sources, [scenario.word for scenario in scenarios])
    finally:
        ingest.stopped = True
        for reading in readings:
            reading.stopped = True
        await asyncio.wait([*asking, ingesting], timeout=STOP_SECONDS)  # a cancelled connect leaves its connection open
        await ended([*asking, ingesting])
        world.mend()
    tally.DONE["scenarios (ends)"] += len(scenarios)
    violations = history.violations()
    tally.FOUND["leaked"] += len(violations)
    assert not violations, violations[:5]
    letters = await world.space.query("SELECT stage, code, message FROM dead_letters")
    assert not letters, f"dead letters that nobody meant: {letters[:3]}"
    again = world.rescued() - rescued
    tally.DONE["hints rescued by the sweeper"] += again
    disturbed = any(scenario.disturbs_the_workers for scenario in scenarios)
    assert again == 0 or disturbed or world.partitions_lost() > partitions_lost, (
        f"{again} hints were lost though no worker was disturbed"
    )
    await sources.clear()


class Operating:
    """Operates the sources of one scenario, and records in the history what each operation opens and closes."""

    def __init__(self, sources: Offices, history: History, turn: asyncio.Lock, scenario: Ends) -> None:
        self._sources, self._history, self._turn, self._scenario = sources, history, turn, scenario
        self._rng = Random(scenario.seed)
        self._names = [f"s{scenario.seed}-{n}" for n in range(NAMES_AN_OFFICE)]
        self._texts = count(1)
        self._lately: list[tuple[float, Office, str, str]] = []
        """(when, office, operation, document's name) of what may be taken back."""

    async def play(self, world: World) -> None:
        """Until the scenario's faults are over."""
        rng = Random(self._scenario.seed)
        breaking = [
            asyncio.create_task(later(world, fault, Random(rng.random()), rng.random() * 4))
            for fault in self._scenario.faults
        ]
        try:
            for name in self._names[:2]:
                for office in self._sources.offices.values():
                    async with self._turn:
                        await office.do("write", name, self._text())
            enough = rng.randint(*OPERATIONS)
            for done in range(MAX_OPERATIONS):
                if done >= enough and all(task.done() for task in breaking):
                    break
                await self.one()
                await asyncio.sleep(rng.random() * 0.6)
            await asyncio.gather(*breaking)
        finally:
            await ended(breaking)

    async def one(self) -> None:
        async with self._turn:
            office, operation, name = self._sources.draw(self._rng, self._names)
            await self._do(office, operation, name)
            self._lately.append((time.monotonic(), office, operation, name))

    async def take_back(self) -> None:
        """The sources go back to how they were some seconds ago: what a crash has forgotten, no comparison finds."""
        async with self._turn:
            since = time.monotonic() - TAKEN_BACK_SECONDS
            lately, self._lately = [entry for entry in self._lately if entry[0] >= since], []
            for _, office, operation, name in reversed(lately):
                inverse = INVERSE[operation]
                if (inverse, name) in office.operations(self._names):
                    await self._do(office, inverse, name)
                    tally.DONE["source operations taken back while nobody looked"] += 1

    async def _do(self, office: Office, operation: str, name: str) -> None:
        registers = {(office.key(page), office.person) for page in office.affected(name)}
        invoked = time.monotonic()
        if operation in GRANTING:
            self._history.grant(registers, invoked)
        await office.do(operation, name, self._text())
        tally.DONE[f"source operations: {operation}"] += 1
        if operation in REVOKING:
            self._history.revoke(registers, operation, invoked, time.monotonic())

    def _text(self) -> str:
        return text_with_marker(self._scenario.word, next(self._texts))


def _model(world: World) -> QueryEmbedder:
    chosen = EmbeddingSettings(**world.space.settings.embedding.model_dump())
    return QueryEmbedder(lambda: embedder(chosen, dist() / "models"))
