"""Accepts uploads and reports how far each has come.

The properties that the client sends go into the table, the file into the store, and a notification to the process that
runs the instance.
"""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import UUID, uuid4

from pydantic import ValidationError

from connectors.uploads.options import UploadsQuota
from connectors.uploads.store import Incoming, QuotaReached, Store, Table, Uploaded, Used, Words
from pipeline.core.errors import Retryable
from pipeline.core.identity import document_id
from pipeline.ledger.arrivals import Arrival, arrivals
from pipeline.stores.postgres import translated
from topics.messages import DocumentUpserted

State = Literal[
    "received", "extracting", "published", "searchable", "needs_ocr", "encrypted", "too_large", "failed", "deleted"
]
_OWN_STATES: dict[str, State] = {"needs_ocr": "needs_ocr", "encrypted": "encrypted", "too_large": "too_large"}
"""Codes that are states of their own; all others are ``failed``, with the code beside it."""


@dataclass(frozen=True, slots=True)
class Status:
    upload: Uploaded
    state: State
    reason: str | None = None
    """One line: what is wrong and what to do."""
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """What the runner says of it (``connector_items``)."""

    version: int | None
    revision: str | None
    problem_code: str | None
    problem: str | None


def revision_of(one: Uploaded, extractor: int) -> str:
    return f"{one.version}.{extractor}"


def judged(one: Uploaded, item: Item | None, arrival: Arrival | None) -> Status:
    """Pure."""
    if one.deleted_at is not None:
        return Status(one, "deleted")
    if one.problem_code is not None:
        return Status(one, _OWN_STATES.get(one.problem_code, "failed"), one.problem, one.problem_code)
    if one.extracted_at is None:
        return Status(one, "received" if one.extracting_at is None else "extracting")
    if item is None or item.revision is None or int(item.revision.partition(".")[0]) != one.version:
        return Status(one, "extracting")
    if item.problem_code is not None:  # its owner's words cannot be published
        return Status(one, "failed", item.problem, item.problem_code)
    if arrival is None or item.version is None or arrival.version is None or arrival.version < item.version:
        return Status(one, "published")
    if arrival.searchable and arrival.settled:
        return Status(one, "searchable")
    waiting = "a store has failed at it; it is tried again" if arrival.set_aside else None
    return Status(one, "published", waiting)


async def status_of(table: Table, uploads: Sequence[Uploaded]) -> list[Status]:
    tenant, source = table.me
    keys = {one.external_id: document_id(tenant, source, one.external_id) for one in uploads}
    with translated("uploads"):
        async with table.pool.connection() as connection:
            cursor = await connection.execute(
                "SELECT external_id, version, revision, problem_code, problem_message FROM connector_items"
                " WHERE tenant = %s AND source = %s AND external_id = ANY(%s) AND NOT gone",
                [tenant, source, list(keys)],
            )
            items = {id_: Item(*rest) for id_, *rest in await cursor.fetchall()}
            arrived = await arrivals(connection, list(keys.values()))
    return [judged(one, items.get(one.external_id), arrived.get(keys[one.external_id])) for one in uploads]


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


FIELDS = frozenset({"title", "acl_tags", "required_tags", "metadata", "external_id", "source", "file_name"})
MAX_NAME = 200
NOBODY = 'acl_tags: name who may read it, e.g. "staff" or "user:ada@example.org"; without one nobody could find it'

Fields = Mapping[str, Sequence[str]]


class Invalid(Exception):
    """One line: which field, and what is wrong with it. Quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class Part:
    """The file's own name and type, as the client sends them."""

    name: str = ""
    media_type: str | None = None


def words_of(fields: Fields, part: Part | None, before: Uploaded | None, *, tenant: str, source: str) -> Words:
    """before: the upload that is replaced; what is not said anew stays. Raises Invalid."""
    if unknown := sorted(set(fields) - FIELDS):
        raise Invalid(f"{unknown[0][:50]!r}: no such field (known: {', '.join(sorted(FIELDS))}, and the file)")
    name = sanitised(one(fields, "file_name") or (part.name if part else "") or (before.file_name if before else ""))
    words = Words(
        file_name=name,
        media_type=part.media_type if part else before.media_type if before else None,
        title=one(fields, "title") if "title" in fields else before.title if before else None,
        acl_tags=_tags(fields, "acl_tags") if "acl_tags" in fields else before.acl_tags if before else [],
        required_tags=_tags(fields, "required_tags")
        if "required_tags" in fields
        else before.required_tags
        if before
        else [],
        metadata=_metadata(fields) if "metadata" in fields else before.metadata if before else {},
    )
    if not words.acl_tags:
        raise Invalid(NOBODY)
    _check(words, one(fields, "external_id"), tenant, source)
    return words


def one(fields: Fields, name: str) -> str | None:
    """ "" counts as not said. Raises Invalid."""
    values = fields.get(name, ())
    if len(values) > 1:
        raise Invalid(f"{name}: said {len(values)} times")
    return values[0].strip() or None if values else None


def sanitised(name: str) -> str:
    """A file name and nothing else: no folders, no invisible or control characters, its ending kept when it is cut."""
    base = unicodedata.normalize("NFC", name).replace("\\", "/").rpartition("/")[2]
    base = "".join(c for c in base if c.isprintable() and unicodedata.category(c) not in ("Cf", "Co", "Cs")).strip(" .")
    stem, dot, ending = base.rpartition(".")
    if len(base) > MAX_NAME and dot and len(ending) <= 10:
        base = stem[: MAX_NAME - len(ending) - 1] + dot + ending
    return base[:MAX_NAME] or "upload"


def _tags(fields: Fields, name: str) -> list[str]:
    """The field repeated, or once as a JSON list."""
    values = [value.strip() for value in fields.get(name, ()) if value.strip()]
    if len(values) == 1 and values[0].startswith("["):
        try:
            given = json.loads(values[0])
        except (ValueError, RecursionError) as error:
            raise Invalid(f"{name}: is not a JSON list") from error
        if not isinstance(given, list) or not all(isinstance(tag, str) for tag in given):
            raise Invalid(f"{name}: a list of tags, each of them text")
        return given
    return values


def _metadata(fields: Fields) -> dict[str, Any]:
    text = one(fields, "metadata")
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise Invalid("metadata: is not JSON") from error
    if not isinstance(given, dict):
        raise Invalid("metadata: a JSON object")
    return given


def _check(words: Words, external_id: str | None, tenant: str, source: str) -> None:
    """By the message that will be made of it: what the wire refuses is refused at once."""
    try:
        DocumentUpserted(
            tenant=tenant,
            source=source,
            external_id=external_id or "-",
            observed_at=datetime.now(UTC),
            version=1,
            title=words.title or words.file_name,
            content="",
            media_type=words.media_type or "text/plain",
            acl_tags=list(words.acl_tags),
            required_tags=list(words.required_tags),
            metadata=dict(words.metadata),
        )
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False, include_context=False)[0]
        raise Invalid(f"{found['loc'][0] if found['loc'] else 'upload'}: {found['msg']}") from error
