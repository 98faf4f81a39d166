"""``penstock serve``: the query service."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from cli.options import Principals, Tags, Tenant
from cli.terminal import echo


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free port. [default: 8080]")
    ] = None,
) -> None:
    """Serve search and answers over HTTP until stopped. After SIGTERM, open requests have a few seconds to finish.

    Callers are authenticated by tokens (PENSTOCK_AUTH_JWKS_URL, _ISSUER, _AUDIENCE) or keys (PENSTOCK_AUTH_KEYS_FILE).
    On your own machine PENSTOCK_SERVE_DEVELOPMENT=true lets everybody who can read the file development-token in
    PENSTOCK_HOME search as any person. See docs/http.md.

    Example: penstock serve --port 8080
    """
    from pipeline.observability import tracing
    from pipeline.observability.metrics import configure_logging
    from pipeline.runtime.home import DEVELOPMENT_FILE, home, page_address
    from pipeline.runtime.settings import load
    from query.http.serve import run
    from query.settings import load as load_query

    configure_logging()
    settings, query = load(), load_query()
    chosen = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    query = query.model_copy(update={"serve": query.serve.model_copy(update=chosen)})

    def ready(address: str) -> None:
        echo(address)
        file = query.serve.development_token_file or home() / DEVELOPMENT_FILE
        if query.serve.development and sys.stdout.isatty() and (page := page_address(address, file)) is not None:
            echo(f"Copy into your browser: {page}")

    with tracing.running("query"):
        asyncio.run(run(settings, query, ready))


def mcp(
    tenant: Tenant = "default",
    principals: Principals = None,
    tags: Tags = None,
) -> None:
    """Serve MCP on stdin and stdout, for a client that starts this command (see docs/mcp.md). Logs go to stderr.

    Without --as and --tag you read as the local user, who may read what `penstock ingest` stored for that user.
    Clients of other people use the service: POST /mcp of `penstock serve`.

    Example: penstock mcp --as ann@example.org
    """
    from pipeline.observability import tracing
    from pipeline.observability.metrics import configure_logging

    configure_logging()
    if not principals and not tags:
        from cli.readers import local_user

        principals = [local_user("name a person with --as, or an access tag with --tag")]
    with tracing.running("mcp"):
        asyncio.run(_mcp(tenant, principals or [], tags or []))


async def _mcp(tenant: str, principals: Sequence[str], tags: Sequence[str]) -> None:
    from cli.recorded import able_to_record
    from pipeline.runtime.settings import load
    from query.mcp.transports import stdio
    from query.service import open_service
    from query.settings import load as load_query

    settings = await able_to_record(load())
    async with open_service(settings, load_query(), name="penstock mcp") as service:
        service.following.start()
        await stdio(service, tenant, principals=principals, tags=tags)


extract = typer.Typer(
    help="Extract text from PDF, Office and mail files in a process that has no secrets.", no_args_is_help=True
)


@extract.callback()
def extract_root() -> None:
    """Extract text from PDF, Office and mail files in a process that has no secrets."""


@extract.command("serve")
def extract_serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free port. [default: 8070]")
    ] = None,
) -> None:
    """Extract text from files that connectors send over HTTP, until stopped. The connectors have this service's
    address in PENSTOCK_EXTRACTION_URL.

    It needs no login and no other service, and reads only the settings PENSTOCK_EXTRACTION_…. It does not authenticate
    its clients: let only the connectors reach its port. See docs/extraction.md.

    Example: penstock extract serve --port 8070
    """
    from connectors.extraction.service import run
    from connectors.extraction.settings import from_environment
    from pipeline.observability.metrics import configure_logging

    configure_logging()
    chosen = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    asyncio.run(run(from_environment().model_copy(update=chosen), echo))
