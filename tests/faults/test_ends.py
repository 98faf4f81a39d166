"""Each person is shown what the sources contain, with faults in everything in between.

Folder, git, Confluence and Slack are read by the real connectors' worker, a fifth source is published by ``penstock
ingest``; people search over HTTP and MCP. Sources change and revert while faults happen. Afterwards every person is
shown exactly the documents that the sources contain, and no revoked document was shown meanwhile.

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
from tests.faults.history import History, Write
from tests.faults.ingest import Ingest
from tests.faults.marker import marker_of, text_with_marker
from tests.faults.query_client import QueryClient, QueryLoop, query_client
from tests.faults.scenario import Scenario, ended, later, replay, report, rounds
from tests.faults.shown import wait_until_shown_as_expected
from tests.faults.simulated_sources import SimulatedSource, SimulatedSources, simulated_sources
from tests.faults.world import WORKERS, World

# aiokafka forgets a connection that a dying broker cuts while it is being opened: of these tests' own admin clients.
pytestmark = [pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"), pytest.mark.slow]

DOCUMENTS_PER_SOURCE = 4
OPERATIONS = (12, 24)
MAX_OPERATIONS = 60
REVERTED_SECONDS = 4.0
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
SCENARIOS_PER_SPACE = 20
"""Scenarios that share a space. A round of AT_ONCE has at most 100 documents, which a person's search returns; they are
removed afterwards."""
FIXED: tuple[Sequence[Fault], ...] = (
    [kill_connectors, kill_postgres],
    [cut, kill, kill_connectors],
    [stop_and_continue, swallow, kill_connectors],
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(-(-tally.SCENARIOS // SCENARIOS_PER_SPACE) or 1))
async def test_random_fault_scenarios_end_with_every_person_shown_what_the_sources_say(
    stack: Stack, tmp_path: Path, block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tally.SEED + block * SCENARIOS_PER_SPACE
    seeds = range(first, first + min(SCENARIOS_PER_SPACE, (tally.SCENARIOS or 1) - block * SCENARIOS_PER_SPACE))
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
    """The history of one seed: its own documents in every source, its faults, and people who search."""

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
    async with simulated_sources(folder) as sources:
        world_of_all = World.create(
            stack,
            folder,
            workers=(*WORKERS, "connectors"),
            more_environment=sources.environment,
            sweep_after_seconds=sweep_after_seconds,
        )
        async with world_of_all as world, query_client(world.space, _model(world)) as client:
            for scenarios in rounds:
                began = time.monotonic()
                try:
                    await _round(world, sources, client, scenarios)
                except BaseException as error:
                    error.add_note(replay(scenarios, "test_ends.py"))
                    raise
                finally:
                    report(capsys, "ends", scenarios, time.monotonic() - began)


async def _round(world: World, sources: SimulatedSources, client: QueryClient, scenarios: Sequence[Ends]) -> None:
    """Play these scenarios together, end all faults, and check what everybody is shown then and was shown meanwhile."""
    history, turn = History(), asyncio.Lock()
    rescued, partitions_lost = world.rescued_hints(), world.partitions_lost()
    persons = sorted(sources.expected())
    query_loops = [QueryLoop(world, client, history, scenario.word, persons) for scenario in scenarios]
    querying = [
        asyncio.create_task(query_loop.run(Random(scenario.seed)))
        for query_loop, scenario in zip(query_loops, scenarios, strict=True)
    ]
    ingest = Ingest(world, sources.ingest_folder)
    ingesting = asyncio.create_task(ingest.run(Random(scenarios[0].seed)))
    operators = [SourceOperator(sources, history, turn, scenario) for scenario in scenarios]

    async def revert_recent_operations() -> None:
        for operator in operators:
            await operator.revert_recent_operations()

    world.during_outage = revert_recent_operations
    try:
        async with asyncio.TaskGroup() as playing:
            for operator in operators:
                playing.create_task(operator.play(world))
        world.clear_faults()
        await world.restart_workers()
        await finish_recovery(world)
        await world.finish_rebuild()
        ingest.stopped = True
        await ingesting
        world.during_outage = None
        await ingest.once()
        await wait_until_shown_as_expected(world, client, sources, [scenario.word for scenario in scenarios])
    finally:
        ingest.stopped = True
        for query_loop in query_loops:
            query_loop.stopped = True
        await asyncio.wait([*querying, ingesting], timeout=STOP_SECONDS)  # cancelling leaks connections
        await ended([*querying, ingesting])
        world.clear_faults()
    tally.DONE["scenarios (ends)"] += len(scenarios)
    violations = history.violations()
    tally.VIOLATIONS["leaked"] += len(violations)
    assert not violations, violations[:5]
    overclaims = history.overclaims()
    assert not overclaims, overclaims[:5]
    letters = await world.space.query("SELECT stage, code, message FROM dead_letters")
    assert not letters, f"unexpected dead letters: {letters[:3]}"
    again = world.rescued_hints() - rescued
    tally.DONE["hints rescued by the sweeper"] += again
    disturbed = any(scenario.disturbs_the_workers for scenario in scenarios)
    assert again == 0 or disturbed or world.partitions_lost() > partitions_lost, (
        f"{again} hints were lost though no worker was disturbed"
    )
    await sources.clear()


class SourceOperator:
    """Operates the sources of one scenario, and records in the history which access each operation grants and
    revokes."""

    def __init__(self, sources: SimulatedSources, history: History, turn: asyncio.Lock, scenario: Ends) -> None:
        self._sources, self._history, self._turn, self._scenario = sources, history, turn, scenario
        self._rng = Random(scenario.seed)
        self._names = [f"s{scenario.seed}-{n}" for n in range(DOCUMENTS_PER_SOURCE)]
        self._texts = count(1)
        self._recent: list[tuple[float, SimulatedSource, str, str]] = []
        """Recent operations that may be reverted: (time, source, operation, name of the document)."""

    async def play(self, world: World) -> None:
        """Operate until the scenario's faults are over."""
        rng = Random(self._scenario.seed)
        breaking = [
            asyncio.create_task(later(world, fault, Random(rng.random()), rng.random() * 4))
            for fault in self._scenario.faults
        ]
        try:
            for name in self._names[:2]:
                for source in self._sources.sources.values():
                    async with self._turn:
                        await self._write(source, "write", name)
            enough = rng.randint(*OPERATIONS)
            for done in range(MAX_OPERATIONS):
                if done >= enough and all(task.done() for task in breaking):
                    break
                await self.operate_once()
                await asyncio.sleep(rng.random() * 0.6)
            await asyncio.gather(*breaking)
        finally:
            await ended(breaking)

    async def operate_once(self) -> None:
        async with self._turn:
            source, operation, name = self._sources.draw(self._rng, self._names)
            await self._do(source, operation, name)
            self._recent.append((time.monotonic(), source, operation, name))

    async def revert_recent_operations(self) -> None:
        """Revert the operations of the last seconds, so that no comparison finds what a crash has lost."""
        async with self._turn:
            since = time.monotonic() - REVERTED_SECONDS
            recent, self._recent = [entry for entry in self._recent if entry[0] >= since], []
            for _, source, operation, name in reversed(recent):
                inverse = INVERSE[operation]
                if (inverse, name) in source.operations(self._names):
                    await self._do(source, inverse, name)
                    tally.DONE["source operations taken back while nobody looked"] += 1

    async def _do(self, source: SimulatedSource, operation: str, name: str) -> None:
        registers = {(source.key(page), source.person) for page in source.affected(name)}
        invoked = time.monotonic()
        if operation in GRANTING:
            self._history.grant(registers, invoked)
        await self._write(source, operation, name)
        tally.DONE[f"source operations: {operation}"] += 1
        if operation in REVOKING:
            self._history.revoke(registers, operation, invoked, time.monotonic())

    async def _write(self, source: SimulatedSource, operation: str, name: str) -> None:
        """Operate, and record the text of the document if the operation gives it one."""
        invoked = time.monotonic()
        await source.do(operation, name, self._text())
        if operation in ("write", "revert"):
            page = source.pages[name]
            write = Write(source.key(page), marker_of(page.text), invoked, time.monotonic())
            self._history.writes.append(write)

    def _text(self) -> str:
        return text_with_marker(self._scenario.word, next(self._texts))


def _model(world: World) -> QueryEmbedder:
    chosen = EmbeddingSettings(**world.space.settings.embedding.model_dump())
    return QueryEmbedder(lambda: embedder(chosen, dist() / "models"))
