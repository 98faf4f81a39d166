"""The table ``uploads`` of one instance, and the original files, each stored once under the SHA-256 of its content."""

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
from pipeline.stores.postgres import Connection, Pool, translated


@dataclass(frozen=True, slots=True)
class Original:
    sha256: str
    size: int


class TooLarge(Exception):
    """More bytes came than may."""


class Store:
    """Law: a name that stands in it holds all of its content, on disk; nobody but this process' user may read it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"

    def prepare(self) -> None:
        """Raises OSError."""
        self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self._incoming.iterdir():  # of a process that was killed
            left.unlink(missing_ok=True)

    def path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256

    def writing(self, max_bytes: int) -> Incoming:
        return Incoming(self, self._incoming, max_bytes)

    def remove(self, sha256: str) -> None:
        self.path(sha256).unlink(missing_ok=True)

    def names(self) -> set[str]:
        return {path.name for path in self._folder.glob("[0-9a-f][0-9a-f]/*")}


class Incoming:
    """A file on its way in: ``write`` its parts, then ``keep`` it. Left without that, nothing stays of it."""

    def __init__(self, store: Store, folder: Path, max_bytes: int) -> None:
        self._store, self.max_bytes = store, max_bytes
        descriptor, name = tempfile.mkstemp(dir=folder)  # for its user alone
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

    def keep(self) -> Original:
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


FORGOTTEN_AFTER = "30 days"
"""A deleted upload's status can be asked for so long."""

_COLUMNS: LiteralString = (
    "id, external_id, version, file_name, media_type, title, sha256, size, acl_tags, required_tags, metadata,"
    " received_at, modified_at, changed, extracting_at, extracted_at, problem_code, problem, deleted_at"
)


@dataclass(frozen=True, slots=True)
class Uploaded:
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
class Words:
    """What its owner says of a file."""

    file_name: str
    media_type: str | None
    title: str | None
    acl_tags: Sequence[str]
    required_tags: Sequence[str]
    metadata: Mapping[str, Any]


_IN_TURN = "SELECT pg_advisory_xact_lock(hashtextextended('uploads ' || %s || '/' || %s, 0))"


class QuotaReached(Exception):
    """One line: whose, and what would help."""


@dataclass(frozen=True, slots=True)
class Used:
    """What uploads that are not deleted hold: of a tenant, and of all. A file that was handed in twice counts twice."""

    tenant_files: int
    tenant_bytes: int
    all_files: int
    all_bytes: int

    def more(self, files: int, size: int) -> Used:
        return Used(self.tenant_files + files, self.tenant_bytes + size, self.all_files + files, self.all_bytes + size)

    def share(self, quota: UploadsQuota, of: Literal["tenant", "all"]) -> float:
        """Of the quota that is nearest to its end; 0: there is none."""
        limits = ((getattr(self, f"{of}_{unit}"), getattr(quota, f"{of}_{unit}")) for unit in ("files", "bytes"))
        return max((used / limit for used, limit in limits if limit), default=0.0)

    def require(self, quota: UploadsQuota) -> None:
        """Raises QuotaReached when it is more than may be."""
        for whose, files, most_files, size, most in (
            ("the tenant's", self.tenant_files, quota.tenant_files, self.tenant_bytes, quota.tenant_bytes),
            ("all tenants'", self.all_files, quota.all_files, self.all_bytes, quota.all_bytes),
        ):
            if most_files and files > most_files:
                raise QuotaReached(f"{whose} uploads have at most {most_files:,} files: delete some first")
            if most and size > most:
                raise QuotaReached(f"{whose} uploads have at most {most:,} bytes: delete some first")


