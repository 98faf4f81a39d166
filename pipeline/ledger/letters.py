"""The ledger's list of dead letters: one row each, even for one that was sent twice. The records themselves are on the
topic dead-letters.v1."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Literal, LiteralString
from uuid import UUID

from psycopg.rows import class_row

from pipeline.core.conversations import subject_digest
from pipeline.core.identity import document_id
from pipeline.kafka.producer import Stored
from pipeline.stores.postgres import Connection
from topics.letters import MESSAGE_CHARACTERS, Failure
from topics.messages import IdentityChanged
from topics.registry import CONVERSATIONS

NAME_CHARACTERS = (200, 200, 2_000)
"""The lengths of the longest tenant, source and external id that the wire format allows."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter as it is listed: where its record was, why it is poison, and what became of it."""

    id: str
    """The record's topic:partition:offset."""
    topic: str
    """The record's topic, with the prefix that a shared cluster's topics have."""
    partition: int
    offset: int
    stage: str
    code: str
    message: str
    document_id: UUID | None
    tenant: str | None
    source: str | None
    external_id: str | None
    at: datetime
    attempt: int
    first_failed_at: datetime
    replay_of: str | None
    """The letter whose replay failed again and is this one."""
    value_bytes: int | None
    letter_partition: int | None
    """The letter's partition on dead-letters.v1; None: not known."""
    letter_offset: int | None
    replayed_at: datetime | None
    replayed_partition: int | None
    replayed_offset: int | None
    """The replayed record's offset on ``topic``. None although replayed_at is set: nothing was sent, because something
    newer was known."""
    superseded_by: str | None
    """The letter that the replayed record became when it failed again."""
    dismissed_at: datetime | None = None
    """When an operator decided not to replay it; None: nobody has, or the decision was undone."""
    dismissed_by: str | None = None
    dismissed_reason: str | None = None

    @property
    def waits(self) -> bool:
        """True while it waits for an operator to replay or dismiss it."""
        return self.replayed_at is None and self.dismissed_at is None


@dataclass(frozen=True, slots=True)
class TrailEntry:
    """One decision about a letter."""

    at: datetime
    action: Literal["dismissed", "undone"]
    by: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Filter:
    """The letters to list; None matches any."""

    stage: str | None = None
    code: str | None = None
    tenant: str | None = None
    source: str | None = None
    since: datetime | None = None
    show: Literal["waiting", "dismissed", "all"] = "waiting"
    """waiting: letters that an operator has to replay or dismiss. all: replayed and dismissed ones too."""


_COLUMNS = """
    l.id, l.topic, l.partition, l."offset", l.stage, l.code, l.message, l.document_id, l.tenant, l.source,
    l.external_id, l.at, l.attempt, l.first_failed_at, l.replay_of, l.value_bytes, l.letter_partition, l.letter_offset,
    l.replayed_at, l.replayed_partition, l.replayed_offset, again.id AS superseded_by, l.dismissed_at,
    l.dismissed_by, l.dismissed_reason
"""
_TABLES = """
    dead_letters l LEFT JOIN dead_letters again
        ON again.id = l.topic || ':' || l.replayed_partition || ':' || l.replayed_offset
"""
"""A letter's id is the place of its record, so the letter of a replayed record is found by the place to which the
record was replayed."""
_WHERE: LiteralString = """
    (%(stage)s::text IS NULL OR l.stage = %(stage)s) AND (%(code)s::text IS NULL OR l.code = %(code)s)
    AND (%(tenant)s::text IS NULL OR l.tenant = %(tenant)s) AND (%(source)s::text IS NULL OR l.source = %(source)s)
    AND (%(since)s::timestamptz IS NULL OR l.at >= %(since)s)
"""


_SHOWN: dict[str, LiteralString] = {
    "waiting": " AND l.replayed_at IS NULL AND l.dismissed_at IS NULL",
    "dismissed": " AND l.dismissed_at IS NOT NULL",
    "all": "",
}


def _where(chosen: Filter) -> LiteralString:
    return _WHERE + _SHOWN[chosen.show]


