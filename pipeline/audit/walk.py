"""One run of the audit over everything in its scope, from where it stopped to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from uuid import UUID

from pipeline.audit import runs
from pipeline.audit.examine import Examiner, Finding, Verdict, ranges_end
from pipeline.audit.reading import Range, Scope
from pipeline.audit.runs import Run
from pipeline.stores.postgres import translated

BLOCK_DOCUMENTS = 2_000
"""The most documents that a resumed run compares again."""
SUSPECTS = 2_000
"""The most documents that wait for their second comparison."""
SECOND_LOOK_SECONDS = 2.0
"""Time between the first and the second comparison. A worker that writes an old state makes the document pending again
after its refresh, and refreshes are at most a second apart. So after this time such a document no longer counts as
confirmed."""
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Pending:
    """A document that a store has not reached yet."""

    document: UUID
    external_id: str
    reason: str | None
    """Why it failed, if it did."""


@dataclass(slots=True)
class Page:
    """The counts of one range."""

    documents: int = 0
    chunks: int = 0
    pending: list[Pending] = field(default_factory=list)


class Suspects:
    """Documents that differed at the first comparison."""

    def __init__(self, examiner: Examiner, *, second_look_seconds: float) -> None:
        self._examiner = examiner
        self._wait = second_look_seconds
        self._waiting: set[UUID] = set()
        self._last = 0.0
        self.waited_seconds = 0.0
        """The time that ``confirmed`` spent only waiting."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, document: UUID) -> None:
        self._waiting.add(document)
        self._last = asyncio.get_running_loop().time()

    async def confirmed(self) -> list[Finding]:
        """Compare all suspects a second time; returns the differences that remain."""
        if not self._waiting:
            return []
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(self._last + self._wait - began)
        self.waited_seconds += asyncio.get_running_loop().time() - began
        async with aclosing(self._examiner.confirmed(self._waiting)) as verdicts:
            findings = [finding async for verdict in verdicts for finding in verdict.findings]
        self._waiting.clear()
        return findings


class Walk:
    """Compares everything in the scope of a run.

    Law: when ``run`` returns, every difference that did not change meanwhile is recorded. A resumed run continues after
    its last finished block, and finds the same differences.
    """

    def __init__(
        self,
        examiner: Examiner,
        run: Run,
        *,
        progress: Callable[[int], None] = lambda _: None,
        block_documents: int = BLOCK_DOCUMENTS,
        second_look_seconds: float = SECOND_LOOK_SECONDS,
    ) -> None:
        self._examiner = examiner
        self.state = run
        self._progress = progress
        self._block = block_documents
        self._suspects = Suspects(examiner, second_look_seconds=second_look_seconds)
        self.pending: list[Pending] = []
        """At most SHOWN of them, failed ones first."""

    async def run(self) -> Run:
        """Compare everything from the run's position to the end. Raises Retryable, Misconfigured."""
        await self._examiner.refresh()
        position, finished, since_save = self.state.position, False, 0
        seen = Page()
        while not finished:
            scoped = self.state.since is not None
            documents = await self._examiner.following(position, run=self.state.id if scoped else None)
            finished = not documents
            if not finished or not scoped:
                await self._look(tuple(documents) if scoped else ranges_end(documents, position), documents, seen)
            if documents:
                position = documents[-1]
                since_save += len(documents)
                self._progress(self.state.documents + seen.documents)
            if finished or since_save >= self._block:
                await self._save(position, seen, finished=finished)
                seen, since_save = Page(), 0
        return self.state

    async def _look(self, scope: Scope | Range, documents: list[UUID], seen: Page) -> None:
        async with aclosing(self._examiner.examine(scope, documents)) as verdicts:
            async for verdict in verdicts:
                note(verdict, seen)
                if not verdict.clean:
                    self._suspects.add(verdict.document)
                if len(self._suspects) >= SUSPECTS:
                    findings = await self._suspects.confirmed()
                    async with self._examiner.pool.connection() as connection:
                        await runs.add(connection, self.state.id, findings)

    async def _save(self, position: UUID | None, seen: Page, *, finished: bool) -> None:
        findings = await self._suspects.confirmed()
        self.state = replace(
            self.state,
            position=position,
            documents=self.state.documents + seen.documents,
            chunks=self.state.chunks + seen.chunks,
            pending=self.state.pending + len(seen.pending),
        )
        self.pending = sorted([*self.pending, *seen.pending], key=lambda p: p.reason is None)[:SHOWN]
        with translated("audit"):
            async with self._examiner.pool.connection() as connection:
                await runs.save(connection, self.state, findings, finished=finished)


def note(verdict: Verdict, page: Page) -> None:
    """Count one document of the ledger."""
    desired = verdict.desired
    if desired is None:
        return
    page.documents += 1
    page.chunks += len(desired.chunks)
    if desired.pending:
        page.pending.append(Pending(verdict.document, desired.identity.external_id, desired.reason))
