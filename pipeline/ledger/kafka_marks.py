"""Marks: for each partition the records that a consumer group handled last, and the owner that may update them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipeline.core.kafka_log import Mark, Witness
from pipeline.stores.postgres import Connection

Place = tuple[str, int]
"""Topic, with its prefix, and partition."""


async def claim(connection: Connection, group: str, places: Collection[Place]) -> dict[Place, tuple[int, Mark | None]]:
    """Become the owner of the marks of these partitions; from now on earlier owners can store none. Returns for each
    the owner's number, which is greater than any earlier owner's, and its mark (None: no record was handled yet)."""
    cursor = await connection.execute(
        "INSERT INTO kafka_marks AS m (consumer_group, topic, partition, log_id, offsets, sent_ms, digests, owner)"
        " SELECT %s, topic, partition, '', '{}', '{}', '{}', 1 FROM unnest(%s::text[], %s::integer[])"
        " given (topic, partition) ORDER BY topic, partition"
        " ON CONFLICT (consumer_group, topic, partition) DO UPDATE SET owner = m.owner + 1"
        " RETURNING topic, partition, owner, log_id, offsets, sent_ms, digests",
        [group, [topic for topic, _ in places], [partition for _, partition in places]],
    )
    return {
        (topic, partition): (
            owner,
            Mark(log_id, tuple(Witness(*witness) for witness in zip(*columns, strict=True))) if log_id else None,
        )
        for topic, partition, owner, log_id, *columns in await cursor.fetchall()
    }


async def save(connection: Connection, group: str, marks: Mapping[Place, tuple[int, Mark]]) -> set[Place]:
    """Replace the marks of these partitions; each value is (owner's number, mark). Returns the partitions whose marks
    were stored: a partition that has a later owner is left as it is."""
    cursor = connection.cursor()
    await cursor.executemany(
        "INSERT INTO kafka_marks AS m (consumer_group, topic, partition, owner, log_id, offsets, sent_ms, digests)"
        " VALUES (%s, %s, %s, %s, %s, %s::bigint[], %s::bigint[], %s::bigint[])"
        " ON CONFLICT (consumer_group, topic, partition) DO UPDATE SET owner = excluded.owner,"
        " log_id = excluded.log_id, offsets = excluded.offsets, sent_ms = excluded.sent_ms, digests = excluded.digests,"
        " marked_at = clock_timestamp() WHERE m.owner <= excluded.owner RETURNING topic, partition",
        [
            (group, *place, owner, mark.log_id, *([w[n] for w in mark.witnesses] for n in range(3)))
            for place, (owner, mark) in sorted(marks.items())
        ],
        returning=True,
    )
    stored: set[Place] = set()
    is_more = bool(marks)
    while is_more:
        stored.update(await cursor.fetchall())
        is_more = bool(cursor.nextset())
    return stored