async def insert(
    connection: Connection, sent: Iterable[tuple[Failure, bytes | None, int | None, Stored | None]]
) -> None:
    """Add letters that are on dead-letters.v1 to the list, all of them or none. One that is listed stays as it is.
    sent: (why the record is poison, its key, the size of its value, where the letter is stored)."""
    rows = []
    for failure, key, value_bytes, stored in sorted(sent, key=lambda row: row[0].id):  # no deadlock with another worker
        tenant, source, external_id, document = _names_in_key(failure.topic, key)
        rows.append(
            (
                failure.id,
                failure.topic,
                failure.partition,
                failure.offset,
                failure.stage,
                failure.code,
                storable(failure.message)[:MESSAGE_CHARACTERS],
                document,
                tenant,
                source,
                external_id,
                failure.attempt,
                failure.first_failed_at,
                storable(failure.replay_of) if failure.replay_of else None,
                value_bytes,
                stored.partition if stored else None,
                stored.offset if stored else None,
            )
        )
    await connection.execute(
        'INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, document_id, tenant, source,'
        " external_id, attempt, first_failed_at, replay_of, value_bytes, letter_partition, letter_offset)"
        " SELECT * FROM unnest(%s::text[], %s::text[], %s::integer[], %s::bigint[], %s::text[], %s::text[],"
        " %s::text[], %s::uuid[], %s::text[], %s::text[], %s::text[], %s::integer[], %s::timestamptz[], %s::text[],"
        " %s::bigint[], %s::integer[], %s::bigint[]) ON CONFLICT (id) DO NOTHING",
        [list(column) for column in zip(*rows, strict=True)],
    )


async def page(connection: Connection, chosen: Filter, *, after: str | None, limit: int | None) -> list[Letter]:
    """A page of the matching letters, newest first. after: the id of the previous page's last letter. limit None: all
    letters."""
    cursor = await connection.cursor(row_factory=class_row(Letter)).execute(
        f"SELECT {_COLUMNS} FROM {_TABLES} WHERE {_where(chosen)}"  # noqa: S608 — constants of this module
        " AND (%(after)s::text IS NULL OR (l.at, l.id) < (SELECT at, id FROM dead_letters WHERE id = %(after)s))"
        " ORDER BY l.at DESC, l.id DESC LIMIT %(limit)s".encode(),
        {**asdict(chosen), "after": after, "limit": limit},
    )
    return await cursor.fetchall()


async def counts(connection: Connection, chosen: Filter) -> list[tuple[str, int]]:
    """The number of matching letters by code, the most frequent code first."""
    cursor = await connection.execute(
        f"SELECT l.code, count(*) FROM dead_letters l WHERE {_where(chosen)} GROUP BY 1 ORDER BY 2 DESC, 1".encode(),  # noqa: S608 — constants of this module
        asdict(chosen),
    )
    return [(code, count) for code, count in await cursor.fetchall()]


async def ids(connection: Connection, chosen: Filter) -> list[str]:
    """The ids of the matching letters, in the order in which they were sent to the topic."""
    cursor = await connection.execute(
        f"SELECT l.id FROM dead_letters l WHERE {_where(chosen)}"  # noqa: S608 — constants of this module
        " ORDER BY l.letter_partition, l.letter_offset, l.id".encode(),
        asdict(chosen),
    )
    return [id_ for (id_,) in await cursor.fetchall()]


async def get(connection: Connection, letter_ids: Collection[str]) -> dict[str, Letter]:
    """The letters with these ids that exist, in the order in which they were sent to the topic."""
    cursor = await connection.cursor(row_factory=class_row(Letter)).execute(
        f"SELECT {_COLUMNS} FROM {_TABLES} WHERE l.id = ANY(%s)"  # noqa: S608 — constants of this module
        " ORDER BY l.letter_partition, l.letter_offset, l.id".encode(),
        [[storable(id_) for id_ in letter_ids]],
    )
    return {letter.id: letter for letter in await cursor.fetchall()}


async def mark_replayed(connection: Connection, done: Sequence[tuple[str, Stored | None]]) -> None:
    """Record that letters were replayed: (id, where the record is stored now). None: it was not sent, because something
    newer was known."""
    await connection.execute(
        "UPDATE dead_letters l SET replayed_at = now(), replayed_partition = w.partition, replayed_offset = w.place"
        " FROM unnest(%s::text[], %s::integer[], %s::bigint[]) AS w (id, partition, place) WHERE l.id = w.id",
        [
            [id_ for id_, _ in done],
            [stored.partition if stored else None for _, stored in done],
            [stored.offset if stored else None for _, stored in done],
        ],
    )


