"""Runs a connector on its playground and records its calls and what it publishes to Kafka."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, LiteralString, cast

from connectors.base import SmallSource
from connectors.clock import Clock
from connectors.declared import options
from connectors.faults import foreign
from connectors.operate import Action, command_outcome, send_command
from connectors.protocol import Problem
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.source import (
    Context,
    Cursor,
    Entry,
    Group,
    Listed,
    Page,
    PagedGroups,
    Playground,
    Reaction,
    Request,
    Source,
    Unlisted,
)
from pipeline.core.errors import PenstockError
from pipeline.core.identity import document_id
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Delivery, Producer
from pipeline.ledger.arrivals import arrivals
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import PostgresSettings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.postgres import Pool, translated
from topics.messages import (
    AccessChanged,
    AnyMessage,
    DocumentDeleted,
    DocumentMessage,
    DocumentUpserted,
    IdentityChanged,
)
from topics.registry import DOCUMENTS_LIVE, IDENTITIES, Topic


@dataclass(frozen=True, slots=True)
class Call:
    """One response of a source."""

    method: str
    requested_at: datetime
    """Taken before the request."""
    ids: tuple[str, ...]


@dataclass
class Record:
    """The calls of a source, over all its restarts."""

    calls: list[Call] = field(default_factory=list)
    before: Callable[[str, int], Awaitable[None]] | None = None
    """Called before each page, with the method and the page's number."""
    fault: BaseException | None = None
    """The first error of the source's own code."""

    @contextmanager
    def noting_faults(self) -> Iterator[None]:
        try:
            yield
        except StopAsyncIteration:
            raise
        except Exception as error:
            self.fault = self.fault or foreign(error)
            raise

    def pages(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]


