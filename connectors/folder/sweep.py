"""One sweep of some targets: changed files are published, missing ones are deleted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice

from connectors.clock import Clock
from connectors.extract import CONTENT_CODES
from connectors.folder.checkpoint import Checkpoint, Item, Unwritten
from connectors.folder.content import FileRead, describe, entry_of, fingerprint, read
from connectors.folder.options import FolderOptions
from connectors.folder.publisher import Publisher
from connectors.folder.walk import Candidate, Walk, is_within
from connectors.protocol import Kind, Problem, Published, ScanReport
from connectors.runner.compare import Event, Observation, Row, decide, decide_access
from connectors.runner.guard import is_mass_deletion
from connectors.runner.listing import ListedIds
from connectors.source import Document, Gone, Listed, Unreadable
from pipeline.core.errors import Retryable
from pipeline.kafka.producer import Producer
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, Topic

BATCH_FILES = 256
"""Files looked up in the checkpoint at once."""
READERS = 4
"""Threads that read files; the largest readable file takes about 100 MB for a moment."""
GROUP_FILES = 32
GROUP_BYTES = 1024 * 1024
"""A thread reads up to so many files, and about so many bytes, in one go; fewer where there are few."""
KINDS: dict[type[Event], Kind] = {
    DocumentUpserted: "upserted",
    AccessChanged: "access",
    DocumentDeleted: "deleted",
}
MAX_LIVE_NEWCOMERS = 50
"""A sweep with more new files than this is a first load: the rest of them goes to the backfill lane."""


@dataclass(slots=True)
class Sweep:
    """One sweep of ``targets``, folders or files at or under ``root``, none within another."""

    root: str
    targets: list[str]
    options: FolderOptions
    clock: Clock
    producer: Producer
    checkpoint: Checkpoint
    report: ScanReport
    on_done: Callable[[int, int], None]
    """Called with the numbers of newly listed and newly finished files."""
    newcomers: int = 0
    """Files listed so far that have no row."""
    _listed_ids: ListedIds = field(default_factory=ListedIds)
    _held: int | None = None
    """Published documents of the root, without those that were gone from earlier targets; None: not counted yet."""
    _publisher: Publisher = field(init=False)

    async def run(self, started: datetime) -> None:
        """Sweep to the end. started: by Postgres' clock, before anything was listed. Raises Retryable."""
        self._publisher = Publisher(
            self.producer, self.checkpoint, tenant=self.options.tenant, source=self.options.source, scope=self.root
        )
        walk = Walk(self.root, self.targets, self.options)
        try:
            async for batch in self._listed(walk):
                await self._batch(walk, batch)
            if walk.complete:
                await self._publisher.settle()
                for target in self.targets:
                    await self._delete_gone(walk, target, started)
            await self._publisher.settle()
        except BaseException:
            with suppress(Retryable):  # the first error is the one to tell
                await self._publisher.abandon()
            raise

    async def _listed(self, walk: Walk) -> AsyncIterator[list[Candidate]]:
        """Yield candidates in batches, and report problems."""
        with closing(walk.candidates()) as candidates:  # type: ignore[type-var]  # a generator, typed as its iterator
            while entries := await asyncio.to_thread(_take, candidates):
                self.report.problems += [entry for entry in entries if isinstance(entry, Problem)]
                yield [entry for entry in entries if isinstance(entry, Candidate)]

    async def _batch(self, walk: Walk, batch: Sequence[Candidate]) -> None:
        self.on_done(len(batch), 0)
        self._listed_ids.add(candidate.path for candidate in batch)
        known = await self.checkpoint.listed(
            self.options.tenant, self.options.source, self.root, [candidate.path for candidate in batch]
        )
        self.newcomers += sum(candidate.path not in known for candidate in batch)
        to_read: list[tuple[Candidate, Item]] = []
        unchanged: list[tuple[Candidate, Item]] = []
        for candidate in batch:
            item = known.get(candidate.path) or Item(Row(external_id=candidate.path))
            if item.row.is_withdrawn:
                await self._delete(item.row, self._stamp(item.row))
                self.on_done(0, 1)
            elif item.row.is_in_doubt or item.stat is None or item.stat != describe(candidate.stat):
                to_read.append((candidate, item))
            else:
                unchanged.append((candidate, item))
        for candidate, item, observed_at in await self._under_current_rules(walk, unchanged):
            await self._unread(candidate, item, observed_at)
        self.on_done(0, len(unchanged))
        queue, most = iter(to_read), max(1, min(GROUP_FILES, len(to_read) // (2 * READERS)))
        readers = [asyncio.create_task(self._read_all(walk, queue, most)) for _ in range(min(READERS, len(to_read)))]
        try:
            await asyncio.gather(*readers)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read_all(self, walk: Walk, queue: Iterator[tuple[Candidate, Item]], most: int) -> None:
        """Read and publish the files of the queue, up to ``most`` in one go."""
        while group := _group(queue, most):
            current = await self._under_current_rules(walk, group)
            files = await asyncio.to_thread(_read_group, [candidate for candidate, _, _ in current])
            for (candidate, item, observed_at), file in zip(current, files, strict=True):
                await self._changed(candidate, item, file, observed_at)
                self.on_done(0, 1)
            self.on_done(0, len(group) - len(current))
        await self._publisher.send()  # another reader may be busy with a large file

    async def _under_current_rules(
        self, walk: Walk, group: Sequence[tuple[Candidate, Item]]
    ) -> list[tuple[Candidate, Item, datetime]]:
        """Return listed files with their access of now and their stamps, which are taken before the rules are read: the
        listing has read the rules of a folder once, perhaps long ago. What the rules exclude by now is left out; the
        next listing deletes it."""
        if not group:
            return []
        stamps = {candidate.path: (item, self._stamp(item.row)) for candidate, item in group}
        current = await asyncio.to_thread(walk.access_now, [candidate for candidate, _ in group])
        known = self.report.problems
        known += [entry for entry in current if isinstance(entry, Problem) and entry not in known]
        return [(entry, *stamps[entry.path]) for entry in current if isinstance(entry, Candidate)]

    def _stamp(self, *rows: Row) -> datetime:
        """Return a stamp that is later than every event which may have been sent for these rows, also by a process
        whose clock is ahead: the rows were read before their files are."""
        for row in rows:
            self.clock.follow(row.in_doubt_since)
        return self.clock.stamp()

    async def _unread(self, candidate: Candidate, item: Item, observed_at: datetime) -> None:
        """Handle a file that has not changed since it was read."""
        if item.row.problem_code is not None:
            self._problem(candidate.path, item.row.problem_code, item.row.problem_message or "")
        await self._access_only(candidate, item, observed_at)

    async def _changed(self, candidate: Candidate, item: Item, file: FileRead, observed_at: datetime) -> None:
        """Publish a file that was read, if it differs. The content of one that is unreadable stays as it was published,
        under the current access, and its row says why."""
        error = file.unreadable
        if error is not None:
            self._problem(candidate.path, error.code, str(error))
        # An empty file that held text before is published, so that the text does not stay searchable.
        entry = entry_of(file, candidate, self.root, candidate.path, publish_empty=item.row.version is not None)
        if isinstance(entry, Gone):  # the next listing says so
            await self._access_only(candidate, item, observed_at)
            return
        digest = fingerprint(entry) if isinstance(entry, Document) else None
        decision = decide(item.row, entry, self._observation(observed_at), digest)
        row = decision.row or item.row
        is_unexpected = error is None and isinstance(entry, Unreadable)
        if decision.outcome == "invalid" or is_unexpected:
            self._problem(candidate.path, row.problem_code or "invalid", row.problem_message or "")
        elif error is not None:
            row = replace(row, problem_code=error.code, problem_message=str(error))
        # Where the reason is not the content's, the file's attributes tell nothing: it is read again.
        stat = file.stat if not is_unexpected and (error is None or error.code in CONTENT_CODES) else None
        await self._carry_out(item, Item(row, stat), decision.events)

    async def _access_only(self, candidate: Candidate, item: Item, observed_at: datetime) -> None:
        """Publish the access of a file, if it differs, without its content."""
        row = item.row
        has_access = not row.is_in_doubt and (row.acl_tags, row.required_tags) == (
            candidate.acl_tags,
            candidate.required_tags,
        )
        if row.version is None or has_access:
            await self._carry_out(item, item, [])
            return
        listed = Listed(external_id=row.external_id, acl_tags=candidate.acl_tags, required_tags=candidate.required_tags)
        decision = decide_access(row, listed, self._observation(observed_at))
        await self._carry_out(item, Item(decision.row or row, item.stat), decision.events)

    async def _carry_out(self, before: Item, after: Item, events: Sequence[Event]) -> None:
        """Publish the last of these events, which carries everything that the others say, and store the row."""
        if events:
            lane = self._lane(first=isinstance(events[-1], DocumentUpserted) and before.row.version is None)
            await self._publish(events[-1], after.row.version or 0, after, lane)
            return
        if after is not before and (_stored(after.row), after.stat) != (before.row, before.stat):
            await self._publisher.note(after)
        if after.row.version is not None:
            self.report.unchanged.append((after.row.external_id, after.row.version))

    async def _delete_gone(self, walk: Walk, target: str, started: datetime) -> None:
        """Delete documents of a target that a completed listing lacks: not where the listing failed, and not many
        unconfirmed."""
        tenant, source = self.options.tenant, self.options.source
        unlisted = await self._unlisted(target, started)
        observed_at = self._stamp(*(unwritten.row for unwritten in unlisted))
        for unwritten in unlisted:
            if unwritten.row.is_withdrawn:
                await self._delete(unwritten.row, observed_at)
        others = [unwritten for unwritten in unlisted if not unwritten.row.is_withdrawn]
        gone = await asyncio.to_thread(lambda: [unwritten.row for unwritten in others if _is_gone(unwritten, walk)])
        if not gone:
            return
        if self._held is None:
            self._held = await self.checkpoint.count(tenant, source, self.root)
        count, confirmed = self._held, self.options.allow_mass_delete
        if count and not confirmed and await asyncio.to_thread(self._looks_lost, walk, target):
            self._problem(self.root, "root_empty", f"holds no files any more: nothing is deleted {_unless(count)}")
            return
        published = [row for row in gone if row.is_published]
        if is_mass_deletion(len(published), count) and not confirmed:
            self._problem(
                self.root,
                "mass_delete",
                f"{len(published)} of {count} documents are gone: none is deleted {_unless(count)}",
            )
            return
        await self.checkpoint.remove(
            tenant, source, [(row.external_id, observed_at) for row in gone if not row.is_published]
        )
        self._held = max(0, count - len(published))
        for row in published:
            await self._delete(row, observed_at)

    async def _delete(self, row: Row, observed_at: datetime) -> None:
        for event in decide(row, Gone(row.external_id), self._observation(observed_at)).events:
            await self._publish(event, row.version or 0, None, self._lane(first=False))

    def _observation(self, at: datetime) -> Observation:
        return Observation(tenant=self.options.tenant, source=self.options.source, at=at)

    async def _unlisted(self, target: str, started: datetime) -> list[Unwritten]:
        """Return rows that the listing lacks and that have not been written since it began."""
        unlisted: list[Unwritten] = []
        pages = self.checkpoint.unwritten(self.options.tenant, self.options.source, target, started)
        async for page in pages:
            lacking = set(self._listed_ids.lacks([unwritten.row.external_id for unwritten in page]))
            unlisted += [unwritten for unwritten in page if unwritten.row.external_id in lacking]
        return unlisted

    def _looks_lost(self, walk: Walk, target: str) -> bool:
        """Whether the folder is empty: it is then more often not mounted than its files are deleted. What the listing
        of other targets has shown may have been before it was unmounted."""
        if target == self.root:
            return not (walk.admitted or walk.unreadable or walk.broken)
        try:
            return not os.listdir(self.root)
        except OSError:
            return True

    async def _publish(self, event: Event, version: int, item: Item | None, topic: Topic) -> None:
        await self._publisher.publish(topic, event, item)
        self.report.published.append(Published(event.external_id, version, KINDS[type(event)], event.observed_at))

    def _lane(self, *, first: bool) -> Topic:
        lane = self.options.lane or ("backfill" if first and self.newcomers > MAX_LIVE_NEWCOMERS else "live")
        return DOCUMENTS_BACKFILL if lane == "backfill" else DOCUMENTS_LIVE

    def _problem(self, path: str, code: str, message: str) -> None:
        self.report.problems.append(Problem(path, code, message))


def _take(entries: Iterator[Candidate | Problem]) -> list[Candidate | Problem]:
    return list(islice(entries, BATCH_FILES))


def _group(queue: Iterator[tuple[Candidate, Item]], most: int) -> list[tuple[Candidate, Item]]:
    """Return the next files to read in one go: handing one to a thread costs as much as reading a small file."""
    group: list[tuple[Candidate, Item]] = []
    size = 0
    while len(group) < most and size < GROUP_BYTES and (entry := next(queue, None)):
        group.append(entry)
        size += entry[0].stat.st_size
    return group


def _read_group(candidates: Sequence[Candidate]) -> list[FileRead]:
    return [read(candidate.path, candidate.stat) for candidate in candidates]


def _unless(count: int) -> str:
    return f"until it is confirmed (allow mass delete); {count} documents stay searchable"


def _stored(row: Row) -> Row:
    """Return the row without the stamps that a folder's rows do not have: they are ordered by version and
    by ``in_doubt_since``."""
    return replace(row, content_at=None, access_at=None)


def _is_gone(unwritten: Unwritten, walk: Walk) -> bool:
    """Whether the file does not exist, or is excluded by the rules. Only the root that answers for a document may
    exclude it; and a file that was away only while its folder was listed is not gone, so it is listed once more."""
    path = unwritten.row.external_id
    if any(is_within(path, folder) for folder in walk.unreadable):
        return False
    answers = unwritten.scope == walk.root and not any(is_within(path, folder) for folder in walk.broken)
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return answers
    return answers and not _is_listed_now(path, walk)


def _is_listed_now(path: str, walk: Walk) -> bool:
    """Whether the file is listed, or its folder cannot be listed now."""
    again = Walk(walk.root, [path], walk.options)
    is_listed = any(isinstance(entry, Candidate) and entry.path == path for entry in again.candidates())
    return is_listed or bool(again.unreadable or again.broken)
