"""Answers that are sent while they are written, to clients that read slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Message

from query.http.answers import Event, EventStream

SECONDS = 0.05
"""The time limit of the answer."""


async def pieces() -> AsyncGenerator[str, None]:
    while True:
        yield "and so on, "


async def test_an_answer_that_a_client_reads_slowly_ends_with_its_time_limit() -> None:
    closed: list[bool] = []

    async def written() -> AsyncGenerator[Event, None]:
        try:
            async with aclosing(pieces()) as model:
                async for text in model:
                    yield "delta", {"text": text}
        finally:
            closed.append(True)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(SECONDS)  # meanwhile, the next piece waits for its place
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing more is expected of the client")

    async with asyncio.timeout(20):
        await EventStream(written(), SECONDS)({"type": "http"}, receive, send)

    assert closed == [True]
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert b"event: error" in sent[-2]["body"]
    assert b"urn:penstock:problem:" in sent[-2]["body"]
