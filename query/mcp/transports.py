"""The MCP server over streamable HTTP, behind the service's gate, and over stdio for one person."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import cast

from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp

from pipeline.core.errors import Misconfigured
from pipeline.core.publication import Publication
from pipeline.trail import access, recorded
from query.access.callers import Caller
from query.auth.authenticator import LOOPBACK_NAMES
from query.auth.identity import Identity
from query.http.audit_trail import ToolCall, note_call, record_change
from query.http.dependencies import release_search, wait_for_publication
from query.mcp.asker import Asker
from query.mcp.server import Context, server
from query.service import Service
from query.settings import ServeSettings


@asynccontextmanager
async def sessions(service: Service) -> AsyncIterator[ASGIApp]:
    """Yields the ASGI application for requests that ``query.http.gate`` has authenticated."""

    async def identify(context: Context, publications: Sequence[Publication], seconds: float) -> Asker:
        identity = getattr(context.request and context.request.state, "identity", None)
        request = context.request
        if identity is None or request is None:
            raise Misconfigured("the MCP endpoint is not behind the gate")
        known = cast(Identity, identity)

        async def caller_at_present() -> Caller:
            return await service.search.identify(known.tenant, principals=known.principals, tags=known.tags)

        caller = await caller_at_present()
        caller, seen = await wait_for_publication(request, service, caller, publications, seconds)

        async def record(call: ToolCall) -> None:
            note_call(request, call)
            await record_change(request, 200)

        principal = known.principal if known.has("answers") else None
        return Asker(
            caller,
            principal,
            known.caller_class,
            seen,
            request.state.answering,
            lambda: release_search(request),
            record,
            caller_at_present,
            operator=known.operator,
            may_preview=known.has("previews"),
        )

    async def note(context: Context, call: ToolCall) -> None:
        assert context.request is not None
        note_call(context.request, call)  # the recorder writes it before the response is sent

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
    """Protection against DNS rebinding. Without allowed_hosts only development mode needs it: elsewhere the attacker's
    page has no token."""
    hosts = serve.allowed_hosts or (sorted(LOOPBACK_NAMES) if serve.development else ())
    named = [f"[{host}]" if ":" in host else host for host in hosts]
    origins = [f"{scheme}://{host}" for host in named for scheme in ("http", "https")]
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=bool(hosts),
        allowed_hosts=[*named, *(f"{host}:*" for host in named)],
        allowed_origins=[*serve.allowed_origins, *origins, *(f"{origin}:*" for origin in origins)],
    )


async def stdio(service: Service, tenant: str, *, principals: Sequence[str], tags: Sequence[str]) -> None:
    """Serve until stdin ends. The access of these principals and tags is looked up at every call."""

    person = principals[0] if len(principals) == 1 and not tags else None

    async def identify(context: Context, publications: Sequence[Publication], seconds: float) -> Asker:
        search = service.search
        seen = await search.wait_for(publications, tenant, principals=principals, tags=tags, seconds=seconds)

        async def caller_at_present() -> Caller:
            return await search.identify(tenant, principals=principals, tags=tags)

        return Asker(
            await caller_at_present(),
            person,
            "standard",
            seen,
            nullcontext,
            lambda: None,
            lambda call: note(context, call),
            caller_at_present,
        )

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

    mcp_server = server(service, identify, note)
    async with stdio_server() as (incoming, outgoing):
        await mcp_server.run(incoming, outgoing, mcp_server.create_initialization_options())
