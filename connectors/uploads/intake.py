"""Accepts uploads and reports how far each has come.

The client's properties go into the table, the file into the store, and the external id to the process that runs the
instance.
"""

from __future__ import annotations

import asyncio
import json
import math
import unicodedata
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Literal
from uuid import UUID, uuid4

from pydantic import ValidationError

from connectors.uploads.options import UploadsQuota
from connectors.uploads.store import (
    Incoming,
    Original,
    Properties,
    QuotaReached,
    Removed,
    Store,
    Table,
    Upload,
    Usage,
)
from pipeline.core import publication
from pipeline.core.errors import Retryable
from pipeline.core.identity import document_id
from pipeline.core.normalise import nfc
from pipeline.ledger.arrivals import Arrival, arrivals
from pipeline.stores.postgres import translated
from topics.messages import DocumentUpserted

State = Literal[
    "received", "extracting", "published", "searchable", "needs_ocr", "encrypted", "too_large", "failed", "deleted"
]
_OWN_STATES: dict[str, State] = {"needs_ocr": "needs_ocr", "encrypted": "encrypted", "too_large": "too_large"}
"""Codes that have a state of their own. All others have the state ``failed`` and are reported next to it."""


@dataclass(frozen=True, slots=True)
class Status:
    """How far an upload has come."""

    upload: Upload
    state: State
    reason: str | None = None
    """One line that says what is wrong and what to do."""
    code: str | None = None
    token: str | None = None
    """Names what was published of it, for searches that wait until they see it; None while nothing is."""


@dataclass(frozen=True, slots=True)
class Item:
    """The runner's state of a document (``connector_items``), and its newest events that may not be in both stores
    yet (``connector_publications``)."""

    version: int | None
    revision: str | None
    problem_code: str | None
    problem: str | None
    gone: bool
    access_sent_at: datetime | None
    deletion_sent_at: datetime | None

    def holds(self, upload: Upload) -> bool:
        """Whether this version of the upload was handled: published, or found unreadable."""
        return not self.gone and self.revision is not None and int(self.revision.partition(".")[0]) == upload.version


def revision_of(upload: Upload, extractor: int) -> str:
    return f"{upload.version}.{extractor}"


def status_from(upload: Upload, item: Item | None, arrival: Arrival | None) -> Status:
    """Derive an upload's status from its row, the runner's state and the ledger's."""
    if upload.deleted_at is not None:
        return Status(upload, "deleted")
    if upload.problem_code is not None:
        return Status(upload, _OWN_STATES.get(upload.problem_code, "failed"), upload.problem, upload.problem_code)
    if upload.extracted_at is None:
        return Status(upload, "received" if upload.extracting_at is None else "extracting")
    if item is None or not item.holds(upload):
        return Status(upload, "extracting")
    if item.problem_code is not None:  # its properties cannot be published
        return Status(upload, "failed", item.problem, item.problem_code)
    if arrival is None or item.version is None or arrival.version is None or arrival.version < item.version:
        return Status(upload, "published")
    if arrival.searchable and arrival.settled:
        return Status(upload, "searchable")
    reason = "a store failed to write it: it will be retried" if arrival.set_aside else None
    return Status(upload, "published", reason)


def token_of(id_: UUID, upload: Upload, item: Item | None, arrival: Arrival | None) -> str | None:
    """Name what was published of an upload: its text, and its access or its deletion. An event of these two that is no
    longer recorded is in both stores already. id_: of its document."""
    if item is None:
        return None
    if upload.deleted_at is not None:
        floor = item.deletion_sent_at or (arrival and arrival.deleted_floor)
        return publication.token([publication.deletion(id_, floor)]) if item.gone and floor else None
    if not item.holds(upload) or item.version is None:
        return None
    changes = [publication.content(id_, item.version)]
    if item.access_sent_at is not None:
        changes.append(publication.access(id_, item.access_sent_at))
    return publication.token(changes)


