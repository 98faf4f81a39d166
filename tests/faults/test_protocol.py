"""Hundreds of random scenarios of the protocol itself: kills at any await, pauses, late bulks, lost hints; no Kafka.

Replay: the seed of the block that failed as FAULTS_SEED, FAULTS_SCENARIOS=1 (see ``make faults``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from deploy.local.stack import Stack
from tests.faults import tally
from tests.faults.machine import Machine
from tests.faults.stores import Stores

# A worker that is killed within a pipeline never completes psycopg's generator: when it is collected, it cannot end the
# pipeline of a connection that was cut.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object BasePipeline:pytest.PytestUnraisableExceptionWarning"
)

BLOCK = 10
"""The number of scenarios of one seed."""
BLOCKS = -(-tally.SCENARIOS // BLOCK) or 1


@pytest.fixture(scope="module")
def machine(stack: Stack) -> Iterator[type[Machine]]:
    loop = asyncio.new_event_loop()
    resources = AsyncExitStack()
    Machine.loop = loop
    Machine.stores = loop.run_until_complete(resources.enter_async_context(Stores.create(stack)))
    yield Machine
    loop.run_until_complete(resources.aclose())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_protocol_scenarios_leave_both_stores_as_the_model_says(
    machine: type[Machine], block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    number = tally.SEED + block
    with capsys.disabled():
        print(f"\nprotocol: seed {number}, {BLOCK} scenarios", end=" ", flush=True)
    try:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            seed(number)(machine),
            settings=settings(
                max_examples=BLOCK,
                stateful_step_count=30,
                deadline=None,
                database=None,
                derandomize=False,
                print_blob=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    except BaseException as error:
        error.add_note(
            f"Replay: FAULTS_SEED={number} FAULTS_SCENARIOS=1 .venv/bin/pytest tests/faults/test_protocol.py"
        )
        raise
