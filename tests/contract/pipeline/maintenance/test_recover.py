"""The steps of recover on real servers: numbers above Elasticsearch's, offsets back and never forwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from pipeline.core.errors import Misconfigured
from pipeline.kafka.groups import GroupBusy, Groups, group
from pipeline.ledger import generation_tables, generations
from pipeline.maintenance.recover import Recovery, open_recovery
from pipeline.stages.detect import Detect
from pipeline.stages.identities import Identities
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.keywords import Keywords, Write
from tests.support.pipeline.build_kit import Site, deletion, document, sections
from tests.support.space import Space, now
from topics.messages import IdentityChanged
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES

DETECT, IDENTITY = group(Detect.name), group(Identities.name)


@pytest.fixture
async def recovery(space: Space) -> AsyncIterator[Recovery]:
    async with open_recovery(space.settings, lambda phase, done, total: None) as recovery:
        yield recovery


@pytest.fixture
async def consumers(space: Space) -> AsyncIterator[Groups]:
    kafka = space.settings.kafka
    async with Groups(kafka.bootstrap, kafka.topic_prefix) as consumers:
        yield consumers


@pytest.fixture
async def site(space: Space) -> AsyncIterator[Site]:
    async with Site.create(space) as site:
        yield site


def at_end(offsets: dict[tuple[str, int], int], topic: str) -> int:
    return sum(offset for (name, _), offset in offsets.items() if name == topic)


async def consume(consumers: Groups, name: str, *topics: str) -> None:
    """As if the group had read all there is."""
    logs = await consumers.logs(topics, now())
    await consumers.commit(name, {p: log.end for p, log in logs.items()})


async def publish_five(space: Space, topic: Any = DOCUMENTS_LIVE) -> datetime:
    """Returns a moment after them, and before whatever comes next."""
    await space.publish(*(document(f"{n}.md", "text") for n in range(5)), topic=topic)
    await asyncio.sleep(0.05)
    moment = now()
    await asyncio.sleep(0.05)
    return moment


async def test_a_rewind_moves_offsets_back_to_a_moment_and_never_forwards(
    space: Space, recovery: Recovery, consumers: Groups, site: Site
) -> None:
    await site.accept(document("handled before the backup.md", "text"))
    moment = await publish_five(space)
    await publish_five(space)
    await consume(consumers, DETECT, DOCUMENTS_LIVE.name)
    before = await consumers.committed(DETECT)
    rewound = await recovery.rewind(moment + timedelta(hours=1))
    assert rewound.since < moment, "no later than what the ledger has handled"
    await consumers.commit(DETECT, before)
    async with site.pool.connection() as connection:
        await connection.execute("UPDATE document_events SET observed_at = now()")
    rewound = await recovery.rewind(moment)
    back = await consumers.committed(DETECT)
    assert (at_end(before, DOCUMENTS_LIVE.name), at_end(back, DOCUMENTS_LIVE.name)) == (10, 5)
    assert rewound.records == 5
    assert rewound.missing == ()
    assert sum(rewound.until[Detect.name].values()) >= 10
    await recovery.rewind(now())
    assert await consumers.committed(DETECT) == back


async def test_a_rewind_goes_back_further_where_detect_lagged_at_the_backup(
    space: Space, recovery: Recovery, consumers: Groups, site: Site
) -> None:
    """Sent before the backup, and not handled by then: the moment of the backup alone would lose it."""
    await publish_five(space)
    lagging = now()
    await asyncio.sleep(0.05)
    await publish_five(space, DOCUMENTS_BACKFILL)
    await publish_five(space)
    await consume(consumers, DETECT, DOCUMENTS_LIVE.name, DOCUMENTS_BACKFILL.name)
    await site.accept(document("old.md", "text", observed_at=lagging))
    rewound = await recovery.rewind(now())
    back = await consumers.committed(DETECT)
    assert at_end(back, DOCUMENTS_LIVE.name) == 5
    assert at_end(back, DOCUMENTS_BACKFILL.name) == 0, "of that lane nothing was handled at all"
    assert rewound.records == 10


async def test_a_rewind_names_partitions_whose_records_have_expired(
    space: Space, recovery: Recovery, consumers: Groups, site: Site
) -> None:
    start = now()
    await site.accept(document("known.md", "text", observed_at=start))
    await publish_five(space)
    logs = await consumers.logs([DOCUMENTS_LIVE.name], start)
    (_, partition), log = next((p, log) for p, log in logs.items() if log.end)
    await space.publish(*(document(f"{n}.md", "again") for n in range(5)))
    admin = AIOKafkaAdminClient(bootstrap_servers=space.settings.kafka.bootstrap)
    await admin.start()
    topic = TopicPartition(f"{space.settings.kafka.topic_prefix}{DOCUMENTS_LIVE.name}", partition)
    await admin.delete_records({topic: RecordsToDelete(before_offset=log.end)})
    await admin.close()
    await consume(consumers, DETECT, DOCUMENTS_LIVE.name)
    rewound = await recovery.rewind(start - timedelta(hours=3))
    assert len(rewound.missing) == 1
    assert f"{DOCUMENTS_LIVE.name}/{partition} keeps nothing sent before" in rewound.missing[0]
    assert "3 hours" in rewound.missing[0]


async def test_a_rewind_reads_identities_from_the_beginning(
    space: Space, recovery: Recovery, consumers: Groups
) -> None:
    await space.publish(
        *(
            IdentityChanged(tenant="acme", source="wiki", principal=f"p{n}", observed_at=now(), groups=["staff"])
            for n in range(4)
        ),
        topic=IDENTITIES,
    )
    await consume(consumers, IDENTITY, IDENTITIES.name)
    await recovery.rewind(now())
    assert at_end(await consumers.committed(IDENTITY), IDENTITIES.name) == 0


async def test_offsets_are_not_changed_while_workers_of_the_group_run(
    space: Space, recovery: Recovery, consumers: Groups
) -> None:
    space.start("detect")
    with pytest.raises(Misconfigured, match=r"detect workers run on 127\.0\.0\.1: stop them"):
        await recovery.require_stopped()
    await publish_five(space)
    with pytest.raises(GroupBusy):
        await consumers.commit(DETECT, {(DOCUMENTS_LIVE.name, 0): 0})
    assert space.stop("detect") == 0
    await recovery.require_stopped()


async def test_sequence_numbers_continue_above_the_highest_version_in_elasticsearch(
    recovery: Recovery, site: Site
) -> None:
    await site.put(document("a.md", sections("one")))
    [(before,)] = await site.space.query("SELECT last_value FROM ledger_seq")
    async with site.pool.connection() as connection:
        index = (await generations.active(connection)).keyword_index
    body = next(iter((await site.space.entries()).values()))
    await Keywords(site.es).apply([Write(index, uuid4(), 5_000_000, body)])
    raised = await recovery.raise_sequence()
    assert (raised.before, raised.after) == (before, 5_000_000)
    assert (await recovery.raise_sequence()).after == 5_000_000
    await site.put(document("b.md", sections("two")))
    assert (await site.space.query("SELECT seq > 5000000 FROM documents WHERE external_id = 'b.md'")) == [(True,)]
    assert (await recovery.settled()).failed == 0


async def test_an_index_rebuilt_after_the_backup_is_reported_and_never_reused(recovery: Recovery, site: Site) -> None:
    """The backup knows g1 and its index; the lost timeline had rebuilt it as g2, dropped the old one and went on."""
    prefix = site.space.settings.elasticsearch.index_prefix
    documents = [document(f"{n}.md", sections(f"subject {n}")) for n in range(3)]
    await site.put(*documents)
    await create_index(site.es, f"{prefix}chunks-g2")
    body = next(iter((await site.space.entries()).values()))
    await Keywords(site.es).apply([Write(f"{prefix}chunks-g2", uuid4(), 9_000, body)])
    await site.es.indices.refresh(index=f"{prefix}chunks-g2")
    assert await recovery.strays() == [f"{prefix}chunks-g2"]
    await site.es.indices.delete(index=f"{prefix}chunks-g1")
    with pytest.raises(Misconfigured, match=r"has no index .*chunks-g1.*`penstock rebuild keywords`"):
        await recovery.raise_sequence()
    assert (await site.run("keywords")).generation == "g3"
    await recovery.raise_sequence()
    await site.put(deletion(documents[0]))
    async with site.pool.connection() as connection:
        assert await generation_tables.uncleared(connection) == []
