"""Answers with a citation for every claim. docs/answers.md describes them.

The order is: understand a follow-up, material, context, model, checks. Whatever the model writes is checked before it
counts. Without a model, or when it fails, the answer consists of quotations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol
from uuid import UUID, uuid4

import structlog

from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.normalise import clean
from pipeline.embedding.tokens import byte_pairs
from pipeline.stores.postgres import Pool
from query.access.callers import Caller
from query.access.still_readable import Identify, Lost, StillReadable
from query.answers.chat import Backoff, Chat, End, TooSlow
from query.answers.context import Context, build, room_for_passages
from query.answers.model import (
    NO_INFORMATION,
    Answer,
    Cited,
    Delta,
    Done,
    Event,
    Failed,
    NumberedPassage,
    Sources,
    Usage,
)
from query.answers.prompt import Message, ask, new_key
from query.answers.quotations import quotations
from query.answers.review import enqueue
from query.answers.support import NOTHING, SupportReport, check_answer, is_no_information
from query.answers.understanding import Understanding, Understood
from query.answers.writing import AnswerSanitizer, Findings
from query.limits.charging import charge
from query.model import CallerClass
from query.modes.budget import PROMPT_TOKENS
from query.modes.history import record_provenance
from query.modes.material import Material, Question
from query.retrieval.steps import Steps
from query.settings import ChatSettings
from query.telemetry import QueryMetrics

NO_ROOM = "the question leaves no room for passages in the model's window: these are the passages that match best"
REVOKED = "access to a passage ended while the answer was written, so that the answer was replaced"
NO_MODEL = "no answering model is configured: these are the passages that match best"

_log = structlog.get_logger(__name__)


class Gatherer(Protocol):
    """Gathers the material of an answer, as ``query.modes.gather.Modes`` does."""

    async def gather(self, question: Question, caller: Caller, caller_class: CallerClass) -> Material: ...


class Answers:
    """Answers questions. Safe to share between tasks. It does not close its arguments."""

    def __init__(
        self,
        modes: Gatherer,
        chat: Chat | None,
        pool: Pool | None,
        settings: ChatSettings,
        *,
        metrics: QueryMetrics | None = None,
    ) -> None:
        """chat: None means that answers are quotations. pool: holds the review queue; None means that there is none."""
        self._modes = modes
        self._chat = chat
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._backoff = Backoff()
        self._understanding = Understanding(chat, pool, backoff=self._backoff, on_usage=self._count_usage)

    def for_evaluation(self) -> Answers:
        """The same without metrics and review queue, for questions that the service itself asks."""
        return Answers(self._modes, self._chat, None, self._settings)

    async def whole(
        self,
        question: Question,
        caller: Caller,
        caller_class: CallerClass = "standard",
        *,
        on_sources: Callable[[Sources], None] = lambda sources: None,
        identify: Identify | None = None,
    ) -> Answer:
        """The whole answer. on_sources: called with the answer's material before it is written. identify: as of
        ``answer``. Raises BadQuery; Retryable or Misconfigured if the material cannot be gathered."""
        async with aclosing(self.answer(question, caller, caller_class, identify=identify)) as events:
            async for event in events:
                match event:
                    case Sources():
                        on_sources(event)
                    case Done(answer):
                        return answer
                    case Failed(error):
                        raise error
        raise AssertionError("an answer ends with Done or Failed")

    async def answer(
        self,
        question: Question,
        caller: Caller,
        caller_class: CallerClass = "standard",
        *,
        identify: Identify | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Sources, then Delta and Cited while the answer is written, then Done; or Failed.

        identify: returns the caller with its access at that moment. With it, access is looked at again while a model
        writes: once the caller may not read all that the answer is made from, the rest of the passages is quoted.
        Law: the answer in ``Done`` is checked, whatever the model did; a failing model does not fail the answer.
        Closing the generator early closes the request to the model.
        """
        steps = Steps()
        try:
            understood = await self._understanding.of(question, caller, steps)
            if question.turns and identify is not None:  # a model may have taken seconds for it
                caller = await identify()
            material = await self._modes.gather(replace(question, text=understood.text), caller, caller_class)
        except PenstockError as error:
            self._count("failed")
            yield Failed(error)
            return
        answering = _Answering(self, question, understood, caller, material, steps, identify)
        async with aclosing(answering.run()) as events:
            async for event in events:
                yield event

    def _count(self, outcome: str) -> None:
        if self._metrics is not None:
            self._metrics.answers.labels(outcome).inc()

    def _count_usage(self, model: str, usage: Usage) -> None:
        """Count and charge the tokens of a rewritten question."""
        if self._metrics is not None:
            used = {"prompt": usage.prompt, "answer": usage.answer}
            self._metrics.answered(model, **used, money=self._settings.money(**used))


