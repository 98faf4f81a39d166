"""One branch of a git repository as a source; each file is a document."""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import hmac
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import ClassVar

from connectors.files import may_hold_text
from connectors.git.client import Head, Mirror, RepositoryMissing, Room
from connectors.git.content import Reader, revision
from connectors.git.history import History, Ids, Snapshot, advance_ids, changes, files, rebuild_ids
from connectors.git.options import Access, GitOptions
from connectors.listings import each_entry
from connectors.paths import PATH_KEYS
from connectors.protocol import Problem
from connectors.replay import Received
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
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
    Unlisted,
)
from pipeline.core.errors import Misconfigured, Retryable

PAGE_BYTES = 16 * 1024 * 1024
"""Size of files after which a page ends early. One larger file is a page by itself."""
LISTED_PER_PAGE = 1000
_IDS = "ids"


@asynccontextmanager
async def _playing() -> AsyncIterator[Playground]:
    from connectors.git.playground import playing  # imports a server that production does not need

    async with playing() as playground:
        yield playground


class Git:
    """A source of a repository's files. Cursors: for ``full``, ``{"after": id}``, in the order of ids, which no rename
    changes; for ``changes``, ``{"commit": …}``, with ``to`` and ``after`` in the middle of a change."""

    Options: ClassVar[type[GitOptions]] = GitOptions
    metadata_keys: ClassVar[MetadataKeys] = PATH_KEYS
    playground: ClassVar[Playing] = staticmethod(_playing)

    def __init__(self, options: GitOptions, context: Context, room: Room | None = None) -> None:
        """room: of the mirror; None: ``max_repository_bytes``."""
        self._options = options
        self._context = context
        self._mirror = Mirror(context.folder, options, room)
        self._reader = Reader(self._mirror, options, context.folder / "reading")
        self._history = History()
        self._received = Received(context.memory)
        self._snapshot: Snapshot | None = None
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        return None

    @property
    def held(self) -> int:
        """The number of files whose names are held in memory."""
        return 0 if self._snapshot is None else len(self._snapshot.files)

    def forget(self) -> None:
        """Hold no names until the next reading, which begins with the mirror."""
        self._snapshot, self._history = None, History()

    async def check(self) -> Sequence[Problem]:
        problems = []
        if shutil.which("git") is None:
            return [Problem("git", "missing", "git is not installed, or not on PATH: install it (2.35 or newer)")]
        if self._options.is_ssh and not (self._options.ssh_key_file and self._options.known_hosts_file):
            problems.append(
                Problem(
                    "ssh", "missing", "over ssh, set ssh_key_file and known_hosts_file: no other key or host is used"
                )
            )
        try:
            access = await asyncio.to_thread(self._options.access)
        except Misconfigured as error:
            problems.append(Problem("access_file", "invalid", str(error)))
        else:
            problems += _unreadable(access)
        try:
            await self._mirror.head()
        except (Misconfigured, Retryable) as error:
            code = "invalid" if isinstance(error, Misconfigured) else "unreachable"
            problems.append(Problem("url", code, str(error)))
        return problems

    async def newest(self) -> Cursor | None:
        """Return what ``start`` returns, without fetching anything; None: the remote has no such repository. One that
        was read before has to be there: raises Misconfigured if it is not, and for other reasons, and Retryable."""
        try:
            head = await self._mirror.head()
        except RepositoryMissing:
            if (await self._ids()).commit is not None:
                raise
            return None
        return {"commit": None if head is None else head.commit}

    async def start(self) -> Cursor:
        return {"commit": (await self._current()).commit}

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        after = "" if cursor is None else str(cursor["after"])
        while True:
            tree = await self._current()
            page = self._page(tree, tree.order[bisect.bisect_right(tree.order, after) :])
            if not page:
                return
            after = page[-1]
            yield Page(await self._entries(tree, page), {"after": after})

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        since, to, after = cursor["commit"], cursor.get("to"), cursor.get("after", "")
        while True:
            tree = await self._current()
            to = to or tree.commit
            if to is None or to == since:
                return
            await self._require_descent(since, to, tree.commit)
            ids = await self._changed(since, to, tree)
            while True:
                page = self._page(tree, ids[bisect.bisect_right(ids, after) :])
                rest = ids[bisect.bisect_right(ids, page[-1]) :] if page else []
                place = {"commit": since, "to": to, "after": page[-1]} if rest else {"commit": to}
                yield Page(await self._entries(tree, page), place)
                if not rest:
                    break
                after, tree = page[-1], await self._current()
            since, to, after = to, None, ""

    async def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        after = ""
        while True:
            tree = await self._current()  # a file may have moved to a path with other access
            access = await asyncio.to_thread(self._options.access)
            begin = bisect.bisect_right(tree.order, after)
            ids = tree.order[begin : begin + LISTED_PER_PAGE]
            if not ids:
                return
            after = ids[-1]
            yield each_entry(ids, partial(self._listed, tree, access=access), str)

    def _listed(self, tree: Snapshot, external_id: str, *, access: Access) -> Listed:
        path = tree.documents[external_id]
        acl_tags, required_tags = access.tags_of(path)
        return Listed(
            external_id=external_id,
            acl_tags=acl_tags,
            required_tags=required_tags,
            revision=revision(path, tree.files[path], self._options, tree.branch),
        )

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        tree = await self._current()
        return await self._entries(tree, list(dict.fromkeys(external_ids)))

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        access = await asyncio.to_thread(self._options.access)
        for tag, members in sorted(access.members.items()):
            if tags is None or tag in tags:
                yield Group(tag, members)

    async def on_event(self, request: Request) -> Reaction:
        """React to a push that is signed as by GitHub, Gitea and Forgejo (``X-Hub-Signature-256``), or has GitLab's
        token. A signed event is accepted once, because no two pushes have the same body. A token does not prevent
        replays."""
        secret = self._options.webhook_secret
        key = secret.get_secret_value() if secret is not None else ""
        if not key:  # an empty variable is not a secret
            raise Refused("events are not accepted: webhook_secret is not set")
        signed = "sha256=" + hmac.new(key.encode(), request.body, hashlib.sha256).hexdigest()
        signature = request.headers.get("x-hub-signature-256")
        expected, proof = (signed, signature) if signature else (key, request.headers.get("x-gitlab-token", ""))
        if not hmac.compare_digest(expected.encode(), proof.encode()):
            raise Refused("the event's signature or token is wrong: set the same webhook_secret on both sides")
        if expected == signed:
            if await self._received.has(request.body):
                return Reaction()
            await self._received.add(request.body)
        return Reaction(changes=True)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        return None

    async def _current(self) -> Snapshot:
        """Return the remote's current tree. Raises Retryable and Misconfigured."""
        async with self._lock:
            head = await self._mirror.refresh()
            if head is None:
                return await self._empty()
            if self._snapshot is None or self._snapshot.commit != head.commit or self._snapshot.branch != head.branch:
                self._snapshot = await self._read(head)
            return self._snapshot

    async def _empty(self) -> Snapshot:
        """Return the tree of an empty repository. One that has lost its branches raises Retryable: it proves no
        deletion."""
        ids = await self._ids()
        if ids.commit is not None:
            raise Retryable(
                "the repository has no branch any more: check whether it was emptied; nothing is deleted until then"
            )
        return Snapshot(None, "", {}, {}, ids)

    async def _read(self, head: Head) -> Snapshot:
        assert head.commit is not None
        by_path = await files(self._mirror, head.commit)
        ids = await self._ids()
        if ids.commit != head.commit:
            if ids.commit is None or await self._mirror.has_commit(ids.commit):
                moved = await changes(self._mirror, ids.commit, head.commit)
                ids = advance_ids(ids, moved, head.commit, by_path)
            else:
                ids = rebuild_ids(ids, head.commit, by_path)
            await self._context.memory.put(_IDS, ids.to_json())
        documents = {
            ids.id_of(path): path
            for path, file in by_path.items()
            if may_hold_text(path, file.size) and self._options.selects(path)
        }
        history = self._history
        if self._options.authors:
            await history.advance(self._mirror, head.commit, documents.values())
        return Snapshot(head.commit, head.branch, by_path, dict(sorted(documents.items())), ids, history.last_changes)

    async def _ids(self) -> Ids:
        if self._snapshot is not None:
            return self._snapshot.ids
        stored = await self._context.memory.get(_IDS)
        return Ids() if stored is None else Ids.from_json(stored)

    async def _require_descent(self, since: str | None, to: str, now: str | None) -> None:
        for old, new in ((since, to), (to, now)):
            if old is not None and (new is None or not await self._mirror.is_ancestor(old, new)):
                raise CursorExpired(f"commit {old[:12]} is not in the branch's history any more (a forced push?)")

    async def _changed(self, since: str | None, to: str, tree: Snapshot) -> list[str]:
        """Return the sorted ids of all files that changed between two commits."""
        current = {path: external_id for external_id, path in tree.documents.items()}
        ids = set()
        for change in await changes(self._mirror, since, to):
            for path in (change.path, change.old):
                if path is not None:
                    ids.add(current.get(path) or tree.ids.last_id_of(path))
        return sorted(ids)

    def _page(self, tree: Snapshot, ids: Sequence[str]) -> list[str]:
        page: list[str] = []
        size = 0
        for external_id in ids[: self._options.page_documents]:
            path = tree.documents.get(external_id)
            size += tree.files[path].size if path is not None else 0
            if page and size > PAGE_BYTES:
                break
            page.append(external_id)
        return page

    async def _entries(self, tree: Snapshot, ids: Sequence[str]) -> list[Entry]:
        """Return the entry of each id; Gone, if it is not a document of the tree."""
        access = await asyncio.to_thread(self._options.access)
        present = [(external_id, tree.documents[external_id]) for external_id in ids if external_id in tree.documents]
        entries = await self._reader.entries(tree, present, access)
        return [*entries, *(Gone(external_id) for external_id in ids if external_id not in tree.documents)]


def _unreadable(access: Access) -> list[Problem]:
    """Return the problems of an access that lets nobody read: no tags at all, or a tag without members."""
    problems = []
    if not access.tags():
        problems.append(
            Problem("acl_tags", "nobody", "acl_tags are empty, so nobody may read the documents: name the readers")
        )
    for tag in sorted(access.tags() - set(access.members)):
        if not tag.startswith("user:"):
            problems.append(Problem("members", "nobody", f"the tag {tag!r} has no members: list them in members"))
    return problems
