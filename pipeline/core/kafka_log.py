"""Deciding whether a partition's log is still the one that was read: a topic may be recreated, a log may lose its end,
and records may expire unread. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

MOST_MS = 2**63 - 1
"""The latest time that is stored of a record: a producer may write any number into it."""

Kind = Literal["same", "recreated", "truncated", "regrown"]
Moved = Literal["recreated", "truncated", "regrown", "expired"]


class Witness(NamedTuple):
    """A record that was read. If it is still at its offset, the log up to there is the same."""

    offset: int
    sent_ms: int
    digest: int
    """A hash of timestamp, key and value; 64 bits, signed."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The records that a consumer group remembers of a partition."""

    log_id: str
    """Identifies the cluster and the topic; it changes when the topic is created again."""
    witnesses: Sequence[Witness] = ()
    """Handled records in offset order. All records before each of them were handled as well."""


@dataclass(frozen=True, slots=True)
class Log:
    """A partition as Kafka has it now."""

    log_id: str
    begin: int
    end: int
    records: Mapping[int, Witness]
    """The records at the requested offsets; an offset that holds no record is absent."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison."""

    kind: Kind
    read_from: int
    """The offset from which to read again, unless the log is the same: all records before it were handled."""


def witness(offset: int, sent_ms: int, key: bytes | None, value: bytes | None) -> Witness:
    """The witness of one record."""
    sent_ms = min(sent_ms, MOST_MS)
    key, body = key or b"", value or b""
    digest = blake2b(b"%d %d %d " % (sent_ms, len(key), value is not None), digest_size=8)
    digest.update(key)
    digest.update(body)
    return Witness(offset, sent_ms, int.from_bytes(digest.digest(), signed=True))


def judge(mark: Mark, log: Log, *, read: Iterable[Witness] = (), position: int = 0) -> Verdict:
    """Compare what was read with the log as it is now.

    read: records that were read, and perhaps not handled yet. position: the offset after the last one that was read or
    committed. An offset without a record is no evidence: the record may have expired or been compacted away.
    """
    if log.log_id != mark.log_id:
        return Verdict("recreated", log.begin)
    known = [w for w in (*mark.witnesses, *read) if log.begin <= w.offset < log.end]
    differing = min((w.offset for w in known if log.records.get(w.offset, w) != w), default=log.end)
    same = [w.offset for w in mark.witnesses if w.offset < differing and log.records.get(w.offset) == w]
    read_from = max(same) + 1 if same else log.begin
    if log.end < max([position, *(w.offset + 1 for w in (*mark.witnesses, *read))]):
        return Verdict("truncated", read_from)
    return Verdict("same" if differing == log.end else "regrown", read_from)


def expired(unread: Iterable[tuple[int, int]], begin: int) -> int:
    """The number of offsets in these ranges (first, one after the last) that are before the beginning of the log: their
    records were deleted before they were read."""
    return sum(max(0, min(until, begin) - since) for since, until in unread)


def thinned(witnesses: Sequence[Witness]) -> list[Witness]:
    """A selection of these witnesses, in offset order: the newest one, and before it about one for each fourfold
    distance. So after a loss not much more is read again than was lost, and 10^10 records need at most 18 witnesses."""
    by_distance: dict[int, Witness] = {}
    for record in sorted(set(witnesses)):
        by_distance.setdefault((witnesses[-1].offset - record.offset).bit_length() // 2, record)
    newest = witnesses[-1:]
    return sorted({*by_distance.values(), *newest})
