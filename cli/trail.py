"""``penstock trail``: who searched, read, was shown, changed or inspected what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from cli.extras import require
from cli.moment import past_moment
from cli.output import Json, print_json, printable, stdout
from pipeline.core.errors import PenstockError

if TYPE_CHECKING:
    from pipeline.core.trail import Head, Sealed
    from pipeline.ledger.trail import RecordFilter, TrailReport
    from pipeline.stores.postgres import Connection

trail = typer.Typer(name="trail", help="The audit trail: who was shown, changed or inspected what (docs/trail.md).")

PAGE = 100
MOST_NAMED = 3
"""Documents of one record that the table names."""


@trail.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    document: Annotated[
        str | None,
        typer.Option(
            "--document", metavar="DOCUMENT", help="Records of access to this document: its id, external id or file."
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", help="With --document: its source. Also finds erased documents.")
    ] = None,
    person: Annotated[str | None, typer.Option("--person", help="Records by, as or about this person.")] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Only this tenant. With --document: its tenant.")
    ] = None,
    action: Annotated[
        str | None, typer.Option("--action", help="Only this action, such as search, document.read or export.")
    ] = None,
    since: Annotated[
        datetime | None, typer.Option(parser=past_moment, metavar="TIME", help="Only records since: 2h, 7d or a time.")
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(parser=past_moment, metavar="TIME", help="Only records before: 2h, 7d or a time.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Maximum number of records.")] = PAGE,
    after: Annotated[
        str | None, typer.Option("--after", metavar="PLACE", help="Next page: `next` of the previous one.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Print records of the audit trail, newest first. Reading it is recorded too.

    Example: penstock trail --document docs/salaries.md --since 30d --json
    """
    if context.invoked_subcommand is not None:
        return
    require("worker")
    from pipeline.ledger.trail import RecordFilter, as_json, place_of

    chosen = RecordFilter(person=person, tenant=tenant, action=action, since=since, until=until, after=after)
    entries = asyncio.run(_show(chosen, document, source, limit))
    following = place_of(entries[-1]) if len(entries) == limit else None
    if json_output:
        print_json({"records": [as_json(sealed) for sealed in entries], "next": following})
        return
    for sealed in entries:
        stdout.print(_line(sealed), markup=False, soft_wrap=True)
    more = f"; next page: --after {following}" if following else ""
    stdout.print(f"{len(entries)} records{more}" if entries else "No such records.", markup=False, soft_wrap=True)


async def _show(chosen: RecordFilter, document: str | None, source: str | None, limit: int) -> list[Sealed]:
    from cli.recorded import recording
    from pipeline.core.trail import storable
    from pipeline.ledger import trail as table
    from pipeline.runtime.settings import load
    from pipeline.trail import keys_of

    async with _connection() as connection:
        object_ = ""
        if document is not None:
            id_ = await _document(connection, chosen.tenant or "default", document, source)
            chosen, object_ = replace(chosen, document=id_), f"trail-of:{id_}"
        if chosen.person is not None:
            names = keys_of(load().trail_keys).names(chosen.person)
            chosen = replace(chosen, person=storable(chosen.person), names=names)
        await recording(
            "trail.read", tenant=chosen.tenant or "", object=object_, person=chosen.person or "", required=True
        )
        try:
            return await table.page(connection, chosen, limit)
        except ValueError as error:
            raise typer.BadParameter("--after must be the `next` of the previous page") from error


async def _document(connection: Connection, tenant: str, name: str, source: str | None) -> UUID:
    """Computed where tenant, source and external id are known; looked up in the ledger otherwise."""
    from psycopg.errors import InsufficientPrivilege

    from cli.why import names
    from pipeline.core.identity import document_id
    from pipeline.diagnosis import story

    try:
        return UUID(name)
    except ValueError:
        if source is not None:
            return document_id(tenant, source, name)
    try:
        matches = await story.find(connection, tenant, names(name))
    except InsufficientPrivilege:
        raise PenstockError(
            f"this login may not read the ledger: give the id of {name!r}, or its external id with --source"
        ) from None
    if len(matches) != 1:
        what = f"matches {len(matches)} documents" if matches else "matches no document"
        raise PenstockError(
            f"{name!r} {what} of tenant {tenant!r}: give the document's id, or its external id with --source"
        )
    return matches[0][0].id


