"""The endpoints of webhooks, and the events that wait for each of them (migration 0052)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg.rows import class_row, dict_row

from pipeline.core.errors import PenstockError
from pipeline.core.webhooks import Secret, Subscription
from pipeline.stores.postgres import Connection


class Refused(PenstockError):
    """A change was refused, and nothing was changed. The message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A receiver."""

    name: str
    tenant: str
    sources: tuple[str, ...]
    answers: bool
    """True: it also receives the news of standing questions."""
    conflicts: bool
    """True: it also receives the news of contradictions."""
    url: str
    private: bool
    """It may have an address that is not public, and be reached without TLS."""
    secret: Secret
    old_secret: Secret | None
    """The secret before a rotation, while requests are signed with both."""
    created_at: datetime
    paused_at: datetime | None
    reason: str | None
    failing_since: datetime | None
    failures: int
    wait_seconds: float
    """Until the next attempt, while it fails; 0: it may be tried now."""
    delivered: int
    delivered_at: datetime | None

    @property
    def subscription(self) -> Subscription:
        return Subscription(
            self.name, self.tenant, self.sources, self.created_at, answers=self.answers, conflicts=self.conflicts
        )


_ENDPOINT = """
    SELECT name, tenant, sources, answers, conflicts, url, private, salt, salt_check, old_salt, old_salt_check,
        old_until > clock_timestamp() AS old_holds, created_at, paused_at, reason, failing_since, failures,
        greatest(0, extract(epoch FROM next_at - clock_timestamp()))::float8 AS wait_seconds, delivered, delivered_at
    FROM webhooks WHERE %(name)s::text IS NULL OR name = %(name)s ORDER BY name
"""


async def endpoints(connection: Connection, name: str | None = None) -> list[Endpoint]:
    """All endpoints by name, or the one with this name. Raises Refused where there is none with it."""
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(_ENDPOINT, {"name": name})
        rows = await cursor.fetchall()
    if name is not None and not rows:
        raise Refused(f"no webhook is called {name}: see `penstock webhook list`")
    return [_endpoint(row) for row in rows]


def _endpoint(row: dict[str, Any]) -> Endpoint:
    secret = Secret(bytes(row.pop("salt")), bytes(row.pop("salt_check")))
    old_salt, old_check, old_holds = row.pop("old_salt"), row.pop("old_salt_check"), row.pop("old_holds")
    old = Secret(bytes(old_salt), bytes(old_check)) if old_holds else None
    return Endpoint(
        **{**row, "sources": tuple(row["sources"]), "wait_seconds": row["wait_seconds"] or 0.0},
        secret=secret,
        old_secret=old,
    )


async def add(
    connection: Connection,
    name: str,
    tenant: str,
    sources: Sequence[str],
    url: str,
    secret: Secret,
    *,
    private: bool,
    answers: bool = False,
    conflicts: bool = False,
) -> None:
    """Add an endpoint. answers, conflicts: it also receives the news of standing questions, or of contradictions.
    Raises Refused where the name is taken."""
    cursor = await connection.execute(
        "INSERT INTO webhooks (name, tenant, sources, url, private, salt, salt_check, answers, conflicts)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
        [name, tenant, list(sources), url, private, secret.salt, secret.check, answers, conflicts],
    )
    if cursor.rowcount == 0:
        raise Refused(f"a webhook {name} exists: remove it first, or choose another name")


async def rotate(connection: Connection, name: str, secret: Secret, overlap: timedelta) -> None:
    """Give an endpoint a new secret. Until ``overlap`` is over, requests are signed with the present one too. Raises
    Refused where there is no such endpoint."""
    await _changed(
        connection,
        name,
        "UPDATE webhooks SET old_salt = salt, old_salt_check = salt_check, old_until = clock_timestamp() + %(overlap)s,"
        " salt = %(salt)s, salt_check = %(check)s WHERE name = %(name)s",
        overlap=overlap,
        salt=secret.salt,
        check=secret.check,
    )


async def remove(connection: Connection, name: str) -> None:
    """Remove an endpoint and what waits for it. Raises Refused where there is no such endpoint."""
    await _changed(connection, name, "DELETE FROM webhooks WHERE name = %(name)s")


async def pause(connection: Connection, name: str, reason: str) -> None:
    """Send nothing more to an endpoint; its events wait. Raises Refused where there is no such endpoint."""
    await _changed(
        connection,
        name,
        "UPDATE webhooks SET paused_at = coalesce(paused_at, clock_timestamp()), reason = %(reason)s"
        " WHERE name = %(name)s",
        reason=reason,
    )


async def resume(connection: Connection, name: str) -> int:
    """Send to an endpoint again, at once, and also what was parked. Returns the number of events that wait. Raises
    Refused where there is no such endpoint."""
    async with connection.transaction():
        await _changed(
            connection,
            name,
            "UPDATE webhooks SET paused_at = NULL, reason = NULL, failing_since = NULL, failures = 0, next_at = NULL"
            " WHERE name = %(name)s",
        )
        cursor = await connection.execute(
            "UPDATE webhook_deliveries SET parked_at = NULL, failed_at = NULL, due_at = clock_timestamp()"
            " WHERE webhook = %s",
            [name],
        )
        return cursor.rowcount


async def _changed(connection: Connection, name: str, statement: Any, **values: object) -> None:
    if (await connection.execute(statement, {"name": name, **values})).rowcount == 0:
        raise Refused(f"no webhook is called {name}: see `penstock webhook list`")


# Deliveries


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a topic for an endpoint."""

    webhook: str
    tenant: str
    document_id: UUID
    """The document, standing question or contradiction whose events arrive in order."""
    state: str
    event_id: str
    event: str
    """The value of the Kafka record."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event that waits for its endpoint."""

    id: int
    event_id: str
    state: str
    event: str
    attempts: int
    failing_seconds: float
    """Since its first failure; 0: it has not failed."""


