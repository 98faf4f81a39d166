"""The official MCP client against the query service as a real HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent


class Bearer(httpx2.Auth):
    """Of whoever it is at the moment."""

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
    """What a tool gives; a tool error fails the test."""
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
