"""Tables for the laws of connectors: in a file of SQLite, in Penstock's own Postgres, and in a topic of its Kafka."""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from psycopg.conninfo import conninfo_to_dict

from connectors.conform.samples import DeclaredMembers
from connectors.database.options import KafkaOptions
from connectors.database.source import Database
from connectors.source import Playground, Request
from pipeline.kafka.client import security
from pipeline.runtime.settings import KafkaSettings
from pipeline.stores.postgres import Pool

PARTITIONS = 2
CREATION_SECONDS = 30.0

MAPPING: Mapping[str, Any] = {
    "title": "{subject}",
    "text": "{subject}\n\n{body}",
    "acl": ["team"],
    "metadata": ["team", "label"],
}


class TablePlayground:
    """Tables ``tickets`` and ``members``. A removed row is deleted, and restored as it was."""

    inside, outside = "ines@example.com", "otto@example.com"

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}
        self.environment: Mapping[str, str] = {}
        self._removed: dict[str, Mapping[str, Any]] = {}
        self._locking: sa.Connection | None = None

    def open(self, dsn: str, schema: str | None = None) -> None:
        """Create the tables. schema: an absent one, which is created."""
        self._engine = sa.create_engine(dsn)
        self._schema = schema
        metadata = sa.MetaData(schema=schema)
        self.tickets = sa.Table(
            "tickets",
            metadata,
            sa.Column("id", sa.String(100), primary_key=True),
            *(sa.Column(name, sa.Text, nullable=False) for name in ("subject", "body", "team")),
            sa.Column("label", sa.Text, nullable=False, server_default="plain"),
            sa.Column("edited", sa.DateTime(timezone=True), server_default=sa.func.now()),
            sa.Column("deleted", sa.DateTime(timezone=True)),
        )
        self._members = sa.Table("members", metadata, sa.Column("team", sa.Text), sa.Column("mail", sa.Text))
        with self._engine.begin() as connection:
            if schema is not None:
                connection.execute(sa.schema.CreateSchema(schema))
            metadata.create_all(connection)
        self._execute(sa.insert(self._members).values(team="staff", mail=self.inside))
        self.environment = {"DSN": dsn}
        self.options = {
            **MAPPING,
            "table": self.tickets.fullname,
            "members_query": f"SELECT team AS tag, mail AS principal FROM {self._members.fullname}",  # noqa: S608 — its own name
        }

    def close(self) -> None:
        self._unlock()
        if self._schema is not None:
            self._execute(sa.schema.DropSchema(self._schema, cascade=True))
        self._engine.dispose()

    async def write(self, name: str, text: str) -> str:
        values = {"subject": name.title(), "body": text, "edited": sa.func.now()}
        if not self._execute(self._update(name).values(values)):
            self._execute(sa.insert(self.tickets).values(id=name, team="staff", **values))
        return name

    async def move(self, name: str) -> None:
        """Rename it."""
        self._execute(self._update(name).values(subject=f"{name.title()}, renamed", edited=sa.func.now()))

    async def relabel(self, name: str) -> None:
        self._execute(self._update(name).values(label="policy", edited=sa.func.now()))

    async def remove(self, name: str) -> None:
        with self._engine.begin() as connection:
            row = connection.execute(sa.select(self.tickets).where(self.tickets.c.id == name)).mappings().one()
            self._removed[name] = dict(row)
            connection.execute(sa.delete(self.tickets).where(self.tickets.c.id == name))

    async def restore(self, name: str) -> None:
        self._execute(sa.insert(self.tickets).values(**self._removed.pop(name)))

    async def restrict(self, name: str) -> None:
        self._execute(self._update(name).values(team="board"))

    async def leave(self) -> None:
        self._execute(sa.delete(self._members).where(self._members.c.mail == self.inside))

    def sent(self) -> Sequence[Request]:
        """Return no requests: a database sends none."""
        return ()

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """truncated: another transaction locks the table, so that no listing ends."""
        self._unlock()
        if truncated:
            self._locking = self._engine.connect()
            self._lock(self._locking)

    def _lock(self, connection: sa.Connection) -> None:
        connection.execute(sa.text("BEGIN EXCLUSIVE"))

    def _unlock(self) -> None:
        if self._locking is not None:
            self._locking.invalidate()
            self._locking.close()
        self._locking = None

    def _update(self, name: str) -> sa.Update:
        return sa.update(self.tickets).where(self.tickets.c.id == name)

    def _execute(self, statement: sa.Executable) -> int:
        with self._engine.begin() as connection:
            result = connection.execute(statement)
            return result.rowcount if isinstance(result, sa.CursorResult) else 0


class PostgresPlayground(TablePlayground):
    """A table with a time of change and a mark of deletion, in a schema of its own of Penstock's database."""

    def placed(self, _tenant: str, _source: str, postgres: Pool) -> None:
        dsn = address(str(postgres.conninfo), application_name=uuid.uuid4().hex)
        self.open(dsn, f"conform_{uuid.uuid4().hex[:12]}")
        self.options = {
            **self.options,
            "changed": "edited",
            "deleted": "deleted",
            "revision": "edited",
            "timeout_seconds": 2,
        }

    async def remove(self, name: str) -> None:
        self._execute(self._update(name).values(deleted=sa.func.now(), edited=sa.func.now()))

    async def restore(self, name: str) -> None:
        """Restore the row with the time of change that it had before."""
        self._execute(self._update(name).values(deleted=None))

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """failing: the server ends the connections of the source."""
        await super().trouble(truncated=truncated)
        if failing:
            name = self._engine.url.query["application_name"]
            statement = sa.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = :name AND pid <> pg_backend_pid()"
            )
            self._execute(statement.bindparams(name=name))

    def _lock(self, connection: sa.Connection) -> None:
        connection.execute(sa.text(f"LOCK TABLE {self.tickets.fullname} IN ACCESS EXCLUSIVE MODE"))


