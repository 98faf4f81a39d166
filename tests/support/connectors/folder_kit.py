"""Shared parts of the folder connector's tests: a producer that records, and a checkpoint of their own."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from connectors.folder.checkpoint import Checkpoint
from connectors.folder.connector import FolderConnector, FolderOptions
from connectors.protocol import Problem, ScanReport
from deploy.local.stack import Stack
from pipeline.kafka.producer import Delivery, DeliveryUnknown, Producer
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores.postgres import migrate, open_pool
from topics.messages import AnyMessage
from topics.registry import Topic


class Recorder(Producer):
    """Acknowledges at once, except what ``lose`` says; keeps (topic, message)."""

    def __init__(self) -> None:
        super().__init__("nowhere:1")
        self.sent: list[tuple[str, Any]] = []
        self.lose_from: int | None = None
        """From this many messages on, none is acknowledged."""
        self.lost = 0
        """The number of messages that were not acknowledged."""
        self.held: list[Delivery] | None = None
        """If a list: deliveries are left open, in it."""

    async def send(self, topic: Topic, message: AnyMessage, traceparent: str | None = None) -> Delivery:
        delivery: Delivery = asyncio.get_running_loop().create_future()
        if self.held is not None:
            self.held.append(delivery)
        elif self.lose_from is not None and len(self.sent) >= self.lose_from:
            self.lost += 1
            delivery.set_exception(DeliveryUnknown("Kafka has not acknowledged it"))
            delivery.exception()
        else:
            self.sent.append((topic.name, message))
            delivery.set_result(None)
        return delivery

    def take(self) -> list[Any]:
        """The messages since the last call."""
        taken, self.sent = [message for _, message in self.sent], []
        return taken


@dataclass
class Desk:
    """A folder, a connector's surroundings, and shorthand."""

    root: Path
    checkpoint: Checkpoint
    tenant: str = field(default_factory=lambda: uuid.uuid4().hex)
    recorder: Recorder = field(default_factory=Recorder)

    def connector(self, *roots: Path, **options: Any) -> FolderConnector:
        given = FolderOptions(**{"acl_tags": ("staff",), "tenant": self.tenant, **options})
        return FolderConnector(roots or [self.root], options=given, producer=self.recorder, checkpoint=self.checkpoint)

    async def scan(self, *roots: Path, **options: Any) -> ScanReport:
        return await self.connector(*roots, **options).scan()

    def write(self, name: str, content: str | bytes = "some text") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def names(self, events: list[Any]) -> list[tuple[str, str]]:
        """(kind without its version, path relative to the root), sorted."""
        return sorted((event.kind.split(".")[1], event.external_id.removeprefix(f"{self.root}/")) for event in events)


def codes(problems: list[Problem]) -> list[str]:
    return sorted(problem.code for problem in problems)


@contextmanager
def own_database(stack: Stack) -> Iterator[str]:
    """The DSN of a new, migrated database."""
    admin = json.loads((stack.home / "endpoints.json").read_text())["postgres"]["dsn"]
    name = f"t{uuid.uuid4().hex[:10]}"
    dsn = make_conninfo(admin, dbname=name)
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    asyncio.run(migrate(PostgresSettings(dsn=SecretStr(dsn))))
    try:
        yield dsn
    finally:
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@asynccontextmanager
async def desk_in(folder: Path, dsn: str) -> AsyncIterator[Desk]:
    root = folder.resolve() / "docs"
    root.mkdir()
    async with open_pool(PostgresSettings(dsn=SecretStr(dsn))) as pool:
        yield Desk(root, Checkpoint(pool))
