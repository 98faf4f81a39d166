"""Source kind ``uploads``: uploaded files as documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from datetime import UTC, datetime
from typing import ClassVar, Literal

from connectors.errors import BadData
from connectors.extract import EXTRACTOR
from connectors.extraction import extract_file
from connectors.extraction.result import Unreadable as NoText
from connectors.portions import pages_of
from connectors.protocol import Problem
from connectors.runner.instance import Instance
from connectors.set_aside import UNEXPECTED, reading_data
from connectors.source import (
    Context,
    Cursor,
    Document,
    Entry,
    Gone,
    Group,
    Listed,
    MetadataKeys,
    Page,
    Playground,
    Playing,
    Reaction,
    Refused,
    Request,
    Unreadable,
)
from connectors.uploads.drop import Drop
from connectors.uploads.intake import Intake, revision_of
from connectors.uploads.options import UploadsOptions, UploadsQuota
from connectors.uploads.store import Store, Table, Upload
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.runtime.tasks import gather_or_cancel

LISTED_PER_PAGE = 500
MEASURE_SECONDS = 30.0
"""Time between two measurements of the quotas' usage, for the metric."""
BATCH_SECONDS = 0.05
"""Changes that arrive within this time are published together."""


def intakes(instances: Mapping[str, Instance], tenant: str) -> dict[str, Intake | None]:
    """Return the intakes of a tenant's instances by name; None: the instance is not running in this process."""
    return {
        name: instance.source.intake if isinstance(instance.source, Uploads) else None
        for name, instance in instances.items()
        if instance.plan.kind == "uploads" and instance.plan.tenant == tenant
    }


def quota_share(instance: Instance, of: Literal["tenant", "all"]) -> float:
    """Return the used share of the quota that is closest to being reached; 0 while the instance does not run in this
    process."""
    intake = intakes({"": instance}, instance.plan.tenant)[""]
    return intake.usage.share(intake.quota, of) if intake is not None and intake.usage is not None else 0.0


def playing() -> AbstractAsyncContextManager[Playground]:
    from connectors.uploads import playground  # imports a client and a server that production does not need

    return playground.playing()


