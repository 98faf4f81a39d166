"""The view of the pipeline for operators, on real servers: every part, and the absence of every part."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete

from deploy.local.stack import Stack
from pipeline.audit import runs
from pipeline.audit.examine import Finding
from pipeline.core.canary import Canary
from pipeline.diagnosis import story
from pipeline.diagnosis.ledger import ledger_report
from pipeline.diagnosis.pipeline_view import PipelineView, kafka_lag, pipeline_view
from pipeline.kafka.groups import group, groups
from pipeline.runtime.settings import ElasticsearchSettings
from pipeline.stages.stage import Incoming
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import open_pool
from tests.support.query.library import Library, WordEmbedder, document
from tests.support.space import Space
from topics.registry import DOCUMENTS_LIVE

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        yield library


@pytest_asyncio.fixture(loop_scope="module")
async def library(shared: Library) -> Library:
    """Emptied: what is told is told of everything."""
    await shared.execute("TRUNCATE documents, dead_letters, audit_runs, connectors CASCADE")
    return shared


async def no_lag() -> dict[str, Any]:
    return {"records": 0, "groups": []}


async def look(library: Library) -> dict[str, Any]:
    """Without Kafka: a library has none."""
    return await pipeline_view(library.pool, library.es, library.settings, lag=no_lag)


async def test_an_empty_system_is_shown_without_errors(library: Library) -> None:
    view = await look(library)
    assert view["away"] == []
    assert view["freshness"]["now"] == {"documents": 0, "p50": None, "p99": None, "window_seconds": 900}
    assert len(view["freshness"]["over_time"]) == 48
    assert view["pending"]["vectors"]["documents"] == view["dead_letters"]["waiting"] == 0
    assert view["divergence"]["audited"] is False
    assert view["connectors"] == []
    json.dumps(view)


async def test_freshness_is_measured_from_the_sources_change_to_the_second_store_for_live_changes(
    library: Library,
) -> None:
    names = [f"d{n}" for n in range(6)]
    await library.put(*(document(name, f"Text of {name}") for name in names))
    await library.execute(
        "UPDATE documents SET received_at = received_at - interval '1 minute',"
        " changed_at = received_at - interval '68 seconds'"
    )
    await library.execute(
        "UPDATE index_state SET pending_since = pending_since - interval '1 minute',"
        " settled_at = pending_since - interval '59 seconds'"
    )
    await library.execute(
        "UPDATE index_state SET settled_at = settled_at + interval '1 second' WHERE store = 'keywords'"
    )
    await library.execute("UPDATE documents SET lane = 'backfill' WHERE external_id = 'd0'")
    [(old,)] = await library.execute("SELECT id FROM documents WHERE external_id = 'd1'")
    await library.execute(  # repaired today, changed long ago
        "UPDATE index_state SET pending_since = pending_since + interval '1 hour' WHERE document_id = %s", old
    )
    fresh = (await look(library))["freshness"]
    assert fresh["now"]["documents"] == 4
    assert fresh["now"]["p50"] == pytest.approx(10, abs=1.5)
    assert fresh["now"]["p99"] == pytest.approx(10, abs=1.5)
    counted = [bucket["documents"] for bucket in fresh["over_time"]]
    assert sum(counted) == sum(counted[-2:]) == 4, "all of it lately, each document once"


async def test_freshness_over_the_last_day_is_shown_in_half_hour_buckets(library: Library) -> None:
    await library.put(*(document(f"d{n}", f"Text of {n}") for n in range(4)))
    for n, hours in enumerate((3, 3, 7, 30)):
        [(id_,)] = await library.execute("SELECT id FROM documents WHERE external_id = %s", f"d{n}")
        moved = f"- interval '{hours} hours'"
        await library.execute(
            f"UPDATE documents SET received_at = received_at {moved},"
            f" changed_at = received_at {moved} - interval '20 s' WHERE id = %s",
            id_,
        )
        await library.execute(
            f"UPDATE index_state SET pending_since = pending_since {moved}, settled_at = settled_at {moved}"
            " WHERE document_id = %s",
            id_,
        )
    fresh = (await look(library))["freshness"]
    buckets = [(bucket["documents"], bucket["p99"]) for bucket in fresh["over_time"] if bucket["documents"]]
    assert [documents for documents, _ in buckets] == [1, 2], "older first; what is older than a day is not shown"
    assert all(20 <= p99 < 40 for _, p99 in buckets)
    assert fresh["now"]["documents"] == 0


async def test_the_view_shows_what_each_store_holds(library: Library) -> None:
    await library.put(*(document(f"d{n}", f"Text of {n}") for n in range(3)))
    held = {store["name"]: store["holds"] for store in (await look(library))["stores"]}
    assert held["Postgres"].startswith("3 documents, ")
    assert held["Elasticsearch"].endswith(" entries")


async def test_canaries_are_counted_separately_from_documents(library: Library) -> None:
    """They stand on a line of their own, and in none of the totals."""
    mine = Canary("acme", "wiki")
    await library.put(document("d1", "Text of one"), mine.published("Some words.", "k1", datetime.now(UTC), 1))
    await library.accept(mine.published("Other words.", "k2", datetime.now(UTC), 2))
    view = await look(library)
    held = {store["name"]: store["holds"] for store in view["stores"]}
    # Other tests of this file have left chunks of documents that are gone.
    [(chunks,)] = await library.execute(f"SELECT count(*) FROM {library.generation.chunk_table}")
    entries = (await library.es.count(index=library.generation.keyword_index))["count"]
    assert held == {
        "Postgres": f"1 documents, {chunks - 1} chunks; and 1 canaries",
        "Elasticsearch": f"{entries - 1} entries",
        "Kafka": None,
    }
    assert [view["pending"][store]["documents"] for store in ("vectors", "keywords")] == [0, 0]


async def test_pending_documents_are_counted_by_store_with_the_oldest_age(library: Library) -> None:
    ids = await library.accept(*(document(f"d{n}", f"Text of {n}") for n in range(3)))
    await library.keywords.converge(library.generation, ids[:1])
    await library.execute(
        "UPDATE index_state SET pending_since = now() - interval '90 s' WHERE document_id = %s", ids[1]
    )
    waiting = (await look(library))["pending"]
    assert waiting["vectors"]["documents"] == 3
    assert waiting["keywords"]["documents"] == 2
    assert waiting["vectors"]["more"] is False
    assert 90 <= waiting["oldest_seconds"] < 150


async def test_dead_letters_are_counted_by_code_without_their_content(library: Library) -> None:
    records = [Incoming("documents.live.v1", 0, n, b"acme/wiki/x", b"{not json", [], "live") for n in (901, 902)]
    await library.detect.handle(records)
    view = await look(library)
    [one] = view["dead_letters"]["by_code"]
    assert (one["stage"], one["letters"]) == ("detect", 2)
    assert view["dead_letters"]["waiting"] == 2
    assert "not json" not in json.dumps(view)


async def test_divergence_shows_the_differences_of_the_background_audit(library: Library) -> None:
    async with library.pool.connection() as connection:
        run = await runs.start(connection, library.generation.name, "background")
        missing = Finding(uuid4(), "keywords", "missing", 2, "a")
        await runs.save(connection, replace(run, documents=40), [missing], finished=True)
        await runs.start(connection, library.generation.name, "background")
    differs = (await look(library))["divergence"]
    assert differs["audited"] is True
    assert differs["documents"] == 1
    assert differs["by"] == [{"store": "keywords", "kind": "missing", "documents": 1}]
    assert differs["round"] == {"documents": 0}
    assert 0 <= differs["age_seconds"] < 60


async def test_connectors_that_need_attention_are_listed_first(library: Library) -> None:
    well = {
        "changes": {"state": "idle", "succeeded_at": "2026-11-21T10:00:00.000+00:00"},
        "sweep": {"state": "idle", "succeeded_at": "2026-11-21T09:00:00.000+00:00"},
    }
    ill = {"changes": {"state": "needs attention", "reason": "the token was revoked"}}
    for source, activities in (("aaa", well), ("zzz", ill)):
        await library.execute(
            "INSERT INTO connectors (tenant, source, kind, loaded_at, activities, counts, seen_at)"
            " VALUES ('acme', %s, 'slack', now(), %s::jsonb, '{\"upserted\": 7, \"deleted\": 1}', now())",
            source,
            json.dumps(activities),
        )
    first, second = (await look(library))["connectors"]
    assert (first["source"], first["state"]) == ("zzz", "needs attention")
    assert first["reason"] == "changes: the token was revoked"
    assert first["last_success_at"] is None
    assert (second["source"], second["state"], second["published"]) == ("aaa", "following", 8)
    assert second["last_success_at"] == "2026-11-21T10:00:00.000+00:00"
    assert second["last_sweep_at"] == "2026-11-21T09:00:00.000+00:00"


async def test_status_page_and_why_report_the_same_connector_state_and_dead_letters(library: Library) -> None:
    failing = {"changes": {"state": "needs attention", "reason": "the token was revoked"}}
    throttled = {"sweep": {"state": "waiting", "reason": "429"}}
    for source, paused, loaded, alive, activities in (
        ("failing", False, True, True, failing),
        ("following", False, True, True, {}),
        ("loading", False, False, True, {}),
        ("paused", True, True, True, {}),
        ("silent", False, True, False, {}),
        ("throttled", False, True, True, throttled),
    ):
        await library.execute(
            "INSERT INTO connectors (tenant, source, kind, paused, loaded_at, activities, seen_at) VALUES ('acme', %s,"
            " 'slack', %s, CASE WHEN %s THEN now() END, %s::jsonb, CASE WHEN %s THEN now() END)",
            source,
            paused,
            loaded,
            json.dumps(activities),
            alive,
        )
    away: list[str] = []
    status = await ledger_report(library.settings.postgres, {}, away)
    page = await look(library)
    assert away == page["away"] == []
    states = {connector["source"]: connector["state"] for connector in status["connectors"]}
    assert states == {connector["source"]: connector["state"] for connector in page["connectors"]}
    assert set(states.values()) == {
        "needs attention",
        "following",
        "first load",
        "paused",
        "not running",
        "waiting",
    }
    async with library.pool.connection() as connection:
        for name, state in states.items():
            source = await story.read_source(connection, "acme", name, ["a.md"])
            assert source is not None
            assert source.state == state  # type: ignore[attr-defined]
    for part in ("pending", "dead_letters"):
        assert status[part] == page[part]


@pytest.mark.asyncio(loop_scope="function")
async def test_lag_counts_records_the_workers_have_not_consumed(space: Space) -> None:
    await space.publish(*(document(f"d{n}", "Text") for n in range(3)))
    lag = await kafka_lag(space.settings)
    assert lag["records"] == 3
    assert {"group": "detect", "topic": "documents.live.v1", "records": 3} in lag["groups"]
    assert {"group": "vectors", "topic": "index.live.v1", "records": 0} in lag["groups"]


@pytest.mark.asyncio(loop_scope="function")
async def test_records_that_expired_unread_are_not_counted_as_lag(space: Space) -> None:
    await space.publish(*(document(f"d{n}", "Text") for n in range(9)))
    kafka = space.settings.kafka
    now = datetime.now(UTC)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    async with groups(kafka) as consumers:
        logs = await consumers.logs([DOCUMENTS_LIVE.name], now)
        await consumers.commit(group("detect"), dict.fromkeys(logs, 0))
        gone = {place: log.end - 1 for place, log in logs.items() if log.end > 0}
        await admin.delete_records(
            {TopicPartition(kafka.topic_prefix + topic, n): RecordsToDelete(end) for (topic, n), end in gone.items()}
        )
    await admin.close()
    assert 1 <= len(gone) < 9, "several records share a partition"
    assert (await kafka_lag(space.settings))["records"] == len(gone)


async def test_unreachable_services_are_named_and_the_rest_is_shown(library: Library) -> None:
    nowhere = connect(ElasticsearchSettings(url="http://127.0.0.1:1"))
    try:
        view = await pipeline_view(library.pool, nowhere, library.settings)
    finally:
        await nowhere.close()
    assert [(store["name"], store["up"]) for store in view["stores"]] == [
        ("Postgres", True),
        ("Elasticsearch", False),
        ("Kafka", False),
    ]
    assert sorted(line.split(":")[0] for line in view["away"]) == ["Elasticsearch", "Kafka"]
    assert view["lag"] is None
    assert view["freshness"] is not None


async def test_an_unreachable_ledger_is_named_and_what_depends_on_it_is_left_out(library: Library) -> None:
    async with open_pool(library.settings.postgres) as closed:
        pass
    view = await pipeline_view(closed, library.es, library.settings, lag=no_lag)
    assert [line.split(":")[0] for line in view["away"]] == ["the ledger"]
    assert view["stores"][0]["up"] is False
    assert view["stores"][1]["up"] is None, "which index to ask is not known"
    assert view["freshness"] is view["connectors"] is None


async def test_the_pipeline_view_is_cached_between_requests(library: Library) -> None:
    view = PipelineView(library.pool, library.es, library.settings)
    first = await view.look()
    assert await view.look() is first
