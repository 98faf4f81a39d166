"""The tools for standing questions: those of the user, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from uuid import UUID

from pydantic import BaseModel

from pipeline.core.errors import PenstockError
from query.answers.model import Answer, NumberedPassage, Sources
from query.answers.visible import visible
from query.http.audit_trail import ToolCall
from query.http.schemas import DifferenceLine, SourceFreshness, StandingSummary
from query.mcp.asker import Asker, Outcome
from query.mcp.shapes import (
    AnswerPassage,
    NoArguments,
    StandingAnswerOutput,
    StandingArguments,
    StandingKeepArguments,
    StandingListOutput,
    StandingOutput,
    StandingRemoveOutput,
)
from query.mcp.tools import address_of, title_of
from query.model import SourceFreshness as Certificate
from query.model import shown_documents
from query.modes.material import Question
from query.service import Service
from query.standing.model import Line, as_json, summary_json


class NotAPerson(PenstockError):
    """The user cannot have standing questions."""

    def __init__(self) -> None:
        super().__init__("only a person has standing questions, and a service needs the scope `answers` to use them")


async def list_all(service: Service, asker: Asker, _: NoArguments) -> Outcome:
    """The user's standing questions. Raises NotAPerson and Retryable."""
    results = await service.standing.every(asker.caller, _principal(asker))
    summaries = [StandingSummary.model_validate(summary_json(summary)) for summary in results]
    return Outcome(StandingListOutput(standing=summaries))


async def show(service: Service, asker: Asker, arguments: StandingArguments) -> Outcome:
    """A stored answer. Raises NotAPerson, Unknown and Retryable."""
    standing = await service.standing.show(asker.caller, _principal(asker), arguments.id)
    output = StandingOutput.model_validate(as_json(standing))
    for sentence in output.sentences:
        sentence.text = None if sentence.text is None else visible(sentence.text)
    return Outcome(output, standing.shown_documents, arguments.object)


async def keep(service: Service, asker: Asker, arguments: StandingKeepArguments) -> Outcome:
    """Answer a question and store the answer. Raises NotAPerson, BadQuery, Retryable and TimeoutError."""
    principal, question = _principal(asker), Question(arguments.question)
    since = await service.standing.check_room(asker.caller.tenant, principal, question)
    answer, material, fresh = await _answer(service, asker, question)
    id_ = await service.standing.keep(asker.caller, principal, question, answer, material, since=since)
    documents = shown_documents(passage.result for passage in material.passages)
    return Outcome(_output(id_, answer, material.passages, [], fresh), _unique(documents), f"question:{id_}")


async def ask(service: Service, asker: Asker, arguments: StandingArguments) -> Outcome:
    """Ask again, and store the new answer. Raises NotAPerson, Unknown, Retryable and TimeoutError."""
    principal = _principal(asker)
    before, question = await service.standing.question(asker.caller, principal, arguments.id)
    answer, material, fresh = await _answer(service, asker, question)
    lines = await service.standing.renew(asker.caller, principal, before, question, answer, material)
    documents = [*before.shown_documents, *shown_documents(passage.result for passage in material.passages)]
    return Outcome(_output(before.id, answer, material.passages, lines, fresh), _unique(documents), arguments.object)


async def remove(service: Service, asker: Asker, arguments: StandingArguments) -> Outcome:
    """Remove a question with its answer, once the removal is recorded. Raises NotAPerson, Unknown and Retryable."""
    call = ToolCall("standing_remove", "allowed", object=arguments.object)
    await service.standing.remove(
        asker.caller.tenant, _principal(asker), arguments.id, record=lambda: asker.record(call)
    )
    return Outcome(StandingRemoveOutput(removed=str(arguments.id)), is_recorded=True)


def _principal(asker: Asker) -> str:
    if asker.principal is None:
        raise NotAPerson
    return asker.principal


async def _answer(service: Service, asker: Asker, question: Question) -> tuple[Answer, Sources, Sequence[Certificate]]:
    """The answer, what it is made from, and certificates from before that was gathered."""
    fresh = await service.search.freshness(asker.caller, question.sources)
    material: list[Sources] = []

    def take(sources: Sources) -> None:
        asker.release_search()
        material.append(sources)

    async with asker.answering(), asyncio.timeout(service.answer_seconds):
        answer = await service.answers.whole(
            question, asker.caller, asker.caller_class, on_sources=take, identify=asker.identify
        )
    return answer, material[0], fresh


def _output(
    id_: UUID,
    answer: Answer,
    passages: Iterable[NumberedPassage],
    lines: Iterable[Line],
    fresh: Iterable[Certificate],
) -> BaseModel:
    cited = {passage.n for passage in answer.cited}
    return StandingAnswerOutput(
        id=str(id_),
        answer=visible(answer.text),
        grounded=answer.grounded,
        passages=[_passage(passage) for passage in passages if passage.n in cited],
        difference=[DifferenceLine(change=line.change, text=line.text and visible(line.text)) for line in lines],
        notes=list(answer.notes),
        freshness=[SourceFreshness(**source.as_json()) for source in fresh],
    )


def _passage(passage: NumberedPassage) -> AnswerPassage:
    cited = passage.result.passage
    return AnswerPassage(
        n=passage.n,
        id=str(cited.document_id),
        title=title_of(cited.title, cited.external_id),
        url=address_of(cited.source_url, cited.document_id),
    )


def _unique(documents: Iterable[UUID]) -> list[UUID]:
    return list(dict.fromkeys(documents))
