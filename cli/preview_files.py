"""The files of a proposed edit, read as the folder connector reads them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from connectors.folder.content import EMPTY, read
from connectors.folder.options import FolderOptions
from connectors.folder.walk import Candidate, Walk, is_within
from pipeline.core.errors import PenstockError

NOBODY = FolderOptions(acl_tags=("preview",))
"""A preview publishes nothing, and the documents' readers stay as they are: these tags are not used."""
GIT_SECONDS = 60.0


class BadPath(PenstockError):
    """A path or revision is wrong; the message names it."""


@dataclass(frozen=True, slots=True)
class File:
    path: str
    """Relative to the root, with ``/``."""
    absolute: str
    title: str = ""
    content: str | None = None
    """None: the file is deleted."""
    media_type: str = "text/plain"


@dataclass(slots=True)
class Proposal:
    files: list[File] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    """The folders that ``files`` lists completely, as absolute paths."""
    problems: list[str] = field(default_factory=list)
    """One line for each file that cannot be read. Its document would stay as it is."""


def in_folders(paths: Sequence[Path], root: Path | None) -> Proposal:
    """All files of these folders, and these files. A file that does not exist is deleted. root: the folder that paths
    are relative to; None: each path's own folder. Raises BadPath."""
    proposal = Proposal()
    for path in paths:
        target = os.path.realpath(path)
        base = os.path.realpath(root) if root else target if os.path.isdir(target) else os.path.dirname(target)
        if not is_within(target, base):
            raise BadPath(f"{path} is not within {root}")
        if os.path.isdir(target):
            proposal.folders.append(target)
        elif not os.path.lexists(target):
            proposal.files.append(File(os.path.relpath(target, base), target))
            continue
        proposal.files += _files(base, target, proposal.problems)
    return proposal


def since_revision(paths: Sequence[Path], root: Path | None, revision: str) -> Proposal:
    """The files that differ between the working tree and the commit at which it left ``revision``. root: the folder
    that paths are relative to; None: the top of the repository. Raises BadPath."""
    if revision.startswith("-"):
        raise BadPath(f"{revision} is no revision")
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    top = os.path.realpath(_git(folder, "rev-parse", "--show-toplevel").rstrip("\n"))
    named = [os.path.realpath(path) for path in paths]
    base = os.path.realpath(root) if root else top
    changed = _git(top, "diff", "--merge-base", "--name-only", "--no-renames", "-z", revision, "--", *named)
    added = _git(top, "ls-files", "--others", "--exclude-standard", "-z", "--", *named)
    proposal = Proposal()
    for name in sorted({*changed.split("\0"), *added.split("\0")} - {""}):
        target = os.path.join(top, name)
        if not is_within(target, base):
            continue
        if os.path.lexists(target):
            proposal.files += _files(base, target, proposal.problems)
        else:
            proposal.files.append(File(os.path.relpath(target, base), target))
    return proposal


def _files(root: str, target: str, problems: list[str]) -> Iterator[File]:
    """The files at or under the target that are documents."""
    walk = Walk(root, [target], NOBODY)
    for entry in walk.candidates():
        if not isinstance(entry, Candidate):
            problems.append(str(entry))
            continue
        result = read(entry.path, entry.stat)
        error = result.unreadable
        if error is not None and error.code != "empty":
            problems.append(f"{entry.path} {error}")
            continue
        extracted = result.extracted or EMPTY
        name = os.path.basename(entry.path)
        path = name if entry.path == root else os.path.relpath(entry.path, root)
        yield File(path, entry.path, extracted.title or name, extracted.text, extracted.media_type)


def _git(folder: str | os.PathLike[str], *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(folder), *arguments], capture_output=True, timeout=GIT_SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise BadPath("--git needs git, which is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise BadPath(f"git did not answer within {GIT_SECONDS:g} s") from error
    if done.returncode != 0:
        lines: Iterable[str] = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
        raise BadPath(f"git: {next(iter(lines))}")
    return done.stdout.decode(errors="surrogateescape")
