"""Material made by hand, and what the tests of answers have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from query.access.callers import Caller
from query.answers import chat as chats
from query.answers.answers import Answers
from query.answers.model import Answer, Done, Event, NumberedPassage
from query.model import CallerClass, Passage, Result
from query.modes.material import Material, Question
from query.settings import ChatSettings
from query.telemetry import QueryMetrics
from tests.fakes.chat import FakeChat

CALLER = Caller("acme", frozenset({"wiki/staff"}))


def result(text: str, title: str = "Doc", *, document: str | None = None, **fields: Any) -> Result:
    """document: passages that share it are of one document."""
    fields.setdefault("source_url", f"https://wiki.example/{title.replace(' ', '-')}")
    headings = tuple(fields.pop("headings", ()))
    of = uuid5(NAMESPACE_URL, document or title + text)
    passage = Passage(
        **{
            "chunk_id": uuid5(of, text),
            "document_id": of,
            "external_id": f"{title}.md",
            "source": "wiki",
            "title": title,
            "chunk_index": 0,
            "source_modified_at": datetime(2026, 3, 1, tzinfo=UTC),
            **fields,
        }
    )
    return Result(passage, text, 1.0, {"keyword": 1}, headings=headings)


def numbered(*texts: str, **fields: Any) -> list[NumberedPassage]:
    return [NumberedPassage(n, result(text, f"Doc {n}", **fields), text) for n, text in enumerate(texts, start=1)]


def material(*results: Result, **fields: Any) -> Material:
    return Material(**{"mode": "hybrid", "passages": list(results), "whole": False, "steps": (), **fields})


PUMPS = material(
    result("The reactor is cooled by two pumps. Each pump moves 400 litres a minute. Lunch is at noon.", "Cooling"),
    result("Pumps of the reactor are serviced every six months by the night shift.", "Service"),
    result("The canteen serves soup on Mondays.", "Canteen"),
)
QUESTION = "How is the reactor cooled by its pumps?"


class ByHand:
    """Stands where Modes stands, with material that a test has made."""

    def __init__(self, given: Material) -> None:
        self.given = given

    async def gather(self, question: Question, caller: Caller, caller_class: CallerClass) -> Material:
        return self.given


def settings(fake: FakeChat | None, **fields: Any) -> ChatSettings:
    place = {"base_url": fake.url, "model": fake.model} if fake else {}
    return ChatSettings(**{"first_token_seconds": 5.0, "timeout_seconds": 10.0, **place, **fields})


@asynccontextmanager
async def answering(
    given: Material, fake: FakeChat | None, *, pool: Any = None, metrics: QueryMetrics | None = None, **fields: Any
) -> AsyncIterator[Answers]:
    """fields: of ChatSettings."""
    by = settings(fake, **fields)
    chat = chats.by_settings(by)
    try:
        yield Answers(ByHand(given), chat, pool, by, metrics=metrics)
    finally:
        if chat is not None:
            await chat.aclose()


async def events(answers: Answers, question: str) -> list[Event]:
    return [event async for event in answers.answer(Question(question), CALLER)]


async def ask(given: Material, fake: FakeChat | None, question: str, **fields: Any) -> Answer:
    async with answering(given, fake, **fields) as answers:
        return await answers.whole(Question(question), CALLER)


def done(happened: Sequence[Event]) -> Answer:
    last = happened[-1]
    assert isinstance(last, Done), last
    return last.answer


def metric(metrics: QueryMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0
