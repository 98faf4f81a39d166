"""The server over streamable HTTP, behind the service's own gate, and over stdio for one person."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp

from pipeline.core.errors import Misconfigured
from pipeline.trail import access, recorded
from query.access.callers import Caller
from query.auth.authenticator import LOOPBACK_NAMES
from query.auth.identity import Who
from query.http.audit_trail import ToolCall, note_call
from query.mcp.server import Context, server
from query.service import Service
from query.settings import ServeSettings


@asynccontextmanager
async def sessions(service: Service) -> AsyncIterator[ASGIApp]:
    """Yields what handles the requests of callers whom ``query.http.gate`` has let in."""

    async def identify(context: Context) -> Caller:
        who = getattr(context.request and context.request.state, "who", None)
        if who is None:
            raise Misconfigured("the MCP endpoint is not behind the gate")
        asker = cast(Who, who)
        return await service.search.identify(asker.tenant, principals=asker.principals, tags=asker.tags)

    async def note(context: Context, call: ToolCall) -> None:
        assert context.request is not None
        note_call(context.request, call)  # the recorder writes it before the answer goes out

    serve = service.query.serve
    manager = StreamableHTTPSessionManager(
        server(service, identify, note),
        json_response=True,
        stateless=True,
        security_settings=security(serve),
        max_request_body_size=serve.max_body_bytes,
    )
    async with manager.run():
        yield manager.handle_request


def security(serve: ServeSettings) -> TransportSecuritySettings:
    """Against names that were rebound to this address. Without allowed_hosts only development needs it: elsewhere a
    page that was tricked here has no token to show."""
    hosts = serve.allowed_hosts or (sorted(LOOPBACK_NAMES) if serve.development else ())
    named = [f"[{host}]" if ":" in host else host for host in hosts]
    origins = [f"{scheme}://{host}" for host in named for scheme in ("http", "https")]
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=bool(hosts),
        allowed_hosts=[*named, *(f"{host}:*" for host in named)],
        allowed_origins=[*serve.allowed_origins, *origins, *(f"{origin}:*" for origin in origins)],
    )


async def stdio(service: Service, tenant: str, *, principals: Sequence[str], tags: Sequence[str]) -> None:
    """Until stdin ends. What these principals and tags hold is looked up at every call."""

    async def identify(_: Context) -> Caller:
        return await service.search.identify(tenant, principals=principals, tags=tags)

    async def note(_: Context, call: ToolCall) -> None:
        record = recorded(
            call.action,
            tenant=tenant,
            access=access(principals, tags),
            object=call.object,
            documents=call.documents,
            decision=call.decision,
            reason=call.reason,
        )
        if call.decision == "failed":
            service.trail.offer(record)
        else:
            await service.trail.write(record)

    made = server(service, identify, note)
    async with stdio_server() as (incoming, outgoing):
        await made.run(incoming, outgoing, made.create_initialization_options())
