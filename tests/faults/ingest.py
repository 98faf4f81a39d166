"""Runs ``penstock ingest`` repeatedly, and kills some of its runs."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from random import Random

from tests.faults import tally
from tests.faults.simulated_sources import IngestFolder
from tests.faults.world import KILLED_PROGRAMS, World
from tests.support.space import PROJECT

LONGEST_RUN_SECONDS = 60.0


class Ingest:
    """Publishes a folder through the proxies until it is stopped."""

    def __init__(self, world: World, ingest_folder: IngestFolder) -> None:
        self._world, self._ingest_folder = world, ingest_folder
        self.stopped = False
        """Set to end ``run`` after the current command."""

    async def run(self, rng: Random) -> None:
        """Run the command repeatedly. Half of the runs are killed, most of them just after they have sent something."""
        while not self.stopped:
            fate = rng.choice(
                ("completes", "completes", "completes", "dies", "dies after sending", "dies after sending")
            )
            process = await self._start(dies_after=rng.randint(1, 4) if fate == "dies after sending" else None)
            try:
                if fate == "dies":
                    await asyncio.sleep(0.8 + rng.random() * 1.5)
                    if process.returncode is None:
                        process.kill()
                await asyncio.wait_for(process.wait(), LONGEST_RUN_SECONDS)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            tally.DONE["runs of penstock ingest"] += 1
            if process.returncode == -signal.SIGKILL:
                tally.FAULTS[f"kill of penstock ingest: {fate}"] += 1
                if self._world.during_outage is not None:
                    await self._world.during_outage()
            await asyncio.sleep(1.0)

    async def once(self) -> None:
        """Run the command once, without faults. Raises AssertionError if it fails."""
        process = await self._start()
        output, errors = await asyncio.wait_for(process.communicate(), LONGEST_RUN_SECONDS)
        assert process.returncode == 0, errors.decode()[-2000:]
        assert json.loads(output)["dead"] == 0

    async def _start(self, *, dies_after: int | None = None) -> asyncio.subprocess.Process:
        dying = {} if dies_after is None else {"FAULTS_SENDS": str(dies_after)}
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            KILLED_PROGRAMS["FAULTS_SENDS"] if dying else "cli.main",
            *self._ingest_folder.arguments,
            "--allow-mass-delete",
            "--json",
            env={**self._world.space.environment, **self._world.environment, **dying},
            cwd=PROJECT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
