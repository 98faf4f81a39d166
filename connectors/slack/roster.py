"""What was listed of each channel last, on disk: Slack puts a bot out of a channel that is archived, and shows it
nothing of a channel that it was removed from, so the documents there could not be listed any more.

The folder may be lost: then such documents are missing from a listing, and the sweep's guard and ``fetch`` decide.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

_ID = re.compile(r"[CG][A-Z0-9]{1,40}")
Row = tuple[str, str]
"""(external id, revision)"""


class Roster:
    """Blocking; call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "channels"

    def channels(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        return sorted(path.stem for path in self._folder.glob("*.json") if _ID.fullmatch(path.stem))

    def write(self, channel: str, rows: Sequence[Row]) -> None:
        """All of a channel, once it was listed to its end."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, part = self._path(channel), self._path(channel).with_suffix(".part")
        text = json.dumps(rows)
        if path.exists() and path.read_text() == text:
            return
        part.write_text(text)
        os.replace(part, path)

    def read(self, channel: str) -> list[Row]:
        """What is not readable is as good as lost."""
        try:
            found = json.loads(self._path(channel).read_text())
        except (FileNotFoundError, ValueError):
            return []
        return [(str(id), str(revision)) for id, revision in found]

    def forget(self, channels: Collection[str]) -> None:
        for channel in channels:
            self._path(channel).unlink(missing_ok=True)

    def _path(self, channel: str) -> Path:
        if not _ID.fullmatch(channel):
            raise ValueError("no channel id")
        return self._folder / f"{channel}.json"
