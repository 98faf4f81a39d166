"""The official MCP client against the query service as a real HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent

WAY_IN = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
SEARCH = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "search", "arguments": {"query": "harbour"}},
}

CANARY = "canary-7f3a"
HOSTILE = (
    b"",
    b"no json " + CANARY.encode(),
    b"[]",
    b"null",
    b"1",
    b'"' + CANARY.encode() + b'"',
    b"{}",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"jsonrpc": "2.0", "id": 1, "method": "' + CANARY.encode() + b'"}',
    b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": 7, "arguments": "canary-7f3a"}}',
    b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "search", "arguments": ["canary-7f3a"]}}',
    b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": "canary-7f3a"}',
    b'{"jsonrpc": "1.0", "id": {}, "method": "tools/list", "params": {"cursor": "canary-7f3a"}}',
    b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "search", "arguments": {"query":'
    b' "canary-7f3a \\ud800", "limit": 1e400}}}',
    b'{"jsonrpc": "2.0", "id": 99999999999999999999999, "method": "tools/call", "params": {"name": "fetch",'
    b' "arguments": {"id": "canary-7f3a\\u0000", "offset": 99999999999999999999999}}}',
    b'[{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, {"jsonrpc": "2.0", "id": 2, "method": "canary-7f3a"}]',
    b'{"jsonrpc": "2.0", "id": 1, "result": {"canary-7f3a": 1}}',
    b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "canary-7f3a"}}',
)


class Bearer(httpx2.Auth):
    """The credentials of the current caller."""

    def __init__(self, token: str) -> None:
        self.token = token

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        request.headers["Authorization"] = f"Bearer {self.token}"
        yield request


@asynccontextmanager
async def connected(
    address: str, *, auth: Bearer | None = None, headers: Mapping[str, str] | None = None, mode: str = "auto"
) -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(auth=auth, headers=headers, timeout=60, verify=False) as http,
        Client(streamable_http_client(f"{address}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


class Person:
    """Connects anew for everything: a client belongs to the task that opened it, which no fixture's is the test's."""

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = headers

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        async with connected(self._address, headers=self._headers) as client:
            return await client.call_tool(name, arguments)


async def call(client: Client | Person, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return the result of a tool; a tool error fails the test."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, line(result)
    assert isinstance(result.structured_content, dict)
    return result.structured_content


async def refused(client: Client | Person, tool: str, **arguments: Any) -> str:
    """The one line that a tool fails with."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    assert result.structured_content is None
    return line(result)


def line(result: CallToolResult) -> str:
    [content] = result.content
    assert isinstance(content, TextContent)
    assert len(content.text.splitlines()) == 1
    return content.text
