"""The names of our data sets in lineage: OpenLineage's rules for Postgres and files, and names of the same form for
what they do not mention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from psycopg.conninfo import conninfo_to_dict

from pipeline.core.model import Generation
from pipeline.observability.lineage import Assertion, Dataset
from pipeline.runtime.settings import ElasticsearchSettings, PostgresSettings
from pipeline.stores.postgres import Connection

if TYPE_CHECKING:
    from elasticsearch import AsyncElasticsearch


def table(server: PostgresSettings | Connection, name: str, schema: str = "public") -> Dataset:
    """A table or view of ours. Of several servers in a connection string, the first one is named."""
    dsn = server.dsn.get_secret_value() if isinstance(server, PostgresSettings) else server.info.dsn
    parts = conninfo_to_dict(dsn)
    host, port = str(parts.get("host") or "localhost").split(",")[0], str(parts.get("port") or 5432).split(",")[0]
    return Dataset(f"postgres://{host}:{port}", f"{parts.get('dbname') or 'postgres'}.{schema}.{name}")


def ledger(server: PostgresSettings | Connection) -> Dataset:
    """The desired state of all documents, by the table that has a row for each."""
    return table(server, "documents")


def vectors(server: PostgresSettings | Connection, generation: Generation) -> Dataset:
    return table(server, generation.chunk_table)


def keywords(server: ElasticsearchSettings | AsyncElasticsearch, generation: Generation) -> Dataset:
    url = server.url if isinstance(server, ElasticsearchSettings) else server.transport.node_pool.get().base_url
    parts = urlsplit(url)
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    return Dataset(f"elasticsearch://{parts.hostname or 'localhost'}:{port}", generation.keyword_index)


def searched(server: PostgresSettings | Connection) -> Dataset:
    """The chunks of the generation that is active, under the name by which other query services read them."""
    return table(server, "chunks", "readers")


def compared(
    vectors: Dataset, keywords: Dataset, counts: Mapping[tuple[Any, Any], tuple[int, int]], kinds: tuple[str, ...]
) -> list[Dataset]:
    """Both stores with what an audit found. counts: by (store, kind), documents with such a difference, and those that
    are not repaired (``pipeline.audit.runs.counts``)."""

    def assertions(store: str) -> tuple[Assertion, ...]:
        return tuple(Assertion(f"no {kind} chunks", counts.get((store, kind), (0, 0))[1]) for kind in kinds)

    return [
        replace(vectors, assertions=assertions("vectors")),
        replace(keywords, assertions=assertions("keywords")),
    ]


def folder(path: Path) -> Dataset:
    return Dataset("file", str(path.resolve()))


def source(kind: str, tenant: str, name: str) -> Dataset:
    """The source that a connector reads."""
    return Dataset(f"penstock-source://{kind}", f"{tenant}/{name}")
