"""Freshness certificates: up to which time each source that a caller can read is complete in both stores.

Read before the stores are queried, so that what a search returns is at least as new as its certificates say. The times
are of a source as a whole, as its connector has recorded them (``connectors.runner.freshness``).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from pipeline.stores.postgres import Connection
from query.access.callers import Readable
from query.model import Lag, SourceFreshness

OVERDUE_INTERVALS = 2
"""A source lags when it was not read completely for so many of its intervals."""

# A source counts as readable by a document, because access sets outlive theirs.
_CERTIFICATES = """
    SELECT s.source,
        CASE WHEN f.complete_until <= clock_timestamp() THEN f.complete_until END,
        CASE WHEN f.access_until <= clock_timestamp() THEN f.access_until END,
        CASE WHEN f.groups_until <= clock_timestamp() THEN f.groups_until END, f.listed_at,
        f.source IS NOT NULL
            AND coalesce(f.listed_at < clock_timestamp() - %(intervals)s * f.every_seconds * interval '1 s', true),
        coalesce(f.has_gaps, false), f.generation, f.reopened_at IS NOT NULL, f.source IS NOT NULL
    FROM unnest(%(sources)s::text[]) AS s (source)
    LEFT JOIN connector_freshness f ON f.tenant = %(tenant)s AND f.source = s.source
    WHERE EXISTS (
        SELECT FROM access_sets a CROSS JOIN LATERAL (
            SELECT FROM documents d
            WHERE d.access_id = a.id AND d.tenant = %(tenant)s AND d.source = s.source
                AND d.deleted_at IS NULL AND d.version IS NOT NULL LIMIT 1 OFFSET 0
        ) d
        WHERE a.id = ANY(%(access)s::bigint[]) AND a.tenant = %(tenant)s
            AND starts_with(a.acl_tags[1], s.source || '/')
    )
    ORDER BY s.source
"""


class Recorded(NamedTuple):
    """The record of a source; None: nothing is recorded, or a time that lies in the future."""

    source: str
    complete_until: datetime | None
    access_until: datetime | None
    groups_until: datetime | None
    listed_at: datetime | None
    is_overdue: bool
    has_gaps: bool
    generation: str | None
    is_reopened: bool
    is_listed: bool
    """Whether a connector lists the source, or has done so."""


async def certificates(
    connection: Connection, tenant: str, readable: Readable, sources: Sequence[str], generation: str
) -> tuple[SourceFreshness, ...]:
    """One for each source of which the caller can read a document, by name. sources: only these; all if there are
    none. generation: the one that is searched."""
    mine = {tag.partition("/")[0] for tag in readable.acl_tags}
    cursor = await connection.execute(
        _CERTIFICATES,
        {
            "sources": sorted(mine & set(sources) if sources else mine),
            "tenant": tenant,
            "access": list(readable.access_ids),
            "intervals": OVERDUE_INTERVALS,
        },
    )
    return tuple(certificate(Recorded(*row), generation) for row in await cursor.fetchall())


def certificate(recorded: Recorded, generation: str) -> SourceFreshness:
    """Make the certificate of a source. Pure. Times that are recorded of another generation, or from before a store
    turned out to lack something, are not known."""
    is_valid = recorded.generation == generation and not recorded.is_reopened
    complete = recorded.complete_until if is_valid else None
    listed, groups = recorded.access_until if is_valid else None, recorded.groups_until
    lags: list[Lag] = []
    if recorded.listed_at is not None and (listed is None or listed < recorded.listed_at):
        lags.append("stores")
    if recorded.is_overdue:
        lags.append("source")
    if not recorded.is_listed:
        lags.append("unlisted")
    return SourceFreshness(
        recorded.source,
        complete,
        min(listed, groups) if listed is not None and groups is not None else None,
        tuple(lags),
        recorded.has_gaps,
    )
