"""A source in memory, and processes that run the product's connector runner on it.

``Instance`` is the product's own with all that it runs: lease, full read, changes, sweep, groups, fetches by name,
comparison with the ledger. The pages of the source are those of a ``ShortStory``, whose events nobody publishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import connectors.runner.instance as instance
import connectors.runner.state as lease
from connectors.runner.freshness import Freshness
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.source import (
    Cursor,
    CursorExpired,
    Document,
    Entry,
    Gone,
    Group,
    Listed,
    Page,
    Reaction,
    Unreadable,
)
from pipeline.core.errors import Retryable
from pipeline.core.identity import document_id
from tests.faults.story import KINDS
from tests.faults.story import Page as Stored
from tests.simulation.changes import NAMES, PERSONS, ShortStory
from tests.simulation.claims import Claims
from tests.simulation.statements.runner import HOLDERS, ITEMS, PRINCIPALS
from topics.messages import DocumentUpserted

if TYPE_CHECKING:
    from tests.simulation.database import Session
    from tests.simulation.world import Process, World

PAGE = 2
POLL_SECONDS, SWEEP_SECONDS, GROUPS_SECONDS = 30.0, 180.0, 60.0
BEAT_SECONDS = 30.0
COMPARISONS = 3
"""The number of comparisons after the last fault: by then two whole sweeps have ended, and what they found missing was
fetched."""
CALM_SWEEP_SECONDS = 60.0
"""In calm a sweep is asked for so soon after the last one."""
END = datetime.max.replace(tzinfo=UTC)
ALONE_SHARE = 0.6
"""The share of histories in which nothing is compared with the ledger, so that what was sent has to be right by
itself."""


@dataclass
class Service:
    """The source: what it has now, what its feed of changes tells, and how it answers."""

    story: ShortStory
    rng: Random
    groups: dict[str, tuple[set[str], set[str]]] = field(default_factory=dict)
    """Tag → its members, and the tags whose holders hold it too."""
    unreadable: set[str] = field(default_factory=set)
    history: list[str] = field(default_factory=list)
    """Names in the order of their changes, as the feed tells them."""
    expired_before: int = 0
    """Cursors of before so many changes are not known any more."""
    listeners: list[Callable[[Reaction], Awaitable[None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.has_versions = rng.random() < 0.4
        self.has_revisions = rng.random() < 0.7
        self.tells = rng.choice((0.0, 0.5, 1.0))
        """The share of changes of which an event comes."""
        self.feeds = rng.choice((0.5, 1.0)) if self.has_revisions else 1.0
        """The share of changes that the feed tells of: where listings show revisions, a sweep finds the others."""
        self.moved = ""
        """The document that changed last."""
        self._before: dict[str, list[Stored | None]] = {name: [] for name in NAMES}

    @property
    def pages(self) -> dict[str, Stored]:
        return self.story._pages

    def change(self, kind: str, name: str, rng: Random) -> list[str]:
        """Something happens to a document; returns the names of those that it moved."""
        before = dict(self.pages)
        if kind == "unreadable":
            self.unreadable ^= {name}
        elif kind == "back":  # as it was before the last change, of which nobody may have heard
            was = self._before[name].pop() if self._before[name] else None
            self.pages.pop(name, None)
            if was is not None:
                self.pages[name] = replace(was, version=self.story._bump(name))
        else:
            KINDS[kind](self.story, name, rng)
        moved = [name for name in NAMES if before.get(name) != self.pages.get(name)]
        for item in moved if kind != "back" else ():
            self._before[item].append(before.get(item))
        if kind == "unreadable":
            moved = [name]
        self.moved = moved[-1] if moved else self.moved
        self.history += [name for name in moved if self.rng.random() < self.feeds]
        return moved

    def entry(self, name: str) -> Entry:
        page = self.pages.get(name)
        if page is None:
            return Gone(name)
        if name in self.unreadable:
            return Unreadable(
                external_id=name,
                code="encrypted",
                message="it is encrypted",
                acl_tags=page.acl,
                required_tags=page.required,
                revision=self._revision(name),
            )
        upsert = self.story._upsert(name, page, page.version, None)
        return Document(
            external_id=name,
            title=page.title,
            content=upsert.content,
            media_type=page.media_type,
            acl_tags=page.acl,
            required_tags=page.required,
            version=page.version if self.has_versions else None,
            revision=self._revision(name),
            author=page.author,
            metadata=dict(page.metadata),
        )

    def _revision(self, name: str) -> str | None:
        """The same again when the document is as it was, but for its access."""
        page = self.pages[name]
        state = replace(page, version=0, acl=(), required=())
        return repr((state, name in self.unreadable)) if self.has_revisions else None

    def listed(self, name: str) -> Listed:
        page = self.pages[name]
        return Listed(external_id=name, acl_tags=page.acl, required_tags=page.required, revision=self._revision(name))

    def held_by(self, person: str) -> set[str]:
        """All tags that a person holds."""
        held = {tag for tag, (members, of) in self.groups.items() if person in members or f"user:{person}" in of}
        while more := {tag for tag, (_, of) in self.groups.items() if of & held} - held:
            held |= more
        return held


class VirtualSource:
    """The source as the runner sees it. Each request takes its time and may fail; a response shows the state at its
    creation."""

    def __init__(self, service: Service, process: Process) -> None:
        self._service = service
        self._process = process

    async def close(self) -> None:
        return None

    async def start(self) -> Cursor:
        await self._reach("start")
        return {"at": len(self._service.history)}

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        last = (cursor or {}).get("after", "")
        while True:
            await self._reach("full")
            names = sorted(name for name in self._service.pages if name > last)[:PAGE]
            if not names:
                return
            last = names[-1]
            yield Page([self._service.entry(name) for name in names], {"after": last})

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        service, at = self._service, int(cursor["at"])
        while at < len(service.history):
            await self._reach("changes")
            if at < service.expired_before:
                raise CursorExpired("the cursor of changes is not known any more")
            names = service.history[at : at + PAGE]
            at += len(names)
            yield Page([service.entry(name) for name in dict.fromkeys(names)], {"at": at})

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        last = ""
        while True:
            await self._reach("slim")
            names = sorted(name for name in self._service.pages if name > last)[:PAGE]
            if not names:
                return
            last = names[-1]
            yield [self._service.listed(name) for name in names]

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        await self._reach("fetch")
        return [self._service.entry(name) for name in external_ids]

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        await self._reach("groups")
        for tag in sorted(self._service.groups):
            if tags is None or tag in tags:
                members, of = self._service.groups[tag]
                yield Group(tag, frozenset(members), frozenset(of))

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        self._service.listeners.append(react)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._service.listeners.remove(react)

    async def _reach(self, what: str) -> None:
        try:
            await self._process.reach("the source", what)
        except ConnectionError as error:
            raise Retryable("the source is away") from error


class _Nowhere:
    """Stands for a folder."""

    def __truediv__(self, _name: str) -> _Nowhere:
        return self

    def mkdir(self, **_: Any) -> None:
        return None

    def chmod(self, _mode: int) -> None:
        return None


class _Address:
    """Stands for the settings of Postgres, and for what they keep secret: a process's way to it."""

    def __init__(self, process: Process) -> None:
        self.dsn = self
        self.info = SimpleNamespace(dsn="host=simulation")
        """The connection's, for the names in lineage."""
        self._process = process

    def get_secret_value(self) -> Process:
        return self._process


