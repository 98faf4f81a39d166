"""``penstock recover``: after a failover of Postgres or a ledger restored from a backup, while Kafka and Elasticsearch
are ahead of it."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from datetime import datetime
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.moment import past_moment
from cli.output import Json, print_json, progress_bars, stderr, stdout
from cli.recorded import record

if TYPE_CHECKING:
    from pipeline.maintenance.recover import Forgotten

DOING = {"replaying": "events read again", "converging": "documents in both stores"}
REPAIR_SECONDS = 600
"""How long the audit waits for the workers to mend what it found."""


def recover(
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Time of the restored backup, or earlier: 2026-11-20T08:00Z, 2h."),
    ] = None,
    failover: Annotated[
        bool,
        typer.Option(
            "--failover", help="Postgres's standby was promoted: read the records again that it may have lost."
        ),
    ] = False,
    topics_lost: Annotated[
        bool,
        typer.Option("--topics-lost", help="Kafka is new and empty: publish again what was not read."),
    ] = False,
    json_output: Json = False,
) -> None:
    """Restore a consistent state of the ledger, Kafka and the stores after a loss.

    --since: after the ledger was restored from a backup. Reads the records since then from Kafka again, then audits
    both stores.

    --failover: the same after a standby was promoted, from an hour before the last change in its ledger.

    Searches are refused until the lost records have been read again, because revocations and deletions among them are
    not known before. Detect workers of the local stack are stopped and started again; stop all others yourself.

    --topics-lost: after Kafka was lost. Records that had not been read are published again, by each connector at its
    next sweep.

    Exit code 0: what was lost is back, and the stores agree with the ledger. 1: documents were set aside, dead letters
    wait because of who signed their records, or differences remain.

    Example: penstock recover --since 2026-11-20T08:00Z
    """
    if (since is not None) + failover + topics_lost != 1:
        raise typer.BadParameter(
            "give one of --since TIME (Postgres was restored), --failover (Postgres was promoted) and"
            " --topics-lost (Kafka was lost)"
        )
    record("recover", object="lost:topics" if topics_lost else "lost:ledger")
    if topics_lost:
        _look_again(json_output=json_output)
        return
    from cli.stack import local_detect_stopped

    moment = past_moment(since) if since is not None else None
    start = perf_counter()
    with local_detect_stopped(lambda line: stderr.print(line, soft_wrap=True)) as start_again:
        result = asyncio.run(_recover(moment, start_again, quiet=json_output))
    result["audit"] = _audit()
    result["seconds"] = round(perf_counter() - start, 3)
    if json_output:
        print_json(result)
    else:
        _tell(result)
    if result["failed"] or result["refused"] or not result["audit"]["clean"]:
        raise typer.Exit(1)


def _look_again(*, json_output: bool) -> None:
    outcome = asyncio.run(_republish())
    if json_output:
        print_json(asdict(outcome))
        return
    stdout.print(
        f"{outcome.documents:,} documents, {outcome.deletions:,} deletions and {outcome.principals:,} memberships will"
        " be published again if needed, by the next sweep of their connector, or now by `penstock connector run NAME`"
        " or `penstock ingest`.",
        soft_wrap=True,
    )


async def _republish() -> Forgotten:
    from pipeline.maintenance.recover import republish
    from pipeline.runtime.settings import load
    from pipeline.stores.postgres import open_pool

    async with open_pool(load().postgres) as pool:
        return await republish(pool)


async def _recover(since: datetime | None, start_again: Any, *, quiet: bool) -> dict[str, Any]:
    """since: None after a failover."""
    from pipeline.maintenance.recover import open_recovery
    from pipeline.runtime.settings import load

    with progress_bars(quiet=quiet) as bars:
        tasks: dict[str, Any] = {}

        def on_progress(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(DOING[phase])
            bars.update(tasks[phase], completed=done, total=total)

        async with open_recovery(load(), on_progress) as recovery:
            await recovery.require_stopped()
            await recovery.accept("rewinding")
            since = since or await recovery.before_failover()
            raised = await recovery.raise_sequence()
            strays = await recovery.strays()
            rewound = await recovery.rewind(since)
            for line in rewound.missing:
                stderr.print(f"[red]warning[/] {line}", soft_wrap=True)
            for index in strays:
                stderr.print(f"[yellow]note[/] no generation uses the index {index}: delete it", soft_wrap=True)
            await recovery.accept("replaying")
            await asyncio.to_thread(start_again)
            await recovery.replayed(
                rewound,
                lambda: stderr.print(
                    f"The offsets are reset ({rewound.records:,} records to read again). No detect worker runs: start"
                    " the workers now; this command waits for them.",
                    soft_wrap=True,
                ),
            )
            if refused := await recovery.refused(since):
                stderr.print(
                    f"[red]warning[/] {refused:,} dead letters wait because of who signed their records (`penstock dead"
                    " list --code unknown_key`, or another code): enrol the producers and keys that were added after"
                    " the backup, replay these letters, dismiss what is forged, and run this command again: of more"
                    " than a thousand such records in a minute, only their topic has the rest",
                    soft_wrap=True,
                )
            again = await recovery.look_again()
            await recovery.accept("open")
            settled = await recovery.settled()
    return {
        "since": since.isoformat(),
        "replayed_from": rewound.since.isoformat(),
        "replayed": rewound.records,
        "sequence": {"before": raised.before, "after": raised.after},
        "missing": list(rewound.missing),
        "unused_indexes": strays,
        "failed": settled.failed,
        "refused": refused,
        "in_doubt": asdict(again),
    }


def _audit() -> dict[str, Any]:
    """``penstock audit --repair --json`` as a process of its own: its verdict."""
    import subprocess

    stderr.print("comparing all documents with both stores (penstock audit --repair)", soft_wrap=True)
    process = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "penstock",
            "audit",
            "--repair",
            "--generation",
            "all",
            "--wait-seconds",
            str(REPAIR_SECONDS),
            "--json",
        ],
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    try:
        report: dict[str, Any] = json.loads(process.stdout)
    except ValueError:
        why = f"the audit ended with exit code {process.returncode}"
        return {"clean": False, "documents": 0, "repaired": 0, "differences": [], "error": why}
    return report


def _tell(result: dict[str, Any]) -> None:
    audit = result["audit"]
    verdict = "the audit is clean" if audit["clean"] else "the audit is not clean: see `penstock audit --repair`"
    since = result["replayed_from"]
    since = "the beginning" if since.startswith("1970-") else since  # a lane that held nothing at the backup
    failed = f", {result['failed']} documents were set aside (`penstock why`)" if result["failed"] else ""
    refused = f", {result['refused']:,} dead letters wait because of who signed them" if result["refused"] else ""
    stdout.print(
        f"Recovered: {result['replayed']:,} records read again from {since}; {verdict}"
        f" ({audit['documents']:,} documents, {audit['repaired']:,} differences repaired){failed}{refused};"
        f" {result['seconds']:.0f} s.",
        soft_wrap=True,
    )
