"""One running instance of a source: its lease, its activities, and the commands of operators."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from typing import Any, cast

import structlog

from connectors.clock import Clock
from connectors.extraction.turns import reader
from connectors.protocol import Problem, printable
from connectors.runner.activity import Activity, Paused, Status, explained, is_cancelled, seconds_until_due
from connectors.runner.crawl import Crawl
from connectors.runner.freshness import Freshness, Listing
from connectors.runner.guard import MASS_DELETE_DOCUMENTS
from connectors.runner.identities import Identities
from connectors.runner.isolate import Isolated
from connectors.runner.plan import Plan, Services
from connectors.runner.publish import Publisher
from connectors.runner.reconcile import KINDS, Reconcile
from connectors.runner.rows import LeaseLost, Removed, Rows
from connectors.runner.state import Command, Lease, PostgresMemory, State, lease
from connectors.runner.sweep import Sweep
from connectors.runner.unfinished import BY_EVENT, Unfinished
from connectors.set_aside import SetAside
from connectors.source import Context, Reaction, Request, Source
from connectors.web import throttled
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.observability import lineage
from pipeline.stores import datasets
from pipeline.stores.postgres import translated

log = structlog.get_logger()

HEARTBEAT_SECONDS = 1.0
TAKEOVER_SECONDS = 5.0
"""Pause between two attempts to take over an instance that another process runs."""
PROBLEM_COUNT_HEARTBEATS = 20
"""The number of heartbeats between two counts of the documents that cannot be published."""
MAX_PENDING_DOCUMENTS, MAX_PENDING_TAGS = 10_000, 1_000
"""The most documents and tags that events have named and that are not read yet; with more of them everything is read
instead. Documents are fetched many at once, which costs a source less than a sweep; tags are read one by one."""


class Instance:
    """One instance, which ``run`` runs until it is cancelled. When something is unavailable it waits, and its status
    says for what."""

    def __init__(self, plan: Plan, services: Services) -> None:
        self.plan = plan
        self._services = services
        self.source: Source | None = None
        """The source, while this process runs the instance."""
        self.start = Status()
        """The status of the start, up to where the activities run."""
        services.metrics.connector_waiting.labels(plan.name, "start").set_function(self.start.needs_attention)
        self.activities: dict[str, Activity] = {}
        self.published = Counter[str]()
        """Entries by outcome, since this process runs the instance."""
        self.loaded: Mapping[str, Any] = {}
        """The outcome of the last full read, since this process runs the instance."""
        self._publisher: Publisher | None = None
        self._set_aside = SetAside()
        self._isolated: Isolated | None = None
        self._documents = Status()
        """Needs attention while nearly all documents are set aside because of their data."""
        self._sweep: Sweep | None = None
        self._identities: Identities | None = None
        self._reconcile: Reconcile | None = None
        self._unfinished: Unfinished | None = None
        self.runs_elsewhere = False
        """Whether another process runs it."""
        self._completed_commands: set[int] = set()
        self._heartbeats_done = 0
        self.unpublishable: dict[str, int] = {}
        """Documents with a problem, by its code."""
        self._not_paused = asyncio.Event()
        self._run: lineage.Run | None = None

    async def run(self) -> None:
        reader.set(f"{self.plan.tenant}/{self.plan.name}")
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
                ) as current:
                    self.runs_elsewhere = current is None
                    if current is None:
                        self.start.enter("waiting", "another process runs it")
                    else:
                        failures = 0
                        await self._run_with(current)
            except LeaseLost as lost:
                self.start.enter("waiting", str(lost))
                if isinstance(lost, Removed):
                    with suppress(Retryable):  # the next attempt tries again
                        await self._clear_folder()
            except Retryable as error:
                self.start.enter("waiting", explained(error))
                wait, failures = min(TAKEOVER_SECONDS, 0.2 * 2**failures), failures + 1
            except Exception as error:  # noqa: BLE001 # a fault of one instance must not end the others
                self.start.enter("needs attention", explained(error))
                log.warning("connector_needs_attention", source=self.plan.name, error=explained(error))
                wait = min(self.plan.poll_seconds, 60.0)
            await asyncio.sleep(wait)
        raise asyncio.CancelledError

    async def _run_with(self, current: Lease) -> None:
        """Run the activities until the lease is lost. Raises the error that ended them."""
        state = State(self._services.pool, current.holder)
        self._unfinished = None  # that of an earlier lease knows nothing of what others have stored since
        try:
            rows = Rows(self._services.pool, current.holder)
            clock = Clock(await rows.last_stamp())
            throttled.set(lambda name, seconds: self._services.metrics.source_throttled.labels(name).inc(seconds))
            source = self.plan.make(self._context())
        except Misconfigured as error:
            self.start.enter("needs attention", explained(error))
            await state.heartbeat({"start": asdict(self.start)}, {}, [])
            raise
        try:
            freshness = self._wire(source, state, rows, clock, (await state.read_progress()).activities)
            await freshness.begin()
            await self._read_in_doubt(rows)
            unfinished = Unfinished(self._memory(), self.activities)
            await unfinished.resume()
            self._unfinished = unfinished  # not before: the last heartbeat would remove what was not read
            self.start.enter("running")
            self.source = source
            with self._reported("connector", "CONNECTOR") as self._run:
                # A task of its own: a TaskGroup of Python 3.11 that ends by an error leaves its task looking cancelled.
                await asyncio.create_task(self._run_activities(current, state, freshness), name=self.plan.name)
        except BaseExceptionGroup as failed:
            raise _first(failed) from failed
        finally:
            self.source = None
            with suppress(Retryable, LeaseLost):
                if self.activities:
                    await self._heartbeat(state)  # with the counts since the last one
                await state.mark_stopped()
            await source.close()

    async def _run_activities(self, current: Lease, state: State, freshness: Freshness) -> None:
        """Run all activities, the heartbeat and the looks at what is applied until one of them raises; then end all."""
        async with asyncio.TaskGroup() as group:
            for activity in self.activities.values():
                group.create_task(activity.loop(), name=f"{self.plan.name}:{activity.name}")
            group.create_task(self._send_heartbeats(current, state))
            group.create_task(freshness.run())

    async def _clear_folder(self) -> None:
        """Delete what the source of a removed instance kept on disk: a clone holds every text that the repository ever
        had. Originals of uploads stay as long as their rows do, because nobody else has them. Raises Retryable."""
        folder = self._services.folder / self.plan.name
        if self.plan.name in (".", "..") or not folder.is_dir():
            return
        with translated("uploads"):
            async with self._services.pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT EXISTS (SELECT FROM uploads WHERE tenant = %s AND source = %s)",
                    [self.plan.tenant, self.plan.name],
                )
                row = await cursor.fetchone()
        if row is not None and not row[0]:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _reported(self, name: str, type_: lineage.JobType) -> AbstractContextManager[lineage.Run]:
        """A run in lineage. A load is a part of the connector's run, which lasts for as long as the lease."""
        plan = self.plan
        return lineage.job(
            f"{name}.{plan.tenant}.{plan.name}",
            type_,
            inputs=[datasets.source(plan.kind, plan.tenant, plan.name)],
            outputs=[datasets.ledger(self._services.postgres)],
            parent=self._run if type_ == "LOAD" else None,
            aborts=Paused,
        )

    def _memory(self) -> PostgresMemory:
        return PostgresMemory(self._services.pool, self.plan.tenant, self.plan.name)

    def _context(self) -> Context:
        folder = self._services.folder / self.plan.name
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # a volume's may be another user's, or know no modes
            folder.chmod(0o700)  # clones, rows and downloads hold what few may read
        return Context(
            name=self.plan.name,
            tenant=self.plan.tenant,
            folder=folder,
            memory=self._memory(),
            events_url=self.plan.events_url(self._services.events_url),
            set_aside=self._set_aside,
            postgres=self._services.pool,
        )

    def _wire(
        self, source: Source, state: State, rows: Rows, clock: Clock, before: Mapping[str, Mapping[str, Any]]
    ) -> Freshness:
        """Create the activities. Returns what follows how far they are applied. before: their statuses when the
        instance was last run."""

        async def poll_by_sweep() -> Mapping[str, Any]:
            outcome = await sweep.run(frozenset({"poll"}))
            self.activities["sweep"].count_as_run()
            return outcome

        def note_sweep(listing: Listing) -> None:
            if not self._set_aside.reasons():
                freshness.listed("documents", listing)

        freshness = Freshness(self._services.pool, state.holder, every_seconds=self.plan.sweep_seconds)
        self._isolated = Isolated(source, self.plan.name) if self.plan.isolates_data else None
        reading = cast("Source", self._isolated or source)
        publisher = Publisher(self._services.producer, rows)
        crawl = Crawl(
            reading,
            state,
            publisher,
            clock,
            between_pages=self._between_pages,
            on_loaded=lambda: self.activities["sweep"].trigger(),
            on_gap=lambda: self.activities["sweep"].trigger("gap"),
            on_fetched=lambda ids: self.activities["events"].finish(ids),
            sweep=poll_by_sweep,
        )
        sweep = Sweep(
            reading,
            state,
            publisher,
            clock,
            set_aside=self._set_aside,
            between_pages=self._between_pages,
            on_no_revisions=lambda: self.activities["full"].trigger("again"),
            on_done=lambda: self.activities["reconcile"].trigger(),
            on_complete=note_sweep,
        )
        identities = Identities(
            source,
            self._services.producer,
            self._services.pool,
            state.holder,
            clock,
            between_pages=self._between_pages,
        )

        def read_again(ids: Collection[str], groups: bool) -> None:
            if len(ids) > MASS_DELETE_DOCUMENTS:
                self.activities["sweep"].trigger()  # it fetches what is in doubt, and asks before a mass deletion
            elif ids:
                self.activities["events"].trigger(*ids)
            if groups:
                self.activities["groups"].trigger()

        reconcile = Reconcile(
            self._services.pool,
            state,
            publisher,
            identities,
            clock,
            between_pages=self._between_pages,
            read_again=read_again,
            on_equal=freshness.equals_ledger,
        )

        async def load(arguments: frozenset[str]) -> Mapping[str, Any] | None:
            is_due = lineage.is_on() and ("again" in arguments or (await state.read_progress()).full_state != "done")
            if not is_due:
                tally = await crawl.full(arguments)
            else:
                with self._reported("load", "LOAD") as run:
                    tally = await crawl.full(arguments)
                    run.wrote((tally or {}).get("upserted", 0))
            self.loaded = tally or self.loaded
            if tally is not None and self._set_aside.reasons():
                self.activities["sweep"].trigger()  # it reads again what the load could not
            return tally

        async def read_groups(arguments: frozenset[str]) -> Mapping[str, Any]:
            began = await freshness.now()
            outcome = await identities.read_all(arguments)
            if identities.is_complete and not (identities.is_resumed or self._set_aside.reasons()):
                freshness.listed("groups", Listing(began))
            return outcome

        async def compare_with_ledger(arguments: frozenset[str]) -> Mapping[str, Any] | None:
            await identities.find_unheld()
            return await reconcile.run(arguments)

        async def listen(_arguments: frozenset[str]) -> None:
            await source.listen(self._hear)

        async def finish_commands(ids: Sequence[int], outcome: Mapping[str, Any]) -> None:
            await state.finish_commands(ids, outcome)
            self._completed_commands.update(ids)

        def add(name: str, run: Any, every: float | None, *, first: float = 0.0, rests: bool = False) -> None:
            self.activities[name] = activity = Activity(
                name,
                run,
                every_seconds=every,
                first_in_seconds=first,
                rests=rests,
                on_done=finish_commands,
                attention_seconds=min(self.plan.poll_seconds, 60.0),
                not_paused=self._not_paused,
            )
            activity.status.succeeded_at = before.get(name, {}).get("succeeded_at")

        plan = self.plan
        add("full", load, None)
        add("changes", crawl.changes, plan.poll_seconds, rests=True)
        first = seconds_until_due(before.get("sweep"), plan.sweep_seconds)
        add("sweep", sweep.run, plan.sweep_seconds, first=first, rests=True)
        add("groups", read_groups, plan.groups_seconds, rests=True)
        add("tags", identities.read_some, None)
        add("events", crawl.fetch, None)
        add("reconcile", compare_with_ledger, None)
        add("listen", listen, None)
        self.activities["full"].trigger()
        self.activities["listen"].trigger()
        for kind in KINDS:  # Prometheus does not see an increase from an absent series
            self._services.metrics.reconciled.labels(self.plan.name, kind)
        self._publisher, self._sweep, self._identities, self._reconcile = publisher, sweep, identities, reconcile
        return freshness

    async def _read_in_doubt(self, rows: Rows) -> None:
        """Read the documents in doubt: the last runner may have published them and ended before it could record it."""
        ids = await rows.in_doubt(MAX_PENDING_DOCUMENTS + 1)
        if len(ids) > MAX_PENDING_DOCUMENTS:
            self.activities["sweep"].trigger()
        elif ids:
            self.activities["events"].trigger(*ids)

    # Events of the source

    async def react(self, reaction: Reaction) -> None:
        """Trigger what an event asks for, and store it for the runner that takes over if this one is killed. Repeated
        events and events out of order do no harm: they only say what to read again. Raises Retryable if it could not be
        stored."""
        if not self.activities:
            return  # not running here now: the process that takes over reads everything that is due
        if len(reaction.ids) + self.activities["events"].pending > MAX_PENDING_DOCUMENTS:
            self.activities["changes"].trigger()
            self.activities["sweep"].trigger(BY_EVENT)
        elif reaction.ids:
            self.activities["events"].trigger(*reaction.ids)
        if len(reaction.groups) + self.activities["tags"].pending > MAX_PENDING_TAGS:
            self.activities["groups"].trigger()
        elif reaction.groups:
            self.activities["tags"].trigger(*reaction.groups)
        if reaction.changes:
            self.activities["changes"].trigger()
        if reaction.sweep:
            self.activities["sweep"].trigger(BY_EVENT)
        if self._unfinished is not None:
            await self._unfinished.save()

    async def _hear(self, reaction: Reaction) -> None:
        with suppress(Retryable):  # the next heartbeat stores it
            await self.react(reaction)

    async def on_event(self, request: Request) -> Reaction:
        """Pass a request to the source and trigger its reaction, which is stored before this returns. Raises Refused,
        and Retryable while the instance does not run here."""
        if self.source is None:
            raise Retryable(f"connector {self.plan.name} is not running yet: {self.start.reason or 'starting'}")
        reaction = await self.source.on_event(request)
        await self.react(reaction)
        return reaction

    # Commands of operators

    async def _send_heartbeats(self, current: Lease, state: State) -> None:
        while not is_cancelled():
            await current.check()
            with suppress(Retryable):  # the lease stands: the next heartbeat carries the counts
                await self._heartbeat(state)
            await asyncio.sleep(HEARTBEAT_SECONDS)
        raise asyncio.CancelledError

    async def _heartbeat(self, state: State) -> None:
        """Write the status, and take the commands that wait."""
        assert self._publisher is not None
        counts = Counter(self._publisher.counts)
        failing = self._isolated.failing if self._isolated else None
        self._documents.enter("needs attention" if failing else "idle", failing)
        paused, commands = await state.heartbeat(
            {name: asdict(status) for name, status in self._statuses().items()},
            counts,
            [{"code": problem.code, "message": printable(problem.message)} for problem in self.problems()],
        )
        self._publisher.counts -= counts
        self.published += counts
        self._update_metrics(counts)
        if self._heartbeats_done % PROBLEM_COUNT_HEARTBEATS == 0:
            self.unpublishable = await self._publisher.rows.problems()
        self._heartbeats_done += 1
        if paused:
            self._not_paused.clear()
        else:
            self._not_paused.set()
        for command in commands:
            if command.id not in self._completed_commands:
                self._dispatch(command)
        if self._unfinished is not None:  # after the row was written: only the holder of the lease gets here
            await self._unfinished.prune()

    def _dispatch(self, command: Command) -> None:
        match command.action:
            case "document":
                self.activities["events"].trigger(command.argument or "", command=command.id)
            case "allow_mass_delete":
                self.activities["sweep"].trigger("allow", command=command.id)
            case "load":
                self.activities["full"].trigger(command=command.id)
            case "full":
                self.activities["full"].trigger("again", command=command.id)
            case name if name in self.activities:
                self.activities[name].trigger(command=command.id)
            case name:  # the command of a newer version
                log.warning("connector_command_unknown", source=self.plan.name, action=name)

    def _update_metrics(self, counts: Counter[str]) -> None:
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
        metrics.connector_waiting.labels(source, "documents").set(self._documents.needs_attention())
        metrics.connector_problems.labels(source, "source").set(len(self.problems()))
        metrics.connector_problems.labels(source, "documents").set(sum(self.unpublishable.values()))

    def _statuses(self) -> dict[str, Status]:
        """Return the status of each activity, and that of the documents while it needs attention."""
        statuses = {name: activity.status for name, activity in self.activities.items()}
        return statuses | ({"documents": self._documents} if self._documents.needs_attention() else {})

    def problems(self) -> list[Problem]:
        """Return the problems of the instance as a whole, beginning with what stops it."""
        return [
            *(
                Problem(self.plan.name, "needs_attention", f"{name}: {status.reason}")
                for name, status in self._statuses().items()
                if status.needs_attention()
            ),
            *(self._isolated.problems if self._isolated else ()),
            *(self._sweep.problems if self._sweep else ()),
            *(self._reconcile.problems if self._reconcile else ()),
            *(self._identities.problems if self._identities else ()),
            *self._set_aside.problems(self.plan.name),
        ]

    def report(self) -> dict[str, Any]:
        """Return the part of the worker's /status that describes this instance."""
        return {
            "name": self.plan.name,
            "tenant": self.plan.tenant,
            "kind": self.plan.kind,
            "start": asdict(self.start),
            "activities": {name: asdict(status) for name, status in self._statuses().items()},
            "problems": [{"code": problem.code, "message": problem.message} for problem in self.problems()],
            "published": dict(self.published),
        }

    def _between_pages(self) -> None:
        if not self._not_paused.is_set():
            raise Paused


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that ended the other tasks of the group."""
    error: BaseException = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