class RecordedSource:
    """A source whose calls are recorded."""

    def __init__(self, source: Source, record: Record) -> None:
        self.source = source
        self.Options = source.Options
        self._record = record
        if isinstance(source, PagedGroups):
            paged = source
            self.group_pages = lambda cursor: self._noted(paged.group_pages(cursor))

    async def close(self) -> None:
        await self.source.close()

    async def check(self) -> Sequence[Problem]:
        return await self.source.check()

    async def start(self) -> Cursor | None:
        with self._record.noting_faults():
            return await self.source.start()

    def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        return self._pages("full", self.source.full(cursor))

    def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        return self._pages("changes", self.source.changes(cursor))

    async def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        async for requested_at, page in self._timed("slim", self.source.slim()):
            ids = tuple(entry.external_id for entry in page if isinstance(entry, Listed))
            self._record.calls.append(Call("slim", requested_at, ids))
            yield page

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        requested_at = datetime.now(UTC)
        with self._record.noting_faults():
            entries = await self.source.fetch(external_ids)
        self._record.calls.append(Call("fetch", requested_at, tuple(entry.external_id for entry in entries)))
        return entries

    def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        return self._noted(self.source.groups(tags))

    async def on_event(self, request: Request) -> Reaction:
        return await self.source.on_event(request)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        with self._record.noting_faults():
            await self.source.listen(react)

    async def _pages(self, method: str, pages: AsyncIterator[Page]) -> AsyncIterator[Page]:
        async for requested_at, page in self._timed(method, pages):
            self._record.calls.append(Call(method, requested_at, tuple(entry.external_id for entry in page.entries)))
            yield page

    async def _noted(self, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async with aclosing(cast("Any", items)):
            with self._record.noting_faults():
                async for item in items:
                    yield item

    async def _timed(self, method: str, pages: AsyncIterator[Any]) -> AsyncIterator[tuple[datetime, Any]]:
        """Yield each page with the time before its request."""
        number = 0
        async with aclosing(cast("Any", pages)):
            while True:
                if self._record.before is not None:
                    await self._record.before(method, number)
                requested_at = datetime.now(UTC)
                try:
                    with self._record.noting_faults():
                        page = await anext(pages)
                except StopAsyncIteration:
                    return
                number += 1
                yield requested_at, page


class RecordingProducer(Producer):
    """A producer that records its messages, and can withhold Kafka's acknowledgements."""

    def __init__(self, producer: Producer) -> None:
        self._real = producer
        self.messages: list[AnyMessage] = []
        self.silent_after: int | None = None
        """After so many upserts acknowledgements are withheld, as if the runner were killed before it receives them."""

    @property
    def upserts(self) -> int:
        return sum(isinstance(message, DocumentUpserted) for message in self.messages)

    async def send(self, topic: Topic, message: AnyMessage, traceparent: str | None = None) -> Delivery:
        delivery = await self._real.send(topic, message, traceparent)
        self.messages.append(message)
        if self.silent_after is None or self.upserts <= self.silent_after:
            return delivery
        await asyncio.shield(delivery)
        return asyncio.get_running_loop().create_future()


NAME = "conform"
INTERVAL_SECONDS = 86_400.0
"""Between two polls or sweeps: in a trial they run on command only."""
PATIENCE_SECONDS = 90.0
LOADING = ("full", "changes", "groups", "sweep")
"""The activities of a first load."""
PAGE_DOCUMENTS = 3
"""In one page of a full read: the laws change documents between two pages."""
EVENTS_URL = "https://events.example"


class Broken(Exception):
    """A law does not hold; one line says why."""


@dataclass
class Trial:
    """A playground and a runner of its source, which ``start`` starts and ``stop`` kills."""

    kind: type[Source]
    play: Playground
    postgres: PostgresSettings
    pool: Pool
    witness: RecordingProducer
    folder: Path
    with_stores: bool
    """Whether the sinks run, too: the trial then waits until both stores hold everything."""
    tenant: str = field(default_factory=lambda: f"conform-{uuid.uuid4().hex[:12]}")
    record: Record = field(default_factory=Record)
    instance: Instance | None = None
    is_loaded: bool = False
    """Whether everything was read once."""
    _running: asyncio.Task[None] | None = None
    _taken: int = 0

    @property
    def plan(self) -> Plan:
        return Plan(
            name=NAME,
            tenant=self.tenant,
            kind=self.kind.__name__,
            make=self._make,
            poll_seconds=INTERVAL_SECONDS,
            sweep_seconds=INTERVAL_SECONDS,
            groups_seconds=INTERVAL_SECONDS,
            isolates_data=False,
        )

    def _make(self, context: Context) -> Source:
        settings = options(self.kind, self.play.options, NAME, environment(self.kind, self.play.environment))
        with self.record.noting_faults():
            source = self.kind(settings, context)
        if isinstance(source, SmallSource):
            source.page_documents = PAGE_DOCUMENTS
        return RecordedSource(source, self.record)  # type: ignore[return-value]  # Options of an instance

    # The runner

    def start(self) -> Instance:
        services = Services(
            postgres=self.postgres,
            pool=self.pool,
            producer=self.witness,
            metrics=Metrics(),
            folder=self.folder,
            events_url=EVENTS_URL,
        )
        self.instance = Instance(self.plan, services)
        self._running = asyncio.create_task(self.instance.run())
        return self.instance

    async def stop(self) -> None:
        if self._running is not None:
            await cancel_and_wait([self._running])
        self._running = self.instance = None

    async def kill_after(self, sent: Callable[[AnyMessage], bool]) -> None:
        """Have the runner read changes, and kill it when Kafka has such a message that the runner has not recorded."""
        before = len(self.witness.messages)
        self.witness.silent_after = -1
        instance = self.instance or self.start()
        for action in ("changes", "sweep"):
            await send_command(self.pool, self.plan, action)
        await self.wait_until(
            lambda: any(sent(message) for message in self.witness.messages[before:]),
            f"the runner to publish what changed ({instance.plan.name})",
        )
        await self.stop()
        self.witness.silent_after = None

    async def load(self) -> None:
        """Start the runner, and wait until everything was read once and is in the ledger."""
        instance = self.start()

        def is_done() -> bool:
            if self.needs_attention(*LOADING):
                raise Broken(f"the first load failed{self._status_reasons()}")
            return self.succeeded(instance, *LOADING)

        await self.wait_until(is_done, "the first load")
        self.is_loaded = True
        await self.wait_for_ledger()

    def needs_attention(self, *names: str) -> bool:
        """Whether the runner waits for a person: it could not start, or these activities failed."""
        if self.instance is None:
            return False
        activities = self.instance.activities
        waits = any(name in activities and activities[name].status.needs_attention() for name in names)
        return waits or self.instance.start.needs_attention()

    @staticmethod
    def succeeded(instance: Instance, *names: str) -> bool:
        activities = instance.activities
        return all(name in activities and activities[name].status.succeeded_at is not None for name in names)

    async def run(self, *actions: Action) -> dict[str, Mapping[str, Any]]:
        """Have the runner do these actions one after another, and wait for the ledger. Raises Broken when one fails."""
        outcomes: dict[str, Mapping[str, Any]] = {}
        for action in actions:
            outcomes[action] = await self.attempt(action)
            if "error" in outcomes[action]:
                raise Broken(f"{action} failed: {outcomes[action]['error']}")
        await self.wait_for_ledger()
        return outcomes

    async def attempt(self, action: Action, *, within_seconds: float = PATIENCE_SECONDS) -> Mapping[str, Any]:
        """Have the runner do an action, and return its outcome: {"error"} if it failed, and {"waiting"} if it still
        waits for its source after ``within_seconds``."""
        number = await send_command(self.pool, self.plan, action)
        deadline = time.monotonic() + within_seconds
        while (result := await command_outcome(self.pool, number)) is None:
            if time.monotonic() > deadline:
                waits = {
                    n: a.status.reason
                    for n, a in (self.instance.activities if self.instance else {}).items()
                    if a.status.state == "waiting"
                }
                return {"waiting": waits}
            await asyncio.sleep(0.02)
        return result

    # Published messages

    def take(self) -> list[AnyMessage]:
        """Return the messages since the last call."""
        taken, self._taken = self.witness.messages[self._taken :], len(self.witness.messages)
        return taken

    async def wait_for_ledger(self) -> None:
        """Wait until the ledger (and with ``with_stores`` both stores) has everything that was published."""
        newest: dict[str, DocumentMessage] = {}
        people: dict[str, IdentityChanged] = {}
        for message in self.witness.messages:
            if isinstance(message, DocumentMessage):
                newest[message.external_id] = message
            elif isinstance(message, IdentityChanged):
                people[message.principal] = message
        await self.wait_until(lambda: self._has(newest, people), "the ledger to take in what was published")

    async def _has(self, newest: Mapping[str, DocumentMessage], people: Mapping[str, IdentityChanged]) -> bool:
        ids = {document_id(self.tenant, NAME, external_id): message for external_id, message in newest.items()}
        with translated("the ledger"):
            async with self.pool.connection() as connection:
                known = await arrivals(connection, list(ids))
                rows = await (
                    await connection.execute(
                        "SELECT principal, observed_at FROM memberships WHERE tenant = %s AND source = %s",
                        [self.tenant, NAME],
                    )
                ).fetchall()
        stamps: dict[str, datetime] = dict(rows)
        for id_, message in ids.items():
            arrival = known.get(id_)
            if arrival is None or (self.with_stores and not arrival.settled):
                return False
            match message:
                case DocumentUpserted():
                    has_arrived = arrival.version is not None and arrival.version >= message.version
                case DocumentDeleted():
                    has_arrived = arrival.deleted_floor is not None and arrival.deleted_floor >= message.observed_at
                case AccessChanged():
                    stamp = arrival.access_observed_at
                    has_arrived = stamp is not None and stamp >= message.observed_at
                case _:
                    has_arrived = True
            if not has_arrived:
                return False
        return all(name in stamps and stamps[name] >= message.observed_at for name, message in people.items())

    async def alive(self) -> set[str]:
        """Return the documents that are alive in the ledger."""
        return {row[0] for row in await self._documents("true", [])}

    async def readable(self, principal: str) -> set[str]:
        """Return the documents that a principal may read now, by the ledger."""
        return {
            row[0]
            for row in await self._documents(
                "a.acl_tags && held.tags AND a.required_tags <@ held.tags", [self.tenant, principal, NAME, principal]
            )
        }

    async def chunks(self, external_id: str) -> list[tuple[Any, ...]]:
        """Return the chunks of a document in each generation. A chunk that stays keeps its vector."""
        with translated("the ledger"):
            async with self.pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT generation, chunk_ids FROM manifests WHERE document_id = %s ORDER BY generation",
                    [document_id(self.tenant, NAME, external_id)],
                )
                return await cursor.fetchall()

    async def _documents(self, where: LiteralString, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        held = (
            "(SELECT ARRAY(SELECT m.source || '/' || g FROM memberships m, unnest(m.groups) g WHERE m.tenant = %s"
            " AND m.principal = %s) || (%s || '/user:' || %s) AS tags) held"
            if parameters
            else "(SELECT 1) held"
        )
        with translated("the ledger"):
            async with self.pool.connection() as connection:
                cursor = await connection.execute(
                    f"SELECT d.external_id FROM documents d JOIN access_sets a ON a.id = d.access_id, {held}"  # noqa: S608 — callers hand literals
                    f" WHERE d.tenant = %s AND d.deleted_at IS NULL AND d.version IS NOT NULL AND {where}".encode(),
                    [*parameters, self.tenant],
                )
                return await cursor.fetchall()

    async def wait_until(
        self, condition: Callable[[], bool | Awaitable[bool]], what: str, within_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Raises Broken."""
        deadline = time.monotonic() + within_seconds
        while True:
            if self.instance is not None and any(
                activity.has_crashed for activity in self.instance.activities.values()
            ):
                raise Broken(f"the source failed{self._status_reasons()}")
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            if time.monotonic() > deadline:
                raise Broken(f"waited {within_seconds:.0f} s for {what}{self._status_reasons()}")
            await asyncio.sleep(0.02)

    def _status_reasons(self) -> str:
        """Return the reasons in the runner's statuses."""
        if self.instance is None:
            return ""
        statuses = {name: activity.status for name, activity in self.instance.activities.items()}
        reasons = [f"{name}: {status.reason}" for name, status in statuses.items() if status.reason]
        if self.instance.start.reason:
            reasons.insert(0, self.instance.start.reason)
        return f" ({'; '.join(reasons)})" if reasons else ""


def environment(kind: type[Source], variables: Mapping[str, str]) -> dict[str, str]:
    """Return a playground's variables, with its secrets under the names that the instance ``conform`` reads: a variable
    that ends with the name of an option fills that option."""
    result = dict(variables)
    for field_name in kind.Options.model_fields:
        for variable, value in variables.items():
            if variable == field_name.upper() or variable.endswith(f"_{field_name.upper()}"):
                result.setdefault(f"PENSTOCK_{NAME.upper()}_{field_name.upper()}", value)
    return result


@asynccontextmanager
async def trial(
    kind: type[Source],
    postgres: PostgresSettings,
    pool: Pool,
    witness: RecordingProducer,
    folder: Path,
    record: Record,
    with_stores: bool,
) -> AsyncIterator[Trial]:
    """Create a trial in a tenant of its own, which is removed from the indexes afterwards; the ledger keeps a record of
    its deletion."""
    playing = getattr(kind, "playground", None)
    if playing is None:
        raise PenstockError(
            f"{kind.__name__} has no playground: without one no law can be tried (connectors/source.py)"
        )
    async with playing() as play:
        made = Trial(kind, play, postgres, pool, witness, folder, with_stores, record=record)
        if (placed := getattr(play, "placed", None)) is not None:
            placed(made.tenant, NAME, pool)
        try:
            yield made
        finally:
            await made.stop()
            await _clean_up(made)


async def _clean_up(made: Trial) -> None:
    at = Clock(None).stamp()
    deletes = [
        DocumentDeleted(tenant=made.tenant, source=NAME, external_id=external_id, observed_at=at)
        for external_id in await made.alive()
    ]
    people = {message.principal for message in made.witness.messages if isinstance(message, IdentityChanged)}
    leavers = [
        IdentityChanged(tenant=made.tenant, source=NAME, principal=principal, groups=[], observed_at=at)
        for principal in people
    ]
    made.witness.silent_after = None
    await deliver(made.witness.send(DOCUMENTS_LIVE, message) for message in deletes)
    await deliver(made.witness.send(IDENTITIES, message) for message in leavers)
    if made.with_stores:
        await made.wait_for_ledger()
    tables = (
        "connector_items",
        "connector_sources",
        "connector_groups",
        "connector_principals",
        "connector_memory",
        "connectors",
    )
    with translated("connectors"):
        async with made.pool.connection() as connection:
            for table in tables:
                await connection.execute(f"DELETE FROM {table} WHERE tenant = %s".encode(), [made.tenant])  # noqa: S608 — names listed here
