"""The state machine: real stages on the real stores; steps and faults are drawn, then everything settles, then the
oracle compares."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pipeline.core.errors import Retryable
from pipeline.core.identity import document_id
from pipeline.ledger import work
from pipeline.observability.metrics import Metrics
from pipeline.stages.announce import Announcer
from pipeline.stages.stage import Incoming
from query.model import Mode
from tests.faults import tally
from tests.faults.elasticsearch_proxy import BULKS
from tests.faults.journal import LANES, Journal
from tests.faults.model import outcome, readable
from tests.faults.stores import Stores
from tests.faults.story import KINDS, NEEDED, TAGS, UNEMBEDDABLE, Story
from tests.faults.worker_harness import Operation, Outbox, StageName, WorkerHarness
from tests.support.pipeline.oracle import assert_equal, desired_chunks
from topics.messages import DocumentIndexed, IndexHint

NAMES = ["a", "b", "c"]
STAGES: tuple[StageName, ...] = ("detect", "vectors", "keywords")
SINKS: tuple[StageName, StageName] = ("vectors", "keywords")
OP_SECONDS = 30.0

FAULTS: dict[str, tuple[str, ...]] = {
    "detect": ("nothing", "nothing", "stand", "kill", "postgres", "kafka"),
    "vectors": ("nothing", "nothing", "stand", "kill", "postgres", "kafka", "model"),
    "keywords": ("nothing", "nothing", "stand", "kill", "postgres", "kafka", "bulk", "bulk", "bulk", "refresh"),
}
MAX_AWAITS = {"detect": 36, "vectors": 30, "keywords": 30}
"""The approximate number of awaits of one batch."""


def faults(stage: str) -> st.SearchStrategy[tuple[str, int, int]]:
    """Return a strategy for (kind of fault, number of the await, seed of further choices)."""
    return st.tuples(st.sampled_from(FAULTS[stage]), st.integers(1, MAX_AWAITS[stage]), st.integers(0, 2**16))


numbers = st.integers(0, 2**16)
slots = st.integers(0, 1)
one_change = st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(NAMES), numbers)
changes = st.lists(one_change, max_size=2)
NO_FAULT = ("nothing", 1, 0)
_ALL_DUE = """
    WITH free AS (SELECT ctid FROM index_state WHERE seq < want_seq FOR UPDATE SKIP LOCKED)
    UPDATE index_state SET next_at = now() WHERE ctid IN (SELECT ctid FROM free)
