"""Reads one file, and returns it as an entry of a source. The functions block: call them in threads."""

from __future__ import annotations

import hashlib
import json
import os
import stat as modes
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath

from connectors.errors import BadData
from connectors.extract import EXTRACTOR, Extracted, Unreadable, extract, most_bytes
from connectors.extraction.kinds import HEAD_BYTES
from connectors.folder.checkpoint import Stat
from connectors.folder.walk import Candidate
from connectors.paths import path_metadata
from connectors.set_aside import UNEXPECTED, reading_data
from connectors.source import Document, Entry, Gone
from connectors.source import Unreadable as UnreadableEntry

SETTLED_NS = 2_000_000_000
"""File systems count time in steps of up to 2 s (FAT): what changed less than a step before it was read may have
changed again since, without looking any different."""
ATTEMPTS = 3
EMPTY = Extracted("", "text/plain")
"""Published for a file that has lost its text since it was last published."""


@dataclass(frozen=True, slots=True)
class FileRead:
    """Either ``extracted`` or ``unreadable`` is set. ``stat`` is None if the file may have changed while it was read:
    the next scan reads it again."""

    stat: Stat | None
    size: int
    modified_ns: int
    extracted: Extracted | None = None
    unreadable: Unreadable | None = None


def describe(stat: os.stat_result) -> Stat:
    """Return the attributes that are equal while a file is unchanged. Another version of the extractor differs too."""
    return {
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
        "extractor": EXTRACTOR,
    }


def read(path: str, stat: os.stat_result) -> FileRead:
    """Read and extract a file. stat: as it was listed. A file that cannot be read is a result, not an error."""
    started_ns = time.time_ns()
    try:
        data, stat = _bytes(path)
        extracted, unreadable = extract(data, path), None
    except Unreadable as error:
        extracted, unreadable = None, error
    in_motion = stat.st_ctime_ns > started_ns - SETTLED_NS
    return FileRead(None if in_motion else describe(stat), stat.st_size, stat.st_mtime_ns, extracted, unreadable)


def _bytes(path: str) -> tuple[bytes, os.stat_result]:
    """Return the content of a file that did not change meanwhile, and its attributes. Raises Unreadable."""
    try:
        descriptor = open_without_links(path)
    except FileNotFoundError as error:
        raise Unreadable("vanished", "vanished before it could be read") from error
    except PermissionError as error:
        raise Unreadable("permission", "may not be read: change its permissions") from error
    except NotADirectoryError as error:
        raise Unreadable("not_a_file", "is now reached through a link: skipped") from error
    except OSError as error:
        raise Unreadable("io_error", f"cannot be opened ({error.strerror})") from error
    with open(descriptor, "rb", buffering=0) as file:
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


def open_without_links(path: str) -> int:
    """Open a file for reading, and return its descriptor. No link is followed, also none that takes the place of a
    folder meanwhile: each folder is opened in the one above it. A pipe is not waited for. Raises OSError, of these
    NotADirectoryError for a link in the place of a folder."""
    *folders, name = path.strip("/").split("/")
    flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    within = os.open("/", flags)
    try:
        for folder in folders:
            below = os.open(folder, flags, dir_fd=within)
            os.close(within)
            within = below
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=within)
    finally:
        os.close(within)


def _content(descriptor: int, stat: os.stat_result, path: str) -> bytes:
    if not modes.S_ISREG(stat.st_mode):
        raise Unreadable("not_a_file", "is no longer a regular file: skipped")
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


def entry_of(
    file: FileRead,
    candidate: Candidate,
    root: str,
    external_id: str,
    *,
    publish_empty: bool = True,
    revision: str | None = None,
) -> Entry:
    """Return a file that was read as an entry of a source.

    publish_empty: a file without text is a document without text; otherwise it is unreadable.
    """
    try:
        with reading_data():
            return _entry_of(file, candidate, root, external_id, publish_empty, revision)
    except BadData as error:
        return UnreadableEntry(
            external_id=external_id,
            code=UNEXPECTED,
            message=str(error),
            acl_tags=candidate.acl_tags,
            required_tags=candidate.required_tags,
            revision=revision,
        )


def _entry_of(
    file: FileRead, candidate: Candidate, root: str, external_id: str, publish_empty: bool, revision: str | None
) -> Entry:
    error = file.unreadable
    if error is not None and error.code == "vanished":
        return Gone(external_id)
    if error is not None and not (error.code == "empty" and publish_empty):
        return UnreadableEntry(
            external_id=external_id,
            code=error.code,
            message=str(error),
            acl_tags=candidate.acl_tags,
            required_tags=candidate.required_tags,
            revision=revision,
        )
    extracted = file.extracted or EMPTY
    path = PurePosixPath(candidate.path)
    relative = path.name if candidate.path == root else str(path.relative_to(root))
    return Document(
        external_id=external_id,
        title=extracted.title or path.name,
        content=extracted.text,
        media_type=extracted.media_type,
        acl_tags=candidate.acl_tags,
        required_tags=candidate.required_tags,
        revision=revision,
        source_url=path.as_uri(),
        author=extracted.author,
        source_modified_at=_time(file.modified_ns),
        metadata={
            **path_metadata(relative, file.size),
            "extension": path.suffix.lower(),
            **extracted.metadata,
        },
    )


def revision_of(candidate: Candidate) -> str:
    """Return a digest of the path and attributes of the file as it was listed: what changes meanwhile is read again."""
    state = json.dumps([candidate.path, describe(candidate.stat)], sort_keys=True)
    return hashlib.sha256(state.encode()).hexdigest()[:32]


def fingerprint(document: Document) -> bytes:
    """Return the SHA-256 of everything but access and modification time: a file that was only touched is not published
    again. ``connector_items`` of older installations hold the same digests: what follows from the path is left out."""
    fields = [
        document.title,
        document.content,
        document.media_type,
        document.author,
        document.source_url,
        {name: value for name, value in document.metadata.items() if name != "folder"},
    ]
    text = json.dumps(fields, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()


def _time(nanoseconds: int) -> datetime | None:
    """Return None for times outside of the calendar (after a broken clock or archive)."""
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return None
