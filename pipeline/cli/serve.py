"""``penstock serve``: the query service."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 finds a free one. [default: 8080]")] = None,
) -> None:
    """Serve search and answers over HTTP until told to stop (SIGTERM finishes what is under way, for a few seconds).

    Who asks is proved by tokens (PENSTOCK_AUTH_JWKS_URL, _ISSUER, _AUDIENCE) or keys (PENSTOCK_AUTH_KEYS_FILE).
    On your own machine PENSTOCK_SERVE_DEVELOPMENT=true lets whoever can read development-token in PENSTOCK_HOME say who
    asks. See docs/http.md.

    Example: penstock serve --port 8080
    """
    from pipeline import tracing
    from pipeline.home import DEVELOPMENT_FILE, home, page_address
    from pipeline.settings import load
    from pipeline.telemetry import configure_logging
    from query.http.serve import run
    from query.settings import load as load_query

    configure_logging()
    settings, query = load(), load_query()
    chosen = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    query = query.model_copy(update={"serve": query.serve.model_copy(update=chosen)})

    def ready(address: str) -> None:
        typer.echo(address)
        file = query.serve.development_token_file or home() / DEVELOPMENT_FILE
        if query.serve.development and sys.stdout.isatty() and (page := page_address(address, file)) is not None:
            typer.echo(f"Copy into your browser: {page}")

    with tracing.running("query"):
        asyncio.run(run(settings, query, ready))
