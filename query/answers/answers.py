"""A question → an answer whose every claim points to what it was read in. docs/answers.md describes it.

The order is: material, context, model, then checks; whatever the model does, what is shown is checked, and without a
model (or when it fails) the answer is the passages themselves.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
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
from query.answers.chat import Chat, End, Rest, TooSlow
from query.answers.context import Context, build, room_for_passages
from query.answers.model import (
    NO_INFORMATION,
    Answer,
    Cited,
    Delta,
    Done,
    Event,
    Failed,
    Numbered,
    Sources,
    Usage,
)
from query.answers.prompt import Message, ask
from query.answers.review import enqueue
from query.answers.sentences import quotations
from query.answers.support import NOTHING, Judged, is_no_information, judge
from query.answers.writing import Found, Writing
from query.limits.charging import charge
from query.model import CallerClass
from query.modes.budget import PROMPT_TOKENS
from query.modes.history import record_made_from
from query.modes.material import Material, Question
from query.retrieval.steps import Steps
from query.settings import ChatSettings
from query.telemetry import QueryMetrics

CROWDED = "the question leaves no room for passages in the model's window: these are the passages that match best"
NO_MODEL = "no answering model is configured: these are the passages that match best"

_log = structlog.get_logger(__name__)


class Gathers(Protocol):
    """``query.modes.gather.Modes``."""

    async def gather(self, question: Question, caller: Caller, caller_class: CallerClass) -> Material: ...


class Answers:
    """Safe to share between tasks. Owns nothing that it is given."""

    def __init__(
        self,
        modes: Gathers,
        chat: Chat | None,
        pool: Pool | None,
        settings: ChatSettings,
        *,
        metrics: QueryMetrics | None = None,
        key: Callable[[], str] = lambda: secrets.token_hex(6),
    ) -> None:
        """chat: None: answers are quotations. pool: for the review queue; None: there is none. key: of the delimiters,
        drawn for each question."""
        self._modes = modes
        self._chat = chat
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._key = key
        self._rest = Rest()

    def unnoticed(self) -> Answers:
        """The same for what the service asks itself: neither counted nor put into the queue, for nobody got it."""
        return Answers(self._modes, self._chat, None, self._settings)

    async def whole(
        self,
        question: Question,
        caller: Caller,
        caller_class: CallerClass = "standard",
        *,
        on_sources: Callable[[Sources], None] = lambda sources: None,
    ) -> Answer:
        """The answer at once. on_sources: told what it will be made from. Raises BadQuery; Retryable or Misconfigured
        where there is no material."""
        async with aclosing(self.answer(question, caller, caller_class)) as events:
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
        self, question: Question, caller: Caller, caller_class: CallerClass = "standard"
    ) -> AsyncGenerator[Event, None]:
        """Sources, then Delta and Cited as it is written, then Done; or Failed, and nothing before it.

        Law: what ``Done`` holds was checked, whatever the model did; a model that fails is no failure of the answer.
        Closing it early closes the request to the model.
        """
        try:
            material = await self._modes.gather(question, caller, caller_class)
        except PenstockError as error:
            self._count("failed")
            yield Failed(error)
            return
        async with aclosing(_Answering(self, question, caller, material).run()) as events:
            async for event in events:
                yield event

    def _count(self, outcome: str) -> None:
        if self._metrics is not None:
            self._metrics.answers.labels(outcome).inc()


class _Answering:
    """One question's."""

    def __init__(self, answers: Answers, question: Question, caller: Caller, material: Material) -> None:
        self.answers = answers
        self.settings = answers._settings
        self.question = clean(question.text).strip()
        self.caller = caller
        self.material = material
        self.steps = Steps()
        self.steps.done += material.steps
        self.notes = list(material.notes)
        self.id = uuid4()
        self.began = time.perf_counter()
        self.end: End | None = None
        self.context = Context([], 0, 0)
        self.is_crowded = False

    async def run(self) -> AsyncGenerator[Event, None]:
        async with aclosing(self._events()) as events:
            async for event in events:
                if isinstance(event, Done):
                    await self._note_made_from(event.answer)
                yield event

    async def _note_made_from(self, answer: Answer) -> None:
        """So that it can be read along in a later question. Where the database is away it is not recorded, and so not
        read along."""
        if (pool := self.answers._pool) is None:
            return
        documents: set[UUID] = set()
        if answer.relevant:  # else the same words whatever was read
            documents |= {p.result.passage.document_id for p in self.context.passages}
            wrote = answer.model is not None or answer.degraded  # or began to
            if wrote and self.material.history is not None:  # it may say again what it read there
                documents |= self.material.history.documents
        try:
            await record_made_from(pool, self.caller.tenant, self.id, documents)
        except PenstockError as error:
            _log.warning("answer_sources_not_recorded", error=str(error))

    async def _events(self) -> AsyncGenerator[Event, None]:
        material = self.material
        if material.relevant and material.passages:
            with self.steps.step("context") as facts:
                # In a thread: to count what a whole collection holds takes a second.
                self.context = await asyncio.to_thread(self._build)
                facts |= {"passages": len(self.context.shown), "tokens": self.context.tokens}
                facts |= {"left_out": self.context.left_out}
            self.notes += self.context.notes
            if metrics := self.answers._metrics:
                cut = sum(shown.passage.cut for shown in self.context.shown)
                metrics.left_out.inc(self.context.left_out + cut)
        passages = self.context.passages
        behind = material.history.documents if passages and material.history is not None else ()
        yield Sources(passages, material.mode, tuple(self.notes), tuple(self.steps.done), behind)
        if not passages:
            yield Delta(NO_INFORMATION)
            yield Done(self._no_information(model=None))
            return
        if self.answers._chat is None or self.is_crowded:
            self.notes.append(CROWDED if self.answers._chat else NO_MODEL)
            done = await self._quoted(passages, degraded=self.answers._chat is not None)
            yield Delta(done.text)
            yield Done(done)
            return
        async with aclosing(self._written(self.answers._chat, passages)) as events:
            async for event in events:
                yield event

    def _build(self) -> Context:
        room = room_for_passages(self.question, self.material, self.settings, _count)
        context = build(self.material.passages, whole=self.material.whole, budget_tokens=room, count=_count)
        self.is_crowded = not context.shown and bool(context.left_out)
        if self.is_crowded:
            most = self.settings.context_tokens
            context = build(self.material.passages, whole=self.material.whole, budget_tokens=most, count=_count)
        return context

    # With a model

    async def _written(self, chat: Chat, passages: Sequence[Numbered]) -> AsyncGenerator[Event, None]:
        writing, text, waits = Writing(passages), "", False
        try:
            with self.steps.step("chat") as facts:
                facts["model"] = chat.model
                self.answers._rest.require_over()
                waits = True
                async with aclosing(chat.stream(self._messages())) as pieces:
                    async for piece in pieces:
                        self.end = piece if isinstance(piece, End) else None
                        known = len(writing.found.cited)
                        shown = writing.end() if isinstance(piece, End) else writing.feed(piece)
                        shown = shown if text else shown.lstrip()
                        if shown and not text:
                            facts["first_token_ms"] = round(1000 * (time.perf_counter() - self.began))
                        text += shown
                        if shown:
                            yield Delta(shown)
                        for n in writing.found.cited[known:]:
                            yield Cited(n)
                usage, waits = self._used(chat.model, text), False
                facts |= {"prompt_tokens": usage.prompt, "answer_tokens": usage.answer}
                if not text.strip():
                    raise Retryable("the model wrote nothing", service="chat")
        except (GeneratorExit, asyncio.CancelledError):
            if waits:  # the reader left, and the model was paid for it all the same
                self._charge_estimate(text)
            raise
        except PenstockError as error:
            if waits and (text or isinstance(error, TooSlow)):
                self._charge_estimate(text)
            self.answers._rest.begin(error)
            self.notes.append(f"the answering model failed ({error}): these are the passages that match best")
            quoted = await self._quoted(passages, degraded=True)
            if not text:
                yield Delta(quoted.text)
            yield Done(quoted)
            return
        yield Done(await self._checked(chat.model, text.strip(), writing.found, passages))

    def _messages(self) -> list[Message]:
        today = datetime.now(UTC).date()
        history = self.material.history
        return ask(self.question, self.context.shown, key=self.answers._key(), today=today, history=history)

    def _used(self, model: str, text: str) -> Usage:
        usage = self.end.usage if self.end else Usage()
        if self.end and self.end.reason == "length":
            self.notes.append(f"the answer was cut at the model's limit of {self.settings.answer_tokens} tokens")
        elif self.end and self.end.reason == "filtered":
            self.notes.append("the model's server ended the answer by its content filter")
        if metrics := self.answers._metrics:
            used = {"prompt": usage.prompt, "answer": usage.answer}
            metrics.answered(model, **used, money=self.settings.money(**used))
            if not usage.prompt:  # its server does not say
                self._charge_estimate(text)
        return usage

    def _charge_estimate(self, text: str) -> None:
        """Of what was read and written, where the model's server has not said how much it was."""
        history = sum(piece.tokens for piece in self.material.history.pieces) if self.material.history else 0
        used = {"prompt": self.context.tokens + history + PROMPT_TOKENS, "answer": _count(text)}
        charge(tokens=sum(used.values()), money=self.settings.money(**used))

    async def _checked(self, model: str, text: str, found: Found, passages: Sequence[Numbered]) -> Answer:
        if is_no_information(text):
            return self._no_information(model=model)
        with self.steps.step("check") as facts:
            judged = await asyncio.to_thread(judge, text, found, passages)
            facts |= {"claims": judged.verdict.claims, "unsupported": len(judged.verdict.unsupported)}
        self.notes += judged.notes
        self.answers._count("grounded" if judged.grounded else "unsupported")
        if metrics := self.answers._metrics:
            metrics.support.observe(judged.verdict.support)
            for reason in judged.reasons:
                metrics.review.labels(reason).inc()
        cited = [p for p in passages if p.n in found.cited]
        answer = self._answer(text, cited, model=model, grounded=judged.grounded, judged=judged)
        if judged.reasons:
            queued = await self._record(answer, passages)
            answer = replace(answer, review=queued, steps=tuple(self.steps.done))
        return answer

    async def _record(self, answer: Answer, passages: Sequence[Numbered]) -> bool:
        """Whether it is in the queue. The answer does not wait for a database that is away."""
        pool, history = self.answers._pool, self.material.history
        if pool is None:
            return False
        private = history is not None and bool(history.pieces)
        try:
            with self.steps.step("review"):
                await enqueue(pool, self.caller.tenant, self.question, answer, passages, private=private)
        except PenstockError as error:
            _log.warning("review_not_recorded", error=str(error))
            return False
        return True

    # Without one

    async def _quoted(self, passages: Sequence[Numbered], *, degraded: bool = False) -> Answer:
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
        cited: Sequence[Numbered],
        *,
        model: str | None,
        grounded: bool,
        relevant: bool = True,
        degraded: bool = False,
        judged: Judged | None = None,
    ) -> Answer:
        verdict = judged.verdict if judged else NOTHING
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
            tuple(judged.reasons) if judged else (),
            usage=self.end.usage if self.end else Usage(),
        )


def _count(text: str) -> int:
    return byte_pairs().count([text])[0]
