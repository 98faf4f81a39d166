"""``penstock dead``: look at dead letters, send them again, or set them aside for good."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.moment import past_moment
from cli.output import Json, print_json, printable, progress_bars, stderr, stdout
from cli.readers import local_user
from cli.recorded import record, recording
from pipeline.core.errors import PenstockError

if TYPE_CHECKING:
    from pipeline.ledger.letters import Filter, Letter, TrailEntry
    from pipeline.ledger.skipped import Skipped
    from pipeline.runtime.settings import Settings
    from pipeline.stages.replay import Result
    from pipeline.stores.postgres import Connection
    from topics.letters import Letter as Sealed


dead = typer.Typer(
    name="dead",
    help="Dead letters: records that could not be processed. Inspect, replay or dismiss them.",
    no_args_is_help=True,
)

PAGE_LETTERS = 50
MAX_REASON_CHARACTERS = 500
MAX_NAME_CHARACTERS = 200
MAX_NAMED_LETTERS = 20
"""Letters that a dry run, or the question before a change of many, names."""

Stage = Annotated[
    str | None, typer.Option("--stage", help="Only this stage: detect, identities, conversations, vectors or keywords.")
]
Code = Annotated[str | None, typer.Option("--code", help="Only this reason, e.g. invalid.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant. Default: all.")]
Source = Annotated[str | None, typer.Option("--source", help="Only this source. Default: all.")]
Since = Annotated[
    datetime | None,
    typer.Option(
        "--since",
        metavar="TIME",
        parser=past_moment,
        help="Only letters that failed since: 30m, 2h, 7d, 2026-11-20T08:00.",
    ),
]


@asynccontextmanager
async def ledger(settings: Settings) -> AsyncIterator[Connection]:
    from pipeline.stores.postgres import open_pool, translated

    async with open_pool(settings.postgres) as pool:
        with translated("dead letters"):
            async with pool.connection() as connection:
                yield connection


@dead.command("list")
def list_letters(
    stage: Stage = None,
    code: Code = None,
    tenant: Tenant = None,
    source: Source = None,
    since: Since = None,
    everything: Annotated[bool, typer.Option("--all", help="Include replayed and dismissed letters.")] = False,
    dismissed: Annotated[bool, typer.Option("--dismissed", help="Dismissed letters only.")] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=0, help=f"Maximum number of letters. Default: {PAGE_LETTERS}; all with --json."),
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="ID", help="Next page: letters older than this one.")
    ] = None,
    json_output: Json = False,
) -> None:
    """List the dead letters that wait for an operator, newest first.

    Without --json also the documents that `penstock ingest` or a connector skipped because they cannot be read at their
    source. They are not dead letters: there is nothing to replay.

    Example: penstock dead list --code invalid --since 2h
    """
    from pipeline.ledger.letters import Filter

    if limit is None and not json_output:
        limit = PAGE_LETTERS
    if everything and dismissed:
        raise typer.BadParameter("--all includes the dismissed letters: give --all or --dismissed, not both")
    show: Literal["waiting", "dismissed", "all"] = "dismissed" if dismissed else "all" if everything else "waiting"
    record("dead.list", tenant=tenant or "", object=f"source:{source}" if source else "")
    matches, counts = asyncio.run(_list(Filter(stage, code, tenant, source, since, show), after, limit))
    from cli.dead_show import letter_json, show_skipped, show_table

    if json_output:
        print_json([letter_json(letter) for letter in matches])
        return
    if matches:
        show_table(matches)
    total = sum(n for _, n in counts)
    by_code = ", ".join(f"{code} {n}" for code, n in counts)
    more = f"; next page: --after {matches[-1].id}" if limit is not None and len(matches) == limit and matches else ""
    summary = f"{total} dead letters ({by_code}), {len(matches)} shown{more}" if total else "No dead letters."
    stdout.print(summary, soft_wrap=True, markup=False)
    if show != "dismissed" and stage is None and since is None and after is None:
        show_skipped(*asyncio.run(_skipped(tenant, source, code)))


async def _list(chosen: Filter, after: str | None, limit: int | None) -> tuple[list[Letter], list[tuple[str, int]]]:
    from pipeline.ledger import letters
    from pipeline.runtime.settings import load

    async with ledger(load()) as connection:
        if after is not None and after not in await letters.get(connection, [after]):
            raise PenstockError(f"--after: there is no dead letter {after!r}")
        return await letters.page(connection, chosen, after=after, limit=limit), await letters.counts(
            connection, chosen
        )


async def _skipped(tenant: str | None, source: str | None, code: str | None) -> tuple[Sequence[Skipped], int]:
    """Documents that never became a record, because they could not be read."""
    from pipeline.ledger import skipped
    from pipeline.runtime.settings import load

    async with ledger(load()) as connection:
        return await skipped.page(connection, tenant=tenant, source=source, code=code, limit=PAGE_LETTERS)


@dead.command()
def show(
    id: Annotated[str, typer.Argument(help="Id of the letter, from `penstock dead list`: topic:partition:offset.")],
    value: Annotated[
        bool, typer.Option("--value", help="Print only the bytes of the record's value (with --json: as a field).")
    ] = False,
    json_output: Json = False,
) -> None:
    """Show one dead letter: why it failed, its record and headers, and with --value the record's value.

    Example: penstock dead show documents.live.v1:3:4711 --value > record.json
    """
    from cli.dead_show import judged_json, letter_json, record_json, show_letter

    record("dead.show", object=f"letter:{id}")
    letter, trail, sealed, missing = asyncio.run(_show(id))
    if value and sealed is None:
        raise PenstockError(f"{id}: {missing}")
    if json_output:
        trailed = {"trail": [judged_json(judgement) for judgement in trail]}
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


async def _show(id_: str) -> tuple[Letter, list[TrailEntry], Sealed | None, str | None]:
    from pipeline.kafka.client import reader
    from pipeline.ledger import letters
    from pipeline.runtime.settings import load
    from pipeline.stages.replay import CannotReplay, read_letter
    from topics.registry import DEAD_LETTERS

    settings = load()
    async with ledger(settings) as connection:
        matches = await letters.get(connection, [id_])
        trail = await letters.trail(connection, id_)
    if id_ not in matches:
        raise PenstockError(f"there is no dead letter {id_!r}: `penstock dead list --all` lists all")
    async with reader(settings.kafka, DEAD_LETTERS) as records:
        try:
            return matches[id_], trail, await read_letter(records, matches[id_]), None
        except CannotReplay as error:
            return matches[id_], trail, None, str(error)


@dead.command()
def replay(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of letters, from `penstock dead list`.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Replay every waiting letter.")] = False,
    stage: Stage = None,
    code: Code = None,
    tenant: Tenant = None,
    source: Source = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json_output: Json = False,
) -> None:
    """Send the records of dead letters to their topics again, unchanged. They never overwrite newer events.

    Fix the cause first: a record that fails again becomes a new letter, which names the old one.
    Exit code 1: some records could not be sent; each is named, and the others were sent.

    Example: penstock dead replay --all --code from_the_future
    """
    from pipeline.ledger.letters import Filter

    chosen = Filter(stage, code, tenant, source)
    if bool(ids) == everything:
        raise typer.BadParameter("give the ids of letters, or --all")
    if ids and chosen != Filter():
        raise typer.BadParameter("--stage, --code, --tenant and --source need --all")
    ask = everything and not yes and not json_output and sys.stdin.isatty() and sys.stderr.isatty()
    results: list[Result] = []
    try:
        asyncio.run(_replay(ids or [], chosen if everything else None, results, ask=ask, quiet=json_output))
    except PenstockError:
        if results:  # report what was sent although a service failed before the end
            _tell(results, json_output=json_output)
        raise
    _tell(results, json_output=json_output)
    if not all(result.settled for result in results):
        raise typer.Exit(1)


async def _replay(ids: Sequence[str], chosen: Filter | None, results: list[Result], *, ask: bool, quiet: bool) -> None:
    from pipeline.kafka.client import producer, reader
    from pipeline.ledger import letters
    from pipeline.observability.metrics import Metrics
    from pipeline.runtime.settings import load
    from pipeline.stages.admission import admission
    from pipeline.stages.replay import Replayer
    from pipeline.stores.postgres import open_pool
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
            pool,
            sender,
            records,
            topic_prefix=settings.kafka.topic_prefix,
            admission=admission(pool, Metrics(), settings.producers),
        )
        with progress_bars(quiet=quiet) as bars:
            task = bars.add_task("replaying", total=len(ids))
            async for result in replayer.replay(ids):
                results.append(result)
                bars.update(task, completed=len(results))


def _tell(results: Sequence[Result], *, json_output: bool) -> None:
    from cli.dead_show import result_json
    from cli.output import printable

    if json_output:
        print_json([result_json(result) for result in results])
        return
    for result in results:
        if result.reason:
            kind = "not sent" if result.settled else "error"
            stderr.print(f"{kind}: {printable(result.id)}: {printable(result.reason)}", soft_wrap=True, markup=False)
    sent = sum(result.stored is not None for result in results)
    stdout.print(f"replayed {sent} of {len(results)} dead letters", soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A decision about letters: dismiss them, or undo that."""

    by: str
    reason: str | None
    undo: bool

    @property
    def done(self) -> str:
        return "set to waiting" if self.undo else "dismissed"


