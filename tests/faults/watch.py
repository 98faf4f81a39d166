"""Searches while faults happen: no response may contain what the ledger had withdrawn before the request."""

from __future__ import annotations

import asyncio
from random import Random
from uuid import UUID

import psycopg

from pipeline.core.errors import PenstockError
from query.retrieval.search import Search
from tests.faults import tally
from tests.faults.story import NEEDED, SECTIONS, TAGS
from tests.support.space import Space

_LEDGER = """
    SELECT d.id, d.seq, d.deleted_at IS NULL AND d.version IS NOT NULL
        AND coalesce(a.acl_tags && %s::text[] AND a.required_tags <@ %s::text[], false)
    FROM documents d LEFT JOIN access_sets a ON a.id = d.access_id
"""


class Watch:
    """Searches until it is stopped. ``leaks`` collects results that must not have been returned."""

    def __init__(self, space: Space, search: Search, rng: Random) -> None:
        self._space, self._search, self._rng = space, search, rng
        self.leaks: list[str] = []
        self.enough = False
        """Set to end ``run`` after the current query."""

    async def run(self) -> None:
        while not self.enough:
            try:
                await self._ask()
            except (PenstockError, psycopg.Error):
                tally.DONE["questions asked while nothing could answer"] += 1
            await asyncio.sleep(0.15)

    async def _ask(self) -> None:
        tags = sorted(
            self._rng.sample(TAGS, self._rng.randint(1, 2)) + self._rng.sample(NEEDED, self._rng.randint(0, 2))
        )
        qualified = [f"wiki/{tag}" for tag in tags]
        mode = self._rng.choice(("hybrid", "keyword", "vector"))
        before = await self._readable(qualified)
        caller = await self._search.identify("acme", tags=qualified)
        question = f"subject{self._rng.randrange(SECTIONS)} line detail"
        response = await self._search.search(question, caller, top=50, mode=mode)
        after = await self._readable(qualified)
        tally.DONE["queries"] += 1
        for result in response.results:
            id_ = result.passage.document_id
            if id_ in before and not before[id_][1] and before[id_] == after.get(id_):
                tally.VIOLATIONS["leaked"] += 1
                self.leaks.append(f"{mode}: {result.passage.external_id} to {tags}")

    async def _readable(self, tags: list[str]) -> dict[UUID, tuple[int, bool]]:
        rows = await self._space.query(_LEDGER, tags, tags)
        return {id_: (seq, readable) for id_, seq, readable in rows}
