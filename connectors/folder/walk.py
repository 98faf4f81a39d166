"""Lists the files of a folder that are documents, without reading any of them."""

from __future__ import annotations

import errno
import os
import stat as modes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from connectors.folder.access import FILE, Policy, PolicyError
from connectors.folder.options import FolderOptions
from connectors.protocol import Problem

MAX_PATH_BYTES = 2_000
"""External ids hold 2,000 characters, and Postgres indexes rows of up to 2,700 bytes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    path: str
    stat: os.stat_result
    acl_tags: tuple[str, ...]
    required_tags: tuple[str, ...]


@dataclass(slots=True)
class Walk:
    """One listing of ``targets``, files or folders at or under ``root``, none within another. The attributes are
    complete once ``candidates`` has come to its end.

    Links are never followed: one within the root points to a document that is listed anyway, any other is reported.
    """

    root: str
    targets: list[str]
    options: FolderOptions
    admitted: int = 0
    complete: bool = False
    unreadable: list[str] = field(default_factory=list)
    """Folders that could not be listed: nothing is known about their files."""
    broken: list[str] = field(default_factory=list)
    """Folders whose ``.penstock.toml`` is invalid: their documents stay as they were published."""
    _nobody: set[str] = field(default_factory=set)

    def candidates(self) -> Iterator[Candidate | Problem]:
        policy = Policy.of(self.options)
        if os.path.isdir(self.root):
            for target in self.targets:
                yield from self._from_root(policy, target)
        else:
            yield from self._named_file(policy)
        self.complete = True

    def access_now(self, batch: Sequence[Candidate]) -> list[Candidate | Problem]:
        """Return the same files under the current rules: ``candidates`` reads the rules of a folder once, while its
        caller may take long. A file that is excluded by now, or whose folder's rules are invalid by now, is left out;
        such a folder is reported, and added to ``broken``."""
        known: dict[str, Policy | None] = {}
        current: list[Candidate | Problem] = []
        for candidate in batch:
            policy = self._policy_now(os.path.dirname(candidate.path), known, current)
            if policy is not None and (candidate.path == self.root or policy.admits_file(candidate.path)):
                current.append(replace(candidate, acl_tags=policy.acl_tags, required_tags=policy.required_tags))
        return current

    def _policy_now(
        self, folder: str, known: dict[str, Policy | None], problems: list[Candidate | Problem]
    ) -> Policy | None:
        """Return the rules of a folder; None if it is excluded or if they are invalid, which is reported once."""
        unknown: list[str] = []
        while (at := os.path.dirname(unknown[-1]) if unknown else folder) not in known:
            unknown.append(at)
            if self._is_top(at):
                break
        for at in reversed(unknown):  # a folder may be within a thousand others
            above = Policy.of(self.options) if self._is_top(at) else known[os.path.dirname(at)]
            if above is not None and not self._is_top(at) and not above.admits_folder(at):
                above = None
            try:
                known[at] = above and above.within(at)
            except PolicyError as error:
                problems.append(self._refused(at, at, error))
                known[at] = None
        return known[folder]

    def _is_top(self, folder: str) -> bool:
        """Whether no rules of a folder above count: it is the root, or that of a file that was named itself."""
        return folder == self.root or not is_within(folder, self.root)

    def _named_file(self, policy: Policy) -> Iterator[Candidate | Problem]:
        """Yield a file that is itself a root, whatever its name is; the rules of its folder say who may read it."""
        try:
            policy = policy.within(os.path.dirname(self.root))
        except PolicyError as error:
            yield self._refused(os.path.dirname(self.root), self.root, error)
            return
        yield from self._file(self.root, policy)

    def _from_root(self, policy: Policy, target: str) -> Iterator[Candidate | Problem]:
        """Go down to a target, under the rules that a listing of the whole root applies."""
        folder = self.root
        for name in os.path.relpath(target, self.root).split("/") if target != self.root else ():
            try:
                policy = policy.within(folder)
            except PolicyError as error:
                yield self._refused(folder, target, error)
                return
            path = os.path.join(folder, name)
            try:
                is_folder = modes.S_ISDIR(os.lstat(path).st_mode)
            except OSError as error:
                yield from self._unlistable(path, error)
                return
            if not is_folder:
                if path == target and policy.admits_file(path):
                    yield from self._file(path, policy)
                return
            if not policy.admits_folder(path):
                return
            folder = path
        yield from self._tree(folder, policy)

    def _tree(self, folder: str, policy: Policy) -> Iterator[Candidate | Problem]:
        pending = [(folder, policy)]
        while pending:
            folder, policy = pending.pop()
            try:
                policy = policy.within(folder)
                with os.scandir(folder) as entries:
                    children = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
            except PolicyError as error:
                yield self._refused(folder, folder, error)
                continue
            except OSError as error:
                yield from self._unlistable(folder, error)
                continue
            for name, is_folder in children:
                path = os.path.join(folder, name)
                if not is_folder:
                    if policy.admits_file(path):
                        yield from self._file(path, policy)
                elif policy.admits_folder(path):
                    pending.append((path, policy))

    def _file(self, path: str, policy: Policy) -> Iterator[Candidate | Problem]:
        try:
            stat = os.lstat(path)
        except OSError as error:
            yield from self._unlistable(path, error)
            return
        if problem := self._unfit(path, stat.st_mode):
            yield problem
        elif modes.S_ISREG(stat.st_mode):
            yield from self._nobody_reads(policy)
            self.admitted += 1
            yield Candidate(path, stat, policy.acl_tags, policy.required_tags)

    def _unfit(self, path: str, mode: int) -> Problem | None:
        if modes.S_ISLNK(mode):
            return self._link(path)
        if not modes.S_ISREG(mode):
            return Problem(path, "not_a_file", "is a device, socket or pipe: skipped")
        try:
            size = len(path.encode())
        except UnicodeEncodeError:
            return Problem(path, "name", "its name is not valid UTF-8: rename it")
        if size > MAX_PATH_BYTES:
            return Problem(path, "name", f"its path is longer than {MAX_PATH_BYTES} bytes: move it up")
        return None

    def _link(self, path: str) -> Problem | None:
        target = os.path.realpath(path)
        if not os.path.exists(target):
            return Problem(path, "broken_link", "is a link to nothing: skipped")
        if is_within(target, self.root):
            return None
        return Problem(path, "link_outside", "is a link that leaves the folder: skipped; name its target to ingest it")

    def _nobody_reads(self, policy: Policy) -> Iterator[Problem]:
        """Report once for each rule that nobody may read the files under it."""
        if not policy.acl_tags and (where := policy.acl_from or self.root) not in self._nobody:
            self._nobody.add(where)
            yield Problem(
                where, "nobody", 'has no access tags, so nobody may read the files under it: add acl = ["TAG"]'
            )

    def _refused(self, folder: str, subtree: str, error: PolicyError) -> Problem:
        self.broken.append(subtree)
        return Problem(
            os.path.join(folder, FILE),
            "policy",
            f"{error}; until it is fixed, nothing under it is published, and published documents keep their access",
        )

    def _unlistable(self, path: str, error: OSError) -> Iterator[Problem]:
        """Report a path that cannot be listed. One that has just vanished is no problem."""
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            self.unreadable.append(path)
            code = "permission" if isinstance(error, PermissionError) else "io_error"
            yield Problem(path, code, f"cannot be listed ({error.strerror}): its published documents stay")


def is_within(path: str, folder: str) -> bool:
    """Whether the path is the folder itself or lies under it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def root_problem(root: str) -> Problem | None:
    """Return why a root cannot be scanned at all; nothing is deleted then."""
    try:
        if modes.S_ISDIR(os.stat(root).st_mode):
            with os.scandir(root):
                pass
    except FileNotFoundError:
        return Problem(root, "missing", "there is no such file or folder; its published documents stay")
    except OSError as error:
        return Problem(root, "unreadable", f"cannot be read ({error.strerror}); its published documents stay")
    return None
