"""The laws of lanes, in random histories on a virtual clock: failures, floods, lost partitions, slow batches."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

from pipeline.core.errors import Retryable
from pipeline.core.model import Lane
from pipeline.observability.metrics import Metrics
from pipeline.stages.stage import FinalStage, Flooded, Incoming
from pipeline.stream.lanes import Lanes
from tests.simulation.scheduler import VirtualLoop, controlled, use
from topics.registry import INDEX_BACKFILL, INDEX_LIVE, Topic

HISTORIES = 120
"""About two seconds of a processor."""
KEYS = (b"a/x/1", b"a/x/2", b"a/y/3", b"b/x/4", b"b/x/5", None)
CALM_AFTER = 60.0
"""Nothing fails from then on."""


class Moody(FinalStage):
    """Fails, is slow and sets records aside at random, and sees to it that no key is handled twice at once."""

    name = "moody"
    topics: dict[Lane, Topic] = {"live": INDEX_LIVE, "backfill": INDEX_BACKFILL}  # noqa: RUF012

    def __init__(self, dice: random.Random, loop: VirtualLoop, *, fails: bool) -> None:
        self.batch_size = dice.randint(1, 5)
        self._dice, self._loop, self._fails = dice, loop, fails
        self._in_progress: Counter[bytes | None] = Counter()
        self._flooded: set[int] = set()

    async def is_backlogged(self) -> bool:
        await asyncio.sleep(self._dice.choice([0, 0.01]))
        return self._is_bad(0.3)

    async def handle(self, batch: Sequence[Incoming]) -> None:
        assert 0 < len(batch) <= self.batch_size
        keys = {record.key for record in batch if record.offset not in self._flooded}
        assert not any(self._in_progress[key] for key in keys), "a key is handled twice at once"
        self._in_progress.update(keys)
        try:
            await asyncio.sleep(self._dice.choice([0, 0.01, 0.3, 3 if self._fails else 0.3]))
        finally:
            self._in_progress.subtract(keys)
        if self._is_bad(0.3):
            raise Retryable("down")
        if self._is_bad(0.15):
            refused = [record for record in batch if self._dice.random() < 0.5] or [batch[0]]
            self._flooded |= {record.offset for record in refused}
            raise Flooded("too many", refused, retry_after=5)
        if self._fails and any(record.offset % 17 == 3 for record in batch):
            raise ZeroDivisionError

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        if self._is_bad(0.3):
            raise Retryable("down")

    def _is_bad(self, probability: float) -> bool:
        return self._fails and self._loop.time() < CALM_AFTER and self._dice.random() < probability


async def play(loop: VirtualLoop, seed: int, metrics: Metrics) -> None:
    dice = random.Random(seed)
    fails = seed % 2 == 0
    done: list[Incoming] = []
    read: list[Incoming] = []
    dropped: set[int] = set()
    lanes = Lanes(
        Moody(dice, loop, fails=fails),
        count=dice.randint(1, 4),
        queue_size=dice.randint(1, 4),
        batch_wait_seconds=dice.choice([0, 0.25]),
        backfill_share=0.1,
        metrics=metrics,
        on_done=lambda record, _: done.append(record),
    )
    lanes.start()
    failed = asyncio.create_task(lanes.failed())

    async def feed(lane: Lane, first: int) -> None:
        for n in range(first, first + dice.randint(5, 60)):
            read.append(Incoming(lane, dice.randint(0, 2), n, dice.choice(KEYS), b"", [], lane))
            await lanes.put(read[-1], read[-1].partition)
            await asyncio.sleep(dice.choice([0, 0, 0, 0.01, 0.1, 1]))

    feeds = [asyncio.create_task(feed("live", 0)), asyncio.create_task(feed("backfill", 1_000))]
    for _ in range(dice.choice([0, 3])):
        await asyncio.sleep(dice.random() * 10)
        lost = dice.randint(0, 2)
        dropped |= {record.offset for record in read if record.partition == lost}
        lanes.forget(lambda partition, lost=lost: partition == lost)  # type: ignore[misc]
    async with asyncio.timeout(3_000):
        await asyncio.gather(*feeds)
        while {record.offset for record in read} - dropped - {record.offset for record in done}:
            if failed.done():
                raise failed.result()
            await asyncio.sleep(1)
    await lanes.stop(within_seconds=60)
    assert max(Counter(record.offset for record in done).values(), default=1) == 1, "a record is done twice"
    for key in () if fails else KEYS:
        for lane in ("live", "backfill"):
            offsets = [record.offset for record in done if record.key == key and record.lane == lane]
            assert offsets == sorted(offsets), "records of one key are not handled in order"


def test_in_random_histories_lanes_lose_no_record_and_handle_no_key_twice_at_once() -> None:
    metrics = Metrics()
    with controlled():
        for seed in range(HISTORIES):
            loop = VirtualLoop()
            use(loop, seed)
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(play(loop, seed, metrics))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            finally:
                asyncio.set_event_loop(None)
                loop.end()
