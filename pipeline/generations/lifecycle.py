"""The choice of the active generation: cutting over, rolling back, retiring. Each is one transaction."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime

from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.core.model import Generation, Quantisation, VectorIndex
from pipeline.generations.building import POLL_SECONDS, Builder, patiently, stuck
from pipeline.ledger import builds, generations
from pipeline.ledger.builds import FOLLOWED_SECONDS, Build
from pipeline.stores.postgres import Connection, translated


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a generation."""

    name: str
    state: str
    since: datetime
    model: str
    dimensions: int
    chunk_tokens: int
    documents: int
    """The number of documents that are in it."""
    of: int
    chunks: int
    pending: int
    """The number of pairs of document and store that have not reached the desired state."""
    failed: int
    lagging: int
    """The number of pending ones that failed or are older than a minute, so that they are not just live traffic."""
    tokens: int
    """The tokens that its model has read for the build."""
    bytes: int
    """The size of its table with its indexes."""
    ready: bool
    """For a build: whether it may be cut over to."""
    vectors: VectorIndex
    quantisation: Quantisation


@dataclass(frozen=True, slots=True)
class Switched:
    active: str
    previous: str
    """The name of the previous generation. It is still written, so that a rollback is never stale."""
    retired: list[str]


@dataclass(frozen=True, slots=True)
class Retired:
    name: str
    left: PenstockError | None = None
    """The reason why not all of it could be removed. The next command that clears generations removes the rest."""


async def standings(connection: Connection) -> list[Standing]:
    """The state of every generation that still has rows or stores, the oldest first."""
    with translated("generations"):
        cursor = await connection.execute(
            """
            SELECT g.name, g.state, g.since, g.model, g.dimensions, (g.params ->> 'target')::int,
                CASE WHEN g.state = 'building' AND b.filled_at IS NULL THEN b.filled ELSE d.count END, d.count,
                (SELECT coalesce(sum(cardinality(m.chunk_ids)), 0)::bigint FROM manifests m
                    WHERE m.generation = g.name),
                s.pending, s.failed, s.lagging, coalesce(b.tokens, 0),
                coalesce(pg_total_relation_size(to_regclass(quote_ident(g.chunk_table))), 0),
                b.ready_at IS NOT NULL AND b.replaces @> '{vectors,keywords}', g.vectors,
                g.quantisation
            FROM generations g LEFT JOIN builds b ON b.generation = g.name
            CROSS JOIN (SELECT count(*) FROM documents) d (count)
            CROSS JOIN LATERAL (
                SELECT count(*), count(*) FILTER (WHERE i.attempts > 0), count(*) FILTER (WHERE i.attempts > 0
                    OR i.pending_since < clock_timestamp() - make_interval(secs => %s))
                FROM index_state i WHERE i.generation = g.name AND i.seq < i.want_seq
            ) s (pending, failed, lagging)
            WHERE g.state <> 'retired' OR g.cleared_at IS NULL
            ORDER BY g.created_at, g.name
            """,
            [FOLLOWED_SECONDS],
        )
        rows = await cursor.fetchall()
    return [Standing(*row) for row in rows]


async def candidate(connection: Connection, name: str | None = None) -> Generation:
    """The generation to compare with the active one, or to cut over to. Raises Misconfigured."""
    with translated("generations"):
        living = [g for g in await generations.writable(connection) if g.state != "active"]
    candidates = [g for g in living if (g.state == "building" if name is None else g.name == name)]
    if not candidates:
        there = ", ".join(f"{g.name} ({g.state})" for g in living) or "none"
        raise Misconfigured(
            f"there is no non-active generation {name} (non-active: {there})"
            if name
            else f"no generation is being built (non-active: {there}): start with `penstock generation build`"
        )
    return candidates[0]


async def require_complete(connection: Connection) -> Build:
    """The build that may be cut over to. Raises Misconfigured when there is none, Retryable while it lacks anything."""
    with translated("generations"):
        build = await builds.under_way(connection)
    if build is None:
        await candidate(connection)
        raise Misconfigured("no generation is being built")
    if len(build.replaces) < 2:
        raise Misconfigured(builds.occupied(build))
    if build.ready_at is None:
        raise Misconfigured(
            f"generation {build.generation.name} is not complete: run `penstock generation build --wait`, which goes on"
            " with it"
        )
    with translated("generations"):
        await _require_followed(connection, build)
    return build


