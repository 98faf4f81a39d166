"""The folder connector: files of this machine → documents."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from connectors.checkpoint import Checkpoint
from connectors.clock import Clock
from connectors.folder.compare import Comparison
from connectors.folder.options import FolderOptions
from connectors.folder.policy import is_skipped
from connectors.folder.sweep import Sweep
from connectors.folder.walk import is_within, root_problem
from connectors.folder.watch import Hints
from connectors.protocol import Problem, Progress, ScanReport
from pipeline.core.errors import Retryable
from topics.producer import Producer

__all__ = ["FolderConnector", "FolderOptions", "Problem", "Progress", "ScanReport"]

RETRY_SECONDS = 10.0
"""Of ``watch``, while Kafka or Postgres is away."""


class FolderConnector:
    """Documents are files: the external id is the real absolute path, so a rename is a delete and a new document."""

    def __init__(
        self, roots: Sequence[Path], *, options: FolderOptions, producer: Producer, checkpoint: Checkpoint
    ) -> None:
        """roots: folders, and files named themselves. What lies within another root is swept with that one."""
        self._roots = outermost(os.path.realpath(root) for root in roots)
        self._options = options
        self._producer = producer
        self._checkpoint = checkpoint
        self._clock: Clock | None = None

    async def check(self) -> list[Problem]:
        """Roots that cannot be read."""
        problems = [await asyncio.to_thread(root_problem, root) for root in self._roots]
        return [problem for problem in problems if problem]

    async def scan(self, on_progress: Callable[[Progress], None] | None = None) -> ScanReport:
        """Sweep all roots. Raises Retryable when Kafka or Postgres is away: what was acknowledged by then is kept,
        the next scan goes on from there."""
        return await self._sweep([(root, root) for root in self._roots], on_progress)

    async def forget(self, external_ids: Iterable[str]) -> None:
        """Have the next scan publish these again, although their files did not change."""
        await self._checkpoint.forget(self._options.tenant, self._options.source, list(external_ids))

    async def watch(self, stop: asyncio.Event, on_report: Callable[[ScanReport], None]) -> None:
        """Scan, then publish changes as the operating system reports them, and scan again every
        ``scan_interval_seconds``, until ``stop``. After each scan what was published is compared with the ledger, and
        scanned again at once where they differ. ``on_report`` is called after each round that has something new to say;
        a problem that stays is told once.

        While Kafka or Postgres is away the report holds a problem with the code "unavailable", and it tries again.
        """
        async with Hints(self._roots) as hints:
            targets: list[tuple[str, str]] | None = None
            told: set[Problem] = set()
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
                found = set(report.problems)
                report.problems = [problem for problem in report.problems if problem not in told]
                told = found if targets is None else told | found
                if report.published or report.problems:
                    on_report(report)
                targets = await hints.next(stop, wait)

    async def _differs(self, comparison: Comparison, report: ScanReport) -> bool:
        """After a scan of all roots: whether the next one has something to publish or delete. What the scan reports
        stays, also when nothing could be compared."""
        assert self._clock is not None
        try:
            return await comparison.run(self._clock) > 0
        except Retryable as error:
            report.problems.append(Problem(self._roots[0], "unavailable", f"not compared with the ledger: {error}"))
            return False

    async def _sweep(
        self, targets: Sequence[tuple[str, str]], on_progress: Callable[[Progress], None] | None
    ) -> ScanReport:
        report, found, done = ScanReport(), 0, 0

        def count(newly_found: int, newly_done: int) -> None:
            nonlocal found, done
            found, done = found + newly_found, done + newly_done
            if on_progress is not None:
                on_progress(Progress(found, done))

        if self._clock is None:
            self._clock = Clock(await self._checkpoint.observed_at(self._options.tenant, self._options.source))
        for root, target in targets:
            started = await self._checkpoint.now()
            if problem := await asyncio.to_thread(root_problem, root):
                report.problems.append(problem)
                continue
            sweep = Sweep(root, target, self._options, self._clock, self._producer, self._checkpoint, report, count)
            await sweep.run(started)
        return report


def outermost(roots: Iterable[str]) -> list[str]:
    """Without those that another one's listing finds anyway."""
    found: list[str] = []
    for root in sorted(set(roots)):
        if not any(is_within(root, outer) and not is_skipped(root, outer) for outer in found):
            found.append(root)
    return found
