"""``penstock ask``: an answer with its passages, as somebody."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NoReturn, get_args
from uuid import UUID

import typer

from cli.options import AtLeast, Principals, Tags, Tenant, WaitSeconds
from cli.output import Json, print_json, printable, printable_text, stdout
from cli.search_show import describe_freshness
from cli.terminal import echo
from pipeline.core.publication import DEFAULT_WAIT_SECONDS, publications_of

if TYPE_CHECKING:
    from pipeline.core.publication import Publication
    from query.access.callers import Caller
    from query.answers.model import Answer, Sources
    from query.model import AtLeast as Seen
    from query.model import SourceFreshness
    from query.modes.material import Question
    from query.service import Service


def ask(
    query: Annotated[str, typer.Argument(help="The question, in your own words.")],
    tenant: Tenant = "default",
    principals: Principals = None,
    tags: Tags = None,
    documents: Annotated[
        list[str] | None,
        typer.Option(
            "--document", metavar="ID", help="Answer only from this document: id, file, URL or title. Repeatable."
        ),
    ] = None,
    collection: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Answer only from documents of this source.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="Answer mode (docs/modes.md). Default: the service chooses.")] = None,
    top: Annotated[int | None, typer.Option(help="Number of passages that the answer may use, 1 to 100.")] = None,
    at_least: AtLeast = None,
    wait_seconds: WaitSeconds = DEFAULT_WAIT_SECONDS,
    conversation: Annotated[
        bool,
        typer.Option("--conversation", help="Read follow-up questions from standard input, one a line, until it ends."),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the answer as a standing question: see penstock standing.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Answer a question from the documents. Every sentence of the answer cites its passages.

    Without --as and --tag you read as the local user. PENSTOCK_CHAT_BASE_URL and PENSTOCK_CHAT_MODEL set the model that
    writes the answer; without a model the passages are quoted. With --conversation a follow-up question may refer to
    the questions and answers before it.

    Example: penstock ask "how do I undo a commit that others have pulled" --conversation
    """
    from query.model import AnswerMode, BadQuery

    if conversation and json_output:
        _refuse("--conversation cannot be used with --json, which prints one answer: send `turns` to /v1/answers")
    if keep and conversation:
        _refuse("--keep cannot be used with --conversation: a standing question stands alone")
    if keep and (tags or len(principals or []) > 1):
        _refuse("--keep needs one person (--as) and no --tag: a standing question belongs to whoever asked it")
    modes = get_args(AnswerMode)
    if mode is not None and mode not in modes:
        _refuse(f"--mode is {mode!r}, but must be one of {', '.join(modes)}")
    if not principals and not tags:
        from cli.readers import local_user

        principals = [local_user("name a person with --as, or an access tag with --tag")]
    try:
        asyncio.run(
            _ask(
                query,
                tenant,
                principals or [],
                tags or [],
                documents or [],
                collection,
                mode,
                top,
                publications_of(at_least) if at_least is not None else (),
                wait_seconds,
                conversation=conversation,
                keep=keep,
                live=not json_output and stdout.is_terminal,
                show=_print_json if json_output else _show,
            )
        )
    except BadQuery as error:
        _refuse(str(error))


async def _ask(
    query: str,
    tenant: str,
    principals: Sequence[str],
    tags: Sequence[str],
    documents: Sequence[str],
    collection: str | None,
    mode: str | None,
    top: int | None,
    publications: Sequence[Publication],
    wait_seconds: float,
    *,
    conversation: bool,
    keep: bool,
    live: bool,
    show: Callable[[Answer, Seen | None, Sequence[SourceFreshness], UUID | None], None],
) -> None:
    from cli.recorded import able_to_record
    from pipeline.observability import tracing
    from pipeline.runtime.settings import load
    from pipeline.trail import access, recorded
    from query import settings
    from query.model import check, shown_documents
    from query.modes.material import MAX_TURNS, Question, Turn

    check(query, 1 if top is None else top, "hybrid")
    from query.service import open_service  # slow to import: not for a question that is refused

    async with AsyncExitStack() as closing:
        closing.enter_context(tracing.running("ask"))
        closing.enter_context(tracing.begin("ask", attributes={"penstock.tenant": tenant}))
        service = await closing.enter_async_context(
            open_service(await able_to_record(load()), settings.load(), name="penstock ask")
        )
        seen = await service.search.wait_for(
            publications, tenant, principals=principals, tags=tags, seconds=wait_seconds
        )
        caller = await service.search.identify(tenant, principals=principals, tags=tags)
        named = await _named(service, tenant, documents)
        question = Question(query, mode, named, collection, top=top)  # type: ignore[arg-type]  # mode: checked above
        material: list[Sources] = []
        asked_at = await service.standing.check_room(tenant, principals[0], question) if keep else None

        async def note(sources: Sources) -> None:
            material[:] = [sources]
            shown = [
                *shown_documents(passage.result for passage in sources.passages),
                *sorted(sources.history_documents),
            ]
            by = access(principals, tags)
            await service.trail.write(recorded("answer", tenant=tenant, access=by, documents=shown))

        while True:
            fresh = await service.search.freshness(caller, question.sources)
            answer = await _answer(service, question, caller, note, live=live)
            standing = None
            if keep:
                standing = await service.standing.keep(
                    caller, principals[0], question, answer, material[0], since=asked_at
                )
            show(answer, seen, fresh, standing)
            seen = None  # it has waited
            if not conversation or (text := await asyncio.to_thread(_follow_up)) is None:
                return
            turns = (*question.turns, Turn(question.text, answer.text, answer.answer_id))[-MAX_TURNS:]
            question = replace(question, text=text, turns=turns)
            # Access may have changed since the question before.
            caller = await service.search.identify(tenant, principals=principals, tags=tags)


