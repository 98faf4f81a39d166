"""Detects that a partition's log in Kafka was replaced or truncated, and makes the group read again what it may have
missed.

The reasons are in docs/adr/0036-kafka-log-moved.md. This module does not know faust: ``Rewinds`` is the interface to
the module that consumes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol, get_args

import structlog

from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.kafka_log import Log, Mark, Moved, Verdict, Witness, expired, judge, thinned
from pipeline.kafka.client import security
from pipeline.kafka.logs import LogsUnavailable, look
from pipeline.ledger import kafka_marks
from pipeline.ledger.kafka_marks import Place
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings
from pipeline.stores.postgres import Pool, translated

log = structlog.get_logger()

COMPARE_SECONDS = 30.0
"""Time between two comparisons of an assigned partition. The documentation promises one a minute."""
SAMPLE_SECONDS = 5.0
"""Time between two samples of the records read. A log that is truncated, and then grows beyond what was read, is
detected if that takes longer than this."""
CONFIRM_SECONDS = 2.0
"""Pause before a difference is checked again: a new leader may report too low an end until its followers have answered
(replica.fetch.wait.max.ms: 0.5 s)."""
MAX_SAMPLES = 8
"""The most samples of one partition, which collect while Kafka does not answer."""
MAX_GAPS = 100
"""The most gaps of one partition between two comparisons; a compacted topic has many."""
END_OF_LOG = 2**63


class Rewinds(Protocol):
    """The operations of the consuming module that the guard needs."""

    async def take_back(self, offsets: Mapping[Place, int]) -> None:
        """Stop tracking these partitions, drop their records in flight, and commit these offsets. After Retryable
        nothing is read of them until another call succeeds."""
        ...

    async def read_again(self) -> None:
        """Have all partitions assigned again, and so read from the committed offsets. Raises Retryable."""
        ...

    async def is_member(self) -> bool:
        """Whether this worker is a member of its group now, with its present assignment. Raises Retryable."""
        ...


@dataclass(slots=True, eq=False)
class _Partition:
    """The state of an assigned partition, from one assignment to its end."""

    committed: int | None = None
    """The committed offset; None: the group has none, and reads from the beginning."""
    positioned: bool = False
    """Whether ``committed`` is known."""
    owner: int | None = None
    """The owner number under which its mark is stored; None: not claimed, or claimed by another process since."""
    log_id: str | None = None
    """The log id in its mark; None: it has no mark."""
    older_witnesses: tuple[Witness, ...] = ()
    """Handled records of earlier comparisons, in offset order."""
    handled: Witness | None = None
    """The last handled record, as far as its mark is stored."""
    judged: bool = False
    """Whether the log was compared since this assignment. Until then nothing is committed."""
    stopped: bool = False
    """Whether the partition has to be assigned again; nothing is read before that."""
    position: int | None = None
    """The offset after the last record that was read."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """The newest ranges of offsets without a record: (first offset, offset after the last one)."""
    newest: Witness | None = None
    """The last record that was read."""
    samples: list[Witness] = field(default_factory=list)
    """Some of the records that were read since the last comparison, in offset order."""

    def witnesses(self, handled: Witness | None) -> tuple[Witness, ...]:
        """The witnesses of a mark whose last handled record is this one."""
        if handled is None:
            return ()
        return (*sorted({w for w in (*self.older_witnesses, *self.samples) if w.offset < handled.offset}), handled)

    def unread(self) -> list[tuple[int, int]]:
        """The ranges of offsets that were not read, as far as they are known."""
        ranges = list(self.gaps)
        if self.position is not None:
            ranges.append((self.position, END_OF_LOG))
        if self.committed is None and self.handled is not None and not self.judged:  # Kafka forgot what was committed
            ranges.append((self.handled.offset + 1, END_OF_LOG))
        return ranges


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The state of a partition as it was before Kafka's log was read: it changes while we wait for Kafka."""

    state: _Partition
    log_id: str | None
    handled: tuple[Witness, ...]
    samples: tuple[Witness, ...]
    position: int

    @classmethod
    def of(cls, state: _Partition) -> _Snapshot:
        position = max(state.position or 0, state.committed or 0)
        return cls(state, state.log_id, state.witnesses(state.handled), tuple(state.samples), position)

    def offsets(self, *, every: bool) -> set[int]:
        """The offsets to compare: with ``every``, or in the first comparison, those of all witnesses, otherwise those
        read since the last comparison."""
        whole = every or not self.state.judged
        return {w.offset for w in (*(self.handled if whole else ()), *self.samples)}

    def verdict(self, now: Log) -> Verdict:
        mark = Mark(now.log_id if self.log_id is None else self.log_id, self.handled)
        return judge(mark, now, read=self.samples, position=self.position)

    def was_read_from(self, now: Log) -> bool:
        """Whether everything read since the assignment came from the log as it is now."""
        return self.position <= now.end and all(now.records.get(w.offset, w) == w for w in self.samples)


