"""One file as its message, or the reason why it has none. Blocks: runs in threads."""

from __future__ import annotations

import hashlib
import json
import os
import stat as modes
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath

from connectors.checkpoint import Stat
from connectors.extract import EXTRACTOR, Extracted, Unreadable, extract, most_bytes
from connectors.extraction.kinds import HEAD_BYTES
from topics.messages import DocumentUpserted

SETTLED_NS = 2_000_000_000
"""File systems count time in steps of up to 2 s (FAT): what changed less than a step before it was read may have
changed again since, without looking any different."""
ATTEMPTS = 3
EMPTY = Extracted("", "text/plain")
"""What a file without text has become, if it had some when it was last published."""


@dataclass(frozen=True, slots=True)
class FileRead:
    """``extracted`` or ``unreadable``. ``stat`` None: the file was in motion, read it again next time."""

    stat: Stat | None
    size: int
    modified_ns: int
    extracted: Extracted | None = None
    unreadable: Unreadable | None = None


def describe(stat: os.stat_result) -> Stat:
    """What tells that a file is unchanged without reading it; an extractor of another version reads it again."""
    return {
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
        "extractor": EXTRACTOR,
    }


def read(path: str, stat: os.stat_result) -> FileRead:
    """Never raises for what the file is or does. stat: as it was listed."""
    started_ns = time.time_ns()
    try:
        data, stat = _bytes(path)
        extracted, unreadable = extract(data, path), None
    except Unreadable as error:
        extracted, unreadable = None, error
    in_motion = stat.st_ctime_ns > started_ns - SETTLED_NS
    return FileRead(None if in_motion else describe(stat), stat.st_size, stat.st_mtime_ns, extracted, unreadable)


def _bytes(path: str) -> tuple[bytes, os.stat_result]:
    """The file as it stands still. Raises Unreadable."""
    try:
        # Neither a link nor a pipe that took the file's place since it was listed is followed or waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Unreadable("vanished", "vanished before it could be read") from error
    except PermissionError as error:
        raise Unreadable("permission", "may not be read: change its permissions") from error
    except OSError as error:
        raise Unreadable("io_error", f"cannot be opened ({error.strerror})") from error
    with open(descriptor, "rb", buffering=0) as file:
        if os.path.realpath(path) != path:
            raise Unreadable("not_a_file", "is reached over a link by now: skipped")
        try:
            for _ in range(ATTEMPTS):
                before = os.fstat(file.fileno())
                data = _content(file.fileno(), before, path)
                after = os.fstat(file.fileno())
                if describe(before) == describe(after) and len(data) == after.st_size:
                    return data, after
        except OSError as error:
            raise Unreadable("io_error", f"cannot be read to its end ({error.strerror})") from error
    raise Unreadable("changing", "changes while it is being read: it is read again by the next scan")


def _content(descriptor: int, stat: os.stat_result, path: str) -> bytes:
    if not modes.S_ISREG(stat.st_mode):
        raise Unreadable("not_a_file", "is no regular file by now: skipped")
    if stat.st_size > (most := most_bytes(os.pread(descriptor, HEAD_BYTES, 0), path)):
        raise Unreadable("too_large", f"is {stat.st_size:,} bytes; the limit for its kind is {most:,}")
    parts, position = [], 0
    while position <= stat.st_size:  # one byte more than there were: it may be growing
        part = os.pread(descriptor, stat.st_size + 1 - position, position)
        if not part:
            break
        parts.append(part)
        position += len(part)
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Content:
    """What is published of a file, but for its access and its stamps."""

    title: str
    content: str
    media_type: str
    author: str | None
    source_url: str
    modified_at: datetime | None
    metadata: dict[str, str | int | float | bool]

    def fingerprint(self) -> bytes:
        """SHA-256 of all but the time of modification: a file that was only touched is not published."""
        fields = [self.title, self.content, self.media_type, self.author, self.source_url, self.metadata]
        return hashlib.sha256(json.dumps(fields, ensure_ascii=False, sort_keys=True).encode()).digest()


def content_of(path: str, root: str, file: FileRead, extracted: Extracted) -> Content:
    pure = PurePosixPath(path)
    relative = pure.name if path == root else str(pure.relative_to(root))
    return Content(
        title=extracted.title or pure.name,
        content=extracted.text,
        media_type=extracted.media_type,
        author=extracted.author,
        source_url=pure.as_uri(),
        modified_at=_time(file.modified_ns),
        metadata={"path": relative, "size": file.size, "extension": pure.suffix.lower(), **extracted.metadata},
    )


def upserted(
    what: Content,
    *,
    tenant: str,
    source: str,
    path: str,
    version: int,
    observed_at: datetime,
    acl_tags: tuple[str, ...],
    required_tags: tuple[str, ...],
) -> DocumentUpserted:
    return DocumentUpserted(
        tenant=tenant,
        source=source,
        external_id=path,
        version=version,
        observed_at=observed_at,
        title=what.title,
        content=what.content,
        media_type=what.media_type,
        acl_tags=list(acl_tags),
        required_tags=list(required_tags),
        source_url=what.source_url,
        author=what.author,
        source_modified_at=what.modified_at,
        metadata=dict(what.metadata),
    )


def _time(nanoseconds: int) -> datetime | None:
    """None for times that no calendar of ours knows (a broken clock or archive)."""
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return None
