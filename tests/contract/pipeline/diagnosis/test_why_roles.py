"""``why``, ``dead`` and ``status`` with the rights of a worker, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

import psycopg
import pytest
import pytest_asyncio

from connectors.runner.compare import Row
from connectors.runner.rows import Holder, Rows
from deploy.local.stack import Stack
from pipeline.diagnosis import story
from pipeline.diagnosis.ledger import ledger_report
from pipeline.ledger import letters
from pipeline.maintenance.spending import Spending
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import PostgresSettings
from pipeline.stages.stage import Incoming
from pipeline.stores.postgres import open_pool
from tests.support.deploy.roles_kit import define_roles, logins
from tests.support.query.library import Library, WordEmbedder, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Place:
    library: Library
    """As an administrator."""
    worker: PostgresSettings


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def place(stack: Stack) -> AsyncIterator[Place]:
    async with Library.create(stack, WordEmbedder()) as library:
        admin = library.settings.postgres.dsn.get_secret_value()
        define_roles(admin)
        with logins(admin) as dsns:
            yield Place(library, PostgresSettings(dsn=dsns["penstock_worker"]))  # type: ignore[arg-type]


async def test_the_worker_role_reads_a_documents_history_but_not_the_connectors_cursor(
    place: Place, tenant: str
) -> None:
    await place.library.put(document("a.md", "Some text.", tenant=tenant))
    await place.library.execute(
        "INSERT INTO connectors (tenant, source, kind, changes_cursor) VALUES (%s, 'wiki', 'confluence', '{}')",
        tenant,
    )
    await Rows(place.library.pool, Holder(tenant, "wiki")).save([Row(external_id="a.md", version=3)], datetime.now(UTC))
    async with open_pool(place.worker) as pool, pool.connection() as connection:
        [(identity, _)] = await story.find(connection, tenant, ["a.md"])
        assert (await story.read(connection, identity.id)).document is not None
        source = await story.read_source(connection, tenant, "wiki", ["a.md"])
        assert source is not None
        assert source.item is not None
        assert (source.item.version, source.cursor) == (3, None)
        assert await story.connector_documents(connection, tenant, ["wiki/a.md"]) == [("wiki", "a.md")]
        assert await story.superseded(connection, identity.id) == ()
        assert await story.inactive_connectors(connection, tenant) != ()
    async with place.library.pool.connection() as connection:
        source = await story.read_source(connection, tenant, "wiki", ["a.md"])
        assert source is not None
        assert source.cursor == {}


async def test_the_worker_role_dismisses_dead_letters_but_cannot_change_their_trail(place: Place, tenant: str) -> None:
    record = Incoming("documents", 0, 1, f"{tenant}/wiki/a.md".encode(), b"{broken", [], "live")
    await place.library.detect.handle([record])
    async with open_pool(place.worker) as pool, pool.connection() as connection:
        assert await letters.dismiss(connection, ["documents:0:1"], by="ann", reason="a test") == ["documents:0:1"]
        assert await letters.undo_dismissal(connection, ["documents:0:1"], by="bob", reason=None) == ["documents:0:1"]
        assert [record.by for record in await letters.trail(connection, "documents:0:1")] == ["ann", "bob"]
        for statement in ("DELETE FROM dead_letter_trail", "UPDATE dead_letter_trail SET by = 'me'"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                async with connection.transaction():
                    await connection.execute(statement.encode())


async def test_the_worker_role_reads_the_whole_status_report(place: Place) -> None:
    async with open_pool(place.worker) as pool:
        metrics = Metrics()
        metrics.embedding_billed(1_000)
        await Spending(pool, metrics).record()
    away: list[str] = []
    report = await ledger_report(place.worker, {}, away)
    assert away == []
    assert report["embedding"] == [{"purpose": "document", "tokens": 1_000, "cost": 0.0}]
    assert set(report) >= {"generations", "pending", "dead_letters", "connectors", "audit", "freshness"}