"""
"""Makes all pending rows due. Rows that a paused worker has locked are skipped, as the sweeper does."""


class Machine(RuleBasedStateMachine):
    stores: ClassVar[Stores]
    loop: ClassVar[asyncio.AbstractEventLoop]
    count: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        Machine.count += 1
        tally.DONE["scenarios (protocol)"] += 1
        self.stores.tenant = f"{os.getpid()}-{Machine.count}"
        self.story = Story(self.stores.tenant, NAMES, datetime.now(UTC) - timedelta(hours=1))
        self.journal = Journal()
        self.workers: dict[tuple[StageName, int], WorkerHarness] = {}
        self.dead_workers: list[WorkerHarness] = []
        self.announced: list[DocumentIndexed] = []
        self.excused = False
        """Whether a fault happened after which only the sweeper can complete a document."""
        self.questions = 0
        self.forgot_deletes = False
        """Whether Elasticsearch forgot its deletes, so that it accepts late writes, which have to be undone."""

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 120))

    # Rules

    @initialize(changes=st.lists(one_change, min_size=3, max_size=8))
    def begin(self, changes: Any) -> None:
        for change in changes:
            self.change(change)

    @rule(change=one_change)
    def change(self, change: Any) -> None:
        kind, name, n = change
        for lane, event in self.story.change(kind, name, Random(n)):
            self.journal.publish(lane, event)
            tally.DONE["changes"] += 1

    @rule(name=st.sampled_from(NAMES), lane=st.sampled_from(LANES))
    def broken_record(self, name: str, lane: Any) -> None:
        if self.story.events[name]:
            self.journal.publish_broken(lane, self.story.events[name][-1])
            tally.FAULTS["broken record"] += 1

    @rule(changes=changes, slot=slots, lane=st.sampled_from(LANES), count=st.integers(1, 5), fault=faults("detect"))
    def detect(self, changes: Any, slot: int, lane: Any, count: int, fault: Any) -> None:
        for change in changes:
            self.change(change)
        self.run(self._work("detect", slot, lambda _: self.journal.batch(lane, count), fault))

    @precondition(lambda self: any(self.journal.topics.values()))
    @rule(slot=slots, lane=st.sampled_from(LANES), count=st.integers(1, 9), fault=faults("detect"))
    def replay(self, slot: int, lane: Any, count: int, fault: Any) -> None:
        """Read from offset 0, as after a reset of the group's offsets."""
        tally.FAULTS["replay from offset 0"] += bool(self.journal.acked[lane])
        self.run(self._work("detect", slot, lambda _: self.journal.batch(lane, count, replay_from=0), fault))

    @rule(changes=changes, slot=slots, count=st.integers(1, 4), n=numbers, fault=faults("vectors"))
    def embed(self, changes: Any, slot: int, count: int, n: int, fault: Any) -> None:
        self._converge("vectors", changes, slot, count, n, fault)

    @rule(changes=changes, slot=slots, count=st.integers(1, 4), n=numbers, fault=faults("keywords"))
    def index(self, changes: Any, slot: int, count: int, n: int, fault: Any) -> None:
        self._converge("keywords", changes, slot, count, n, fault)

    def _converge(self, sink: StageName, changes: Any, slot: int, count: int, n: int, fault: Any) -> None:
        """Run a sink, often after changes were just accepted."""
        for change in changes:
            self.change(change)
        if changes:
            self.run(self._work("detect", 1, lambda _: self.journal.batch("live", 8), NO_FAULT))
        self.run(self._work(sink, slot, lambda rng: self.journal.pick_hints(sink, count, rng), fault, n))

    @rule(change=one_change, later=changes, sink=st.sampled_from(SINKS), await_=st.integers(1, 40), n=numbers)
    def overtake(self, change: Any, later: Any, sink: StageName, await_: int, n: int) -> None:
        """A sink pauses at some await, or its bulk is cut off and arrives later. Meanwhile more is accepted, mostly of
        the same document, and another worker converges; then the first continues, perhaps minutes later, or is
        killed."""
        self.change(change)
        same = [(kind, change[1] if n % 4 else name, k) for kind, name, k in later]
        self.run(self._overtake(same, sink, await_, n))

    async def _overtake(self, later: Any, sink: StageName, await_: int, n: int) -> None:
        accept = ("detect", 1, lambda _: self.journal.batch("live", 8), NO_FAULT)
        how = ("stand", await_, 0)
        if sink == "keywords" and n % 3:
            how = ("hold" if n % 3 == 1 else "late", 1, 0)
        picked: list[Incoming] = []

        def pick(rng: Random) -> list[Incoming]:
            picked.extend(self.journal.pick_hints(sink, 4, rng))
            return picked

        await self._work(*accept)  # type: ignore[arg-type]
        await self._work(sink, 0, pick, how, n)
        for change in later:
            self.change(change)
        await self._work(*accept)  # type: ignore[arg-type]
        await self._work(sink, 1, lambda _: list(self.journal.hints[sink]), NO_FAULT)
        dies = (sink, 0) in self._paused_workers() and n % 2 == 0
        if sink == "keywords" and n % 5 < 2:
            await self.stores.forget_deletes()
            self.forgot_deletes = True
            tally.DONE["times that Elasticsearch forgot its deletes"] += 1
        if dies:
            await self._kill((sink, 0), f"kill of {sink} that was overtaken")
        elif (sink, 0) in self._paused_workers():
            await self._resume((sink, 0))
        elif (sink, 0) in self.workers:  # it failed: its batch is tried again, as its lane would do
            await self.workers[sink, 0].es_proxy.release()
            await self._work(sink, 0, lambda _: picked, NO_FAULT)

    async def _release_all_bulks(self) -> None:
        """Let all bulks arrive that killed workers had sent, or that were cut off."""
        for worker in self.dead_workers:
            tally.FAULTS["bulk of a dead worker landed"] += await worker.es_proxy.release()
        for worker in self.workers.values():
            if worker.op is None:
                await worker.es_proxy.release()

    @precondition(lambda self: any(self.journal.hints.values()))
    @rule(sink=st.sampled_from(SINKS), n=numbers)
    def lose_hints(self, sink: str, n: int) -> None:
        lost = self.journal.pick_hints(sink, 1, Random(n))
        self.journal.hinted(sink, lost)
        self.excused = self.excused or bool(lost)
        tally.FAULTS["hint lost"] += len(lost)

    @precondition(lambda self: self._paused_workers())
    @rule(n=numbers)
    def resume(self, n: int) -> None:
        self.run(self._resume(Random(n).choice(self._paused_workers())))

    @precondition(lambda self: self._paused_workers())
    @rule(n=numbers)
    def kill_paused_worker(self, n: int) -> None:
        self.run(self._kill(Random(n).choice(self._paused_workers()), "kill of a paused worker"))

    @rule()
    def release(self) -> None:
        self.run(self._release())

    @rule()
    def sweep(self) -> None:
        self.run(self._sweep())

    @rule(tags=st.sets(st.sampled_from(TAGS + NEEDED), min_size=1), mode=st.sampled_from(["hybrid", "keyword"]))
    def ask(self, tags: set[str], mode: Mode) -> None:
        self.run(self._ask(tags, mode))

    # Steps

    def _paused_workers(self) -> list[tuple[StageName, int]]:
        return [at for at, worker in self.workers.items() if worker.op is not None]

    async def _work(self, name: StageName, slot: int, batch: Any, fault: Any, n: int = 0) -> None:
        at = (name, slot)
        if at not in self.workers:
            self.workers[at] = await WorkerHarness.start(name, self.stores.settings, self.stores.library.generation)
        worker = self.workers[at]
        if worker.op is not None:
            await self._resume(at)
            if (worker := self.workers.get(at)) is None or worker.op is not None:  # type: ignore[assignment]
                return
        records = batch(Random(n))
        if not records:
            return
        what, await_, choice = fault
        self._prepare(worker, what, choice)
        done = False

        def step(op: Operation, n: int) -> bool:
            nonlocal done
            if n < await_ or done:
                return False
            done = True
            if what == "postgres":
                tally.FAULTS["connections to Postgres cut"] += worker.pool.cut()
            return what in ("stand", "kill")

        worker.begin(records, step)
        await self._settle(at)
        if at in self.workers and worker.op is not None and worker.op.is_paused.is_set():
            if what == "kill":
                await self._kill(at, f"kill of {name} at an await")
            else:
                self.excused = True
                tally.FAULTS["worker left standing at an await"] += 1

    @staticmethod
    def _prepare(worker: WorkerHarness, what: str, choice: int) -> None:
        rng = Random(choice)
        worker.outbox.kafka = rng.choice(("away", "unsure")) if what == "kafka" else "fine"
        worker.embedder.model_is = "down" if what == "model" else "fine"
        bulk = what if what in ("hold", "late") else "pass"
        worker.es_proxy.next_bulk = rng.choice(BULKS) if what == "bulk" else bulk
        worker.es_proxy.unanswered = None
        worker.es_proxy.bad_refreshes = int(what == "refresh")

    async def _settle(self, at: tuple[StageName, int]) -> None:
        """Wait until its operation is completed, is paused, or waits for a response that is held back."""
        worker = self.workers[at]
        op = worker.op
        assert op is not None
        deadline, looked = time.monotonic() + OP_SECONDS, time.monotonic()
        while not op.task.done() and not op.is_paused.is_set() and not worker.es_proxy.holding.is_set():
            await asyncio.wait([op.task], timeout=0.01)
            assert time.monotonic() < deadline, f"{at} hangs at its await {op.steps}"
            if time.monotonic() - looked > 0.2:
                looked = time.monotonic()
                await self._unblock(at)
        if op.task.done():
            self._ended(worker, op)

    async def _unblock(self, mine: tuple[StageName, int]) -> None:
        """Kill or resume the paused workers that hold a lock that another worker waits for."""
        blockers = await self.stores.blockers()
        for at in self._paused_workers():
            worker = self.workers.get(at)  # resuming another worker may have ended it
            if at != mine and worker and worker.op and worker.pool.backends() & blockers:
                if worker.op.steps % 2:
                    await self._kill(at, "kill of a worker that held a lock")
                else:
                    await self._resume(at)

    def _ended(self, worker: WorkerHarness, op: Operation) -> None:
        worker.op = None
        self._collect(worker.outbox)
        for fired in worker.es_proxy.fired:
            tally.FAULTS[f"Elasticsearch: {fired}"] += 1
        worker.es_proxy.fired.clear()
        if worker.outbox.kafka != "fine":
            tally.FAULTS[f"Kafka {worker.outbox.kafka}"] += 1
        if worker.embedder.model_is != "fine":
            tally.FAULTS["model down"] += 1
        error = op.task.exception()
        tally.DONE["awaits, at most, of one batch"] = max(tally.DONE["awaits, at most, of one batch"], op.steps)
        if error is None:
            tally.DONE[f"batches ({worker.name})"] += 1
            if worker.name == "detect":
                self.journal.accept(op.records)
            else:
                self.journal.hinted(worker.name, op.records)
        elif not isinstance(error, Retryable):
            raise error

    def _collect(self, outbox: Outbox) -> None:
        sent, outbox.sent = outbox.sent, []
        self.journal.wake(m for m in sent if isinstance(m, IndexHint))
        self.announced += [m for m in sent if isinstance(m, DocumentIndexed)]

    async def _resume(self, at: tuple[StageName, int]) -> None:
        worker = self.workers[at]
        await worker.es_proxy.release()
        assert worker.op is not None
        worker.op.resume()
        await self._settle(at)

    async def _kill(self, at: tuple[StageName, int], how: str) -> None:
        worker = self.workers.pop(at)
        self.dead_workers.append(worker)
        self._collect(worker.outbox)
        worker.kill()
        tally.FAULTS[how] += 1

    async def _release(self) -> None:
        for worker in [*self.dead_workers, *self.workers.values()]:
            landed = await worker.es_proxy.release()
            if worker in self.dead_workers:
                tally.FAULTS["bulk of a dead worker landed"] += landed
        for at in self._paused_workers():
            if not self.workers[at].op.is_paused.is_set():  # type: ignore[union-attr]
                await self._settle(at)

    async def _sweep(self) -> int:
        """Run the sweeper, as if so much time had passed that every pending document is due."""
        await self.stores.query(_ALL_DUE)
        async with self.stores.library.pool.connection() as connection:
            due = await work.due(connection, limit=500, again_in_seconds=0)
        now = datetime.now(UTC)
        self.journal.wake(
            IndexHint(
                tenant=d.identity.tenant,
                source=d.identity.source,
                external_id=d.identity.external_id,
                observed_at=now,
                document_id=str(d.identity.id),
                generation=d.generation,
            )
            for d in due
        )
        return len(due)

    async def _ask(self, tags: set[str], mode: Mode) -> None:
        """Check that no result of a search is one that this caller may not read according to the ledger."""
        library, self.questions = self.stores.library, self.questions + 1
        caller = await library.caller(self.stores.tenant, *(f"wiki/{tag}" for tag in sorted(tags)))
        response = await library.search.search(f"subject{self.questions % 23} line detail", caller, top=50, mode=mode)
        tally.DONE["queries"] += 1
        cases = {name: self.journal.possible(name) for name in NAMES}
        for result in response.results:
            possible = cases[result.passage.external_id]
            if possible is not None and not any(
                document is not None
                and readable(document, tags)
                and result.passage.chunk_id in desired_chunks(library.generation, document)
                for document in possible
            ):
                tally.VIOLATIONS["leaked"] += 1
                raise AssertionError(f"{mode}: a chunk of {result.passage.external_id} leaked to {sorted(tags)}")

    # Without faults, then the oracle

    def teardown(self) -> None:
        try:
            self.run(self._calm())
        finally:
            self.run(self._close())

    async def _calm(self) -> None:
        for at in self._paused_workers():
            if at in self.workers:
                await self._resume(at)
        while self._paused_workers():  # one that waits for a lock of another is paused again
            await self._resume(self._paused_workers()[0])
        for lane in LANES:
            while batch := self.journal.batch(lane, 8):
                await self._work("detect", 0, lambda _, batch=batch: batch, NO_FAULT)
        while any(self.journal.hints.values()):
            await self._drain()
        rescued = await self._sweep()
        tally.DONE["scenarios that only the sweeper could end"] += bool(rescued)
        tally.DONE["hints rescued by the sweeper"] += rescued
        assert self.excused or not rescued, "documents stayed pending though no hint was lost"
        while any(self.journal.hints.values()):
            await self._drain()
        await self._undo_late_bulks()
        await self._check()
        await self._release_all_bulks()
        await self._undo_late_bulks()
        await self.stores.refresh()
        await self._check()

    async def _undo_late_bulks(self) -> None:
        """Run the keywords workers' check of bulks without a response, which otherwise runs every few minutes."""
        removed = await self.stores.check_open_bulks()
        tally.DONE["entries of late bulks removed"] += removed
        assert self.forgot_deletes or not removed, "entries were removed although Elasticsearch refuses late writes"

    async def _drain(self) -> None:
        for sink in SINKS:
            while queue := self.journal.hints[sink]:
                await self._work(sink, 0, lambda _, queue=queue: queue[:6], NO_FAULT)

    async def _check(self) -> None:
        outbox = Outbox()
        producer: Any = outbox
        await Announcer(self.stores.library.pool, producer, Metrics()).announce_missed(0)
        self._collect(outbox)
        pending = await self.stores.query("SELECT store, error FROM index_state WHERE seq < want_seq")
        assert not pending, f"still pending: {pending}"
        documents = {name: outcome(self.story.events[name]) for name in NAMES}
        alive = [d for d in documents.values() if d is not None]
        try:
            await assert_equal(
                self.stores, alive, vector=self.stores.embeddings.vector, refused=lambda text: UNEMBEDDABLE in text
            )
        except AssertionError as error:
            kind = "lost" if "lack" in str(error) else "orphaned" if alive else "undead"
            tally.VIOLATIONS[kind] += 1
            raise
        [(letters,)] = await self.stores.query("SELECT count(*) FROM dead_letters")
        assert letters == self.journal.broken, f"{letters} dead letters, {self.journal.broken} broken records"
        late = await self.stores.query("SELECT external_id FROM documents WHERE announced_seq < seq")
        assert not late, f"not announced: {late}"
        for name, document in documents.items():
            id_ = str(document_id(self.stores.tenant, "wiki", name))
            of = [a for a in self.announced if a.document_id == id_]
            newest = [a for a in of if a.seq == max(b.seq for b in of)]
            if document is not None:
                assert newest, f"{name} was never announced"
                assert newest[-1].state in ("searchable", "partial"), f"{name} is announced as {newest[-1].state}"
            elif newest:
                assert newest[-1].state == "retired", f"{name} is gone and announced as {newest[-1].state}"

    async def _close(self) -> None:
        for worker in [*self.workers.values(), *self.dead_workers]:
            await worker.close()
        await self.stores.clear()
