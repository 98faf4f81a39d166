"""``penstock connector``: what is connected, how it is, and what is to be done about it."""

from __future__ import annotations

import asyncio
import keyword
import logging
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.extras import require
from cli.output import Json, log_warnings_to_stderr, print_fault, print_json, stderr, stdout
from cli.recorded import record, recording
from pipeline.core.errors import Misconfigured
from pipeline.installed import is_installed

if TYPE_CHECKING:
    from connectors.declared import Declared
    from connectors.operate import Summary
    from connectors.protocol import Problem

connector = typer.Typer(
    name="connector",
    help="Connectors: the sources declared in connectors.toml. Their worker is `penstock worker connectors`.",
    no_args_is_help=True,
)

File = Annotated[
    Path | None,
    typer.Option("--file", help="File of connectors. Default: PENSTOCK_CONNECTORS_FILE, else ./connectors.toml."),
]
Name = Annotated[str, typer.Argument(help="Name of the connector in connectors.toml.", show_default=False)]
MaybeName = Annotated[str | None, typer.Argument(help="Name of one connector. Default: all.", show_default=False)]


def declarations(file: Path | None) -> Declared:
    from connectors.declared import load

    return load(file)


@connector.command("list")
def list_connectors(file: File = None, json_output: Json = False) -> None:
    """List the declared connectors and their state.

    Example: penstock connector list --json
    """
    connectors = asyncio.run(_summaries(declarations(file), None, with_documents=False))
    if json_output:
        print_json([connector.json() for connector in connectors])
        return
    from cli.connector_show import show_list

    show_list(connectors)


@connector.command()
def status(name: MaybeName = None, file: File = None, json_output: Json = False) -> None:
    """Show the state of each connector, its last success and its problems. Exit code 1 if one has a problem, else 0.

    Example: penstock connector status wiki
    """
    connectors = asyncio.run(_summaries(declarations(file), name, with_documents=True))
    if json_output:
        print_json([connector.json() for connector in connectors])
    else:
        from cli.connector_show import show_status

        for connector in connectors:
            show_status(connector)
    if not all(connector.is_well for connector in connectors):
        raise typer.Exit(1)


@connector.command()
def check(name: MaybeName = None, file: File = None, json_output: Json = False) -> None:
    """Check the settings of connectors, and name a missing scope, token or address before they run. Changes nothing.

    Exit code 1: something is missing.

    Example: penstock connector check wiki
    """
    from connectors.operate import check_all
    from pipeline.runtime.settings import load as load_settings

    declared = declarations(file)
    plans = [declared.plan(name)] if name else list(declared.plans.values())
    settings = load_settings()
    by_connector: dict[str, list[Problem]] = asyncio.run(
        check_all(
            plans,
            settings.connectors.events_url,
            settings.postgres,
            on_fault=print_fault if sys.stderr.isatty() else lambda _error: None,  # it may quote what the source holds
        )
    )
    if json_output:
        print_json(
            [
                {
                    "name": connector,
                    "ok": not problems,
                    "problems": [{"code": p.code, "path": p.path, "message": p.message} for p in problems],
                }
                for connector, problems in by_connector.items()
            ]
        )
    for connector, problems in by_connector.items() if not json_output else ():
        if not problems:
            stdout.print(f"[green]✓[/] {connector}")
        for problem in problems:
            stdout.print("[red]✗[/]", end=" ")
            text = problem.message if problem.path == connector else str(problem)
            stdout.print(f"{connector}: {text.removeprefix(f'{connector}: ')}", soft_wrap=True, markup=False)
    if any(by_connector.values()):
        raise typer.Exit(1)


