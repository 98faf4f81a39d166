"""Whether a caller may still read what its answer, or the report of its preview, is made from. Both take up to a minute
or more, and what is revoked meanwhile is not repeated to their end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from time import monotonic
from uuid import UUID

from pipeline.core.errors import PenstockError
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Pool, translated
from query.access.callers import Caller
from query.access.tenant_rows import rows_of
from query.modes.documents import readable_ids

Identify = Callable[[], Awaitable[Caller]]
"""Returns the caller with its access at that moment. Raises Retryable."""

LOOK_SECONDS = 2.0
"""How often access is looked at while a model writes: as often as an API key (query/http/gate.py)."""
LEDGER_SECONDS = 2.0


class Lost(Exception):
    """The caller may not read some of the documents any more. It is no failure of a service."""

    def __init__(self, documents: Collection[UUID]) -> None:
        super().__init__()
        self.documents = frozenset(documents)


class StillReadable:
    """Looks at the access to the documents of one answer."""

    def __init__(self, pool: Pool, identify: Identify, documents: Collection[UUID]) -> None:
        self._pool = pool
        self._identify = identify
        self._documents = list(documents)
        self._looked_at = monotonic()

    async def look(self) -> None:
        """Look if it is time to. While the ledger is away nothing is revoked, and the last look decides. Raises
        only Lost."""
        if monotonic() - self._looked_at < LOOK_SECONDS:
            return
        try:
            await self.require()
        except PenstockError:  # not the model's failure: the look at the end decides
            self._looked_at = monotonic()

    async def require(self) -> None:
        """Raises Lost, and Retryable without the ledger."""
        caller = await self._identify()
        async with time_limit(LEDGER_SECONDS, "Postgres"):
            with translated("the access to an answer"):
                async with rows_of(self._pool, caller.tenant) as connection:
                    readable = await readable_ids(connection, caller, self._documents)
        self._looked_at = monotonic()
        if lost := set(self._documents).difference(readable):
            raise Lost(lost)
