"""The HTTP API for conversations of users with a chatbot. They are sent, not crawled, so there is no Source here.

The service that answers the questions sends them here, or straight to ``conversations.live.v1``. The response is 202
when every in-sync replica of Kafka has the message. A client that does not get it sends the same request again: a
repeated pair is stored once.
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
"""1 MiB of text, with at most six bytes of JSON for each of its bytes, and the names around it."""
BODY_SECONDS = 60.0
DELIVERY_SECONDS = 15.0
RETRY_AFTER_SECONDS = 5
PROBLEM = "application/problem+json"
_HEADERS = {503: {"Retry-After": str(RETRY_AFTER_SECONDS)}}
_TITLES = {408: "Too slow", 413: "Too large", 503: "Not now"}


class _Body(BaseModel):
    """The body of a request. The tenant is not part of it: it belongs to the caller's key."""

    model_config = ConfigDict(extra="forbid")

    member: Member
    conversation: Tag
    pairs: Annotated[list[Pair], Field(min_length=1, max_length=MAX_PAIRS)]


class _Problem(Exception):
    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail = status, title, detail

    def response(self) -> JSONResponse:
        """Return a problem document (RFC 9457)."""
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
    """Create the routes.

    tenant_of: a FastAPI dependency that returns the tenant of the caller's API key, or raises 401; it runs before any
    of the body is read. source: the source of the messages, within which a conversation's name is unique.
    """
    routes = APIRouter(prefix="/v1/conversations", tags=["conversations"])
    clock = Clock(None)

    @routes.post("", status_code=202)
    async def record(request: Request, tenant: Annotated[str, Depends(tenant_of)]) -> JSONResponse:
        """Take {"member", "conversation", "pairs": [{"question", "answer", "asked_at", "id"?}]} and return
        {"accepted": number of pairs}."""
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
        """Delete all conversations of a member, from every source of the tenant."""
        return await forget(tenant, member, None)

    @routes.delete("/{member}/{conversation:path}", status_code=202)
    async def forget_conversation(
        member: str, conversation: str, tenant: Annotated[str, Depends(tenant_of)]
    ) -> JSONResponse:
        return await forget(tenant, member, conversation)

    return routes


@contextmanager
def _explained() -> Iterator[None]:
    """Turn a validation error into a 422 with one line that names the field, without its value."""
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
        raise _Problem(503, "Not stored", "Kafka has not confirmed the message: send the same request again") from error
