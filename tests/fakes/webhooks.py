"""A receiver of webhooks, as receivers are written: it verifies each request with the library of Standard Webhooks,
reads it with the SDK of CloudEvents, and recognises repeats by the event's id."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event
from cloudevents.core.formats.json import JSONFormat
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tests.fakes.faults import Fake, Faults, Refusal, Stats

PATH = "/hook"


@dataclass
class WebhookFaults(Faults):
    redirect: int = 0
    """Next n requests: 307 to another address of this server."""
    refused: frozenset[str] = field(default_factory=frozenset)
    """Events of these documents, by external id: 500."""
    endless: int = 0
    """Next n requests: status 200, and a body without an end."""


class FakeWebhook(Fake[WebhookFaults, Stats]):
    def __init__(self, *secrets: str) -> None:
        super().__init__([PATH, "/other"], WebhookFaults(), Stats())
        self.secrets = list(secrets)
        self.received: list[dict[str, Any]] = []
        """Each accepted request's event, in the order of arrival, repeats included."""
        self.tried: list[str] = []
        """The id of each request, whatever became of it."""
        self.forged = 0
        self.elsewhere = 0

    @property
    def url(self) -> str:
        return f"{self.address}{PATH}"

    def events(self) -> list[dict[str, Any]]:
        """The data of the events, without repeats."""
        return [event["data"] for event in {event["id"]: event for event in self.received}.values()]

    def sequence(self, external_id: str) -> list[int]:
        return [event["seq"] for event in self.events() if event["external_id"] == external_id]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != PATH:
            self.elsewhere += 1
        body, headers = await request.read(), dict(request.headers)
        self.tried.append(headers["webhook-id"])
        for secret in self.secrets:  # each of them has to be able to verify it
            try:
                Webhook(secret).verify(body, headers)
            except WebhookVerificationError as error:
                self.forged += 1
                raise Refusal(401, str(error)) from error
        event = from_structured_event(HTTPMessage(headers=headers, body=body), JSONFormat())
        assert event.get_id() == headers["webhook-id"]
        data: Any = event.get_data()
        if data.get("external_id") in self.faults.refused:
            raise Refusal(500, "not this one")
        if self.next("redirect"):
            raise web.HTTPTemporaryRedirect("/other")
        self.received.append({**event.get_attributes(), "data": data})
        if self.next("endless"):
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"x" * 65_536)
        return web.Response(status=204)