class Uploads:
    """A source of uploaded files. Laws and methods: ``connectors.source``."""

    Options = UploadsOptions
    metadata_keys: ClassVar[MetadataKeys] = {"file_name": "keyword", "size": "number"}
    playground: ClassVar[Playing] = staticmethod(playing)

    def __init__(self, options: UploadsOptions, context: Context) -> None:
        """Raises Misconfigured."""
        if context.postgres is None:
            raise Misconfigured("uploads need a table in Postgres: run them with `penstock worker connectors`")
        self._options = options
        store = Store(options.store or context.folder / "originals")
        self.intake = Intake(
            Table(context.postgres, context.tenant, context.name),
            store,
            max_bytes=options.max_bytes,
            quota=UploadsQuota.load(),
        )
        self._store = store
        self._drop = Drop(options, self.intake) if options.folder is not None else None
        try:
            store.prepare()
        except OSError as error:
            raise Misconfigured(
                f"store {options.store or context.folder}: cannot be written ({error.strerror})"
            ) from error

    async def close(self) -> None:
        if self._drop is not None:
            self._drop.close()

    async def check(self) -> Sequence[Problem]:
        problems = [] if self._drop is None else await asyncio.to_thread(self._drop.check)
        try:
            await asyncio.to_thread(self._options.members_by_tag)
        except Misconfigured as error:
            problems.append(Problem(str(self._options.members_file), "members", str(error)))
        return problems

    async def start(self) -> Cursor:
        return {"changed": await self.intake.table.last_change()}

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        after, began = str((cursor or {}).get("after", "")), datetime.now(UTC)
        while rows := await self.intake.table.page(after, self._options.page_size):
            after = rows[-1].external_id
            async with aclosing(pages_of(rows, self._entries, {"after": after}, began=began)) as pages:
                async for page in pages:
                    yield page
            began = datetime.now(UTC)

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        changed, began = int(cursor["changed"]), datetime.now(UTC)
        while rows := await self.intake.table.since(changed, self._options.page_size):
            changed = rows[-1].changed
            async with aclosing(pages_of(rows, self._entries, {"changed": changed}, began=began)) as pages:
                async for page in pages:
                    yield page
            began = datetime.now(UTC)

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        after = ""
        while rows := await self.intake.table.page(after, LISTED_PER_PAGE):
            after = rows[-1].external_id
            yield [
                Listed(
                    external_id=row.external_id,
                    acl_tags=row.acl_tags,
                    required_tags=row.required_tags,
                    revision=revision_of(row, EXTRACTOR),
                )
                for row in rows
            ]

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        requested = list(dict.fromkeys(external_ids))
        rows = await self.intake.table.by_external_ids(requested)
        known = {row.external_id for row in rows}
        return [*await self._entries(rows), *(Gone(id_) for id_ in requested if id_ not in known)]

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        for tag, members in sorted((await asyncio.to_thread(self._options.members_by_tag)).items()):
            if tags is None or tag in tags:
                yield Group(tag, members)

    async def on_event(self, request: Request) -> Reaction:
        raise Refused("uploads receive no events: send files to /v1/uploads")

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        """Report changed uploads, measure the quotas and scan the drop folder."""
        await self.intake.prepare()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._report_changes(react))
            group.create_task(self._measure())
            if self._drop is not None:
                group.create_task(self._drop.run())

    async def _measure(self) -> None:
        while True:
            with suppress(Retryable):  # measured again soon
                await self.intake.measure()
            await asyncio.sleep(MEASURE_SECONDS)

    async def _report_changes(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        changed = self.intake.changed
        while True:
            ids = {await changed.get()}
            await asyncio.sleep(BATCH_SECONDS)
            while not changed.empty():
                ids.add(changed.get_nowait())
            await react(Reaction(ids=ids))

    async def _entries(self, rows: Sequence[Upload]) -> list[Entry]:
        current = [row for row in rows if row.deleted_at is None]
        await self.intake.table.record_start([row.external_id for row in current])
        entries = await gather_or_cancel(*(self._entry(row) for row in current))
        return [*entries, *(Gone(row.external_id) for row in rows if row.deleted_at is not None)]

    async def _entry(self, upload: Upload) -> Entry:
        try:
            with reading_data():
                extracted = await extract_file(self._store.path(upload.sha256), upload.file_name, upload.media_type)
        except NoText as error:
            return await self._unreadable(upload, error.code, str(error))
        except BadData as error:
            return await self._unreadable(upload, UNEXPECTED, f"cannot be read: {error}")
        except FileNotFoundError:
            return await self._unreadable(upload, "original_lost", "is no longer in the store: upload it again")
        document = Document(  # before anything is waited for: it counts the memory of all of them
            external_id=upload.external_id,
            title=upload.title or extracted.title or upload.file_name,
            content=extracted.text,
            media_type=extracted.media_type,
            acl_tags=upload.acl_tags,
            required_tags=upload.required_tags,
            version=upload.version,
            revision=revision_of(upload, EXTRACTOR),
            author=extracted.author,
            source_modified_at=upload.modified_at,
            metadata={"file_name": upload.file_name, "size": upload.size, **extracted.metadata, **upload.metadata},
        )
        await self.intake.table.record_end(upload, None, None)
        return document

    async def _unreadable(self, upload: Upload, code: str, message: str) -> Entry:
        await self.intake.table.record_end(upload, code, message)
        return Unreadable(
            external_id=upload.external_id,
            code=code,
            message=f"{upload.file_name} {message}",
            acl_tags=upload.acl_tags,
            required_tags=upload.required_tags,
            revision=revision_of(upload, EXTRACTOR),
        )
