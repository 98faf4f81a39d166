"""``penstock ingest`` and ``watch``: folders and files → Kafka, and waiting until both stores have them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer
from rich.progress import Progress as Bars

from cli.options import Tenant
from cli.output import Json, print_json, progress_bars, stderr, stdout
from cli.readers import readers, tag
from pipeline.core import publication
from pipeline.core.errors import Retryable
from pipeline.core.identity import INGESTED, document_id
from pipeline.core.publication import MAX_PUBLICATIONS, Publication

if TYPE_CHECKING:
    from connectors.folder.checkpoint import Checkpoint
    from connectors.folder.connector import FolderConnector
    from connectors.protocol import ScanReport
    from pipeline.observability.lineage import Run
    from pipeline.stores.postgres import Pool


Paths = Annotated[list[Path], typer.Argument(help="Folders or files.", show_default=False, exists=True)]
Acl = Annotated[
    list[str] | None,
    typer.Option(
        "--acl",
        help="Access tag whose holders may read. Repeatable: any one is enough. Default: your own, user:NAME.",
        parser=tag,
        metavar="TAG",
    ),
]
Required = Annotated[
    list[str] | None,
    typer.Option("--required", help="Access tag that every reader must hold. Repeatable.", parser=tag, metavar="TAG"),
]
MassDelete = Annotated[
    bool, typer.Option("--allow-mass-delete", help="Confirm that a large part of the folder was deleted on purpose.")
]

REFUSALS = {"mass_delete", "root_empty", "policy"}
"""Problems for which something was not done that an operator has to confirm: exit code 1."""
WARNINGS = REFUSALS | {"nobody"}
POLL_SECONDS, POLL_PAUSE, MAX_POLL_SECONDS = 0.03, 5, 2.0
"""The pause between two looks at what is searchable: POLL_PAUSE times the duration of the last look, but at least
POLL_SECONDS and at most MAX_POLL_SECONDS."""
POLL_IDS = 2_000
WATCH_FINISH_SECONDS, WATCH_END_SECONDS = 4.0, 10.0
"""How long `watch` goes on with a scan when it is stopped, before that is cancelled, as a kill would; and the longest
time that it takes to end where Kafka or Postgres is gone. The next one publishes what is then in doubt."""


@dataclass
class Tally:
    """Numbers of documents by outcome; times in seconds."""

    indexed: int = 0
    dead: int = 0
    chunks: int = 0
    embedded: int = 0


def ingest(
    paths: Paths,
    acl: Acl = None,
    required: Required = None,
    tenant: Tenant = "default",
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when every document is searchable, or has failed.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Maximum seconds that --wait waits; 0: no limit.", min=0)
    ] = 0,
    allow_mass_delete: MassDelete = False,
    json_output: Json = False,
) -> None:
    """Publish folders or files to Kafka. Files that did not change since the last run are not published again.

    Files that are gone from a folder are deleted from the index. Files that cannot be read are reported, and their
    last indexed content stays. With --json, "token" names what was published: `penstock search --at-least TOKEN` waits
    until both stores have it (null if it is more than 10,000 documents: use --wait). Exit code 1: a document failed
    (with --wait), a mass deletion needs your confirmation, or a .penstock.toml is invalid.

    Example: penstock ingest docs/ --acl staff --wait
    """
    may_read = readers(acl, required)
    result, report = asyncio.run(
        _ingest(
            paths,
            may_read,
            required,
            tenant,
            wait=wait,
            timeout=timeout,
            mass_delete=allow_mass_delete,
            quiet=json_output,
        )
    )
    _print_problems(report)
    if json_output:
        print_json(result)
    else:
        stdout.print(
            f"published {result['published']}, unchanged {result['unchanged']}, skipped {len(report.problems)}"
            + (
                f"; searchable {result['indexed']} documents, {result['chunks']} chunks, {result['embedded']} embedded,"
                f" {result['dead']} failed"
                if wait
                else ""
            )
            + f" in {result['seconds']:.1f} s"
        )
    if (wait and result["dead"]) or any(p.code in REFUSALS for p in report.problems):
        raise typer.Exit(1)


async def _ingest(
    paths: list[Path],
    acl: list[str],
    required: list[str] | None,
    tenant: str,
    *,
    wait: bool,
    timeout: float,
    mass_delete: bool,
    quiet: bool,
) -> tuple[dict[str, object], ScanReport]:
    from pipeline.observability import lineage, tracing

    start = perf_counter()
    tally = Tally()
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.running("ingest"))
        stack.enter_context(lineage.running())
        connector, source, checkpoint, pool = await _connector(
            stack, paths, acl, required, tenant, mass_delete=mass_delete
        )
        run = stack.enter_context(await _reported(pool, paths, tenant, source, wait=wait))
        since = await _database_time(pool)
        before = await _known_before(checkpoint, tenant, source, paths) if wait else []
        embedded_before = await _embedded(pool, before)
        bars = stack.enter_context(progress_bars(quiet=quiet))
        task = bars.add_task("reading", total=None)
        report = await connector.scan(lambda p: bars.update(task, total=p.listed or None, completed=p.done))
        if lost := await _lost(pool, tenant, source, report):
            await connector.forget(lost)
            again = await connector.scan(None)
            report = again.after(report)
        if wait:
            tally = await _until_searchable(pool, bars, tenant, source, report, since, timeout)
            gone = set(before) - set(_expected(tenant, source, report))
            tally.embedded += await _embedded(pool, list(gone)) - embedded_before
        run.wrote(len(report.published), *([tally.chunks] * 2 if wait else []))
    result: dict[str, object] = {
        "published": len(report.published),
        "unchanged": len(report.unchanged),
        "indexed": tally.indexed,
        "dead": tally.dead,
        "chunks": tally.chunks,
        "embedded": tally.embedded,
        "seconds": round(perf_counter() - start, 3),
        "token": _token(_changes(tenant, source, report)),
    }
    return result, report


async def _reported(
    pool: Pool, paths: list[Path], tenant: str, source: str, *, wait: bool
) -> AbstractContextManager[Run]:
    """The load as a run in lineage. Its outputs are the ledger and, with ``wait``, both stores."""
    from pipeline.ledger import generations
    from pipeline.observability import lineage
    from pipeline.runtime.settings import load
    from pipeline.stores import datasets

    name = f"load.{tenant}.{source}"
    if not lineage.is_on():
        return lineage.job(name, "LOAD")
    settings = load()
    outputs = [datasets.ledger(settings.postgres)]
    if wait:
        async with pool.connection() as connection:
            active = await generations.active(connection)
        outputs += [datasets.vectors(settings.postgres, active), datasets.keywords(settings.elasticsearch, active)]
    return lineage.job(name, "LOAD", inputs=map(datasets.folder, paths), outputs=outputs)


async def _database_time(pool: Pool) -> datetime:
    """The time by the database's clock, to be compared with the times that the database writes."""
    async with pool.connection() as connection:
        row = await (await connection.execute("SELECT clock_timestamp()")).fetchone()
    assert row is not None
    at: datetime = row[0]
    return at