@connector.command()
def run(
    name: Name,
    full: Annotated[
        bool, typer.Option("--full", help="Read everything again. Unchanged documents are not published.")
    ] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Compare with the source's whole listing.")] = False,
    document: Annotated[
        str | None, typer.Option("--document", metavar="ID", help="Read one document again, by its external id.")
    ] = None,
    allow_mass_delete: Annotated[
        bool, typer.Option("--allow-mass-delete", help="Sweep, and delete all documents that are gone from the source.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue until Ctrl-C, and print what is published.")
    ] = False,
    file: File = None,
    json_output: Json = False,
) -> None:
    """Bring a connector up to date now: in the running worker, or in this process if there is none.

    Without options: the first load if it is not complete, then changes, groups and a sweep. Exit code 1: something
    failed, or a mass deletion needs your confirmation.

    Examples:

      penstock connector run wiki

      penstock connector run wiki --document 98311

      penstock connector run wiki --allow-mass-delete
    """
    from cli.connector_run import run_once
    from pipeline.runtime.settings import load as load_settings

    actions: list[tuple[str, str | None]] = []
    if document is not None:
        actions.append(("document", document))
    if full:
        actions.append(("full", None))
    if allow_mass_delete:
        actions.append(("allow_mass_delete", None))
    elif sweep:
        actions.append(("sweep", None))
    plan = declarations(file).plan(name)
    record("connector.run", object=f"source:{name}")
    result = asyncio.run(run_once(load_settings(), plan, actions, follow=follow, quiet=json_output))
    if json_output:
        print_json(result)
    else:
        from cli.connector_show import show_outcome

        show_outcome(result)
    if not result["ok"]:
        raise typer.Exit(1)


@connector.command()
def pause(name: Name, file: File = None, json_output: Json = False) -> None:
    """Pause a connector after the page it is reading. Its documents stay searchable; changes of access are not read!

    Example: penstock connector pause wiki
    """
    _set_paused(name, file, json_output, paused=True)


@connector.command()
def resume(name: Name, file: File = None, json_output: Json = False) -> None:
    """Continue a paused or removed connector where it stopped. Withdrawn documents are read again.

    Example: penstock connector resume wiki
    """
    _set_paused(name, file, json_output, paused=False)


