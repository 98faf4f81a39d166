"""``penstock dead dismiss``: letters judged not worth replaying are set aside, with a reason and by whom."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.dead_options import Code, Since, Source, Stage, Tenant, ledger
from pipeline.cli.output import Json, print_json, printable, stderr, stdout
from pipeline.cli.readers import local_user
from pipeline.cli.recorded import record
from pipeline.core.errors import PenstockError

if TYPE_CHECKING:
    from pipeline.ledger.letters import Filter, Letter

REASON_CHARACTERS = 500
NAME_CHARACTERS = 200
SHOWN = 20
"""Letters that a dry run, or the question before many, names."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What somebody decided about letters."""

    by: str
    reason: str | None
    undo: bool

    @property
    def done(self) -> str:
        return "made to wait again" if self.undo else "dismissed"


@dataclass(frozen=True, slots=True)
class Result:
    id: str
    changed: bool
    reason: str | None = None
    """Why nothing was changed."""
    settled: bool = True
    """False: it is not as it was asked to be."""


def dismiss(
    ids: Annotated[list[str] | None, typer.Argument(help="Letters, as `penstock dead list` names them.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every letter that waits (with --undo: that is dismissed).")
    ] = False,
    stage: Stage = None,
    code: Code = None,
    tenant: Tenant = None,
    source: Source = None,
    since: Since = None,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why they need no replay; kept with them. Needed but for --undo.")
    ] = None,
    by: Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who decides. Default: the user here.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Dismissed letters wait again.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say which letters are meant, and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --all: do not ask. Needed in scripts.")] = False,
    json_output: Json = False,
) -> None:
    """Set letters aside that need no replay: they no longer count in alerts and status, and are kept.

    `penstock dead list --dismissed` shows them; --undo brings them back. A later failure of the same document is a new
    letter, and waits. Exit code 1: some are not as asked (each is named, the others are).

    Example: penstock dead dismiss --all --code no_value --since 2h --reason "a test run of the wiki" --dry-run
    """
    from pipeline.ledger.letters import Filter

    chosen = Filter(stage, code, tenant, source, since, "dismissed" if undo else "waiting")
    if bool(ids) == everything:
        raise typer.BadParameter("name the letters, or say --all")
    if ids and (stage, code, tenant, source, since) != (None,) * 5:
        raise typer.BadParameter("--stage, --code, --tenant, --source and --since go with --all")
    judgement = Judgement(_named(by), _reasoned(reason, undo=undo), undo)
    asks = everything and not yes and not dry_run
    if asks and (json_output or not (sys.stdin.isatty() and sys.stderr.isatty())):
        raise typer.BadParameter("--all changes many letters at once: look with --dry-run, then say --yes")
    if not dry_run:
        what = f"letter:{ids[0]}" if ids and len(ids) == 1 else f"letters:{len(ids) if ids else 'all'}"
        record("dead.undismiss" if undo else "dead.dismiss", tenant=tenant or "", object=what)
    results = asyncio.run(_dismiss(ids or [], chosen if everything else None, judgement, ask=asks, dry_run=dry_run))
    _tell(results, judgement, dry_run=dry_run, json_output=json_output)
    if not all(result.settled for result in results):
        raise typer.Exit(1)


def _named(by: str | None) -> str:
    name = by.strip() if by is not None else local_user("say who decides with --by NAME")
    if not name or len(name) > NAME_CHARACTERS:
        raise typer.BadParameter(f"--by: say who decides, in at most {NAME_CHARACTERS} characters")
    return name


def _reasoned(reason: str | None, *, undo: bool) -> str | None:
    said = (reason or "").strip()
    if len(said) > REASON_CHARACTERS:
        raise typer.BadParameter(f"--reason: at most {REASON_CHARACTERS} characters")
    if not said and not undo:
        raise typer.BadParameter("--reason: say in a few words why they need no replay")
    return said or None


async def _dismiss(
    ids: Sequence[str], chosen: Filter | None, judgement: Judgement, *, ask: bool, dry_run: bool
) -> list[Result]:
    from pipeline.ledger import letters
    from pipeline.settings import load

    settings = load()
    async with ledger(settings) as connection:
        if chosen is not None:
            ids = await letters.ids(connection, chosen)
        found = await letters.get(connection, ids)
    if ask and ids:
        _name(list(found.values()))
        verb = "Let" if judgement.undo else "Dismiss"
        wait = " wait again" if judgement.undo else ""
        if not typer.confirm(f"{verb} {len(ids)} letters{wait}?", err=True):
            raise PenstockError("nothing was changed")
    wanted = list(dict.fromkeys(ids))
    would = [id_ for id_ in wanted if id_ in found and _applies(found[id_], judgement)]
    if dry_run or not would:
        return [_result(id_, found.get(id_), judgement, changed=id_ in would) for id_ in wanted]
    async with ledger(settings) as connection:  # none is held while somebody thinks about the question
        if judgement.undo:
            changed = await letters.undo_dismissal(connection, would, by=judgement.by, reason=judgement.reason)
        else:
            changed = await letters.dismiss(connection, would, by=judgement.by, reason=judgement.reason or "")
        if set(changed) != set(would):  # somebody else was faster: say what holds now
            found = await letters.get(connection, wanted)
    return [_result(id_, found.get(id_), judgement, changed=id_ in changed) for id_ in wanted]


def _applies(letter: Letter, judgement: Judgement) -> bool:
    return letter.dismissed_at is not None if judgement.undo else letter.waits


def _result(id_: str, letter: Letter | None, judgement: Judgement, *, changed: bool) -> Result:
    if changed:
        return Result(id_, True)
    if letter is None:
        return Result(id_, False, "no dead letter has this id", settled=False)
    if judgement.undo:
        return Result(id_, False, "it is not dismissed")
    if letter.dismissed_at is not None:
        return Result(id_, False, f"it was dismissed before, by {letter.dismissed_by}: {letter.dismissed_reason}")
    return Result(id_, False, "it was replayed: nothing waits")


def _name(found: Sequence[Letter]) -> None:
    """On stderr: what the question is about."""
    for letter in found[:SHOWN]:
        document = f"{letter.tenant}/{letter.source}/{letter.external_id}" if letter.external_id else "?"
        stderr.print(printable(f"  {letter.id}  {letter.code}  {document}"), markup=False, soft_wrap=True)
    if len(found) > SHOWN:
        stderr.print(f"  … and {len(found) - SHOWN} more")


def _tell(results: Sequence[Result], judgement: Judgement, *, dry_run: bool, json_output: bool) -> None:
    if json_output:
        print_json([
            {"id": r.id, "changed": r.changed and not dry_run, "would_change": r.changed, "reason": r.reason}
            for r in results
        ])  # fmt: skip
        return
    for result in results:
        if result.reason:
            kind = "unchanged" if result.settled else "error"
            stderr.print(f"{kind}: {printable(result.id)}: {printable(result.reason)}", soft_wrap=True, markup=False)
    changed = [result.id for result in results if result.changed]
    if dry_run:
        for id_ in changed[:SHOWN]:
            stdout.print(f"  {printable(id_)}", markup=False, soft_wrap=True)
        if len(changed) > SHOWN:
            stdout.print(f"  … and {len(changed) - SHOWN} more")
        stdout.print(f"{len(changed)} dead letters would be {judgement.done}; nothing was changed", soft_wrap=True)
        return
    stdout.print(f"{len(changed)} of {len(results)} dead letters {judgement.done}", soft_wrap=True)
