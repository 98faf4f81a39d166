"""``penstock standing``: kept questions, what invalidates their answers, and asking them again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from cli.options import Tenant
from cli.output import Json, print_json, printable, stderr, stdout
from cli.search_show import describe_freshness

if TYPE_CHECKING:
    from query.access.callers import Caller
    from query.answers.model import Sources
    from query.service import Service
    from query.standing.model import Standing, Summary

standing = typer.Typer(
    help="Standing questions: kept answers, and what has changed since they were given (docs/standing.md).",
    no_args_is_help=True,
)

Id = Annotated[UUID, typer.Argument(metavar="ID", help="Id of the standing question.")]
Principal = Annotated[
    str | None, typer.Option("--as", metavar="PRINCIPAL", help="The person whose questions these are. Default: you.")
]


@dataclass(frozen=True, slots=True)
class Reader:
    """The service, and the person who reads."""

    service: Service
    caller: Caller
    principal: str

    async def record(self, action: str, documents: Sequence[UUID] = (), *, object: str = "") -> None:
        """Write the record of the audit trail, before anything is shown."""
        from pipeline.trail import access, recorded

        by = access([self.principal], [])
        await self.service.trail.write(
            recorded(action, tenant=self.caller.tenant, access=by, documents=documents, object=object)
        )


@standing.command("list")
def list_(tenant: Tenant = "default", principal: Principal = None, json_output: Json = False) -> None:
    """List your standing questions with the state of each answer.

    Example: penstock standing list --json
    """

    async def read(reader: Reader) -> list[Summary]:
        return await reader.service.standing.every(reader.caller, reader.principal)

    from query.standing.model import summary_json

    rows = _run(read, tenant, principal)
    if json_output:
        print_json({"standing": [summary_json(row) for row in rows]})
        return
    for row in rows:
        stdout.print(f"{row.id}  {printable(row.question)}", soft_wrap=True, markup=False)
        stdout.print(f"  {_state(row)}", soft_wrap=True, markup=False)
    if not rows:
        stderr.print("there is no standing question: run penstock ask QUESTION --keep", soft_wrap=True, markup=False)


@standing.command()
def show(id_: Id, tenant: Tenant = "default", principal: Principal = None, json_output: Json = False) -> None:
    """Show a stored answer: its sentences and what has happened to the passages behind them.

    A sentence is withheld while you may not read a passage behind it.

    Example: penstock standing show 0f1e2d3c-4b5a-4978-8695-a4b3c2d1e0f1
    """
    from query.standing.model import as_json

    async def read(reader: Reader) -> Standing:
        row = await reader.service.standing.show(reader.caller, reader.principal, id_)
        await reader.record("standing.read", row.shown_documents, object=f"question:{id_}")
        return row

    row = _run(read, tenant, principal)
    if json_output:
        print_json(as_json(row))
        return
    stdout.print(f"{printable(row.question)}\n{_state(row)}", soft_wrap=True, markup=False)
    changes = row.changes
    for number, sentence in enumerate(row.sentences, 1):
        kinds = ", ".join(kind for kind, numbers in changes.items() if number in numbers)
        text = "(withheld)" if sentence is None else printable(sentence.text)
        stdout.print(f"{number}. {text}" + (f"  [{kinds}]" if kinds else ""), soft_wrap=True, markup=False)
    for document in row.entered:
        stdout.print(f"new: {document}", soft_wrap=True, markup=False)


@standing.command()
def ask(id_: Id, tenant: Tenant = "default", principal: Principal = None, json_output: Json = False) -> None:
    """Ask a standing question again. The answer replaces the stored one; the difference is shown.

    Example: penstock standing ask 0f1e2d3c-4b5a-4978-8695-a4b3c2d1e0f1
    """
    from query.answers.model import consistent_json
    from query.model import shown_documents
    from query.standing.model import lines_json

    async def again(reader: Reader) -> tuple[Any, Any, Any]:
        service, who = reader.service, reader.principal
        before, question = await service.standing.question(reader.caller, who, id_)
        sources: list[Sources] = []
        fresh = await service.search.freshness(reader.caller, question.sources)
        answer = await service.answers.whole(question, reader.caller, on_sources=sources.append)
        documents = before.shown_documents + shown_documents(passage.result for passage in sources[0].passages)
        await reader.record("standing.ask", list(dict.fromkeys(documents)), object=f"question:{id_}")
        return answer, fresh, await service.standing.renew(reader.caller, who, before, question, answer, sources[0])

    answer, fresh, lines = _run(again, tenant, principal)
    if json_output:
        print_json(consistent_json(answer, None, fresh) | {"standing_id": str(id_), "difference": lines_json(lines)})
        return
    marks = {"same": " ", "added": "+", "removed": "-", "withheld": "-"}
    for line in lines:
        text = "(withheld)" if line.text is None else printable(line.text)
        stdout.print(f"{marks[line.change]} {text}", soft_wrap=True, markup=False)
    for source in fresh:
        stdout.print(printable(describe_freshness(source.as_json())), style="dim", soft_wrap=True, markup=False)


@standing.command()
def remove(id_: Id, tenant: Tenant = "default", principal: Principal = None, json_output: Json = False) -> None:
    """Remove a standing question with its answer.

    Example: penstock standing remove 0f1e2d3c-4b5a-4978-8695-a4b3c2d1e0f1
    """

    async def delete(reader: Reader) -> None:
        await reader.record("standing.remove", object=f"question:{id_}")
        await reader.service.standing.remove(reader.caller.tenant, reader.principal, id_)

    _run(delete, tenant, principal)
    if json_output:
        print_json({"removed": str(id_)})


def _state(row: Standing | Summary) -> str:
    since = f"answered {row.asked_at:%Y-%m-%d %H:%M}"
    if row.erased:
        return f"erased with a document that it was made from; {since}"
    if not row.changes:
        return f"current; {since}"
    changes = (
        f"{kind} (sentences {', '.join(map(str, numbers))})" if numbers else kind
        for kind, numbers in row.changes.items()
    )
    return f"invalidated: {'; '.join(changes)}; {since}"


def _run(work: Callable[[Reader], Awaitable[Any]], tenant: str, principal: str | None) -> Any:
    if principal is None:
        from cli.readers import local_user

        principal = local_user("name a person with --as")

    async def run() -> Any:
        async with _reader(tenant, principal) as reader:
            return await work(reader)

    return asyncio.run(run())


@asynccontextmanager
async def _reader(tenant: str, principal: str) -> AsyncIterator[Reader]:
    from cli.recorded import able_to_record
    from pipeline.runtime.settings import load
    from query import settings
    from query.service import open_service

    async with AsyncExitStack() as closing:
        service = await closing.enter_async_context(
            open_service(await able_to_record(load()), settings.load(), name="penstock standing")
        )
        caller = await service.search.identify(tenant, principals=[principal])
        yield Reader(service, caller, principal)
