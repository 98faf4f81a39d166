"""``penstock extract serve``: the extraction service."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

extract = typer.Typer(help="Read PDF, Office and mail files in a process without secrets.", no_args_is_help=True)


@extract.callback()
def root() -> None:
    """Read PDF, Office and mail files in a process without secrets."""


@extract.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 finds a free one. [default: 8070]")] = None,
) -> None:
    """Read files of others over HTTP until told to stop. The connectors that shall send theirs here have its address in
    PENSTOCK_EXTRACTION_URL.

    It needs no login and no other service, and reads PENSTOCK_EXTRACTION_… settings alone. Who reaches its port can
    have files read: let that be the connectors. See docs/extraction.md.

    Example: penstock extract serve --port 8070
    """
    from connectors.extraction.service import run
    from connectors.extraction.settings import from_environment
    from pipeline.telemetry import configure_logging

    configure_logging()
    chosen = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    asyncio.run(run(from_environment().model_copy(update=chosen), typer.echo))
