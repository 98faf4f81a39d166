"""Metrics about the whole system, from the real ledger and the real consumer groups."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from pipeline.core.model import Lane
from pipeline.diagnosis.vitals import SINK_TOPICS, Vitals
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings
from pipeline.stages.detect import Detect
from pipeline.stores.postgres import open_pool
from tests.faults.tcp_proxy import tcp_proxy
from tests.support.space import Space, now
from tests.support.waiting import until
from topics.messages import DocumentUpserted
from topics.registry import DOCUMENTS_LIVE, Topic

pytestmark = pytest.mark.stack

STAGES = {"detect": Detect.topics, **SINK_TOPICS}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"penstock_{name}", labels)


def upserted(n: int) -> DocumentUpserted:
    return DocumentUpserted(
        tenant="acme",
        source="wiki",
        external_id=f"page-{n}",
        observed_at=now(),
        version=1,
        title="A page",
        content="Some words.",
        media_type="text/plain",
        acl_tags=("everyone",),
    )


async def test_lag_and_pending_age_are_exported_while_no_worker_consumes(space: Space) -> None:
    metrics = Metrics()
    await space.publish(upserted(1), upserted(2))
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        watch = Vitals(pool, space.settings.kafka, STAGES, metrics, every_seconds=0.05)
        await watch.look(connection)
        assert value(metrics, "consumer_lag_records", stage="detect", lane="live") == 2
        assert value(metrics, "consumer_lag_records", stage="vectors", lane="live") == 0
        assert value(metrics, "oldest_pending_seconds", store="vectors", lane="live") == 0

        space.start("detect")
        async with asyncio.timeout(30):
            while (await space.query("SELECT count(*) FROM index_state WHERE seq < want_seq"))[0][0] < 4:
                await asyncio.sleep(0.05)
        space.stop("detect")  # commits
        await space.execute("UPDATE index_state SET pending_since = now() - interval '90 s' WHERE store = 'keywords'")
        await space.execute(
            'INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, first_failed_at)'
            " VALUES ('t:0:0', 't', 0, 0, 'detect', 'bad_json', 'x', now()),"
            " ('t:0:1', 't', 0, 1, 'detect', 'x', 'x', now())"
        )
        await space.execute("UPDATE dead_letters SET at = now() - interval '8 days' WHERE id = 't:0:1'")
        await space.execute(
            "INSERT INTO connectors (tenant, source, kind, seen_at, activities) VALUES"
            " ('acme', 'wiki', 'folder', now() - interval '40 s', jsonb_build_object("
            "'sweep', jsonb_build_object('succeeded_at', now() - interval '1000 s'),"
            "'groups', jsonb_build_object('succeeded_at', now() - interval '7 s')))"
        )
        await space.execute(
            "INSERT INTO connector_freshness (tenant, source, epoch, tracked_since, every_seconds, complete_until)"
            " VALUES ('acme', 'wiki', 1, now(), 600, now() - interval '500 s')"
        )
        await space.execute(
            "INSERT INTO connector_items (tenant, source, external_id, scope, problem_code) VALUES"
            " ('acme', 'folder', '/a.pdf', '/', 'broken'), ('acme', 'folder', '/b.pdf', '/', 'too_large'),"
            " ('acme', 'folder', '/c.md', '/', NULL)"
        )
        await watch.look(connection)
    assert value(metrics, "skipped_documents", source="folder") == 2
    assert value(metrics, "consumer_lag_records", stage="detect", lane="live") == 0
    assert value(metrics, "consumer_lag_records", stage="vectors", lane="live") == 2
    assert value(metrics, "pending_documents", store="vectors", lane="live") == 2
    assert value(metrics, "pending_documents", store="vectors", lane="backfill") == 0
    oldest = value(metrics, "oldest_pending_seconds", store="keywords", lane="live")
    assert oldest is not None
    assert oldest >= 90
    assert value(metrics, "source_oldest_pending_seconds", source="wiki") == oldest
    assert value(metrics, "waiting_dead_letters", stage="detect") == 1
    assert value(metrics, "waiting_dead_letters", stage="vectors") == 0
    seen, access = (
        value(metrics, "connector_seen_age_seconds", source="wiki"),
        value(metrics, "access_age_seconds", source="wiki"),
    )
    assert seen is not None
    assert access is not None
    assert 40 <= seen < 1000 <= access
    certificate = value(metrics, "certificate_age_seconds", source="wiki")
    assert certificate is not None
    assert 500 <= certificate < 1000


async def test_ages_are_exported_for_a_stopped_connector_but_not_for_a_paused_or_removed_one(space: Space) -> None:
    await space.execute(
        "INSERT INTO connectors (tenant, source, kind, paused, activities) VALUES"
        " ('acme', 'wiki', 'folder', false, jsonb_build_object("
        "'sweep', jsonb_build_object('succeeded_at', now() - interval '1000 s'),"
        "'changes', jsonb_build_object('succeeded_at', now() - interval '70 s'), 'full', '{}'::jsonb)),"
        " ('acme', 'drive', 'folder', true, jsonb_build_object('sweep', jsonb_build_object('succeeded_at', now())))"
    )
    await space.execute(
        "INSERT INTO connectors (tenant, source, kind, removed_at, activities) VALUES ('acme', 'old', 'folder', now(),"
        " jsonb_build_object('sweep', jsonb_build_object('succeeded_at', now() - interval '9 days')))"
    )
    await space.execute("UPDATE connectors SET access_every_seconds = 86400 WHERE source = 'wiki'")
    metrics = Metrics()
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        await Vitals(pool, space.settings.kafka, STAGES, metrics, every_seconds=0.05).look(connection)
    silent = value(metrics, "connector_seen_age_seconds", source="wiki")
    assert silent is not None
    assert 70 <= silent < 1000
    for age in ("connector_seen_age_seconds", "access_age_seconds", "access_interval_seconds"):
        assert value(metrics, age, source="drive") is None, "it is paused"
        assert value(metrics, age, source="old") is None, "it was removed"
    assert value(metrics, "access_interval_seconds", source="wiki") == 86400


async def test_one_worker_at_a_time_exports_the_vitals_and_another_takes_over(space: Space) -> None:
    both = [Metrics(), Metrics()]

    def shown(metrics: Metrics) -> bool:
        return value(metrics, "oldest_pending_seconds", store="vectors", lane="live") is not None

    async with open_pool(space.settings.postgres) as pool:
        first = asyncio.create_task(Vitals(pool, space.settings.kafka, STAGES, both[0], every_seconds=0.05).run())
        await until(lambda: shown(both[0]))
        second = asyncio.create_task(Vitals(pool, space.settings.kafka, STAGES, both[1], every_seconds=0.05).run())
        await asyncio.sleep(0.5)
        assert not shown(both[1])
        first.cancel()
        await asyncio.wait([first])
        await until(lambda: shown(both[1]))
        second.cancel()
        await asyncio.wait([second])


async def test_without_kafka_only_the_lag_metric_is_absent(space: Space) -> None:
    metrics = Metrics()
    nowhere = KafkaSettings(bootstrap="127.0.0.1:1")
    topics: dict[str, dict[Lane, Topic]] = {"detect": {"live": DOCUMENTS_LIVE}}
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        metrics.lag.labels("detect", "live").set(7)
        await Vitals(pool, nowhere, topics, metrics, every_seconds=0.05).look(connection)
    assert value(metrics, "consumer_lag_records", stage="detect", lane="live") is None
    assert value(metrics, "oldest_pending_seconds", store="vectors", lane="live") == 0
    assert value(metrics, "outage", service="kafka") == 1
    assert value(metrics, "outage", service="postgres") == 0


async def test_an_outage_of_postgres_is_exported_until_it_responds_again(space: Space) -> None:
    metrics = Metrics()
    dsn = space.settings.postgres.dsn.get_secret_value()
    address = conninfo_to_dict(dsn)
    async with tcp_proxy(str(address["host"]), int(str(address["port"]))) as proxy:
        proxied = SecretStr(make_conninfo(dsn, host="127.0.0.1", port=proxy.listening))
        async with open_pool(space.settings.postgres.model_copy(update={"dsn": proxied})) as pool:
            watch = Vitals(pool, space.settings.kafka, STAGES, metrics, every_seconds=0.05)
            running = asyncio.create_task(watch.run())
            await until(lambda: value(metrics, "outage", service="kafka") == 0)
            assert value(metrics, "outage", service="postgres") == 0
            proxy.refusing = True
            proxy.cut()
            await until(lambda: value(metrics, "outage", service="postgres") == 1)
            assert value(metrics, "outage", service="kafka") is None, "it is not read meanwhile"
            assert value(metrics, "oldest_pending_seconds", store="vectors", lane="live") is None
            proxy.refusing = False
            await until(lambda: value(metrics, "outage", service="postgres") == 0)
            running.cancel()
            await asyncio.wait([running])


async def test_the_handled_time_advances_only_after_records_sent_before_it_were_handled(space: Space) -> None:
    """Connectors publish again what the ledger lacks of that."""

    async def handled() -> list[tuple[Any, ...]]:
        return await space.query("SELECT until FROM handled WHERE stage = 'detect'")

    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        watch = Vitals(pool, space.settings.kafka, STAGES, Metrics(), every_seconds=0.05)
        await watch.look(connection)
        [(nothing_sent,)] = await handled()
        await space.publish(upserted(1), upserted(2))
        [(sent,)] = await space.query("SELECT clock_timestamp()")
        for _ in range(3):
            await watch.look(connection)
        assert await handled() == [(nothing_sent,)]
        space.start("detect")
        async with asyncio.timeout(60):
            while (await handled())[0][0] <= sent:
                await watch.look(connection)
                await asyncio.sleep(0.1)
        assert await space.query("SELECT count(*) FROM documents") == [(2,)]
        space.stop("detect")
