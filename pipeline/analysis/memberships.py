"""Waits until the ledger has the groups that messages of ``identities.v1`` name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from pipeline.stores.postgres import Pool, translated
from topics.messages import IdentityChanged

APPLY_SECONDS, APPLY_PAUSE_SECONDS = 30.0, 0.2
"""How long a changed membership may take until the ledger has it. What was refused there is not waited for longer, nor
do several in one batch take longer."""

_MISSING = """
    SELECT FROM unnest(%(tenants)s::text[], %(sources)s::text[], %(principals)s::text[], %(times)s::timestamptz[])
        AS c (tenant, source, principal, observed_at)
    WHERE NOT EXISTS (
        SELECT FROM memberships m WHERE m.tenant = c.tenant AND m.source = c.source AND m.principal = c.principal
            AND m.observed_at >= c.observed_at
    ) LIMIT 1
"""


def latest() -> datetime:
    """Until when the memberships of a batch that begins now are waited for."""
    return datetime.now(UTC) + timedelta(seconds=APPLY_SECONDS)


async def until_applied(pool: Pool, changes: Iterable[IdentityChanged], until: datetime) -> None:
    """Wait until the ledger has these changes, but not after ``until``: what a record says of its time is its
    producer's, and the ledger may refuse it. Raises Retryable when Postgres is away."""
    newest: dict[tuple[str, str, str], datetime] = {}
    for change in changes:
        key = (change.tenant, change.source, change.principal)
        newest[key] = max(change.observed_at, newest.get(key, change.observed_at))
    if not newest:
        return
    until = min(until, max(newest.values()) + timedelta(seconds=APPLY_SECONDS))
    tenants, sources, principals = (list(values) for values in zip(*newest, strict=True))
    values = {"tenants": tenants, "sources": sources, "principals": principals, "times": list(newest.values())}
    while datetime.now(UTC) < until:
        with translated("memberships"):
            async with pool.connection() as connection:
                if await (await connection.execute(_MISSING, values)).fetchone() is None:
                    return
        await asyncio.sleep(APPLY_PAUSE_SECONDS)
