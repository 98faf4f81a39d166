"""A dead letter on the wire: the original record, with Penstock's headers under Kafka Connect's names after its own.

Penstock's headers come last, and the very last one counts the record's own headers. A record is therefore restored
exactly, whatever names its own headers have (it may have been a dead letter itself). A replayed record is marked in the
same way.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from topics.codec import Headers
from topics.registry import MAX_MESSAGE_BYTES

CONNECT = "__connect.errors."
OURS = "penstock.dead."
REPLAY = "penstock.replay."
OWN_HEADERS = "own-headers"
MESSAGE_CHARACTERS = 500
MAX_ATTEMPTS = 1_000_000
"""Replay headers with more attempts are ignored: anybody can write them, and no row could hold the number."""
LETTER_ID = re.compile(r"[A-Za-z0-9._-]{1,249}:\d{1,10}:\d{1,19}")
"""The ids of letters: a topic's name (which Kafka limits), a partition and an offset."""
FIRST_YEAR, LAST_YEAR = 1971, 9998
"""Replay headers with another time are ignored: a time at the edge of the calendar could be stored but not read."""
HEADER_OVERHEAD_BYTES = 10
"""The two lengths of a header, as variable integers of five bytes each at most."""


class NotALetter(Exception):
    """A record on the dead letter topic was not made by ``seal``. One line says why."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A Kafka record's own bytes."""

    key: bytes | None
    value: bytes | None
    headers: Headers

    @property
    def value_bytes(self) -> int | None:
        return None if self.value is None else len(self.value)

    @property
    def too_large(self) -> bool:
        """True if it is too large for any topic. Such a record arrived compressed."""
        return _size(self.key, self.value, self.headers) > MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class Failure:
    """The position of a record, and why it is a dead letter."""

    topic: str
    partition: int
    offset: int
    stage: str
    code: str
    message: str
    attempt: int
    """1, plus one for each replay that failed again."""
    failed_at: datetime
    first_failed_at: datetime
    replay_of: str | None = None
    """The letter that this record was replayed from."""

    @property
    def id(self) -> str:
        return letter_id(self.topic, self.partition, self.offset)


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter: the failure, and the original record."""

    failure: Failure
    record: RawRecord
    omitted: dict[str, str]
    """The parts that were too large to store (key, value, headers) → "BYTES bytes, sha256 DIGEST"."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The letter that a replayed record comes from, as its headers say."""

    letter: str
    attempt: int
    first_failed_at: datetime


def letter_id(topic: str, partition: int, offset: int) -> str:
    return f"{topic}:{partition}:{offset}"


def seal(record: RawRecord, failure: Failure) -> RawRecord:
    """Return the dead letter of a record. Of a part that makes it larger than any message of the contract, only size
    and digest are stored. (A broker limits *compressed* batches, so larger records can arrive.)"""
    record, omitted = _fitting(record)
    marks: list[tuple[str, str]] = [
        (f"{CONNECT}topic", failure.topic),
        (f"{CONNECT}partition", str(failure.partition)),
        (f"{CONNECT}offset", str(failure.offset)),
        (f"{CONNECT}stage", failure.stage),
        (f"{CONNECT}exception.class.name", failure.code),
        (f"{CONNECT}exception.message", failure.message[:MESSAGE_CHARACTERS]),
        (f"{OURS}attempt", str(failure.attempt)),
        (f"{OURS}failed-at", failure.failed_at.isoformat()),
        (f"{OURS}first-failed-at", failure.first_failed_at.isoformat()),
        *([(f"{OURS}replay-of", failure.replay_of)] if failure.replay_of else []),
        *((f"{OURS}omitted.{part}", summary) for part, summary in omitted.items()),
    ]
    return RawRecord(record.key, record.value, _marked(record.headers, marks, OURS))


