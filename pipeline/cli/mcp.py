"""``penstock mcp``: search and fetch for a language-model client on this machine, over stdio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer


def mcp(
    tenant: Annotated[str, typer.Option(help="Whose documents.")] = "default",
    principals: Annotated[
        list[str] | None, typer.Option("--as", metavar="PRINCIPAL", help="Read what this person reads. Repeatable.")
    ] = None,
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="TAG", help="Hold this access tag (TAG, or SOURCE/TAG). Repeatable."),
    ] = None,
) -> None:
    """Speak MCP on stdin and stdout, for a client that starts this command (see docs/mcp.md). Logs go to stderr.

    Without --as and --tag you are the local user, who reads what `penstock ingest` stored for him. Other people's
    clients use the service: POST /mcp of `penstock serve`.

    Example: penstock mcp --as ann@example.org
    """
    from pipeline import tracing
    from pipeline.telemetry import configure_logging

    configure_logging()
    if not principals and not tags:
        from pipeline.cli.readers import local_user

        principals = [local_user("say who asks with --as or --tag")]
    with tracing.running("mcp"):
        asyncio.run(_mcp(tenant, principals or [], tags or []))


async def _mcp(tenant: str, principals: Sequence[str], tags: Sequence[str]) -> None:
    from pipeline.settings import load
    from query.mcp.transports import stdio
    from query.service import open_service
    from query.settings import load as load_query

    async with open_service(load(), load_query(), name="penstock mcp") as service:
        service.following.start()
        await stdio(service, tenant, principals=principals, tags=tags)
