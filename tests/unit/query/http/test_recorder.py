"""The recorder of the audit trail charges a request for what it stores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from pipeline.core.trail import Record
from query.auth.identity import Identity
from query.http.audit_trail import RECORD_BYTES, RECORDED_DOCUMENT_BYTES, Recorder, note
from query.limits.charging import charge_to


class Written:
    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.records: list[Record] = []

    async def write(self, record: Record) -> None:
        self.records.append(record)


@pytest.mark.parametrize(("mode", "stored"), [("on", RECORD_BYTES + 3 * RECORDED_DOCUMENT_BYTES), ("off", 0)])
async def test_a_request_is_charged_for_its_record_where_there_is_a_trail(mode: str, stored: int) -> None:
    async def search(scope: Scope, receive: Receive, send: Send) -> None:
        note(Request(scope), [uuid4() for _ in range(3)])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    sent, charged, trail = list[Message](), list[int](), Written(mode)
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "route": SimpleNamespace(path="/v1/search"),
        "state": {"identity": Identity("token", "acme", "ann")},
    }
    charge_to(lambda tokens, money, stored: charged.append(stored))
    await Recorder(search, trail=trail)(scope, receive, send)  # type: ignore[arg-type]
    assert sent
    assert sum(charged) == stored
    assert len(trail.records[0].documents) == 3
