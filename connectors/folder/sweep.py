"""One sweep of one target: what changed is published, what is gone is deleted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice

from connectors.checkpoint import Checkpoint, Item, ListedIds, Unwritten
from connectors.clock import Clock, version_at
from connectors.extract import CONTENT_CODES, Unreadable
from connectors.folder.content import EMPTY, Content, FileRead, content_of, describe, read, upserted
from connectors.folder.options import FolderOptions
from connectors.folder.walk import Candidate, Walk, is_within
from connectors.protocol import Kind, Problem, Published, ScanReport
from connectors.publisher import Event, Publisher
from connectors.runner.guard import is_mass_deletion
from pipeline.core.errors import Retryable
from pipeline.kafka.producer import Producer
from topics.messages import AccessChanged, DocumentDeleted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, Topic

BATCH = 256
"""Files looked up in the checkpoint at once."""
READERS = 4
"""Files read side by side; the largest readable one takes about 100 MB for a moment."""
GROUP = 32
GROUP_BYTES = 1024 * 1024
FEW = 50
"""As many files never seen before go live; the rest of a large first load goes to the backfill lane."""


@dataclass(slots=True)
class Sweep:
    """Of ``target``, a folder or file at or under ``root``."""

    root: str
    target: str
    options: FolderOptions
    clock: Clock
    producer: Producer
    checkpoint: Checkpoint
    report: ScanReport
    on_done: Callable[[int, int], None]
    """Called with how many files were newly found, and how many are newly done with."""
    newcomers: int = 0
    _shown: ListedIds = field(default_factory=ListedIds)
    _publisher: Publisher = field(init=False)

    async def run(self, started: datetime) -> None:
        """started: Postgres' clock before anything was listed. Raises Retryable."""
        self._publisher = Publisher(
            self.producer, self.checkpoint, tenant=self.options.tenant, source=self.options.source, scope=self.root
        )
        walk = Walk(self.root, self.target, self.options)
        try:
            async for batch in self._listed(walk):
                await self._batch(batch)
            if walk.complete:
                await self._publisher.settle()
                await self._delete_gone(walk, started)
            await self._publisher.settle()
        except BaseException:
            with suppress(Retryable):  # the first error is the one to tell
                await self._publisher.abandon()
            raise

    async def _listed(self, walk: Walk) -> AsyncIterator[list[Candidate]]:
        """Candidates in batches; problems go into the report."""
        with closing(walk.candidates()) as found:  # type: ignore[type-var]  # a generator, typed as its iterator
            while entries := await asyncio.to_thread(_take, found):
                self.report.problems += [entry for entry in entries if isinstance(entry, Problem)]
                yield [entry for entry in entries if isinstance(entry, Candidate)]

    async def _batch(self, batch: Sequence[Candidate]) -> None:
        self.on_done(len(batch), 0)
        self._shown.add(candidate.path for candidate in batch)
        known = await self.checkpoint.listed(
            self.options.tenant, self.options.source, self.root, [candidate.path for candidate in batch]
        )
        self.newcomers += sum(candidate.path not in known for candidate in batch)
        to_read: list[tuple[Candidate, Item]] = []
        for candidate in batch:
            item = known.get(candidate.path)
            if item is not None and item.is_withdrawn:
                if item.is_delete_due:
                    await self._delete([(item.external_id, item.version or 0)], self.clock.stamp())
                self.on_done(0, 1)
            elif item is None or item.in_doubt_since is not None or item.stat != describe(candidate.stat):
                to_read.append((candidate, item or Item(candidate.path)))
            else:
                await self._unread(candidate, item)
                self.on_done(0, 1)
        queue = iter(to_read)
        readers = [asyncio.create_task(self._read_all(queue)) for _ in range(min(READERS, len(to_read)))]
        try:
            await asyncio.gather(*readers)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read_all(self, queue: Iterator[tuple[Candidate, Item]]) -> None:
        while group := _group(queue):
            stamps = [self.clock.stamp() for _ in group]  # before any of them is read
            files = await asyncio.to_thread(_read_group, [candidate for candidate, _ in group])
            for (candidate, item), file, observed_at in zip(group, files, stamps, strict=True):
                await self._changed(candidate, item, file, observed_at)
                self.on_done(0, 1)

    async def _unread(self, candidate: Candidate, item: Item) -> None:
        """The file is as it was when it was read last."""
        if item.problem_code is not None:
            self._problem(candidate.path, item.problem_code, item.problem_message or "")
        await self._access_only(candidate, item, self.clock.stamp())

    async def _changed(self, candidate: Candidate, item: Item, file: FileRead, observed_at: datetime) -> None:
        extracted, error = file.extracted, file.unreadable
        if error is not None:
            self._problem(candidate.path, error.code, str(error))
            if error.code == "empty" and item.version is not None:
                extracted = EMPTY  # what it held before must not stay searchable
        if extracted is None:
            assert error is not None
            await self._unreadable(candidate, item, file, error, observed_at)
            return
        what = content_of(candidate.path, self.root, file, extracted)
        read_now = replace(
            item,
            stat=file.stat,
            problem_code=error.code if error else None,
            problem_message=str(error) if error else None,
        )
        if item.fingerprint == what.fingerprint() and item.in_doubt_since is None:
            await self._access_only(candidate, read_now, observed_at, moved=True)
        else:
            await self._upsert(candidate, read_now, what, observed_at)

    async def _upsert(self, candidate: Candidate, item: Item, what: Content, observed_at: datetime) -> None:
        event = upserted(
            what,
            tenant=self.options.tenant,
            source=self.options.source,
            path=candidate.path,
            version=version_at(observed_at, item.version),
            observed_at=observed_at,
            acl_tags=candidate.acl_tags,
            required_tags=candidate.required_tags,
        )
        row = replace(
            item,
            version=event.version,
            fingerprint=what.fingerprint(),
            acl_tags=event.acl_tags,
            required_tags=event.required_tags,
        )
        await self._publish("upserted", event, event.version, row, self._lane(first=item.version is None))

    async def _unreadable(
        self, candidate: Candidate, item: Item, file: FileRead, error: Unreadable, observed_at: datetime
    ) -> None:
        """What was published of it stays, under the access that holds now; why it is older is written down."""
        if error.code == "vanished":  # the next listing says so
            await self._access_only(candidate, item, observed_at)
            return
        # Of reasons that are not the content's the file's looks tell nothing: it is read again.
        stat = file.stat if error.code in CONTENT_CODES else None
        noted = replace(item, stat=stat, problem_code=error.code, problem_message=str(error))
        await self._access_only(candidate, noted, observed_at, moved=noted != item)

    async def _access_only(
        self, candidate: Candidate, item: Item, observed_at: datetime, *, moved: bool = False
    ) -> None:
        """moved: the row differs from the one that is stored."""
        if item.version is None:
            if moved:
                await self._publisher.note(item)
            return
        if item.has_access(candidate.acl_tags, candidate.required_tags):
            if moved:
                await self._publisher.note(item)
            self.report.unchanged.append((item.external_id, item.version))
            return
        event = AccessChanged(
            tenant=self.options.tenant,
            source=self.options.source,
            external_id=item.external_id,
            observed_at=observed_at,
            acl_tags=list(candidate.acl_tags),
            required_tags=list(candidate.required_tags),
        )
        row = replace(item, acl_tags=event.acl_tags, required_tags=event.required_tags)
        await self._publish("access", event, item.version, row, self._lane(first=False))

    async def _delete_gone(self, walk: Walk, started: datetime) -> None:
        """What a completed listing did not find. Not where the listing failed, and not much at once unconfirmed."""
        tenant, source = self.options.tenant, self.options.source
        observed_at = self.clock.stamp()
        unlisted = await self._unlisted(started)
        await self._delete([(row.external_id, row.version or 0) for row in unlisted if row.is_withdrawn], observed_at)
        kept = [row for row in unlisted if not row.is_withdrawn]
        gone = await asyncio.to_thread(lambda: [row for row in kept if _is_gone(row, walk)])
        if not gone:
            return
        known = await self.checkpoint.count(tenant, source, self.root)
        confirmed = self.options.allow_mass_delete
        if known and not confirmed and await asyncio.to_thread(self._looks_lost, walk):
            self._problem(self.root, "root_empty", f"holds no files any more: nothing is deleted {_unless(known)}")
            return
        published = [(row.external_id, row.version) for row in gone if row.version is not None]
        if is_mass_deletion(len(published), known) and not confirmed:
            self._problem(
                self.root,
                "mass_delete",
                f"{len(published)} of {known} documents are gone: none is deleted {_unless(known)}",
            )
            return
        await self.checkpoint.remove(
            tenant, source, [(row.external_id, observed_at) for row in gone if row.version is None]
        )
        await self._delete(published, observed_at)

    async def _delete(self, documents: Sequence[tuple[str, int]], observed_at: datetime) -> None:
        """documents: (external id, version)."""
        for external_id, version in documents:
            event = DocumentDeleted(
                tenant=self.options.tenant,
                source=self.options.source,
                external_id=external_id,
                observed_at=observed_at,
                version=version,
            )
            await self._publish("deleted", event, version, None, self._lane(first=False))

    async def _unlisted(self, started: datetime) -> list[Unwritten]:
        """Rows that the listing lacks and that nobody has written since it began."""
        unlisted: list[Unwritten] = []
        pages = self.checkpoint.unwritten(self.options.tenant, self.options.source, self.target, started)
        async for page in pages:
            lacking = set(self._shown.lacks([row.external_id for row in page]))
            unlisted += [row for row in page if row.external_id in lacking]
        return unlisted

    def _looks_lost(self, walk: Walk) -> bool:
        """An empty folder is more often a file system that is not mounted than one whose files were all deleted."""
        if walk.admitted or walk.unreadable or walk.broken:
            return False
        return self.target == self.root or not os.listdir(self.root)

    async def _publish(self, kind: Kind, event: Event, version: int, row: Item | None, topic: Topic) -> None:
        await self._publisher.publish(topic, event, row)
        self.report.published.append(Published(event.external_id, version, kind, event.observed_at))

    def _lane(self, *, first: bool) -> Topic:
        lane = self.options.lane or ("backfill" if first and self.newcomers > FEW else "live")
        return DOCUMENTS_BACKFILL if lane == "backfill" else DOCUMENTS_LIVE

    def _problem(self, path: str, code: str, message: str) -> None:
        self.report.problems.append(Problem(path, code, message))


