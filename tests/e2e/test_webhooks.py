"""Webhooks of the whole of Penstock: what an operator adds hears of a document's life from the real workers, which are
killed on the way."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from tests.fakes.server import serving as embedding_server
from tests.fakes.webhooks import FakeWebhook
from tests.support.space import Space
from tests.support.waiting import until
from topics.messages import DocumentDeleted, DocumentUpserted

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def note(name: str, version: int, text: str) -> DocumentUpserted:
    return DocumentUpserted(
        tenant="acme",
        source="wiki",
        external_id=name,
        observed_at=datetime.now(UTC),
        version=version,
        title="A note",
        content=text,
        acl_tags=["staff"],
    )


async def test_a_receiver_hears_of_a_documents_life_although_it_and_the_worker_are_away(
    stack: Stack, tmp_path: Path
) -> None:
    async with embedding_server() as model, FakeWebhook() as receiver:
        embedding = {"provider": "openai", "base_url": model.url, "model": "text-embedding-3-large", "dimensions": 64}
        async with Space.create(stack, tmp_path, embedding=embedding) as space:
            space.environment["PENSTOCK_WEBHOOKS_KEY"] = "a key of thirty-two characters and more"
            code, added = await space.penstock(
                "webhook", "add", "shop", receiver.url, "--tenant", "acme", "--allow-private", "--json"
            )
            assert code == 0
            receiver.secrets.append(added["secret"])
            space.start("detect", "vectors", "keywords", "connectors")  # no connector is declared
            messages = [note(f"n{n}", 1, f"Text {n}.") for n in range(3)]
            await space.publish(*messages)
            await until(lambda: len(receiver.events()) == 3)
            assert {event["state"] for event in receiver.events()} == {"searchable"}

            await asyncio.to_thread(space.kill, "connectors")
            edited = note("n0", 2, "Another text.")
            await space.publish(edited)
            await space.settled([edited])
            await space.publish(
                DocumentDeleted(tenant="acme", source="wiki", external_id="n0", observed_at=datetime.now(UTC))
            )
            receiver.faults.errors = 2
            await asyncio.to_thread(space.start, "connectors")
            await until(lambda: [e["state"] for e in receiver.events() if e["external_id"] == "n0"][-1:] == ["retired"])
            sequence = receiver.sequence("n0")
            assert sequence == sorted(sequence)
            assert receiver.forged == 0
            code, status = await space.penstock("status", "--json")
            assert [(w["webhook"], w["state"], w["parked"]) for w in status["webhooks"]] == [("shop", "working", 0)]
            assert await asyncio.to_thread(space.stop, "connectors") == 0