def unseal(sealed: RawRecord) -> Letter:
    """Return the letter, with the original record exactly as it was. Raises NotALetter."""
    own, marks = _split(sealed.headers, OURS)
    try:
        failure = Failure(
            marks[f"{CONNECT}topic"],
            int(marks[f"{CONNECT}partition"]),
            int(marks[f"{CONNECT}offset"]),
            marks[f"{CONNECT}stage"],
            marks[f"{CONNECT}exception.class.name"],
            marks[f"{CONNECT}exception.message"],
            int(marks[f"{OURS}attempt"]),
            datetime.fromisoformat(marks[f"{OURS}failed-at"]),
            datetime.fromisoformat(marks[f"{OURS}first-failed-at"]),
            marks.get(f"{OURS}replay-of"),
        )
    except (KeyError, ValueError) as error:
        raise NotALetter("its headers are not those of a dead letter") from error
    prefix = f"{OURS}omitted."
    omitted = {name.removeprefix(prefix): summary for name, summary in marks.items() if name.startswith(prefix)}
    return Letter(failure, RawRecord(sealed.key, sealed.value, own), omitted)


def mark_replay(record: RawRecord, replay: Replay) -> RawRecord:
    """Return the record to send again: unchanged, with headers after its own that name its letter."""
    marks = [
        (f"{REPLAY}of", replay.letter),
        (f"{REPLAY}attempt", str(replay.attempt)),
        (f"{REPLAY}first-failed-at", replay.first_failed_at.isoformat()),
    ]
    return RawRecord(record.key, record.value, _marked(record.headers, marks, REPLAY))


def read_replay(headers: Headers) -> tuple[Headers, Replay | None]:
    """Return a record's own headers, and the mark that ``mark_replay`` has added if it was replayed. Anybody who may
    write a topic can write such headers, and a signature does not cover them: a mark that ``mark_replay`` would not
    write counts as the record's own headers."""
    own, marks = _split(headers, REPLAY)
    try:
        replay = Replay(
            marks[f"{REPLAY}of"],
            int(marks[f"{REPLAY}attempt"]),
            datetime.fromisoformat(marks[f"{REPLAY}first-failed-at"]),
        )
    except (KeyError, ValueError):
        return headers, None
    is_time = replay.first_failed_at.tzinfo is not None and FIRST_YEAR <= replay.first_failed_at.year <= LAST_YEAR
    if not is_time or not 0 < replay.attempt < MAX_ATTEMPTS or not LETTER_ID.fullmatch(replay.letter):
        return headers, None
    return own, replay


def _marked(own: Headers, marks: Sequence[tuple[str, str]], prefix: str) -> Headers:
    encoded = [(name, text.encode("utf-8", "backslashreplace")) for name, text in marks]
    return [*own, *encoded, (prefix + OWN_HEADERS, str(len(own)).encode())]


def _split(headers: Headers, prefix: str) -> tuple[Headers, dict[str, str]]:
    """Return the record's own headers and Penstock's marks; if the last header is not the count, all are its own."""
    if not headers or headers[-1][0] != prefix + OWN_HEADERS:
        return headers, {}
    try:
        count = int(headers[-1][1])
    except (TypeError, ValueError):
        return headers, {}
    if not 0 <= count < len(headers):
        return headers, {}
    marks = {name: (value or b"").decode("utf-8", "replace") for name, value in headers[count:-1]}
    return list(headers[:count]), marks


def _fitting(record: RawRecord) -> tuple[RawRecord, dict[str, str]]:
    """Return the record without the parts that make it too large for the topic, and their summaries: first the value is
    omitted, then the headers, then the key."""
    key, value, headers = record.key, record.value, list(record.headers)
    omitted: dict[str, str] = {}
    if _size(key, value, headers) > MAX_MESSAGE_BYTES and value:
        omitted["value"], value = _described(value), None
    if _size(key, value, headers) > MAX_MESSAGE_BYTES and headers:
        joined = b"".join(name.encode() + b"\0" + (content or b"") + b"\0" for name, content in headers)
        omitted["headers"], headers = _described(joined), []
    if _size(key, value, headers) > MAX_MESSAGE_BYTES and key:
        omitted["key"], key = _described(key), b""
    return RawRecord(key, value, headers), omitted


def _size(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    own = sum(len(name.encode()) + len(content or b"") + HEADER_OVERHEAD_BYTES for name, content in headers)
    return len(key or b"") + len(value or b"") + own


def _described(content: bytes) -> str:
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}"
