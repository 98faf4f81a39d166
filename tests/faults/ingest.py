"""``penstock ingest`` as somebody runs it again and again, and as it is killed in between."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from random import Random

from tests.faults import tally
from tests.faults.offices import Shelf
from tests.faults.world import DYING, World
from tests.support.space import PROJECT

LONGEST_RUN_SECONDS = 60.0


class Ingest:
    """Publishes one folder, through the wires, until it is stopped."""

    def __init__(self, world: World, shelf: Shelf) -> None:
        self._world, self._shelf = world, shelf
        self.stopped = False
        """Set to end ``run`` after the command under way."""

    async def run(self, rng: Random) -> None:
        """The command, again and again; half of them are killed, most when they have just sent something."""
        while not self.stopped:
            fate = rng.choice(("lives", "lives", "lives", "dies", "dies after sending", "dies after sending"))
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
                if self._world.while_nobody_looks is not None:
                    await self._world.while_nobody_looks()
            await asyncio.sleep(1.0)

    async def once(self) -> None:
        """To its end, with everything mended. Raises AssertionError when it fails."""
        process = await self._start()
        output, errors = await asyncio.wait_for(process.communicate(), LONGEST_RUN_SECONDS)
        assert process.returncode == 0, errors.decode()[-2000:]
        assert json.loads(output)["dead"] == 0

    async def _start(self, *, dies_after: int | None = None) -> asyncio.subprocess.Process:
        dying = {} if dies_after is None else {"FAULTS_SENDS": str(dies_after)}
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            DYING["FAULTS_SENDS"] if dying else "cli.main",
            *self._shelf.arguments,
            "--allow-mass-delete",
            "--json",
            env={**self._world.space.environment, **self._world.environment, **dying},
            cwd=PROJECT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
