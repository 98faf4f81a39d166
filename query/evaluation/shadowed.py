"""What shadowing has measured, kept by the hour: sums, and nothing of any question."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.stores.postgres import Connection

KEPT_DAYS = 90


@dataclass(frozen=True, slots=True)
class Shadowed:
    queries: int
    overlap: float
    """Mean of ``agreement.overlap``; 0 of no queries."""
    agreement: float
    """Mean of ``agreement.rank_biased``; 0 of no queries."""
    failed: int
    """Questions that either generation could not answer whole."""


async def keep(connection: Connection, active: str, candidate: str, measured: tuple[float, float] | None) -> None:
    """measured: overlap and rank-biased agreement of one question; None: it failed. Raises psycopg.Error."""
    overlap, agreement = measured or (0.0, 0.0)
    async with connection.transaction():
        cursor = await connection.execute(
            "INSERT INTO shadow_agreement AS s VALUES (%s, %s, date_trunc('hour', now()), %s, %s, %s, %s)"
            " ON CONFLICT (active, candidate, hour) DO UPDATE SET queries = s.queries + excluded.queries,"
            " overlap = s.overlap + excluded.overlap, agreement = s.agreement + excluded.agreement,"
            " failed = s.failed + excluded.failed RETURNING queries + failed = 1",
            [active, candidate, int(measured is not None), overlap, agreement, int(measured is None)],
        )
        if (row := await cursor.fetchone()) and row[0]:  # once an hour
            await connection.execute(
                "DELETE FROM shadow_agreement WHERE hour < now() - make_interval(days => %s)", [KEPT_DAYS]
            )


async def shadowed(connection: Connection, active: str, candidate: str) -> Shadowed:
    """All that is kept of these two, whichever of them was the active one. Raises psycopg.Error."""
    cursor = await connection.execute(
        "SELECT coalesce(sum(queries), 0)::bigint, coalesce(sum(overlap) / nullif(sum(queries), 0), 0),"
        " coalesce(sum(agreement) / nullif(sum(queries), 0), 0), coalesce(sum(failed), 0)::bigint"
        " FROM shadow_agreement WHERE (active, candidate) IN ((%(one)s, %(other)s), (%(other)s, %(one)s))",
        {"one": active, "other": candidate},
    )
    [row] = await cursor.fetchall()
    return Shadowed(*row)
