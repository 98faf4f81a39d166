"""Putting an answer into the review queue, without making whoever asked wait for a database that is away."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.stores.postgres import Pool, translated
from query.answers.model import Answer, Numbered
from query.embedder import bounded
from query.review import record
from query.rows import rows_of

RECORD_SECONDS = 2.0


async def enqueue(
    pool: Pool, tenant: str, question: str, answer: Answer, shown: Sequence[Numbered], *, private: bool
) -> None:
    """See ``query.review.record``. Raises PenstockError, within RECORD_SECONDS."""
    async with bounded(RECORD_SECONDS, "Postgres"):
        with translated("the review queue"):
            async with rows_of(pool, tenant) as connection:
                await record(connection, tenant, question, answer, shown, private=private)
