"""The trail: what a record is, how records are chained, and how a chain is checked. Pure.

Each process writes a chain of its own for each day: the authentication code (HMAC-SHA256) of a record covers its fields
and the code of the record before it. From time to time a *head* records how long a chain is and how it ends. The heads
of all processes are a chain themselves, so that nobody can remove a record without removing every later head.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Literal
from uuid import UUID

Decision = Literal["allowed", "refused", "failed"]
Credential = Literal["token", "key", "delegated", "development", "command", "service"]
"""How the actor was authenticated. delegated: by a service that asked on the person's behalf; command: the user who
runs `penstock` on a machine; service: a process of ours."""

MOST_CHARACTERS = 500
MOST_ACCESS = 1_000
"""Names in the access of a record. The table refuses a record with more."""
MOST_DOCUMENTS = 10_000
"""Documents in a record. The table refuses a record with ten times as many."""
HEAD_SECONDS = 300.0
"""Time between two heads of a chain that grows."""
UNANCHORED = timedelta(minutes=15)
"""A record that is this much younger than the last head of its chain was not written by a process of ours."""
KEY_OVERLAP = timedelta(days=1)
"""How long processes may go on using an older key after the first head with the newest one."""
NO_KEY = "none"


@dataclass(frozen=True, slots=True)
class Record:
    """One action of an actor. It contains no question, no title and no text."""

    at: datetime
    actor: str
    """The principal, the name of an API key, or the user of a command."""
    credential: Credential
    action: str
    tenant: str = ""
    access: tuple[str, ...] = ()
    """The access under which it was done, where the actor named it: ``user:NAME`` or ``tag:NAME``."""
    object: str = ""
    """The object of the action, unless it is a document that was shown: ``KIND:NAME``."""
    documents: tuple[UUID, ...] = ()
    """The documents that were shown, in this order."""
    decision: Decision = "allowed"
    reason: str = ""
    address: str = ""
    request: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", self.at.astimezone(UTC))
        for name in ("actor", "action", "tenant", "object", "reason", "address", "request"):
            object.__setattr__(self, name, storable(getattr(self, name)))
        more = [f"and {left} more"] if (left := len(self.access) - MOST_ACCESS + 1) > 1 else []
        named = self.access[: MOST_ACCESS - 1] if more else self.access
        object.__setattr__(self, "access", (*map(storable, named), *more))

    @property
    def day(self) -> date:
        """The day of the record, in UTC."""
        return self.at.date()

    @property
    def parts(self) -> Sequence[Record]:
        """The record as the table takes it: several, which differ in their documents alone, where it has very many."""
        starts = range(0, len(self.documents), MOST_DOCUMENTS)
        if len(starts) < 2:
            return (self,)
        return [replace(self, documents=self.documents[start : start + MOST_DOCUMENTS]) for start in starts]


def storable(text: str) -> str:
    """The text as Postgres can store and index it: valid, without NUL, at most MOST_CHARACTERS."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "\N{REPLACEMENT CHARACTER}")[:MOST_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A record as it is stored."""

    record: Record
    chain: UUID
    number: int
    """The number of the record within its chain, from 1."""
    process: str
    key_id: str
    mac: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """A statement of how many records a chain had at a time, and how it ended."""

    number: int
    """The number of the head among those of all chains, from 1."""
    at: datetime
    day: date
    chain: UUID
    count: int
    digest: bytes
    """The last record's code."""
    key_id: str
    mac: bytes = b""
    """Covers the fields before it and the code of the head before this one."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys for authentication codes: made with the newest one, and checked with the one that a code names. Without
    a key (None) codes are plain digests, which anybody who may write the table can compute; they are accepted only
    where None is among the keys."""

    newest: str | None = None
    previous: Sequence[str | None] = ()

    @property
    def id(self) -> str:
        return key_id(self.newest)

    def mac(self, label: str, previous: bytes, fields: Sequence[object], *, named: str | None = None) -> bytes | None:
        """The code of these fields with the newest key, or with the key of this id; None: there is no such key."""
        for key in (self.newest, *self.previous):
            if named is None or key_id(key) == named:
                return _mac(key, label, previous, fields)
        return None

    def name(self, person: str) -> str:
        """The ``object`` of a command about a person. Only a holder of the key can tell which person it is."""
        made = self.mac("person", b"", [storable(person)])
        assert made is not None
        return f"person:{made.hex()[:32]}"

    def names(self, person: str) -> list[str]:
        """The person's ``object`` with each key."""
        return [Keys(key).name(person) for key in dict.fromkeys((self.newest, *self.previous))]


def key_id(key: str | None) -> str:
    return NO_KEY if key is None else hashlib.sha256(f"penstock trail key id\n{key}".encode()).hexdigest()[:8]


def _mac(key: str | None, label: str, previous: bytes, fields: Sequence[object]) -> bytes:
    said = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return hmac.digest((key or "").encode(), f"penstock trail {label} 1\n".encode() + previous + b"\n" + said, "sha256")


