"""The ``penstock`` command: registers every command and turns errors into one line and an exit code.

Exit codes: 0 done, 1 it did not work (one line says why), 2 the command was used wrongly.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from pipeline.cli.ask import ask
from pipeline.cli.audit import audit
from pipeline.cli.connector import connector
from pipeline.cli.dead import dead
from pipeline.cli.eval import evaluate
from pipeline.cli.generation import generation
from pipeline.cli.golden import golden
from pipeline.cli.ingest import ingest, watch
from pipeline.cli.mcp import mcp
from pipeline.cli.plan import plan
from pipeline.cli.rebuild import rebuild
from pipeline.cli.recover import recover
from pipeline.cli.search import search
from pipeline.cli.serve import serve
from pipeline.cli.stack import down, up
from pipeline.cli.status import status
from pipeline.cli.why import why
from pipeline.core.errors import PenstockError

app = typer.Typer(
    name="penstock",
    help="Keeps a company's knowledge searchable: documents → Kafka → pgvector and Elasticsearch → hybrid search.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print which version this is.")
    ] = False,
) -> None:
    import structlog

    # What is said beside an answer, from warnings on, never comes between the answer's lines; workers say all of it.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    context.call_on_close(structlog.reset_defaults)


@app.command()
def migrate() -> None:
    """Create or update what the workers need: schema, topics, the first generation, its index. Repeats are harmless."""
    from pipeline.cli.setup import prepare

    for line in asyncio.run(prepare()) or ["Everything is up to date."]:
        typer.echo(line)


@app.command()
def worker(name: Annotated[str, typer.Argument(help="detect, vectors, keywords, connectors or canary")]) -> None:
    """Run one worker until it is told to stop (SIGTERM drains it). Scale by starting more of them.

    Example: penstock worker detect
    """
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


for command in (up, down, status, serve, mcp, ingest, watch, search, ask, why, rebuild, recover, audit, plan):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(dead)
app.add_typer(connector)
app.add_typer(golden)
app.add_typer(generation)


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
