"""Shared parts of the tests of uploads: instances of two tenants on real Kafka and Postgres, and a client of the
API."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docx
import httpx
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from connectors.declared import Key
from connectors.http import Parts, app
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.uploads.intake import Intake
from connectors.uploads.options import UploadsOptions
from connectors.uploads.source import Uploads
from pipeline.kafka.client import producer
from pipeline.kafka.producer import Producer
from pipeline.kafka.stopping import stop_consumer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.http_server import served
from pipeline.stores.postgres import Pool, open_pool
from tests.support.space import KEY_ENDS, Space
from tests.support.waiting import until
from topics.codec import decode
from topics.messages import AnyMessage, DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES

KEYS = {
    name: Key(sha256=hashlib.sha256(f"key-{name}".encode()).hexdigest(), expires=KEY_ENDS, tenant=tenant, may=may)
    for name, tenant, may in (
        ("acme", "acme", frozenset({"uploads"})),
        ("rival", "rival", frozenset({"uploads"})),
        ("nothing", "acme", frozenset()),
        ("nowhere", "nowhere", frozenset({"uploads"})),
    )
}


@dataclass
class Office:
    """Two tenants' instances of uploads, and the HTTP side. ``start`` and ``stop`` are a worker's life."""

    space: Space
    pool: Pool
    kafka: Producer
    home: Path
    client: httpx.AsyncClient = field(init=False)
    instances: dict[str, Instance] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def declare(self, name: str = "files", tenant: str = "acme", **options: Any) -> None:
        given = UploadsOptions(**options)
        plan = Plan(
            name=name,
            tenant=tenant,
            kind="uploads",
            make=lambda context: Uploads(given, context),
            poll_seconds=3600,
            sweep_seconds=3600,
            groups_seconds=3600,
        )
        services = Services(
            postgres=self.space.settings.postgres,
            pool=self.pool,
            producer=self.kafka,
            metrics=Metrics(),
            folder=self.home,
        )
        self.instances[name] = Instance(plan, services)

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(instance.run()) for instance in self.instances.values()]
        for instance in self.instances.values():
            await until(
                lambda instance=instance: (
                    instance.activities.get("full") and instance.activities["full"].status.succeeded_at
                )
            )

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    def intake(self, name: str = "files") -> Intake:
        source = self.instances[name].source
        assert isinstance(source, Uploads)
        return source.intake

    async def upload(self, data: bytes, name: str = "a.txt", **fields: Any) -> str:
        """Returns the id."""
        answer = await self.client.post(
            "/v1/uploads", files={"file": (name, data)}, data={"acl_tags": "staff", **fields}
        )
        assert answer.status_code == 202, answer.text
        assert answer.json()["status_url"] == f"/v1/uploads/{answer.json()['id']}" == answer.headers["location"]
        return str(answer.json()["id"])

    async def status(self, id_: str) -> dict[str, Any]:
        answer = await self.client.get(f"/v1/uploads/{id_}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def ended(self, id_: str, *, as_: str = "published") -> dict[str, Any]:
        async def there() -> bool:
            return (await self.status(id_))["state"] == as_

        try:
            await until(there)
        except TimeoutError:
            pytest.fail(f"{await self.status(id_)}")
        return await self.status(id_)

    async def messages(self) -> list[AnyMessage]:
        """All that was ever published, each partition in order."""
        settings = self.space.settings.kafka
        consumer = AIOKafkaConsumer(bootstrap_servers=settings.bootstrap, auto_offset_reset="earliest")
        await consumer.start()
        try:
            consumer.assign(
                [
                    TopicPartition(f"{settings.topic_prefix}{topic.name}", n)
                    for topic in (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, IDENTITIES)
                    for n in range(topic.partitions)
                ]
            )
            await consumer.seek_to_beginning()
            ends = await consumer.end_offsets(consumer.assignment())
            results: list[AnyMessage] = []
            while any([await consumer.position(partition) < end for partition, end in ends.items()]):
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    results += [decode(record.value, record.headers) for record in records]
            return sorted(results, key=lambda message: message.observed_at)
        finally:
            await stop_consumer(consumer)

    async def run_action(self, action: str) -> None:
        """As ``penstock connector run`` does."""
        [(number,)] = await self.space.query(
            "INSERT INTO connector_asks (tenant, source, action) VALUES ('acme', 'files', %s) RETURNING id", action
        )

        async def answered() -> bool:
            rows = await self.space.query("SELECT done_at IS NOT NULL FROM connector_asks WHERE id = %s", number)
            return bool(rows[0][0])

        await until(answered)


@asynccontextmanager
async def an_office(space: Space, home: Path) -> AsyncIterator[Office]:
    async with open_pool(space.settings.postgres) as pool, producer(space.settings.kafka) as kafka:
        office = Office(space, pool, kafka, home)
        http = app(Parts(office.instances, KEYS, kafka, Metrics()))
        headers = {"authorization": "Bearer key-acme"}
        async with served(http) as url, httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
            office.client = client
            try:
                yield office
            finally:
                await office.stop()


def word_file(text: str) -> bytes:
    document = docx.Document()
    document.add_heading("Travel policy", 1)
    document.add_paragraph(text)
    made = io.BytesIO()
    document.save(made)
    return made.getvalue()


def upserts(messages: list[AnyMessage]) -> list[DocumentUpserted]:
    return [message for message in messages if isinstance(message, DocumentUpserted)]


async def is_newer(office: Office, id_: str, version: int) -> bool:
    return bool((await office.status(id_))["version"] > version)


async def search(space: Space, query: str) -> list[dict[str, Any]]:
    code, response = await space.penstock("search", query, "--tenant", "acme", "--tag", "staff", "--json")
    assert code == 0, response
    return list(response["results"])


async def has_state(office: Office, id_: str, state: str) -> bool:
    return bool((await office.status(id_))["state"] == state)
