"""Both clients behind one asynchronous interface, so that one test holds for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from penstock.client import AnswerEvent, AsyncClient, Client

Kind = Literal["blocking", "asynchronous"]
KINDS: tuple[Kind, ...] = ("blocking", "asynchronous")


class EitherClient:
    def __init__(self, kind: Kind, url: str, token: Any = None, **options: Any) -> None:
        self.client = Client(url, token, **options) if kind == "blocking" else AsyncClient(url, token, **options)
        self._left: list[object] = []
        """The streams, which otherwise the garbage collector would close."""

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method; the blocking client's in a thread, because the service runs in this one."""
        if isinstance(self.client, Client):
            return await asyncio.to_thread(getattr(self.client, method), *arguments, **options)
        return await getattr(self.client, method)(*arguments, **options)

    async def stream(self, question: str, *, at_most: int | None = None, **options: Any) -> list[AnswerEvent]:
        """The events of a streamed answer, or the first ``at_most`` of them, after which the client leaves."""
        if isinstance(self.client, Client):
            return await asyncio.to_thread(self._stream, self.client, question, at_most, options)
        received: list[AnswerEvent] = []
        async with self.client.stream_answer(question, **options) as events:
            self._left.append(events)
            async for event in events:
                received.append(event)
                if len(received) == at_most:
                    break
        return received

    def _stream(self, client: Client, question: str, at_most: int | None, options: dict[str, Any]) -> list[AnswerEvent]:
        received: list[AnswerEvent] = []
        with client.stream_answer(question, **options) as events:
            self._left.append(events)
            for event in events:
                received.append(event)
                if len(received) == at_most:
                    break
        return received

    async def aclose(self) -> None:
        if isinstance(self.client, Client):
            self.client.close()
        else:
            await self.client.aclose()


@asynccontextmanager
async def either(kind: Kind, url: str, token: Any = None, **options: Any) -> AsyncIterator[EitherClient]:
    client = EitherClient(kind, url, token, **options)
    try:
        yield client
    finally:
        await client.aclose()
