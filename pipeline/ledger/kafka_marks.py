"""The marks: what each consumer group last handled of each partition."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.core.kafka_log import Mark, Witness
from pipeline.stores.postgres import Connection

Place = tuple[str, int]
"""Topic, with its prefix, and partition."""


async def load(connection: Connection, group: str) -> dict[Place, Mark]:
    """All marks of a consumer group."""
    cursor = await connection.execute(
        "SELECT topic, partition, log_id, offsets, sent_ms, digests FROM kafka_marks WHERE consumer_group = %s", [group]
    )
    return {
        (topic, partition): Mark(log_id, tuple(Witness(*one) for one in zip(*columns, strict=True)))
        for topic, partition, log_id, *columns in await cursor.fetchall()
    }


async def save(connection: Connection, group: str, marks: Mapping[Place, Mark]) -> None:
    """Replace the marks of these partitions."""
    await connection.cursor().executemany(
        "INSERT INTO kafka_marks AS m (consumer_group, topic, partition, log_id, offsets, sent_ms, digests)"
        " VALUES (%s, %s, %s, %s, %s::bigint[], %s::bigint[], %s::bigint[])"
        " ON CONFLICT (consumer_group, topic, partition) DO UPDATE SET log_id = excluded.log_id,"
        " offsets = excluded.offsets, sent_ms = excluded.sent_ms, digests = excluded.digests,"
        " marked_at = clock_timestamp()",
        [
            (group, *place, mark.log_id, *([w[n] for w in mark.witnesses] for n in range(3)))
            for place, mark in sorted(marks.items())
        ],
    )
