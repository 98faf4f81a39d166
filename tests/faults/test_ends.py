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
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random

import pytest

from deploy.local.stack import Stack
from pipeline.embedding.choose import embedder
from pipeline.settings import EmbeddingSettings, dist
from query.embedder import QueryEmbedder
from tests.faults import tally
from tests.faults.breakage import (
    Fault,
    choose,
    cut,
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
from tests.faults.settled import shown_is_what_the_sources_say, text_with_marker
from tests.faults.world import WORKERS, World

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
A_SPACE = 5
"""Scenarios that share a space: a person's search returns at most 100 documents of them."""
FIXED: tuple[Sequence[Fault], ...] = (
    [kill_connectors, kill_postgres],
    [cut, kill, kill_connectors],
    [stop_and_continue, swallow, kill_connectors],
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(-(-tally.SCENARIOS // A_SPACE) or 1))
async def test_random_scenarios_from_the_sources_to_the_people(
    stack: Stack, tmp_path: Path, block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tally.SEED + block * A_SPACE
    count = min(A_SPACE, (tally.SCENARIOS or 1) - block * A_SPACE)
    scenarios = [(first + n, [kill_connectors, *choose(Random(first + n))]) for n in range(count)]
    await _play(stack, tmp_path, scenarios, capsys)


@pytest.mark.timeout(900)
async def test_people_are_shown_what_the_sources_say_whatever_was_killed_or_cut(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await _play(stack, tmp_path, list(enumerate(FIXED, 1)), capsys)


async def _play(
    stack: Stack,
    folder: Path,
    scenarios: Sequence[tuple[int, Sequence[Fault]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with offices(folder) as sources:
        world_of_all = World.create(
            stack, folder, workers=(*WORKERS, "connectors"), more_environment=sources.environment
        )
        async with world_of_all as world, readers(world.space, _model(world)) as people:
            for seed, faults in scenarios:
                began = time.monotonic()
                names = ", ".join(fault.__name__ for fault in faults)  # type: ignore[attr-defined]
                try:
                    await _scenario(world, sources, people, seed, faults)
                except BaseException as error:
                    error.add_note(
                        f"scenario {seed} ({names}). Replay: FAULTS_SEED={seed} FAULTS_SCENARIOS=1"
                        " .venv/bin/pytest tests/faults/test_ends.py -k random"
                    )
                    raise
                with capsys.disabled():
                    print(f"\nends, seed {seed}: {names}: {time.monotonic() - began:.1f} s", end="", flush=True)


async def _scenario(world: World, sources: Offices, people: Readers, seed: int, faults: Sequence[Fault]) -> None:
    rng = Random(seed)
    word = f"scenario{seed}word"
    history = History()
    persons = sorted(sources.expected())
    reading = Reading(world.space, people, history, word, persons)
    asking = asyncio.create_task(reading.run(Random(seed)))
    ingest = Ingest(world, sources.shelf)
    ingesting = asyncio.create_task(ingest.run(Random(seed)))
    breaking = [asyncio.create_task(_later(world, fault, Random(rng.random()), rng.random() * 4)) for fault in faults]
    operating = Operating(sources, history, word, seed)
    world.while_nobody_looks = operating.take_back
    try:
        await operating.begin()
        enough = rng.randint(*OPERATIONS)
        for done in range(MAX_OPERATIONS):
            if done >= enough and all(task.done() for task in breaking):
                break
            await operating.one()
            await asyncio.sleep(rng.random() * 0.6)
        await asyncio.gather(*breaking)
        world.mend()
        await world.revive()
        await world.finish_rebuild()
        ingest.stopped = True
        await ingesting
        world.while_nobody_looks = None
        await ingest.once()
        await shown_is_what_the_sources_say(world, people, sources, word)
    finally:
        reading.stopped = ingest.stopped = True
        await asyncio.wait([asking, ingesting], timeout=STOP_SECONDS)  # a cancelled connect leaves its connection open
        for task in (asking, ingesting, *breaking):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        world.mend()
    tally.DONE["scenarios (ends)"] += 1
    violations = history.violations()
    tally.FOUND["leaks"] += len(violations)
    assert not violations, violations[:5]
    letters = await world.space.query("SELECT stage, code, message FROM dead_letters")
    assert not letters, f"dead letters that nobody meant: {letters[:3]}"


class Operating:
    """Operates the sources of one scenario, and records in the history what each operation opens and closes."""

    def __init__(self, sources: Offices, history: History, word: str, seed: int) -> None:
        self._sources, self._history, self._word = sources, history, word
        self._rng = Random(seed)
        self._names = [f"s{seed}-{n}" for n in range(NAMES_AN_OFFICE)]
        self._texts = count(1)
        self._lately: list[tuple[float, Office, str, str]] = []
        """(when, office, operation, document's name) of what may be taken back."""
        self._turn = asyncio.Lock()

    async def begin(self) -> None:
        for name in self._names[:2]:
            for office in self._sources.offices.values():
                await office.do("write", name, self._text())

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
        return text_with_marker(self._word, next(self._texts))


async def _later(world: World, fault: Fault, rng: Random, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await fault(world, rng)


def _model(world: World) -> QueryEmbedder:
    chosen = EmbeddingSettings(**world.space.settings.embedding.model_dump())
    return QueryEmbedder(lambda: embedder(chosen, dist() / "models"))
