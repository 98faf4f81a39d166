"""The table ``uploads`` of one instance, and its original files, each stored once under the SHA-256 of its content."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, LiteralString, Self
from uuid import UUID

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from connectors.uploads.options import UploadsQuota
from pipeline.core.errors import Retryable
from pipeline.stores.postgres import Connection, Pool, translated


@dataclass(frozen=True, slots=True)
class Original:
    sha256: str
    size: int


class TooLarge(Exception):
    """A file is larger than ``max_bytes``."""


class Store:
    """The original files. Law: a file under its final name is complete and on disk, and only this process's user may
    read it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._incoming = folder / "incoming"

    def prepare(self) -> None:
        """Create the folders and remove incomplete files. Raises OSError."""
        self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in self._incoming.iterdir():  # left by a process that was killed
            leftover.unlink(missing_ok=True)

    def path(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / sha256

    def writing(self, max_bytes: int) -> Incoming:
        return Incoming(self, self._incoming, max_bytes)

    def remove(self, *hashes: str) -> None:
        for sha256 in hashes:
            self.path(sha256).unlink(missing_ok=True)

    def hashes(self) -> set[str]:
        return {path.name for path in self.folder.glob("[0-9a-f][0-9a-f]/*")}


class Incoming:
    """A file that is being written: ``write`` its parts, then ``commit`` it. Leaving the context without that removes
    it."""

    def __init__(self, store: Store, folder: Path, max_bytes: int) -> None:
        self._store, self.max_bytes = store, max_bytes
        descriptor, name = tempfile.mkstemp(dir=folder)  # readable for its user alone
        self._file, self._path = os.fdopen(descriptor, "wb"), Path(name)
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, part: bytes) -> None:
        """Raises TooLarge, OSError (a full disk)."""
        self.size += len(part)
        if self.size > self.max_bytes:
            raise TooLarge
        self._hash.update(part)
        self._file.write(part)

    def commit(self) -> Original:
        """Sync the file to disk and give it its final name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        original = Original(self._hash.hexdigest(), self.size)
        target = self._store.path(original.sha256)
        target.parent.mkdir(exist_ok=True, mode=0o700)
        self._path.replace(target)
        return original

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


DELETED_RETENTION = "30 days"
"""How long the status of a deleted upload is available."""

_COLUMNS: LiteralString = (
    "id, external_id, version, file_name, media_type, title, sha256, size, acl_tags, required_tags, metadata,"
    " received_at, modified_at, changed, extracting_at, extracted_at, problem_code, problem, deleted_at"
)
PAGE_BYTES = 16 * 2**20
"""The most bytes of tags and metadata of a page of uploads, each of which may have a megabyte."""
_SIZE: LiteralString = "octet_length(acl_tags::text) + octet_length(required_tags::text) + octet_length(metadata::text)"


@dataclass(frozen=True, slots=True)
class Upload:
    """A row of the table."""

    id: UUID
    external_id: str
    version: int
    file_name: str
    media_type: str | None
    title: str | None
    sha256: str
    size: int
    acl_tags: list[str]
    required_tags: list[str]
    metadata: dict[str, Any]
    received_at: datetime
    modified_at: datetime
    changed: int
    extracting_at: datetime | None
    extracted_at: datetime | None
    problem_code: str | None
    problem: str | None
    deleted_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """The properties of a file that its owner states."""

    file_name: str
    media_type: str | None
    title: str | None
    acl_tags: Sequence[str]
    required_tags: Sequence[str]
    metadata: Mapping[str, Any]


_LOCK_INSTANCE = "SELECT lock_uploads(%s, %s)"
_LOCK_QUOTA = "SELECT lock_uploads_quota()"


class Removed(Retryable):
    """An operator has removed the connector."""


class QuotaReached(Exception):
    """A quota does not allow an upload. The message is one line: whose quota it is, and what to do."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Files and bytes of the uploads that are not deleted, of one tenant and of all. A file that was uploaded twice
    counts twice."""

    tenant_files: int
    tenant_bytes: int
    all_files: int
    all_bytes: int

    def plus(self, files: int, size: int) -> Usage:
        return Usage(self.tenant_files + files, self.tenant_bytes + size, self.all_files + files, self.all_bytes + size)

    def share(self, quota: UploadsQuota, of: Literal["tenant", "all"]) -> float:
        """Return the used share of the quota that is closest to being reached; 0 if there is none. of: whose quotas."""
        limits = ((getattr(self, f"{of}_{unit}"), getattr(quota, f"{of}_{unit}")) for unit in ("files", "bytes"))
        return max((used / limit for used, limit in limits if limit), default=0.0)

    def require_within(self, quota: UploadsQuota) -> None:
        """Raise QuotaReached if this is more than the quotas allow."""
        for owner, files, most_files, size, most in (
            ("the tenant's", self.tenant_files, quota.tenant_files, self.tenant_bytes, quota.tenant_bytes),
            ("all tenants'", self.all_files, quota.all_files, self.all_bytes, quota.all_bytes),
        ):
            if most_files and files > most_files:
                raise QuotaReached(f"{owner} uploads have at most {most_files:,} files: delete some first")
            if most and size > most:
                raise QuotaReached(f"{owner} uploads have at most {most:,} bytes: delete some first")


class Table:
    """The uploads of one instance. Law: ``changed`` grows in the order in which changes become visible, so that a
    reader misses none. Every method raises Retryable during an outage of Postgres."""

    def __init__(self, pool: Pool, tenant: str, source: str) -> None:
        self.pool = pool
        self.instance = (tenant, source)

    async def put(
        self, id_: UUID, external_id: str, original: Original, properties: Properties, quota: UploadsQuota
    ) -> Upload:
        """Insert an upload, or a new version of the one with this external id, which keeps its own id. The same content
        with the same properties changes nothing. Raises QuotaReached if the uploads would grow beyond a quota. This is
        exact: uploads that grow are serialised by a lock. Raises Removed: a file may have been arriving for minutes,
        while what the connector had was erased."""

        async def require_place(connection: Connection) -> None:
            await connection.execute(_LOCK_QUOTA)  # it may be waited for, too
            cursor = await connection.execute(
                "SELECT FROM connectors WHERE tenant = %s AND source = %s AND removed_at IS NOT NULL", self.instance
            )
            if cursor.rowcount:
                raise Removed(f"connector {self.instance[1]} was removed")
            cursor = await connection.execute(
                "SELECT size FROM uploads WHERE tenant = %s AND source = %s AND external_id = %s"
                " AND deleted_at IS NULL",
                [*self.instance, external_id],
            )
            before = await cursor.fetchone()
            if before is None or before[0] < original.size:
                files, size = (0, original.size - before[0]) if before else (1, original.size)
                (await usage_of(connection, self.instance[0])).plus(files, size).require_within(quota)

        upload = await self._change(
            f"""
            INSERT INTO uploads AS mine (id, tenant, source, external_id, version, file_name, media_type, title, sha256,
                size, acl_tags, required_tags, metadata, changed)
            VALUES (%s, %s, %s, %s, (extract(epoch FROM clock_timestamp()) * 1e6)::bigint, %s, %s, %s, %s, %s, %s, %s,
                %s, nextval('uploads_changed'))
            ON CONFLICT (tenant, source, external_id) DO UPDATE SET
                version = greatest(mine.version + 1, EXCLUDED.version), file_name = EXCLUDED.file_name,
                media_type = EXCLUDED.media_type, title = EXCLUDED.title, sha256 = EXCLUDED.sha256,
                size = EXCLUDED.size, acl_tags = EXCLUDED.acl_tags, required_tags = EXCLUDED.required_tags,
                metadata = EXCLUDED.metadata, changed = EXCLUDED.changed, received_at = now(),
                modified_at = CASE WHEN mine.sha256 = EXCLUDED.sha256 THEN mine.modified_at ELSE now() END,
                extracting_at = NULL, extracted_at = NULL, problem_code = NULL, problem = NULL, deleted_at = NULL
            WHERE mine.deleted_at IS NOT NULL OR (mine.file_name, mine.media_type, mine.title, mine.sha256,
                mine.acl_tags, mine.required_tags, mine.metadata) IS DISTINCT FROM (EXCLUDED.file_name,
                EXCLUDED.media_type, EXCLUDED.title, EXCLUDED.sha256, EXCLUDED.acl_tags, EXCLUDED.required_tags,
                EXCLUDED.metadata)
            RETURNING {_COLUMNS}
            """,  # noqa: S608 — constants of this module
            id_,
            *self.instance,
            external_id,
            properties.file_name,
            properties.media_type,
            properties.title,
            original.sha256,
            original.size,
            sorted(set(properties.acl_tags)),
            sorted(set(properties.required_tags)),
            Jsonb(dict(properties.metadata)),
            before=require_place,
        )
        return upload or (await self.by_external_ids([external_id]))[0]

    async def delete(self, id_: UUID) -> Upload | None:
        """Mark an upload as deleted, or return None if this instance has no such upload or it is deleted already. Its
        properties are removed at once, because no quota counts the row, which stays for DELETED_RETENTION."""
        return await self._change(
            "UPDATE uploads SET deleted_at = now(), changed = nextval('uploads_changed'), title = NULL,"  # noqa: S608 — constants of this module
            " acl_tags = '{}', required_tags = '{}', metadata = '{}'"
            f" WHERE id = %s AND tenant = %s AND source = %s AND deleted_at IS NULL RETURNING {_COLUMNS}",
            id_,
            *self.instance,
        )

    async def get(self, id_: UUID) -> Upload | None:
        uploads = await self._select("id = %s", id_)
        return uploads[0] if uploads else None

    async def by_external_ids(self, external_ids: Collection[str]) -> list[Upload]:
        return await self._select("external_id = ANY(%s)", list(external_ids))

    async def page(self, after: str, size: int) -> list[Upload]:
        """Return uploads that are not deleted, by external id: ``size`` or, where their properties are large, fewer;
        none: there are no more. So do ``newest`` and ``since``."""
        return await self._page("deleted_at IS NULL AND external_id > %s", "external_id", after, size)

    async def newest(self, before: int | None, size: int) -> list[Upload]:
        """Return uploads that are not deleted, the last changed first. before: ``changed`` of the last one of the page
        before."""
        return await self._page("deleted_at IS NULL AND changed < %s", "changed DESC", before or 2**63 - 1, size)

    async def since(self, changed: int, size: int) -> list[Upload]:
        """Return uploads that changed later, with deleted ones, in the order of their changes."""
        return await self._page("changed > %s", "changed", changed, size)

    async def last_change(self) -> int:
        with translated("uploads"):
            async with self.pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT coalesce(max(changed), 0) FROM uploads WHERE tenant = %s AND source = %s", self.instance
                )
                row = await cursor.fetchone()
                return int(row[0]) if row else 0

    async def usage(self) -> Usage:
        with translated("uploads"):
            async with self.pool.connection() as connection:
                return await usage_of(connection, self.instance[0])

    async def record_start(self, external_ids: Collection[str]) -> None:
        """Record that these uploads are being read."""
        await self._execute(
            "UPDATE uploads SET extracting_at = now() WHERE tenant = %s AND source = %s AND external_id = ANY(%s)"
            " AND extracted_at IS NULL",
            *self.instance,
            list(external_ids),
        )

    async def record_end(self, upload: Upload, code: str | None, problem: str | None) -> None:
        """Record that this version was read. A newer version is not changed."""
        await self._execute(
            "UPDATE uploads SET extracted_at = now(), problem_code = %s, problem = %s WHERE id = %s AND version = %s",
            code,
            problem,
            upload.id,
            upload.version,
        )

    async def is_referenced(self, sha256: str) -> bool:
        """Whether an upload that is not deleted has this content."""
        return bool(await self._select("sha256 = %s AND deleted_at IS NULL LIMIT 1", sha256))

    async def referenced_hashes(self) -> set[str]:
        """Return the hashes of all originals that are needed. Waits for changes in progress, including commits whose
        connection broke."""
        with translated("uploads"):
            async with self.pool.connection() as connection:
                await connection.execute(_LOCK_INSTANCE, self.instance)
                cursor = await connection.execute(
                    "SELECT DISTINCT sha256 FROM uploads WHERE tenant = %s AND source = %s AND deleted_at IS NULL",
                    self.instance,
                )
                return {sha256 for (sha256,) in await cursor.fetchall()}

    async def purge(self) -> None:
        """Delete the rows of uploads that were deleted before DELETED_RETENTION."""
        await self._execute(
            "DELETE FROM uploads WHERE tenant = %s AND source = %s AND deleted_at < now() - %s::interval",
            *self.instance,
            DELETED_RETENTION,
        )

    async def _page(self, where: LiteralString, order: LiteralString, after: object, size: int) -> list[Upload]:
        return await self._select(
            f"{where} ORDER BY {order} LIMIT %s) page) sized WHERE place = 1 OR bytes <= %s ORDER BY {order}",
            after,
            size,
            PAGE_BYTES,
            start=f"SELECT {_COLUMNS} FROM (SELECT *, row_number() OVER (ORDER BY {order}) AS place, sum({_SIZE})"  # noqa: S608 — callers hand literals
            f" OVER (ORDER BY {order}) AS bytes FROM (",
        )

    async def _select(self, where: LiteralString, *parameters: object, start: LiteralString = "") -> list[Upload]:
        """start: what comes before the statement."""
        with translated("uploads"):
            async with (
                self.pool.connection() as connection,
                connection.cursor(row_factory=class_row(Upload)) as cursor,
            ):
                await cursor.execute(
                    f"{start}SELECT {_COLUMNS} FROM uploads WHERE tenant = %s AND source = %s AND {where}",  # noqa: S608 — callers hand literals
                    [*self.instance, *parameters],
                )
                return await cursor.fetchall()

    async def _change(
        self,
        statement: LiteralString,
        *parameters: object,
        before: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> Upload | None:
        """Execute a statement under the instance's lock, so that a later value of ``changed`` is committed later.
        before: is called in the same transaction."""
        with translated("uploads"):
            async with (
                self.pool.connection() as connection,
                connection.cursor(row_factory=class_row(Upload)) as cursor,
            ):
                await cursor.execute(_LOCK_INSTANCE, self.instance)
                if before is not None:
                    await before(connection)
                await cursor.execute(statement, parameters)
                return await cursor.fetchone()

    async def _execute(self, statement: LiteralString, *parameters: object) -> None:
        with translated("uploads"):
            async with self.pool.connection() as connection:
                await connection.execute(statement, parameters)


async def usage_of(connection: Connection, tenant: str) -> Usage:
    cursor = await connection.execute(
        "SELECT tenant_files, tenant_bytes, all_files, all_bytes FROM uploads_usage(%s)", [tenant]
    )
    row = await cursor.fetchone()
    assert row is not None
    return Usage(*(int(number) for number in row))
