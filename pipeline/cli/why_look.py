"""Gathering one document's story: the ledger first, then, at once and each in its own short time, whatever else knows
of it. What does not answer is named, and the rest is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TypeVar

from aiokafka.partitioner import DefaultPartitioner

from deploy.local.stack import Stack
from pipeline.audit.compare import MEANING
from pipeline.audit.examine import Examiner
from pipeline.core.errors import PenstockError
from pipeline.core.identity import document_id, document_key
from pipeline.groups import group, groups, kafka_translated
from pipeline.ledger import generations, story, story_source
from pipeline.ledger.documents import Identity
from pipeline.ledger.story_origin import Source
from pipeline.ledger.story_shape import Around, Held, Person, Queue, Story
from pipeline.settings import Settings, home, load
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.vectors import VectorSink
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Pool, open_pool, translated
from query.access import decide, identify, sayable

T = TypeVar("T")

PART_SECONDS = 10.0
"""For each of Kafka, the stores and the workers."""
WATCHED = (Detect, VectorSink, KeywordSink)


@dataclass(frozen=True, slots=True)
class Asked:
    tenant: str
    names: Sequence[str]
    """What the document may be known as."""
    source: str | None = None
    principals: Sequence[str] = ()
    tags: Sequence[str] = ()
    query: str | None = None
    """Where does it find the document?"""


@dataclass(frozen=True, slots=True)
class Told:
    story: Story = field(default_factory=lambda: Story(None))
    around: Around = field(default_factory=Around)
    several: Sequence[tuple[Identity, str | None]] = ()
    """The documents that the name may mean, where it may mean more than one."""


async def look(asked: Asked) -> Told:
    """Raises Retryable, Misconfigured only where the ledger itself does not answer."""
    if not sayable([asked.tenant]):
        return Told()
    asked = replace(asked, names=sayable(asked.names))
    settings = load()
    async with open_pool(settings.postgres) as pool:
        with translated("why"):
            async with pool.connection() as connection:
                found = await story.find(connection, asked.tenant, asked.names, source=asked.source)
                if len(found) > 1:
                    return Told(several=found)
                if found:
                    told = await story.tell(connection, found[0][0].id)
                    identity: tuple[str, str] | None = (found[0][0].source, found[0][0].external_id)
                else:
                    told = await story.dead_letters(connection, asked.tenant, asked.names, source=asked.source)
                    named = await _named(pool, asked)
                    if len({name for name, _ in named}) > 1:
                        return Told(
                            several=[
                                (Identity(document_id(asked.tenant, *one), asked.tenant, *one), None) for one in named
                            ]
                        )
                    identity = named[0] if named else None
        around = await _around(settings, pool, asked, told, identity)
    if asked.query is not None and told.document is not None:
        from pipeline.cli.why_query import find  # the model, and all that a search needs: only for whoever asks

        where = await find(settings, told, asked.query, asked.principals, asked.tags)
        around = replace(around, found=where)
    return Told(told, around)


async def _named(pool: Pool, asked: Asked) -> list[tuple[str, str]]:
    """(source, external id) that a connector knows a document by which the ledger does not."""
    async with pool.connection() as connection:
        known = await story_source.of_external_id(connection, asked.tenant, asked.names)
    known = [one for one in known if asked.source in (None, one[0])]
    return known or ([(asked.source, asked.names[0])] if asked.source is not None and asked.names else [])


async def _around(
    settings: Settings, pool: Pool, asked: Asked, told: Story, identity: tuple[str, str] | None
) -> Around:
    """identity: source and external id, where they are known."""
    away: list[str] = []
    source, others, superseded, person = await _of_ledger(pool, asked, told, identity)
    queues, trouble, held = await asyncio.gather(
        _part(away, "Kafka", _queues(settings, asked.tenant, identity, told), ()),
        _part(away, "the workers", _trouble(), {}),
        _part(away, "the stores", _held(settings, pool, told), None),
    )
    name = asked.names[0] if asked.names else None
    return Around(name, source, others, queues, trouble, superseded, held, person, None, tuple(away))


async def _part(away: list[str], what: str, work: Awaitable[T], otherwise: T) -> T:
    try:
        async with asyncio.timeout(PART_SECONDS):
            return await work
    except TimeoutError:
        away.append(f"{what} did not answer within {PART_SECONDS:g} s")
    except (PenstockError, OSError) as error:
        away.append(f"{what}: {error}")
    return otherwise


async def _of_ledger(
    pool: Pool, asked: Asked, told: Story, identity: tuple[str, str] | None
) -> tuple[Source | None, tuple[Source, ...], tuple[int, ...], Person | None]:
    """What stands in the same database, but not in the ledger's own tables."""
    source: Source | None = None
    others: tuple[Source, ...] = ()
    superseded: tuple[int, ...] = ()
    with translated("why"):
        async with pool.connection() as connection:
            if identity is not None:
                name, external_id = identity
                source = await story_source.source(connection, asked.tenant, name, [external_id, *asked.names])
            elif told.document is None:
                others = await story_source.not_following(connection, asked.tenant)
            if told.document is not None:
                superseded = await story_source.superseded(connection, told.document.identity.id)
            if told.document is None or not (asked.principals or asked.tags):
                return source, others, superseded, None
            caller = await identify(connection, asked.tenant, principals=asked.principals, tags=asked.tags)
            memberships = await story_source.memberships(connection, asked.tenant, sayable(asked.principals))
    decision = decide(caller, told.access.acl_tags, told.access.required_tags)
    person = Person((*asked.principals, *asked.tags), decision.may_read, decision.by, decision.lacks, memberships)
    return source, others, superseded, person