def _take(entries: Iterator[Candidate | Problem]) -> list[Candidate | Problem]:
    return list(islice(entries, BATCH))


def _group(queue: Iterator[tuple[Candidate, Item]]) -> list[tuple[Candidate, Item]]:
    """The next few to read in one go: a thread's hand-over costs as much as reading a small file."""
    group: list[tuple[Candidate, Item]] = []
    size = 0
    while len(group) < GROUP and size < GROUP_BYTES and (one := next(queue, None)):
        group.append(one)
        size += one[0].stat.st_size
    return group


def _read_group(candidates: Sequence[Candidate]) -> list[FileRead]:
    return [read(candidate.path, candidate.stat) for candidate in candidates]


def _unless(known: int) -> str:
    return f"until it is confirmed (allow mass delete); {known} documents stay searchable"


def _is_gone(row: Unwritten, walk: Walk) -> bool:
    """Really not there, or excluded by the rules. Only the root that answers for a document may exclude it, and not one
    that was moved away while the listing came by and is back: that is looked at once more."""
    path = row.external_id
    if any(is_within(path, folder) for folder in walk.unreadable):
        return False
    answers = row.scope == walk.root and not any(is_within(path, folder) for folder in walk.broken)
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return answers
    return answers and not _is_listed_now(path, walk)


def _is_listed_now(path: str, walk: Walk) -> bool:
    """Or cannot be known to be excluded."""
    again = Walk(walk.root, path, walk.options)
    is_listed = any(isinstance(one, Candidate) and one.path == path for one in again.candidates())
    return is_listed or bool(again.unreadable or again.broken)
