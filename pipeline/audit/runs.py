"""The audit's runs in Postgres: their positions, and the differences that they found."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pipeline.audit.compare import Kind, Place
from pipeline.audit.examine import Finding
from pipeline.core.errors import Misconfigured
from pipeline.stores.postgres import Connection

RunScope = Literal["all", "since", "background"]
MAX_RUNS = 20
"""How many finished runs have their differences stored, for each scope of a generation."""
SETTLE_MARGIN_SECONDS = 120
"""``since last`` begins this much earlier, because a transaction commits after the time that it records: later by at
most a statement timeout (60 s) and a little."""
ROUND_SECONDS = 60.0
"""The shortest time between the beginnings of two background rounds, so that a small library is not read constantly."""
PAGE = 500


@dataclass(frozen=True, slots=True)
class Run:
    id: int
    generation: str
    scope: RunScope
    since: datetime | None
    position: UUID | None
    documents: int = 0
    chunks: int = 0
    pending: int = 0


_RUN = "id, generation, scope, since, position, documents, chunks, pending"


async def start(connection: Connection, generation: str, scope: RunScope, since: datetime | None = None) -> Run:
    """Start a run, and delete the differences of old ones. since: its scope is the documents that were accepted or
    confirmed after this time, or are pending; None: all documents."""
    async with connection.transaction():
        await connection.execute(
            "DELETE FROM audit_runs WHERE id IN (SELECT id FROM audit_runs WHERE generation = %s AND scope = %s"
            " ORDER BY id DESC OFFSET %s)",
            [generation, scope, MAX_RUNS],
        )
        cursor = await connection.execute(
            f"INSERT INTO audit_runs (generation, scope, since) VALUES (%s, %s, %s) RETURNING {_RUN}",  # noqa: S608 — constants of this module
            [generation, scope, since],
        )
        run = Run(*_first(await cursor.fetchone()))
        if since is not None:
            await connection.execute(
                "INSERT INTO audit_documents SELECT %(run)s, id FROM ("
                " SELECT id FROM documents WHERE received_at >= %(since)s"
                " UNION SELECT document_id FROM index_state"
                "  WHERE settled_at >= %(since)s AND generation = %(generation)s"
                " UNION SELECT document_id FROM index_state WHERE seq < want_seq AND generation = %(generation)s"
                ") changed",
                {"run": run.id, "since": since, "generation": generation},
            )
    return run


async def unfinished(connection: Connection) -> Run:
    """The newest run that was interrupted, after deleting its differences beyond its position. Raises Misconfigured
    when there is none."""
    cursor = await connection.execute(
        f"SELECT {_RUN} FROM audit_runs WHERE finished_at IS NULL AND scope <> 'background' ORDER BY id DESC LIMIT 1"  # noqa: S608 — constants of this module
    )
    row = await cursor.fetchone()
    if row is None:
        raise Misconfigured("no audit was interrupted: run `penstock audit` without --resume")
    run = Run(*row)
    await connection.execute(
        "DELETE FROM audit_differences WHERE run_id = %s AND (%s::uuid IS NULL OR document_id > %s)",
        [run.id, run.position, run.position],
    )
    return run


async def last_finished(connection: Connection, generation: str) -> datetime:
    """The time that `--since last` refers to. Raises Misconfigured when no audit has finished."""
    cursor = await connection.execute(
        "SELECT max(started_at) - make_interval(secs => %s) FROM audit_runs"
        " WHERE finished_at IS NOT NULL AND generation = %s",
        [SETTLE_MARGIN_SECONDS, generation],
    )
    (since,) = _first(await cursor.fetchone())
    if since is None:
        raise Misconfigured("no audit has finished yet: run `penstock audit` without --since once")
    moment: datetime = since
    return moment


async def total(connection: Connection, run: Run) -> int:
    """The number of documents that a run has to compare, for a progress bar."""
    statement = "SELECT count(*) FROM documents"
    if run.since is not None:
        statement = "SELECT count(*) FROM audit_documents WHERE run_id = %s"
    cursor = await connection.execute(statement, [run.id] if run.since is not None else [])
    (n,) = _first(await cursor.fetchone())
    return int(n)


async def save(connection: Connection, run: Run, findings: Iterable[Finding], *, finished: bool = False) -> None:
    """Record differences, and that all documents up to the run's position were compared."""
    await add(connection, run.id, findings)
    await connection.execute(
        "UPDATE audit_runs SET position = %s, documents = %s, chunks = %s, pending = %s,"
        " finished_at = CASE WHEN %s THEN clock_timestamp() END WHERE id = %s",
        [run.position, run.documents, run.chunks, run.pending, finished, run.id],
    )
    if finished:
        await connection.execute("DELETE FROM audit_documents WHERE run_id = %s", [run.id])


async def add(connection: Connection, run: int, findings: Iterable[Finding]) -> None:
    if values := [(run, f.document, f.store, f.kind, f.chunks, f.external_id) for f in findings]:
        await connection.cursor().executemany(
            "INSERT INTO audit_differences (run_id, document_id, store, kind, chunks, external_id)"
            " VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (run_id, document_id, store, kind)"
            " DO UPDATE SET chunks = excluded.chunks, external_id = excluded.external_id, repaired = false",
            values,
        )


@dataclass(frozen=True, slots=True)
class StoredDifference:
    """A difference of a run, and whether a later comparison no longer found it."""

    finding: Finding
    repaired: bool


