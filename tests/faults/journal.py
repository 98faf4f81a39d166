"""The topics and hints of the state machine, in memory: it replaces Kafka."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from random import Random

from pipeline.core.model import Lane
from pipeline.stages.stage import Incoming
from tests.faults.model import Event, outcome
from topics.codec import encode
from topics.messages import DocumentUpserted, IndexHint

LANES: tuple[Lane, Lane] = ("live", "backfill")
MOST_UNCERTAIN = 5
"""The most events of one document for which it is unknown whether the ledger has them: 2^n cases are compared."""


@dataclass
class Journal:
    """Topics and hints in memory. Records that are not acknowledged are delivered again from the acknowledged offset
    on, in order within a topic and in any order between the two topics."""

    topics: dict[Lane, list[Incoming]] = field(default_factory=lambda: {"live": [], "backfill": []})
    acked: dict[Lane, int] = field(default_factory=lambda: {"live": 0, "backfill": 0})
    begun: set[tuple[str, int]] = field(default_factory=set)
    """(topic, offset) of the records that a detect worker has begun to handle."""
    accepted: set[tuple[str, int]] = field(default_factory=set)
    """(topic, offset) of the records that the ledger certainly has."""
    published: dict[tuple[str, int], Event] = field(default_factory=dict)
    broken: int = 0
    hints: dict[str, list[Incoming]] = field(default_factory=lambda: {"vectors": [], "keywords": []})
    """By sink: the hints that it has not acknowledged."""
    _offset: int = 0

    def publish(self, lane: Lane, event: Event) -> None:
        record = encode(event)
        incoming = self._append(lane, record.key, record.value, record.headers)
        self.published[incoming.topic, incoming.offset] = event

    def publish_broken(self, lane: Lane, like: Event) -> None:
        """Publish a record with the key of that event that cannot be decoded."""
        record = encode(like)
        self._append(lane, record.key, record.value[: len(record.value) // 2], record.headers)
        self.broken += 1

    def _append(self, lane: Lane, key: bytes, value: bytes, headers: list[tuple[str, bytes]]) -> Incoming:
        topic = self.topics[lane]
        topic.append(Incoming(f"documents.{lane}", 0, len(topic), key, value, headers, lane))
        return topic[-1]

    def batch(self, lane: Lane, count: int, *, replay_from: int | None = None) -> Sequence[Incoming]:
        begin = self.acked[lane] if replay_from is None else min(replay_from, self.acked[lane])
        records = self.topics[lane][begin : begin + count]
        self.begun |= {(r.topic, r.offset) for r in records}
        return records

    def accept(self, records: Sequence[Incoming]) -> None:
        """Record that detect has handled these records: they are acknowledged if everything before them is."""
        for record in records:
            self.accepted.add((record.topic, record.offset))
            if record.offset <= self.acked[record.lane]:
                self.acked[record.lane] = max(self.acked[record.lane], record.offset + 1)

    def wake(self, sent: Iterable[IndexHint], *, lane: Lane = "live") -> None:
        for hint in sent:
            self._offset += 1
            record = encode(hint)
            incoming = Incoming(f"index.{lane}", 0, self._offset, record.key, record.value, record.headers, lane)
            for queue in self.hints.values():
                queue.append(incoming)

    def pick_hints(self, sink: str, count: int, rng: Random) -> list[Incoming]:
        """Return some of the hints in random order, one of them perhaps twice. They stay until ``hinted``."""
        queue = self.hints[sink]
        picked = rng.sample(queue, min(count, len(queue)))
        return picked + picked[:1] if rng.random() < 0.2 else picked

    def hinted(self, sink: str, records: Iterable[Incoming]) -> None:
        done = {r.offset for r in records}
        self.hints[sink] = [r for r in self.hints[sink] if r.offset not in done]

    def possible(self, name: str) -> list[DocumentUpserted | None] | None:
        """Return the states that a document may have in the ledger now, for every outcome of the events in flight; None
        if there are too many."""
        mine = {at: e for at, e in self.published.items() if e.external_id == name}
        sure = [e for at, e in mine.items() if at in self.accepted]
        unsure = [e for at, e in mine.items() if at in self.begun - self.accepted]
        if len(unsure) > MOST_UNCERTAIN:
            return None
        return [outcome([*sure, *some]) for n in range(len(unsure) + 1) for some in combinations(unsure, n)]
