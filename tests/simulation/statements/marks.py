"""``pipeline.ledger.kafka_marks``."""

from __future__ import annotations

from typing import Any

from tests.simulation.database import Transaction
from tests.simulation.statements.registry import statement


@statement("INSERT INTO kafka_marks AS m (consumer_group, topic, partition, log_id, offsets, sent_ms, digests, owner)")
async def _claim(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    group, topics, partitions = p
    claimed = []
    for topic, partition in sorted(zip(topics, partitions, strict=True)):
        row = await tx.lock("kafka_marks", group, topic, partition)
        owner, mark = (0, ("", [], [], [])) if row is None else (row["owner"], row["mark"])
        await tx.put("kafka_marks", {"owner": owner + 1, "mark": mark}, group, topic, partition)
        claimed.append((topic, partition, owner + 1, *mark))
    return claimed


@statement("INSERT INTO kafka_marks AS m (consumer_group, topic, partition, owner, log_id, offsets, sent_ms, digests)")
async def _save(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    group, topic, partition, owner, *mark = p
    row = await tx.lock("kafka_marks", group, topic, partition)
    if row is not None and row["owner"] > owner:
        return []
    await tx.put("kafka_marks", {"owner": owner, "mark": tuple(mark)}, group, topic, partition)
    return [(topic, partition)]
