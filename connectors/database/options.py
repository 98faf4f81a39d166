"""The options of a source that reads the rows of a table."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from connectors.base import ReadersOptions, StrictOptions
from connectors.row_options import RowOptions
from pipeline.runtime.settings import KafkaSettings

ONLY_SQL = ("table", "query", "members_query", "changed")
"""Options that a topic cannot fulfil."""


class KafkaOptions(StrictOptions):
    """A cluster of Kafka, which may be another one than Penstock's."""

    bootstrap: str
    """``host:port``, several separated by commas."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How connections are protected and authenticated."""
    sasl_mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"
    """How the password is proved, with SASL."""
    sasl_username: str | None = None
    """The login, which SASL requires."""
    sasl_password: SecretStr | None = None
    """The password of that login."""
    ssl_cafile: str | None = None
    """A file with the authorities (PEM) that signed the brokers' certificates. Default: those that this machine
    trusts."""
    ssl_certfile: str | None = None
    """Our client certificate (PEM), for brokers that require one."""
    ssl_keyfile: str | None = None
    """The key of our client certificate (PEM)."""
    ssl_key_password: SecretStr | None = None
    """The password of that key, if it is encrypted."""

    @model_validator(mode="after")
    def _has_a_login(self) -> Self:
        if self.security_protocol.startswith("SASL") and (self.sasl_username is None or self.sasl_password is None):
            raise ValueError("SASL needs sasl_username and sasl_password")
        return self

    def settings(self) -> KafkaSettings:
        """Return the settings of a client. The environment's are for Penstock's own cluster, and are not read."""
        return KafkaSettings.model_construct(**{name: getattr(self, name) for name in type(self).model_fields})


class DatabaseOptions(RowOptions, ReadersOptions):
    """``title``, ``text``, ``url`` and ``author`` are texts in which ``{column}`` stands for a value of the row.
    acl_tags hold for every row, unless ``acl`` names columns; required_tags hold in addition to those in columns."""

    dsn: SecretStr | None = None
    """Address of the database, as SQLAlchemy writes it: ``postgresql://user:password@host/database``."""
    topic: str | None = None
    """Instead of ``dsn``: a topic of Kafka with the changes of one table, which holds at least the last one of each
    row."""
    format: Literal["debezium", "flat"] = "debezium"
    """The records of the topic, in JSON with or without a schema: Debezium's envelopes, or rows (``flat``), as other
    connectors of Kafka Connect and Debezium's ExtractNewRecordState write them."""
    kafka: KafkaOptions | None = None
    """The cluster that has the topic."""
    max_topic_bytes: int = Field(8 * 1024**3, ge=1024**2)
    """The most that the rows of the topic may take on disk."""
    table: str | None = None
    """The table or view to read, with its schema if it needs one: ``support.tickets``."""
    query: str | None = None
    """A SELECT to read instead of a table, with a row for each document."""
    id: tuple[str, ...] = Field(("id",), min_length=1)
    """The columns that identify a row: whole numbers, texts or UUIDs that never change."""
    members_query: str | None = None
    """A SELECT with a row for each membership, with the columns ``tag`` and ``principal``."""
    revision: str | None = None
    """The column with another value after each change of the row. Without it each listing reads all texts."""
    changed: str | None = None
    """The column with the time of each change, by which polls find changed rows. Without it each poll lists all."""
    overlap_seconds: float = Field(300, ge=0, le=86_400)
    """How far back a poll reads again: longer than the longest transaction that writes to the table, because a row's
    time is older than its commit."""
    timeout_seconds: float = Field(60, gt=0, le=3_600)
    """The longest that a statement may take in Postgres."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.dsn is None) == (self.topic is None):
            raise ValueError("set either dsn in the environment, or write topic")
        if self.topic is not None and self.kafka is None:
            raise ValueError("topic needs kafka = { bootstrap = … }")
        if self.topic is not None and (only_sql := [name for name in ONLY_SQL if getattr(self, name) is not None]):
            raise ValueError(f"{only_sql[0]} needs dsn: a topic has no SQL")
        if self.topic is None and (self.table is None) == (self.query is None):
            raise ValueError("write either table or query")
        if self.members_query is not None and (self.members or self.members_file):
            raise ValueError("write either members_query, or members and members_file")
        return self