class TopicPlayground(DeclaredMembers):
    """A compacted topic with Debezium's envelopes of a table."""

    def __init__(self, kafka: KafkaSettings, members_file: Path) -> None:
        super().__init__(members_file)
        self._security = security(kafka)
        self._bootstrap = kafka.bootstrap
        self.topic = f"conform-{uuid.uuid4().hex[:12]}"
        self._rows: dict[str, dict[str, Any]] = {}
        self._removed: dict[str, dict[str, Any]] = {}
        self.environment: Mapping[str, str] = {}
        options = KafkaOptions.model_fields.keys() - {"sasl_password", "ssl_key_password"}
        if kafka.sasl_password is not None:
            self.environment = {"KAFKA_SASL_PASSWORD": kafka.sasl_password.get_secret_value()}
        self.options: Mapping[str, Any] = {
            **MAPPING,
            "topic": self.topic,
            "kafka": {name: value for name in options if (value := getattr(kafka, name)) is not None},
            "members_file": str(members_file),
        }

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[TopicPlayground]:
        self._producer = AIOKafkaProducer(bootstrap_servers=self._bootstrap, **self._security)
        self._admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap, **self._security)
        await self._producer.start()
        await self._admin.start()
        try:
            await self._create()
            yield self
            await self._admin.delete_topics([self.topic])
        finally:
            await self._producer.stop()
            await self._admin.close()

    async def write(self, name: str, text: str) -> str:
        await self._put(name, {"id": name, "subject": name.title(), "body": text, "team": "team", "label": "plain"})
        return name

    async def move(self, name: str) -> None:
        await self._put(name, {**self._rows[name], "subject": f"{name.title()}, renamed"})

    async def relabel(self, name: str) -> None:
        await self._put(name, {**self._rows[name], "label": "policy"})

    async def remove(self, name: str) -> None:
        self._removed[name] = row = self._rows.pop(name)
        await self._send(name, {"op": "d", "before": row, "after": None})
        await self._send(name, None)

    async def restore(self, name: str) -> None:
        await self._put(name, self._removed.pop(name))

    async def restrict(self, name: str) -> None:
        await self._put(name, {**self._rows[name], "team": "board"})

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """expired: the topic is deleted, and created again with a snapshot."""
        if expired:
            await self._admin.delete_topics([self.topic])
            await self._create()
            for name, row in self._rows.items():
                await self._send(name, {"op": "r", "before": None, "after": row})

    async def _create(self) -> None:
        topic = NewTopic(self.topic, PARTITIONS, 1, topic_configs={"cleanup.policy": "compact"})
        async with asyncio.timeout(CREATION_SECONDS):
            while True:
                [[_, code, *_]] = (await self._admin.create_topics([topic])).topic_errors
                if code == 0:
                    return
                await asyncio.sleep(0.1)  # until the one before is deleted

    async def _put(self, name: str, row: dict[str, Any]) -> None:
        before, self._rows[name] = self._rows.get(name), row
        await self._send(name, {"op": "u" if before else "c", "before": before, "after": row})

    async def _send(self, name: str, value: Mapping[str, Any] | None) -> None:
        key = json.dumps({"id": name}).encode()
        await self._producer.send_and_wait(self.topic, value and json.dumps(value).encode(), key)


def address(conninfo: str, **more: str) -> str:
    """Return a connection string of libpq as SQLAlchemy's address of the same database."""
    values = {name: str(value) for name, value in conninfo_to_dict(conninfo, **more).items()}
    url = sa.URL.create(
        "postgresql+psycopg",
        username=values.pop("user", None),
        password=values.pop("password", None),
        database=values.pop("dbname", None),
        query=values,
    )
    return url.render_as_string(hide_password=False)


@asynccontextmanager
async def playing() -> AsyncIterator[Playground]:
    with tempfile.TemporaryDirectory(prefix="penstock-database-") as folder:
        play = TablePlayground()
        play.open(f"sqlite:///{Path(folder, 'tickets.db')}")
        try:
            yield play
        finally:
            play.close()


@asynccontextmanager
async def playing_in_postgres() -> AsyncIterator[Playground]:
    play = PostgresPlayground()
    try:
        yield play
    finally:
        play.close()


@asynccontextmanager
async def playing_in_kafka() -> AsyncIterator[Playground]:
    with tempfile.TemporaryDirectory(prefix="penstock-database-") as folder:
        async with TopicPlayground(KafkaSettings(), Path(folder, "members.toml")).opened() as play:
            yield play


class ChangesTopic(Database):
    """The source on a topic of changes, in the cluster that PENSTOCK_KAFKA_BOOTSTRAP names."""

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        return playing_in_kafka()


class PostgresTable(Database):
    """The source on a table in Postgres, with polls by time of change."""

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        return playing_in_postgres()