async def _session(address: _Address, _name: str) -> Session:
    """Stands for ``connect_alone``."""
    process = address.get_secret_value()
    await process.reach("postgres", "connect")
    return process.pool.session()


@contextmanager
def connected() -> Iterator[None]:
    """Around any number of histories: leases are taken in memory, and signs of life are rare."""
    before = lease.connect_alone, instance.HEARTBEAT_SECONDS, instance.TAKEOVER_SECONDS  # type: ignore[attr-defined]
    lease.connect_alone = cast(Any, _session)  # type: ignore[attr-defined]
    instance.HEARTBEAT_SECONDS = instance.TAKEOVER_SECONDS = BEAT_SECONDS
    try:
        yield
    finally:
        lease.connect_alone, instance.HEARTBEAT_SECONDS, instance.TAKEOVER_SECONDS = before  # type: ignore[attr-defined]


class Connected:
    """The part of a world whose documents come from a source by connectors."""

    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self.service = Service(world.story, rng)
        self.instances: list[Instance] = []
        self._rng = rng
        self.alone = rng.random() < ALONE_SHARE
        """Nothing is compared with the ledger. (Where Postgres or Kafka loses something, comparison alone finds it.)"""
        self._backs = rng.choice((0.0, 0.5, 0.9))
        """How often the source changes while a runner is cut off."""
        self._regrouped: list[tuple[str, Collection[str], Collection[str]]] = []
        """Groups as they were before their changes."""
        self._swept = 0
        self._requested_at = 0.0
        self._compared = 0
        """Comparisons with the ledger that had ended when calm began."""
        self.claims = Claims(world, self.service)

    def runner(self, process: Process) -> Instance:
        """A runner of this source in this process."""
        world = self._world
        plan = Plan(
            name=world.story.source,
            tenant=world.story.tenant,
            kind="virtual",
            make=lambda _context: cast(Any, VirtualSource(self.service, process)),
            poll_seconds=POLL_SECONDS,
            sweep_seconds=SWEEP_SECONDS,
            groups_seconds=GROUPS_SECONDS,
        )
        services = Services(
            postgres=cast(Any, _Address(process)),
            pool=cast(Any, process.pool),
            producer=cast(Any, process.producer),
            metrics=world.metrics,
            folder=cast(Any, _Nowhere()),
        )
        runner = _Alone(plan, services, self._sweep_ended) if self.alone else Instance(plan, services)
        self.instances.append(runner)
        return runner

    # What happens at the source

    def change(self, kind: str, name: str, n: int) -> None:
        for item in self.service.change(kind, name, Random(n)):
            expected = self.upsert(item)
            self.claims.changed(item, expected)
            if expected is not None:
                self._world.oracle.published(expected)
            self._tell(Reaction(ids=[item]))

    def regroup(self, tag: str, members: Collection[str], of: Collection[str]) -> None:
        self._regrouped.append((tag, *self.service.groups.get(tag, ((), ()))))
        if members or of:
            self.service.groups[tag] = set(members), set(of)
        else:
            self.service.groups.pop(tag, None)
        self.claims.regrouped()
        self._tell(Reaction(groups=[tag]))

    def changes_meanwhile(self, seconds: float) -> None:
        """While a runner is cut off for so long, and soon after, the source may change, and be again what it was."""
        rng, loop = self._rng, self._world.loop
        if rng.random() < self._backs / 2:
            loop.call_later(rng.random() * 0.5 * seconds, self._changes, "rewrite", rng.getrandbits(16))
            loop.call_later(seconds * (1.0 + rng.random()), self._changes, "back", rng.getrandbits(16))
            return
        while rng.random() < self._backs:
            kind = rng.choice(("back", "back", "back", "rewrite", "groups"))
            loop.call_later(rng.random() * 1.5 * seconds, self._changes, kind, rng.getrandbits(16))

    def _changes(self, kind: str, n: int) -> None:
        world = self._world
        if world.faults.calm:
            return
        if kind == "groups":
            if self._regrouped:
                world._groups(*self._regrouped[-1])
        elif self.service.moved:
            world._source(kind, self.service.moved, n)

    def expire(self) -> None:
        """The source forgets cursors."""
        self.service.expired_before = len(self.service.history)

    def _tell(self, reaction: Reaction) -> None:
        """Events may be lost, and come twice."""
        while self._rng.random() < self.service.tells * 0.9:
            for react in list(self.service.listeners):
                self._world.later.append(asyncio.ensure_future(_react_later(react, reaction, self._rng.random())))

    # What must be

    def upsert(self, name: str) -> DocumentUpserted | None:
        page = self.service.pages.get(name)
        return None if page is None else self.service.story._upsert(name, page, page.version, None)

    def expected(self, name: str) -> DocumentUpserted | None:
        """The document as it shall be shown. Of one whose text cannot be had now, what was published last stays."""
        expected = self.upsert(name)
        if expected is None or not expected.acl_tags or name not in self.service.unreadable:
            return expected
        tables = self._world.database.tables
        key = (document_id(expected.tenant, expected.source, name),)
        d, body = tables["documents"].get(key), tables["document_bodies"].get(key)
        if d is None or body is None or d["deleted_at"] is not None or d["version"] is None:
            return None
        fields = {name: d[name] for name in ("title", "author", "media_type")}
        return expected.model_copy(update={**fields, "content": body["text"], "metadata": body["metadata"]})

    def calm(self) -> None:
        self._compared = self._comparisons()

    def look(self) -> None:
        """Sweep again, without waiting for the interval."""
        now = self._world.loop.time()
        if now < self._requested_at:
            return
        self._requested_at = now + CALM_SWEEP_SECONDS
        for runner in self.instances:
            if runner.source is not None:
                runner.activities["sweep"].trigger()
                runner.activities["groups"].trigger()

    async def _sweep_ended(self, _words: frozenset[str]) -> dict[str, Any]:
        self._swept += 1
        return {}

    def settled(self) -> bool:
        """Enough comparisons have ended since calm began, nothing is under way and nothing in doubt."""
        tables = self._world.database.tables
        return (
            self._comparisons() >= self._compared + COMPARISONS
            and all(
                name == "listen" or (activity.status.state == "idle" and not activity._wake.is_set())
                for runner in self.instances
                if runner.source is not None
                for name, activity in runner.activities.items()
            )
            and all(row["in_doubt_since"] is None for row in tables[ITEMS].values())
            and all(row["digest"] for row in tables[PRINCIPALS].values())
        )

    def fault(self) -> str | None:
        """Return the reason of an activity that met an error which is not the product's own, or None."""
        for runner in self.instances:
            for name, activity in (("start", runner.start), *((n, a.status) for n, a in runner.activities.items())):
                if "bug in the connector's code" in (activity.reason or ""):
                    return f"{name}: {activity.reason}"
        return None

    def open(self) -> str:
        """Return what is not settled yet."""
        tables = self._world.database.tables
        items = {key[2]: row["in_doubt_since"] for key, row in tables[ITEMS].items() if row["in_doubt_since"]}
        principals = [key[2] for key, row in tables[PRINCIPALS].items() if not row["digest"]]
        reasons = {
            name: (a.status.state, a.status.reason)
            for r in self.instances[-2:]
            for name, a in r.activities.items()
            if a.status.reason
        }
        done = self._comparisons() - self._compared
        return f"{done} comparisons, in doubt {items} {principals}, activities {reasons}"

    def finally_equal(self, *, undisturbed: bool) -> None:
        """Memberships are as the source says, and where nothing failed nothing had to be repaired."""
        world = self._world
        assert self.claims.overclaim is None, self.claims.overclaim
        world.tally["claims"] += self.claims.checked
        for person in PERSONS:
            row = world.database.tables["memberships"].get((world.story.tenant, person, world.story.source))
            held, may = set(row["groups"]) if row else set(), self.service.held_by(person)
            theirs = {held_tag.removeprefix(f"{world.story.source}/") for held_tag in held}
            assert theirs <= may, f"LEAKED: {person} holds {sorted(theirs - may)} without the source saying so"
            assert may <= theirs, f"HIDDEN: {person} does not hold {sorted(may - theirs)}"
        repaired = [row["difference"] for row in world.database.tables[ITEMS].values() if row["difference"]]
        assert not undisturbed or not repaired, f"NEEDLESS: published again although nothing failed: {repaired}"

    def _comparisons(self) -> int:
        """How many sweeps have ended, with the comparison after them."""
        if self.alone:
            return self._swept
        row = self._world.database.tables[HOLDERS].get((self._world.story.tenant, self._world.story.source))
        return 0 if row is None else int(row["comparisons"])


class _Alone(Instance):
    """A runner that never compares with the ledger: the safeguard behind all others is taken away."""

    def __init__(self, plan: Plan, services: Services, instead: Callable[[frozenset[str]], Awaitable[Any]]) -> None:
        super().__init__(plan, services)
        self._instead = instead

    def _wire(self, *arguments: Any) -> Freshness:
        freshness = super()._wire(*arguments)
        self.activities["reconcile"]._run = self._instead
        begin = freshness.begin

        async def begin_compared() -> None:
            await begin()
            await freshness.equals_ledger(END)  # nothing was published that no runner has recorded

        freshness.begin = begin_compared  # type: ignore[method-assign]
        return freshness


async def _react_later(react: Callable[[Reaction], Awaitable[None]], reaction: Reaction, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await react(reaction)
