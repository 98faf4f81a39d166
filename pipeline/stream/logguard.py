"""Notices that Kafka's log moved under a consumer group, and has it read again what may not have been read.

See docs/adr/0036-kafka-log-moved.md. faust is not known here: ``Rewinds`` is what the consuming module does for us.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol, get_args

import structlog

from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.kafka_log import Log, Mark, Moved, Verdict, Witness, expired, judge, thinned, witness
from pipeline.kafka.client import security
from pipeline.kafka.logs import LogsUnavailable, look
from pipeline.ledger import kafka_marks
from pipeline.ledger.kafka_marks import Place
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings
from pipeline.stores.postgres import Pool, translated

log = structlog.get_logger()

COMPARE_SECONDS = 30.0
"""Between two comparisons of a partition that stays assigned. A minute is promised."""
SAMPLE_SECONDS = 5.0
"""A log that loses its tail and grows again past what was read is noticed if that takes longer than this."""
CONFIRM_SECONDS = 2.0
"""A new leader may show too low an end until its followers have answered (replica.fetch.wait.max.ms: 0.5 s)."""
MAX_SAMPLES = 8
"""Samples that are remembered for one partition while Kafka does not answer."""
MAX_GAPS = 100
"""Gaps that are remembered for one partition between two comparisons: a compacted topic has many."""
NEVER = 2**63


def as_read(sent_ms: int) -> int:
    """A record's time as faust gives it, in seconds: beyond 2^53 microseconds it is not exact."""
    return round(sent_ms / 1000.0 * 1000)


class Rewinds(Protocol):
    """The operations of the consuming module that the guard needs."""

    async def take_back(self, offsets: Mapping[Place, int]) -> None:
        """Forget what is in flight of these partitions, track nothing more of them, and commit these offsets. Raises
        Retryable: nothing is read of them until it is called again with success."""
        ...

    async def read_again(self) -> None:
        """Have everything assigned anew, and read from what is committed."""
        ...

    async def is_member(self) -> bool:
        """Whether this worker is a member of its group now, under the assignment that it works by. Raises Retryable."""
        ...