class LogGuard:
    """Compares the logs of one stage's partitions with their marks.

    Law: no offset of a partition is committed before its mark is stored, nor before its log was compared with the mark
    that existed when it was assigned. If the log has moved, the group reads again from behind the newest handled record
    that is still in it. A worker that has lost a partition cannot store a mark of it after another one has claimed it.
    """

    def __init__(
        self, stage: str, group: str, rewinds: Rewinds, *, kafka: KafkaSettings, pool: Pool, metrics: Metrics
    ) -> None:
        self._stage = stage
        self._group = group
        self._rewinds = rewinds
        self._kafka = kafka
        self._pool = pool
        self._metrics = metrics
        self._partitions: dict[Place, _Partition] = {}
        self._positions_changed = asyncio.Event()
        self._marks_lock = asyncio.Lock()
        """Held while marks are stored, so that an older mark does not overwrite a newer one."""

    # The module that consumes calls these.

    def assigned(self, partitions: Iterable[Place]) -> None:
        for place in partitions:
            self._partitions[place] = _Partition()
            for kind in get_args(Moved):
                self._metrics.log_moved.labels(
                    topic=place[0], kind=kind
                )  # at zero, so that the first one is an increase
            self._metrics.expired_records.labels(topic=place[0])

    def revoked(self, partitions: Iterable[Place]) -> None:
        for place in partitions:
            self._partitions.pop(place, None)

    def positioned(self, committed: Mapping[Place, int | None]) -> None:
        """Record the committed offsets from which these partitions are read; None: from the beginning."""
        for place, offset in committed.items():
            if (state := self._partitions.get(place)) is not None:
                state.committed = state.position = offset
                state.positioned = True
        self._positions_changed.set()

    def read(self, place: Place, record: Witness) -> None:
        state = self._partitions.get(place)
        if state is None:
            return
        if state.position is not None and record.offset > state.position:
            state.gaps.append((state.position, record.offset))
            del state.gaps[:-MAX_GAPS]
        state.position = record.offset + 1
        state.newest = record

    async def marked(self, done: Mapping[Place, Witness]) -> set[Place]:
        """Store the marks of partitions that are about to be committed; returns the partitions that may be. done: the
        last record of each one's done prefix."""
        async with self._marks_lock:
            states = {place: s for place in done if (s := self._partitions.get(place)) is not None and s.judged}
            marks = {place: Mark(s.log_id, s.witnesses(done[place])) for place, s in states.items() if s.log_id}
            try:
                stored = await self._save(marks, states)
            except PenstockError as error:
                log.warning("marks_not_stored", stage=self._stage, reason=str(error))
                return set()
            for place in stored:
                states[place].handled = done[place]
                states[place].committed = done[place].offset + 1
        return {place for place in stored if self._partitions.get(place) is states[place]}

    # Comparing

    async def run(self) -> None:
        """Compare each partition after its assignment, and then every COMPARE_SECONDS, until cancelled. A comparison
        that fails is logged, and repeated."""
        due = monotonic() + COMPARE_SECONDS
        while True:
            await self._wait(SAMPLE_SECONDS)
            now = monotonic()
            self._sample()
            places = [
                place
                for place, state in self._partitions.items()
                if state.positioned and (now >= due or not state.judged or state.owner is None)
            ]
            try:
                if places:
                    await self._compare(places)
            except (LogsUnavailable, PenstockError) as error:
                log.warning("log_not_compared", stage=self._stage, reason=str(error))
                continue  # compared again after the next sample
            if now >= due:
                due = now + COMPARE_SECONDS

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._positions_changed.wait()
        except TimeoutError:
            return
        self._positions_changed.clear()

    def _sample(self) -> None:
        for state in self._partitions.values():
            if state.newest is not None and state.newest not in state.samples[-1:]:
                state.samples.append(state.newest)
                del state.samples[1 : len(state.samples) - MAX_SAMPLES]

    async def _compare(self, places: Iterable[Place]) -> None:
        before = {place: state for place in places if (state := self._partitions.get(place)) is not None}
        await self._claim({place: state for place, state in before.items() if state.owner is None})
        logs = await self._read_logs(before, every=False)
        moved = {place: before[place] for place, (known, now) in logs.items() if known.verdict(now).kind != "same"}
        if moved:  # confirmed by a second comparison, after a pause and with every witness
            await asyncio.sleep(CONFIRM_SECONDS)
            again = await self._read_logs(moved, every=True)
            logs = {place: pair for place, pair in logs.items() if place not in moved} | again
        async with self._marks_lock:
            await self._apply_verdicts(logs)

    async def _apply_verdicts(self, logs: Mapping[Place, tuple[_Snapshot, Log]]) -> None:
        new_marks: dict[Place, Mark] = {}
        rewound: dict[Place, int] = {}
        states = {place: known.state for place, (known, _) in logs.items()}
        for place, (known, now) in logs.items():
            state, verdict = known.state, known.verdict(now)
            if self._partitions.get(place) is not state:
                continue  # revoked meanwhile: its next owner compares it
            if verdict.kind == "same" and not state.stopped:
                self._record_same_log(place, known, now)
                if known.log_id is None:
                    new_marks[place] = Mark(now.log_id)
                continue
            self._report(place, known, now, verdict)
            handled = tuple(w for w in known.handled if w.offset < verdict.read_from)
            new_marks[place] = Mark(now.log_id, handled)
            is_fresh = not (state.judged or state.stopped) and known.was_read_from(now)
            if is_fresh and (state.committed or 0) <= verdict.read_from:  # it is already being read from there
                state.log_id, state.older_witnesses, state.judged = now.log_id, handled, True
                state.handled = handled[-1] if handled else None
            else:
                state.judged, state.stopped = False, True
                rewound[place] = min(verdict.read_from, now.begin if state.committed is None else state.committed)
        if rewound:
            await self._rewinds.take_back(rewound)
        # After the offsets were committed: a mark of the new log must not be stored while an offset of the old one is.
        stored = await self._save(new_marks, states)
        if rewound.keys() - stored:
            raise Retryable("the mark of a log that moved is another worker's now", service="postgres")
        if rewound:
            await self._rewinds.read_again()

    def _record_same_log(self, place: Place, known: _Snapshot, now: Log) -> None:
        """Record that the log is the same, and report unread records that it no longer has: they have expired."""
        state = known.state
        if lost := expired(state.unread(), now.begin):
            self._metrics.log_moved.labels(topic=place[0], kind="expired").inc()
            self._metrics.expired_records.labels(topic=place[0]).inc(lost)
            log.error(
                "kafka_records_expired",
                stage=self._stage,
                topic=place[0],
                partition=place[1],
                count=lost,
                begin=now.begin,
                remedy="penstock recover --topics-lost",
            )
        state.gaps.clear()
        if state.position is not None:
            state.position = max(state.position, now.begin)
        state.log_id = now.log_id
        state.older_witnesses = tuple(thinned(known.handled))
        del state.samples[: max(0, len(known.samples) - 1)]
        state.judged = True

    def _report(self, place: Place, known: _Snapshot, now: Log, verdict: Verdict) -> None:
        if known.state.stopped:
            return  # reported already: taking it back has failed, and is tried again
        assert verdict.kind != "same"
        last = known.handled[-1] if known.handled else None
        self._metrics.log_moved.labels(topic=place[0], kind=verdict.kind).inc()
        log.error(
            "kafka_log_moved",
            stage=self._stage,
            topic=place[0],
            partition=place[1],
            kind=verdict.kind,
            begin=now.begin,
            end=now.end,
            position=known.position,
            read_from=verdict.read_from,
            last_handled_sent_ms=None if last is None else last.sent_ms,
            remedy="penstock recover --topics-lost",
        )

    async def _read_logs(
        self, states: Mapping[Place, _Partition], *, every: bool
    ) -> dict[Place, tuple[_Snapshot, Log]]:
        before = {place: _Snapshot.of(state) for place, state in states.items()}
        offsets = {place: known.offsets(every=every) for place, known in before.items()}
        logs = await look(offsets, self._kafka.bootstrap, security(self._kafka))
        return {
            place: (
                before[place],
                Log(now.log_id, now.begin, now.end, now.records),
            )
            for place, now in logs.items()
        }

    async def _claim(self, states: Mapping[Place, _Partition]) -> None:
        """Become the owner of these partitions' marks, and take over the marks of those that were not compared yet.
        Raises Retryable."""
        if not states:
            return
        await self._require_member()  # before: a worker that is no member must not take marks from their owner
        with translated("kafka marks"):
            async with self._pool.connection() as connection:
                claimed = await kafka_marks.claim(connection, self._group, states)
        await self._require_member()  # and after: then the partitions' next owner claims them after us
        for place, state in states.items():
            state.owner, mark = claimed[place]
            if mark is not None and not state.judged:
                state.log_id, state.older_witnesses = mark.log_id, tuple(mark.witnesses)
                state.handled = mark.witnesses[-1] if mark.witnesses else None

    async def _require_member(self) -> None:
        """Raises Retryable when this worker is not a member of its group now."""
        if not await self._rewinds.is_member():
            raise Retryable("the group does not have this worker as a member now", service="kafka")

    async def _save(self, marks: Mapping[Place, Mark], states: Mapping[Place, _Partition]) -> set[Place]:
        """Store these marks; returns the partitions whose marks were stored. The others have, or had meanwhile, another
        owner."""
        owned = {place: (owner, mark) for place, mark in marks.items() if (owner := states[place].owner) is not None}
        if not owned:
            return set()
        with translated("kafka marks"):
            async with self._pool.connection() as connection:
                stored = await kafka_marks.save(connection, self._group, owned)
        for place in owned.keys() - stored:
            states[place].owner = None  # claimed again, if the partition is still ours
            log.warning("mark_refused", stage=self._stage, topic=place[0], partition=place[1])
        return stored
