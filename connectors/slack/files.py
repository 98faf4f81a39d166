"""Reads the text of files and snippets that were shared in messages.

docs.slack.dev/reference/objects/file-object: a file is downloaded from ``url_private_download`` with the bot's token. A
token that may not read it does not get an error but a page for signing in, with status 200 or by a redirect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from connectors.files import Downloads, FileType, NoText, file_type
from connectors.set_aside import SetAside
from connectors.slack.client import Api
from connectors.slack.options import SlackOptions
from connectors.source import Memory
from connectors.web import Denied, Forbidden, Missing, Rejected, ServerFailed, TooLarge
from pipeline.core.errors import Misconfigured, PenstockError, Poison
from pipeline.core.normalise import is_html, normalise

Object = Mapping[str, Any]
SCOPE = "files:read"
MAX_FILES = 20
"""The files of one thread that are read."""
MAX_CHARACTERS = 100_000
"""The text of one file in a thread: with MAX_FILES, two thirds of what a document may hold."""
CUT = "\n… (the rest of the file is not read)"
MAX_THREADS = 1_000
"""The threads that are remembered of one file: those in which its text was read last."""
_HTML = "text/html"


class SignInPage(PenstockError):
    """Slack answered with a page for signing in: the token may not read the file."""


class Files:
    """Reads files with the token of ``Api``, of the host in the settings alone."""

    def __init__(self, api: Api, options: SlackOptions, folder: Path, set_aside: SetAside, memory: Memory) -> None:
        """folder: holds a file while it is read."""
        self._memory = memory
        self._remembering = asyncio.Lock()
        self._api = api
        self._options = options
        self._downloads = Downloads(folder / "files", options.max_file_bytes)
        self._set_aside = set_aside

    async def texts(self, thread: str, messages: Sequence[Object]) -> tuple[Mapping[str, str], bool]:
        """Return the texts of the files in a thread's messages by the file's id, and whether none is missing that can
        be read later. Raises Retryable, and Misconfigured if the token lacks the scope."""
        texts: dict[str, str] = {}
        is_complete = True
        files = [*readable_files(messages, self._options.max_file_bytes)] if self._options.files else []
        await self._remember(thread, [str(file["id"]) for file, _ in files])
        for file, kind in files:
            if self._api.scopes is not None and SCOPE not in self._api.scopes:
                raise Misconfigured(
                    f"{self._api.name}: files = true needs the scope {SCOPE}: add it and install the app again"
                )
            id = str(file["id"])
            try:
                text = await self._text(file, kind)
            except (NoText, Missing, TooLarge, Rejected, Poison):
                continue
            except (Denied, Forbidden, SignInPage):
                self._set_aside.add(
                    "listing", "contents of files", f"Slack shows a page for signing in: does the app have {SCOPE}?"
                )
                is_complete = False
                continue
            except ServerFailed as error:
                await self._api.call("auth.test")  # raises Retryable, unless the file is the reason
                self._set_aside.add("listing", f"file {id}", error)
                is_complete = False
                continue
            texts[id] = text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + CUT
        return texts, is_complete

    async def _remember(self, thread: str, files: Collection[str]) -> None:
        """Record that a thread may have the texts of these files, before they are read: an event about a file names no
        message, and no listing shows the files of replies."""
        async with self._remembering:
            for file in files:
                threads = await self.threads(file)
                if thread not in threads:
                    await self._memory.put(f"file:{file}", [*threads, thread][-MAX_THREADS:])

    async def threads(self, file: str) -> list[str]:
        """Return the external ids of the threads that may have the text of a file."""
        return list(await self._memory.get(f"file:{file}") or ())

    async def _text(self, file: Object, kind: FileType) -> str:
        url = str(file.get("url_private_download") or file["url_private"])

        async def download(to: Path, max_bytes: int) -> None:
            media_type = await self._api.download(url, to, max_bytes=max_bytes)
            if media_type == _HTML and file.get("mimetype") != _HTML:
                raise SignInPage("Slack answered with a page instead of a file")

        text, media_type = await self._downloads.text(str(file.get("name") or ""), kind, download)
        if is_html(media_type):
            text, _ = await asyncio.to_thread(normalise, text, media_type)
        return text.strip()


def readable_files(messages: Sequence[Object], max_bytes: int) -> Iterator[tuple[Object, FileType]]:
    """Yield the first MAX_FILES files of a thread that have text and that Slack holds, each once."""
    seen: set[str] = set()
    for message in messages:
        files = message.get("files")
        for file in files if isinstance(files, list) else ():
            if not isinstance(file, Mapping) or not isinstance(id := file.get("id"), str) or id in seen:
                continue
            kind = readable(file, max_bytes)
            if kind is None:
                continue
            seen.add(id)
            yield file, kind
            if len(seen) == MAX_FILES:
                return


def readable(file: Object, max_bytes: int) -> FileType | None:
    """Return the type of a file by which its text is read; None: it has none, is too large, was deleted, is stored
    elsewhere, or belongs to another company, which shows it only on request."""
    if file.get("mode") not in ("hosted", "snippet") or file.get("file_access") not in (None, "visible"):
        return None
    size, url = file.get("size"), file.get("url_private_download") or file.get("url_private")
    if not isinstance(url, str) or (isinstance(size, int) and size > max_bytes):
        return None
    return file_type(str(file.get("name") or ""), str(file.get("mimetype") or ""))
