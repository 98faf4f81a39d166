"""Webhooks on real Kafka and Postgres, with a receiver over HTTP that verifies every request: nothing is lost and a
document's events arrive in order, whatever a receiver, the network or our process does."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from aiokafka import AIOKafkaProducer
from psycopg.errors import ForeignKeyViolation

from connectors.git.playground import certificate
from connectors.webhooks import send, worker
from connectors.webhooks.send import Receiver, checked
from connectors.webhooks.worker import Webhooks
from pipeline.core import webhooks as core
from pipeline.core.errors import Misconfigured
from pipeline.core.identity import document_id
from pipeline.kafka.client import deliver
from pipeline.ledger import webhooks as ledger
from pipeline.ledger.webhooks import Endpoint
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import WebhookSettings
from tests.fakes.webhooks import FakeWebhook
from tests.support.connectors.runner_kit import Bench
from tests.support.hostile_server import sending
from topics.messages import AnswerInvalidated, ConflictChanged, DocumentIndexed
from topics.registry import ANSWERS_INVALIDATED, CONFLICTS, DOCUMENTS_INDEXED

pytestmark = pytest.mark.stack

KEY = "a key of thirty-two characters and more"


@dataclass
class Site:
    """Endpoints of a tenant of its own, and the task that serves them."""

    bench: Bench
    metrics: Metrics = field(default_factory=Metrics)
    seq: int = 0
    names: list[str] = field(default_factory=list)

    async def add(
        self,
        receiver: FakeWebhook | str,
        *,
        sources: Sequence[str] = (),
        private: bool = True,
        tenant: str = "",
        answers: bool = False,
        conflicts: bool = False,
    ) -> str:
        """An endpoint for the receiver, which gets its secret; its name."""
        name = f"w{uuid4().hex[:8]}"
        secret = core.Secret.new(KEY, os.urandom(core.SALT_BYTES))
        url = receiver if isinstance(receiver, str) else receiver.url
        async with self.bench.pool.connection() as connection:
            await ledger.add(
                connection,
                name,
                tenant or self.bench.tenant,
                list(sources),
                url,
                secret,
                private=private,
                answers=answers,
                conflicts=conflicts,
            )
        if isinstance(receiver, FakeWebhook):
            receiver.secrets.append(core.printed(secret.bytes_of(KEY) or b""))
        self.names.append(name)
        return name

    async def announce(
        self, *external_ids: str, tenant: str = "", source: str = "wiki", state: str = "searchable"
    ) -> None:
        """Publish an event for each of these documents, in this order."""
        messages = []
        for external_id in external_ids:
            self.seq += 1
            of = (tenant or self.bench.tenant, source, external_id)
            messages.append(
                DocumentIndexed(
                    tenant=of[0],
                    source=of[1],
                    external_id=of[2],
                    observed_at=datetime.now(UTC),
                    document_id=str(document_id(*of)),
                    seq=self.seq,
                    version=self.seq,
                    state=state,
                    generation="g1",
                    chunks=3,
                )
            )
        await deliver(self.bench.producer.send(DOCUMENTS_INDEXED, message) for message in messages)

    async def invalidate(self, question: UUID) -> None:
        """Publish the news of a standing question of the tenant."""
        message = AnswerInvalidated(
            tenant=self.bench.tenant,
            source="standing",
            observed_at=datetime.now(UTC),
            question_id=question,
            change="deleted",
            sentences=[2],
            asked_at=datetime.now(UTC),
        )
        await deliver([self.bench.producer.send(ANSWERS_INVALIDATED, message)])

    async def contradict(self, conflict: UUID, *states: str) -> None:
        """Publish the news of a contradiction of the tenant, in this order."""
        messages = [
            ConflictChanged(
                tenant=self.bench.tenant,
                source="drive",
                observed_at=datetime.now(UTC),
                conflict_id=conflict,
                state=state,
                difference="number",
                documents=[uuid4(), uuid4()],
                passages=[uuid4(), uuid4()],
            )
            for state in states
        ]
        await deliver(self.bench.producer.send(CONFLICTS, message) for message in messages)

    async def endpoint(self, name: str) -> Endpoint:
        async with self.bench.pool.connection() as connection:
            return (await ledger.endpoints(connection, name))[0]

    async def waiting(self, name: str) -> tuple[int, int]:
        """(waiting, parked)"""
        async with self.bench.pool.connection() as connection:
            return (await ledger.waiting(connection))[name][:2]

    @asynccontextmanager
    async def serving(self, **settings: object) -> AsyncIterator[None]:
        given = WebhookSettings(**{"key": KEY, **settings})
        task = asyncio.create_task(
            Webhooks(self.bench.pool, self.bench.kafka, given, self.metrics).run(), name="webhooks"
        )
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until_waiting(self, name: str, expected: tuple[int, int]) -> None:
        async with asyncio.timeout(60):
            while await self.waiting(name) != expected:
                await asyncio.sleep(0.02)

    async def until_paused(self, name: str) -> Endpoint:
        async with asyncio.timeout(60):
            while (endpoint := await self.endpoint(name)).paused_at is None:
                await asyncio.sleep(0.02)
        return endpoint


@pytest.fixture
async def site(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """Waits are a hundredth of what they are."""
    monkeypatch.setattr(core, "RETRY_BASE_SECONDS", 0.05)
    monkeypatch.setattr(core, "RETRY_CAP_SECONDS", 0.5)
    monkeypatch.setattr(send, "REQUEST_SECONDS", 1.0)
    for name, seconds in (("LOOK_SECONDS", 0.05), ("COUNT_SECONDS", 0.05), ("AGAIN_SECONDS", 0.05)):
        monkeypatch.setattr(worker, name, seconds)
    site = Site(bench)
    yield site
    async with bench.pool.connection() as connection:
        for name in site.names:
            await connection.execute("DELETE FROM webhooks WHERE name = %s", [name])


async def until(receiver: FakeWebhook, count: int) -> None:
    """Wait until the receiver has so many events."""
    async with asyncio.timeout(60):
        while len(receiver.events()) < count:
            await asyncio.sleep(0.02)


async def test_an_endpoint_receives_its_tenants_and_sources_events_signed_and_in_order(site: Site) -> None:
    async with FakeWebhook() as receiver, FakeWebhook() as narrow, FakeWebhook() as other, site.serving():
        await site.add(receiver)
        await site.add(narrow, sources=["wiki*"])
        await site.add(other, tenant=f"other{site.bench.tenant}")
        await site.announce("a", "b", "a", "c", "a")
        await site.announce("d", source="drive", state="retired")
        await site.announce("theirs", tenant=f"other{site.bench.tenant}")
        await until(receiver, 6)
        await until(narrow, 5)
        await until(other, 1)
        assert receiver.sequence("a") == [1, 3, 5]
        assert [event["seq"] for event in narrow.events() if event["source"] != "wiki"] == []
        assert [event["external_id"] for event in other.events()] == ["theirs"]
        event = next(e for e in receiver.received if e["data"]["external_id"] == "d")
        assert (event["type"], event["source"]) == (
            "io.penstock.document.indexed.v1",
            f"/{site.bench.tenant}/drive",
        )
        assert event["data"] == {
            **event["data"],
            "tenant": site.bench.tenant,
            "state": "retired",
            "chunks": 3,
            "version": 6,
        }
        assert set(event["data"]) == set(DocumentIndexed.model_fields), "nothing but what the topic carries"
        assert receiver.forged + narrow.forged + other.forged == 0
        for name in site.names:
            await site.until_waiting(name, (0, 0))
        assert (await site.endpoint(site.names[0])).delivered == 6


async def test_an_endpoint_receives_the_news_of_standing_questions_only_where_it_says_so(site: Site) -> None:
    question = uuid4()
    async with FakeWebhook() as receiver, FakeWebhook() as documents, FakeWebhook() as other, site.serving():
        await site.add(receiver, answers=True, sources=["wiki"])
        await site.add(documents)
        await site.add(other, answers=True, tenant=f"other{site.bench.tenant}")
        await site.invalidate(question)
        await site.announce("after")
        await until(receiver, 2)
        await until(documents, 1)
        [event] = [event for event in receiver.received if event["type"] == "io.penstock.answer.invalidated.v1"]
        assert (event["data"]["question_id"], event["data"]["sentences"]) == (str(question), [2])
        assert set(event["data"]) == set(AnswerInvalidated.model_fields), "nothing but what the topic carries"
        assert [event["external_id"] for event in documents.events()] == ["after"]
        assert other.events() == []


async def test_an_endpoint_receives_the_news_of_contradictions_in_order_only_where_it_says_so(site: Site) -> None:
    conflict, kind = uuid4(), "io.penstock.conflict.changed.v1"
    async with FakeWebhook() as receiver, FakeWebhook() as documents, FakeWebhook() as other, site.serving():
        await site.add(receiver, conflicts=True, sources=["wiki"])
        await site.add(documents, answers=True)
        await site.add(other, conflicts=True, tenant=f"other{site.bench.tenant}")
        await site.contradict(conflict, "open", "ended", "open")
        await site.announce("after")
        await until(receiver, 4)
        await until(documents, 1)
        events = [event for event in receiver.received if event["type"] == kind]
        assert [event["data"]["state"] for event in events] == ["open", "ended", "open"]
        assert {event["data"]["conflict_id"] for event in events} == {str(conflict)}
        assert set(events[0]["data"]) == set(ConflictChanged.model_fields), "nothing but what the topic carries"
        assert [event["external_id"] for event in documents.events()] == ["after"]
        assert other.events() == []


async def test_what_waits_is_listed_also_where_it_is_not_of_a_document(site: Site) -> None:
    conflict = uuid4()
    async with FakeWebhook() as receiver, site.serving():
        receiver.faults.errors = 1_000_000
        name = await site.add(receiver, conflicts=True)
        await site.contradict(conflict, "open")
        await site.until_waiting(name, (1, 0))
        async with site.bench.pool.connection() as connection:
            [entry] = await ledger.listed(connection, name, 10)
        assert (entry["document_id"], entry["state"], entry["external_id"]) == (str(conflict), "open", None)


async def test_errors_and_hanging_requests_are_tried_again_under_the_same_id_until_the_receiver_answers(
    site: Site,
) -> None:
    async with FakeWebhook() as receiver, site.serving():
        receiver.faults.errors, receiver.faults.disconnect, receiver.faults.hang = 3, 2, 1
        name = await site.add(receiver)
        await site.announce(*"abcabcabc")
        await until(receiver, 9)
        assert [receiver.sequence(letter) for letter in "abc"] == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
        assert len({event["id"] for event in receiver.received}) == 9
        await site.until_waiting(name, (0, 0))
        endpoint = await site.endpoint(name)
        assert (endpoint.failures, endpoint.failing_since, endpoint.paused_at) == (0, None, None)
    count = site.metrics.registry.get_sample_value
    assert count("penstock_webhook_deliveries_total", {"webhook": name, "outcome": "delivered"}) == 9
    assert (count("penstock_webhook_deliveries_total", {"webhook": name, "outcome": "failed"}) or 0) >= 3


async def test_a_receiver_that_hangs_delays_no_other_receiver(site: Site) -> None:
    async with FakeWebhook() as slow, FakeWebhook() as quick, site.serving():
        slow.faults.hang = 1_000_000
        name = await site.add(slow)
        await site.add(quick)
        await site.announce(*(f"d{n}" for n in range(40)))
        await until(quick, 40)
        assert slow.events() == []
        assert (await site.waiting(name))[0] == 40
        slow.faults.hang = 0
        await until(slow, 40)


async def test_events_published_while_we_or_the_receiver_are_away_all_arrive_in_order(site: Site) -> None:
    receiver = FakeWebhook()
    await receiver.start()
    address = receiver.url
    port = int(receiver.address.rpartition(":")[2])
    name = await site.add(receiver)
    async with site.serving():
        await site.announce("a", "b")
        await until(receiver, 2)
    await site.announce("a", "b", "a")  # nobody serves
    await receiver.stop()
    async with site.serving():  # the receiver is away
        await site.announce("b", "c")
        async with asyncio.timeout(60):
            while (await site.endpoint(name)).failures < 2:
                await asyncio.sleep(0.02)
    await site.announce("a")
    async with site.serving():
        await receiver.start(port)
        assert receiver.url == address
        await until(receiver, 8)
        assert [receiver.sequence(letter) for letter in "abc"] == [[1, 3, 5, 8], [2, 4, 6], [7]]
        await site.until_waiting(name, (0, 0))
    await receiver.stop()


async def test_a_process_that_is_killed_between_requests_and_records_sends_repeats_and_loses_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, crashes = ledger.record, 4

    async def crash(*arguments: object, **options: object) -> None:
        nonlocal crashes
        if crashes:
            crashes -= 1
            raise RuntimeError("killed")
        await record(*arguments, **options)

    monkeypatch.setattr(ledger, "record", crash)
    async with FakeWebhook() as receiver, site.serving():
        await site.add(receiver)
        await site.announce("a", "b", "a")
        await until(receiver, 3)
        assert receiver.sequence("a") == [1, 3]
        assert len(receiver.received) > 3
        assert len({event["id"] for event in receiver.received}) == 3


async def test_a_receiver_that_is_gone_is_paused_at_once_and_resumes_with_everything_that_waits(site: Site) -> None:
    async with FakeWebhook() as receiver, site.serving():
        receiver.faults.errors, receiver.faults.error_status = 1, 410
        name = await site.add(receiver)
        await site.announce("a")
        endpoint = await site.until_paused(name)
        assert "410 Gone" in (endpoint.reason or "")
        await site.announce("a", "b")
        await site.until_waiting(name, (3, 0))
        await asyncio.sleep(0.5)
        assert receiver.stats.requests == 1
        gauge = site.metrics.registry.get_sample_value
        async with asyncio.timeout(30):
            while gauge("penstock_webhook_paused", {"webhook": name}) != 1:
                await asyncio.sleep(0.02)
        async with site.bench.pool.connection() as connection:
            assert await ledger.resume(connection, name) == 3
        await until(receiver, 3)
        assert receiver.sequence("a") == [1, 2]


async def test_a_receiver_that_always_fails_is_paused_and_keeps_its_events(site: Site) -> None:
    async with FakeWebhook() as receiver, site.serving(give_up_seconds=1.0):
        receiver.faults.errors = 1_000_000
        name = await site.add(receiver)
        await site.announce("a", "b")
        endpoint = await site.until_paused(name)
        assert "it has failed for" in (endpoint.reason or "")
        assert "answered 503" in (endpoint.reason or "")
        assert await site.waiting(name) == (2, 0)


async def test_an_event_that_is_always_refused_is_parked_and_holds_up_only_its_own_document(site: Site) -> None:
    async with FakeWebhook() as receiver, site.serving(give_up_seconds=4.0):
        receiver.faults.refused = frozenset({"bad"})
        name = await site.add(receiver)
        await site.announce("bad", "good", "bad")

        async def others() -> None:
            while True:
                await site.announce("good")
                await asyncio.sleep(0.2)

        publishing = asyncio.create_task(others())
        async with asyncio.timeout(60):
            while (await site.waiting(name))[1] < 2:
                await asyncio.sleep(0.02)
        publishing.cancel()
        assert receiver.sequence("bad") == []
        assert len(receiver.sequence("good")) >= 2
        assert (await site.endpoint(name)).paused_at is None
        async with site.bench.pool.connection() as connection:
            listed = [entry for entry in await ledger.listed(connection, name, 10) if entry["parked_at"]]
        assert [(e["external_id"], e["reason"].rpartition("answered ")[2]) for e in listed] == [("bad", "500")] * 2
        receiver.faults.refused = frozenset()
        async with site.bench.pool.connection() as connection:
            await ledger.resume(connection, name)
        async with asyncio.timeout(30):
            while len(receiver.sequence("bad")) < 2:
                await asyncio.sleep(0.02)
        assert receiver.sequence("bad") == [1, 3]


async def test_redirects_are_not_followed_and_an_endless_response_is_not_read(site: Site) -> None:
    async with FakeWebhook() as receiver, site.serving():
        receiver.faults.redirect = 1
        name = await site.add(receiver)
        await site.announce("a")
        await until(receiver, 1)
        assert receiver.elsewhere == 0
        receiver.faults.endless = 1
        await site.announce("b")
        async with asyncio.timeout(30):
            while (await site.endpoint(name)).delivered < 2:
                await asyncio.sleep(0.02)
        assert await site.waiting(name) == (0, 0)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"HTTP/1.1 503 x\r\nretry-after: Thu, 01 Jan 99999999999999999999 12:00:00 GMT\r\n\r\n", 503),
        (b"HTTP/1.1 101 x\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", None),
        (b"\xff" * 1000, None),
    ],
)
async def test_whatever_a_receiver_sends_is_an_outcome_of_its_own_event(sent: bytes, status: int | None) -> None:
    """An exception would stop the sending to all receivers."""
    async with sending(sent) as port:
        receiver = Receiver(f"http://127.0.0.1:{port}/x", private=True)
        answer = await receiver.send({"webhook-id": "1"}, b"{}")
        await receiver.close()
    assert (answer.status, answer.reason is None) == (status, False)


@pytest.mark.parametrize(
    ("begins", "piece"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1;" + b"e" * 10_000 + b"\r\na\r\n"),
    ],
    ids=["informational responses", "chunks of a byte"],
)
async def test_what_a_receiver_sends_without_end_is_not_read(begins: bytes, piece: bytes) -> None:
    """For 15 s, the event loop of all connectors did little else than read it."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(begins)
        with suppress(ConnectionError):
            while True:
                writer.write(piece * 100)
                await writer.drain()

    async with await asyncio.start_server(send, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        receiver = Receiver(f"http://127.0.0.1:{port}/x", private=True)
        answer = await receiver.send({"webhook-id": "1"}, b"{}")
        await receiver.close()
    assert answer.reason == f"http://127.0.0.1:{port} did not respond: it sent without end"


async def test_a_receiver_that_breaks_its_tls_connection_counts_as_away(tmp_path: Path) -> None:
    certificates = certificate(tmp_path)
    async with sending(b"no record of TLS", beneath=certificates) as port:
        trust = ssl.create_default_context(cafile=str(certificates[0]))
        receiver = Receiver(f"https://127.0.0.1:{port}/x", private=True, ssl_context=trust)
        answer = await receiver.send({"webhook-id": "1"}, b"{}")
        await receiver.close()
    assert (answer.status, answer.reason) == (
        None,
        f"https://127.0.0.1:{port} did not respond: the connection was lost",
    )


@pytest.mark.parametrize("name", ["a..b", "a" * 70 + ".example.com"])
async def test_a_name_that_cannot_be_resolved_is_an_outcome(name: str) -> None:
    receiver = Receiver(f"https://{name}/", private=False)
    answer = await receiver.send({"webhook-id": "1"}, b"{}")
    await receiver.close()
    assert answer.reason is not None
    assert answer.reason.endswith("did not respond: the name does not resolve")


async def test_records_of_the_topic_that_no_process_of_ours_would_write_stop_no_webhook(site: Site) -> None:
    event = {
        "tenant": site.bench.tenant,
        "source": "wiki",
        "external_id": "forged",
        "observed_at": datetime.now(UTC).isoformat(),
        "document_id": str(document_id(site.bench.tenant, "wiki", "forged")),
        "seq": 1,
        "state": "searchable",
        "generation": "g1",
    }
    forged: list[tuple[dict[str, object], bytes]] = [
        (event, b"a\nb"),
        (event, b"\xff"),
        (event, b"\x00"),
        (event, b""),
        (event, b"a" * 100_000),
        ({**event, "document_id": "no UUID"}, b"1"),
        ({**event, "generation": "\x00", "more": "\x00"}, b"good"),
    ]
    async with FakeWebhook() as receiver, site.serving():
        name = await site.add(receiver)
        async with AIOKafkaProducer(bootstrap_servers=site.bench.kafka.bootstrap) as producer:
            for value, id_ in forged:
                await producer.send_and_wait(
                    f"{site.bench.kafka.topic_prefix}{DOCUMENTS_INDEXED.name}",
                    json.dumps(value).encode(),
                    key=b"x",
                    headers=[("ce_type", b"io.penstock.document.indexed.v1"), ("ce_id", id_)],
                )
        await until(receiver, 1)
        await site.announce("genuine")
        await until(receiver, 2)
        assert [event["external_id"] for event in receiver.events()] == ["forged", "genuine"]
        await site.until_waiting(name, (0, 0))
        async with site.bench.pool.connection() as connection:
            await ledger.pause(connection, name, "paused by a test")
            odd = ledger.Event(name, site.bench.tenant, uuid4(), "searchable", "2", json.dumps(forged[-1][0]))
            await ledger.enqueue(connection, [odd])
            assert [e["external_id"] for e in await ledger.listed(connection, name, 10)] == ["forged"]


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fd00::1"])
async def test_an_address_that_is_not_public_is_refused_whatever_name_leads_there(address: str) -> None:
    async def resolver(host: str, port: int) -> list[str]:
        return [address]

    receiver = Receiver("https://hooks.example.com/x", private=False, resolver=resolver)
    answer = await receiver.send({"webhook-id": "1"}, b"{}")
    await receiver.close()
    assert (answer.status, answer.reason) == (
        None,
        "hooks.example.com resolves to an address that is not public: not requested",
    )


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "ftp://example.com/",
        "https://user:secret@example.com/",
        "https:///x",
        "no url",
        "https://a#b",
        "https://xn--a.example/",
    ],
)
def test_only_an_https_address_without_a_login_is_a_receiver(url: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        checked(url, private=False)
    assert "secret" not in str(raised.value)
    assert checked("http://receiver:8080/hook", private=True).host == "receiver"


async def test_a_private_receiver_needs_to_be_allowed(site: Site) -> None:
    async with FakeWebhook() as receiver, site.serving():
        name = await site.add(receiver.url.replace("http:", "https:"), private=False)
        await site.announce("a")
        async with asyncio.timeout(30):
            while (await site.endpoint(name)).failures == 0:
                await asyncio.sleep(0.02)
        assert "not public" in ((await site.endpoint(name)).reason or "")
        assert receiver.stats.requests == 0


async def test_during_a_rotation_receivers_with_either_secret_accept_events(site: Site) -> None:
    async with FakeWebhook() as receiver, site.serving():
        name = await site.add(receiver)
        new = core.Secret.new(KEY, os.urandom(core.SALT_BYTES))
        async with site.bench.pool.connection() as connection:
            await ledger.rotate(connection, name, new, timedelta(hours=1))
        await site.announce("a")
        await until(receiver, 1)
        receiver.secrets.append(core.printed(new.bytes_of(KEY) or b""))  # both must verify
        await site.announce("b")
        await until(receiver, 2)
        async with site.bench.pool.connection() as connection:
            await connection.execute("UPDATE webhooks SET old_until = now() WHERE name = %s", [name])
        receiver.secrets = receiver.secrets[1:]
        await site.announce("c")
        await until(receiver, 3)
        assert receiver.forged == 0


async def test_with_another_key_nothing_is_sent_and_the_reason_is_shown(site: Site) -> None:
    async with FakeWebhook() as receiver:
        name = await site.add(receiver)
        await site.announce("a")
        async with site.serving(key="another key of thirty-two characters"):
            async with asyncio.timeout(60):
                while (await site.endpoint(name)).failures == 0:
                    await asyncio.sleep(0.02)
            assert "PENSTOCK_WEBHOOKS_KEY" in ((await site.endpoint(name)).reason or "")
        assert receiver.stats.requests == 0
        async with site.serving():
            await until(receiver, 1)


async def test_one_of_two_processes_sends_and_the_other_takes_over(site: Site) -> None:
    async with FakeWebhook() as receiver:
        await site.add(receiver)
        async with site.serving():
            async with site.serving():
                await site.announce("a", "a", "a")
                await until(receiver, 3)
                assert receiver.sequence("a") == [1, 2, 3]
            await site.announce("a")
            await until(receiver, 4)
        assert len(receiver.received) == 4


async def test_postgres_itself_refuses_one_tenants_event_for_another_tenants_endpoint(site: Site) -> None:
    async with FakeWebhook() as receiver:
        name = await site.add(receiver)
        event = ledger.Event(name, "other", document_id("other", "wiki", "a"), "searchable", "1", "{}")
        async with site.bench.pool.connection() as connection:
            await ledger.enqueue(connection, [event])
            assert await ledger.listed(connection, name, 10) == []
        with pytest.raises(ForeignKeyViolation):
            async with site.bench.pool.connection() as connection:
                await connection.execute(
                    "INSERT INTO webhook_deliveries (webhook, tenant, document_id, state, event_id, event)"
                    " VALUES (%s, 'other', %s, 'searchable', '1', '{}')",
                    [name, event.document_id],
                )


async def test_events_that_nobody_takes_are_deleted_after_their_days(site: Site) -> None:
    name = await site.add("https://receiver.example.com/")
    async with site.serving():
        await site.announce("old", "new")
        await site.until_waiting(name, (2, 0))
        async with site.bench.pool.connection() as connection:
            await ledger.pause(connection, name, "paused by a test")
        # In a transaction of its own: the worker locks events before their webhook.
        async with site.bench.pool.connection() as connection:
            await connection.execute(
                "UPDATE webhook_deliveries SET created_at = now() - interval '15 days' WHERE webhook = %s"
                " AND event::json->>'external_id' = 'old'",
                [name],
            )
        await site.until_waiting(name, (1, 0))
