"""Server-sent events that end with their reader: whoever makes them is stopped when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MEDIA_TYPE = "text/event-stream"
KEEPALIVE_SECONDS = 15.0
"""A line that says nothing, so that no proxy takes a thinking model for a dead connection."""

Event = tuple[str, Mapping[str, Any]]
"""Its name and its data."""


class EventStream(Response):
    """events: closed at the end, whatever the end is. It is run in one task, so it may hold timeouts open."""

    media_type = MEDIA_TYPE

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        super().__init__()
        self._events = events
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"  # nginx would collect it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(
            1
        )  # a slow reader holds up the model, not our memory
        making = asyncio.create_task(self._make(queue), name="events")
        try:
            while True:
                said: bytes | Exception | None = KEEPALIVE_COMMENT
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEPALIVE_SECONDS):
                        said = await queue.get()
                if said is None:
                    break
                if isinstance(said, Exception):
                    raise said
                await send({"type": "http.response.body", "body": said, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)

    async def _make(self, queue: asyncio.Queue[bytes | Exception | None]) -> None:
        try:
            async with aclosing(self._events) as events:
                async for name, data in events:
                    await queue.put(format_sse_event(event=name, data_str=json.dumps(data)))
        except Exception as error:  # noqa: BLE001 # raised where it is sent from
            await queue.put(error)
        else:
            await queue.put(None)
