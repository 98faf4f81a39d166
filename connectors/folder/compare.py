"""What ``watch`` has published, compared with what the ledger has accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic

import structlog

from connectors.checkpoint import Checkpoint, Intent
from connectors.clock import Clock
from connectors.folder.walk import is_within
from connectors.runner.compare import Row
from connectors.runner.reconcile import MOST_REST_SECONDS, REST, difference
from connectors.runner.rows import Holder, Rows
from pipeline.core.identity import document_id

log = structlog.get_logger()

PAGE = 500
MOST = 1_000
"""Documents marked after one scan: the rest is found after the next one."""
MOST_NOTED = 20_000
"""Differences that are remembered, some megabytes: after a first load they are its backlog."""
AGAIN = timedelta(days=1)
"""What was published again and differs still is published again so often."""


@dataclass(slots=True)
class _Difference:
    root: str
    version: int
    published: tuple[object, ...] | None
    """All that a row says was published: while it stays the same, nothing more was sent."""
    seen_at: datetime
    marked_at: datetime | None = None


class Comparison:
    """Of the documents under some roots. Law: nothing is marked that may be merely on its way: a difference counts when
    it was seen twice, unchanged, and everything sent before the first time has been handled. Nothing is published or
    deleted here: a document that is marked as in doubt is, by the next scan, under its own conditions."""

    def __init__(self, checkpoint: Checkpoint, roots: Sequence[str], *, tenant: str, source: str) -> None:
        self._checkpoint = checkpoint
        self._roots = roots
        self._holder = Holder(tenant, source)
        self._rows = Rows(checkpoint.pool, self._holder)  # to read alone: a folder has no lease
        self._known: dict[str, _Difference] = {}

    async def run(self, clock: Clock) -> int:
        """After a scan of all roots. Returns how many documents the next scan has to publish or delete. Raises
        Retryable."""
        handled = (await self._rows.handled()).get("detect")
        now = await self._rows.now()
        found: dict[str, _Difference] = {}
        await self._living(found, now)
        await self._published(found, now)
        for name, one in found.items():
            if (before := self._known.get(name)) is not None:
                one.seen_at = before.seen_at if before.published == one.published else now
                one.marked_at = before.marked_at
        kept = {n: one for n, one in self._known.items() if n not in found and not _may_mark(one, now)}
        self._known = kept | found
        if handled is None:
            return 0
        due = [name for name, one in found.items() if one.seen_at < handled and _may_mark(one, now)][:MOST]
        stamp = clock.stamp()
        for root in {found[name].root for name in due}:
            intents = [Intent(name, found[name].version, stamp) for name in due if found[name].root == root]
            await self._checkpoint.intend(self._holder.tenant, self._holder.source, root, intents)
        for name in due:
            found[name].marked_at = now
        if due:
            log.warning("reconciliation_difference", source=self._holder.source, count=len(due))
        return len(due)

    async def _living(self, found: dict[str, _Difference], now: datetime) -> None:
        """What is alive in the ledger. A row goes when its delete was sent: a missing one may be on its way."""
        after, began = "", monotonic()
        while page := await self._rows.ledger(after, PAGE):
            mine = [(accepted, root) for _, accepted in page if (root := self._root(accepted.external_id)) is not None]
            rows = await self._rows.find([accepted.external_id for accepted, _ in mine])
            for accepted, root in mine:
                row = rows.get(accepted.external_id)
                differs = difference(row, accepted, self._holder.source) is not None
                if differs and not accepted.has_letter and len(found) < MOST_NOTED:
                    found[accepted.external_id] = _Difference(root, accepted.version, _of(row), now)
            after = str(page[-1][0])
            began = await _rested(began)

    async def _published(self, found: dict[str, _Difference], now: datetime) -> None:
        """What was published and is not alive there."""
        after, began = "", monotonic()
        while page := await self._rows.page(after, PAGE):
            mine = {
                document_id(self._holder.tenant, self._holder.source, row.external_id): (row, root)
                for row in page
                if row.is_published and not row.is_in_doubt and (root := self._root(row.external_id)) is not None
            }
            for id_ in await self._rows.ledger_lacks(list(mine)):
                row, root = mine[id_]
                if len(found) < MOST_NOTED:
                    found[row.external_id] = _Difference(root, row.version or 0, _of(row), now)
            after = page[-1].external_id
            began = await _rested(began)

    def _root(self, external_id: str) -> str | None:
        """The one that answers for it: the innermost."""
        return max((root for root in self._roots if is_within(external_id, root)), key=len, default=None)


async def _rested(began: float) -> float:
    """After a page: as the runner's comparison does, so that Postgres is left to others for most of the time."""
    await asyncio.sleep(min(REST * (monotonic() - began), MOST_REST_SECONDS))
    return monotonic()


def _may_mark(one: _Difference, now: datetime) -> bool:
    return one.marked_at is None or now - one.marked_at >= AGAIN


def _of(row: Row | None) -> tuple[object, ...] | None:
    return None if row is None else (row.version, row.acl_tags, row.required_tags)
