"""A test's own Penstock on the shared services, its workers real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from aiokafka.admin import AIOKafkaAdminClient
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cli.setup import prepare
from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from pipeline.kafka.client import deliver, producer
from pipeline.ledger.arrivals import arrivals
from pipeline.runtime.settings import (
    ElasticsearchSettings,
    EmbeddingSettings,
    KafkaSettings,
    PostgresSettings,
    Settings,
    StreamSettings,
)
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import open_pool
from tests.support.processes import PROJECT as PROJECT
from tests.support.processes import Process, Processes, run_penstock
from tests.support.waiting import PATIENCE_SECONDS
from topics.messages import AnyMessage, DocumentUpserted
from topics.registry import DOCUMENTS_LIVE, Topic


@dataclass
class Space(Processes):
    settings: Settings
    home: Path
    environment: dict[str, str]
    processes: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def create(
        cls, stack: Stack, folder: Path, *, embedding: dict[str, Any] | None = None
    ) -> AsyncIterator[Space]:
        """embedding: fields of EmbeddingSettings, for the workers too; default: the local model."""
        endpoints = json.loads((stack.home / "endpoints.json").read_text())
        name = f"t{uuid.uuid4().hex[:10]}"
        admin_dsn = endpoints["postgres"]["dsn"]
        dsn = make_conninfo(**{**conninfo_to_dict(admin_dsn), "dbname": name})
        with psycopg.connect(admin_dsn, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        settings = Settings(
            kafka=KafkaSettings(bootstrap=endpoints["kafka"]["bootstrap"], topic_prefix=f"{name}."),
            postgres=PostgresSettings(dsn=dsn),  # type: ignore[arg-type]  # pydantic makes it a secret
            elasticsearch=ElasticsearchSettings(url=endpoints["elasticsearch"]["url"], index_prefix=f"{name}-"),
            embedding=EmbeddingSettings(**(embedding or {})),
            stream=StreamSettings(),
        )
        home = folder / "penstock"
        home.mkdir(parents=True)
        (home / "endpoints.json").write_text(
            json.dumps(
                {
                    "kafka": {"bootstrap": settings.kafka.bootstrap, "topic_prefix": settings.kafka.topic_prefix},
                    "postgres": {"dsn": dsn},
                    "elasticsearch": {"url": settings.elasticsearch.url, "index_prefix": f"{name}-"},
                    "embedding": embedding or {},
                }
            )
        )
        space = cls(
            settings, home, {**os.environ, "PENSTOCK_HOME": str(home), "PENSTOCK_STREAM_SESSION_TIMEOUT_SECONDS": "10"}
        )
        try:
            await prepare(settings)
            yield space
        finally:
            space.stop_all()
            await space._remove(admin_dsn, name)

    async def _remove(self, admin_dsn: str, name: str) -> None:
        es = connect(self.settings.elasticsearch)
        if indexes := list(await es.indices.get(index=f"{name}-*")):
            await es.indices.delete(index=indexes)
        await es.indices.delete_index_template(name=f"{name}-*")
        await es.close()
        admin = AIOKafkaAdminClient(bootstrap_servers=self.settings.kafka.bootstrap)
        await admin.start()
        await admin.delete_topics([t for t in await admin.list_topics() if t.startswith(f"{name}.")])
        await admin.close()
        with psycopg.connect(admin_dsn, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    # Workers

    def start(
        self,
        *names: str,
        program: Sequence[str] = ("-m", "cli.main"),
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """Start workers as processes and wait until each is ready. A name may carry an instance: ``detect#2``."""
        for name in names:
            argv = [python, *program, "worker", name.partition("#")[0]]
            self.launch(name, argv, {**self.environment, **(env or {})}, "PENSTOCK_STREAM_HEALTH_PORT")
        for name in names:
            self.await_ready(name)

    def kill(self, name: str) -> None:
        """SIGKILL, as a machine that loses power would."""
        process = self.processes.pop(name)
        process.kill()
        process.wait(30)

    def stop(self, name: str, within_seconds: float = 30) -> int:
        """SIGTERM; returns the exit code."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(within_seconds)

    def stop_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(30)
        self.processes.clear()

    # Events and their effect

    async def publish(self, *messages: AnyMessage, topic: Topic = DOCUMENTS_LIVE) -> None:
        async with producer(self.settings.kafka) as kafka:
            await deliver(kafka.send(topic, message) for message in messages)

    async def settled(self, messages: Iterable[AnyMessage], *, within_seconds: float = 90) -> None:
        """Wait until the ledger has these document events and both stores hold what it wants."""
        waiting: dict[UUID, Any] = {}
        for message in messages:
            waiting[document_id(message.tenant, message.source, message.external_id)] = message  # type: ignore[union-attr]
        deadline = time.monotonic() + within_seconds
        async with open_pool(self.settings.postgres) as pool:
            while waiting:
                async with pool.connection() as connection:
                    known = await arrivals(connection, list(waiting))
                for id_, arrival in known.items():
                    message = waiting[id_]
                    if isinstance(message, DocumentUpserted):
                        came = arrival.version is not None and arrival.version >= message.version
                    elif message.kind == "document.deleted.v1":
                        came = arrival.deleted_floor is not None and arrival.deleted_floor >= message.observed_at
                    else:
                        came = (
                            arrival.access_observed_at is not None and arrival.access_observed_at >= message.observed_at
                        )
                    if came and arrival.settled:
                        del waiting[id_]
                assert time.monotonic() < deadline, f"{len(waiting)} documents did not settle"
                if waiting:
                    await asyncio.sleep(0.1)

    async def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        async with await psycopg.AsyncConnection.connect(self.settings.postgres.dsn.get_secret_value()) as connection:
            return await (await connection.execute(statement.encode(), parameters)).fetchall()

    async def until(self, statement: str, expected: object = True, *, within_seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until the statement's one value is the expected one. Raises AssertionError."""
        deadline = time.monotonic() + within_seconds
        dsn = self.settings.postgres.dsn.get_secret_value()
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            while True:
                [(value, *_), *_] = await (await connection.execute(statement.encode())).fetchall()
                if value == expected:
                    return
                assert time.monotonic() < deadline, f"{value!r} instead of {expected!r}: {statement}"
                await asyncio.sleep(0.1)

    async def execute(self, statement: str, *parameters: object) -> int:
        """Something done behind the workers' back; returns the rows touched."""
        async with await psycopg.AsyncConnection.connect(self.settings.postgres.dsn.get_secret_value()) as connection:
            return (await connection.execute(statement.encode(), parameters)).rowcount

    async def penstock(self, *arguments: str, within_seconds: float = 180) -> tuple[int, Any]:
        """The real command in a process of its own: exit code and the JSON document that it printed."""
        run = partial(run_penstock, *arguments, env=self.environment, within_seconds=within_seconds)
        done = await asyncio.to_thread(run)
        assert done.stdout, done.stderr[-3000:]
        return done.returncode, json.loads(done.stdout)

    async def entries(self) -> dict[UUID, dict[str, Any]]:
        """Every entry that Elasticsearch returns, by chunk id."""
        es = connect(self.settings.elasticsearch)
        [(index,)] = await self.query("SELECT keyword_index FROM generations WHERE state = 'active'")
        try:
            await es.indices.refresh(index=index)
            results: dict[UUID, dict[str, Any]] = {}
            after: list[Any] | None = None
            while True:
                page = await es.search(index=index, size=1000, sort=["document_id", "_doc"], search_after=after)
                hits = page["hits"]["hits"]
                if not hits:
                    return results
                results |= {UUID(hit["_id"]): hit["_source"] for hit in hits}
                after = hits[-1]["sort"]
        finally:
            await es.close()


KEY_ENDS = (datetime.now(UTC) + timedelta(days=2)).date()
"""When the API keys of the tests expire."""


def now() -> datetime:
    return datetime.now(UTC)


def document(name: str, content: str, **fields: object) -> DocumentUpserted:
    return DocumentUpserted(
        **{  # type: ignore[arg-type]
            "tenant": "acme",
            "source": "wiki",
            "external_id": name,
            "observed_at": now(),
            "version": time.time_ns(),
            "title": name,
            "content": content,
            "acl_tags": ["staff"],
            "media_type": "text/markdown",
            **fields,
        }
    )
