"""Reads a file of Drive as a document, or finds the reason why it has no text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from connectors.files import OFFICE, Downloads, FileType, NoText, file_type, publishable
from connectors.google_drive.access import Access
from connectors.google_drive.client import Api, Json
from connectors.source import Document, Unreadable
from connectors.web import Denied, Rejected, TooLarge
from topics.messages import Metadata

File = Mapping[str, Any]

GOOGLE = "application/vnd.google-apps."
XLSX = f"{OFFICE}spreadsheetml.sheet"


@dataclass(frozen=True, slots=True)
class TextExport:
    """Google exports the file as text, in the first of these formats that it offers."""

    media_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Download:
    """The file is downloaded and its text extracted."""

    type: FileType
    export: str | None = None
    """The format to which Google converts its own formats; None: the file's own bytes."""


Conversion = TextExport | Download

_GOOGLE_FORMATS: Mapping[str, Conversion] = {
    f"{GOOGLE}document": TextExport(("text/markdown", "text/html")),
    # CSV holds the first sheet only; the workbook has all of them.
    f"{GOOGLE}spreadsheet": Download(FileType(XLSX, ".xlsx"), XLSX),
    f"{GOOGLE}presentation": TextExport(("text/plain",)),
}
_EMBEDDED_IMAGE = re.compile(r"^\[image\d+\]: *<data:image/[^>\n]*>[ \t]*\n?", re.M)
_IMAGE_REFERENCE = re.compile(r"!\[([^\[\]\n]*)\]\[image\d+\]")
"""Each place of a text is tried up to the next line or bracket at most: a hostile text takes linear time."""


def conversion(file: File) -> Conversion | None:
    """Return how a file is read; None: it has no text and is skipped (folders, shortcuts, forms, pictures,
    archives)."""
    media_type = str(file.get("mimeType") or "").lower()
    if media_type.startswith(GOOGLE):
        return _GOOGLE_FORMATS.get(media_type)
    kind = file_type(str(file.get("name") or ""), media_type)
    return Download(kind) if kind else None


def without_pictures(markdown: str) -> str:
    """Remove pictures, which Google embeds in Markdown as base64, except their descriptions."""
    return _IMAGE_REFERENCE.sub(r"\1", _EMBEDDED_IMAGE.sub("", markdown))


def author(file: File) -> str | None:
    """Return the owner; in a shared drive, where the company owns all files, the user who changed the file last."""
    people = [*(file.get("owners") or ()), file.get("lastModifyingUser") or {}]
    names = (person.get("displayName") or person.get("emailAddress") for person in people)
    return next((str(name) for name in names if name), None)


def modified_at(file: File) -> datetime | None:
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
    values: Metadata = {"mime_type": str(file.get("mimeType") or "")}
    if file.get("driveId"):
        values["drive_id"] = str(file["driveId"])
    if parents:
        values["folder_id"] = str(parents[0])
    return values


def revision_of(file: File) -> str:
    """Return a value that changes with everything that is published of a file, except its access.

    Google's ``version`` is not used: it changes with every view and every change of sharing, so that everything would
    be read again. Files have a checksum (their time can be set back by the user who uploads them); Google's own formats
    have none, and the time of the last edit counts."""
    bytes_ = file.get("md5Checksum") or file.get("headRevisionId")
    published = [
        bytes_,
        file.get("modifiedTime"),
        file.get("name"),
        author(file),
        file.get("webViewLink"),
        metadata(file),
        may_download(file),
        bool(file.get("clientEncryptionDetails")),
    ]
    return hashlib.sha256(json.dumps(published, sort_keys=True).encode()).hexdigest()[:32]


def may_download(file: File) -> bool:
    return (file.get("capabilities") or {}).get("canDownload") is not False


EXPORT_BYTES = 10 * 1024 * 1024
"""Largest export that Google offers (reference/rest/v3/files/export)."""

_REFUSALS = {
    "exportSizeLimitExceeded": ("too_large", "Google exports at most 10 MB: split it"),
    "cannotDownloadAbusiveFile": ("abusive", "Google considers it malware or spam: its owner can ask for a review"),
    "cannotDownloadFile": ("no_download", "its owner has switched off downloading for viewers"),
    "cannotExportFile": ("no_download", "its owner has switched off downloading for viewers"),
    "fileNotDownloadable": ("unsupported", "Google offers no download of it"),
    "fileNotExportable": ("unsupported", "Google offers no export of it"),
}
"""By the reason of a 403 (guides/handle-errors): the code, and what to do."""


class Contents:
    """Reads files as documents."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """folder: holds downloads while they are read."""
        self._downloads = Downloads(folder, max_bytes)
        self._max_bytes = max_bytes

    async def read(self, file: Json, access: Access, api: Api) -> Document | Unreadable:
        """Read a file as a document, or as unreadable. Raises Missing if it has been deleted."""
        revision = revision_of(file)
        try:
            content, media_type = await self._text(file, api)
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
            source_modified_at=modified_at(file),
            metadata=metadata(file),
        )

    async def _text(self, file: Json, api: Api) -> tuple[str, str]:
        method = conversion(file)
        if method is None:
            raise NoText("unsupported", "holds no text")
        if file.get("clientEncryptionDetails"):
            raise NoText("encrypted", "is encrypted with the company's own key, which Google does not have")
        if not may_download(file):
            raise NoText("no_download", "its owner has switched off downloading for viewers: make the account a writer")
        if (size(file) or 0) > self._max_bytes and not str(file["mimeType"]).startswith(GOOGLE):
            raise NoText("too_large", f"is larger than {self._max_bytes:,} bytes: split it")
        try:
            if isinstance(method, TextExport):
                text, media_type = await self._export(str(file["id"]), method, api)
            else:
                text, media_type = await self._download(file, method, api)
        except Denied as error:
            if error.code not in _REFUSALS:
                code = error.code or "no code"
                raise NoText(
                    "denied", f"Google refuses the download ({code}): check that the account may read it"
                ) from error
            raise NoText(*_REFUSALS[error.code]) from error
        except Rejected as error:
            code = error.code or "no code"
            raise NoText("refused", f"Google refuses the download (status {error.status}, {code})") from error
        except TooLarge as error:
            raise NoText("too_large", f"is larger than {error.limit:,} bytes: split it") from error
        return publishable(text), media_type

    async def _export(self, id_: str, method: TextExport, api: Api) -> tuple[str, str]:
        for media_type in method.media_types:
            try:
                text = await api.export(id_, media_type)
            except Rejected as error:
                if error.status != 400:
                    raise
                continue  # this format is not offered
            text = text.removeprefix("\ufeff")
            return (without_pictures(text) if media_type == "text/markdown" else text), media_type
        raise NoText("unsupported", "Google exports it in no supported format")

    async def _download(self, file: Json, method: Download, api: Api) -> tuple[str, str]:
        id_, name = str(file["id"]), str(file.get("name") or "")
        if method.export is None:
            return await self._downloads.text(name, method.type, lambda to, limit: api.download(id_, to, limit))
        export, max_bytes = method.export, max(EXPORT_BYTES, self._max_bytes)
        return await self._downloads.text(name, method.type, lambda to, _: api.export_to(id_, export, to, max_bytes))
