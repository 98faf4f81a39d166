"""Object stores as a source. A document is an object; its external id is its path below the source's address."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from posixpath import basename, dirname, join
from typing import ClassVar, ParamSpec, TypeVar
from urllib.parse import quote

from connectors.base import SmallSource
from connectors.extract import extracted_revision
from connectors.file_documents import document_from_file
from connectors.files import may_hold_text, temporary_file
from connectors.folder.access import FILE, MAX_BYTES, SKIPPED, Policy, PolicyError
from connectors.objects.options import ObjectsOptions
from connectors.objects.store import (
    MOST_NAMES,
    AccessDenied,
    Archived,
    FolderTooLarge,
    NotReadable,
    ObjectTooLarge,
    Store,
    StoredObject,
    is_readable_name,
)
from connectors.paths import PATH_KEYS, path_metadata
from connectors.protocol import printable
from connectors.set_aside import Failures
from connectors.source import Context, Entry, Gone, Listed, MetadataKeys, Playground, Unlisted, Unreadable
from pipeline.core.errors import Misconfigured, Retryable

P = ParamSpec("P")
T = TypeVar("T")

PAGE_LISTED = 1_000
PAGE_FOLDERS = 50
"""A page of the listing ends after so many objects, or so many folders."""
MAX_DEPTH = 64
"""Folders in folders: each costs requests of its own, and one object of S3 may be within five hundred."""
WAITING_BYTES = 64 * 1024 * 1024
"""The most memory for the names of folders that are not listed yet: half a million of a hundred characters."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A folder whose sidecar file is invalid or cannot be read, in the place of its rules and of those below."""

    folder: str
    reason: str
    """A sentence about the file, which says how to correct it."""


@dataclass(slots=True)
class _Page:
    """A page of the listing, before the rules are read."""

    objects: dict[str, StoredObject] = field(default_factory=dict)
    unlisted: list[Unlisted] = field(default_factory=list)
    unruled: set[str] = field(default_factory=set)
    """Folders that have no sidecar file."""
    folders: int = 0