_ITEMS = """
    SELECT i.external_id, i.version, i.revision, i.problem_code, i.problem_message, i.gone, p.access, p.deletion
    FROM unnest(%(names)s::text[], %(ids)s::uuid[]) AS given (name, id)
    JOIN connector_items i ON i.tenant = %(tenant)s AND i.source = %(source)s AND i.external_id = given.name
    CROSS JOIN LATERAL (
        SELECT max(observed_at) FILTER (WHERE kind = 'access') AS access,
            max(observed_at) FILTER (WHERE kind = 'deletion') AS deletion
        FROM connector_publications p
        WHERE p.tenant = %(tenant)s AND p.source = %(source)s AND p.document_id = given.id
    ) p
"""
"""One statement: an event is recorded before the row that it leads to, and a token must not miss it."""


async def status_of(table: Table, uploads: Sequence[Upload]) -> list[Status]:
    """Look up the status of each upload. Raises Retryable."""
    tenant, source = table.instance
    keys = {upload.external_id: document_id(tenant, source, upload.external_id) for upload in uploads}
    with translated("uploads"):
        async with table.pool.connection() as connection:
            cursor = await connection.execute(
                _ITEMS, {"tenant": tenant, "source": source, "names": list(keys), "ids": list(keys.values())}
            )
            items = {id_: Item(*rest) for id_, *rest in await cursor.fetchall()}
            stored = await arrivals(connection, list(keys.values()))
    rows = [(upload, items.get(upload.external_id), stored.get(keys[upload.external_id])) for upload in uploads]
    return [
        replace(status_from(upload, item, arrival), token=token_of(keys[upload.external_id], upload, item, arrival))
        for upload, item, arrival in rows
    ]


MAX_INCOMING_FILES = 16
"""Files that may be received at the same time: no quota counts the disk space that they use until they are complete."""


UNUSED_SECONDS = 600.0
"""Time between two searches for originals that no upload refers to: erasure on demand deletes rows and no files."""


class Busy(Retryable):
    """MAX_INCOMING_FILES are being received."""


class NoUpload(Exception):
    """The upload that a request changes does not exist (any more)."""


Stated = Callable[[Upload | None], Properties]
"""Returns the properties that a request states, completed by those of the upload that it replaces. May raise Invalid.

It receives the upload as it is when the file has arrived, which takes minutes: access that was revoked meanwhile, or an
upload that was deleted, must not come back."""


