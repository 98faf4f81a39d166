"""Random scenarios with real worker processes, real Kafka, and faults in all services that they use.

Replay: FAULTS_SEED=<the scenario's> FAULTS_SCENARIOS=1 .venv/bin/pytest tests/faults/test_processes.py -k random
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from deploy.local.stack import Stack
from tests.faults import tally
from tests.faults.breakage import (
    Fault,
    choose,
    elasticsearch_full,
    freeze_a_server,
    kill,
    kill_at_an_await,
    kill_postgres,
    model_fails,
    more_partitions,
    one_way,
    postgres_full,
    rebuild,
    stop_and_continue,
    swallow,
)
from tests.faults.scenario import EarlierScenarios, Scenario, play, replay, report, rounds
from tests.faults.world import World

# aiokafka forgets a connection that a dying broker cuts while it is being opened: of these tests' own admin clients.
pytestmark = [pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"), pytest.mark.slow]

SCENARIOS_PER_SPACE = 20
"""Scenarios that share a space, all of which the oracle compares after each round."""
FIXED: tuple[Sequence[Fault], ...] = (
    [kill_at_an_await, kill_postgres],
    [stop_and_continue, swallow, kill],
    [elasticsearch_full, postgres_full, model_fails],
    [freeze_a_server, one_way, rebuild],
    [more_partitions, kill, more_partitions],
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(-(-tally.SCENARIOS // SCENARIOS_PER_SPACE) or 1))
async def test_random_fault_scenarios_with_real_workers_end_as_the_model_says(
    stack: Stack, tmp_path: Path, block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tally.SEED + block * SCENARIOS_PER_SPACE
    count = min(SCENARIOS_PER_SPACE, (tally.SCENARIOS or 2) - block * SCENARIOS_PER_SPACE)
    scenarios = [Scenario(first + n, choose(Random(first + n), kafka_loses=tally.SCENARIOS > 0)) for n in range(count)]
    await _play(stack, tmp_path, rounds(scenarios), capsys)


@pytest.mark.timeout(600)
async def test_the_most_important_fault_scenarios_end_as_the_model_says(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await _play(stack, tmp_path, [[Scenario(n, faults)] for n, faults in enumerate(FIXED, 1)], capsys)


@pytest.mark.timeout(600)
async def test_without_faults_everything_settles_by_hints_alone(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweeper only covers losses: without faults, everything settles long before it runs."""
    await _play(stack, tmp_path, [[Scenario(1, [])]], capsys, sweep_after_seconds=3600)


async def _play(
    stack: Stack,
    folder: Path,
    rounds: Sequence[Sequence[Scenario]],
    capsys: pytest.CaptureFixture[str],
    *,
    sweep_after_seconds: float = 10,
) -> None:
    """Play the rounds one after another, and the scenarios of each together."""
    async with World.create(stack, folder, sweep_after_seconds=sweep_after_seconds) as world:
        earlier = EarlierScenarios()
        for scenarios in rounds:
            began = time.monotonic()
            try:
                await play(world, earlier, scenarios)
            except BaseException as error:
                error.add_note(replay(scenarios, "test_processes.py"))
                raise
            finally:
                report(capsys, "processes", scenarios, time.monotonic() - began)
