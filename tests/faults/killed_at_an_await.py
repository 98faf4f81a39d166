"""The penstock command, whose worker is killed at the N-th await of its work (FAULTS_AWAIT)."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from itertools import count
from typing import Any

from cli.main import main
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.stage import Incoming
from pipeline.stages.vectors import VectorSink
from tests.faults.await_steps import run_in_steps

_awaits = count(1)


def _at(_: int) -> None:
    if next(_awaits) >= int(os.environ["FAULTS_AWAIT"]):
        os.kill(os.getpid(), signal.SIGKILL)


def _install(stage: Any) -> None:
    handle = stage.handle

    async def dying(self: Any, batch: Sequence[Incoming]) -> None:
        await run_in_steps(handle(self, batch), _at)

    stage.handle = dying


if __name__ == "__main__":
    for stage in (Detect, VectorSink, KeywordSink):
        _install(stage)
    main()
