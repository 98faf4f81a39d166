"""A git repository as a source: one branch of it, file by file."""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import hmac
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

from connectors.git.client import Head, Mirror
from connectors.git.content import Reader, revision
from connectors.git.history import History, Ids, Snapshot, advanced, changes, files, is_taken, refounded
from connectors.git.options import Access, GitOptions
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
    Page,
    Playground,
    Playing,
    Reaction,
    Refused,
    Request,
)
from pipeline.core.errors import Misconfigured, Retryable

PAGE_BYTES = 16 * 1024 * 1024
"""Of files, before a page ends early. One larger file is a page by itself."""
LISTED = 1000
_IDS = "ids"


@asynccontextmanager
async def _playing() -> AsyncIterator[Playground]:
    from connectors.git.playground import playing  # what only trying needs is not loaded at work

    async with playing() as playground:
        yield playground


class Git:
    """Cursors. full: ``{"after": id}``, in the order of ids, which no rename changes. changes: ``{"commit": …}``; in
    the midst of a change ``to`` and ``after`` besides."""

    Options: ClassVar[type[GitOptions]] = GitOptions
    playground: ClassVar[Playing] = staticmethod(_playing)

    def __init__(self, options: GitOptions, context: Context) -> None:
        self._options = options
        self._context = context
        self._mirror = Mirror(context.folder, options)
        self._reader = Reader(self._mirror, options, context.folder / "reading")
        self._history = History()
        self._received = Received(context.memory)
        self._now: Snapshot | None = None
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        return None

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
            problems += _unread(access)
        try:
            await self._mirror.ask()
        except (Misconfigured, Retryable) as error:
            code = "invalid" if isinstance(error, Misconfigured) else "unreachable"
            problems.append(Problem("url", code, str(error)))
        return problems

    async def start(self) -> Cursor:
        return {"commit": (await self._fresh()).commit}

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        after = "" if cursor is None else str(cursor["after"])
        while True:
            tree = await self._fresh()
            wanted = self._page(tree, tree.order[bisect.bisect_right(tree.order, after) :])
            if not wanted:
                return
            after = wanted[-1]
            yield Page(await self._entries(tree, wanted), {"after": after})

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        since, to, after = cursor["commit"], cursor.get("to"), cursor.get("after", "")
        while True:
            tree = await self._fresh()
            to = to or tree.commit
            if to is None or to == since:
                return
            await self._still_leads(since, to, tree.commit)
            ids = await self._changed(since, to, tree)
            while True:
                wanted = self._page(tree, ids[bisect.bisect_right(ids, after) :])
                rest = ids[bisect.bisect_right(ids, wanted[-1]) :] if wanted else []
                now = {"commit": since, "to": to, "after": wanted[-1]} if rest else {"commit": to}
                yield Page(await self._entries(tree, wanted), now)
                if not rest:
                    break
                after, tree = wanted[-1], await self._fresh()
            since, to, after = to, None, ""

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        after = ""
        while True:
            tree = await self._fresh()  # a file may have moved to where others read it
            access = await asyncio.to_thread(self._options.access)
            begin = bisect.bisect_right(tree.order, after)
            listed = [self._listed(tree, one, access) for one in tree.order[begin : begin + LISTED]]
            if not listed:
                return
            after = listed[-1].external_id
            yield listed

    def _listed(self, tree: Snapshot, external_id: str, access: Access) -> Listed:
        path = tree.taken[external_id]
        acl_tags, required_tags = access.of(path)
        return Listed(
            external_id=external_id,
            acl_tags=acl_tags,
            required_tags=required_tags,
            revision=revision(path, tree.files[path], self._options, tree.branch),
        )

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        tree = await self._fresh()
        return await self._entries(tree, list(dict.fromkeys(external_ids)))

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        access = await asyncio.to_thread(self._options.access)
        for tag, members in sorted(access.members.items()):
            if tags is None or tag in tags:
                yield Group(tag, members)

    async def on_event(self, request: Request) -> Reaction:
        """A push, as GitHub, Gitea and Forgejo sign it (``X-Hub-Signature-256``), or with GitLab's token. A signed one
        is taken once: no two pushes have the same body. A token is no signature: who has it makes events at will."""
        secret = self._options.webhook_secret
        key = secret.get_secret_value() if secret is not None else ""
        if not key:  # a variable that is there and empty is no secret either: everybody knows it
            raise Refused("events are not taken: webhook_secret is not set")
        signed = "sha256=" + hmac.new(key.encode(), request.body, hashlib.sha256).hexdigest()
        given = request.headers.get("x-hub-signature-256")
        expected, given = (signed, given) if given else (key, request.headers.get("x-gitlab-token", ""))
        if not hmac.compare_digest(expected.encode(), given.encode()):
            raise Refused("the event's signature or token is not ours: is webhook_secret the same on both sides?")
        if expected == signed:
            if await self._received.has(request.body):
                return Reaction()
            await self._received.add(request.body)
        return Reaction(changes=True)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        return None

    async def _fresh(self) -> Snapshot:
        """The tree as it is at the remote now. Raises Retryable, Misconfigured."""
        async with self._lock:
            head = await self._mirror.refresh()
            if head is None:
                return await self._nothing()
            if self._now is None or self._now.commit != head.commit or self._now.branch != head.branch:
                self._now = await self._read(head)
            return self._now

    async def _nothing(self) -> Snapshot:
        """An empty repository; one that lost all its branches is no such thing, and proves no deletion."""
        ids = await self._ids()
        if ids.commit is not None:
            raise Retryable("the repository has no branch any more: was it emptied? nothing is deleted for that")
        return Snapshot(None, "", {}, {}, ids)

    async def _read(self, head: Head) -> Snapshot:
        assert head.commit is not None
        found = await files(self._mirror, head.commit)
        ids = await self._ids()
        if ids.commit != head.commit:
            if ids.commit is None or await self._mirror.has(ids.commit):
                moved = await changes(self._mirror, ids.commit, head.commit)
                ids = advanced(ids, moved, head.commit, found)
            else:
                ids = refounded(ids, head.commit, found)
            await self._context.memory.put(_IDS, ids.kept())
        taken = {
            ids.of(path): path for path, file in found.items() if is_taken(path, file) and self._options.selects(path)
        }
        if self._options.authors:
            await self._history.advance(self._mirror, head.commit, taken.values())
        return Snapshot(head.commit, head.branch, found, dict(sorted(taken.items())), ids)

    async def _ids(self) -> Ids:
        if self._now is not None:
            return self._now.ids
        kept = await self._context.memory.get(_IDS)
        return Ids() if kept is None else Ids.loaded(kept)

    async def _still_leads(self, since: str | None, to: str, now: str | None) -> None:
        for old, new in ((since, to), (to, now)):
            if old is not None and (new is None or not await self._mirror.leads_to(old, new)):
                raise CursorExpired(f"commit {old[:12]} is not in the branch's history any more (a forced push?)")

    async def _changed(self, since: str | None, to: str, tree: Snapshot) -> list[str]:
        """The ids of all that changed between two commits, sorted."""
        here = {path: external_id for external_id, path in tree.taken.items()}
        found = set()
        for change in await changes(self._mirror, since, to):
            for path in (change.path, change.old):
                if path is not None:
                    found.add(here.get(path) or tree.ids.was(path))
        return sorted(found)

    def _page(self, tree: Snapshot, ids: Sequence[str]) -> list[str]:
        page: list[str] = []
        size = 0
        for external_id in ids[: self._options.page_documents]:
            path = tree.taken.get(external_id)
            size += tree.files[path].size if path is not None else 0
            if page and size > PAGE_BYTES:
                break
            page.append(external_id)
        return page

    async def _entries(self, tree: Snapshot, ids: Sequence[str]) -> list[Entry]:
        """Each id as it is in the tree; Gone, if it is not in it, or not taken."""
        access = await asyncio.to_thread(self._options.access)
        wanted = [(external_id, tree.taken[external_id]) for external_id in ids if external_id in tree.taken]
        found = await self._reader.entries(tree, wanted, access, self._history.touches)
        return [*found, *(Gone(external_id) for external_id in ids if external_id not in tree.taken)]


def _unread(access: Access) -> list[Problem]:
    problems = []
    if not access.tags():
        problems.append(Problem("acl_tags", "nobody", "acl_tags are empty, so nobody may read anything: name who may"))
    for tag in sorted(access.tags() - set(access.members)):
        if not tag.startswith("user:"):
            problems.append(Problem("members", "nobody", f"nobody holds the tag {tag!r}: list its holders in members"))
    return problems
