"""Processes end, one after another: exactly the alerts fire that docs/runbooks/README.md says, and clear."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.stack import Stack
from tests.support.deploy.prometheus_kit import watched

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.mark.timeout(900)
async def test_each_stopped_process_raises_exactly_its_alerts_and_its_start_clears_them(
    stack: Stack, tmp_path: Path
) -> None:
    async with watched(stack, tmp_path) as world:
        await world.use()
        await world.fires()

        await world.stops("vectors")
        await world.fires("PenstockWorkerAbsent", "PenstockWorkerDown", "PenstockOldestPending", "PenstockCanaryLate")
        await world.starts("vectors")
        await world.fires()

        await world.stops("detect")
        await world.fires("PenstockWorkerAbsent", "PenstockWorkerDown", "PenstockVitalsMissing", "PenstockCanaryLate")
        await world.starts("detect")
        await world.fires()

        await world.stops("canary")
        await world.fires("PenstockWorkerDown", "PenstockCanaryAbsent")
        await world.starts("canary")
        await world.fires()

        await world.stops("connectors")
        await world.fires("PenstockWorkerDown", "PenstockConnectorSilent", "PenstockAccessOld")
        await world.starts("connectors")
        await world.fires()