async def _connector(
    stack: AsyncExitStack,
    paths: list[Path],
    acl: list[str],
    required: list[str] | None,
    tenant: str,
    *,
    mass_delete: bool,
) -> tuple[FolderConnector, str, Checkpoint, Pool]:
    """Open the folder connector on the running services. Returns it with its source, its checkpoint and the pool, all
    closed with the stack."""
    from connectors.folder.checkpoint import Checkpoint
    from connectors.folder.connector import FolderConnector
    from connectors.folder.options import FolderOptions
    from pipeline.kafka.client import publisher
    from pipeline.runtime.settings import load
    from pipeline.stores.postgres import open_pool

    settings = load()
    options = FolderOptions(
        tenant=tenant,
        source=INGESTED,
        acl_tags=tuple(acl),
        required_tags=tuple(required or ()),
        allow_mass_delete=mass_delete,
    )
    pool = await stack.enter_async_context(open_pool(settings.postgres))
    kafka = await stack.enter_async_context(publisher(settings))
    checkpoint = Checkpoint(pool)
    connector = FolderConnector(paths, options=options, producer=kafka, checkpoint=checkpoint)
    return connector, options.source, checkpoint, pool


def _expected(tenant: str, source: str, report: ScanReport) -> dict[UUID, Publication]:
    waiting = {
        id_: publication.content(id_, version)
        for name, version in report.unchanged
        for id_ in [document_id(tenant, source, name)]
    }
    return waiting | {change.document_id: change for change in _changes(tenant, source, report)}


def _changes(tenant: str, source: str, report: ScanReport) -> list[Publication]:
    """The changes that were published, in order."""
    changes = []
    for event in report.published:
        id_ = document_id(tenant, source, event.external_id)
        match event.kind:
            case "deleted":
                changes.append(publication.deletion(id_, event.observed_at))
            case "access":
                changes.append(publication.access(id_, event.observed_at))
            case _:
                changes.append(publication.content(id_, event.version))
    return changes


def _token(changes: list[Publication]) -> str | None:
    """The token of the changes, for ``search --at-least``; None if they are too many for one."""
    return publication.token(changes) if len(changes) <= MAX_PUBLICATIONS else None