class Objects(SmallSource):
    """A ``connectors.source.Source``. A moved object is another document: a store does not say that it was moved."""

    Options = ObjectsOptions
    metadata_keys: ClassVar[MetadataKeys] = PATH_KEYS
    options: ObjectsOptions

    def __init__(self, options: ObjectsOptions, context: Context) -> None:
        super().__init__(options, context)
        self._store = Store(options.url, options.arguments())
        self._failures = Failures()

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        from connectors.objects.playground import playing

        return playing()

    async def list(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        waiting, waiting_bytes = [""], sys.getsizeof("")
        page = _Page()
        while waiting:
            folder = waiting.pop()
            waiting_bytes -= sys.getsizeof(folder)
            folders_left_out = is_deepest = False
            try:
                pages = self._store.pages(folder)
                while (part := await self.blocking(next, pages, None)) is not None:
                    page.objects |= {stored.path: stored for stored in part.objects}
                    if part.is_whole and join(folder, FILE) not in {*page.objects, *part.links}:
                        page.unruled.add(folder)
                    for path in part.folders:
                        if SKIPPED.fullmatch(basename(path)):
                            continue
                        if path.count("/") >= MAX_DEPTH:
                            is_deepest = True
                            continue
                        if waiting_bytes + (size := sys.getsizeof(path)) > WAITING_BYTES:
                            folders_left_out = True
                            continue
                        waiting.append(path)
                        waiting_bytes += size
                    if len(page.objects) >= PAGE_LISTED:
                        yield await self._listed(page)
                        page = _Page()
                if folders_left_out:
                    page.unlisted.append(_unlisted(folder, "it holds too many folders: divide it"))
                if is_deepest:
                    reason = f"it holds folders, and is within {MAX_DEPTH} others: move them up"
                    page.unlisted.append(_unlisted(folder, reason))
            except AccessDenied:
                page.unlisted.append(_unlisted(folder, "the store denies access to it"))
            except NotReadable as error:
                page.unlisted.append(_unlisted(folder, str(error)))
            except FolderTooLarge:
                page.unlisted.append(_unlisted(folder, f"it holds more than {MOST_NAMES:,} names: divide it"))
            page.folders += 1
            if page.folders >= PAGE_FOLDERS:
                yield await self._listed(page)
                page = _Page()
        yield await self._listed(page)

    async def _listed(self, page: _Page) -> Sequence[Listed | Unlisted]:
        policies = await self._policies({dirname(path) for path in page.objects}, without=page.unruled)
        broken = {policy.folder: policy for policy in policies.values() if isinstance(policy, Broken)}
        return [
            *page.unlisted,
            *(_unlisted(folder, policy.reason) for folder, policy in broken.items()),
            *await self.blocking(self._admitted, page.objects, policies),
        ]

    def _admitted(
        self, objects: Mapping[str, StoredObject], policies: Mapping[str, Policy | Broken]
    ) -> Sequence[Listed]:
        return [
            Listed(
                external_id=path,
                acl_tags=policy.acl_tags,
                required_tags=policy.required_tags,
                revision=extracted_revision(stored.state),
            )
            for path, stored in objects.items()
            if isinstance(policy := policies[dirname(path)], Policy) and self._admits(stored, policy)
        ]

    async def read(self, external_id: str) -> Entry:
        if any(name in ("", ".", "..") or SKIPPED.fullmatch(name) for name in external_id.split("/")):
            return Gone(external_id)
        if not is_readable_name(external_id, self.options.url.partition("://")[0]):
            return Gone(external_id)
        folder, name = dirname(external_id), basename(external_id)
        policy = (await self._policies([folder]))[folder]
        if isinstance(policy, Broken):
            await self.blocking(self._store.check)  # raises where the credentials are the reason
            return Unreadable(external_id=external_id, code="bad_rules", message=policy.reason, acl_tags=())
        try:
            stored = await self._of_one(external_id, self._store.find, external_id)
            if stored is None or not await self.blocking(self._admits, stored, policy):
                return Gone(external_id)
            return await self._document(stored, policy)
        except (AccessDenied, NotReadable) as error:
            if not isinstance(error.__cause__, Retryable):  # after which the store was checked already
                await self.blocking(self._store.check)  # raises where the store or the credentials are the reason
            code, message = "unavailable", f"{name} {error}"
            if isinstance(error, AccessDenied):
                code, message = "access_denied", f"the store denies access to {name}: allow the account to read it"
            return Unreadable(
                external_id=external_id,
                code=code,
                message=message,
                acl_tags=policy.acl_tags,
                required_tags=policy.required_tags,
            )

    async def _of_one(self, path: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of the store that concerns one object. Raises NotReadable also where the store answers, and
        this object is the reason that the function fails: others are read."""
        try:
            result = await self.blocking(function, *args, **kwargs)
        except Retryable as error:
            await self.blocking(self._store.check)  # raises where the store is the reason
            self._failures.succeed()
            if not self._failures.fail(path, error):
                raise
            raise NotReadable(f"cannot be read: {error}") from error
        self._failures.succeed(path)
        return result

    async def _document(self, stored: StoredObject, policy: Policy) -> Entry:
        name, revision, most = basename(stored.path), extracted_revision(stored.state), self.options.max_file_bytes
        with temporary_file(self.context.folder) as file:
            try:
                if not await self._of_one(stored.path, self._store.download, stored, file, most):
                    return Gone(stored.path)
            except Archived:  # it is tried again after a change: each attempt at all archived objects would cost much
                return Unreadable(
                    external_id=stored.path,
                    code="archived",
                    message=f"{name} is archived: restore it, then penstock connector run {self.context.name} --full",
                    acl_tags=policy.acl_tags,
                    required_tags=policy.required_tags,
                    revision=revision,
                )
            except ObjectTooLarge:
                return Unreadable(
                    external_id=stored.path,
                    code="too_large",
                    message=f"{name} is larger than {most:,} bytes: raise max_file_bytes, or divide the file",
                    acl_tags=policy.acl_tags,
                    required_tags=policy.required_tags,
                    revision=revision,
                )
            return await document_from_file(
                file,
                name,
                external_id=stored.path,
                acl_tags=policy.acl_tags,
                required_tags=policy.required_tags,
                revision=revision,
                source_url=self.options.source_url and self.options.source_url.format(path=quote(stored.path)),
                source_modified_at=stored.modified_at,
                metadata=path_metadata(stored.path, stored.size),
            )

    def _admits(self, stored: StoredObject, policy: Policy) -> bool:
        path = stored.path
        return may_hold_text(path, stored.size) and policy.admits_file(path) and self.options.selects(path)

    async def _policies(self, folders: Iterable[str], *, without: Collection[str] = ()) -> dict[str, Policy | Broken]:
        """Return the rules of each folder, read now. without: folders that have no sidecar file. Raises Misconfigured
        for an invalid one of the whole store."""
        policies: dict[str, Policy | Broken] = {}
        for folder in folders:
            missing = []
            while folder not in policies:
                missing.append(folder)
                if not folder:
                    break
                folder = dirname(folder)
            for below in reversed(missing):
                above = policies[dirname(below)] if below else Policy(self.options.acl_tags, self.options.required_tags)
                policies[below] = above if below in without else await self._policy_within(below, above)
        return policies

    async def _policy_within(self, folder: str, policy: Policy | Broken) -> Policy | Broken:
        """Return the rules of a folder, of which ``policy`` are those of the folder above."""
        if not self.options.sidecars or isinstance(policy, Broken):
            return policy
        path = join(folder, FILE)
        try:
            raw = await self._of_one(path, self._store.read, path, MAX_BYTES + 1)
            return policy if raw is None else await self.blocking(policy.with_file, raw, path, folder)
        except (PolicyError, NotReadable) as error:
            if not folder:
                raise Misconfigured(f"{path} {error}: nothing is read until it is corrected") from error
            reason = f"{path} {error}: nothing in its folder is read until it is corrected"
            return Broken(folder, printable(reason))


def _unlisted(folder: str, reason: str) -> Unlisted:
    return Unlisted(part=f"folder {folder or '/'}", reason=reason, id_prefix=f"{folder}/" if folder else None)
