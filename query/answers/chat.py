"""The interface to a chat model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Retryable
from pipeline.installed import is_installed
from query.answers.model import Usage
from query.answers.prompt import Message
from query.settings import ChatSettings

MAX_BACKOFF_SECONDS = 60.0
MISSING_EXTRA = "a chat model is configured, but its client is not installed: pip install 'penstock[chat]'"


@dataclass(frozen=True, slots=True)
class End:
    """Why the model stopped, and its usage. length: the limit of tokens; filtered: the server's content filter."""

    reason: Literal["stop", "length", "filtered"]
    usage: Usage


class TooSlow(Retryable):
    """The server received the request and did not answer in time. The request may still cost money."""


class Chat(Protocol):
    """Writes an answer to messages. Safe to share between tasks. It has no tools."""

    @property
    def model(self) -> str: ...

    def stream(self, messages: Sequence[Message]) -> AsyncGenerator[str | End, None]:
        """Pieces of the text as they are written, then End. Closing the generator early closes the request.

        Raises Retryable (Deferred, TooSlow) at any time when the server is unavailable or slow, breaks off or sends an
        invalid response; Misconfigured when it refuses the request. No error names an address, because callers read
        the errors.
        """

    async def complete(
        self, messages: Sequence[Message], *, max_tokens: int | None = None, as_json: bool = False
    ) -> tuple[str, Usage]:
        """The whole text. as_json: request one JSON object. Raises the errors of ``stream``."""

    async def aclose(self) -> None: ...


class Backoff:
    """The pause that a server has requested with 429 and ``Retry-After``."""

    def __init__(self) -> None:
        self._until = 0.0

    def require_elapsed(self) -> None:
        """Raises Deferred during the pause."""
        left = self._until - time.monotonic()
        if left > 0:
            raise Deferred(f"the server requested a pause of another {left:.0f} s", service="chat")

    def begin(self, error: PenstockError) -> None:
        if isinstance(error, Deferred) and error.retry_after:
            self._until = max(self._until, time.monotonic() + min(error.retry_after, MAX_BACKOFF_SECONDS))


def by_settings(settings: ChatSettings) -> Chat | None:
    """The configured chat model, or None. Raises Misconfigured when a server is set without a model, or the extra
    ``chat`` is not installed."""
    if not settings.base_url and not settings.api_key:
        return None
    if not is_installed("openai"):
        raise Misconfigured(MISSING_EXTRA, service="chat")
    from query.answers.openai_chat import OpenAIChat  # here: openai takes half a second to import

    return OpenAIChat(settings)
