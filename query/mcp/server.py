"""The tools as an MCP server for any transport. Errors are tool errors of one line, for a model to read."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any, Literal
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

from pipeline.core.publication import Publication
from pipeline.observability import tracing
from query import problems
from query.access.callers import Caller
from query.http.audit_trail import ToolCall
from query.http.schemas import AtLeastResponse, PublicationRequest
from query.mcp import previews, standing, tools
from query.mcp.asker import Asker, Outcome
from query.mcp.previews import MayNotPreview
from query.mcp.shapes import (
    NOTICE,
    ConflictsArguments,
    ConflictsOutput,
    FetchArguments,
    FetchOutput,
    NoArguments,
    PreviewArguments,
    PreviewOutput,
    SearchArguments,
    SearchOutput,
    StandingAnswerOutput,
    StandingArguments,
    StandingKeepArguments,
    StandingListOutput,
    StandingOutput,
    StandingRemoveOutput,
)
from query.mcp.standing import NotAPerson
from query.model import AtLeast
from query.service import Service
from query.standing.questions import Unknown

log = structlog.get_logger()

Context = ServerRequestContext[dict[str, Any], Any]
Identify = Callable[[Context, Sequence[Publication], float], Awaitable[Asker]]
"""Waits at most so many seconds until the user of a tool call can see these changes. Returns the user with its current
access, and what it can see of the changes. It runs at every call, not once for each session."""

Note = Callable[[Context, ToolCall], Awaitable[None]]
"""Records a tool call in the audit trail. It runs before the result is returned."""

INSTRUCTIONS = f"""\
Search this organisation's documents, restricted to those that your user may read. `search` returns matching passages;
`fetch` returns a whole document by the id of a result. Cite the url. `preview` shows which answers an edit of a
document would change. `standing` lists questions whose answers your user has stored, and what has changed since.
{NOTICE}"""


@dataclass(frozen=True)
class _Tool:
    name: str
    title: str
    description: str
    arguments: type[BaseModel]
    output: type[BaseModel]
    run: Callable[[Service, Asker, Any], Awaitable[Outcome]]
    changes: Literal["nothing", "adds", "replaces"] = "nothing"
    """How it changes the user's standing questions."""

    def declaration(self) -> Tool:
        return Tool(
            name=self.name,
            title=self.title,
            description=self.description,
            input_schema=self.arguments.model_json_schema(),
            output_schema=self.output.model_json_schema(),
            annotations=ToolAnnotations(
                title=self.title,
                read_only_hint=self.changes == "nothing",
                destructive_hint=self.changes == "replaces",
                idempotent_hint=self.changes != "adds",
                open_world_hint=False,
            ),
        )


def _reading(
    run: Callable[[Service, Caller, Any], Awaitable[BaseModel]], documents_in: Callable[[Any], Sequence[UUID]]
) -> Callable[[Service, Asker, Any], Awaitable[Outcome]]:
    """A tool that needs the user's access alone. documents_in: the documents in an output."""

    async def read(service: Service, asker: Asker, arguments: BaseModel) -> Outcome:
        output = await run(service, asker.caller, arguments)
        return Outcome(output, documents_in(output))

    return read


TOOLS = (
    _Tool(
        "search",
        "Search documents",
        "Find the documents that answer a question, by meaning and by keyword, with the matching passages."
        " Exact identifiers (PROJ-4821, an error code, a file name) are matched exactly."
        f" Only documents that your user may read are returned. {NOTICE}",
        SearchArguments,
        SearchOutput,
        _reading(tools.search, tools.shown_documents),
    ),
    _Tool(
        "fetch",
        "Read a document",
        f"Return the text of one document by the id of a search result, a long document in parts. {NOTICE}",
        FetchArguments,
        FetchOutput,
        _reading(tools.fetch, lambda output: [UUID(output.id)]),
    ),
    _Tool(
        "conflicts",
        "List contradictions",
        "List passages that contradict or repeat each other: otherwise equal statements with another number, date,"
        " version, unit, name or negation; duplicates; outdated copies. Only those are returned of which your user may"
        f" read both passages. {NOTICE}",
        ConflictsArguments,
        ConflictsOutput,
        _reading(tools.conflicts, tools.conflicting_documents),
    ),
    _Tool(
        "preview",
        "Preview an edit",
        "Show which answers an edit of a document would change if it were published: questions that lose their answer"
        " or its citation, or whose results would contradict each other. Nothing is stored or published. It asks your"
        " user's standing questions, and the questions with judged answers whose documents your user may read, and"
        f" takes up to two minutes. {NOTICE}",
        PreviewArguments,
        PreviewOutput,
        previews.preview,
    ),
    _Tool(
        "standing",
        "List standing questions",
        "List your user's standing questions: questions whose answer was stored, each with what has changed since then"
        f" in the documents behind it. {NOTICE}",
        NoArguments,
        StandingListOutput,
        standing.list_all,
    ),
    _Tool(
        "standing_show",
        "Show a stored answer",
        "Return a standing question with its stored answer, and what has changed behind each sentence. A sentence is"
        f" null while your user may not read a passage behind it. {NOTICE}",
        StandingArguments,
        StandingOutput,
        standing.show,
    ),
    _Tool(
        "standing_keep",
        "Store an answer",
        "Answer a question from the documents that your user may read, and store the answer as a standing question, so"
        f" that its changes are reported. Only when your user wants that. {NOTICE}",
        StandingKeepArguments,
        StandingAnswerOutput,
        standing.keep,
        "adds",
    ),
    _Tool(
        "standing_ask",
        "Ask a standing question again",
        "Answer a standing question again. The new answer replaces the stored one; the difference is returned, sentence"
        f" by sentence. {NOTICE}",
        StandingArguments,
        StandingAnswerOutput,
        standing.ask,
        "replaces",
    ),
    _Tool(
        "standing_remove",
        "Remove a standing question",
        f"Remove one of your user's standing questions with its answer. Only when your user wants that. {NOTICE}",
        StandingArguments,
        StandingRemoveOutput,
        standing.remove,
        "replaces",
    ),
)


