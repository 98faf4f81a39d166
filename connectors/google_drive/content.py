"""A file of Drive → a document, or why it is none."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path

from connectors.extraction import extract_file
from connectors.extraction import unreadable as extraction
from connectors.google_drive import kinds
from connectors.google_drive.access import Access
from connectors.google_drive.api import Api, Json
from connectors.google_drive.kinds import Exported, Extracted
from connectors.source import Document, Unreadable
from connectors.web import Denied, Rejected, TooLarge
from topics.messages import MAX_CONTENT_BYTES

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
        revision = kinds.revision(file)
        try:
            content, media_type = await self._text(file)
        except NoText as error:
            return Unreadable(
                external_id=str(file["id"]), code=error.code, message=str(error), acl_tags=access.tags,
                revision=revision,
            )  # fmt: skip
        return Document(
            external_id=str(file["id"]), title=str(file.get("name") or file["id"])[:4_000], content=content,
            media_type=media_type, acl_tags=access.tags, version=kinds.version(file), revision=revision,
            source_url=file.get("webViewLink"), author=kinds.author(file), source_modified_at=kinds.modified(file),
            metadata=kinds.metadata(file),
        )  # fmt: skip

    def _tidy(self) -> None:
        """Removes what a process that was killed has left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if left.stat().st_mtime < time.time() - LEFT_SECONDS:
                    left.unlink()

    async def _text(self, file: Json) -> tuple[str, str]:
        way = kinds.how(file)
        if way is None:
            raise NoText("unsupported", "holds no text")
        if file.get("clientEncryptionDetails"):
            raise NoText("encrypted", "is encrypted by the company's own key, which Google and we do not have")
        if not kinds.may_download(file):
            raise NoText("no_download", "its owner has switched off downloading for viewers: make the account a writer")
        if (kinds.size(file) or 0) > self._max_bytes and not str(file["mimeType"]).startswith(kinds.GOOGLE):
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
            return (kinds.without_pictures(text) if media_type == "text/markdown" else text), media_type
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
