"""What the operating system says has changed: hints about where to look, never what to believe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from watchfiles import Change, awatch

from connectors.folder.policy import FILE, is_skipped
from connectors.folder.walk import is_within
from connectors.protocol import Problem

DEBOUNCE_MS = 400
"""An editor's save is several events; they are looked at together."""
MAX_HINTS = 500
"""More than this at once: a scan of everything is cheaper."""
RESTART_SECONDS = 5.0


class Hints:
    """Collects changed paths under the roots while it is open. Law: whatever is not heard is found by the next scan."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = list(roots)
        self._changed: set[str] = set()
        self._everything = False
        self._some = asyncio.Event()
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._problems: list[Problem] = []

    async def __aenter__(self) -> Self:
        folders = [root for root in self._roots if not os.path.isfile(root)]
        parents = sorted({os.path.dirname(root) for root in self._roots if os.path.isfile(root)})
        for watched, recursive in [(folder, True) for folder in folders] + [(parent, False) for parent in parents]:
            self._tasks.append(asyncio.create_task(self._follow(watched, recursive)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, stop: asyncio.Event, within_seconds: float) -> list[tuple[str, str]] | None:
        """(root, target) for what changed, as soon as something did; None: look at everything."""
        waiting = [asyncio.create_task(self._some.wait()), asyncio.create_task(stop.wait())]
        await asyncio.wait(waiting, timeout=within_seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        changed, self._changed = self._changed, set()
        everything, self._everything = self._everything, False
        self._some.clear()
        if everything or not changed or len(changed) > MAX_HINTS:
            return None
        return self._targets(changed)

    def lose(self) -> None:
        """What was handed out last could not be looked at: everything is due."""
        self._everything = True

    def problems(self) -> list[Problem]:
        """What cannot be followed at present."""
        return list(self._problems)

    def _targets(self, changed: set[str]) -> list[tuple[str, str]]:
        """A changed ``.penstock.toml`` concerns its whole folder; what lies within another target is swept with it."""
        paths = sorted(os.path.dirname(path) if os.path.basename(path) == FILE else path for path in changed)
        targets: list[tuple[str, str]] = []
        for path in paths:
            for root in self._roots:
                target = path if is_within(path, root) else root if path == os.path.dirname(root) else None
                if target and not any(r == root and is_within(target, t) for r, t in targets):
                    targets.append((root, target))
        return targets

    async def _follow(self, watched: str, recursive: bool) -> None:
        """Starts again when the folder vanishes or the system's limits are met; meanwhile the scans do the work."""
        while not self._stop.is_set():
            trouble: Problem | None = None
            try:
                async for changes in awatch(
                    watched, watch_filter=self._concerns, recursive=recursive, debounce=DEBOUNCE_MS, step=50,
                    stop_event=self._stop, ignore_permission_denied=True,
                ):  # fmt: skip
                    self._changed |= {path for _, path in changes}
                    self._some.set()
            except (OSError, RuntimeError) as error:  # watchfiles raises RuntimeError for what inotify refuses
                trouble = Problem(watched, "not_watched", f"its changes are found by scans only ({error})")
                self._problems.append(trouble)
            with suppress(TimeoutError):
                async with asyncio.timeout(RESTART_SECONDS):
                    await self._stop.wait()
            if trouble is not None:
                self._problems.remove(trouble)
            self._everything = True

    def _concerns(self, _change: Change, path: str) -> bool:
        """Whether the path may be a document of ours, or rules for one."""
        for root in self._roots:
            if path in (root, os.path.join(os.path.dirname(root), FILE)):
                return True
            if is_within(path, root):
                folder, name = os.path.split(path)
                if not is_skipped(folder if name == FILE else path, root):
                    return True
        return False
