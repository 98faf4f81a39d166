"""The model is throttled: ``why`` and ``status`` say who stands still, for what and since when, and what goes on."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.stack import local_processes
from cli.status import look
from deploy.local.stack import Stack
from pipeline.diagnosis.problems import problems
from tests.e2e.test_cli import run
from tests.e2e.test_stream import document
from tests.fakes.server import serving
from tests.support.space import Space

pytestmark = [pytest.mark.stack, pytest.mark.slow]

WITHIN_SECONDS = 180


async def test_why_and_status_name_a_throttled_embedding_service(stack: Stack, tmp_path: Path) -> None:
    async with serving() as model:
        embedding = {"provider": "openai", "base_url": model.url, "dimensions": 64, "timeout_seconds": 5}
        async with Space.create(stack, tmp_path, embedding=embedding) as space:
            here = Stack(space.home)
            try:
                for name in ("detect", "vectors", "keywords"):
                    await asyncio.to_thread(here.start_worker, name)
                await model.faults(errors=10**9, error_status=429)
                await space.publish(*(document(f"{n}.md", f"# {n}\n\nSome text.") for n in range(12)))
                report = await wait_until_vectors_is_stalled(here, space)
                assert "vectors is stalled" in problems(report)
                assert report["pending"]["vectors"]["documents"] == 12
                assert {stage["stage"]: stage["members"] for stage in report["stages"]}["vectors"] == 1

                why = await asyncio.to_thread(run, space, "why", "7.md", "--tenant", "acme")
                assert why.returncode == 1
                assert "vectors is stalled: waiting for embedding for" in why.stdout
                # It answers 429, or asked to wait: by turns, so the two commands may have met another of them.
                reason = next(worker["reason"] for worker in report["workers"] if worker["name"] == "vectors")
                assert reason.startswith("the embedding server")
                assert "the embedding server" in why.stdout, why.stdout.splitlines()[1]
                assert "restore that service" in why.stdout

                await model.faults(errors=0)
                await space.settled([document(f"{n}.md", f"# {n}\n\nSome text.", version=1) for n in range(12)])
                why = await asyncio.to_thread(run, space, "why", "7.md", "--tenant", "acme")
                assert why.returncode == 0, why.stdout
            finally:
                for name in ("detect", "vectors", "keywords"):
                    await asyncio.to_thread(here.stop, name)


async def wait_until_vectors_is_stalled(here: Stack, space: Space) -> dict[str, Any]:
    deadline = time.monotonic() + WITHIN_SECONDS
    while True:
        report = await look(partial(local_processes, here), space.settings)
        stuck = {worker["name"]: worker["waiting_for"] for worker in report["workers"]}
        if stuck.get("vectors") == "embedding" and report["pending"] and not report["pending"]["keywords"]["documents"]:
            return report
        assert time.monotonic() < deadline, (stuck, report["away"], report["pending"])
        await asyncio.sleep(1)
