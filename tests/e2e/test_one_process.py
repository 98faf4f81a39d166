"""All stages in one process (``penstock worker all``): what holds for one worker holds for all of them together."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.e2e.test_stream import document, prose
from tests.support.pipeline.oracle import assert_equal
from tests.support.space import Space
from topics.messages import DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL

STAGES = ["detect", "identities", "conversations", "vectors", "keywords", "conflicts", "standing"]


def documents(count: int) -> list[DocumentUpserted]:
    return [document(f"{n}.md", f"# Document {n}\n\n" + prose(f"subject-{n}", 6)) for n in range(count)]


def page(space: Space, name: str, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{space.ports[name]}{path}", timeout=5) as answer:
        return str(answer.read().decode())


async def half_written(space: Space, store: str) -> None:
    """Wait until the process is in the midst of its work."""
    await space.until(f"SELECT count(*) > 0 FROM index_state WHERE store = '{store}' AND seq >= want_seq")


async def test_one_process_does_the_work_of_all_stages_and_shows_each_on_its_port(space: Space) -> None:
    space.start("all")
    first = documents(5)
    await space.publish(*first)
    await space.settled(first)
    await assert_equal(space, first)
    assert [stage["stage"] for stage in json.loads(page(space, "all", "/status"))["stages"]] == STAGES
    metrics = page(space, "all", "/metrics")
    for stage in ("detect", "vectors", "keywords"):
        assert f'penstock_batch_size_count{{stage="{stage}"}}' in metrics
    assert space.stop("all") == 0


@pytest.mark.slow
async def test_a_process_killed_in_the_midst_of_a_load_loses_no_document(space: Space) -> None:
    space.start("all")
    load = documents(60)
    await space.publish(*load, topic=DOCUMENTS_BACKFILL)
    await half_written(space, "keywords")
    space.kill("all")
    space.start("all")
    await space.settled(load, within_seconds=150)
    await assert_equal(space, load)


@pytest.mark.slow
async def test_a_process_that_is_stopped_drains_and_its_successor_continues(space: Space) -> None:
    space.start("all")
    load = documents(30)
    await space.publish(*load)
    await half_written(space, "vectors")
    assert space.stop("all") == 0
    assert '"worker_stop_overdue"' not in space.log("all")
    space.start("all")
    await space.settled(load)
    await assert_equal(space, load)


@pytest.mark.slow
async def test_a_second_process_takes_partitions_during_a_load_and_gives_them_back(space: Space) -> None:
    space.start("all")
    load = documents(60)
    await space.publish(*load, topic=DOCUMENTS_BACKFILL)
    await half_written(space, "vectors")
    space.start("all#2")
    more = [document(f"more-{n}.md", f"# More {n}\n\n" + prose(f"matter-{n}", 3)) for n in range(20)]
    await space.publish(*more)
    space.kill("all#2")
    await space.settled([*load, *more], within_seconds=150)
    await assert_equal(space, [*load, *more])


@pytest.mark.slow
async def test_a_model_that_is_set_wrongly_ends_the_start_with_one_line(space: Space) -> None:
    await space.execute("UPDATE generations SET model = 'another'")
    with pytest.raises(AssertionError):
        space.start("all")
    assert space.processes.pop("all").wait(30) == 1
    assert space.log("all").splitlines()[-1].startswith("error: ")
