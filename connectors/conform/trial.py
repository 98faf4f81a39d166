"""Runs a connector on its playground and records its calls and what it publishes to Kafka."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, LiteralString, cast

from connectors.clock import Clock
from connectors.declared import options
from connectors.operate import Action, ask, outcome
from connectors.protocol import Problem
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.source import Context, Cursor, Entry, Group, Listed, Page, Playground, Reaction, Request, Source
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
    """One answer of a source. ``asked_at``: when it was asked for."""

    method: str
    asked_at: datetime
    ids: tuple[str, ...]


@dataclass
class Record:
    """What was asked over all lives of a source. ``before``: called with the method and the page's number."""

    calls: list[Call] = field(default_factory=list)
    before: Callable[[str, int], Awaitable[None]] | None = None

    def pages(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]


class Watched:
    """A source that is asked through us."""

    def __init__(self, source: Source, record: Record) -> None:
        self.source = source
        self.Options = source.Options
        self._record = record

    async def close(self) -> None:
        await self.source.close()

    async def check(self) -> Sequence[Problem]:
        return await self.source.check()

    async def start(self) -> Cursor:
        return await self.source.start()

    def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        return self._pages("full", self.source.full(cursor))

    def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        return self._pages("changes", self.source.changes(cursor))

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        async for asked_at, page in self._asked("slim", self.source.slim()):
            self._record.calls.append(Call("slim", asked_at, tuple(one.external_id for one in page)))
            yield page

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        asked_at = datetime.now(UTC)
        entries = await self.source.fetch(external_ids)
        self._record.calls.append(Call("fetch", asked_at, tuple(one.external_id for one in entries)))
        return entries

    def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        return self.source.groups(tags)

    async def on_event(self, request: Request) -> Reaction:
        return await self.source.on_event(request)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        await self.source.listen(react)

    async def _pages(self, method: str, pages: AsyncIterator[Page]) -> AsyncIterator[Page]:
        async for asked_at, page in self._asked(method, pages):
            self._record.calls.append(Call(method, asked_at, tuple(one.external_id for one in page.entries)))
            yield page

    async def _asked(self, method: str, answers: AsyncIterator[Any]) -> AsyncIterator[tuple[datetime, Any]]:
        number = 0
        async with aclosing(cast("Any", answers)):
            while True:
                if self._record.before is not None:
                    await self._record.before(method, number)
                asked_at = datetime.now(UTC)
                try:
                    answer = await anext(answers)
                except StopAsyncIteration:
                    return
                number += 1
                yield asked_at, answer


class Witness(Producer):
    """A producer that remembers what went through it, and can keep Kafka's word from whoever waits for it."""

    def __init__(self, producer: Producer) -> None:
        self._real = producer
        self.messages: list[AnyMessage] = []
        self.silent_after: int | None = None
        """After so many upserts, what Kafka acknowledges is not passed on: the runner dies before it hears."""

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
NEVER = 86_400.0
"""Seconds between polls: a law asks for what it wants."""
PATIENCE_SECONDS = 90.0
EVENTS_URL = "https://events.example"


class Broken(Exception):
    """A law does not hold; the text says why, in one line."""


