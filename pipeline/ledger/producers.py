"""The registry of producers: who may publish what, and with which public keys (migration 0036)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from pipeline.core.errors import PenstockError
from pipeline.core.producers import Key, Producer, Registry, Term
from pipeline.stores.postgres import Connection


class Refused(PenstockError):
    """The registry was not changed; the message is one line that says why."""


async def load(connection: Connection) -> Registry:
    """Read all producers and keys, those that are no longer in force included."""
    cursor = await connection.execute("SELECT name, allow, valid_from, valid_until FROM producers ORDER BY name")
    producers = {
        name: Producer(name, tuple(allow), Term(since, until)) for name, allow, since, until in await cursor.fetchall()
    }
    cursor = await connection.execute(
        "SELECT key_id, producer, public_key, valid_from, valid_until FROM producer_keys ORDER BY created_at, key_id"
    )
    keys = {
        key_id: Key(key_id, producer, bytes(public_key), Term(since, until))
        for key_id, producer, public_key, since, until in await cursor.fetchall()
        if producer in producers
    }
    return Registry(producers, keys)


async def add(
    connection: Connection,
    name: str,
    allow: Sequence[str],
    key_id: str,
    public_key: bytes,
    *,
    since: datetime | None,
    until: datetime | None,
) -> None:
    """Enrol a producer with its first key. A producer that was removed, or whose term has ended, may be enrolled again
    with another key. Raises Refused when it is enrolled, or the key is or was in the registry."""
    async with connection.transaction():
        row = await (
            await connection.execute(
                "INSERT INTO producers AS p (name, allow, valid_from, valid_until)"
                " VALUES (%s, %s, coalesce(%s, now()), %s) ON CONFLICT (name) DO UPDATE"
                " SET allow = excluded.allow, valid_from = excluded.valid_from, valid_until = excluded.valid_until"
                " WHERE p.valid_until <= now() RETURNING name",
                [name, list(allow), since, until],
            )
        ).fetchone()
        if row is None:
            raise Refused(f"the producer {name} is enrolled: `penstock producer rotate {name}` gives it another key")
        await _end_keys(connection, name)
        await _add_key(connection, name, key_id, public_key)


async def allow(connection: Connection, name: str, patterns: Sequence[str]) -> None:
    """Replace the list of what a producer may publish. Raises Refused when no such producer is enrolled."""
    async with connection.transaction():
        await _lock(connection, name)
        await connection.execute("UPDATE producers SET allow = %s WHERE name = %s", [list(patterns), name])


async def rotate(connection: Connection, name: str, key_id: str, public_key: bytes, overlap: timedelta) -> datetime:
    """Add a key to a producer. Its present keys end after ``overlap``; returns when that is. Raises Refused when no
    such producer is enrolled, or the key is or was in the registry."""
    async with connection.transaction():
        await _lock(connection, name)
        await connection.execute(
            "UPDATE producer_keys SET valid_until = least(valid_until, now() + %s) WHERE producer = %s",
            [overlap, name],
        )
        await _add_key(connection, name, key_id, public_key)
        cursor = await connection.execute("SELECT now() + %s", [overlap])
        row = await cursor.fetchone()
        assert row is not None
        end: datetime = row[0]
        return end


async def remove(connection: Connection, name: str) -> None:
    """End a producer and its keys at once; also keys that are left of a producer whose term has ended. Raises Refused
    when there is nothing to end."""
    async with connection.transaction():
        ended = await connection.execute(
            "UPDATE producers SET valid_until = now() WHERE name = %s AND (valid_until IS NULL OR valid_until > now())",
            [name],
        )
        if await _end_keys(connection, name) + ended.rowcount == 0:
            raise Refused(f"no producer {name} is enrolled: see `penstock producer list`")


async def _end_keys(connection: Connection, name: str) -> int:
    ended = await connection.execute(
        "UPDATE producer_keys SET valid_until = now() WHERE producer = %s"
        " AND (valid_until IS NULL OR valid_until > now())",
        [name],
    )
    return ended.rowcount


async def _lock(connection: Connection, name: str) -> None:
    row = await (
        await connection.execute(
            "SELECT FROM producers WHERE name = %s AND (valid_until IS NULL OR valid_until > now()) FOR UPDATE", [name]
        )
    ).fetchone()
    if row is None:
        raise Refused(f"no producer {name} is enrolled: see `penstock producer list`")


async def _add_key(connection: Connection, name: str, key_id: str, public_key: bytes) -> None:
    """Add a key. Raises Refused when it is or was in the registry, because a removed key must stay removed."""
    cursor = await connection.execute(
        "INSERT INTO producer_keys (key_id, producer, public_key) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
        [key_id, name, public_key],
    )
    if cursor.rowcount == 0:
        raise Refused(f"the key {key_id} is or was enrolled already: make a new one")
