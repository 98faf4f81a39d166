"""The tools as an MCP server, whatever the transport. Errors are tool errors of one line, for a model to read."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any
from uuid import UUID

import structlog
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)
from pydantic import BaseModel, ValidationError

from pipeline.observability import tracing
from query import problems
from query.access.callers import Caller
from query.http.audit_trail import ToolCall
from query.mcp import tools
from query.mcp.shapes import NOTICE, FetchArguments, FetchGiven, SearchArguments, SearchGiven
from query.service import Service

log = structlog.get_logger()

Context = ServerRequestContext[dict[str, Any], Any]
Identify = Callable[[Context], Awaitable[Caller]]
"""Who makes this call, and what that caller may read now. Asked at every call: never a session's first one."""

Note = Callable[[Context, ToolCall], Awaitable[None]]
"""For the audit trail; called before what was found is given."""

INSTRUCTIONS = f"""\
Search this organisation's documents, restricted to those that your user may read. `search` returns matching passages;
`fetch` returns a whole document by the id of a result. Cite the url. {NOTICE}"""


@dataclass(frozen=True)
class _Tool:
    name: str
    title: str
    description: str
    takes: type[BaseModel]
    gives: type[BaseModel]
    does: Callable[[Service, Caller, Any], Awaitable[BaseModel]]
    shows: Callable[[Any], Sequence[UUID]]
    """The documents in what it gives."""

    def described(self) -> Tool:
        return Tool(
            name=self.name,
            title=self.title,
            description=self.description,
            input_schema=self.takes.model_json_schema(),
            output_schema=self.gives.model_json_schema(),
            annotations=ToolAnnotations(
                title=self.title,
                read_only_hint=True,
                destructive_hint=False,
                idempotent_hint=True,
                open_world_hint=False,
            ),
        )


TOOLS = (
    _Tool(
        "search",
        "Search documents",
        "Find the documents that answer a question, by meaning and by keyword, with the matching passages."
        " Exact identifiers (PROJ-4821, an error code, a file name) are matched exactly."
        f" Only documents that your user may read are returned. {NOTICE}",
        SearchArguments,
        SearchGiven,
        tools.search,
        tools.shown,
    ),
    _Tool(
        "fetch",
        "Read a document",
        f"Return the text of one document by the id of a search result, a long document in parts. {NOTICE}",
        FetchArguments,
        FetchGiven,
        tools.fetch,
        lambda given: [UUID(given.id)],
    ),
)


def server(service: Service, identify: Identify, note: Note) -> Server[dict[str, Any]]:
    """Keeps nothing between calls. identify and note: raise PenstockError."""
    named = {tool.name: tool for tool in TOOLS}

    async def list_tools(_: Context, __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[tool.described() for tool in TOOLS])

    async def call_tool(context: Context, params: CallToolRequestParams) -> CallToolResult:
        tool = named.get(params.name)
        if tool is None:
            raise MCPError(INVALID_PARAMS, f"unknown tool: the tools are {' and '.join(named)}")
        try:
            asked = tool.takes.model_validate(params.arguments or {})
        except ValidationError as error:
            return _failed(_wrong(error))
        about = {"mcp.method.name": "tools/call", "gen_ai.tool.name": tool.name}
        with tracing.begin(f"tools/call {tool.name}", "server", attributes=about) as span:
            try:
                given = await tool.does(service, await identify(context), asked)
                await note(context, ToolCall(tool.name, "allowed", documents=tool.shows(given)))
            except tools.Missing as error:
                await note(context, ToolCall(tool.name, "refused", "not-found", object=tools.named(asked)))
                return _failed(str(error))
            except Exception as error:  # noqa: BLE001 # whatever it is: an answer of ours, and a line in the log
                span.failed(error)
                _log(tool.name, error)
                await note(context, ToolCall(tool.name, "failed", problems.of(error).kind))
                return _failed(problems.of(error).detail)
        told = given.model_dump(mode="json")
        text = json.dumps(told, ensure_ascii=False)
        return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=told)

    return Server(
        "penstock",
        title="Penstock",
        version="1",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _failed(line: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=line)], is_error=True)


def _wrong(error: ValidationError) -> str:
    """Where and what is expected there; never what was sent."""
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    first = errors[0]
    where = ".".join(str(part)[:100] for part in first["loc"]) or "the arguments"
    return " ".join(f"{where}: {first['msg'][:200]}".split())


def _log(tool: str, error: Exception) -> None:
    """As ``query.http.gate`` does: a word about what is ours to mend, and nothing that could quote content."""
    problem = problems.of(error)
    if problem.kind == "bad-query":
        return
    if problem.kind == "failed":
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in extract_tb(error.__traceback__)]
        log.error("tool_failed", tool=tool, error=type(error).__name__, at=frames)
    else:
        log.warning("tool_unavailable", tool=tool, reason=str(error))
