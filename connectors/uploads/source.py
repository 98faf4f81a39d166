"""Uploaded files as a source of documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import ClassVar, Literal

from connectors.extract import EXTRACTOR
from connectors.extraction import extract_file
from connectors.extraction.result import Unreadable as NoText
from connectors.protocol import Problem
from connectors.runner.instance import Instance
from connectors.source import (
    Context,
    Cursor,
    Document,
    Entry,
    Gone,
    Group,
    Listed,
    Page,
    Playground,
    Playing,
    Reaction,
    Refused,
    Request,
    Unreadable,
)
from connectors.uploads.drop import Drop
from connectors.uploads.intake import Desk, revision_of
from connectors.uploads.options import UploadsOptions, UploadsQuota
from connectors.uploads.store import Store, Table, Uploaded
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.runtime.tasks import gather_or_cancel

LISTED = 500
MEASURE_SECONDS = 30.0
"""Between two looks at what the quotas have left, for the metric."""
TOGETHER_SECONDS = 0.05
"""What arrives within it is told of at once."""


def desks(instances: Mapping[str, Instance], tenant: str) -> dict[str, Desk | None]:
    """A tenant's instances of uploads by name; None: it does not run in this process now."""
    return {
        name: one.source.desk if isinstance(one.source, Uploads) else None
        for name, one in instances.items()
        if one.plan.kind == "uploads" and one.plan.tenant == tenant
    }


def quota_share(instance: Instance, of: Literal["tenant", "all"]) -> float:
    """What is in use of the quota that is nearest to its end; 0 while the instance does not run in this process."""
    desk = desks({"": instance}, instance.plan.tenant)[""]
    return desk.used.share(desk.quota, of) if desk is not None and desk.used is not None else 0.0


def playing() -> AbstractAsyncContextManager[Playground]:
    from connectors.uploads import playground  # a client and a server that production does without

    return playground.playing()


class Uploads:
    Options = UploadsOptions
    playground: ClassVar[Playing] = staticmethod(playing)

    def __init__(self, options: UploadsOptions, context: Context) -> None:
        """Raises Misconfigured."""
        if context.postgres is None:
            raise Misconfigured("uploads keep a table in Postgres: run them by `penstock worker connectors`")
        self._options = options
        store = Store(options.store or context.folder / "originals")
        self.desk = Desk(
            Table(context.postgres, context.tenant, context.name),
            store,
            max_bytes=options.max_bytes,
            quota=UploadsQuota.load(),
        )
        self._store = store
        self._drop = Drop(options, self.desk) if options.folder is not None else None
        try:
            store.prepare()
        except OSError as error:
            raise Misconfigured(
                f"store {options.store or context.folder}: cannot be written ({error.strerror})"
            ) from error

    async def close(self) -> None:
        return None

    async def check(self) -> Sequence[Problem]:
        problems = [] if self._drop is None else await asyncio.to_thread(self._drop.check)
        try:
            await asyncio.to_thread(self._options.holders)
        except Misconfigured as error:
            problems.append(Problem(str(self._options.members_file), "members", str(error)))
        return problems

    async def start(self) -> Cursor:
        return {"changed": await self.desk.table.last_change()}

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        after = str((cursor or {}).get("after", ""))
        while rows := await self.desk.table.page(after, self._options.page_size):
            after = rows[-1].external_id
            yield Page(await self._entries(rows), {"after": after})

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        changed = int(cursor["changed"])
        while rows := await self.desk.table.since(changed, self._options.page_size):
            changed = rows[-1].changed
            yield Page(await self._entries(rows), {"changed": changed})

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        after = ""
        while rows := await self.desk.table.page(after, LISTED):
            after = rows[-1].external_id
            yield [
                Listed(
                    external_id=one.external_id,
                    acl_tags=one.acl_tags,
                    required_tags=one.required_tags,
                    revision=revision_of(one, EXTRACTOR),
                )
                for one in rows
            ]

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        wanted = list(dict.fromkeys(external_ids))
        rows = await self.desk.table.named(wanted)
        known = {one.external_id for one in rows}
        return [*await self._entries(rows), *(Gone(id_) for id_ in wanted if id_ not in known)]

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        for tag, members in sorted((await asyncio.to_thread(self._options.holders)).items()):
            if tags is None or tag in tags:
                yield Group(tag, members)

    async def on_event(self, request: Request) -> Reaction:
        raise Refused("uploads know no events: files are handed in at /v1/uploads")

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        """Tell of what was handed in, and look into the drop folder."""
        await self.desk.prepare()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell(react))
            group.create_task(self._measure())
            if self._drop is not None:
                group.create_task(self._drop.run())

    async def _measure(self) -> None:
        while True:
            with suppress(Retryable):  # the next look tells
                await self.desk.measure()
            await asyncio.sleep(MEASURE_SECONDS)

    async def _tell(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        arrived = self.desk.arrived
        while True:
            ids = {await arrived.get()}
            await asyncio.sleep(TOGETHER_SECONDS)
            while not arrived.empty():
                ids.add(arrived.get_nowait())
            await react(Reaction(ids=ids))

    async def _entries(self, rows: Sequence[Uploaded]) -> list[Entry]:
        alive = [one for one in rows if one.deleted_at is None]
        await self.desk.table.begun([one.external_id for one in alive])
        read = await gather_or_cancel(*(self._entry(one) for one in alive))
        return [*read, *(Gone(one.external_id) for one in rows if one.deleted_at is not None)]

    async def _entry(self, one: Uploaded) -> Entry:
        try:
            found = await extract_file(self._store.path(one.sha256), one.file_name, one.media_type)
        except NoText as error:
            return await self._unreadable(one, error.code, str(error))
        except FileNotFoundError:
            return await self._unreadable(one, "original_lost", "is no longer in the store: upload it again")
        await self.desk.table.ended(one, None, None)
        return Document(
            external_id=one.external_id,
            title=one.title or found.title or one.file_name,
            content=found.text,
            media_type=found.media_type,
            acl_tags=one.acl_tags,
            required_tags=one.required_tags,
            version=one.version,
            revision=revision_of(one, EXTRACTOR),
            author=found.author,
            source_modified_at=one.modified_at,
            metadata={"file_name": one.file_name, "size": one.size, **found.metadata, **one.metadata},
        )

    async def _unreadable(self, one: Uploaded, code: str, message: str) -> Entry:
        await self.desk.table.ended(one, code, message)
        return Unreadable(
            external_id=one.external_id,
            code=code,
            message=f"{one.file_name} {message}",
            acl_tags=one.acl_tags,
            required_tags=one.required_tags,
            revision=revision_of(one, EXTRACTOR),
        )