class Intake:
    """Accepts the uploads of one instance. Methods raise Retryable during an outage of Postgres."""

    def __init__(self, table: Table, store: Store, *, max_bytes: int, quota: UploadsQuota | None = None) -> None:
        self.table, self.store, self.max_bytes = table, store, max_bytes
        self.quota = quota or UploadsQuota.load()
        self.usage: Usage | None = None
        """The usage of the quotas when ``measure`` last ran."""
        self._incoming_files = 0
        self.changed: asyncio.Queue[str] = asyncio.Queue()
        """External ids of changed uploads, for the runner. Lost ones are found by the source's ``changes``."""
        self._originals = asyncio.Lock()
        """Held while an original is checked and removed, so that no upload refers to it in between."""
        self._may_have_orphans = False
        """The store may hold originals that no upload refers to, and that no quota counts."""
        self._orphans_removed_at = -math.inf

    async def prepare(self) -> None:
        """Purge deleted uploads and unreferenced originals. Files may be arriving already."""
        async with self._originals:
            await self.table.purge()
            await self._remove_orphans()

    @contextmanager
    def writing(self) -> Iterator[Incoming]:
        """Receive a file. Raises Busy and OSError."""
        if self._incoming_files >= MAX_INCOMING_FILES:
            raise Busy(f"{MAX_INCOMING_FILES} files are being uploaded: retry shortly")
        self._incoming_files += 1
        try:
            with self.store.writing(self.max_bytes) as file:
                yield file
        finally:
            self._incoming_files -= 1

    async def add(
        self,
        file: Incoming,
        properties: Properties | Stated,
        *,
        external_id: str | None = None,
        replaces: bool = False,
    ) -> Upload:
        """Add an upload, or a new version of the one with this external id. Raises QuotaReached and Removed, and
        NoUpload if it ``replaces`` an upload that was deleted."""
        id_ = uuid4()
        external_id = external_id or str(id_)
        async with self._changing():
            before, current = await self._find(external_id)
            if replaces and current is None:
                raise NoUpload
            stated = properties(current) if callable(properties) else properties
            original = await asyncio.to_thread(file.commit)
            try:
                upload = await self.table.put(id_, external_id, original, stated, self.quota)
            except (QuotaReached, Removed):
                await self._discard(original.sha256)
                raise
            if before is not None and before.sha256 != original.sha256:
                await self._discard(before.sha256)
        self._report(before, upload)
        return upload

    async def delete(self, id_: UUID) -> Upload | None:
        """Delete an upload and its original. None: there is no such upload (any more)."""
        async with self._changing():
            upload = await self.table.delete(id_)
            if upload is not None:
                await self._discard(upload.sha256)
        if upload is not None:
            self.changed.put_nowait(upload.external_id)
        return upload

    async def change(self, external_id: str, properties: Stated) -> Upload:
        """Change the properties of an upload. Raises NoUpload, and FileNotFoundError if its original is lost."""
        async with self._changing():
            before, current = await self._find(external_id)
            if current is None:
                raise NoUpload
            await asyncio.to_thread(self.store.path(current.sha256).stat)
            original = Original(current.sha256, current.size)
            upload = await self.table.put(uuid4(), external_id, original, properties(current), self.quota)
        self._report(before, upload)
        return upload

    async def _find(self, external_id: str) -> tuple[Upload | None, Upload | None]:
        """Return the row with this external id, and the same unless the upload was deleted."""
        rows = await self.table.by_external_ids([external_id])
        before = rows[0] if rows else None
        return before, before if before is not None and before.deleted_at is None else None

    def _report(self, before: Upload | None, upload: Upload) -> None:
        if before is None or before.version != upload.version:
            self.changed.put_nowait(upload.external_id)

    async def measure(self) -> None:
        """Update ``usage``, and remove originals that failed uploads and the erasure of others have left."""
        self.usage = await self.table.usage()
        if self._may_have_orphans or monotonic() >= self._orphans_removed_at + UNUSED_SECONDS:
            async with self._originals:
                await self._remove_orphans()

    async def status(self, uploads: Sequence[Upload]) -> list[Status]:
        return await status_of(self.table, uploads)

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Hold the lock of the originals. After a failure it is unknown whether the table refers to the original: the
        commit may have happened."""
        async with self._originals:
            try:
                yield
            except (QuotaReached, Removed, NoUpload, Invalid):
                raise  # it has been discarded, or is not there yet
            except BaseException:
                self._may_have_orphans = True
                raise

    async def _remove_orphans(self) -> None:
        stored = await asyncio.to_thread(self.store.hashes)
        await asyncio.to_thread(self.store.remove, *(stored - await self.table.referenced_hashes()))
        self._may_have_orphans, self._orphans_removed_at = False, monotonic()

    async def _discard(self, sha256: str) -> None:
        if not await self.table.is_referenced(sha256):
            await asyncio.to_thread(self.store.remove, sha256)


FIELDS = frozenset({"title", "acl_tags", "required_tags", "metadata", "external_id", "source", "file_name"})
MAX_NAME_CHARACTERS = 200
NO_ACCESS = 'acl_tags: name the readers, e.g. "staff" or "user:ada@example.org"; without readers nobody could find it'

Fields = Mapping[str, Sequence[str]]


class Invalid(Exception):
    """A request is invalid. The message is one line that names the field and the reason, and quotes no value."""


@dataclass(frozen=True, slots=True)
class Part:
    """The file's own name and type, as the client sends them."""

    name: str = ""
    media_type: str | None = None


