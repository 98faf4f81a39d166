"""A Slack export (ZIP): the answers in threads, so that a first load need not ask for each thread by itself.

Layout (slack.com/help, How to read Slack data exports): ``channels.json`` and ``groups.json`` name the folders,
``users.json`` the people, ``FOLDER/YYYY-MM-DD.json`` hold a day's messages. Nothing is unpacked to disk, and folders of
direct messages are never looked at. What there is and who may read it is not taken from an export: Slack tells that.
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

from connectors.slack.content import root
from pipeline.core.errors import Misconfigured

Object = Mapping[str, Any]

MAX_MEMBERS = 1_000_000
MAX_FILE_BYTES = 128 * 1024 * 1024
"""Of one file, unpacked: a day of a very busy channel is a few MiB."""
MAX_CHANNEL_BYTES = 512 * 1024 * 1024
"""Of all the days of one channel, unpacked. One that is larger is left to the API."""
_KEPT = frozenset(
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
        "type",
    }
)
"""What is read of a message: the rest need not stay in memory."""
_DAY = re.compile(r"\d{4}-\d\d-\d\d\.json")
_READ = 1024 * 1024


class Archive:
    """Blocking; call it in a thread. Every method raises Misconfigured, naming no file of the archive."""

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
        """By folder. A name with more or other parts than folder and day is none of an export's, and is not read."""
        members = self._zip.infolist()
        if len(members) > MAX_MEMBERS:
            raise Misconfigured(f"the export archive holds more than {MAX_MEMBERS} files: split it")
        days: dict[str, list[zipfile.ZipInfo]] = defaultdict(list)
        sizes: dict[str, int] = defaultdict(int)
        names: set[str] = set()
        for member in members:
            if member.filename in names:
                raise Misconfigured("the export archive holds two files of one name: it is damaged or made up")
            names.add(member.filename)
            folder, _, day = member.filename.partition("/")
            if not _DAY.fullmatch(day) or folder in ("", ".", ".."):
                continue
            sizes[folder] += member.file_size
            days[folder].append(member)
        return {
            folder: sorted(found, key=lambda one: one.filename)
            for folder, found in days.items()
            if sizes[folder] <= MAX_CHANNEL_BYTES
        }

    def _index(self, name: str) -> list[Object]:
        try:
            member = self._zip.getinfo(name)
        except KeyError:
            if name == "channels.json":
                raise Misconfigured("the archive is no Slack export: it has no channels.json") from None
            return []
        return self._rows(member)

    def users(self) -> list[Object]:
        """As ``users.list`` shows them."""
        return self._index("users.json")

    def threads(self, channel: str) -> dict[str, list[Object]]:
        """Answers by the ts of their parent, oldest first, each once."""
        found: dict[str, dict[str, Object]] = defaultdict(dict)
        for member in self._days.get(self._folders.get(channel, ""), ()):
            for message in self._rows(member):
                ts = message.get("ts")
                if isinstance(ts, str) and re.fullmatch(r"\d{1,12}\.\d{1,6}", ts) and root(message) != ts:
                    found[root(message)][ts] = {key: message[key] for key in message.keys() & _KEPT}
        return {parent: [answers[ts] for ts in sorted(answers, key=float)] for parent, answers in found.items()}

    def _rows(self, member: zipfile.ZipInfo) -> list[Object]:
        """What the ZIP says of a file's size is not believed: reading ends at the limit."""
        if member.flag_bits & 1:
            raise Misconfigured("the export archive is encrypted: give it unpacked and packed again without a password")
        parts, size = [], 0
        try:
            with self._zip.open(member) as file:
                while part := file.read(_READ):
                    size += len(part)
                    if size > MAX_FILE_BYTES:
                        raise Misconfigured(
                            "a file in the export archive unpacks to more than 128 MiB: no day of a channel is"
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


def completes(answers: list[Object], parent: Object) -> bool:
    """Whether these are all the answers that Slack says a parent has now."""
    return (
        bool(answers) and len(answers) == parent.get("reply_count") and answers[-1]["ts"] == parent.get("latest_reply")
    )