class Table:
    """Law: ``changed`` grows in the order in which changes can be seen: a reader misses none. Every method raises
    Retryable while Postgres is away."""

    def __init__(self, pool: Pool, tenant: str, source: str) -> None:
        self.pool = pool
        self.me = (tenant, source)

    async def put(self, id_: UUID, external_id: str, original: Original, words: Words, quota: UploadsQuota) -> Uploaded:
        """A new upload, or a new version of the one with this external id (which keeps its own id). What is said again
        word for word, of the same content, changes nothing. Raises QuotaReached when what uploads hold would grow
        beyond it: all that grow wait for each other, so it is exact."""

        async def require_room(connection: Connection) -> None:
            await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('uploads quota', 0))")
            cursor = await connection.execute(
                "SELECT size FROM uploads WHERE tenant = %s AND source = %s AND external_id = %s"
                " AND deleted_at IS NULL",
                [*self.me, external_id],
            )
            before = await cursor.fetchone()
            if before is None or before[0] < original.size:
                files, size = (0, original.size - before[0]) if before else (1, original.size)
                (await used_by(connection, self.me[0])).more(files, size).require(quota)

        found = await self._changing(
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
            *self.me,
            external_id,
            words.file_name,
            words.media_type,
            words.title,
            original.sha256,
            original.size,
            sorted(set(words.acl_tags)),
            sorted(set(words.required_tags)),
            Jsonb(dict(words.metadata)),
            before=require_room,
        )
        return found or (await self.named([external_id]))[0]

    async def delete(self, id_: UUID) -> Uploaded | None:
        """None: there is no such upload of ours, or it is deleted already. What its owner said of it goes too: no quota
        counts the rows of deleted ones, which stay for FORGOTTEN_AFTER."""
        return await self._changing(
            "UPDATE uploads SET deleted_at = now(), changed = nextval('uploads_changed'), title = NULL,"  # noqa: S608 — constants of this module
            " acl_tags = '{}', required_tags = '{}', metadata = '{}'"
            f" WHERE id = %s AND tenant = %s AND source = %s AND deleted_at IS NULL RETURNING {_COLUMNS}",
            id_,
            *self.me,
        )

    async def get(self, id_: UUID) -> Uploaded | None:
        found = await self._all("id = %s", id_)
        return found[0] if found else None

    async def named(self, external_ids: Collection[str]) -> list[Uploaded]:
        return await self._all("external_id = ANY(%s)", list(external_ids))

    async def page(self, after: str, size: int) -> list[Uploaded]:
        """By external id; deleted ones are not there."""
        return await self._all("deleted_at IS NULL AND external_id > %s ORDER BY external_id LIMIT %s", after, size)

    async def newest(self, before: int | None, size: int) -> list[Uploaded]:
        """What changed last first; before: ``changed`` of the last one seen."""
        return await self._all(
            "deleted_at IS NULL AND changed < %s ORDER BY changed DESC LIMIT %s", before or 2**63 - 1, size
        )

    async def since(self, changed: int, size: int) -> list[Uploaded]:
        """What changed after, deletes among it, in that order."""
        return await self._all("changed > %s ORDER BY changed LIMIT %s", changed, size)

    async def last_change(self) -> int:
        with translated("uploads"):
            async with self.pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT coalesce(max(changed), 0) FROM uploads WHERE tenant = %s AND source = %s", self.me
                )
                row = await cursor.fetchone()
                return int(row[0]) if row else 0

    async def used(self) -> Used:
        with translated("uploads"):
            async with self.pool.connection() as connection:
                return await used_by(connection, self.me[0])

    async def begun(self, external_ids: Collection[str]) -> None:
        await self._do(
            "UPDATE uploads SET extracting_at = now() WHERE tenant = %s AND source = %s AND external_id = ANY(%s)"
            " AND extracted_at IS NULL",
            *self.me,
            list(external_ids),
        )

    async def ended(self, one: Uploaded, code: str | None, problem: str | None) -> None:
        """That version was read; what came meanwhile is not touched."""
        await self._do(
            "UPDATE uploads SET extracted_at = now(), problem_code = %s, problem = %s WHERE id = %s AND version = %s",
            code,
            problem,
            one.id,
            one.version,
        )

    async def uses(self, sha256: str) -> bool:
        """Whether an upload that is not deleted has this content."""
        return bool(await self._all("sha256 = %s AND deleted_at IS NULL LIMIT 1", sha256))

    async def hashes(self) -> set[str]:
        """Of all originals that are needed, after what is still changing that has ended, also where nobody waits for
        it any more: a commit whose connection broke."""
        with translated("uploads"):
            async with self.pool.connection() as connection:
                await connection.execute(_IN_TURN, self.me)
                cursor = await connection.execute(
                    "SELECT DISTINCT sha256 FROM uploads WHERE tenant = %s AND source = %s AND deleted_at IS NULL",
                    self.me,
                )
                return {sha256 for (sha256,) in await cursor.fetchall()}

    async def forget(self) -> None:
        """What was deleted long ago."""
        await self._do(
            "DELETE FROM uploads WHERE tenant = %s AND source = %s AND deleted_at < now() - %s::interval",
            *self.me,
            FORGOTTEN_AFTER,
        )

    async def _all(self, where: LiteralString, *parameters: object) -> list[Uploaded]:
        with translated("uploads"):
            async with (
                self.pool.connection() as connection,
                connection.cursor(row_factory=class_row(Uploaded)) as cursor,
            ):
                await cursor.execute(
                    f"SELECT {_COLUMNS} FROM uploads WHERE tenant = %s AND source = %s AND {where}",  # noqa: S608 — callers hand literals
                    [*self.me, *parameters],
                )
                return await cursor.fetchall()

    async def _changing(
        self,
        statement: LiteralString,
        *parameters: object,
        before: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> Uploaded | None:
        """One at a time for an instance: who draws a number later commits later. before: in the same transaction."""
        with translated("uploads"):
            async with (
                self.pool.connection() as connection,
                connection.cursor(row_factory=class_row(Uploaded)) as cursor,
            ):
                await cursor.execute(_IN_TURN, self.me)
                if before is not None:
                    await before(connection)
                await cursor.execute(statement, parameters)
                return await cursor.fetchone()

    async def _do(self, statement: LiteralString, *parameters: object) -> None:
        with translated("uploads"):
            async with self.pool.connection() as connection:
                await connection.execute(statement, parameters)


async def used_by(connection: Connection, tenant: str) -> Used:
    cursor = await connection.execute(
        "SELECT count(*) FILTER (WHERE tenant = %(me)s), coalesce(sum(size) FILTER (WHERE tenant = %(me)s), 0),"
        " count(*), coalesce(sum(size), 0) FROM uploads WHERE deleted_at IS NULL",
        {"me": tenant},
    )
    row = await cursor.fetchone()
    assert row is not None
    return Used(*(int(number) for number in row))