def properties_of(fields: Fields, part: Part | None, before: Upload | None, *, tenant: str, source: str) -> Properties:
    """Return the properties that a request states. before: the upload that it replaces, whose properties are the
    defaults. Raises Invalid."""
    if unknown := sorted(set(fields) - FIELDS):
        raise Invalid(f"{unknown[0][:50]!r}: no such field (known: {', '.join(sorted(FIELDS))}, and the file)")
    name = sanitise_name(
        single(fields, "file_name") or (part.name if part else "") or (before.file_name if before else "")
    )
    properties = Properties(
        file_name=name,
        media_type=part.media_type if part else before.media_type if before else None,
        title=single(fields, "title") if "title" in fields else before.title if before else None,
        acl_tags=_tags(fields, "acl_tags") if "acl_tags" in fields else before.acl_tags if before else [],
        required_tags=_tags(fields, "required_tags")
        if "required_tags" in fields
        else before.required_tags
        if before
        else [],
        metadata=_metadata(fields) if "metadata" in fields else before.metadata if before else {},
    )
    if not properties.acl_tags:
        raise Invalid(NO_ACCESS)
    message = _message(properties, single(fields, "external_id"), tenant, source)
    return replace(  # without U+0000, which Postgres would refuse after the file was stored
        properties,
        media_type=properties.media_type and message.media_type,
        title=properties.title and message.title,
        metadata=message.metadata,
    )


def single(fields: Fields, name: str) -> str | None:
    """Return the only value of a field, or None if it is missing or empty. Raises Invalid."""
    values = fields.get(name, ())
    if len(values) > 1:
        raise Invalid(f"{name}: given {len(values)} times")
    return values[0].strip() or None if values else None


def sanitise_name(name: str) -> str:
    """Return a file name without folders and invisible or control characters, cut before its ending to
    MAX_NAME_CHARACTERS."""
    base = nfc(name).replace("\\", "/").rpartition("/")[2]
    base = "".join(c for c in base if c.isprintable() and unicodedata.category(c) not in ("Cf", "Co", "Cs")).strip(" .")
    stem, dot, ending = base.rpartition(".")
    if len(base) > MAX_NAME_CHARACTERS and dot and len(ending) <= 10:
        base = stem[: MAX_NAME_CHARACTERS - len(ending) - 1] + dot + ending
    return base[:MAX_NAME_CHARACTERS] or "upload"


def _tags(fields: Fields, name: str) -> list[str]:
    """Return tags that are given as a repeated field or as one JSON list. Raises Invalid."""
    values = [value.strip() for value in fields.get(name, ()) if value.strip()]
    if len(values) == 1 and values[0].startswith("["):
        try:
            parsed = json.loads(values[0])
        except (ValueError, RecursionError) as error:
            raise Invalid(f"{name}: is not a JSON list") from error
        if not isinstance(parsed, list) or not all(isinstance(tag, str) for tag in parsed):
            raise Invalid(f"{name}: is not a JSON list of strings")
        return parsed
    return values


def _metadata(fields: Fields) -> dict[str, Any]:
    text = single(fields, "metadata")
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise Invalid("metadata: is not JSON") from error
    if not isinstance(parsed, dict):
        raise Invalid("metadata: is not a JSON object")
    return parsed


def _message(properties: Properties, external_id: str | None, tenant: str, source: str) -> DocumentUpserted:
    """Return the document's message, without its text. Raises Invalid if it would be invalid, so that the client learns
    it at once."""
    try:
        return DocumentUpserted(
            tenant=tenant,
            source=source,
            external_id=external_id or "-",
            observed_at=datetime.now(UTC),
            version=1,
            title=properties.title or properties.file_name,
            content="",
            media_type=properties.media_type or "text/plain",
            acl_tags=list(properties.acl_tags),
            required_tags=list(properties.required_tags),
            metadata=dict(properties.metadata),
        )
    except ValidationError as error:
        first_error = error.errors(include_input=False, include_url=False, include_context=False)[0]
        raise Invalid(f"{first_error['loc'][0] if first_error['loc'] else 'upload'}: {first_error['msg']}") from error
