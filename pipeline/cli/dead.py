"""``penstock dead``: look at dead letters, send them again, or set them aside for good."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipeline.cli.dead_dismiss import dismiss
from pipeline.cli.dead_options import Code, Since, Source, Stage, Tenant, ledger
from pipeline.cli.output import Json, print_json, progress_bars, stderr, stdout
from pipeline.cli.recorded import record, recording
from pipeline.core.errors import PenstockError

if TYPE_CHECKING:
    from pipeline.ledger.letters import Filter, Judged, Letter
    from pipeline.ledger.skipped import Skipped
    from pipeline.stages.replay import Result
    from topics.letters import Letter as Sealed

dead = typer.Typer(
    name="dead",
    help="Dead letters: records that could not be taken in. Look at them, mend what is wrong, replay or dismiss them.",
    no_args_is_help=True,
)

PAGE = 50


@dead.command("list")
def list_letters(
    stage: Stage = None,
    code: Code = None,
    tenant: Tenant = None,
    source: Source = None,
    since: Since = None,
    everything: Annotated[bool, typer.Option("--all", help="Those that were replayed or dismissed, too.")] = False,
    dismissed: Annotated[bool, typer.Option("--dismissed", help="Those that were dismissed, and no others.")] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", min=0, help=f"At most so many. Default: {PAGE}; all of them with --json.")
    ] = None,
    after: Annotated[str | None, typer.Option("--after", metavar="ID", help="The next page: older than this.")] = None,
    json_output: Json = False,
) -> None:
    """The letters that wait for somebody, newest first; and, for people, the documents that cannot be read at their
    source (`penstock ingest` or a connector skipped them), which are no letters: there is nothing to replay.

    Example: penstock dead list --code invalid --since 2h
    """
    from pipeline.ledger.letters import Filter

    if limit is None and not json_output:
        limit = PAGE
    if everything and dismissed:
        raise typer.BadParameter("--all shows the dismissed ones too: say one of --all and --dismissed")
    show: Literal["waiting", "dismissed", "all"] = "dismissed" if dismissed else "all" if everything else "waiting"
    record("dead.list", tenant=tenant or "", object=f"source:{source}" if source else "")
    found, counts = asyncio.run(_list(Filter(stage, code, tenant, source, since, show), after, limit))
    from pipeline.cli.letters import letter_json, show_skipped, show_table

    if json_output:
        print_json([letter_json(letter) for letter in found])
        return
    if found:
        show_table(found)
    total = sum(n for _, n in counts)
    by_code = ", ".join(f"{code} {n}" for code, n in counts)
    more = f"; next page: --after {found[-1].id}" if limit is not None and len(found) == limit and found else ""
    told = f"{total} dead letters ({by_code}), {len(found)} shown{more}" if total else "No dead letters."
    stdout.print(told, soft_wrap=True, markup=False)
    if show != "dismissed" and stage is None and since is None and after is None:
        show_skipped(*asyncio.run(_skipped(tenant, source, code)))


async def _list(chosen: Filter, after: str | None, limit: int | None) -> tuple[list[Letter], list[tuple[str, int]]]:
    from pipeline.ledger import letters
    from pipeline.settings import load

    async with ledger(load()) as connection:
        if after is not None and after not in await letters.get(connection, [after]):
            raise PenstockError(f"--after: no dead letter is called {after!r}")
        return await letters.page(connection, chosen, after=after, limit=limit), await letters.counts(
            connection, chosen
        )


async def _skipped(tenant: str | None, source: str | None, code: str | None) -> tuple[Sequence[Skipped], int]:
    """What never became a record, because it could not be read."""
    from pipeline.ledger import skipped
    from pipeline.settings import load

    async with ledger(load()) as connection:
        return await skipped.page(connection, tenant=tenant, source=source, code=code, limit=PAGE)


@dead.command()
def show(
    id: Annotated[str, typer.Argument(help="As `penstock dead list` names it: topic:partition:offset.")],
    value: Annotated[
        bool, typer.Option("--value", help="The record's value: its bytes and nothing else (with --json: a field).")
    ] = False,
    json_output: Json = False,
) -> None:
    """One letter whole: why it is dead, where it comes from, its headers; its value only when asked for.

    Example: penstock dead show documents.live.v1:3:4711 --value > record.json
    """
    from pipeline.cli.letters import judged_json, letter_json, record_json, show_letter

    record("dead.show", object=f"letter:{id}")
    letter, trail, sealed, missing = asyncio.run(_show(id))
    if value and sealed is None:
        raise PenstockError(f"{id}: {missing}")
    if json_output:
        trailed = {"trail": [judged_json(one) for one in trail]}
        known = {**letter_json(letter), **trailed, "kept": sealed is not None, "missing": missing}
        print_json({**known, **record_json(sealed, value=value)} if sealed else known)
    elif value:
        assert sealed is not None
        if sealed.record.value is None:
            raise PenstockError(f"{id}: {sealed.omitted.get('value') or 'the record has no value'}")
        sys.stdout.buffer.write(sealed.record.value)
        sys.stdout.buffer.flush()
    else:
        show_letter(letter, trail, sealed, missing)


async def _show(id_: str) -> tuple[Letter, list[Judged], Sealed | None, str | None]:
    from pipeline.kafka import reader
    from pipeline.ledger import letters
    from pipeline.settings import load
    from pipeline.stages.replay import CannotReplay, read_letter
    from topics.registry import DEAD_LETTERS

    settings = load()
    async with ledger(settings) as connection:
        found = await letters.get(connection, [id_])
        trail = await letters.trail(connection, id_)
    if id_ not in found:
        raise PenstockError(f"no dead letter is called {id_!r}: `penstock dead list --all` names them")
    async with reader(settings.kafka, DEAD_LETTERS) as records:
        try:
            return found[id_], trail, await read_letter(records, found[id_]), None
        except CannotReplay as error:
            return found[id_], trail, None, str(error)


@dead.command()
def replay(
    ids: Annotated[list[str] | None, typer.Argument(help="Letters, as `penstock dead list` names them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every letter that waits.")] = False,
    stage: Stage = None,
    code: Code = None,
    tenant: Tenant = None,
    source: Source = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before replaying many.")] = False,
    json_output: Json = False,
) -> None:
    """Send letters to the topics they came from, byte for byte. What is newer by now stays: events order themselves.

    Mend the cause first; what fails again becomes a new letter that names the old one.
    Exit code 1: some could not be sent (each is named, the others are).

    Example: penstock dead replay --all --code from_the_future
    """
    from pipeline.ledger.letters import Filter

    chosen = Filter(stage, code, tenant, source)
    if bool(ids) == everything:
        raise typer.BadParameter("name the letters, or say --all")
    if ids and chosen != Filter():
        raise typer.BadParameter("--stage, --code, --tenant and --source go with --all")
    ask = everything and not yes and not json_output and sys.stdin.isatty() and sys.stderr.isatty()
    results: list[Result] = []
    try:
        asyncio.run(_replay(ids or [], chosen if everything else None, results, ask=ask, quiet=json_output))
    except PenstockError:
        if results:  # what was sent is told although the world went away in the middle
            _tell(results, json_output=json_output)
        raise
    _tell(results, json_output=json_output)
    if not all(result.settled for result in results):
        raise typer.Exit(1)


async def _replay(ids: Sequence[str], chosen: Filter | None, results: list[Result], *, ask: bool, quiet: bool) -> None:
    from pipeline.kafka import producer, reader
    from pipeline.ledger import letters
    from pipeline.settings import load
    from pipeline.stages.admission import admission
    from pipeline.stages.replay import Replayer
    from pipeline.stores.postgres import open_pool
    from pipeline.telemetry import Metrics
    from topics.registry import DEAD_LETTERS

    settings = load()
    if chosen is not None:
        async with ledger(settings) as connection:
            ids = await letters.ids(connection, chosen)
        if ask and ids and not typer.confirm(f"Replay {len(ids)} letters?", err=True):
            raise PenstockError("nothing was replayed")
    if not ids:
        return
    await recording("dead.replay", object=f"letters:{len(ids)}" if len(ids) > 1 else f"letter:{ids[0]}")
    async with (
        open_pool(settings.postgres) as pool,
        producer(settings.kafka) as sender,
        reader(settings.kafka, DEAD_LETTERS) as records,
    ):
        replayer = Replayer(
            pool, sender, records, topic_prefix=settings.kafka.topic_prefix,
            admission=admission(pool, Metrics(), settings.producers),
        )  # fmt: skip
        with progress_bars(quiet=quiet) as bars:
            task = bars.add_task("replaying", total=len(ids))
            async for result in replayer.replay(ids):
                results.append(result)
                bars.update(task, completed=len(results))


def _tell(results: Sequence[Result], *, json_output: bool) -> None:
    from pipeline.cli.letters import result_json
    from pipeline.cli.output import printable

    if json_output:
        print_json([result_json(result) for result in results])
        return
    for result in results:
        if result.reason:
            kind = "not sent" if result.settled else "error"
            stderr.print(f"{kind}: {printable(result.id)}: {printable(result.reason)}", soft_wrap=True, markup=False)
    sent = sum(result.stored is not None for result in results)
    stdout.print(f"replayed {sent} of {len(results)} dead letters", soft_wrap=True)


dead.command()(dismiss)
