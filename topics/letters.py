"""A dead letter on the wire: the record as it was, and behind its own headers ours, under Kafka Connect's names.

Our headers stand last, and the very last one says how many before them are the record's own. So a record is restored
exactly, whatever names its own headers have (it may have been a dead letter itself). A replayed record is marked alike.
"""

from __future__ import annotations

import hashlib
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
MOST_ATTEMPTS = 1_000_000
"""Anybody may write such headers: a number that no row can hold is not ours."""
HEADER_OVERHEAD_BYTES = 10
"""Two lengths as variable integers, five bytes each at most."""


class NotALetter(Exception):
    """A record on the dead letter topic that ``seal`` did not make. One line."""


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
        """For any topic: it came in compressed."""
        return _size(self.key, self.value, self.headers) > MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a record stood and why it is dead."""

    topic: str
    partition: int
    offset: int
    stage: str
    code: str
    message: str
    attempt: int
    """1, and one more for each replay that failed again."""
    failed_at: datetime
    first_failed_at: datetime
    replay_of: str | None = None
    """The letter that this record was replayed from."""

    @property
    def id(self) -> str:
        return letter_id(self.topic, self.partition, self.offset)


@dataclass(frozen=True, slots=True)
class Letter:
    failure: Failure
    record: RawRecord
    omitted: dict[str, str]
    """What was too large to be kept (key, value, headers) → "BYTES bytes, sha256 DIGEST"."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replayed record says of the letter it comes from."""

    letter: str
    attempt: int
    first_failed_at: datetime


def letter_id(topic: str, partition: int, offset: int) -> str:
    return f"{topic}:{partition}:{offset}"


def seal(record: RawRecord, failure: Failure) -> RawRecord:
    """The letter of a record. Of what is larger than any message of the contract only size and digest are kept (a
    broker limits *compressed* batches: larger records can come in)."""
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
        *((f"{OURS}omitted.{part}", what) for part, what in omitted.items()),
    ]
    return RawRecord(record.key, record.value, _marked(record.headers, marks, OURS))


def unseal(sealed: RawRecord) -> Letter:
    """The record in a letter, exactly as it was. Raises NotALetter."""
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
    omitted = {name.removeprefix(prefix): what for name, what in marks.items() if name.startswith(prefix)}
    return Letter(failure, RawRecord(sealed.key, sealed.value, own), omitted)


def mark_replay(record: RawRecord, replay: Replay) -> RawRecord:
    """The record to send again: its own bytes, and behind its own headers where it comes from."""
    marks = [
        (f"{REPLAY}of", replay.letter),
        (f"{REPLAY}attempt", str(replay.attempt)),
        (f"{REPLAY}first-failed-at", replay.first_failed_at.isoformat()),
    ]
    return RawRecord(record.key, record.value, _marked(record.headers, marks, REPLAY))


def read_replay(headers: Headers) -> tuple[Headers, Replay | None]:
    """A record's own headers, and what ``mark_replay`` put behind them if it was replayed."""
    own, marks = _split(headers, REPLAY)
    try:
        replay = Replay(
            marks[f"{REPLAY}of"],
            int(marks[f"{REPLAY}attempt"]),
            datetime.fromisoformat(marks[f"{REPLAY}first-failed-at"]),
        )
    except (KeyError, ValueError):
        return headers, None
    if replay.first_failed_at.tzinfo is None or not 0 < replay.attempt < MOST_ATTEMPTS:
        return headers, None
    return own, replay


def _marked(own: Headers, marks: Sequence[tuple[str, str]], prefix: str) -> Headers:
    encoded = [(name, text.encode("utf-8", "backslashreplace")) for name, text in marks]
    return [*own, *encoded, (prefix + OWN_HEADERS, str(len(own)).encode())]


def _split(headers: Headers, prefix: str) -> tuple[Headers, dict[str, str]]:
    """The record's own headers and our marks; all of them and none when the last one is not our count."""
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
    """The record without what makes it too large for the topic: first its value, then its headers, then its key."""
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
