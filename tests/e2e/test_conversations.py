"""Conversations from HTTP to what a question finds, with the real workers: killed, and without their model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.service import free_port
from deploy.local.stack import Stack
from pipeline.core.model import Generation
from pipeline.embedding.choose import embedder
from pipeline.ledger import generations
from pipeline.runtime.settings import dist
from pipeline.stores.postgres import Pool, open_pool
from query.access.callers import Caller
from query.modes.history import History, history
from tests.contract.connectors.conversations.test_http import door
from tests.e2e.test_stream import document, prose
from tests.fakes.server import serving
from tests.support.space import KEY_ENDS, Space

pytestmark = pytest.mark.stack

SMALL_GATE = {"PENSTOCK_CONVERSATIONS_GATE_TOKENS": "600"}
START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def pair(n: int, topic: str = "leave") -> dict[str, Any]:
    return {
        "question": f"What about {topic}, point {n}?",
        "answer": f"Point {n} of {topic} is settled by rule {n}.",
        "asked_at": (START + timedelta(minutes=n)).isoformat(),
        "id": f"{topic}-{n}",
    }


@asynccontextmanager
async def connectors_worker(space: Space) -> AsyncIterator[httpx.AsyncClient]:
    """`penstock worker connectors`, and a client with the key that its file declares."""
    port = free_port()
    file = space.home / "connectors.toml"
    digest = hashlib.sha256(b"the-secret").hexdigest()
    file.write_text(
        f'[key.assistant]\nexpires = {KEY_ENDS}\nsha256 = "{digest}"\ntenant = "acme"\nmay = ["conversations"]\n'
    )
    space.start("connectors", env={"PENSTOCK_CONNECTORS_FILE": str(file), "PENSTOCK_CONNECTORS_HTTP_PORT": str(port)})
    headers = {"authorization": "Bearer the-secret"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
        yield client
    assert space.stop("connectors") == 0
    log = space.log("connectors")
    assert "the-secret" not in log
    assert "parking" not in log


async def say(client: httpx.AsyncClient, *pairs: dict[str, Any], member: str = "ada", conversation: str = "c") -> None:
    answer = await client.post(
        "/v1/conversations", json={"member": member, "conversation": conversation, "pairs": list(pairs)}
    )
    assert answer.status_code == 202, answer.text


PAIRS = "SELECT count(*) FROM conversation_pairs WHERE member = 'ada'"
CHUNKS = "SELECT count(*) FROM conversation_chunks WHERE member = 'ada'"
WAITING = "SELECT count(*) FROM conversation_chunks WHERE embedding IS NULL"


async def active(pool: Pool) -> Generation:
    async with pool.connection() as connection:
        return await generations.active(connection)


async def test_conversations_are_served_whole_then_by_similarity_and_then_forgotten(space: Space) -> None:
    model = embedder(space.settings.embedding, dist() / "models")
    space.start("detect", "vectors", env=SMALL_GATE)
    async with connectors_worker(space) as client, open_pool(space.settings.postgres) as pool:

        async def history_for(question: str, member: str = "ada") -> History:
            vector = (await active(pool), await model.embed_query(question))
            async with pool.connection() as connection:
                return await history(connection, Caller("acme", frozenset()), member, 10_000, question=vector)

        await say(client, *(pair(n, "holidays") for n in range(5)))
        await space.until(PAIRS, 5)
        results = await history_for("holidays")
        assert (results.served, len(results.pieces), results.withheld) == ("whole", 5, 5)

        for at, topic in ((10, "printers"), (20, "the canteen"), (30, "parking"), (40, "visas"), (50, "laptops")):
            await say(client, *(pair(n, topic) for n in range(at, at + 10)), conversation=topic)
        await say(client, *(pair(n, "holidays") for n in range(5)))  # the whole conversation again, as clients do
        await space.until(PAIRS, 55)
        await space.until(CHUNKS, 6)
        await space.until(WAITING, 0)
        results = await history_for("Where can I park my car?")
        assert (results.served, results.without_embedding) == ("nearest", 0)
        assert "parking" in results.pieces[0].text
        assert len(results.pieces) == 5
        assert (await history_for("Where can I park my car?", member="bob")).pieces == ()

        assert (await client.delete("/v1/conversations/ada/parking")).status_code == 202
        await space.until(PAIRS, 45)
        await space.until(WAITING, 0)
        assert not any("parking" in piece.text for piece in (await history_for("parking")).pieces)
        assert (await client.delete("/v1/conversations/ada")).status_code == 202
        await space.until(PAIRS, 0)
        for table in ("members", "mentions", "chunks"):
            assert await space.query(f"SELECT count(*) FROM conversation_{table}") == [(0,)]
        assert not any("parking" in space.log(name) for name in ("detect", "vectors"))
    await model.aclose()


@pytest.mark.slow
async def test_a_killed_worker_loses_and_duplicates_no_accepted_pair(space: Space) -> None:
    space.start("detect", env=SMALL_GATE)
    async with door(space) as client:
        said = 0
        for round_ in range(3):
            for _ in range(15):
                await say(client, *(pair(n) for n in range(said, said + 4)), conversation=f"c{said % 7}")
                said += 4
            space.kill("detect")
            await say(client, *(pair(n) for n in range(said - 4, said + 2)), conversation=f"again{round_}")
            said += 2
            space.start("detect", env=SMALL_GATE)
        await space.until(PAIRS, said)
        numbers = await space.query("SELECT sent_id, count(DISTINCT digest) FROM conversation_mentions GROUP BY 1")
        assert sorted(numbers) == sorted((f"leave-{n}", 1) for n in range(said))
        await space.until(CHUNKS, -(-said // 10))
        texts = await space.query("SELECT text FROM conversation_chunks ORDER BY position")
        assert "\n\n".join(text for (text,) in texts).count("Question: ") == said
        await space.until("SELECT count(*) FROM dead_letters", 0)


@pytest.mark.slow
async def test_histories_are_served_during_a_model_outage_and_embedded_after_it(stack: Stack, tmp_path: Path) -> None:
    async with serving() as model:
        embedding = {"provider": "openai", "base_url": model.url, "dimensions": 64, "timeout_seconds": 5}
        async with Space.create(stack, tmp_path, embedding=embedding) as space:
            space.start("detect", "vectors", env=SMALL_GATE)
            await model.faults(errors=10**9, error_status=503)
            async with door(space) as client, open_pool(space.settings.postgres) as pool:
                for at in range(0, 60, 10):
                    await say(client, *(pair(n) for n in range(at, at + 10)))
                await space.until(CHUNKS, 6)
                before = (await model.stats())["requests"]
                while (await model.stats())["requests"] < before + 3:  # it really is asked, and fails
                    await asyncio.sleep(0.2)
                async with pool.connection() as connection:
                    served = await history(connection, Caller("acme", frozenset()), "ada", 10_000)
                assert (served.served, len(served.pieces), served.without_embedding) == ("newest", 5, 6)
                assert "point 59?" in served.pieces[0].text

                space.kill("vectors")  # what it held comes back when its lease ends
                space.start("detect#2", env=SMALL_GATE)
                await model.faults(errors=0)
                space.start("vectors", env=SMALL_GATE)
                await space.until(WAITING, 0)
                generation = await active(pool)
                assert generation.dimensions == 64
                assert await space.query("SELECT count(*) FROM conversation_chunks WHERE attempts > 0") == [(0,)]
                page = document("a.md", "# A\n\n" + prose("topic", 8))
                await space.publish(page)
                await space.until("SELECT count(*) FROM index_state WHERE store = 'vectors' AND seq = want_seq", 1)
