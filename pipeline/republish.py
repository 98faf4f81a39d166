"""What the connectors' checkpoints say was published differs from what the ledger has: Kafka's topics were lost with
what nobody had read yet, or Postgres was restored and Kafka has more than the restored checkpoints know. The documents
concerned are marked as in doubt, so that the connectors' next look publishes them as their source has them then.

What the ledger knows stays known, so nothing is published needlessly but memberships, which cost nothing downstream
where they are as they were. Safe to repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.stores.postgres import Connection, Pool, translated

_DIFFERS = """
    SELECT i.tenant, i.source, i.external_id
    FROM connector_items i
    LEFT JOIN documents d USING (tenant, source, external_id)
    LEFT JOIN access_sets a ON a.id = d.access_id
    WHERE i.version IS NOT NULL AND NOT i.gone AND (
        d.id IS NULL OR d.deleted_at IS NOT NULL OR d.version IS DISTINCT FROM i.version
        OR a.acl_tags IS DISTINCT FROM ARRAY(SELECT DISTINCT i.source || '/' || t FROM unnest(i.acl_tags) t ORDER BY 1)
        OR a.required_tags IS DISTINCT FROM
            ARRAY(SELECT DISTINCT i.source || '/' || t FROM unnest(i.required_tags) t ORDER BY 1)
    )
"""
"""Tags as the ledger keeps them: pipeline.core.identity.qualify. An unneeded difference costs one reading."""

_PUBLISH_AGAIN = f"""
    UPDATE connector_items mine
    SET fingerprint = NULL, stat = NULL, revision = NULL, in_doubt_since = clock_timestamp()
    FROM ({_DIFFERS}) theirs
    WHERE (mine.tenant, mine.source, mine.external_id) = (theirs.tenant, theirs.source, theirs.external_id)
"""  # noqa: S608 — constants of this module
_DELETE_AGAIN = """
    UPDATE connector_items i
    SET gone = false, fingerprint = NULL, stat = NULL, revision = NULL, in_doubt_since = clock_timestamp(),
        version = greatest(i.version, d.version)
    FROM documents d
    WHERE i.gone AND d.deleted_at IS NULL AND d.version IS NOT NULL
        AND (d.tenant, d.source, d.external_id) = (i.tenant, i.source, i.external_id)
"""
"""The next sweep lacks it, asks the source, and publishes the delete anew."""
_REMEMBER_AGAIN = """
    INSERT INTO connector_items (tenant, source, scope, external_id, version, swept_at, in_doubt_since)
    SELECT d.tenant, d.source, '', d.external_id, d.version, '-infinity', clock_timestamp()
    FROM documents d JOIN connector_sources s USING (tenant, source)
    WHERE d.deleted_at IS NULL AND d.version IS NOT NULL
    ON CONFLICT DO NOTHING
"""
"""`penstock ingest` and `watch` keep no row of what they deleted, and restored checkpoints none of what was published
after the backup."""
_MEMBERS_AGAIN = "UPDATE connector_principals SET digest = ''"


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What connectors publish again when they look next."""

    documents: int
    deletions: int
    principals: int


async def republish(pool: Pool) -> Forgotten:
    """Have the connectors publish again what the ledger has not. Raises Retryable while Postgres is away."""
    with translated("recover"):
        async with pool.connection() as connection:
            await connection.execute("SET LOCAL statement_timeout = 0")
            documents = await _count(connection, _PUBLISH_AGAIN)
            deletions = await _count(connection, _DELETE_AGAIN) + await _count(connection, _REMEMBER_AGAIN)
            return Forgotten(documents, deletions, await _count(connection, _MEMBERS_AGAIN))


async def _count(connection: Connection, statement: str) -> int:
    return (await connection.execute(statement.encode())).rowcount