class _Answering:
    """The state of one answer while it is made."""

    def __init__(
        self,
        answers: Answers,
        question: Question,
        understood: Understood,
        caller: Caller,
        material: Material,
        steps: Steps,
        identify: Identify | None,
    ) -> None:
        self.answers = answers
        self.identify = identify
        self.settings = answers._settings
        self.typed = clean(question.text).strip()
        self.question = clean(understood.text).strip()
        self.understood = understood
        self.caller = caller
        self.material = material
        self.steps = steps
        self.steps.done += material.steps
        self.notes = [*([understood.note] if understood.note else []), *material.notes]
        self.id = uuid4()
        self.began = time.perf_counter()
        self.end: End | None = None
        self.context = Context([], 0, 0)
        self.has_no_room = False
        self.is_revoked = False

    async def run(self) -> AsyncGenerator[Event, None]:
        async with aclosing(self._events()) as events:
            async for event in events:
                if isinstance(event, Done):
                    await self._record_provenance(event.answer)
                yield event

    async def _record_provenance(self, answer: Answer) -> None:
        """Record the documents of an answer, so that the history of a later question may include it. During an outage
        of the database it is not recorded and is later left out of the history."""
        if (pool := self.answers._pool) is None or not self.understood.is_traceable:
            return
        documents: set[UUID] = set()
        if answer.relevant or self.is_revoked:  # else the text is always the same
            # Or at least began to: a client may hold the beginning that was streamed for the answer.
            model_wrote = answer.model is not None or answer.degraded or self.is_revoked
            documents = self._documents(history=model_wrote)  # of which it may repeat parts
        try:
            await record_provenance(pool, self.caller.tenant, self.id, documents)
        except PenstockError as error:
            _log.warning("answer_sources_not_recorded", error=str(error))

    async def _events(self) -> AsyncGenerator[Event, None]:
        material = self.material
        if material.relevant and material.passages:
            with self.steps.step("context") as facts:
                # In a thread, because counting the tokens of a whole collection takes a second.
                self.context = await asyncio.to_thread(self._build)
                facts |= {"passages": len(self.context.shown), "tokens": self.context.tokens}
                facts |= {"left_out": self.context.left_out}
            self.notes += self.context.notes
            if metrics := self.answers._metrics:
                cut = sum(shown.passage.cut for shown in self.context.shown)
                metrics.left_out.inc(self.context.left_out + cut)
        passages = self.context.passages
        history_documents = set(self.understood.documents)
        if passages and material.history is not None:
            history_documents |= material.history.documents
        is_full = bool(passages) and (material.is_full or self.context.left_out > 0)
        yield Sources(passages, material.mode, tuple(self.notes), tuple(self.steps.done), history_documents, is_full)
        if not passages:
            yield Delta(NO_INFORMATION)
            yield Done(self._no_information(model=None))
            return
        if self.answers._chat is None or self.has_no_room:
            self.notes.append(NO_ROOM if self.answers._chat else NO_MODEL)
            done = await self._answer_with_quotations(passages, degraded=self.answers._chat is not None)
            yield Delta(done.text)
            yield Done(done)
            return
        async with aclosing(self._stream_model(self.answers._chat, passages)) as events:
            async for event in events:
                yield event

    def _build(self) -> Context:
        room = room_for_passages(f"{self.typed}\n{self.question}", self.material, self.settings, _count)
        context = build(self.material.passages, whole=self.material.whole, budget_tokens=room, count=_count)
        self.has_no_room = not context.shown and bool(context.left_out)
        if self.has_no_room:
            most = self.settings.context_tokens
            context = build(self.material.passages, whole=self.material.whole, budget_tokens=most, count=_count)
        return context

    # With a model

    async def _stream_model(self, chat: Chat, passages: Sequence[NumberedPassage]) -> AsyncGenerator[Event, None]:
        writing, text, waits, access = AnswerSanitizer(passages), "", False, self._access()
        failed = False
        try:
            with self.steps.step("chat") as facts:
                facts["model"] = chat.model
                self.answers._backoff.require_elapsed()
                waits = True
                async with aclosing(chat.stream(self._messages())) as pieces:
                    async for piece in pieces:
                        if access is not None:
                            await access.look()
                        self.end = piece if isinstance(piece, End) else None
                        known = len(writing.findings.cited)
                        shown = writing.end() if isinstance(piece, End) else writing.feed(piece)
                        shown = shown if text else shown.lstrip()
                        if shown and not text:
                            facts["first_token_ms"] = round(1000 * (time.perf_counter() - self.began))
                        text += shown
                        if shown:
                            yield Delta(shown)
                        for n in writing.findings.cited[known:]:
                            yield Cited(n)
                usage, waits = self._record_usage(chat.model, text), False
                facts |= {"prompt_tokens": usage.prompt, "answer_tokens": usage.answer}
                if not text.strip():
                    raise Retryable("the model returned an empty answer", service="chat")
        except (GeneratorExit, asyncio.CancelledError):
            if waits:  # the client disconnected, but the model's work costs money
                self._charge_estimate(text)
            raise
        except Lost as lost:
            self._charge_estimate(text)
            yield Done(await self._answer_without(lost.documents, passages))
            return
        except PenstockError as error:
            if waits and (text or isinstance(error, TooSlow)):
                self._charge_estimate(text)
            self.answers._backoff.begin(error)
            self.notes.append(f"the answering model failed ({error}): these are the passages that match best")
            failed = True
        try:
            if access is not None:  # also of a model that was silent until it failed: what it read would be quoted
                await access.require()
        except Lost as lost:
            yield Done(await self._answer_without(lost.documents, passages, degraded=failed))
        except PenstockError as error:
            self.answers._count("failed")
            yield Failed(error)
        else:
            if not failed:
                yield Done(await self._check(chat.model, text.strip(), writing.findings, passages))
                return
            quoted = await self._answer_with_quotations(passages, degraded=True)
            if not text:
                yield Delta(quoted.text)
            yield Done(quoted)

    def _access(self) -> StillReadable | None:
        """Looks at the access to all that the model reads; None: it is not looked at again."""
        if self.identify is None or (pool := self.answers._pool) is None:
            return None
        return StillReadable(pool, self.identify, self._documents(history=True))

    def _documents(self, *, history: bool) -> set[UUID]:
        """The documents of the context and of earlier turns. history: also those of a document's history."""
        documents = {p.result.passage.document_id for p in self.context.passages} | self.understood.documents
        if history and self.material.history is not None:
            documents |= self.material.history.documents
        return documents

    def _messages(self) -> list[Message]:
        today = datetime.now(UTC).date()
        history = self.material.history
        understood = None if self.question == self.typed else self.question
        return ask(
            self.typed,
            self.context.shown,
            key=new_key(),
            today=today,
            history=history,
            understood=understood,
        )

    def _record_usage(self, model: str, text: str) -> Usage:
        usage = self.end.usage if self.end else Usage()
        if self.end and self.end.reason == "length":
            self.notes.append(f"the answer was cut at the model's limit of {self.settings.answer_tokens} tokens")
        elif self.end and self.end.reason == "filtered":
            self.notes.append("the model's server ended the answer by its content filter")
        if metrics := self.answers._metrics:
            used = {"prompt": usage.prompt, "answer": usage.answer}
            metrics.answered(model, **used, money=self.settings.money(**used))
            if not usage.prompt:  # the server does not report usage
                self._charge_estimate(text)
        return usage

    def _charge_estimate(self, text: str) -> None:
        """Charge an estimate of the tokens, because the model's server has not reported them."""
        history = sum(piece.tokens for piece in self.material.history.pieces) if self.material.history else 0
        used = {"prompt": self.context.tokens + history + PROMPT_TOKENS, "answer": _count(text)}
        charge(tokens=sum(used.values()), money=self.settings.money(**used))

    async def _check(self, model: str, text: str, findings: Findings, passages: Sequence[NumberedPassage]) -> Answer:
        if is_no_information(text):
            return self._no_information(model=model)
        with self.steps.step("check") as facts:
            report = await asyncio.to_thread(check_answer, text, findings, passages)
            facts |= {"claims": report.verdict.claims, "unsupported": len(report.verdict.unsupported)}
        self.notes += report.notes
        self.answers._count("grounded" if report.grounded else "unsupported")
        if metrics := self.answers._metrics:
            metrics.support.observe(report.verdict.support)
            for reason in report.reasons:
                metrics.review.labels(reason).inc()
        cited = [p for p in passages if p.n in findings.cited]
        answer = self._answer(text, cited, model=model, grounded=report.grounded, report=report)
        if report.reasons:
            queued = await self._record(answer, passages)
            answer = replace(answer, review=queued, steps=tuple(self.steps.done))
        return answer

    async def _record(self, answer: Answer, passages: Sequence[NumberedPassage]) -> bool:
        """Put the answer into the review queue. False if it is not there; the answer does not wait for an outage."""
        pool, history = self.answers._pool, self.material.history
        if pool is None:
            return False
        of_conversation = bool(self.understood.documents) or not self.understood.is_traceable
        private = of_conversation or (history is not None and bool(history.pieces))
        try:
            with self.steps.step("review"):
                return await enqueue(pool, self.caller.tenant, self.typed, answer, passages, private=private)
        except PenstockError as error:
            _log.warning("review_not_recorded", error=str(error))
            return False

    # Without a model

    async def _answer_without(
        self, lost: Collection[UUID], passages: Sequence[NumberedPassage], *, degraded: bool = False
    ) -> Answer:
        """Quotations of the passages of other documents than these."""
        self.is_revoked = True
        self.notes.append(REVOKED)
        readable = [passage for passage in passages if passage.result.passage.document_id not in lost]
        if not readable:
            return self._no_information(model=None)
        return await self._answer_with_quotations(readable, degraded=degraded)

    async def _answer_with_quotations(self, passages: Sequence[NumberedPassage], *, degraded: bool) -> Answer:
        if degraded and (metrics := self.answers._metrics):
            metrics.degraded.labels("chat").inc()
        self.answers._count("failed" if degraded else "passages")
        text, quoted = await asyncio.to_thread(quotations, self.question, passages, ranked=not self.material.whole)
        return self._answer(text, quoted, model=None, grounded=True, degraded=degraded)

    def _no_information(self, *, model: str | None) -> Answer:
        self.answers._count("no_information")
        return self._answer(NO_INFORMATION, (), model=model, grounded=True, relevant=False)

    def _answer(
        self,
        text: str,
        cited: Sequence[NumberedPassage],
        *,
        model: str | None,
        grounded: bool,
        relevant: bool = True,
        degraded: bool = False,
        report: SupportReport | None = None,
    ) -> Answer:
        verdict = report.verdict if report else NOTHING
        return Answer(
            text,
            tuple(cited),
            self.material.mode,
            tuple(self.steps.done),
            grounded,
            relevant,
            self.id,
            tuple(dict.fromkeys(self.notes)),
            model,
            degraded,
            tuple(verdict.unsupported),
            verdict.support,
            verdict.density,
            tuple(report.reasons) if report else (),
            usage=self.end.usage if self.end else Usage(),
        )


def _count(text: str) -> int:
    return byte_pairs().count([text])[0]
