"""What the answers ask of a chat model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.core.errors import Deferred, PenstockError, Retryable
from query.answers.model import Usage
from query.answers.prompt import Message
from query.settings import ChatSettings

LONGEST_REST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class End:
    """Why the model stopped, and what it cost. length: at its limit of tokens; filtered: its server would not go on."""

    reason: Literal["stop", "length", "filtered"]
    usage: Usage


class TooSlow(Retryable):
    """The server has the question and did not answer in time. That it was read, and thought about, has its price."""


class Chat(Protocol):
    """Writes an answer to messages. Safe to share between tasks. It is given no tools."""

    @property
    def model(self) -> str: ...

    def stream(self, messages: Sequence[Message]) -> AsyncGenerator[str | End, None]:
        """Pieces of the text as they are written, then End. Closing it early closes the request.

        Raises Retryable (Deferred, TooSlow) when the server is away, slow, breaks off or answers nonsense, at any time;
        Misconfigured when it refuses. Whoever asked reads why: no error names an address.
        """

    async def complete(
        self, messages: Sequence[Message], *, most_tokens: int | None = None, as_json: bool = False
    ) -> tuple[str, Usage]:
        """The whole text at once. as_json: the server is asked for one JSON object. Raises as ``stream``."""

    async def aclose(self) -> None: ...


class Rest:
    """The time for which a server asked to be left alone (a 429 with ``Retry-After``)."""

    def __init__(self) -> None:
        self._until = 0.0

    def require_over(self) -> None:
        """Raises Deferred while it lasts."""
        left = self._until - time.monotonic()
        if left > 0:
            raise Deferred(f"its server asked to be left alone for another {left:.0f} s", service="chat")

    def begin(self, error: PenstockError) -> None:
        if isinstance(error, Deferred) and error.retry_after:
            self._until = max(self._until, time.monotonic() + min(error.retry_after, LONGEST_REST_SECONDS))


def by_settings(settings: ChatSettings) -> Chat | None:
    """None: no model is configured. Raises Misconfigured when its server is set, and no model of it."""
    if not settings.base_url and not settings.api_key:
        return None
    from query.answers.openai_chat import OpenAIChat  # here: openai takes half a second to import

    return OpenAIChat(settings)
