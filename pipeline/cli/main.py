"""The ``penstock`` command: knows every command (pipeline/cli/lazy.py) and turns errors into one line and an exit code.

Exit codes: 0 done, 1 it did not work (one line says why), 2 the command was used wrongly.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pipeline.cli import logs
from pipeline.cli.lazy import Commands
from pipeline.core.errors import PenstockError

app = typer.Typer(
    name="penstock",
    cls=Commands,
    help="Keeps a company's knowledge searchable: documents → Kafka → pgvector and Elasticsearch → hybrid search.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print which version this is.")
    ] = False,
) -> None:
    if context.invoked_subcommand != "search":  # which most often needs no library that logs
        logs.beside_the_answer(context)


@app.command()
def migrate() -> None:
    """Create or update what the workers need: schema, topics, the first generation, its index. Repeats are harmless."""
    import asyncio

    from pipeline.cli.setup import prepare

    for line in asyncio.run(prepare()) or ["Everything is up to date."]:
        typer.echo(line)


@app.command()
def worker(name: Annotated[str, typer.Argument(help="detect, vectors, keywords, connectors or canary")]) -> None:
    """Run one worker until it is told to stop (SIGTERM drains it). Scale by starting more of them.

    Example: penstock worker detect
    """
    import asyncio

    from pipeline.settings import load
    from pipeline.telemetry import configure_logging

    configure_logging()
    if name == "connectors":
        from connectors import worker as connectors
        from connectors.declared import load as declared

        asyncio.run(connectors.run(load(), declared()))
        return
    if name == "canary":
        from pipeline.canary import worker as canary

        asyncio.run(canary.run(load()))
        return
    from pipeline.stream.worker import run

    asyncio.run(run(name, load()))


def main() -> None:
    try:
        app()
    except PenstockError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
