"""The embedding provider is away while changes go on: keyword search stays fresh, memory bounded, nothing is lost.

PENSTOCK_TEST_OUTAGE_SECONDS makes it longer than the half minute of the ordinary run (`make faults` takes minutes).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.local.stack import Stack
from query.retrieval.search import open_search
from tests.e2e.test_stream import changed, document, prose
from tests.fakes.server import serving
from tests.support.pipeline.oracle import assert_equal
from tests.support.space import Space
from topics.messages import DocumentUpserted

pytestmark = pytest.mark.slow

OUTAGE_SECONDS = float(os.environ.get("PENSTOCK_TEST_OUTAGE_SECONDS", "30"))
DOCUMENTS = 40
GROWTH_MB = 200
"""A worker keeps at most its lanes' queues (each record a hint, or an event of a few kilobytes here)."""


def rss_mb(space: Space) -> dict[str, float]:
    return {name: psutil.Process(p.pid).memory_info().rss / 2**20 for name, p in space.processes.items()}


def status(space: Space, name: str, stage: str) -> dict[str, Any]:
    """The state of a stage in the worker of this name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{space.ports[name]}/status", timeout=5) as answer:
        return next(state for state in json.loads(answer.read())["stages"] if state["stage"] == stage)


@pytest.mark.parametrize("workers", [("detect", "keywords", "vectors"), ("all",)], ids=["apart", "together"])
async def test_a_model_outage_keeps_keyword_search_fresh_and_loses_nothing(
    stack: Stack, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    async with serving() as model:
        embedding = {"provider": "openai", "base_url": model.url, "dimensions": 64, "timeout_seconds": 5}
        async with (
            Space.create(stack, tmp_path, embedding=embedding) as space,
            open_search(space.settings, None) as search,
        ):
            space.start(*workers)
            documents = {n: document(f"{n}.md", f"# {n}\n\n" + prose(f"topic-{n}", 8)) for n in range(DOCUMENTS)}
            await space.publish(*documents.values())
            await space.settled(documents.values())
            before = rss_mb(space)

            await model.faults(errors=10**9, error_status=503)
            caller = await search.identify("acme", tags=["wiki/staff"])
            fresh: list[float] = []
            ends = time.monotonic() + OUTAGE_SECONDS
            edits, stood_still = 0, False
            while time.monotonic() < ends:
                for _ in range(4):
                    n = edits % DOCUMENTS
                    edits += 1
                    documents[n] = edited(documents[n], n, edits)
                    await space.publish(documents[n])
                began = time.monotonic()
                async with asyncio.timeout(60):
                    while not (await search.search(f"marker{edits}x", caller, mode="keyword", top=1)).results:
                        await asyncio.sleep(0.05)
                fresh.append(time.monotonic() - began)
                stood_still |= status(space, workers[-1], "vectors")["waiting_for"] == "embedding"
            during = rss_mb(space)
            assert stood_still, "the breaker shows what is waited for"
            pending = await space.query("SELECT count(*) FROM index_state WHERE seq < want_seq AND store = 'vectors'")
            assert pending[0][0] > 0, "the model was not away at all"
            failed = "SELECT count(*) FROM index_state WHERE attempts > 0"
            assert await space.query(failed) == [(0,)], "the world was down: no document is to blame"

            await model.faults(errors=0)
            back = time.monotonic()
            await space.settled(documents.values(), within_seconds=120)
            caught_up = time.monotonic() - back
            await assert_equal(space, documents.values())
            assert await space.query("SELECT count(*) FROM dead_letters") == [(0,)]
            growth = {name: round(during[name] - before[name], 1) for name in before}
            sys.stdout.write(
                f"outage {OUTAGE_SECONDS:.0f} s, {edits} edits: keyword search fresh after "
                f"{sorted(fresh)[len(fresh) // 2]:.2f} s (median), {max(fresh):.2f} s (worst); "
                f"caught up {caught_up:.1f} s after it; MB resident before {rounded(before)}, growth {growth}\n"
            )
            assert max(growth.values()) < GROWTH_MB


def rounded(sizes: dict[str, float]) -> dict[str, int]:
    return {name: round(size) for name, size in sizes.items()}


def edited(old: DocumentUpserted, n: int, edit: int) -> DocumentUpserted:
    """The marker is found by whoever has this edit, in a document that has no other marker."""
    return changed(old, content=f"# {n}\n\n" + prose(f"topic-{n}", 8) + f"\n\nThe last remark is marker{edit}x.")