async def _lost(pool: Pool, tenant: str, source: str, report: ScanReport) -> list[str]:
    """The documents that were published according to the checkpoint, and that the ledger does not know: their events
    are still in a topic, or lost."""
    from pipeline.ledger.arrivals import known

    names = [name for name, _ in report.unchanged]
    lost: list[str] = []
    async with pool.connection() as connection:
        for start in range(0, len(names), POLL_IDS):
            ids = {document_id(tenant, source, name): name for name in names[start : start + POLL_IDS]}
            there = await known(connection, list(ids))
            lost += [name for id_, name in ids.items() if id_ not in there]
    return lost


async def _until_searchable(
    pool: Pool, bars: Bars, tenant: str, source: str, report: ScanReport, since: datetime, limit: float
) -> Tally:
    """Wait until both stores hold what the ledger wants of every document, or it failed and was set aside."""
    from pipeline.ledger.arrivals import arrivals, dead_since

    tally = Tally()
    waiting = _expected(tenant, source, report)
    everything, total = list(waiting), len(waiting)
    task = bars.add_task("searchable", total=total)
    deadline = perf_counter() + limit if limit else None
    while waiting:
        began = perf_counter()
        ids = list(islice(waiting, POLL_IDS))
        async with pool.connection() as connection:
            there = await arrivals(connection, ids)
            dead = await dead_since(connection, ids, since)
        for id_ in ids:
            arrival, expected = there.get(id_), waiting.pop(id_)
            if id_ in dead or (arrival is not None and arrival.set_aside):
                tally.dead += 1
            elif arrival is not None and arrival.has(expected) and arrival.settled:
                tally.indexed += arrival.searchable
                tally.chunks += arrival.chunks if arrival.searchable else 0
            else:
                waiting[id_] = expected  # behind the others: every document gets its turn
        bars.update(task, completed=total - len(waiting))
        if waiting and deadline and perf_counter() > deadline:
            raise Retryable(
                f"{len(waiting)} of {total} documents are not searchable after {limit:g} s: run `penstock status`,"
                " or `penstock why DOCUMENT` for one of them"
            )
        if waiting:
            await asyncio.sleep(min(max(POLL_SECONDS, POLL_PAUSE * (perf_counter() - began)), MAX_POLL_SECONDS))
    tally.embedded = await _embedded(pool, everything)
    return tally


async def _embedded(pool: Pool, ids: Sequence[UUID]) -> int:
    """The number of chunks that were ever embedded for these documents."""
    from pipeline.ledger.arrivals import embedded_ever

    total = 0
    async with pool.connection() as connection:
        for start in range(0, len(ids), POLL_IDS):
            total += await embedded_ever(connection, ids[start : start + POLL_IDS])
    return total


async def _known_before(checkpoint: Checkpoint, tenant: str, source: str, paths: list[Path]) -> list[UUID]:
    """The documents under these paths that were published before: what was embedded for them is not counted again."""
    now = await checkpoint.now()
    return list(
        {
            document_id(tenant, source, unwritten.row.external_id): None
            for path in paths
            async for page in checkpoint.unwritten(tenant, source, str(path.resolve()), now)
            for unwritten in page
        }
    )


def watch(
    paths: Paths,
    acl: Acl = None,
    required: Required = None,
    tenant: Tenant = "default",
    allow_mass_delete: MassDelete = False,
) -> None:
    """Publish every change in folders as it happens, until stopped with Ctrl-C.

    Example: penstock watch docs/ --acl staff
    """
    from pipeline.runtime.stopping import run_until_stopped

    may_read = readers(acl, required)
    asyncio.run(
        run_until_stopped(
            "watch",
            lambda stop: _watch(stop, paths, may_read, required, tenant, mass_delete=allow_mass_delete),
            finish_seconds=WATCH_FINISH_SECONDS,
            end_seconds=WATCH_END_SECONDS,
        )
    )


async def _watch(
    stop: asyncio.Event,
    paths: list[Path],
    acl: list[str],
    required: list[str] | None,
    tenant: str,
    *,
    mass_delete: bool,
) -> None:
    from pipeline.observability import tracing

    def on_report(report: ScanReport) -> None:
        for event in report.published:
            stderr.print(f"{event.kind:9} {event.external_id}", soft_wrap=True, markup=False)
        _print_problems(report)

    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.running("watch"))
        connector, *_ = await _connector(stack, paths, acl, required, tenant, mass_delete=mass_delete)
        stderr.print(f"watching {', '.join(str(p) for p in paths)} (stop with Ctrl-C)", soft_wrap=True, markup=False)
        await connector.watch(stop, on_report)


def _print_problems(report: ScanReport) -> None:
    for problem in report.problems:
        stderr.print("[red]warning[/]" if problem.code in WARNINGS else "[yellow]skipped[/]", end=" ")
        stderr.print(str(problem), soft_wrap=True, markup=False)
