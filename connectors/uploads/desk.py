"""Where files are handed in: what is said of them goes into the table, they themselves into the store, and word of it
to whoever runs the instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from uuid import UUID, uuid4

from connectors.uploads.options import UploadsQuota
from connectors.uploads.status import Status, status_of
from connectors.uploads.store import Incoming, Store
from connectors.uploads.table import QuotaReached, Table, Uploaded, Used, Words
from pipeline.core.errors import Retryable

MAX_WRITING = 16
"""Files that are handed in at once: what they take on disk until then is in no quota."""


class Busy(Retryable):
    """Too many files are being handed in."""


class Desk:
    """Of one instance. Methods raise Retryable while Postgres is away."""

    def __init__(self, table: Table, store: Store, *, max_bytes: int, quota: UploadsQuota | None = None) -> None:
        self.table, self.store, self.max_bytes = table, store, max_bytes
        self.quota = quota or UploadsQuota.load()
        self.used: Used | None = None
        """When it was last looked at."""
        self._writing = 0
        self.arrived: asyncio.Queue[str] = asyncio.Queue()
        """External ids of what has changed, for the runner; lost ones are found by ``changes``."""
        self._originals = asyncio.Lock()
        """Between "nobody needs it" and its removal nobody may come to need it."""
        self._left_over = False
        """Whether an original may lie in the store that nobody needs, and that no quota counts."""

    async def prepare(self) -> None:
        """Forget what nobody needs. The store was prepared before files could come in, and they may be coming now."""
        async with self._originals:
            await self.table.forget()
            await self._collect()

    @contextmanager
    def writing(self) -> Iterator[Incoming]:
        """Raises Busy, OSError."""
        if self._writing >= MAX_WRITING:
            raise Busy(f"{MAX_WRITING} files are being handed in: send it again in a moment")
        self._writing += 1
        try:
            with self.store.writing(self.max_bytes) as file:
                yield file
        finally:
            self._writing -= 1

    async def hand_in(self, file: Incoming, words: Words, *, external_id: str | None = None) -> Uploaded:
        """A new upload; with an external id that is known, a new version of it. Raises QuotaReached."""
        id_ = uuid4()
        external_id = external_id or str(id_)
        async with self._changing():
            before = await self.table.named([external_id])
            original = await asyncio.to_thread(file.keep)
            try:
                found = await self.table.put(id_, external_id, original, words, self.quota)
            except QuotaReached:
                await self._discard(original.sha256)
                raise
            if before and before[0].sha256 != original.sha256:
                await self._discard(before[0].sha256)
        if not before or before[0].version != found.version:
            self.arrived.put_nowait(external_id)
        return found

    async def delete(self, id_: UUID) -> Uploaded | None:
        """Its original goes too. None: there is none (any more)."""
        async with self._changing():
            found = await self.table.delete(id_)
            if found is not None:
                await self._discard(found.sha256)
        if found is not None:
            self.arrived.put_nowait(found.external_id)
        return found

    async def change(self, one: Uploaded, words: Words) -> Uploaded:
        """Other words of the same file. Raises FileNotFoundError when its original is lost."""
        path = self.store.path(one.sha256)
        with self.writing() as file:
            await asyncio.to_thread(_copied, path, file)
            return await self.hand_in(file, words, external_id=one.external_id)

    async def measure(self) -> None:
        """What is in use of the quotas, for ``used``. Removes what hand-ins have left over that failed."""
        self.used = await self.table.used()
        if self._left_over:
            async with self._originals:
                await self._collect()

    async def status(self, uploads: Sequence[Uploaded]) -> list[Status]:
        return await status_of(self.table, uploads)

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """After a failure nobody knows whether the table needs the original: the commit may have happened."""
        async with self._originals:
            try:
                yield
            except QuotaReached:
                raise  # it has been discarded
            except BaseException:
                self._left_over = True
                raise

    async def _collect(self) -> None:
        needed = await self.table.hashes()
        for name in await asyncio.to_thread(self.store.names) - needed:
            self.store.remove(name)
        self._left_over = False

    async def _discard(self, sha256: str) -> None:
        if not await self.table.uses(sha256):
            await asyncio.to_thread(self.store.remove, sha256)


def _copied(path: Path, file: Incoming) -> None:
    with path.open("rb") as source:
        while part := source.read(1024 * 1024):
            file.write(part)
