"""One document's data never stops its source: the real runner, with Postgres and Kafka, over a restart."""

from __future__ import annotations

from typing import cast

import pytest

from connectors.operate import summarize
from connectors.runner.instance import Instance
from connectors.set_aside import UNEXPECTED
from connectors.source import Context, Source
from pipeline.observability.metrics import Metrics
from tests.support.connectors.runner_kit import Bench, kinds
from tests.unit.connectors.runner.test_isolate import Poisoned

pytestmark = pytest.mark.stack


@pytest.fixture
def poisoned(bench: Bench) -> Poisoned:
    """The source that the bench runs, also after a restart. Its code fails at the document d004."""
    source = Poisoned(bench.world)

    def make(context: Context) -> Source:
        source.context = context
        return cast("Source", source)

    bench.make = make
    return source


async def test_good_documents_arrive_and_the_bad_one_is_in_the_status_also_after_a_restart(
    bench: Bench, poisoned: Poisoned
) -> None:
    bench.world.fill(9)
    bench.world.groups = {"staff": ({"ann"}, set()), "board": ({"bob"}, set())}
    good = [f"d{n:03}" for n in range(9) if n != 4]
    async with bench.running() as instance:
        await bench.until(lambda: bench.done(instance, "full", "changes", "groups", "sweep"))
        assert {id_ for kind, id_ in kinds(await bench.take()) if kind == "document.upserted"} == set(good)
        bench.world.write("d004", "edited")
        bench.world.write("d005", "edited")
        await bench.ask("changes")
        await bench.until(lambda: instance.activities["sweep"].pending == 0)
        await bench.ask("sweep")
        assert ("document.upserted", "d005") in kinds(await bench.take())
    async with bench.running() as instance:
        await bench.until(lambda: bench.done(instance, "full", "changes", "groups"))
        bench.world.write("d006", "edited")
        await bench.ask("changes")
        await bench.ask("sweep")
        assert kinds(await bench.take()) == [("document.upserted", "d006")]
        await _shows(bench, instance)
        poisoned.ids.clear()
        await bench.ask("sweep")
        assert kinds(await bench.take()) == [("document.upserted", "d004")]
        assert (await summarize(bench.pool, instance.plan, with_documents=True)).unpublishable == []


async def _shows(bench: Bench, instance: Instance) -> None:
    summary = await summarize(bench.pool, instance.plan, with_documents=True)
    [(id_, code, message)] = summary.unpublishable
    assert (id_, code) == ("d004", UNEXPECTED)
    assert "KeyError at test_isolate.py" in message
    assert summary.state == "following"
    instance._heartbeats_done = 0
    metrics: Metrics = instance._services.metrics
    await bench.until(lambda: metrics.connector_problems.labels(bench.name, "documents")._value.get() == 1)


async def test_a_source_of_which_nearly_all_documents_fail_needs_attention(bench: Bench, poisoned: Poisoned) -> None:
    bench.world.fill(20)
    poisoned.ids = {f"d{n:03}" for n in range(20)}
    async with bench.running() as instance:
        await bench.until(lambda: bench.done(instance, "full", "changes", "sweep"))
        await bench.until(lambda: "documents" in instance._statuses())
        await bench.until(lambda: instance.problems()[0].code == "needs_attention")
        assert "20 of the 20 documents that were read last are set aside" in instance.problems()[0].message
        poisoned.ids.clear()
        await bench.ask("sweep")
        await bench.until(lambda: "documents" not in instance._statuses())