async def _queues(settings: Settings, tenant: str, identity: tuple[str, str] | None, told: Story) -> tuple[Queue, ...]:
    """The partitions that the document's key goes to: what each stage has yet to take of them."""
    if identity is None:
        return ()
    key = document_key(tenant, *identity).encode()
    active = told.active
    pending = active is not None and not (active.vectors.reached and active.keywords.reached)
    stages = WATCHED if pending else WATCHED[:1]
    found = []
    async with groups(settings.kafka) as kafka:
        with kafka_translated():
            logs = await kafka.logs(sorted({t.name for s in stages for t in s.topics.values()}), datetime.now(UTC))
            for stage in stages:
                at = await kafka.committed(group(stage.name))
                members = len(await kafka.members(group(stage.name)))
                for topic in stage.topics.values():
                    partitions = sorted(n for name, n in logs if name == topic.name)
                    # As every producer of ours chooses, and Java's own: murmur2 of the key.
                    n = DefaultPartitioner()(key, partitions, partitions)
                    log = logs[topic.name, n]
                    behind = log.behind(at.get((topic.name, n)))
                    found.append(Queue(stage.name, topic.name, n, behind, members))
    return tuple(found)


async def _trouble() -> Mapping[str, str]:
    """By stage: what the workers of this machine's stack stand still for."""
    workers = await asyncio.to_thread(Stack(home()).workers)
    stages = [stage for worker in workers for stage in worker.stages]
    return {
        one["stage"]: f"waiting for {one['waiting_for']} for {one['waiting_seconds']:.0f} s ({one['reason']})"
        for one in stages
        if one["waiting_for"]
    }


async def _held(settings: Settings, pool: Pool, told: Story) -> tuple[Held, ...] | None:
    """What both stores hold of it now, compared as the audit does: every difference that stood still meanwhile."""
    if told.document is None:
        return None
    with translated("why"):
        async with pool.connection() as connection:
            writable = await generations.writable(connection)
    es = connect(settings.elasticsearch)
    try:
        examiners = [Examiner(pool, es, one) for one in writable]
        found = []
        for one, examiner in zip(writable, examiners, strict=True):
            async for verdict in examiner.confirmed([told.document.identity.id]):
                found += [Held(one.name, f.store, f.kind, MEANING[f.kind], f.chunks) for f in verdict.findings]
    finally:
        await es.close()
    return tuple(found)
