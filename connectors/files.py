"""Files that a source offers for download: which of them have text, and how it is read."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from connectors.extraction import extract_file
from connectors.extraction import result as extraction
from topics.messages import MAX_CONTENT_BYTES

OFFICE = "application/vnd.openxmlformats-officedocument."
_BINARY = {
    "application/pdf": ".pdf",
    f"{OFFICE}wordprocessingml.document": ".docx",
    f"{OFFICE}presentationml.presentation": ".pptx",
    f"{OFFICE}spreadsheetml.sheet": ".xlsx",
    "message/rfc822": ".eml",
    # Old formats: an installed extractor reads them; without one, extraction says what to do.
    "application/msword": ".doc",
    "application/vnd.ms-excel": ".xls",
    "application/vnd.ms-powerpoint": ".ppt",
    "application/vnd.ms-outlook": ".msg",
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
_UNSPECIFIC = frozenset({"application/octet-stream", "", "application/x-zip", "application/zip"})
"""Types of files that were uploaded without one (or as the archive that an Office file is): the ending counts."""
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
        *(ending.removeprefix(".") for ending in _BINARY.values()),
    }
)


TEXTLESS_ENDINGS = frozenset(
    {
        "png",
        "jpg",
        "jpeg",
        "gif",
        "bmp",
        "ico",
        "icns",
        "tif",
        "tiff",
        "webp",
        "heic",
        "psd",
        "ai",
        "eps",
        "mp3",
        "mp4",
        "m4a",
        "mov",
        "avi",
        "mkv",
        "webm",
        "wav",
        "ogg",
        "flac",
        "ttf",
        "otf",
        "woff",
        "woff2",
        "eot",
        "zip",
        "gz",
        "tgz",
        "bz2",
        "xz",
        "zst",
        "7z",
        "rar",
        "tar",
        "jar",
        "war",
        "ear",
        "whl",
        "egg",
        "so",
        "dll",
        "dylib",
        "exe",
        "bin",
        "o",
        "a",
        "obj",
        "lib",
        "class",
        "pyc",
        "pyo",
        "wasm",
        "dex",
        "apk",
        "aab",
        "ipa",
        "dmg",
        "iso",
        "img",
        "deb",
        "rpm",
        "msi",
        "pdb",
        "db",
        "sqlite",
        "sqlite3",
        "mdb",
        "parquet",
        "avro",
        "orc",
        "npy",
        "npz",
        "pkl",
        "pt",
        "pth",
        "onnx",
        "h5",
        "safetensors",
        "gguf",
        "keystore",
        "jks",
        "p12",
        "pfx",
        "der",
        "mo",
        "pack",
        "idx",
    }
)
"""Endings of files without text. Other binary files are detected when they are read."""


def may_hold_text(path: str, size: int) -> bool:
    """Whether a file may hold text at all: it is not empty, and no picture, archive, program or the like."""
    _, dot, ending = path.rpartition("/")[2].rpartition(".")
    return size > 0 and not (dot and ending.lower() in TEXTLESS_ENDINGS)


@dataclass(frozen=True, slots=True)
class FileType:
    """The type by which the text of a file is read."""

    media_type: str
    """Empty: the name's ending says it."""
    ending: str = ""
    """The ending, with its dot, that the name must have."""


def file_type(name: str, media_type: str) -> FileType | None:
    """Return the type of a file; None: it has no text (pictures, archives, unknown types)."""
    media_type, name = media_type.lower(), name.lower()
    if media_type in _BINARY:
        return FileType(media_type, _BINARY[media_type])
    if media_type.startswith("text/") or media_type in _TEXTUAL:
        return FileType(media_type)
    if media_type in _UNSPECIFIC and "." in name and name.rpartition(".")[2] in _ENDINGS:
        return FileType("")
    return None


class NoText(Exception):
    """A file has no text that can be published. ``code`` is a bounded label; the message says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def publishable(text: str) -> str:
    """Return the text. Raises NoText if it is empty or too long."""
    if not text.strip():
        raise NoText("empty", "has no text")
    if len(text.encode()) > MAX_CONTENT_BYTES:
        raise NoText("too_large", "has more than 4 MiB of text: split it")
    return text


ABANDONED_SECONDS = 24 * 3600.0
"""A download that is older was left by a process that was killed: reading takes minutes."""


@contextmanager
def temporary_file(folder: Path, ending: str = "") -> Iterator[Path]:
    """Yield the path of a file in the folder, which is made if needed. What is there at the end is deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{secrets.token_hex(8)}{ending}"
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Remove the files that processes left in the folder which were killed while they read. Blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    for abandoned in folder.iterdir():
        with suppress(FileNotFoundError):
            if abandoned.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                abandoned.unlink()


class Downloads:
    """Reads the text of files through a folder, in which a file exists only while it is read."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    async def text(
        self, name: str, kind: FileType, download: Callable[[Path, int], Awaitable[object]]
    ) -> tuple[str, str]:
        """Return the text of a file, and its media type. Raises NoText, and the errors of ``download``.

        download: writes the file to a path, with at most so many bytes.
        """
        remove_abandoned(self._folder)
        with temporary_file(self._folder, kind.ending) as to:
            await download(to, self._max_bytes)
            if kind.ending and not name.lower().endswith(kind.ending):
                name += kind.ending
            try:
                extracted = await extract_file(to, name, kind.media_type or None)
            except extraction.Unreadable as error:
                raise NoText(error.code, str(error)) from error
        return extracted.text, extracted.media_type