@dataclass(frozen=True, slots=True)
class Dismissal:
    id: str
    changed: bool
    reason: str | None = None
    """Why nothing was changed."""
    settled: bool = True
    """False: it is not as it was asked to be."""


@dead.command()
def dismiss(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of letters, from `penstock dead list`.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Dismiss every waiting letter (with --undo: every dismissed one).")
    ] = False,
    stage: Stage = None,
    code: Code = None,
    tenant: Tenant = None,
    source: Source = None,
    since: Since = None,
    reason: Annotated[
        str | None,
        typer.Option("--reason", help="Why no replay is needed; stored with the letters. Required without --undo."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="NAME", help="Name of the person who decides. Default: the local user."),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Undo a dismissal: the letters wait again.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the letters that would change, and change nothing.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="With --all: do not ask for confirmation. Needed in scripts.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Dismiss letters that need no replay. They no longer count in alerts and in `penstock status`, but stay stored.

    `penstock dead list --dismissed` lists them, and --undo makes them wait again. A later failure of the same document
    is a new letter. Exit code 1: some letters could not be changed; each is named, and the others were changed.

    Example: penstock dead dismiss --all --code no_value --since 2h --reason "a test run of the wiki" --dry-run
    """
    from pipeline.ledger.letters import Filter

    chosen = Filter(stage, code, tenant, source, since, "dismissed" if undo else "waiting")
    if bool(ids) == everything:
        raise typer.BadParameter("give the ids of letters, or --all")
    if ids and (stage, code, tenant, source, since) != (None,) * 5:
        raise typer.BadParameter("--stage, --code, --tenant, --source and --since need --all")
    judgement = Judgement(_named(by), _reasoned(reason, undo=undo), undo)
    asks = everything and not yes and not dry_run
    if asks and (json_output or not (sys.stdin.isatty() and sys.stderr.isatty())):
        raise typer.BadParameter("--all may change many letters: preview it with --dry-run, then add --yes")
    if not dry_run:
        what = f"letter:{ids[0]}" if ids and len(ids) == 1 else f"letters:{len(ids) if ids else 'all'}"
        record("dead.undismiss" if undo else "dead.dismiss", tenant=tenant or "", object=what)
    results = asyncio.run(_dismiss(ids or [], chosen if everything else None, judgement, ask=asks, dry_run=dry_run))
    _tell_dismissed(results, judgement, dry_run=dry_run, json_output=json_output)
    if not all(result.settled for result in results):
        raise typer.Exit(1)


def _named(by: str | None) -> str:
    name = by.strip() if by is not None else local_user("name the person who decides with --by NAME")
    if not name or len(name) > MAX_NAME_CHARACTERS:
        raise typer.BadParameter(f"--by: give a name of 1 to {MAX_NAME_CHARACTERS} characters")
    return name


def _reasoned(reason: str | None, *, undo: bool) -> str | None:
    text = (reason or "").strip()
    if len(text) > MAX_REASON_CHARACTERS:
        raise typer.BadParameter(f"--reason: at most {MAX_REASON_CHARACTERS} characters")
    if not text and not undo:
        raise typer.BadParameter("--reason is required: state in a few words why no replay is needed")
    return text or None


async def _dismiss(
    ids: Sequence[str], chosen: Filter | None, judgement: Judgement, *, ask: bool, dry_run: bool
) -> list[Dismissal]:
    from pipeline.ledger import letters
    from pipeline.runtime.settings import load

    settings = load()
    async with ledger(settings) as connection:
        if chosen is not None:
            ids = await letters.ids(connection, chosen)
        matches = await letters.get(connection, ids)
    if ask and ids:
        _name(list(matches.values()))
        verb = "Let" if judgement.undo else "Dismiss"
        wait = " wait again" if judgement.undo else ""
        if not typer.confirm(f"{verb} {len(ids)} letters{wait}?", err=True):
            raise PenstockError("nothing was changed")
    requested = list(dict.fromkeys(ids))
    would = [id_ for id_ in requested if id_ in matches and _applies(matches[id_], judgement)]
    if dry_run or not would:
        return [_result(id_, matches.get(id_), judgement, changed=id_ in would) for id_ in requested]
    async with ledger(settings) as connection:  # none is held while somebody thinks about the question
        if judgement.undo:
            changed = await letters.undo_dismissal(connection, would, by=judgement.by, reason=judgement.reason)
        else:
            changed = await letters.dismiss(connection, would, by=judgement.by, reason=judgement.reason or "")
        if set(changed) != set(would):  # somebody else was faster: say what holds now
            matches = await letters.get(connection, requested)
    return [_result(id_, matches.get(id_), judgement, changed=id_ in changed) for id_ in requested]


def _applies(letter: Letter, judgement: Judgement) -> bool:
    return letter.dismissed_at is not None if judgement.undo else letter.waits


def _result(id_: str, letter: Letter | None, judgement: Judgement, *, changed: bool) -> Dismissal:
    if changed:
        return Dismissal(id_, True)
    if letter is None:
        return Dismissal(id_, False, "no dead letter has this id", settled=False)
    if judgement.undo:
        return Dismissal(id_, False, "it is not dismissed")
    if letter.dismissed_at is not None:
        return Dismissal(id_, False, f"it was dismissed before, by {letter.dismissed_by}: {letter.dismissed_reason}")
    return Dismissal(id_, False, "it was replayed already")


def _name(matches: Sequence[Letter]) -> None:
    """Print on stderr which letters the question concerns."""
    for letter in matches[:MAX_NAMED_LETTERS]:
        document = f"{letter.tenant}/{letter.source}/{letter.external_id}" if letter.external_id else "?"
        stderr.print(printable(f"  {letter.id}  {letter.code}  {document}"), markup=False, soft_wrap=True)
    if len(matches) > MAX_NAMED_LETTERS:
        stderr.print(f"  … and {len(matches) - MAX_NAMED_LETTERS} more")


def _tell_dismissed(results: Sequence[Dismissal], judgement: Judgement, *, dry_run: bool, json_output: bool) -> None:
    if json_output:
        print_json(
            [
                {"id": r.id, "changed": r.changed and not dry_run, "would_change": r.changed, "reason": r.reason}
                for r in results
            ]
        )
        return
    for result in results:
        if result.reason:
            kind = "unchanged" if result.settled else "error"
            stderr.print(f"{kind}: {printable(result.id)}: {printable(result.reason)}", soft_wrap=True, markup=False)
    changed = [result.id for result in results if result.changed]
    if dry_run:
        for id_ in changed[:MAX_NAMED_LETTERS]:
            stdout.print(f"  {printable(id_)}", markup=False, soft_wrap=True)
        if len(changed) > MAX_NAMED_LETTERS:
            stdout.print(f"  … and {len(changed) - MAX_NAMED_LETTERS} more")
        stdout.print(f"{len(changed)} dead letters would be {judgement.done}; nothing was changed", soft_wrap=True)
        return
    stdout.print(f"{len(changed)} of {len(results)} dead letters {judgement.done}", soft_wrap=True)