async def differences(connection: Connection, run: int) -> AsyncGenerator[StoredDifference, None]:
    """All differences of a run, in the order of document ids, read a page at a time."""
    after: tuple[Any, ...] = (UUID(int=0), "", "")
    while True:
        cursor = await connection.execute(
            "SELECT document_id, store, kind, chunks, external_id, repaired FROM audit_differences"
            " WHERE run_id = %s AND (document_id, store, kind) > (%s, %s, %s)"
            " ORDER BY document_id, store, kind LIMIT %s",
            [run, *after, PAGE],
        )
        page = await cursor.fetchall()
        for *finding, repaired in page:
            yield StoredDifference(Finding(*finding), repaired)
        if len(page) < PAGE:
            return
        after = page[-1][:3]


async def differing(connection: Connection, run: int, after: UUID | None, limit: int) -> list[UUID]:
    """The next documents with a difference that is not repaired."""
    cursor = await connection.execute(
        "SELECT DISTINCT document_id FROM audit_differences WHERE run_id = %s AND NOT repaired"
        " AND (%s::uuid IS NULL OR document_id > %s) ORDER BY document_id LIMIT %s",
        [run, after, after, limit],
    )
    return [id_ for (id_,) in await cursor.fetchall()]


async def replace(connection: Connection, run: int, documents: Sequence[UUID], left: Iterable[Finding]) -> None:
    """Record a second comparison of these documents: differences that are not in ``left`` are repaired."""
    await connection.execute(
        "UPDATE audit_differences SET repaired = true WHERE run_id = %s AND document_id = ANY(%s)",
        [run, list(documents)],
    )
    await add(connection, run, left)


async def counts(connection: Connection, run: int) -> dict[tuple[Place, Kind], tuple[int, int]]:
    """By (store, kind): the number of documents with such a difference, and of those that are not repaired."""
    cursor = await connection.execute(
        "SELECT store, kind, count(*), count(*) FILTER (WHERE NOT repaired) FROM audit_differences WHERE run_id = %s"
        " GROUP BY store, kind",
        [run],
    )
    return {(store, kind): (n, left) for store, kind, n, left in await cursor.fetchall()}


async def background(connection: Connection) -> tuple[Run | None, float]:
    """The unfinished background run, and the seconds until its next page is due. None: there is none, and a new round
    may begin."""
    cursor = await connection.execute(
        f"SELECT {_RUN}, extract(epoch FROM next_at - clock_timestamp())::float8 FROM audit_runs"  # noqa: S608 — constants of this module
        " WHERE scope = 'background' AND finished_at IS NULL"
        " AND generation IN (SELECT name FROM generations WHERE state <> 'retired') ORDER BY id LIMIT 1"
    )
    if row := await cursor.fetchone():
        return Run(*row[:-1]), max(0.0, row[-1])
    return None, 0.0


async def next_round(connection: Connection) -> tuple[str | None, float]:
    """The generation whose last background round began longest ago, and the seconds until its next one is due."""
    cursor = await connection.execute(
        "SELECT g.name, extract(epoch FROM max(r.started_at) + make_interval(secs => %s) - clock_timestamp())::float8"
        " FROM generations g LEFT JOIN audit_runs r ON r.generation = g.name AND r.scope = 'background'"
        " WHERE g.state <> 'retired' GROUP BY g.name ORDER BY max(r.started_at) NULLS FIRST LIMIT 1",
        [ROUND_SECONDS],
    )
    row = await cursor.fetchone()
    return (None, ROUND_SECONDS) if row is None else (row[0], max(0.0, row[1] or 0.0))


async def put_off(connection: Connection, run: int, seconds: float) -> None:
    """Set when the next page of a background run is due. It is stored here, so that all workers share one rate."""
    await connection.execute(
        "UPDATE audit_runs SET next_at = clock_timestamp() + make_interval(secs => %s) WHERE id = %s", [seconds, run]
    )


_NEWEST = """WITH newest AS (
        SELECT r.*, row_number() OVER (PARTITION BY generation ORDER BY id DESC) AS n FROM audit_runs r
        WHERE scope = 'background' AND generation IN (SELECT name FROM generations WHERE state <> 'retired')
    )"""


async def divergent(connection: Connection) -> dict[tuple[Place, Kind], int]:
    """By (store, kind): the number of documents for which the background audit's last comparison found such a
    difference, in the present round or, where that has not come yet, in the one before."""
    cursor = await connection.execute(
        f"""{_NEWEST}
        SELECT d.store, d.kind, count(DISTINCT d.document_id)
        FROM audit_differences d JOIN newest r ON r.id = d.run_id
        JOIN newest latest ON latest.generation = r.generation AND latest.n = 1
        WHERE NOT d.repaired AND (r.n = 1 OR r.n = 2 AND latest.finished_at IS NULL
            AND (latest.position IS NULL OR d.document_id > latest.position))
        GROUP BY d.store, d.kind"""  # noqa: S608 — constants of this module
    )
    return {(store, kind): n for store, kind, n in await cursor.fetchall()}


async def age_seconds(connection: Connection) -> float:
    """The seconds since the background audit last finished a round of the active generation, or began its first one."""
    cursor = await connection.execute(
        "SELECT extract(epoch FROM clock_timestamp() - coalesce(max(finished_at), min(started_at)))::float8"
        " FROM audit_runs WHERE scope = 'background'"
        " AND generation = (SELECT name FROM generations WHERE state = 'active')"
    )
    (age,) = _first(await cursor.fetchone())
    return float(age or 0.0)


def _first(row: tuple[Any, ...] | None) -> tuple[Any, ...]:
    assert row is not None
    return row