def _line(sealed: Sealed) -> str:
    record = sealed.record
    documents = [str(id_) for id_ in record.documents]
    more = f" and {len(documents) - MOST_NAMED} more" if len(documents) > MOST_NAMED else ""
    what = ", ".join(documents[:MOST_NAMED]) + more or record.object
    who = record.actor + (f" ({', '.join(record.access)})" if record.access else "")
    decision = "" if record.decision == "allowed" else f" {record.decision}: {record.reason}"
    at = record.at.astimezone().isoformat(sep=" ", timespec="seconds")
    return printable(f"{at}  {who}  {record.tenant}  {record.action}{decision}  {what}  {record.address}").rstrip()


@trail.command()
def verify(
    since: Annotated[
        datetime | None,
        typer.Option(parser=past_moment, metavar="TIME", help="Check records from this day on; all heads are checked."),
    ] = None,
    noted: Annotated[
        Path | None,
        typer.Option(
            "--noted",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="File of heads stored elsewhere: lines of `penstock trail head --json` or of the log.",
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Check whether any record or head was altered, removed, moved or inserted. Exit code 1: one was.

    It needs the key (PENSTOCK_TRAIL_KEY). docs/trail.md says what it proves, and what only heads that are stored
    elsewhere prove.

    Example: penstock trail verify --noted heads.jsonl
    """
    remembered = _noted(noted) if noted is not None else frozenset()
    done = asyncio.run(_verify(since, remembered))
    from pipeline.runtime.settings import load

    keyed = load().trail_keys.key is not None
    if json_output:
        print_json(
            {
                "intact": not done.findings,
                "records": done.records,
                "heads": done.heads,
                "noted": len(remembered),
                "keyed": keyed,
                "findings": [{"kind": finding.kind, "where": finding.where} for finding in done.findings],
                "more_findings": done.more,
            }
        )
    else:
        for finding in done.findings:
            stdout.print(finding.line, markup=False, soft_wrap=True)
        without = "" if keyed else " (no key is set: anyone who may write the tables could have replaced all of it)"
        result = f"{len(done.findings) + done.more} findings" if done.findings else "intact"
        stdout.print(f"{done.records} records, {done.heads} heads: {result}{without}", markup=False, soft_wrap=True)
    if done.findings:
        raise typer.Exit(1)


async def _verify(since: datetime | None, noted: frozenset[tuple[int, bytes]]) -> TrailReport:
    from cli.recorded import recording
    from pipeline.ledger import trail as table
    from pipeline.runtime.settings import load
    from pipeline.trail import keys_of

    settings = load()
    await recording("trail.verify")
    async with _connection() as connection:
        return await table.examine(
            connection,
            keys_of(settings.trail_keys),
            retention_days=settings.retention.trail_days,
            since=since,
            noted=noted,
        )


def _noted(file: Path) -> frozenset[tuple[int, bytes]]:
    """The numbers and codes of the heads in a file. Raises BadParameter for a file without heads."""
    heads = set()
    for line in file.read_bytes().splitlines():
        try:
            head = json.loads(line[line.index(b"{") :])
            heads.add((int(head["number"]), bytes.fromhex(head["mac"])))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # of a log, most lines are about something else, and some quote what others sent
    if not heads:
        raise typer.BadParameter(f"--noted: {file} has no heads: it must have lines of `penstock trail head --json`")
    return frozenset(heads)


@trail.command()
def head(json_output: Json = False) -> None:
    """Print the newest head. Stored elsewhere, it lets `verify --noted` prove that no earlier record changed.

    Example: penstock trail head --json >> heads.jsonl
    """
    newest = asyncio.run(_head())
    if newest is None:
        raise PenstockError("the audit trail has no head yet: nothing was recorded")
    if json_output:
        print_json({"number": newest.number, "at": newest.at.isoformat(), "mac": newest.mac.hex()})
    else:
        stdout.print(f"{newest.number} {newest.at.isoformat()} {newest.mac.hex()}", markup=False, soft_wrap=True)


async def _head() -> Head | None:
    from pipeline.ledger import trail as table

    async with _connection() as connection:
        return await table.newest_head(connection)


@asynccontextmanager
async def _connection() -> AsyncIterator[Connection]:
    """Open a connection without the fence: the trail may be read whatever happened to the ledger."""
    from psycopg.errors import InsufficientPrivilege, UndefinedTable

    from pipeline.runtime.settings import load
    from pipeline.stores.postgres import connect_alone, translated

    with translated("the audit trail"):
        try:
            async with await connect_alone(load().postgres, "trail") as connection:
                yield connection
        except InsufficientPrivilege as error:
            raise PenstockError(
                "this login may not read the audit trail: use one with the role penstock_trail_reader"
            ) from error
        except UndefinedTable as error:
            raise PenstockError("there is no audit trail yet: run `penstock migrate`") from error
