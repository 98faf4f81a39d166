"""Slack: messages, and parts of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import SecretStr

from connectors.slack.client import Api
from connectors.slack.content import ChannelInfo, Names, document, is_document, listed
from connectors.source import Document
from tests.contract.payloads.readers.base import IMPATIENT, Outcome, Reader, Replay
from tests.contract.payloads.sources import Payload
from tests.contract.payloads.visible import lost_in_message

CHANNEL = ChannelInfo("C1", "general", "https://acme.slack.com")
TS = "1700000000.000100"


@asynccontextmanager
async def readers(server: Replay) -> AsyncIterator[Mapping[str, Reader]]:
    api = Api(f"{server.url}/api", SecretStr("token"), name="chat", rows=100, limits=IMPATIENT)

    async def read(payload: Payload, message: Mapping[str, Any]) -> Outcome:
        """Read a message as the start of a thread."""
        server.load(payload, json.dumps({"ok": True, "messages": [message], "has_more": False}).encode())
        [row], _ = await api.history(CHANNEL.id, limit=100)
        if not is_document(row, min_characters=0):
            return Outcome({"id": "", "content": ""}, lost_in_message(message, ""))
        entry = document([row], row["ts"], CHANNEL, Names(), min_characters=0)
        assert isinstance(entry, Document)
        assert entry.external_id == listed(row, CHANNEL).external_id
        return Outcome({"id": entry.external_id, "content": entry.content}, lost_in_message(message, entry.content))

    async def message(payload: Payload) -> Outcome:
        return await read(payload, {name: at for name, at in payload.value.items() if name != "thread_ts"})

    async def block(payload: Payload) -> Outcome:
        return await read(payload, {"type": "message", "user": "U1", "ts": TS, "text": "", "blocks": [payload.value]})

    try:
        yield {"message": message, "block": block}
    finally:
        await api.close()
