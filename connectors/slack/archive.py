"""A Slack export (ZIP): the replies of threads, so that a first load need not request each thread by itself.

Layout (slack.com/help, How to read Slack data exports): ``channels.json`` and ``groups.json`` name the folders,
``users.json`` the people, and each ``FOLDER/YYYY-MM-DD.json`` holds a day's messages. Nothing is unpacked to disk, and
folders of direct messages are never read. An export decides neither which documents exist nor who may read them: the
API does.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from connectors.slack.content import thread_ts
from pipeline.core.errors import Misconfigured

Object = Mapping[str, Any]

MAX_FILES = 1_000_000
MAX_FILE_BYTES = 128 * 1024 * 1024
"""The size of one unpacked file; a day of a very busy channel is a few MiB."""
MAX_CHANNEL_BYTES = 512 * 1024 * 1024
"""The unpacked size of one channel. A larger channel is read from the API alone."""
_MESSAGE_FIELDS = frozenset(
    {
        "ts",
        "thread_ts",
        "subtype",
        "user",
        "bot_id",
        "username",
        "bot_profile",
        "user_profile",
        "text",
        "blocks",
        "attachments",
        "files",
        "edited",
        "hidden",
        "comment",
        "type",
    }
)
"""The fields of a message that are used; the others would only occupy memory."""
_DAY = re.compile(r"\d{4}-\d\d-\d\d\.json")
_READ_BYTES = 1024 * 1024


class Archive:
    """Reads an export. It blocks, so call it in a thread. Every method raises Misconfigured, which names no file of the
    archive."""

    def __init__(self, path: Path) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
            raise Misconfigured(
                "the export archive cannot be read as a ZIP file: export it again, or correct the path"
            ) from error
        try:
            self._days = self._sorted_days()
            folders = [*self._index("channels.json"), *self._index("groups.json")]
        except BaseException:
            self._zip.close()
            raise
        self._folders = {
            row["id"]: row["name"]
            for row in folders
            if isinstance(row.get("id"), str) and isinstance(row.get("name"), str)
        }

    def close(self) -> None:
        self._zip.close()

    def _sorted_days(self) -> dict[str, list[zipfile.ZipInfo]]:
        """Return the files of each folder in the order of their days. A file whose name is not a folder and a day is
        ignored."""
        members = self._zip.infolist()
        if len(members) > MAX_FILES:
            raise Misconfigured(f"the export archive holds more than {MAX_FILES} files: split it")
        days: dict[str, list[zipfile.ZipInfo]] = defaultdict(list)
        sizes: dict[str, int] = defaultdict(int)
        names: set[str] = set()
        for member in members:
            if member.filename in names:
                raise Misconfigured(
                    "the export archive holds two files of one name: it is damaged or forged; export it again"
                )
            names.add(member.filename)
            folder, _, day = member.filename.partition("/")
            if not _DAY.fullmatch(day) or folder in ("", ".", ".."):
                continue
            sizes[folder] += member.file_size
            days[folder].append(member)
        return {
            folder: sorted(members, key=lambda member: member.filename)
            for folder, members in days.items()
            if sizes[folder] <= MAX_CHANNEL_BYTES
        }

    def _index(self, name: str) -> list[Object]:
        try:
            member = self._zip.getinfo(name)
        except KeyError:
            if name == "channels.json":
                raise Misconfigured("the archive is not a Slack export: it has no channels.json") from None
            return []
        return self._rows(member)

    def users(self) -> list[Object]:
        """Return the users in the format of ``users.list``."""
        return self._index("users.json")

    def threads(self, channel: str) -> dict[str, list[Object]]:
        """Return the replies by the ``ts`` of their parent, oldest first, each once."""
        threads: dict[str, dict[str, Object]] = defaultdict(dict)
        for member in self._days.get(self._folders.get(channel, ""), ()):
            for message in self._rows(member):
                ts = message.get("ts")
                if isinstance(ts, str) and re.fullmatch(r"\d{1,12}\.\d{1,6}", ts) and thread_ts(message) != ts:
                    threads[thread_ts(message)][ts] = {key: message[key] for key in message.keys() & _MESSAGE_FIELDS}
        return {parent: [replies[ts] for ts in sorted(replies, key=float)] for parent, replies in threads.items()}

    def _rows(self, member: zipfile.ZipInfo) -> list[Object]:
        """Parse one file. The size that the ZIP states is not trusted: reading ends at the limit."""
        if member.flag_bits & 1:
            raise Misconfigured("the export archive is encrypted: unpack it and pack it again without a password")
        parts, size = [], 0
        try:
            with self._zip.open(member) as file:
                while part := file.read(_READ_BYTES):
                    size += len(part)
                    if size > MAX_FILE_BYTES:
                        raise Misconfigured(
                            "a file in the export archive unpacks to more than 128 MiB, which no day of a channel"
                            " does: export it again"
                        )
                    parts.append(part)
            rows = json.loads(b"".join(parts))
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            OSError,
            NotImplementedError,
            ValueError,
            RecursionError,
        ) as error:
            raise Misconfigured(
                "a file in the export archive cannot be read: it is damaged; export it again"
            ) from error
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def is_complete(replies: list[Object], parent: Object) -> bool:
    """True when these are all the replies that a parent has now, according to Slack."""
    return (
        bool(replies) and len(replies) == parent.get("reply_count") and replies[-1]["ts"] == parent.get("latest_reply")
    )