@dataclass
class Trial:
    """``kind``'s playground and a runner of it, which ``start`` and ``stop`` (a kill) bring to life and end."""

    kind: type[Source]
    play: Playground
    postgres: PostgresSettings
    pool: Pool
    witness: Witness
    folder: Path
    with_stores: bool
    """Whether the sinks run too: then everything is waited for until both stores hold it."""
    tenant: str = field(default_factory=lambda: f"conform-{uuid.uuid4().hex[:12]}")
    record: Record = field(default_factory=Record)
    instance: Instance | None = None
    _running: asyncio.Task[None] | None = None
    _taken: int = 0

    @property
    def plan(self) -> Plan:
        return Plan(
            name=NAME,
            tenant=self.tenant,
            kind=self.kind.__name__,
            make=self._make,
            poll_seconds=NEVER,
            sweep_seconds=NEVER,
            groups_seconds=NEVER,
        )

    def _make(self, context: Context) -> Source:
        given = options(self.kind, self.play.options, NAME, environment(self.kind, self.play.environment))
        return Watched(self.kind(given, context), self.record)  # type: ignore[return-value]  # Options of an instance

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

    async def killed_after(self, sent: Callable[[AnyMessage], bool]) -> None:
        """Look for changes, and be killed once Kafka has such a message and the runner does not know it yet."""
        before = len(self.witness.messages)
        self.witness.silent_after = -1
        instance = self.instance or self.start()
        for action in ("changes", "sweep"):
            await ask(self.pool, self.plan, action)
        await self.until(
            lambda: any(sent(message) for message in self.witness.messages[before:]),
            f"the runner to publish what changed ({instance.plan.name})",
        )
        await self.stop()
        self.witness.silent_after = None

    async def loaded(self) -> None:
        """Running, everything read once, and the ledger knows it."""
        instance = self.start()
        await self.until(lambda: self.succeeded(instance, "full", "changes", "groups", "sweep"), "the first load")
        await self.folded()

    @staticmethod
    def succeeded(instance: Instance, *names: str) -> bool:
        found = instance.activities
        return all(name in found and found[name].status.succeeded_at is not None for name in names)

    async def asked(self, *actions: Action) -> dict[str, Mapping[str, Any]]:
        """Have the runner do these, one after the other, and the ledger take it in. Raises Broken when one fails."""
        outcomes: dict[str, Mapping[str, Any]] = {}
        for action in actions:
            outcomes[action] = await self.attempt(action)
            if "error" in outcomes[action]:
                raise Broken(f"{action} failed: {outcomes[action]['error']}")
        await self.folded()
        return outcomes

    async def attempt(self, action: Action, *, within_seconds: float = PATIENCE_SECONDS) -> Mapping[str, Any]:
        """The outcome, which may be {"error"}; that of an activity which waits for its source is {"waiting"}."""
        number = await ask(self.pool, self.plan, action)
        deadline = time.monotonic() + within_seconds
        while (found := await outcome(self.pool, number)) is None:
            if time.monotonic() > deadline:
                waits = {
                    n: a.status.reason
                    for n, a in (self.instance.activities if self.instance else {}).items()
                    if a.status.state == "waiting"
                }
                return {"waiting": waits}
            await asyncio.sleep(0.02)
        return found

    # What was published

    def take(self) -> list[AnyMessage]:
        """Since the last call."""
        taken, self._taken = self.witness.messages[self._taken :], len(self.witness.messages)
        return taken

    def take_all(self) -> Sequence[AnyMessage]:
        """Ever."""
        return self.witness.messages

    async def folded(self) -> None:
        """Until the ledger (and with_stores, both stores) has all that was published."""
        newest: dict[str, DocumentMessage] = {}
        people: dict[str, IdentityChanged] = {}
        for message in self.witness.messages:
            if isinstance(message, DocumentMessage):
                newest[message.external_id] = message
            elif isinstance(message, IdentityChanged):
                people[message.principal] = message
        await self.until(lambda: self._has(newest, people), "the ledger to take in what was published")

    async def _has(self, newest: Mapping[str, DocumentMessage], people: Mapping[str, IdentityChanged]) -> bool:
        ids = {document_id(self.tenant, NAME, one): message for one, message in newest.items()}
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
                    came = arrival.version is not None and arrival.version >= message.version
                case DocumentDeleted():
                    came = arrival.deleted_floor is not None and arrival.deleted_floor >= message.observed_at
                case AccessChanged():
                    came = arrival.access_observed_at is not None and arrival.access_observed_at >= message.observed_at
                case _:
                    came = True
            if not came:
                return False
        return all(name in stamps and stamps[name] >= one.observed_at for name, one in people.items())

    async def alive(self) -> set[str]:
        """Documents that the ledger holds as there."""
        return {row[0] for row in await self._documents("true", [])}

    async def readable(self, principal: str) -> set[str]:
        """Those that it lets a principal read now."""
        return {
            row[0]
            for row in await self._documents(
                "a.acl_tags && held.tags AND a.required_tags <@ held.tags", [self.tenant, principal, NAME, principal]
            )
        }

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

    async def until(
        self, condition: Callable[[], bool | Awaitable[bool]], what: str, within_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Raises Broken."""
        deadline = time.monotonic() + within_seconds
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            if time.monotonic() > deadline:
                raise Broken(f"waited {within_seconds:.0f} s for {what}{self._said()}")
            await asyncio.sleep(0.02)

    def _said(self) -> str:
        """What the runner complains of."""
        if self.instance is None:
            return ""
        said = [f"{name}: {one.status.reason}" for name, one in self.instance.activities.items() if one.status.reason]
        if self.instance.start.reason:
            said.insert(0, self.instance.start.reason)
        return f" ({'; '.join(said)})" if said else ""


def environment(kind: type[Source], given: Mapping[str, str]) -> dict[str, str]:
    """A playground's secrets under the names that the instance ``conform`` looks for: its own variables stay, and one
    that ends with a field's name fills that field."""
    found = dict(given)
    for field_name in kind.Options.model_fields:
        for variable, value in given.items():
            if variable == field_name.upper() or variable.endswith(f"_{field_name.upper()}"):
                found.setdefault(f"PENSTOCK_{NAME.upper()}_{field_name.upper()}", value)
    return found


@asynccontextmanager
async def trial(
    kind: type[Source], postgres: PostgresSettings, pool: Pool, witness: Witness, folder: Path, *, with_stores: bool
) -> AsyncIterator[Trial]:
    """Leaving it takes everything out of the indexes again; what the ledger remembers of a throwaway tenant is that it
    is gone."""
    playing = getattr(kind, "playground", None)
    if playing is None:
        raise PenstockError(
            f"{kind.__name__} has no playground: without one no law can be tried (connectors/source.py)"
        )
    async with playing() as play:
        made = Trial(kind, play, postgres, pool, witness, folder, with_stores)
        if (placed := getattr(play, "placed", None)) is not None:
            placed(made.tenant, NAME, pool)
        try:
            yield made
        finally:
            await made.stop()
            await _swept_up(made)


async def _swept_up(made: Trial) -> None:
    at = Clock(None).stamp()
    deletes = [
        DocumentDeleted(tenant=made.tenant, source=NAME, external_id=one, observed_at=at) for one in await made.alive()
    ]
    people = {message.principal for message in made.witness.messages if isinstance(message, IdentityChanged)}
    leavers = [
        IdentityChanged(tenant=made.tenant, source=NAME, principal=one, groups=[], observed_at=at) for one in people
    ]
    made.witness.silent_after = None
    await deliver(made.witness.send(DOCUMENTS_LIVE, message) for message in deletes)
    await deliver(made.witness.send(IDENTITIES, message) for message in leavers)
    if made.with_stores:
        await made.folded()
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
