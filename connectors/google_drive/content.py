"""A file of Drive as a document, or the reason why it is not one."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from connectors.extraction import extract_file
from connectors.extraction import result as extraction
from connectors.google_drive.access import Access
from connectors.google_drive.client import Api, Json
from connectors.source import Document, Unreadable
from connectors.web import Denied, Rejected, TooLarge
from topics.messages import MAX_CONTENT_BYTES, Metadata

File = Mapping[str, Any]

GOOGLE = "application/vnd.google-apps."
_OFFICE = "application/vnd.openxmlformats-officedocument."
XLSX = f"{_OFFICE}spreadsheetml.sheet"


@dataclass(frozen=True, slots=True)
class Exported:
    """As text in the first of these formats that Google makes of it."""

    media_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Extracted:
    """As a file whose text has to be got out. export: what Google makes of its own formats; None: its own bytes."""

    media_type: str
    """Empty: the name tells."""
    ending: str = ""
    export: str | None = None


How = Exported | Extracted

_OF_GOOGLE: Mapping[str, How] = {
    f"{GOOGLE}document": Exported(("text/markdown", "text/html")),
    # CSV holds the first sheet only; the workbook has all of them.
    f"{GOOGLE}spreadsheet": Extracted(XLSX, ".xlsx", XLSX),
    f"{GOOGLE}presentation": Exported(("text/plain",)),
}
_BINARY = {
    "application/pdf": ".pdf",
    f"{_OFFICE}wordprocessingml.document": ".docx",
    f"{_OFFICE}presentationml.presentation": ".pptx",
    XLSX: ".xlsx",
    "message/rfc822": ".eml",
    # Old formats are read by nobody here, and their owners are told so.
    "application/msword": ".doc",
    "application/vnd.ms-excel": ".xls",
    "application/vnd.ms-powerpoint": ".ppt",
}
_TEXTUAL = frozenset(
    {
        "application/json",
        "application/ld+json",
        "application/x-ndjson",
        "application/xml",
        "application/yaml",
        "application/x-yaml",
        "application/toml",
        "application/javascript",
        "application/x-javascript",
        "application/sql",
        "application/x-sh",
        "application/x-python",
        "application/typescript",
        "application/xhtml+xml",
    }
)
_UNTOLD = frozenset({"application/octet-stream", "", "application/x-zip", "application/zip"})
"""Uploaded without a type (or as the archive that an office file is): its ending tells."""
_ENDINGS = frozenset(
    {
        "txt",
        "text",
        "log",
        "md",
        "markdown",
        "rst",
        "html",
        "htm",
        "csv",
        "tsv",
        "json",
        "jsonl",
        "ndjson",
        "yaml",
        "yml",
        "toml",
        "ini",
        "xml",
        "py",
        "pyi",
        "js",
        "mjs",
        "cjs",
        "jsx",
        "ts",
        "tsx",
        "java",
        "go",
        "rs",
        "c",
        "h",
        "cc",
        "cpp",
        "cxx",
        "hh",
        "hpp",
        "sql",
        "sh",
        "bash",
        "pdf",
        "docx",
        "pptx",
        "xlsx",
        "eml",
    }
)
_EMBEDDED = re.compile(r"^\[image\d+\]: *<data:image/[^>]*>[ \t]*\n?", re.M)
_SHOWN = re.compile(r"!\[([^\]\n]*)\]\[image\d+\]")


def how(file: File) -> How | None:
    """None: it holds no text that can be had, and is passed over (folders, shortcuts, forms, pictures, archives …)."""
    media_type = str(file.get("mimeType") or "").lower()
    if media_type.startswith(GOOGLE):
        return _OF_GOOGLE.get(media_type)
    if media_type in _BINARY:
        return Extracted(media_type, _BINARY[media_type])
    if media_type.startswith("text/") or media_type in _TEXTUAL:
        return Extracted(media_type)
    name = str(file.get("name") or "").lower()
    if media_type in _UNTOLD and "." in name and name.rpartition(".")[2] in _ENDINGS:
        return Extracted("")
    return None


def without_pictures(markdown: str) -> str:
    """Google puts every picture into the Markdown as base64; their descriptions stay."""
    return _SHOWN.sub(r"\1", _EMBEDDED.sub("", markdown))


def author(file: File) -> str | None:
    """Its owner; in a shared drive, where the company owns all, whoever changed it last."""
    people = [*(file.get("owners") or ()), file.get("lastModifyingUser") or {}]
    names = (person.get("displayName") or person.get("emailAddress") for person in people)
    return next((str(name) for name in names if name), None)


def modified(file: File) -> datetime | None:
    try:
        return datetime.fromisoformat(str(file.get("modifiedTime", "")))
    except ValueError:
        return None


def version(file: File) -> int | None:
    text = str(file.get("version", ""))
    return int(text) if text.isdecimal() else None


def size(file: File) -> int | None:
    text = str(file.get("size", ""))
    return int(text) if text.isdecimal() else None


def metadata(file: File) -> Metadata:
    parents = file.get("parents") or ()
    found: Metadata = {"mime_type": str(file.get("mimeType") or "")}
    if file.get("driveId"):
        found["drive_id"] = str(file["driveId"])
    if parents:
        found["folder_id"] = str(parents[0])
    return found


def revision_of(file: File) -> str:
    """Another one whenever anything that is published of the file, but access, is another.

    Not Google's ``version``: that moves with every view and every change of sharing, and would have everything read
    again. Of files the bytes tell (their time can be set back by whoever uploads them), of Google's own formats, which
    have no checksum, the time of the last edit.
    """
    bytes_ = file.get("md5Checksum") or file.get("headRevisionId")
    told = [
        bytes_,
        file.get("modifiedTime"),
        file.get("name"),
        author(file),
        file.get("webViewLink"),
        metadata(file),
        may_download(file),
        bool(file.get("clientEncryptionDetails")),
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def may_download(file: File) -> bool:
    return (file.get("capabilities") or {}).get("canDownload") is not False


EXPORT_BYTES = 10 * 1024 * 1024
"""Google exports no more (reference/rest/v3/files/export)."""

LEFT_SECONDS = 24 * 3600.0
"""A download of yesterday belongs to nobody: reading takes minutes."""

_REFUSALS = {
    "exportSizeLimitExceeded": ("too_large", "Google exports at most 10 MB: split it"),
    "cannotDownloadAbusiveFile": ("abusive", "Google holds it for malware or spam: its owner can ask for a review"),
    "cannotDownloadFile": ("no_download", "its owner has switched off downloading for viewers"),
    "cannotExportFile": ("no_download", "its owner has switched off downloading for viewers"),
    "fileNotDownloadable": ("unsupported", "Google offers no download of it"),
    "fileNotExportable": ("unsupported", "Google offers no export of it"),
}
"""Reason of a 403 → code, and what to do (guides/handle-errors)."""


class NoText(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Contents:
    def __init__(self, api: Api, folder: Path, max_bytes: int) -> None:
        """folder: for downloads while they are read; nothing stays there."""
        self._api = api
        self._folder = folder
        self._max_bytes = max_bytes

    async def read(self, file: Json, access: Access) -> Document | Unreadable:
        """Raises Missing when it is gone meanwhile."""
        revision = revision_of(file)
        try:
            content, media_type = await self._text(file)
        except NoText as error:
            return Unreadable(
                external_id=str(file["id"]),
                code=error.code,
                message=str(error),
                acl_tags=access.tags,
                revision=revision,
            )
        return Document(
            external_id=str(file["id"]),
            title=str(file.get("name") or file["id"])[:4_000],
            content=content,
            media_type=media_type,
            acl_tags=access.tags,
            version=version(file),
            revision=revision,
            source_url=file.get("webViewLink"),
            author=author(file),
            source_modified_at=modified(file),
            metadata=metadata(file),
        )

    def _tidy(self) -> None:
        """Removes what a process that was killed has left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if left.stat().st_mtime < time.time() - LEFT_SECONDS:
                    left.unlink()

    async def _text(self, file: Json) -> tuple[str, str]:
        way = how(file)
        if way is None:
            raise NoText("unsupported", "holds no text")
        if file.get("clientEncryptionDetails"):
            raise NoText("encrypted", "is encrypted by the company's own key, which Google and we do not have")
        if not may_download(file):
            raise NoText("no_download", "its owner has switched off downloading for viewers: make the account a writer")
        if (size(file) or 0) > self._max_bytes and not str(file["mimeType"]).startswith(GOOGLE):
            raise NoText("too_large", f"is larger than {self._max_bytes:,} bytes: split it")
        try:
            if isinstance(way, Exported):
                text, media_type = await self._exported(str(file["id"]), way)
            else:
                text, media_type = await self._extracted(file, way)
        except Denied as error:
            if error.code not in _REFUSALS:
                code = error.code or "no code"
                raise NoText("denied", f"Google refuses to hand it out ({code}): may the account read it?") from error
            raise NoText(*_REFUSALS[error.code]) from error
        except Rejected as error:
            code = error.code or "no code"
            raise NoText("refused", f"Google does not hand it out (answer {error.status}, {code})") from error
        except TooLarge as error:
            raise NoText("too_large", f"is larger than {error.limit:,} bytes: split it") from error
        if not text.strip():
            raise NoText("empty", "has no text in it")
        if len(text.encode()) > MAX_CONTENT_BYTES:
            raise NoText("too_large", "has more than 4 MiB of text: split it")
        return text, media_type

    async def _exported(self, id_: str, way: Exported) -> tuple[str, str]:
        for media_type in way.media_types:
            try:
                text = await self._api.export(id_, media_type)
            except Rejected as error:
                if error.status != 400:
                    raise
                continue  # this format is not offered
            text = text.removeprefix("\ufeff")
            return (without_pictures(text) if media_type == "text/markdown" else text), media_type
        raise NoText("unsupported", "Google exports it in none of the formats that are read")

    async def _extracted(self, file: Json, way: Extracted) -> tuple[str, str]:
        self._tidy()
        to = self._folder / f"{secrets.token_hex(8)}{way.ending}"
        try:
            if way.export:
                await self._api.export_to(str(file["id"]), way.export, to, max(EXPORT_BYTES, self._max_bytes))
            else:
                await self._api.download(str(file["id"]), to, self._max_bytes)
            name = str(file.get("name") or "")
            if way.ending and not name.lower().endswith(way.ending):
                name += way.ending
            found = await extract_file(to, name, way.media_type or None)
        except extraction.Unreadable as error:
            raise NoText(error.code, str(error)) from error
        finally:
            to.unlink(missing_ok=True)
        return found.text, found.media_type