def _follow_up() -> str | None:
    """The next line of standard input that is not empty; None at its end."""
    while True:
        if sys.stdin.isatty():
            stdout.file.write("\n? ")
            stdout.file.flush()
        if not (line := sys.stdin.readline()):
            return None
        if line.strip():
            return line.strip()


async def _answer(
    service: Service,
    question: Question,
    caller: Caller,
    note: Callable[[Sources], Awaitable[None]],
    *,
    live: bool,
) -> Answer:
    if live:
        return await _live(service, question, caller, note)
    sources: list[Sources] = []
    answer = await service.answers.whole(question, caller, on_sources=sources.append)
    for event in sources:
        await note(event)
    return answer


async def _named(service: Service, tenant: str, documents: Sequence[str]) -> tuple[UUID, ...]:
    """Raises BadQuery where a name means none or several. Whether the asker may read them is decided later."""
    from cli.why import names
    from pipeline.diagnosis import story
    from pipeline.stores.postgres import translated
    from query.access.callers import storable
    from query.access.tenant_rows import rows_of
    from query.model import BadQuery

    ids: list[UUID] = []
    for document in documents:
        try:
            ids.append(UUID(document))
        except ValueError:
            with translated("ask"):
                async with rows_of(service.pool, tenant) as connection:
                    matches = await story.find(connection, tenant, storable(names(document)))
            if len(matches) != 1:
                what = f"matches {len(matches)} documents" if matches else "matches no document"
                raise BadQuery(f"--document {document!r} {what} of tenant {tenant!r}: give the document's id") from None
            ids.append(matches[0][0].id)
    return tuple(ids)


async def _live(
    service: Service, question: Question, caller: Caller, note: Callable[[Sources], Awaitable[None]]
) -> Answer:
    """Print the answer on the terminal while it is written."""
    from cli.markdown_stream import MarkdownStream
    from query.answers.model import Delta, Done, Failed, Sources

    streamed = ""
    shown = MarkdownStream(stdout)
    async with aclosing(service.answers.answer(question, caller)) as events:
        async for event in events:
            match event:
                case Sources():
                    await note(event)
                case Delta(text):
                    streamed += text
                    shown.feed(text)
                case Failed(error):
                    shown.end()
                    raise error
                case Done(answer):
                    if answer.text != streamed.strip():
                        shown.end()
                        shown.feed(answer.text)
                    shown.end()
                    return answer
    raise AssertionError("an answer ends with Done or Failed")


def _print_json(answer: Answer, seen: Seen | None, fresh: Sequence[SourceFreshness], standing: UUID | None) -> None:
    from query.answers.model import consistent_json

    print_json(consistent_json(answer, seen, fresh) | {"standing_id": None if standing is None else str(standing)})


def _show(answer: Answer, seen: Seen | None, fresh: Sequence[SourceFreshness], standing: UUID | None) -> None:
    """Print the lines below the answer; in a pipe, the answer too, as Markdown."""
    from rich.text import Text

    if not stdout.is_terminal:
        stdout.file.write(printable_text(f"{answer.text}\n"))
    if answer.cited:
        stdout.print()
    for passage in answer.cited:
        place = passage.result.passage
        where = printable(place.source_url or f"{place.source}/{place.external_id}")
        stdout.print(
            Text.assemble(
                f"[{passage.n}] ", (printable(place.title or place.external_id), "bold"), "  ", (where, "cyan")
            ),
            soft_wrap=True,
        )
    for sentence in answer.unsupported:
        stdout.print(Text(f"not supported by the passages it cites: {printable(sentence)}", "yellow"), soft_wrap=True)
    for note in [*answer.notes, *([seen.reason] if seen is not None and not seen.applied else [])]:
        stdout.print(Text(f"note: {printable(note)}", "yellow"), soft_wrap=True)
    for source in fresh:
        stdout.print(Text(printable(describe_freshness(source.as_json())), "dim"), soft_wrap=True)
    for step in answer.steps:
        if step.name == "follow_up" and step.facts.get("by") != "unchanged":
            stdout.print(Text(f"understood as: {printable(str(step.facts['question']))}", "dim"), soft_wrap=True)
    if standing is not None:
        stdout.print(Text(f"kept as {standing}: penstock standing show {standing}", "dim"), soft_wrap=True)
    how = ", ".join(f"{step.name} {step.took_ms:g}" for step in answer.steps)
    stdout.print(Text(f"{answer.mode}, {answer.model or 'no model'} ({how})", "dim"), soft_wrap=True)


def _refuse(why: str) -> NoReturn:
    echo(f"error: {why}", err=True)
    raise typer.Exit(2)