@dataclass(slots=True, eq=False)
class _Partition:
    """One assignment of one partition."""

    committed: int | None = None
    """None: the group never committed one, and reads from the beginning."""
    positioned: bool = False
    """Whether ``committed`` is known."""
    owner: int | None = None
    """The owner number under which its mark is stored; None: not claimed, or claimed by another process since."""
    log_id: str | None = None
    """The log id in its mark; None: it has no mark."""
    ladder: tuple[Witness, ...] = ()
    """Handled records, compared before."""
    handled: Witness | None = None
    """The last one whose mark is stored."""
    judged: bool = False
    """Whether its log was compared since it was assigned. Until then nothing is committed of it."""
    stopped: bool = False
    """True from the moment that it has to be assigned anew: nothing is read before that."""
    position: int | None = None
    """One beyond the last record that was read."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """The newest ranges of offsets that had no record: the first offset, and one beyond the last."""
    newest: Witness | None = None
    """The last record that was read."""
    samples: list[Witness] = field(default_factory=list)
    """Some records that were read since the last comparison, after the newest one that it looked at."""

    def witnesses(self, handled: Witness | None) -> tuple[Witness, ...]:
        """The witnesses of a mark when this record is the last one handled."""
        if handled is None:
            return ()
        return (*sorted({w for w in (*self.ladder, *self.samples) if w.offset < handled.offset}), handled)

    def unread(self) -> list[tuple[int, int]]:
        """The known ranges of offsets that were not read."""
        ranges = list(self.gaps)
        if self.position is not None:
            ranges.append((self.position, NEVER))
        if self.committed is None and self.handled is not None and not self.judged:  # Kafka forgot what was committed
            ranges.append((self.handled.offset + 1, NEVER))
        return ranges


@dataclass(frozen=True, slots=True)
class _Before:
    """The state of a partition before Kafka is asked."""

    state: _Partition
    log_id: str | None
    handled: tuple[Witness, ...]
    samples: tuple[Witness, ...]
    position: int

    @classmethod
    def of(cls, state: _Partition) -> _Before:
        position = max(state.position or 0, state.committed or 0)
        return cls(state, state.log_id, state.witnesses(state.handled), tuple(state.samples), position)

    def offsets(self, *, every: bool) -> set[int]:
        """The offsets to compare: those since the last comparison, or those of every witness."""
        whole = every or not self.state.judged
        return {w.offset for w in (*(self.handled if whole else ()), *self.samples)}

    def verdict(self, now: Log) -> Verdict:
        mark = Mark(now.log_id if self.log_id is None else self.log_id, self.handled)
        return judge(mark, now, read=self.samples, position=self.position)

    def was_read_from(self, now: Log) -> bool:
        """Whether all that was read since the assignment was read from the log as it is now."""
        return self.position <= now.end and all(now.records.get(w.offset, w) == w for w in self.samples)


class LogGuard:
    """Law: no offset of a partition is committed before its mark is stored, nor before its log was compared with the
    mark that was there when it was assigned. Where the log is another one, the group goes back to behind the newest
    handled record that is still the same. A worker that has lost a partition stores no mark of it any more once another
    one has claimed it."""

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
        self._news = asyncio.Event()
        self._storing = asyncio.Lock()
        """Held while marks are stored: an older one must not overwrite a newer one."""

    # What the consuming module tells

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
        """Reading goes on from the committed offsets; None: from the beginning."""
        for place, offset in committed.items():
            if (state := self._partitions.get(place)) is not None:
                state.committed = state.position = offset
                state.positioned = True
        self._news.set()

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
        """Store the marks of partitions that are about to be committed; done: the last record of each that is done.
        Returns those that may be committed."""
        async with self._storing:
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
        """Compare each partition when it was assigned, and again and again. Runs until it is cancelled."""
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
                continue  # after the next sample
            if now >= due:
                due = now + COMPARE_SECONDS

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    def _sample(self) -> None:
        for state in self._partitions.values():
            if state.newest is not None and state.newest not in state.samples[-1:]:
                state.samples.append(state.newest)
                del state.samples[1 : len(state.samples) - MAX_SAMPLES]

    async def _compare(self, places: Iterable[Place]) -> None:
        before = {place: state for place in places if (state := self._partitions.get(place)) is not None}
        await self._claim({place: state for place, state in before.items() if state.owner is None})
        logs = await self._look(before, every=False)
        moved = {place: before[place] for place, (known, now) in logs.items() if known.verdict(now).kind != "same"}
        if moved:  # looked at again: every witness, after a while
            await asyncio.sleep(CONFIRM_SECONDS)
            again = await self._look(moved, every=True)
            logs = {place: pair for place, pair in logs.items() if place not in moved} | again
        async with self._storing:
            await self._conclude(logs)

    async def _conclude(self, logs: Mapping[Place, tuple[_Before, Log]]) -> None:
        anew: dict[Place, Mark] = {}
        back: dict[Place, int] = {}
        states = {place: known.state for place, (known, _) in logs.items()}
        for place, (known, now) in logs.items():
            state, verdict = known.state, known.verdict(now)
            if self._partitions.get(place) is not state:
                continue  # revoked meanwhile: whoever has it now compares it
            if verdict.kind == "same" and not state.stopped:
                self._settle(place, known, now)
                if known.log_id is None:
                    anew[place] = Mark(now.log_id)
                continue
            self._report(place, known, now, verdict)
            handled = tuple(w for w in known.handled if w.offset < verdict.read_from)
            anew[place] = Mark(now.log_id, handled)
            is_fresh = not (state.judged or state.stopped) and known.was_read_from(now)
            if is_fresh and (state.committed or 0) <= verdict.read_from:  # it is read from there already
                state.log_id, state.ladder, state.judged = now.log_id, handled, True
                state.handled = handled[-1] if handled else None
            else:
                state.judged, state.stopped = False, True
                back[place] = min(verdict.read_from, now.begin if state.committed is None else state.committed)
        if back:
            await self._rewinds.take_back(back)
        # After what is committed: a mark of the new log must not stand beside an old offset.
        stored = await self._save(anew, states)
        if back.keys() - stored:
            raise Retryable("the mark of a log that moved is another worker's now", service="postgres")
        if back:
            await self._rewinds.read_again()

    def _settle(self, place: Place, known: _Before, now: Log) -> None:
        """It is the same log: what of it was not read has expired if it is not there any more."""
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
        state.ladder = tuple(thinned(known.handled))
        del state.samples[: max(0, len(known.samples) - 1)]
        state.judged = True

    def _report(self, place: Place, known: _Before, now: Log, verdict: Verdict) -> None:
        if known.state.stopped:
            return  # said already: it is taken back once more because that failed
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

    async def _look(self, states: Mapping[Place, _Partition], *, every: bool) -> dict[Place, tuple[_Before, Log]]:
        before = {place: _Before.of(state) for place, state in states.items()}
        offsets = {place: known.offsets(every=every) for place, known in before.items()}
        logs = await look(offsets, self._kafka.bootstrap, security(self._kafka))
        return {
            place: (
                before[place],
                Log(
                    now.log_id,
                    now.begin,
                    now.end,
                    {n: witness(n, as_read(r.sent_ms), r.key, r.value) for n, r in now.records.items()},
                ),
            )
            for place, now in logs.items()
        }

    async def _claim(self, states: Mapping[Place, _Partition]) -> None:
        """Become the owner of their marks, and read those of partitions that are not judged yet."""
        if not states:
            return
        await self._require_member()  # asked before: one that Kafka does not know takes no marks from their owner
        with translated("kafka marks"):
            async with self._pool.connection() as connection:
                claimed = await kafka_marks.claim(connection, self._group, states)
        await self._require_member()  # and after the claim: whoever has them next claims them later
        for place, state in states.items():
            state.owner, mark = claimed[place]
            if mark is not None and not state.judged:
                state.log_id, state.ladder = mark.log_id, tuple(mark.witnesses)
                state.handled = mark.witnesses[-1] if mark.witnesses else None

    async def _require_member(self) -> None:
        """Raises Retryable."""
        if not await self._rewinds.is_member():
            raise Retryable("the group does not have this worker as a member now", service="kafka")

    async def _save(self, marks: Mapping[Place, Mark], states: Mapping[Place, _Partition]) -> set[Place]:
        """Returns the partitions whose marks were stored; the others have, or had for a moment, another owner."""
        owned = {place: (owner, mark) for place, mark in marks.items() if (owner := states[place].owner) is not None}
        if not owned:
            return set()
        with translated("kafka marks"):
            async with self._pool.connection() as connection:
                stored = await kafka_marks.save(connection, self._group, owned)
        for place in owned.keys() - stored:
            states[place].owner = None  # claimed again, if it is still ours
            log.warning("mark_refused", stage=self._stage, topic=place[0], partition=place[1])
        return stored
