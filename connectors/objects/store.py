"""A folder of an object store, through fsspec. All functions block: call them in threads."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import fsspec

from connectors.folder.content import open_without_links
from pipeline.core.errors import Misconfigured, PenstockError, Retryable

REFUSED = {
    "AuthenticationException": "refuses the credentials",
    "BadHostKeyException": "has another host key than known_hosts says",
    "NoCredentialsError": "has no credentials",
    "PartialCredentialsError": "has incomplete credentials",
}
"""Errors of vendors' libraries, by class, that only a person can correct."""
SFTP = ("sftp", "ssh")
LOCAL = ("file", "local")
S3 = ("s3", "s3a")
WITH_LINKS = (*LOCAL, *SFTP)
"""Protocols of stores that may hold symbolic links."""
COPIED_BYTES = 1024 * 1024
PAGE = 1_000
"""The most entries in one page of a folder; as many as S3 returns at once."""
MOST_NAMES = 200_000
"""The most names in a folder of a server of SFTP, which is listed at once: half a kilobyte of memory for each."""
PREFETCHED_REQUESTS = 64
"""Requests to a server of SFTP at a time."""
OF_ONE = (errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of what was requested, and not of the store. The first is s3fs's for an answer of 400: among others, for an
object that its writer has encrypted with a key of their own."""
REFUSES = "cannot be read, because the store refuses it"
ETAGS = ("ETag", "etag")
TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Keys of fsspec's descriptions of files, which differ from store to store."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a listing."""

    path: str
    """Relative to the folder."""
    size: int
    state: str
    """Differs after each change: the etag, or else size and modification time."""
    modified_at: datetime | None


@dataclass(frozen=True, slots=True)
class Folder:
    """One page of a folder. Objects of which a name in the path is a symbolic link are not part of the store."""

    objects: list[StoredObject]
    folders: list[str]
    """Paths."""
    links: set[str]
    """Paths of symbolic links."""
    is_whole: bool
    """Whether the folder holds nothing else."""


ARCHIVED = "InvalidObjectState"
"""S3's code for an object in an archive (Amazon S3 API reference, "Error responses")."""


class AccessDenied(Exception):
    """The store denies access to one folder or object."""


class FolderTooLarge(Exception):
    """A folder holds more names than are listed."""


class Archived(AccessDenied):
    """The object has to be restored from an archive, such as S3 Glacier, before it can be read."""


class NotReadable(Exception):
    """An object is there and cannot be read. The message is the end of a sentence about it."""


class _Link(Exception):
    """A symbolic link is in the place of an object, or of a folder above it."""


class ObjectTooLarge(Exception):
    """An object has more bytes than permitted."""


class Store:
    """The folder at an address. All methods raise Retryable while the store cannot respond, and Misconfigured where it
    refuses the credentials, or the package for its protocol is missing. After an error they connect again."""

    def __init__(self, url: str, arguments: Mapping[str, Any]) -> None:
        self._url = url
        self._protocol = url.partition("://")[0]
        self._arguments = {**arguments, "use_listings_cache": False, "skip_instance_cache": True}
        self._connected: tuple[Any, str] | None = None
        self._connecting = Lock()
        # paramiko's client loses responses when threads share it.
        self._serial: AbstractContextManager[object] = Lock() if self._protocol in SFTP else nullcontext()

    def pages(self, folder: str) -> Iterator[Folder]:
        """List a folder, without the folders in it. An absent one is empty; the root has to hold something, because a
        store does not tell an empty folder from a wrong address. Raises FolderTooLarge, and AccessDenied and
        NotReadable for another one than the root."""
        entries: Iterator[Mapping[str, Any]] | None = None
        is_first, is_last, holds_any = True, False, False
        while not is_last:
            with self._connection() as (fs, root):
                try:
                    if entries is None:
                        entries = self._entries(fs, _below(root, folder))
                    page = list(islice(entries, PAGE))
                except (FileNotFoundError, NotADirectoryError):
                    if not is_first:  # the store says no more what else was in it
                        raise
                    page = []
                except PermissionError as error:
                    if folder:
                        raise AccessDenied from error
                    raise
                except OSError as error:
                    if folder and _is_of_one(error):
                        raise NotReadable(REFUSES) from error
                    raise
            is_last = len(page) < PAGE
            listed = Folder([], [], set(), is_whole=is_first and is_last)
            for entry in page:
                path = str(entry["name"]).removeprefix(root).strip("/")
                if path == folder.strip("/") or not is_readable_name(path, self._protocol):
                    continue
                if _is_link(entry):
                    listed.links.add(path)
                elif entry["type"] == "directory":
                    listed.folders.append(path)
                elif entry["type"] == "file":
                    listed.objects.append(_stored(path, entry))
            is_first, holds_any = False, bool(holds_any or listed.objects or listed.folders)
            if is_last and not folder and not holds_any:
                raise Retryable(
                    f"nothing is at the {self._protocol} address: check bucket and prefix; nothing is deleted"
                )
            yield listed

    def check(self) -> None:
        """Raise what listing the address raises, where the credentials are the reason."""
        with suppress(FolderTooLarge):
            next(self.pages(""))

    def _entries(self, fs: Any, path: str) -> Iterator[Mapping[str, Any]]:
        """Describe what is in a folder, as fsspec does. Its own listings are whole, and are used only where a
        store has no other ones."""
        if self._protocol in LOCAL:
            with os.scandir(path) as scanned:
                for entry in scanned:
                    with suppress(FileNotFoundError):
                        yield fs.info(entry)
        elif self._protocol in S3:
            bucket, key, _ = fs.split_path(path)
            where = {"Bucket": bucket, "Prefix": f"{key}/" if key else "", "Delimiter": "/"}
            is_truncated, tokens = True, set[int]()
            while is_truncated:
                answer = fs.call_s3("list_objects_v2", **where)
                if is_truncated := bool(answer.get("IsTruncated")):
                    token = answer["NextContinuationToken"]
                    if hash(token) in tokens:
                        raise Retryable("the s3 store returns pages of a folder again and again")
                    tokens.add(hash(token))
                    where["ContinuationToken"] = token
                for prefix in answer.get("CommonPrefixes", ()):
                    yield {"name": f"{bucket}/{prefix['Prefix']}", "type": "directory"}
                for content in answer.get("Contents", ()):
                    yield {**content, "name": f"{bucket}/{content['Key']}", "type": "file", "size": content["Size"]}
        else:
            fs.invalidate_cache()
            yield from fs.ls(path, detail=True)

    def find(self, path: str) -> StoredObject | None:
        """Return an object, or None if there is none of this path. Raises AccessDenied and NotReadable."""
        with self._connection() as (fs, root):
            try:
                names = path.split("/")
                for end in range(1, len(names)) if self._protocol in WITH_LINKS else ():
                    if _is_link(fs.info(_below(root, "/".join(names[:end])))):
                        return None
                entry = fs.info(_below(root, path))
            except (FileNotFoundError, NotADirectoryError):
                return None
            except PermissionError as error:
                raise AccessDenied from error
            except OSError as error:
                if _is_of_one(error):
                    raise NotReadable(REFUSES) from error
                raise
        return _stored(path, entry) if entry["type"] == "file" and not _is_link(entry) else None

    def read(self, path: str, max_bytes: int) -> bytes | None:
        """Return the first ``max_bytes`` bytes of an object, or None if there is none of this path. Follows links.
        Raises NotReadable for an object that is denied or refused, and for a link to anything but a file."""
        with self._connection() as (fs, root):
            try:
                # A pipe would be waited for without end.
                if self._protocol in WITH_LINKS and not fs.isfile(_below(root, path)):
                    if _is_dangling(fs, _below(root, path)):
                        raise NotReadable("is a symbolic link to no file")
                    return None
                if self._protocol in LOCAL:
                    return _beginning(_below(root, path), max_bytes)
                content: bytes = fs.cat_file(_below(root, path), start=0, end=max_bytes)
            except FileNotFoundError:
                return None
            except PermissionError as error:
                raise NotReadable("cannot be read, because the store denies access to it") from error
            except OSError as error:
                if _is_of_one(error):
                    raise NotReadable(REFUSES) from error
                raise
        return content

    def download(self, stored: StoredObject, to: Path, max_bytes: int) -> bool:
        """Copy an object to a file. Returns False if it is there no more. Raises AccessDenied, NotReadable, and
        ObjectTooLarge, also where the object has grown since it was found."""
        if stored.size > max_bytes:
            raise ObjectTooLarge
        left = max_bytes
        with self._connection() as (fs, root):
            try:
                with self._opened(fs, _below(root, stored.path), root) as content, to.open("wb") as file:
                    if self._protocol in SFTP:  # one request after another would cost a round trip for each 32 KiB
                        content.prefetch(stored.size, PREFETCHED_REQUESTS)
                    while part := content.read(COPIED_BYTES):
                        if (left := left - len(part)) < 0:
                            raise ObjectTooLarge
                        file.write(part)
            except (FileNotFoundError, _Link):
                return False
            except PermissionError as error:
                answer = getattr(error.__cause__, "response", None) or {}  # of botocore
                if (answer.get("Error") or {}).get("Code") == ARCHIVED:
                    raise Archived from error
                raise AccessDenied from error
            except OSError as error:
                if _is_of_one(error):
                    raise NotReadable(REFUSES) from error
                raise
        return True

    def _opened(self, fs: Any, path: str, root: str) -> Any:
        """Open an object for reading. On this machine nothing is followed that has become a link since it was found.
        Raises _Link, and what the library raises."""
        if self._protocol not in LOCAL:
            return fs.open(path, "rb")
        try:
            return open(open_without_links(os.path.realpath(root) + path.removeprefix(root)), "rb")
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _Link from error
            raise

    @contextmanager
    def _connection(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path of the folder in it. Translates errors, without their texts, which may
        quote addresses and credentials."""
        name = f"the {self._protocol} store"
        try:
            with self._connecting:
                if self._connected is None:
                    if self._protocol in SFTP:
                        from connectors.objects import sftp  # it needs a package of its own

                        sftp.register()
                    fs, root = fsspec.core.url_to_fs(self._url, **self._arguments)
                    self._connected = fs, str(root).rstrip("/")
                connected = self._connected
            with self._serial:
                yield connected
        except (PenstockError, AccessDenied, NotReadable, ObjectTooLarge):
            raise
        except FolderTooLarge:
            self._connected = None  # the rest of the listing is still being sent
            raise
        except ImportError as error:
            raise Misconfigured(
                f"the protocol {self._protocol} needs a package that is not installed: pip install 'penstock[objects]'"
                " has those for s3 and sftp, docs/connectors/objects.md names others"
            ) from error
        except PermissionError as error:
            raise Misconfigured(f"{name} denies access: allow the account to list and read the address") from error
        except (ValueError, TypeError) as error:
            raise Misconfigured(f"{name} cannot be opened with these settings ({type(error).__name__})") from error
        except Exception as error:  # libraries of vendors, whose errors have no common class
            self._connected = None
            kind = type(error).__name__
            if kind in REFUSED:
                raise Misconfigured(f"{name} {REFUSED[kind]}: set them as docs/connectors/objects.md says") from error
            raise Retryable(f"{name} does not respond ({kind})") from error


def _beginning(path: str, max_bytes: int) -> bytes:
    """Read the beginning of a file of this machine. Follows links, and waits for no pipe that has become of the file
    since it was found. Raises NotReadable, and OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotReadable("is no file any more")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)
    finally:
        os.close(descriptor)


def is_readable_name(path: str, protocol: str) -> bool:
    """Whether an object can be read by its path. One with bytes that are not UTF-8 has no external id, and one whose
    path would lead elsewhere in a folder is read by none. s3fs reads the object of which a name is the part before this
    mark, and so under the wrong rules."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    if not {".", ".."}.isdisjoint(path.split("/")):
        return False
    return protocol not in S3 or "?versionId=" not in path


def _is_of_one(error: OSError) -> bool:
    """Whether a store has answered, and refuses what was requested."""
    answer = getattr(error.__cause__, "response", None) or {}  # of botocore
    status = (answer.get("ResponseMetadata") or {}).get("HTTPStatusCode", 0)
    return error.errno in OF_ONE or (400 <= status < 500 and status not in (408, 429))


def _is_dangling(fs: Any, path: str) -> bool:
    """Whether a path that leads to no file is a link."""
    try:
        return _is_link(fs.info(path))
    except FileNotFoundError:
        return bool(fs.lexists(path))


def _is_link(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("islink")) or entry["type"] == "link"


def _below(root: str, path: str) -> str:
    return f"{root}/{path}" if path else root


def _time(seconds: float) -> datetime | None:
    """Return None for times outside of the calendar, which whoever writes a file can give it."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _stored(path: str, entry: Mapping[str, Any]) -> StoredObject:
    etag = next((entry[key] for key in ETAGS if entry.get(key)), None)
    modified = next((entry[key] for key in TIMES if entry.get(key) is not None), None)
    if isinstance(modified, int | float):
        at = _time(modified)
    elif isinstance(modified, datetime):
        at = modified if modified.tzinfo else modified.replace(tzinfo=UTC)
    else:
        at = None
    size = int(entry.get("size") or 0)
    time = at.timestamp() if at else modified  # a listing and a single description may have it in two forms
    return StoredObject(path, size, str(etag).strip('"') if etag else f"{size} {time}", at)
