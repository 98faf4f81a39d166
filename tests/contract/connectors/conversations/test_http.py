"""POST and DELETE /v1/conversations on a real server and a real Kafka, without workers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from connectors import conversations
from connectors.declared import Key
from connectors.http import Parts, app
from pipeline.kafka.client import producer
from pipeline.kafka.stopping import stop_consumer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.http_server import served
from tests.support.space import KEY_ENDS, Space
from topics.codec import decode
from topics.messages import MAX_PAIR_BYTES, AnyMessage, ConversationForgotten, ConversationRecorded
from topics.registry import CONVERSATIONS

pytestmark = pytest.mark.stack

KEYS = {
    name: Key(sha256=hashlib.sha256(f"key-{name}".encode()).hexdigest(), expires=KEY_ENDS, tenant=tenant, may=may)
    for name, tenant, may in (
        ("acme", "acme", frozenset({"conversations"})),
        ("rival", "rival", frozenset({"conversations"})),
        ("other", "acme", frozenset()),
    )
}
PAIR = {"question": "How much leave?", "answer": "Thirty days.", "asked_at": "2026-03-01T12:00:00Z"}
BODY = {"member": "ada@example.org", "conversation": "c/1", "pairs": [PAIR]}


@asynccontextmanager
async def door(space: Space) -> AsyncIterator[httpx.AsyncClient]:
    """The connectors' HTTP side, served, and a client that holds acme's key."""
    headers = {"authorization": "Bearer key-acme"}
    async with producer(space.settings.kafka) as kafka:
        whole = app(Parts({}, KEYS, kafka, Metrics()))
        async with served(whole) as url, httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
            yield client


@pytest.fixture
async def client(space: Space) -> AsyncIterator[httpx.AsyncClient]:
    async with door(space) as client:
        yield client


async def on_topic(space: Space) -> list[AnyMessage]:
    """Everything on conversations.live.v1, in the order of their stamps; each under its own key."""
    kafka = space.settings.kafka
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, group_id=None, auto_offset_reset="earliest")
    await consumer.start()
    try:
        places = [TopicPartition(kafka.topic_prefix + CONVERSATIONS.name, n) for n in range(CONVERSATIONS.partitions)]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        records = [await consumer.getone() for _ in range(sum(ends.values()))]
    finally:
        await stop_consumer(consumer)
    messages = [decode(record.value, record.headers) for record in records]
    assert [message.key.encode() for message in messages] == [record.key for record in records]
    return sorted(messages, key=lambda message: message.observed_at)


def problem(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    said = answer.json()
    assert said["status"] == status
    assert "\n" not in said["detail"]
    return str(said["detail"])


async def test_an_accepted_conversation_is_on_kafka_under_the_keys_tenant(
    space: Space, client: httpx.AsyncClient
) -> None:
    answer = await client.post("/v1/conversations", json=BODY)
    assert (answer.status_code, answer.json()) == (202, {"accepted": 1})
    rival = await client.post("/v1/conversations", json=BODY, headers={"authorization": "Bearer key-rival"})
    assert rival.status_code == 202
    one, other = await on_topic(space)
    assert isinstance(one, ConversationRecorded)
    assert (one.tenant, one.source, one.member, one.conversation) == ("acme", "conversations", BODY["member"], "c/1")
    assert one.pairs[0].answer == "Thirty days."
    assert other.tenant == "rival"


async def test_deletion_forgets_all_of_a_member_or_one_conversation(space: Space, client: httpx.AsyncClient) -> None:
    """A conversation's name may hold a slash, a member's may not; what says nothing forgets nothing."""
    for path in ("ada@example.org/c/1", "ada@example.org/c%2F1", "ada%40example.org", "b%20b"):
        assert (await client.delete(f"/v1/conversations/{path}")).status_code == 202
    assert "conversation" in problem(await client.delete("/v1/conversations/ada/"), 422)
    assert "member" in problem(await client.delete(f"/v1/conversations/{'a' * 501}"), 422)
    assert (await client.delete("/v1/conversations")).status_code == 405
    wishes = [(m.member, m.conversation) for m in await on_topic(space) if isinstance(m, ConversationForgotten)]
    assert wishes == [("ada@example.org", "c/1"), ("ada@example.org", "c/1"), ("ada@example.org", None), ("b b", None)]


async def test_requests_without_a_permitted_key_are_refused_and_publish_nothing(
    space: Space, client: httpx.AsyncClient
) -> None:
    for headers in ({"authorization": ""}, {"authorization": "Bearer nothing"}):
        assert (await client.post("/v1/conversations", content=b"{", headers=headers)).status_code == 401
        assert (await client.delete("/v1/conversations/ada", headers=headers)).status_code == 401
    may_not = {"authorization": "Bearer key-other"}
    assert (await client.post("/v1/conversations", json=BODY, headers=may_not)).status_code == 403
    assert (await client.delete("/v1/conversations/ada", headers=may_not)).status_code == 403
    assert await on_topic(space) == []


INVALID_FIELDS: Sequence[tuple[dict[str, Any], str]] = (
    ({"tenant": "rival"}, "tenant: Extra inputs are not permitted"),
    ({"source": "wiki"}, "source: Extra inputs are not permitted"),
    ({"observed_at": "2026-03-01T12:00:00Z"}, "observed_at: Extra inputs"),
    ({"member": "a/b"}, "member: "),
    ({"member": None}, "member: "),
    ({"pairs": []}, "pairs: "),
    ({"pairs": [PAIR | {"question": ""}]}, "pairs.0.question: "),
    ({"pairs": [PAIR, {"question": "canary-3"}]}, "pairs.1.answer: Field required"),
    ({"pairs": [PAIR | {"asked_at": "yesterday, canary-3"}]}, "pairs.0.asked_at: "),
    ({"pairs": [PAIR | {"answer": "canary-3" * MAX_PAIR_BYTES}]}, "pairs.0.answer: Value error, is "),
    ({"pairs": [PAIR | {"answer": "x" * 60_000}] * 20}, "pairs: Value error, are "),
    ({"pairs": [PAIR] * 101}, "pairs: List should have at most 100 items"),
)


async def test_an_invalid_field_is_named_in_one_line_without_quoting_content(client: httpx.AsyncClient) -> None:
    for change, says in INVALID_FIELDS:
        detail = problem(await client.post("/v1/conversations", json=BODY | change), 422)
        assert detail.startswith(says)
        assert "canary" not in detail


async def test_bodies_that_are_no_json_or_no_unicode_are_refused(client: httpx.AsyncClient) -> None:
    for content in (b"", b"{", b"[]", b'{"member": "\\ud800"}', b"\xff\xfe", b"[" * 100_000):
        problem(await client.post("/v1/conversations", content=content), 422)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused_before_it_is_read_to_the_end(
    client: httpx.AsyncClient, *, chunked: bool
) -> None:
    """Said to be too large: answered before anything of it came. Turning out to be: before it ended."""
    url = httpx.URL(client.base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {conversations.MAX_BODY_BYTES + 1}"
    writer.write(
        f"POST /v1/conversations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-acme\r\n{length}\r\n\r\n".encode()
    )
    if chunked:
        piece = b"10000\r\n" + b" " * 2**16 + b"\r\n"
        for _ in range(conversations.MAX_BODY_BYTES // 2**16 + 1):
            writer.write(piece)
            await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 30)  # to the end: the server has closed
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert str(conversations.MAX_BODY_BYTES).encode() in answer


async def test_a_conversation_that_kafka_does_not_confirm_is_answered_503(
    space: Space, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "DELIVERY_SECONDS", 0.0)
    answer = await client.post("/v1/conversations", json=BODY)
    assert "send the same request again" in problem(answer, 503)
    assert answer.headers["retry-after"] == "5"