async def _require_followed(connection: Connection, build: Build) -> None:
    if held := (await builds.outstanding(connection, build)).held:
        if known := await stuck(connection, build):
            raise Retryable(
                f"{known}: nothing was changed. Correct that, or run `penstock generation build --wait"
                " --without-failing`"
            )
        documents = "1 document is" if held == 1 else f"{held:,} documents are"
        raise Retryable(
            f"{documents} not in both stores of generation {build.generation.name} yet: nothing was changed. Run it"
            " again in a moment; `penstock generation list` shows what failed"
        )


async def cutover(connection: Connection) -> Switched:
    """Make the generation that was built the active one, once it has everything that was accepted before. Raises
    Misconfigured, or Retryable if something is still missing after ``FOLLOWED_SECONDS``; then nothing was changed."""
    build = await require_complete(connection)
    name = build.generation.name
    with translated("generations"):
        before = {g.name for g in await generations.writable(connection)}
        active = await generations.active(connection)
        now = await builds.moment(connection)
        while await _switch(connection, build, now):
            await _require_followed(connection, build)
            await asyncio.sleep(POLL_SECONDS)
        after = {g.name for g in await generations.writable(connection)}
    return Switched(name, active.name, sorted(before - after))


async def _switch(connection: Connection, build: Build, before: datetime) -> int:
    """Run ``builds.cut_over``, after a look without locks at whether anything would delay it: writers wait during the
    cut-over itself."""
    if held := (await builds.outstanding(connection, build, before=before)).held:
        return held
    return await patiently(connection, lambda: builds.cut_over(connection, build, before=before, keep_origin=True))


async def previous(connection: Connection) -> Generation:
    """The generation that a rollback would make active. Raises Misconfigured when there is none."""
    with translated("generations"):
        living = await generations.writable(connection)
    for generation in living:
        if generation.state == "previous":
            return generation
    raise Misconfigured("there is no previous generation to go back to")


async def rollback(connection: Connection, *, force: bool = False) -> Switched:
    """Make the previous generation active again; a second rollback returns to this one. Raises Misconfigured if there
    is none, and, unless ``force``, Retryable if it has not followed the ledger."""

    async def switch() -> Switched:
        async with builds.changing(connection):
            back = await previous(connection)
            lagging = await _lagging(connection, back)
            if lagging and not force:
                raise Retryable(
                    f"{lagging} changes are not in generation {back.name} yet, so searches would be stale:"
                    " nothing was changed. Run it again in a moment, or with --force"
                )
            active = await generations.active(connection)
            await builds.make_active(connection, back, active, keep=True)
        return Switched(back.name, active.name, [])

    return await patiently(connection, switch)


async def _lagging(connection: Connection, generation: Generation) -> int:
    """The number of changes that it should have followed by now, which are not just live traffic."""
    cursor = await connection.execute(
        "SELECT count(*) FROM index_state WHERE generation = %s AND seq < want_seq"
        " AND (attempts > 0 OR pending_since < clock_timestamp() - make_interval(secs => %s))",
        [generation.name, FOLLOWED_SECONDS],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def retire(builder: Builder, name: str | None = None) -> Retired:
    """Retire a generation, and remove its rows, table and index. Raises Misconfigured for the active one, or another
    error that prevents it; then nothing was changed. If it is killed, the next command that builds or retires a
    generation completes it."""
    connection = builder.connection
    with translated("generations"):
        async with builds.changing(connection):
            known = {g.name: g for g in await generations.every(connection)}
            living = [g for g in known.values() if g.state in ("previous", "building")]
            if name is None:
                if len(living) != 1:
                    there = ", ".join(f"{g.name} ({g.state})" for g in living) or "there is none"
                    raise Misconfigured(f"name the generation to retire: {there}")
                name = living[0].name
            if name not in known:
                raise Misconfigured(f"there is no generation {name}: see `penstock generation list`")
            if known[name].state == "active":
                raise Misconfigured(f"generation {name} is active: cut over to another one, or roll back, first")
            build = await builds.under_way(connection)
            if build is not None and build.origin.name == name:  # the build's limits are computed from its tokens
                raise Misconfigured(
                    f"generation {build.generation.name} is being built from {name}: cut over to it, or retire it,"
                    " first"
                )
            await connection.execute(
                "UPDATE generations SET state = 'retired', since = clock_timestamp() WHERE name = %s", [name]
            )
    try:
        with translated("generations"):
            await builder.clear(after_queries=True)  # a comparison may have pinned it
    except PenstockError as error:
        return Retired(name, error)
    return Retired(name)