async def dismiss(connection: Connection, letter_ids: Collection[str], *, by: str, reason: str) -> list[str]:
    """Dismiss these letters as far as they wait for an operator, and record by whom and why; returns the ids of those
    that were dismissed."""
    cursor = await connection.execute(
        "WITH done AS (UPDATE dead_letters SET dismissed_at = clock_timestamp(), dismissed_by = %(by)s,"
        " dismissed_reason = %(reason)s"
        " WHERE id = ANY(%(ids)s) AND replayed_at IS NULL AND dismissed_at IS NULL RETURNING id)"
        " INSERT INTO dead_letter_trail (letter_id, action, by, reason)"
        " SELECT id, 'dismissed', %(by)s, %(reason)s FROM done RETURNING letter_id",
        {"ids": [storable(id_) for id_ in letter_ids], "by": storable(by), "reason": storable(reason)},
    )
    return [id_ for (id_,) in await cursor.fetchall()]


async def undo_dismissal(
    connection: Connection, letter_ids: Collection[str], *, by: str, reason: str | None
) -> list[str]:
    """Make those of these letters that are dismissed wait for an operator again; returns their ids."""
    cursor = await connection.execute(
        "WITH done AS (UPDATE dead_letters SET dismissed_at = NULL, dismissed_by = NULL, dismissed_reason = NULL"
        " WHERE id = ANY(%(ids)s) AND dismissed_at IS NOT NULL RETURNING id)"
        " INSERT INTO dead_letter_trail (letter_id, action, by, reason)"
        " SELECT id, 'undone', %(by)s, %(reason)s FROM done RETURNING letter_id",
        {
            "ids": [storable(id_) for id_ in letter_ids],
            "by": storable(by),
            "reason": storable(reason) if reason else None,
        },
    )
    return [id_ for (id_,) in await cursor.fetchall()]


async def trail(connection: Connection, id_: str) -> list[TrailEntry]:
    """The decisions about a letter, oldest first."""
    cursor = await connection.execute(
        "SELECT at, action, by, reason FROM dead_letter_trail WHERE letter_id = %s ORDER BY id", [storable(id_)]
    )
    return [TrailEntry(*row) for row in await cursor.fetchall()]


async def newer_identity_known(connection: Connection, message: IdentityChanged) -> bool:
    """Whether the ledger's groups of this principal were observed at the same time as the message's, or later; or the
    principal or the source was forgotten since. The compacted topic would hold the name again for good."""
    cursor = await connection.execute(
        "SELECT EXISTS (SELECT FROM memberships WHERE (tenant, source, principal) = (%(tenant)s, %(source)s, %(name)s)"
        " AND observed_at >= %(at)s)"
        " OR EXISTS (SELECT FROM membership_floors WHERE (tenant, source) = (%(tenant)s, %(source)s)"
        " AND observed_at >= %(at)s)"
        " OR EXISTS (SELECT FROM person_floors WHERE (tenant, subject) = (%(tenant)s, %(subject)s)"
        " AND observed_at >= %(at)s)",
        {
            "tenant": message.tenant,
            "source": message.source,
            "name": message.principal,
            "subject": subject_digest(message.principal),
            "at": message.observed_at,
        },
    )
    row = await cursor.fetchone()
    return bool(row and row[0])


def storable(text: str) -> str:
    """The text as Postgres can store it: without NUL, with lone surrogates escaped."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "backslashreplace").decode()


def _names_in_key(topic: str, key: bytes | None) -> tuple[str | None, str | None, str | None, UUID | None]:
    """(tenant, source, external id, document id) as far as a record's key contains them."""
    parts = (key or b"").decode("utf-8", "replace").replace("\x00", "").split("/", 2)
    if topic.endswith(CONVERSATIONS.name):  # what follows names a person, perhaps with slashes: it is not listed
        tenant = parts[0] if len(parts) > 1 and all(parts[:2]) else ""
        return tenant[: NAME_CHARACTERS[0]] or None, None, None, None
    if len(parts) != 3 or not all(parts):
        return None, None, None, None
    if any(len(part) > most for part, most in zip(parts, NAME_CHARACTERS, strict=True)):
        tenant, source, external_id = (part[:most] for part, most in zip(parts, NAME_CHARACTERS, strict=True))
        return tenant, source, external_id, None
    return parts[0], parts[1], parts[2], document_id(parts[0], parts[1], parts[2])