@connector.command()
def remove(
    name: Annotated[str, typer.Argument(help="Name of the connector, declared or not.", show_default=False)],
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Also take its documents and groups out of the index.")
    ] = False,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="The connector's tenant, if several tenants have one of this name.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    file: Annotated[
        Path | None, typer.Option("--file", help="File of connectors, which names the connector's tenant.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Stop a connector for good, without alerts about it. Without --withdraw its documents stay searchable, with the
    access rights that were read last! `penstock connector resume` starts it again.

    Example: penstock connector remove wiki --withdraw --yes
    """
    from typing import Any

    from cli.withdraw import agreed, show_outcome, wire, withdraw_all, withdrawal

    if file is not None and tenant is None and (plan := declarations(file).plans.get(name)) is not None:
        tenant = plan.tenant

    async def change() -> dict[str, Any]:
        from connectors.withdraw import tenant_of

        async with wire() as (pool, kafka):
            of_tenant = await tenant_of(pool, name, tenant)
            withdrawn = withdrawal(pool, kafka, of_tenant, name)
            summary: dict[str, Any] = {"name": name, "tenant": of_tenant}
            await recording("connector.remove", tenant=of_tenant, object=f"source:{name}")
            if withdraw:
                return summary | await withdraw_all([withdrawn], what=f"connector {name}", yes=yes, quiet=json_output)
            stay = (await withdrawn.extent()).documents
            question = f"Remove connector {name}? Its {stay} documents stay searchable; --withdraw also withdraws them."
            if not agreed(question, yes=yes, quiet=json_output):
                return {**summary, "done": False}
            await withdrawn.remove()
            return {**summary, "documents": 0, "done": True}

    show_outcome(asyncio.run(change()), json_output)


@connector.command()
def conform(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|MODULE:CLASS",
            help="A declared connector, a built-in kind, or a class of your own.",
            show_default=False,
        ),
    ],
    law: Annotated[list[str] | None, typer.Option("--law", help="Test only this law. Repeatable.")] = None,
    file: File = None,
    json_output: Json = False,
) -> None:
    """Test that a connector obeys the laws of connectors, on its own playground and the running stack.

    It uses a tenant of its own, which is removed afterwards. Exit code 0: every law holds. 1: one does not. It is
    installed with the extra conform.

    Examples:

      penstock connector conform confluence

      penstock connector conform mycompany.tickets:Tickets --law edit --law delete
    """
    require("conform")
    from connectors.conform.run import Verdict, conform_on
    from connectors.faults import NotImported
    from pipeline.runtime.settings import load as load_settings

    sys.path.append(str(Path.cwd()))  # where one's own class is, while it is being written
    log_warnings_to_stderr(context, logging.ERROR)  # of readers who leave, of sources that are away: that is the trial
    kind, printed = _kind(name, file), set[str]()

    def show(verdict: Verdict) -> None:
        if not json_output:
            stdout.print(verdict.line(), markup=False)
        if verdict.fault is not None and verdict.why not in printed:
            printed.add(verdict.why)
            print_fault(verdict.fault)  # a playground has no content to quote

    try:
        verdicts = asyncio.run(conform_on(load_settings(), kind, law, on_verdict=show))
    except NotImported as error:
        if error.__cause__ is not None:
            print_fault(error.__cause__)
        raise
    if verdicts[0].stops and not json_output:
        stdout.print("nothing can be loaded, so no other law was tested")
    if json_output:
        print_json({"kind": kind, "conforms": all(v.holds for v in verdicts), "laws": [v.json() for v in verdicts]})
    if not all(v.holds for v in verdicts):
        raise typer.Exit(1)


@connector.command()
def new(
    name: Annotated[
        str,
        typer.Argument(help="Name of the source and its folder: lower-case letters, digits and _.", show_default=False),
    ],
) -> None:
    """Write a folder with a source of your own, and a small service to test it on.

    It passes `penstock connector conform` as it is; change it from there.

    Example: penstock connector new tickets
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise Misconfigured(f"{name!r} cannot be a Python package: use lower-case letters, digits and _")
    folder, kind = Path(name), "".join(part.title() for part in name.split("_"))
    if folder.exists():
        raise Misconfigured(f"{folder} exists already: choose another name")
    if is_installed(name):
        raise Misconfigured(f"{name!r} is the name of a module that is installed here: choose another")
    try:
        folder.mkdir()
    except OSError as error:
        raise Misconfigured(f"{folder} cannot be created ({error.strerror})") from error
    (folder / "__init__.py").touch()
    text = (files("penstock") / "template" / "source.py").read_text("utf-8")
    (folder / "source.py").write_text(text.replace("Tickets", kind), "utf-8")
    stdout.print(f"{folder}/source.py reads the service; its playground is a service to test it on.", markup=False)
    stdout.print(f"Test it on a running stack: penstock connector conform {name}.source:{kind}", soft_wrap=True)


def _kind(name: str, file: Path | None) -> str:
    """A declared connector's kind; else the name is a kind itself."""
    from connectors.declared import BUILT_IN, file_of

    if ":" in name or name == "conversations" or (name in BUILT_IN and not file_of(file).exists()):
        return name
    if file_of(file).exists():
        declared = declarations(file)
        if name in declared.plans:
            return declared.plans[name].kind
        if name in BUILT_IN:
            return name
    return declarations(file).plan(name).kind


def _set_paused(name: str, file: Path | None, json_output: bool, *, paused: bool) -> None:
    declared = declarations(file)
    plan = declared.plan(name)
    record("connector.pause" if paused else "connector.resume", object=f"source:{name}")

    async def change() -> list[Summary]:
        from connectors.operate import pause as set_paused
        from pipeline.runtime.settings import load as load_settings
        from pipeline.stores.postgres import open_pool

        async with open_pool(load_settings().postgres) as pool:
            await set_paused(pool, plan, paused=paused)
        return await _summaries(declared, name, with_documents=False)

    [outcome] = asyncio.run(change())
    if json_output:
        print_json({"name": name, "paused": paused, "state": outcome.state})
    else:
        stderr.print(f"{name}: {'paused' if paused else 'resumed'}", markup=False)


async def _summaries(declared: Declared, name: str | None, *, with_documents: bool) -> list[Summary]:
    from connectors.operate import summarize
    from pipeline.runtime.settings import load as load_settings
    from pipeline.stores.postgres import open_pool

    plans = [declared.plan(name)] if name else list(declared.plans.values())
    async with open_pool(load_settings().postgres) as pool:
        return [await summarize(pool, plan, with_documents=with_documents) for plan in plans]
