"""One instance of a source, running: its lease, its activities, and what people ask of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import structlog

from connectors.clock import Clock
from connectors.protocol import Problem
from connectors.runner.activity import Activity, Paused, Status, explained, is_cancelled, left_seconds
from connectors.runner.crawl import Crawl
from connectors.runner.guard import MASS_COUNT
from connectors.runner.identities import Identities
from connectors.runner.plan import Plan, Services
from connectors.runner.publish import Publisher
from connectors.runner.reconcile import KINDS, Reconcile
from connectors.runner.rows import LeaseLost, Rows
from connectors.runner.state import Ask, Lease, PostgresMemory, State, lease
from connectors.runner.sweep import Sweep
from connectors.source import Context, Reaction, Request, Source
from connectors.web import throttled
from pipeline.core.errors import Misconfigured, Retryable

log = structlog.get_logger()

BEAT_SECONDS = 1.0
TAKEOVER_SECONDS = 5.0
"""How often an instance that another process runs is tried."""
PROBLEMS_EVERY = 20
"""Beats between two counts of documents that cannot be published."""
MANY = 1_000
"""Documents or tags named by events and not yet read: more than this, and everything is looked at instead."""


class Instance:
    """Run it with ``run``; it ends only by cancellation. What it cannot do now it waits for, and says so."""

    def __init__(self, plan: Plan, services: Services) -> None:
        self.plan = plan
        self._services = services
        self.source: Source | None = None
        """While this process holds the instance."""
        self.start = Status()
        """Of getting to where the activities run."""
        services.metrics.connector_waiting.labels(plan.name, "start").set_function(self.start.needs_somebody)
        self.activities: dict[str, Activity] = {}
        self.published = Counter[str]()
        """By outcome, since this process runs it."""
        self._publisher: Publisher | None = None
        self._sweep: Sweep | None = None
        self._identities: Identities | None = None
        self._reconcile: Reconcile | None = None
        self.held_elsewhere = False
        """Another process runs it."""
        self._answered: set[int] = set()
        self._beats_done = 0
        self.unpublishable: dict[str, int] = {}
        """Documents with a problem, by its code."""
        self._not_paused = asyncio.Event()

    async def run(self) -> None:
        failures = 0
        while not is_cancelled():
            wait = TAKEOVER_SECONDS
            try:
                async with lease(
                    self._services.postgres,
                    self.plan.tenant,
                    self.plan.name,
                    self.plan.kind,
                    address=self._services.address,
                    access_every_seconds=max(self.plan.sweep_seconds, self.plan.groups_seconds),
                ) as held:
                    self.held_elsewhere = held is None
                    if held is None:
                        self.start.become("waiting", "another process runs it")
                    else:
                        failures = 0
                        await self._hold(held)
            except LeaseLost as lost:
                self.start.become("waiting", str(lost))
            except Retryable as error:
                self.start.become("waiting", explained(error))
                wait, failures = min(TAKEOVER_SECONDS, 0.2 * 2**failures), failures + 1
            except Exception as error:  # noqa: BLE001 # one instance's trouble is not the others'
                self.start.become("needs attention", explained(error))
                log.warning("connector_needs_attention", source=self.plan.name, error=explained(error))
                wait = min(self.plan.poll_seconds, 60.0)
            await asyncio.sleep(wait)
        raise asyncio.CancelledError

    async def _hold(self, held: Lease) -> None:
        """Until the lease is lost. Raises what made it end."""
        state = State(self._services.pool, held.holder)
        try:
            rows = Rows(self._services.pool, held.holder)
            clock = Clock(await rows.last_stamp())
            throttled.set(lambda name, seconds: self._services.metrics.source_throttled.labels(name).inc(seconds))
            source = self.plan.make(self._context())
        except Misconfigured as error:
            self.start.become("needs attention", explained(error))
            await state.beat({"start": asdict(self.start)}, {}, [])
            raise
        try:
            self._wire(source, state, rows, clock, (await state.reading()).activities)
            await self._look_at_doubts(rows)
            self.start.become("running")
            self.source = source
            # A task of its own: a TaskGroup of Python 3.11 that ends by an error leaves its task looking cancelled.
            await asyncio.create_task(self._together(held, state), name=self.plan.name)
        except BaseExceptionGroup as failed:
            raise _first(failed) from failed
        finally:
            self.source = None
            with suppress(Retryable, LeaseLost):
                if self.activities:
                    await self._beat(state)  # what was published since the last one counts
                await state.leave()
            await source.close()

    async def _together(self, held: Lease, state: State) -> None:
        """Until one of them raises: then all end."""
        async with asyncio.TaskGroup() as group:
            for activity in self.activities.values():
                group.create_task(activity.loop(), name=f"{self.plan.name}:{activity.name}")
            group.create_task(self._beats(held, state))

    def _context(self) -> Context:
        folder = self._services.folder / self.plan.name
        folder.mkdir(parents=True, exist_ok=True)
        return Context(
            name=self.plan.name,
            tenant=self.plan.tenant,
            folder=folder,
            memory=PostgresMemory(self._services.pool, self.plan.tenant, self.plan.name),
            events_url=self.plan.events_url(self._services.events_url),
            postgres=self._services.pool,
        )

    def _wire(
        self, source: Source, state: State, rows: Rows, clock: Clock, before: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """before: what the activities' statuses were when the instance was last run."""
        publisher = Publisher(self._services.producer, rows)
        crawl = Crawl(
            source,
            state,
            publisher,
            clock,
            between_pages=self._between_pages,
            loaded=lambda: self.activities["sweep"].ask(),
            gap=lambda: self.activities["sweep"].ask("gap"),
        )
        sweep = Sweep(
            source,
            state,
            publisher,
            clock,
            between_pages=self._between_pages,
            unrevised=lambda: self.activities["full"].ask("again"),
            done=lambda: self.activities["reconcile"].ask(),
        )
        identities = Identities(
            source,
            self._services.producer,
            self._services.pool,
            state.holder,
            clock,
            between_pages=self._between_pages,
        )

        def look_again(ids: Collection[str], groups: bool) -> None:
            if len(ids) > MASS_COUNT:
                self.activities["sweep"].ask()  # it reads what is in doubt, and deletes much only when told to
            elif ids:
                self.activities["events"].ask(*ids)
            if groups:
                self.activities["groups"].ask()

        reconcile = Reconcile(
            self._services.pool,
            state,
            publisher,
            identities,
            clock,
            between_pages=self._between_pages,
            look_again=look_again,
        )

        async def listen(_words: frozenset[str]) -> None:
            await source.listen(self.react)

        async def answer(asks: Sequence[int], outcome: Mapping[str, Any]) -> None:
            await state.answer(asks, outcome)
            self._answered.update(asks)

        def activity(name: str, run: Any, every: float | None, *, first: float = 0.0, rests: bool = False) -> None:
            self.activities[name] = one = Activity(
                name,
                run,
                every_seconds=every,
                first_in_seconds=first,
                rests=rests,
                on_done=answer,
                attention_seconds=min(self.plan.poll_seconds, 60.0),
                not_paused=self._not_paused,
            )
            one.status.succeeded_at = before.get(name, {}).get("succeeded_at")

        plan = self.plan
        activity("full", crawl.full, None)
        activity("changes", crawl.changes, plan.poll_seconds, rests=True)
        first = left_seconds(before.get("sweep"), plan.sweep_seconds)
        activity("sweep", sweep.run, plan.sweep_seconds, first=first, rests=True)
        activity("groups", identities.read_all, plan.groups_seconds, rests=True)
        activity("tags", identities.read_some, None)
        activity("events", crawl.fetch, None)
        activity("reconcile", reconcile.run, None)
        activity("listen", listen, None)
        self.activities["full"].ask()
        self.activities["listen"].ask()
        for kind in KINDS:  # an increase from nothing is not seen
            self._services.metrics.reconciled.labels(self.plan.name, kind)
        self._publisher, self._sweep, self._identities, self._reconcile = publisher, sweep, identities, reconcile

    async def _look_at_doubts(self, rows: Rows) -> None:
        """The runner before this one may have published them, and was cut off before it could say so."""
        ids = await rows.in_doubt(MANY + 1)
        if len(ids) > MANY:
            self.activities["sweep"].ask()
        elif ids:
            self.activities["events"].ask(*ids)

    # What the world says

    async def react(self, reaction: Reaction) -> None:
        """Have it done, soon. Doubled or out of order changes nothing: only what to read again is kept."""
        if not self.activities:
            return  # not running here now: whoever takes over reads everything that matters
        if len(reaction.ids) + self.activities["events"].waiting > MANY:
            self.activities["changes"].ask()
            self.activities["sweep"].ask()
        elif reaction.ids:
            self.activities["events"].ask(*reaction.ids)
        if len(reaction.groups) + self.activities["tags"].waiting > MANY:
            self.activities["groups"].ask()
        elif reaction.groups:
            self.activities["tags"].ask(*reaction.groups)
        if reaction.changes:
            self.activities["changes"].ask()
        if reaction.sweep:
            self.activities["sweep"].ask()

    async def on_event(self, request: Request) -> Reaction:
        """Raises Refused; Retryable when the instance does not run here at present."""
        if self.source is None:
            raise Retryable(f"connector {self.plan.name} is not running yet: {self.start.reason or 'starting'}")
        reaction = await self.source.on_event(request)
        await self.react(reaction)
        return reaction

    # What people say

    async def _beats(self, held: Lease, state: State) -> None:
        while not is_cancelled():
            await held.check()
            with suppress(Retryable):  # the lease stands: the next beat tells more
                await self._beat(state)
            await asyncio.sleep(BEAT_SECONDS)
        raise asyncio.CancelledError

    async def _beat(self, state: State) -> None:
        assert self._publisher is not None
        counts = Counter(self._publisher.counts)
        paused, asks = await state.beat(
            {name: activity.shown() for name, activity in self.activities.items()},
            counts,
            [{"code": one.code, "message": one.message} for one in self.problems()],
        )
        self._publisher.counts -= counts
        self.published += counts
        self._measured(counts)
        if self._beats_done % PROBLEMS_EVERY == 0:
            self.unpublishable = await self._publisher.rows.problems()
        self._beats_done += 1
        if paused:
            self._not_paused.clear()
        else:
            self._not_paused.set()
        for ask in asks:
            if ask.id not in self._answered:
                self._dispatch(ask)

    def _dispatch(self, ask: Ask) -> None:
        match ask.action:
            case "document":
                self.activities["events"].ask(ask.argument or "", ask=ask.id)
            case "allow_mass_delete":
                self.activities["sweep"].ask("allow", ask=ask.id)
            case "load":
                self.activities["full"].ask(ask=ask.id)
            case "full":
                self.activities["full"].ask("again", ask=ask.id)
            case name if name in self.activities:
                self.activities[name].ask(ask=ask.id)
            case name:  # asked by a newer version than this
                log.warning("connector_ask_unknown", source=self.plan.name, action=name)

    def _measured(self, counts: Counter[str]) -> None:
        metrics, source = self._services.metrics, self.plan.name
        for outcome, n in counts.items():
            metrics.connector_outcomes.labels(source, outcome).inc(n)
        if self._reconcile is not None:
            for kind, n in self._reconcile.counts.items():
                metrics.reconciled.labels(source, kind).inc(n)
            self._reconcile.counts.clear()
        for name, activity in self.activities.items():
            metrics.connector_waiting.labels(source, name).set(activity.status.state in ("waiting", "needs attention"))
            if (age := activity.status.age_seconds()) is not None:
                metrics.connector_age.labels(source, name).set(age)
        metrics.connector_problems.labels(source, "source").set(len(self.problems()))
        metrics.connector_problems.labels(source, "documents").set(sum(self.unpublishable.values()))

    def problems(self) -> list[Problem]:
        """Of the instance as a whole."""
        found = [
            *(self._sweep.problems if self._sweep else ()),
            *(self._identities.problems if self._identities else ()),
            *(self._reconcile.problems if self._reconcile else ()),
        ]
        found += [
            Problem(self.plan.name, "needs_attention", f"{name}: {one.status.reason}")
            for name, one in self.activities.items()
            if one.status.state == "needs attention"
        ]
        return found

    def report(self) -> dict[str, Any]:
        """For the worker's /status."""
        return {
            "name": self.plan.name,
            "tenant": self.plan.tenant,
            "kind": self.plan.kind,
            "start": asdict(self.start),
            "activities": {name: one.shown() for name, one in self.activities.items()},
            "problems": [{"code": one.code, "message": one.message} for one in self.problems()],
            "published": dict(self.published),
        }

    def _between_pages(self) -> None:
        if not self._not_paused.is_set():
            raise Paused


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What ended the others."""
    error: BaseException = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
