"""Which files are ours to read: whole shared drives, the account's own files, and what is below some folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connectors.google_drive.api import FOLDER, PLACE, Api, Json
from connectors.google_drive.options import GoogleDriveOptions
from connectors.web import Missing
from pipeline.core.errors import Misconfigured

OWN = "user"
"""Key of the account's own files, among the ids of shared drives."""
DEEPEST = 200
"""Folders within folders: Drive takes 100 in a shared drive (support.google.com/a/answer/7338880)."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A list of files and a log of changes of its own at Google."""

    key: str
    folders: frozenset[str] | None
    """Only what is below these; None: all."""

    @property
    def drive(self) -> str | None:
        return None if self.key == OWN else self.key


async def corpora(options: GoogleDriveOptions, api: Api) -> Sequence[Corpus]:
    """What the settings come to now, in an order that stays. Raises Misconfigured for a folder that is not there."""
    whole = set(options.drives)
    if options.all_drives:
        whole |= set(await api.drives())
    if options.my_drive:
        whole.add(OWN)
    parts: dict[str, set[str]] = {}
    for folder in options.folders:
        key = await _home_of(folder, api)
        if key not in whole:
            parts.setdefault(key, set()).add(folder)
    found = [Corpus(key, None) for key in whole] + [Corpus(key, frozenset(ids)) for key, ids in parts.items()]
    return sorted(found, key=lambda corpus: corpus.key)


async def _home_of(folder: str, api: Api) -> str:
    try:
        place = await api.file(folder, PLACE)
    except Missing as error:
        raise Misconfigured(missing_folder(folder, api)) from error
    if place.get("mimeType") != FOLDER:
        raise Misconfigured(f"folders: {folder} is no folder")
    return str(place.get("driveId") or OWN)


def missing_folder(folder: str, api: Api) -> str:
    return f"folders: {folder} is not there, or not shared with {api.email} (or the subject)"


def missing_drive(drive: str, api: Api) -> str:
    return f"drives: {drive} is not there, or {api.email} (or the subject) is no member of it: add it as Viewer"


class Tree:
    """Who is below whom, as far as was asked; good for one page or one listing."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._parents: dict[str, str | None] = {}

    async def load(self, corpus: Corpus) -> Json:
        """All folders of a corpus, many at a time. Returns the last page."""
        token: str | None = None
        while True:
            page = await self._api.files(corpus.drive, f"mimeType = '{FOLDER}'", PLACE, 1000, token)
            for folder in page.get("files", []):
                self._note(folder)
            token = page.get("nextPageToken")
            if not token:
                return page

    def _note(self, item: Json) -> None:
        parents = item.get("parents") or ()
        self._parents[str(item["id"])] = str(parents[0]) if parents else None

    async def holds(self, corpus: Corpus, item: Json) -> bool:
        """Whether an item of this corpus is within its folders."""
        if corpus.folders is None:
            return True
        parents = item.get("parents") or ()
        above = str(parents[0]) if parents else None
        for _ in range(DEEPEST):
            if above is None or above in corpus.folders:
                return above is not None
            if above not in self._parents:
                try:
                    self._note(await self._api.file(above, PLACE))
                except Missing:  # a folder that is not shared with us: what is above it cannot be ours
                    self._parents[above] = None
            above = self._parents[above]
        return False