def seal(keys: Keys, record: Record, chain: UUID, number: int, process: str, previous: bytes) -> Sealed:
    """previous: the code of the chain's record before; of its first one b""."""
    mac = keys.mac("record", previous, _record(record, chain, number, process))
    assert mac is not None
    return Sealed(record, chain, number, process, keys.id, mac)


def seal_head(keys: Keys, head: Head, previous: bytes) -> Head:
    """previous: the code of the head before; of the first one b""."""
    mac = keys.mac("head", previous, _head(head))
    assert mac is not None
    return Head(head.number, head.at, head.day, head.chain, head.count, head.digest, keys.id, mac)


def _record(record: Record, chain: UUID, number: int, process: str) -> list[object]:
    return [
        str(chain),
        number,
        _microseconds(record.at),
        record.actor,
        record.credential,
        record.action,
        record.tenant,
        list(record.access),
        record.object,
        [str(id_) for id_ in record.documents],
        record.decision,
        record.reason,
        record.address,
        record.request,
        process,
    ]


def _head(head: Head) -> list[object]:
    at = _microseconds(head.at)
    return [head.number, at, head.day.isoformat(), str(head.chain), head.count, head.digest.hex()]


def _microseconds(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


# Checking

Kind = Literal[
    "altered",
    "removed",
    "cut-off",
    "chain-removed",
    "day-removed",
    "without-head",
    "head-altered",
    "head-removed",
    "heads-cut-off",
    "unknown-key",
    "outdated-key",
]

MEANS: Mapping[Kind, str] = {
    "altered": "a record was altered, inserted or moved",
    "removed": "records are missing within a chain",
    "cut-off": "records are missing at the end of a chain",
    "chain-removed": "a whole chain is missing",
    "day-removed": "a whole day is missing although its retention has not ended",
    "without-head": "records were added by an unknown process, or heads were removed",
    "head-altered": "a head was altered, inserted or moved",
    "head-removed": "heads are missing",
    "heads-cut-off": "the newest heads are missing, or differ from those stored elsewhere",
    "unknown-key": "made with a key that is not set here, or without one",
    "outdated-key": "made with a key, or without one, after another key had taken its place",
}


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    where: str
    """The record, chain or head."""

    @property
    def line(self) -> str:
        return f"{self.kind}: {self.where}: {MEANS[self.kind]}"


@dataclass(slots=True)
class Covered:
    """The records of a chain that heads cover. It holds 40 bytes for a head: whoever may add heads may add millions."""

    count: int = 0
    at: datetime | None = None
    """The time of the newest head."""
    _counts: array[int] = field(default_factory=lambda: array("q"))
    _digests: bytearray = field(default_factory=bytearray)

    def add(self, head: Head) -> None:
        self.count = max(self.count, head.count)
        self.at = head.at if self.at is None else max(self.at, head.at)
        self._counts.append(head.count)
        self._digests += head.digest.ljust(_CODE_BYTES)[:_CODE_BYTES]

    def digests(self) -> dict[int, set[bytes]]:
        """The codes that records must have, by their numbers."""
        digests: dict[int, set[bytes]] = {}
        for n, count in enumerate(self._counts):
            digest = bytes(self._digests[n * _CODE_BYTES : (n + 1) * _CODE_BYTES])
            digests.setdefault(count, set()).add(digest)
        return digests


_CODE_BYTES = 32


class Heads:
    """Checks the heads, which come in the order of their numbers, and keeps what they say about each day's chains."""

    def __init__(self, keys: Keys, *, oldest: date | None, noted: Collection[tuple[int, bytes]] = ()) -> None:
        """oldest: of an earlier day they may have gone by age (None: none may). noted: numbers of heads and their
        codes, as somebody has kept them outside of the database. All of them count: where heads were removed, others
        get their numbers, and logs then hold two of one number."""
        self.count = 0
        self.of: dict[date, dict[UUID, Covered]] = {}
        """By day and chain."""
        self._keys = keys
        self._oldest = oldest
        self._noted: dict[int, set[bytes]] = {}
        for number, mac in noted:
            self._noted.setdefault(number, set()).add(mac)
        self._first: Head | None = None
        self._previous: Head | None = None
        # By heads with the newest key alone: whoever has an older one can write what he likes.
        self._believed_at: datetime | None = None
        self._replaced_at: datetime | None = None

    def head(self, head: Head) -> Iterator[Finding]:
        self.count += 1
        self.of.setdefault(head.day, {}).setdefault(head.chain, Covered()).add(head)
        if self._noted.pop(head.number, {head.mac}) != {head.mac}:
            yield Finding("heads-cut-off", f"head {head.number}")
        where, previous = f"head {head.number}", self._previous
        if previous is None:
            self._first = head
            known = b"" if head.number == 1 else None  # what came before the first one is not there to compare with
        else:
            if self.count == 2:
                yield from self._before_first(head)
            known = previous.mac if head.number == previous.number + 1 else None
            if known is None:
                yield Finding("head-removed", f"heads {previous.number + 1} to {head.number - 1}")
        if known is not None:
            mac = self._keys.mac("head", known, _head(head), named=head.key_id)
            if mac is None:
                yield Finding("unknown-key", f"{where} (key {head.key_id})")
            elif not hmac.compare_digest(mac, head.mac):
                yield Finding("head-altered", where)
        if head.key_id == self._keys.id:
            self._replaced_at = self._replaced_at or head.at
            self._believed_at = max(self._believed_at or head.at, head.at)
        elif (
            self._replaced_at is not None
            and max(self._believed_at or head.at, head.at) > self._replaced_at + KEY_OVERLAP
        ):
            yield Finding("outdated-key", where)
        self._previous = head

    def end(self) -> Iterator[Finding]:
        if self.count == 1:
            yield from self._before_first(None)
        first = 1 if self._first is None else self._first.number
        for number in sorted(number for number in self._noted if number >= first):
            yield Finding("heads-cut-off", f"head {number}")

    def _before_first(self, second: Head | None) -> Iterator[Finding]:
        """Report removed heads if the first one that is left is not head 1, unless they went by age.

        The first head's own day is no evidence: its code cannot be checked without the head before it, so whoever
        removed that one could have written any day. The second head's code can be checked, and heads are kept a month
        longer than records. Therefore both must be older than the oldest day that records have to exist for."""
        first = self._first
        assert first is not None
        if first.number == 1:
            return
        if self._oldest is None or second is None or max(first.day, second.day) >= self._oldest:
            yield Finding("head-removed", f"heads 1 to {first.number - 1}")


@dataclass
class Day:
    """Checks the records of one day, which come chain by chain in the order of their numbers.

    The heads are to be read before the records: a chain may have grown since, and has not become shorter."""

    keys: Keys
    day: date
    covered: dict[UUID, Covered]
    """The statements of heads about the chains of the day; consumed."""
    looked_at: datetime
    """When the heads were read."""
    records: int = 0
    _of: Covered = field(default_factory=Covered)
    """Those about the present chain."""
    _digests: dict[int, set[bytes]] = field(default_factory=dict)
    _before: Sealed | None = None
    _loose: Sealed | None = None
    """The chain's first record that no head covers although one would have to."""
    _unknown: set[str] = field(default_factory=set)
    """Keys that a finding names."""

    def record(self, sealed: Sealed) -> Iterator[Finding]:
        before = self._before
        if before is None or before.chain != sealed.chain:
            if before is not None:
                yield from self._ended(before)
            before = None
            self._of = self.covered.pop(sealed.chain, Covered())
            self._digests = self._of.digests()
        self.records += 1
        self._before = sealed
        if self._loose is None and self._is_loose(sealed):
            self._loose = sealed
        where = f"record {sealed.number} of chain {sealed.chain} on {self.day}"
        expected = 1 if before is None else before.number + 1
        if sealed.number != expected:
            yield Finding("removed", f"records {expected} to {sealed.number - 1} of chain {sealed.chain} on {self.day}")
            return  # its code cannot be checked: the one before it is not there
        fields = _record(sealed.record, sealed.chain, sealed.number, sealed.process)
        mac = self.keys.mac("record", before.mac if before else b"", fields, named=sealed.key_id)
        if mac is None:
            if sealed.key_id not in self._unknown:
                self._unknown.add(sealed.key_id)
                yield Finding("unknown-key", f"{where} (key {sealed.key_id})")
            return
        if not hmac.compare_digest(mac, sealed.mac) or self._digests.get(sealed.number, {sealed.mac}) != {sealed.mac}:
            yield Finding("altered", where)
        elif before is not None and sealed.key_id != before.key_id:  # a process has one key
            yield Finding("outdated-key", where)

    def end(self) -> Iterator[Finding]:
        if self._before is not None:
            yield from self._ended(self._before)
        for chain, covered in self.covered.items():
            yield Finding("chain-removed", f"chain {chain} on {self.day} ({covered.count} records)")

    def _is_loose(self, sealed: Sealed) -> bool:
        """A first head is committed with a chain's first records, and another when the last one is five minutes old:
        what a process that was killed leaves behind is younger than that."""
        if sealed.number <= self._of.count:
            return False
        newest, at = self._of.at, sealed.record.at
        return at < self.looked_at - UNANCHORED and (newest is None or at - newest > UNANCHORED)

    def _ended(self, last: Sealed) -> Iterator[Finding]:
        where = f"chain {last.chain} on {self.day}"
        if self._of.count > last.number:
            yield Finding("cut-off", f"records {last.number + 1} to {self._of.count} of {where}")
        if self._loose is not None:
            yield Finding("without-head", f"records {self._loose.number} to {last.number} of {where}")
            self._loose = None
