"""Gathers one document's story: the ledger first, then Kafka, the workers and both stores, each with a time limit of
its own. A part that does not answer is named, and the others are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pipeline.audit.compare import MEANING
from pipeline.audit.examine import Examiner
from pipeline.core.errors import PenstockError
from pipeline.core.identity import document_id, document_key
from pipeline.diagnosis import story
from pipeline.diagnosis.lag import read_progress
from pipeline.diagnosis.story_model import Context, Person, Queue, StoreDifference, Story
from pipeline.ledger import generations
from pipeline.ledger.documents import Identity
from pipeline.runtime.settings import Settings
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.vectors import VectorSink
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Connection, Pool, open_pool, translated

T = TypeVar("T")
Outages = Callable[[], Mapping[str, str]]
"""Blocking; returns by stage what the workers of this machine are stalled by."""
CheckAccess = Callable[[Connection, Story], Awaitable[Person]]

PART_SECONDS = 10.0
"""Time limit for each of Kafka, the stores and the workers."""
STAGES = (Detect, VectorSink, KeywordSink)


@dataclass(frozen=True, slots=True)
class StoryRequest:
    tenant: str
    names: Sequence[str]
    """Names that the document may have: id, external id, file, URL, title."""
    source: str | None = None


@dataclass(frozen=True, slots=True)
class StoryReport:
    story: Story = field(default_factory=lambda: Story(None))
    context: Context = field(default_factory=Context)
    candidates: Sequence[tuple[Identity, str | None]] = ()
    """The documents that the name may mean, with their titles, where there is more than one."""


async def gather(
    request: StoryRequest, settings: Settings, *, outages: Outages, check_access: CheckAccess | None = None
) -> StoryReport:
    """check_access: says whether somebody may read the document. Raises Retryable, Misconfigured only where the ledger
    itself does not answer."""
    async with open_pool(settings.postgres) as pool:
        with translated("why"):
            async with pool.connection() as connection:
                matches = await story.find(connection, request.tenant, request.names, source=request.source)
                if len(matches) > 1:
                    return StoryReport(candidates=matches)
                if matches:
                    [(match, _)] = matches
                    known = await story.read(connection, match.id)
                    identity: tuple[str, str] | None = (match.source, match.external_id)
                else:
                    known = await story.dead_letters(connection, request.tenant, request.names, source=request.source)
                    names = await _names_at_connectors(connection, request)
                    if len({source for source, _ in names}) > 1:
                        return StoryReport(candidates=[(_identity(request.tenant, *name), None) for name in names])
                    identity = names[0] if names else None
        context = await _ledger_context(pool, request, known, identity, check_access)
        away: list[str] = []
        queues, stalled, differences = await asyncio.gather(
            _part(away, "Kafka", _queues(settings, request.tenant, identity, known), ()),
            _part(away, "the workers", asyncio.to_thread(outages), {}),
            _part(away, "the stores", _differences(settings, pool, known), None),
        )
    context = replace(context, queues=queues, outages=stalled, differences=differences, away=tuple(away))
    return StoryReport(known, context)


def _identity(tenant: str, source: str, external_id: str) -> Identity:
    return Identity(document_id(tenant, source, external_id), tenant, source, external_id)


async def _names_at_connectors(connection: Connection, request: StoryRequest) -> list[tuple[str, str]]:
    """(source, external id) by which connectors know a document that the ledger does not know."""
    names = [
        (source, external_id)
        for source, external_id in await story.connector_documents(connection, request.tenant, request.names)
        if request.source in (None, source)
    ]
    if not names and request.source is not None and request.names:
        return [(request.source, request.names[0])]
    return names


async def _part(away: list[str], name: str, work: Awaitable[T], otherwise: T) -> T:
    try:
        async with asyncio.timeout(PART_SECONDS):
            return await work
    except TimeoutError:
        away.append(f"{name} did not answer within {PART_SECONDS:g} s")
    except (PenstockError, OSError) as error:
        away.append(f"{name}: {error}")
    return otherwise


async def _ledger_context(
    pool: Pool,
    request: StoryRequest,
    known: Story,
    identity: tuple[str, str] | None,
    check_access: CheckAccess | None,
) -> Context:
    """The parts that come from the same database, but not from the ledger's own tables."""
    context = Context(request.names[0] if request.names else None)
    with translated("why"):
        async with pool.connection() as connection:
            if identity is not None:
                name, external_id = identity
                source = await story.read_source(connection, request.tenant, name, [external_id, *request.names])
                context = replace(context, source=source)
            elif known.document is None:
                context = replace(context, inactive=await story.inactive_connectors(connection, request.tenant))
            if known.document is not None:
                superseded = await story.superseded(connection, known.document.identity.id)
                person = await check_access(connection, known) if check_access is not None else None
                context = replace(context, superseded=superseded, person=person)
    return context


async def _queues(settings: Settings, tenant: str, identity: tuple[str, str] | None, known: Story) -> tuple[Queue, ...]:
    """The partitions that the document's key goes to, with each stage's lag there."""
    if identity is None:
        return ()
    key = document_key(tenant, *identity).encode()
    active = known.active
    pending = active is not None and not (active.vectors.reached and active.keywords.reached)
    stages = STAGES if pending else STAGES[:1]
    progress = await read_progress(settings.kafka, {stage.name: stage.topics for stage in stages}, members=True)
    queues = []
    for stage, topics in progress.stages.items():
        for topic in topics.values():
            partition = progress.partition_of(topic.name, key)
            behind = progress.partition_lag(stage, topic.name, partition)
            queues.append(Queue(stage, topic.name, partition, behind, len(progress.hosts[stage])))
    return tuple(queues)


async def _differences(settings: Settings, pool: Pool, known: Story) -> tuple[StoreDifference, ...] | None:
    """The differences between the ledger and both stores that persist while the audit's comparison is repeated."""
    if known.document is None:
        return None
    with translated("why"):
        async with pool.connection() as connection:
            writable = await generations.writable(connection)
    es = connect(settings.elasticsearch)
    try:
        return tuple(
            [
                StoreDifference(generation.name, finding.store, finding.kind, MEANING[finding.kind], finding.chunks)
                for generation in writable
                async for verdict in Examiner(pool, es, generation).confirmed([known.document.identity.id])
                for finding in verdict.findings
            ]
        )
    finally:
        await es.close()
