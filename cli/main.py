"""The ``penstock`` command: names every command and turns errors into one line and an exit code.

A command's module is imported when the command is called, so that nobody waits for the libraries of the others.

Exit codes: 0 done, 1 it did not work (one line says why), 2 the command was used wrongly, 3 what was measured
is too low or worse than before.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.core import TyperGroup
from typer.main import get_group

from cli.extras import Extra, require, requiring
from cli.terminal import echo
from pipeline.core.errors import PenstockError

if TYPE_CHECKING:
    from typer._click import Command, Context  # Typer's own names for them are subclasses


COMMANDS: Mapping[str, str] = {
    "up": "stack:up",
    "down": "stack:down",
    "status": "status:status",
    "serve": "serve:serve",
    "mcp": "serve:mcp",
    "ingest": "ingest:ingest",
    "watch": "ingest:watch",
    "search": "search:search",
    "ask": "ask:ask",
    "standing": "standing:standing",
    "why": "why:why",
    "rebuild": "generation:rebuild",
    "recover": "recover:recover",
    "audit": "audit:audit",
    "plan": "plan:plan",
    "eval": "eval:evaluate",
    "dead": "dead:dead",
    "connector": "connector:connector",
    "extract": "serve:extract",
    "document": "withdraw:document",
    "tenant": "withdraw:tenant",
    "forget": "forget:forget",
    "export": "export:export",
    "golden": "golden:golden",
    "preview": "preview:preview",
    "generation": "generation:generation",
    "producer": "producer:producer",
    "trail": "trail:trail",
    "budget": "budget:budget",
    "webhook": "webhook:webhook",
    "metadata": "metadata:metadata",
    "conflicts": "conflicts:conflicts",
}
"""By name, the module in ``cli`` and in it a function, or a Typer with commands of its own."""

NEEDS: Mapping[str, tuple[Extra, ...]] = {
    "up": ("local", "worker", "query"),
    "down": ("local",),
    "status": ("worker",),
    "serve": ("query",),
    "mcp": ("query",),
    "ingest": ("connectors",),
    "watch": ("connectors",),
    "search": (),  # by the running service; without one it requires what it needs then
    "ask": ("query",),
    "standing": ("query",),
    "why": ("query",),
    "rebuild": ("worker",),
    "recover": ("worker",),
    "audit": ("worker",),
    "plan": (),
    "eval": ("eval", "query", "worker"),
    "dead": ("worker",),
    "connector": ("connectors",),
    "extract": ("connectors",),
    "document": ("worker",),
    "tenant": ("worker",),
    "forget": ("worker",),
    "export": ("worker",),
    "golden": ("eval", "query"),
    "preview": ("connectors",),  # by a running service; without one it requires what it needs then
    "generation": ("worker",),
    "producer": ("worker",),
    "trail": ("worker",),
    "budget": ("worker",),
    "webhook": ("connectors",),
    "metadata": ("worker",),
    "conflicts": ("query",),
}
"""The extras that a command needs when it runs. Its help needs none."""


class Commands(TyperGroup):
    """The registered commands, then those of COMMANDS, which are imported on demand."""

    def list_commands(self, ctx: Context) -> list[str]:
        return [*dict.fromkeys([*super().list_commands(ctx), *COMMANDS])]

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name in COMMANDS:
            self._load(cmd_name)
        elif cmd_name not in self.commands:  # "Did you mean …?" looks at all of them
            for name in COMMANDS:
                self._load(name)
        return super().get_command(ctx, cmd_name)

    def _load(self, name: str) -> None:
        if name not in self.commands:
            module, _, attribute = COMMANDS[name].partition(":")
            command = getattr(import_module(f"cli.{module}"), attribute)
            alone = typer.Typer(rich_markup_mode="rich")
            if isinstance(command, typer.Typer):
                alone.add_typer(command, name=name)
            else:
                alone.command(name)(command)
            loaded = get_group(alone).commands
            _complete(loaded.values(), NEEDS[name])
            self.commands.update(loaded)


def _complete(commands: Iterable[Command], needs: tuple[Extra, ...]) -> None:
    """Join the lines of each paragraph of help, because Typer wraps them to the terminal's width but keeps line breaks;
    and let each command require its extras before it runs. (A group's own callback runs before its commands' help.)"""
    for command in commands:
        if command.help:
            command.help = re.sub(r"(?<!\n)\n(?![\n -])", " ", cleandoc(command.help))
        if isinstance(command, TyperGroup):
            _complete(command.commands.values(), needs)
        elif command.callback is not None:
            command.callback = requiring(command.callback, needs)


app = typer.Typer(
    name="penstock",
    cls=Commands,
    help="Keeps a company's knowledge searchable: documents → Kafka → pgvector and Elasticsearch → hybrid search.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        echo(f"penstock {version('penstock')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand != "search":  # a search seldom needs a library that logs
        from cli.output import log_warnings_to_stderr

        log_warnings_to_stderr(context)


@app.command()
def migrate(
    partitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Minimum number of partitions of each topic of the stages. They can be added while workers run, but"
            " never removed.",
        ),
    ] = None,
) -> None:
    """Create or update what the workers need: the database schema, the topics, the first generation and its index.

    Running it again is harmless.

    Example: penstock migrate --partitions 16
    """
    require("worker")
    import asyncio

    from cli.setup import prepare

    for line in asyncio.run(prepare(partitions=partitions)) or ["Everything is up to date."]:
        echo(line)


Worker = Literal["detect", "vectors", "keywords", "analysis", "all", "connectors", "canary"]
WORKER_NEEDS: Mapping[str, tuple[Extra, ...]] = {
    "connectors": ("connectors",),
    "canary": ("worker", "query"),
    "analysis": ("worker", "query"),
    "all": ("worker", "query"),
}
"""The extras of the workers that need others than ``worker``."""


@app.command()
def worker(
    name: Annotated[Worker, typer.Argument(help="Kind of worker.")],
) -> None:
    """Run one worker until it is stopped. On SIGTERM it completes the work it has begun. Start more to go faster.

    all: detect, vectors, keywords and analysis in one process, which needs less memory and uses one processor.

    Example: penstock worker detect
    """
    require(*WORKER_NEEDS.get(name, ("worker",)))
    import asyncio

    from pipeline.observability.metrics import configure_logging
    from pipeline.runtime.settings import load

    configure_logging()
    if name == "connectors":
        from connectors import worker as connectors
        from connectors.declared import declared_or_none

        settings = load()
        asyncio.run(connectors.run(settings, declared_or_none(needed=settings.webhooks.key is None)))
        return
    if name == "canary":
        from canary import worker as canary

        asyncio.run(canary.run(load()))
        return
    from cli.workers import run

    asyncio.run(run(name, load()))


ONE_THREAD: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1"}
"""For numpy's linear algebra. By default, it has a thread for each processor, and these spin for milliseconds after
each product, to be ready for the next: a search, which has one small product, took 2.5 times the processor time."""


def main() -> None:
    for name, value in ONE_THREAD.items():  # before anything imports numpy, which reads it once
        os.environ.setdefault(name, value)
    try:
        app(prog_name="penstock")  # however it was started: completion and the lines of usage call it by its name
    except PenstockError as error:
        echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        echo("stopped", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