async def enqueue(connection: Connection, events: Sequence[Event]) -> None:
    """Store events, in this order. Those of an endpoint that was removed meanwhile are left out."""
    await connection.cursor().executemany(
        "INSERT INTO webhook_deliveries (webhook, tenant, document_id, state, event_id, event)"
        " SELECT name, tenant, %s, %s, %s, %s FROM webhooks WHERE name = %s AND tenant = %s",
        [(e.document_id, e.state, e.event_id, e.event, e.webhook, e.tenant) for e in events],
    )


async def due(connection: Connection, webhook: str, limit: int) -> list[Delivery]:
    """The deliveries to try now: of each document its oldest one, so that a document's events arrive in order."""
    async with connection.cursor(row_factory=class_row(Delivery)) as cursor:
        await cursor.execute(
            "SELECT id, event_id, state, event, attempts,"
            " coalesce(extract(epoch FROM clock_timestamp() - failed_at), 0)::float8 AS failing_seconds"
            " FROM webhook_deliveries d"
            " WHERE webhook = %(webhook)s AND parked_at IS NULL AND due_at <= clock_timestamp() AND NOT EXISTS ("
            "  SELECT FROM webhook_deliveries earlier WHERE earlier.webhook = d.webhook"
            "  AND earlier.document_id = d.document_id AND earlier.parked_at IS NULL AND earlier.id < d.id)"
            " ORDER BY due_at, id LIMIT %(limit)s",
            {"webhook": webhook, "limit": limit},
        )
        return await cursor.fetchall()


@dataclass(frozen=True, slots=True)
class Failure:
    """A delivery that failed."""

    delivery: int
    reason: str
    wait_seconds: float
    """Until it is tried again."""
    parks: bool
    """It is not tried again until an operator says so."""


async def record(
    connection: Connection,
    webhook: str,
    delivered: Sequence[int],
    failures: Sequence[Failure],
    *,
    wait_seconds: float = 0.0,
    pause: str | None = None,
) -> None:
    """Record the outcomes of one round of requests to an endpoint. wait_seconds: where none succeeded, nothing is sent
    to the endpoint for so long. pause: why nothing more is sent to it at all."""
    reason = failures[0].reason if failures else None
    async with connection.transaction():
        await connection.execute("DELETE FROM webhook_deliveries WHERE id = ANY(%s)", [list(delivered)])
        await connection.cursor().executemany(
            "UPDATE webhook_deliveries SET attempts = attempts + 1, reason = %s,"
            " failed_at = coalesce(failed_at, clock_timestamp()),"
            " due_at = clock_timestamp() + make_interval(secs => %s),"
            " parked_at = CASE WHEN %s THEN clock_timestamp() END WHERE id = %s",
            [(f.reason, f.wait_seconds, f.parks, f.delivery) for f in failures],
        )
        if delivered:
            await connection.execute(
                "UPDATE webhooks SET delivered = delivered + %s, delivered_at = clock_timestamp(),"
                " failing_since = NULL, failures = 0, next_at = NULL, reason = %s"
                " WHERE name = %s AND paused_at IS NULL",
                [len(delivered), reason, webhook],
            )
        elif failures:
            await connection.execute(
                "UPDATE webhooks SET failures = failures + 1, reason = %s,"
                " failing_since = coalesce(failing_since, clock_timestamp()),"
                " next_at = clock_timestamp() + make_interval(secs => %s) WHERE name = %s AND paused_at IS NULL",
                [reason, wait_seconds, webhook],
            )
        if pause is not None:
            await connection.execute(
                "UPDATE webhooks SET paused_at = clock_timestamp(), reason = %s WHERE name = %s AND paused_at IS NULL",
                [pause, webhook],
            )


async def expire(connection: Connection, seconds: float, most: int) -> int:
    """Delete the oldest events that are older than this; returns their number."""
    cursor = await connection.execute(
        "DELETE FROM webhook_deliveries WHERE id IN (SELECT id FROM webhook_deliveries"
        " WHERE created_at < now() - make_interval(secs => %s) ORDER BY created_at LIMIT %s)",
        [seconds, most],
    )
    return cursor.rowcount


async def waiting(connection: Connection) -> dict[str, tuple[int, int, float]]:
    """By endpoint: the events that wait, those that are parked, and the age of the oldest waiting one in seconds."""
    cursor = await connection.execute(
        "SELECT name, count(d.id) FILTER (WHERE parked_at IS NULL), count(parked_at),"
        " coalesce(extract(epoch FROM clock_timestamp() - min(d.created_at) FILTER (WHERE parked_at IS NULL)),"
        " 0)::float8"
        " FROM webhooks LEFT JOIN webhook_deliveries d ON d.webhook = name GROUP BY name"
    )
    return {name: (waits, parked, oldest) for name, waits, parked, oldest in await cursor.fetchall()}


async def listed(connection: Connection, webhook: str | None, limit: int) -> list[dict[str, Any]]:
    """The events that wait or are parked, the oldest first, without their content."""
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(
            "SELECT webhook, event_id, document_id::text, event, state,"
            " created_at, attempts, CASE WHEN parked_at IS NULL THEN due_at END AS next_at, parked_at, reason"
            " FROM webhook_deliveries WHERE %(webhook)s::text IS NULL OR webhook = %(webhook)s"
            " ORDER BY id LIMIT %(limit)s",
            {"webhook": webhook, "limit": limit},
        )
        rows = await cursor.fetchall()
    # Not by Postgres, which refuses JSON with U+0000 anywhere in it. Only events of documents have an external id.
    return [{**row, "external_id": json.loads(row.pop("event")).get("external_id")} for row in rows]
