"""What a file of Drive is to us: how its text is had, and what is said of it. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from topics.messages import Metadata

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
_TEXTUAL = frozenset({
    "application/json", "application/ld+json", "application/x-ndjson", "application/xml", "application/yaml",
    "application/x-yaml", "application/toml", "application/javascript", "application/x-javascript", "application/sql",
    "application/x-sh", "application/x-python", "application/typescript", "application/xhtml+xml",
})  # fmt: skip
_UNTOLD = frozenset({"application/octet-stream", "", "application/x-zip", "application/zip"})
"""Uploaded without a type (or as the archive that an office file is): its ending tells."""
_ENDINGS = frozenset({
    "txt", "text", "log", "md", "markdown", "rst", "html", "htm", "csv", "tsv", "json", "jsonl", "ndjson", "yaml",
    "yml", "toml", "ini", "xml", "py", "pyi", "js", "mjs", "cjs", "jsx", "ts", "tsx", "java", "go", "rs", "c", "h",
    "cc", "cpp", "cxx", "hh", "hpp", "sql", "sh", "bash", "pdf", "docx", "pptx", "xlsx", "eml",
})  # fmt: skip
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


def revision(file: File) -> str:
    """Another one whenever anything that is published of the file, but access, is another.

    Not Google's ``version``: that moves with every view and every change of sharing, and would have everything read
    again. Of files the bytes tell (their time can be set back by whoever uploads them), of Google's own formats, which
    have no checksum, the time of the last edit.
    """
    bytes_ = file.get("md5Checksum") or file.get("headRevisionId")
    told = [
        bytes_, file.get("modifiedTime"), file.get("name"), author(file), file.get("webViewLink"), metadata(file),
        may_download(file), bool(file.get("clientEncryptionDetails")),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def may_download(file: File) -> bool:
    return (file.get("capabilities") or {}).get("canDownload") is not False
