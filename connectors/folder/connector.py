"""The folder connector: sweeps files of this machine, watches them, and compares what it published with the ledger.

Events of the operating system are hints about where to look; the state of the disk decides.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from connectors.clock import Clock
from connectors.folder.access import FILE, is_skipped
from connectors.folder.checkpoint import Checkpoint, Intent
from connectors.folder.options import FolderOptions
from connectors.folder.sweep import Sweep
from connectors.folder.walk import is_within, root_problem
from connectors.protocol import Problem, Progress, ScanReport
from connectors.runner.reconcile import (
    MAX_REPAIRS,
    DocumentComparison,
    Key,
    LedgerComparison,
    StoredDifference,
    compare_all,
    follow_ledger,
    may_repair,
    stored_difference,
)
from connectors.runner.rows import Holder, Rows
from pipeline.core.errors import Retryable
from pipeline.kafka.producer import Producer

__all__ = ["FolderConnector", "FolderOptions", "Problem", "Progress", "ScanReport"]

log = structlog.get_logger()

PROGRAM = (sys.executable, "-P", "-m", "connectors.folder.follow")
START_SECONDS = 5.0
"""How long a scan waits until folders are followed, so that it misses no change. A mount that does not answer takes
longer."""
END_SECONDS = 2.0
MAX_LINE_BYTES = 1024 * 1024
MAX_HINTS = 500
"""With more changed paths than this at once, a scan of everything is cheaper."""
RESTART_SECONDS = 5.0
"""First pause before a folder that could not be followed is followed again."""
RETRY_SECONDS = 10.0
"""Pause of ``watch`` while Kafka or Postgres is away."""


class Hints:
    """Collects changed paths under the roots while it is open. Law: the next scan finds every change that is missed."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = list(roots)
        self._changed: set[str] = set()
        self._everything = False
        self._has_changes = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._not_yet: set[str] = set()
        """Folders of which it is not known yet whether they can be followed."""
        self._started = asyncio.Event()
        self._problems: dict[str, Problem] = {}
        """By folder."""

    async def __aenter__(self) -> Self:
        self._following = asyncio.create_task(self._follow())
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._started.wait()
        except TimeoutError:
            self._started.set()  # the caller scans from now on
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def next(self, stop: asyncio.Event, within_seconds: float) -> list[tuple[str, str]] | None:
        """Return (root, target) of what changed, as soon as something changes; None: scan everything."""
        waiting = [asyncio.create_task(self._has_changes.wait()), asyncio.create_task(stop.wait())]
        await asyncio.wait(waiting, timeout=within_seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        changed, self._changed = self._changed, set()
        everything, self._everything = self._everything, False
        self._has_changes.clear()
        if everything or not changed or len(changed) > MAX_HINTS:
            return None
        return self._targets(changed)

    def lose(self) -> None:
        """The targets returned last could not be scanned: the next call returns None."""
        self._everything = True

    def problems(self) -> list[Problem]:
        """Return folders that cannot be followed at present."""
        return list(self._problems.values())

    def _targets(self, changed: set[str]) -> list[tuple[str, str]]:
        """A changed ``.penstock.toml`` concerns its whole folder; a path within another target is scanned with that."""
        paths = sorted(os.path.dirname(path) if os.path.basename(path) == FILE else path for path in changed)
        targets: list[tuple[str, str]] = []
        for path in paths:
            for root in self._roots:
                target = path if is_within(path, root) else root if path == os.path.dirname(root) else None
                if target and not any(r == root and is_within(target, t) for r, t in targets):
                    targets.append((root, target))
        return targets

    async def _follow(self) -> None:
        """Read what ``connectors.folder.follow`` prints, and start it again when it ends. Until then scans find the
        changes."""
        while True:
            reason = "its process ended"
            try:
                await self._read()
            except (OSError, ValueError) as error:  # no process can be started, or it ended within a line
                reason = f"{reason}: {error}"
            self._started.set()
            self._problems = {root: _not_watched(root, reason) for root in self._roots}
            await asyncio.sleep(RESTART_SECONDS)

    async def _read(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *PROGRAM,
            str(RESTART_SECONDS),
            *self._roots,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                self._take(json.loads(line))
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()

    def _take(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"changed": path}:
                if self._concerns(path):
                    self._changed.add(path)
                    self._has_changes.set()
            case {"following": folders}:
                self._not_yet, self._problems = set(folders), {}
            case {"followed": folder}:
                if self._started.is_set():  # what changed before this was not noticed
                    self._everything = True
                    self._has_changes.set()
                self._problems.pop(folder, None)
                self._know(folder)
            case {"failed": folder, "reason": reason}:
                self._problems[folder] = _not_watched(folder, reason)
                self._know(folder)

    def _know(self, folder: str) -> None:
        self._not_yet.discard(folder)
        if not self._not_yet:
            self._started.set()

    def _concerns(self, path: str) -> bool:
        """Whether the path may be a document under a root, or the rules for one."""
        for root in self._roots:
            if path in (root, os.path.join(os.path.dirname(root), FILE)):
                return True
            if is_within(path, root):
                folder, name = os.path.split(path)
                if not is_skipped(folder if name == FILE else path, root):
                    return True
        return False


def _not_watched(folder: str, reason: str) -> Problem:
    return Problem(folder, "not_watched", f"its changes are found by scans only ({reason})")


class Comparison:
    """Compares the documents under some roots with the ledger.

    Law: nothing is marked that may be merely on its way: a difference counts when it was seen twice, unchanged, and
    everything sent before the first time has been handled. (A row goes when its delete was sent, so unlike a runner's,
    a missing row proves nothing.) The comparison publishes and deletes nothing: it marks documents as in doubt, and the
    next scan publishes or deletes them under its own conditions."""

    def __init__(self, checkpoint: Checkpoint, roots: Sequence[str], *, tenant: str, source: str) -> None:
        self._checkpoint = checkpoint
        self._roots = roots
        self._holder = Holder(tenant, source)
        self._rows = Rows(checkpoint.pool, self._holder)  # only reads: a folder has no lease
        self._remembered: dict[Key, StoredDifference] = {}

    async def run(self, clock: Clock) -> int:
        """Compare, after a scan of all roots. Returns how many documents the next scan has to publish or delete. Raises
        Retryable."""
        handled = (await self._rows.handled()).get("detect")
        now = await self._rows.now()
        result = LedgerComparison()
        documents = DocumentComparison(self._rows, lambda external_id: self._root(external_id) is not None)
        for compare_page in (documents.compare_ledger, documents.compare_rows):
            await compare_all(compare_page, result, lambda: None)
        differences = {key: difference for key, difference in result.differences.items() if not difference.has_letter}
        before = self._remembered
        current = {key: stored_difference(entry, before.get(key), now) for key, entry in differences.items()}
        repaired = {key: entry for key, entry in before.items() if key not in current and not may_repair(entry, now)}
        self._remembered = repaired | current
        if handled is None:
            return 0
        marked = [key for key, entry in current.items() if entry.seen_at < handled and may_repair(entry, now)][
            :MAX_REPAIRS
        ]
        follow_ledger(clock, [differences[key] for key in marked])
        await self._mark({name: differences[kind, name].version for kind, name in marked}, clock.stamp())
        for key in marked:
            self._remembered[key] = replace(current[key], repaired_at=now)
        if marked:
            log.warning("publication_differs", source=self._holder.source, count=len(marked))
        return len(marked)

    async def _mark(self, versions: Mapping[str, int], stamp: datetime) -> None:
        """Mark documents as in doubt. versions: by external id."""
        by_root: dict[str, list[Intent]] = {}
        for name, version in versions.items():
            root = self._root(name)
            assert root is not None
            by_root.setdefault(root, []).append(Intent(name, version, stamp))
        for root, intents in by_root.items():
            await self._checkpoint.intend(self._holder.tenant, self._holder.source, root, intents)

    def _root(self, external_id: str) -> str | None:
        """The innermost root that holds the document."""
        return max((root for root in self._roots if is_within(external_id, root)), key=len, default=None)


class FolderConnector:
    """Documents are files: the external id is the real absolute path, so a rename is a delete and a new document."""

    def __init__(
        self, roots: Sequence[Path], *, options: FolderOptions, producer: Producer, checkpoint: Checkpoint
    ) -> None:
        """roots: folders, and single files. A root within another one is scanned with that."""
        self._roots = outermost(os.path.realpath(root) for root in roots)
        self._options = options
        self._producer = producer
        self._checkpoint = checkpoint
        self._clock: Clock | None = None

    async def scan(self, on_progress: Callable[[Progress], None] | None = None) -> ScanReport:
        """Scan all roots. Raises Retryable when Kafka or Postgres is away: acknowledged events stay recorded, and the
        next scan goes on from there."""
        return await self._sweep([(root, root) for root in self._roots], on_progress)

    async def forget(self, external_ids: Iterable[str]) -> None:
        """Have the next scan publish these again, although their files did not change."""
        await self._checkpoint.forget(self._options.tenant, self._options.source, list(external_ids))

    async def watch(self, stop: asyncio.Event, on_report: Callable[[ScanReport], None]) -> None:
        """Scan, then publish changes as the operating system reports them, and scan again every
        ``scan_interval_seconds``, until ``stop``. After each scan what was published is compared with the ledger, and
        scanned again at once where they differ. ``on_report`` is called after each round that has something new to say;
        a problem that stays is reported once.

        While Kafka or Postgres is away the report holds a problem with the code "unavailable", and it tries again.
        """
        async with Hints(self._roots) as hints:
            targets: list[tuple[str, str]] | None = None
            reported: set[Problem] = set()
            comparison = Comparison(
                self._checkpoint, self._roots, tenant=self._options.tenant, source=self._options.source
            )
            while not stop.is_set():
                wait = self._options.scan_interval_seconds
                try:
                    report = await self.scan() if targets is None else await self._sweep(targets, None)
                    if targets is None and await self._differs(comparison, report):
                        hints.lose()
                        wait = 0
                except Retryable as error:
                    report = ScanReport(problems=[Problem(self._roots[0], "unavailable", str(error))])
                    hints.lose()
                    wait = RETRY_SECONDS
                report.problems += hints.problems()
                current = set(report.problems)
                report.problems = [problem for problem in report.problems if problem not in reported]
                reported = current if targets is None else reported | current
                if report.published or report.problems:
                    on_report(report)
                targets = await hints.next(stop, wait)

    async def _differs(self, comparison: Comparison, report: ScanReport) -> bool:
        """After a scan of all roots, return whether the next one has something to publish or delete. The report of the
        scan stays, also when nothing could be compared."""
        assert self._clock is not None
        try:
            return await comparison.run(self._clock) > 0
        except Retryable as error:
            report.problems.append(Problem(self._roots[0], "unavailable", f"not compared with the ledger: {error}"))
            return False

    async def _sweep(
        self, targets: Sequence[tuple[str, str]], on_progress: Callable[[Progress], None] | None
    ) -> ScanReport:
        report, listed, done = ScanReport(), 0, 0

        def count(newly_listed: int, newly_done: int) -> None:
            nonlocal listed, done
            listed, done = listed + newly_listed, done + newly_done
            if on_progress is not None:
                on_progress(Progress(listed, done))

        if self._clock is None:
            self._clock = Clock(await self._checkpoint.observed_at(self._options.tenant, self._options.source))
        by_root: dict[str, list[str]] = {}
        for root, target in targets:
            by_root.setdefault(root, []).append(target)
        for root, under in by_root.items():
            started = await self._checkpoint.now()
            if problem := await asyncio.to_thread(root_problem, root):
                report.problems.append(problem)
                continue
            sweep = Sweep(root, under, self._options, self._clock, self._producer, self._checkpoint, report, count)
            await sweep.run(started)
        return report


def outermost(roots: Iterable[str]) -> list[str]:
    """Return the roots without those whose files the listing of another root holds anyway."""
    outer_roots: list[str] = []
    for root in sorted(set(roots)):
        if not any(is_within(root, outer) and not is_skipped(root, outer) for outer in outer_roots):
            outer_roots.append(root)
    return outer_roots