def server(service: Service, identify: Identify, note: Note) -> Server[dict[str, Any]]:
    """An MCP server without state between calls. identify and note may raise PenstockError."""
    named = {tool.name: tool for tool in TOOLS}
    declared = [tool.declaration() for tool in TOOLS]  # once: it takes a processor 17 ms

    async def list_tools(_: Context, __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=declared)

    async def call_tool(context: Context, params: CallToolRequestParams) -> CallToolResult:
        tool = named.get(params.name)
        if tool is None:
            raise MCPError(INVALID_PARAMS, f"unknown tool: the tools are {', '.join(named)}")
        try:
            arguments = tool.arguments.model_validate(params.arguments or {})
        except ValidationError as error:
            return _failed(_invalid_arguments(error))
        attributes = {"mcp.method.name": "tools/call", "gen_ai.tool.name": tool.name}
        with tracing.begin(f"tools/call {tool.name}", "server", attributes=attributes) as span:
            try:
                asker = await identify(context, *_publications(arguments))
                outcome = await tool.run(service, asker, arguments)
                output = _with_at_least(outcome.output, asker.seen)
                if not outcome.is_recorded:
                    call = ToolCall(tool.name, "allowed", object=outcome.object, documents=outcome.documents)
                    await note(context, call)
            except (tools.DocumentUnavailable, Unknown, NotAPerson, MayNotPreview) as error:
                object_ = tools.requested_object(arguments)
                reason = "forbidden" if isinstance(error, NotAPerson | MayNotPreview) else "not-found"
                await note(context, ToolCall(tool.name, "refused", reason, object=object_))
                return _failed(str(error))
            except Exception as error:  # noqa: BLE001 # every error becomes a tool error and a log line
                span.failed(error)
                _log(tool.name, error)
                await note(context, ToolCall(tool.name, "failed", problems.of(error).kind))
                return _failed(problems.of(error).detail)
        content = output.model_dump(mode="json")
        text = json.dumps(content, ensure_ascii=False)
        return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=content)

    return Server(
        "penstock",
        title="Penstock",
        version="1",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _publications(arguments: BaseModel) -> tuple[Sequence[Publication], float]:
    """The changes that a call waits for, and for how many seconds at most."""
    if not isinstance(arguments, PublicationRequest):
        return (), 0.0
    return arguments.publications(None), arguments.wait_seconds


def _with_at_least(output: BaseModel, seen: AtLeast | None) -> BaseModel:
    if seen is None or not isinstance(output, SearchOutput):
        return output
    notes = [*output.notes, *([] if seen.applied else [f"incomplete: {seen.reason}"])]
    return output.model_copy(update={"at_least": AtLeastResponse(**seen.as_json()), "notes": notes})


def _failed(line: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=line)], is_error=True)


def _invalid_arguments(error: ValidationError) -> str:
    """One line that names the invalid argument and what is expected, never what was sent."""
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    first = errors[0]
    where = ".".join(str(part)[:100] for part in first["loc"]) or "the arguments"
    return " ".join(f"{where}: {first['msg'][:200]}".split())


def _log(tool: str, error: Exception) -> None:
    """Log an error as ``query.http.gate`` does, without anything that could quote content."""
    problem = problems.of(error)
    if problem.kind == "bad-query":
        return
    if problem.kind == "failed":
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in extract_tb(error.__traceback__)]
        log.error("tool_failed", tool=tool, error=type(error).__name__, at=frames)
    else:
        log.warning("tool_unavailable", tool=tool, reason=str(error))
