"""Canaries: really published, really searched for, seen by nobody else, and gone when they are switched off."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.core.canary import PRINCIPAL
from tests.support.space import Space, now
from tests.support.waiting import until
from topics.messages import DocumentUpserted

pytestmark = pytest.mark.stack

SOURCES = {"PENSTOCK_CANARY_EVERY_SECONDS": "1", "PENSTOCK_CANARY_SOURCES": json.dumps(["default/wiki"])}
LIVING = "SELECT source FROM documents WHERE starts_with(source, 'canary.') AND deleted_at IS NULL"


async def metrics(space: Space, worker: str) -> dict[tuple[str, ...], float]:
    """(name, label values …) → value."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{space.ports[worker]}/metrics")).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def chunks(space: Space) -> int:
    [(rows,)] = await space.query("SELECT count(*) FROM chunks_g1")
    return int(rows) + len(await space.entries())


async def test_a_canary_is_searchable_in_both_stores_and_disappears_by_access_and_by_delete(space: Space) -> None:
    await asyncio.to_thread(space.start, "detect", "vectors", "keywords", "canary", env=SOURCES)

    async def all_paths_measured() -> bool:
        seen = await metrics(space, "canary")
        counts = [seen.get(("penstock_canary_seconds_count", "wiki", store), 0) for store in ("vectors", "keywords")]
        gone = [seen.get(("penstock_canary_withdrawn_seconds_count", "wiki", way), 0) for way in ("access", "delete")]
        return min(counts) >= 4 and min(gone) >= 1

    await until(all_paths_measured)
    seen = await metrics(space, "canary")
    assert {value for (name, *_), value in seen.items() if name == "penstock_canary_failures_total"} == {0}
    assert seen["penstock_canary_success_timestamp_seconds", "wiki", "vectors"] > now().timestamp() - 60
    assert not [labels for labels in await metrics(space, "keywords") if "canary.wiki" in labels], (
        "its own numbers only"
    )

    assert await asyncio.to_thread(space.stop, "canary") == 0

    async def left_nothing() -> bool:
        return not await space.query(LIVING) and not await chunks(space)

    await until(left_nothing)


@pytest.mark.slow
async def test_only_the_canarys_principal_sees_it_and_a_restart_removes_a_killed_ones_document(space: Space) -> None:
    note = DocumentUpserted(
        tenant="default",
        source="wiki",
        external_id="note",
        observed_at=now(),
        version=1,
        title="A note",
        content="The penstock carries water to the turbine.",
        media_type="text/plain",
        acl_tags=["staff"],
    )
    # For two minutes it stays as the first round leaves it: there.
    slow = {**SOURCES, "PENSTOCK_CANARY_EVERY_SECONDS": "120"}
    await asyncio.to_thread(space.start, "detect", "vectors", "keywords", "canary", env=slow)
    await space.publish(note)
    await space.settled([note])

    async def is_there() -> bool:
        code, output = await space.penstock("search", "penstock turbine", "--as", PRINCIPAL, "--json")
        return code == 0 and [result["source"] for result in output["results"]] == ["canary.wiki"]

    await until(is_there)
    for mode, requests in (("vector", "--tag=staff"), ("keyword", "--tag=staff"), ("hybrid", "--as=anybody")):
        _, output = await space.penstock("search", "penstock turbine canary", requests, "--mode", mode, "--json")
        assert {result["source"] for result in output["results"]} == (
            {"wiki"} if requests == "--tag=staff" else set()
        ), mode

    space.kill("canary")
    await asyncio.to_thread(space.start, "canary", env={**SOURCES, "PENSTOCK_CANARY_EVERY_SECONDS": "0"})

    async def is_gone() -> bool:
        return not await space.query(LIVING)

    await until(is_gone)
    assert not [name for name, *_ in await metrics(space, "canary") if name.startswith("penstock_canary_success")]
