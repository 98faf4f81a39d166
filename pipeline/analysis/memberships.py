"""Waits until the ledger has the groups that messages of ``identities.v1`` name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from pipeline.core.errors import PenstockError
from pipeline.kafka.groups import Log, OffsetsUnavailable, group, groups, lag
from pipeline.runtime.settings import KafkaSettings
from pipeline.stores.postgres import Pool, translated
from topics.messages import IdentityChanged
from topics.registry import IDENTITIES

STAGE = "identities"
APPLY_SECONDS, APPLY_PAUSE_SECONDS = 30.0, 0.2
"""How long a batch waits until the ledger has its changed memberships, whatever their number, and even if the ledger
has refused them; and the pause between two looks."""

_MISSING = """
    SELECT FROM unnest(%(tenants)s::text[], %(sources)s::text[], %(principals)s::text[], %(times)s::timestamptz[])
        AS c (tenant, source, principal, observed_at)
    WHERE NOT EXISTS (
        SELECT FROM memberships m WHERE m.tenant = c.tenant AND m.source = c.source AND m.principal = c.principal
            AND m.observed_at >= c.observed_at
    ) LIMIT 1
"""


def latest() -> datetime:
    """Return until when a batch that begins now waits for memberships."""
    return datetime.now(UTC) + timedelta(seconds=APPLY_SECONDS)


class Memberships:
    """Waits for changed memberships. Law: one that the ledger refuses is waited for no longer than the stage
    ``identities`` takes to read it, if that can be known."""

    def __init__(self, pool: Pool, kafka: KafkaSettings) -> None:
        self._pool = pool
        self._kafka = kafka

    async def until_applied(self, changes: Iterable[IdentityChanged], until: datetime) -> None:
        """Wait until the ledger has these changes, or has refused them, but not after ``until``: what a record says of
        its time is its producer's. Raises Retryable when Postgres is away."""
        newest: dict[tuple[str, str, str], datetime] = {}
        for change in changes:
            key = (change.tenant, change.source, change.principal)
            newest[key] = max(change.observed_at, newest.get(key, change.observed_at))
        if not newest:
            return
        until = min(until, max(newest.values()) + timedelta(seconds=APPLY_SECONDS))
        tenants, sources, principals = (list(values) for values in zip(*newest, strict=True))
        values = {"tenants": tenants, "sources": sources, "principals": principals, "times": list(newest.values())}
        written: dict[tuple[str, int], Log] | None = None
        """The extent of the topic when these changes were in it."""
        are_read = False
        while datetime.now(UTC) < until:
            with translated("memberships"):
                async with self._pool.connection() as connection:
                    if await (await connection.execute(_MISSING, values)).fetchone() is None:
                        return
            if are_read:
                return
            await asyncio.sleep(APPLY_PAUSE_SECONDS)
            if (place := await self._position(until)) is not None:
                written = written or place[0]
                are_read = lag(written, place[1], IDENTITIES.name) == 0

    async def _position(self, until: datetime) -> tuple[dict[tuple[str, int], Log], dict[tuple[str, int], int]] | None:
        """The extent of the topic, and the offsets at which the stage continues; None: they are not known."""
        try:
            async with (
                asyncio.timeout(max(0.0, (until - datetime.now(UTC)).total_seconds())),
                groups(self._kafka) as client,
            ):
                committed = await client.committed(group(STAGE))
                logs = await client.logs([IDENTITIES.name], datetime.now(UTC))
        except (PenstockError, OffsetsUnavailable, TimeoutError):
            return None
        return (logs, committed) if committed else None
