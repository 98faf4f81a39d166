"""Conversations of users with a chatbot, served over HTTP and not crawled: there is no Source here.

The service that answers the questions sends them, here or straight to ``conversations.live.v1``. A request is answered
with 202 when Kafka has it, on every in-sync replica. A client that gets no such answer sends the same again: a pair
that comes twice is one pair.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from connectors.clock import Clock
from connectors.http import Bodies, BodyRefused
from pipeline.core.errors import Retryable
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from topics.fields import Member, Tag
from topics.messages import MAX_PAIRS, ConversationForgotten, ConversationRecorded, Pair
from topics.registry import CONVERSATIONS

MAX_BODY_BYTES = CONVERSATIONS.max_message_bytes
"""1 MiB of text, at worst six bytes of JSON for each of its bytes, and the names around it."""
BODY_SECONDS = 60.0
DELIVERY_SECONDS = 15.0
RETRY_AFTER_SECONDS = 5
PROBLEM = "application/problem+json"
_HEADERS = {503: {"Retry-After": str(RETRY_AFTER_SECONDS)}}
_TITLES = {408: "Too slow", 413: "Too large", 503: "Not now"}


class _Body(BaseModel):
    """Nothing here says whose tenant it is: the key does."""

    model_config = ConfigDict(extra="forbid")

    member: Member
    conversation: Tag
    pairs: Annotated[list[Pair], Field(min_length=1, max_length=MAX_PAIRS)]


class _Problem(Exception):
    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail = status, title, detail

    def response(self) -> JSONResponse:
        """As RFC 9457 has it."""
        headers = _HEADERS.get(self.status, {})
        return JSONResponse(
            {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail},
            self.status,
            headers,
            PROBLEM,
        )


def router(
    producer: Producer, tenant_of: Callable[..., Any], bodies: Bodies, *, source: str = "conversations"
) -> APIRouter:
    """tenant_of: a FastAPI dependency that returns the tenant of the caller's API key, or raises 401; it runs before
    anything of the body is read. source: of the messages; a conversation's name is its own within it."""
    routes = APIRouter(prefix="/v1/conversations", tags=["conversations"])
    clock = Clock(None)

    @routes.post("", status_code=202)
    async def record(request: Request, tenant: Annotated[str, Depends(tenant_of)]) -> JSONResponse:
        """{"member", "conversation", "pairs": [{"question", "answer", "asked_at", "id"?}]} → {"accepted": pairs}"""
        stamp = clock.stamp()
        try:
            async with bodies.read(request, most=MAX_BODY_BYTES, seconds=BODY_SECONDS, key=tenant) as raw:
                with _explained():
                    body = _Body.model_validate_json(raw)
                    message = ConversationRecorded(
                        tenant=tenant,
                        source=source,
                        observed_at=stamp,
                        member=body.member,
                        conversation=body.conversation,
                        pairs=body.pairs,
                    )
                await _send(producer, message)
        except BodyRefused as refused:
            return _Problem(refused.status, _TITLES[refused.status], refused.detail).response()
        except _Problem as problem:
            return problem.response()
        return JSONResponse({"accepted": len(message.pairs)}, 202)

    async def forget(tenant: str, member: str, conversation: str | None) -> JSONResponse:
        stamp = clock.stamp()
        try:
            with _explained():
                message = ConversationForgotten(
                    tenant=tenant, source=source, observed_at=stamp, member=member, conversation=conversation
                )
            await _send(producer, message)
        except _Problem as problem:
            return problem.response()
        return JSONResponse({"forgotten_until": stamp.isoformat()}, 202)

    @routes.delete("/{member}", status_code=202)
    async def forget_member(member: str, tenant: Annotated[str, Depends(tenant_of)]) -> JSONResponse:
        """Everything of a member, from every source of the tenant."""
        return await forget(tenant, member, None)

    @routes.delete("/{member}/{conversation:path}", status_code=202)
    async def forget_conversation(
        member: str, conversation: str, tenant: Annotated[str, Depends(tenant_of)]
    ) -> JSONResponse:
        return await forget(tenant, member, conversation)

    return routes


@contextmanager
def _explained() -> Iterator[None]:
    """Raises 422 with one line that names the field, and nothing of what was in it."""
    try:
        yield
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in problem["loc"])[:100] or "body"
        raise _Problem(422, "Not a conversation", f"{where}: {problem['msg']}"[:300]) from error


async def _send(producer: Producer, message: ConversationRecorded | ConversationForgotten) -> None:
    try:
        await deliver([producer.send(CONVERSATIONS, message)], within_seconds=DELIVERY_SECONDS)
    except Retryable as error:
        raise _Problem(503, "Not stored", "Kafka has not confirmed it: send the same again") from error
