"""A Google Drive connector at a pretended Google Drive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from connectors.conform.memory_runner import InMemory
from connectors.fakes.google_drive import FakeGoogleDrive
from connectors.fakes.google_drive_corpus import Corpus, Grant
from connectors.google_drive import GoogleDrive, GoogleDriveOptions
from connectors.google_drive.client import MEMBER_SCOPE, USER_SCOPE
from connectors.google_drive.playground import ACCOUNT, ADMIN
from connectors.source import Context
from connectors.web import Limits
from pipeline.runtime.http_server import served

EVENTS = "https://penstock.example.com/events/drive"


class Desk:
    def __init__(self, fake: FakeGoogleDrive, url: str, folder: Path) -> None:
        self.fake, self.url, self.folder = fake, url, folder
        self.memory = InMemory()
        self.key = fake.tokens.key(ACCOUNT, url)
        for address in (ACCOUNT, ADMIN, "ines@example.com", "otto@example.com"):
            self.corpus.user(address)
        fake.tokens.delegated[ACCOUNT] = {MEMBER_SCOPE, USER_SCOPE}
        fake.directory.admins.add(ADMIN)
        self._open: list[GoogleDrive] = []
        self.afterwards: list[Callable[[], object]] = []

    @property
    def corpus(self) -> Corpus:
        return self.fake.corpus

    def drive(self, *members: Grant, role: str = "reader") -> str:
        return self.corpus.drive("Company", Grant(type="user", who=ACCOUNT, role=role), *members)

    def doc(self, name: str, parent: str | None, text: str = "Some text.", **more: Any) -> str:
        return self.corpus.add(name, parent=parent, exports={"text/markdown": text.encode()}, **more).id

    def mine(self, name: str, *grants: Grant, text: str = "Some text.", owner: str = "ines@example.com") -> str:
        """In somebody's My Drive, shared with the service account as Editor."""
        id_ = self.doc(name, None, text, owner=owner)
        for grant in (Grant(type="user", who=ACCOUNT, role="writer"), *grants):
            self.corpus.share(id_, grant)
        return id_

    def source(self, *, patient: bool = True, answer_bytes: int = 2**25, **options: Any) -> GoogleDrive:
        """Instances share what is kept, as after a restart. patient: failures are tried again. answer_bytes: the
        largest answer that is taken."""
        option_values = {
            "directory_subject": ADMIN,
            "service_account_key": self.key,
            "api_url": self.url,
            "directory_url": self.url,
            **options,
        }
        context = Context(name="drive", tenant="acme", memory=self.memory, folder=self.folder, events_url=EVENTS)
        limits = Limits(patience_seconds=60 if patient else 0, answer_bytes=answer_bytes)
        source = GoogleDrive(GoogleDriveOptions(**option_values), context, now=self.corpus.now, limits=limits)
        self._open.append(source)
        return source

    async def close(self) -> None:
        for source in self._open:
            await source.close()
        for do in self.afterwards:
            do()


@asynccontextmanager
async def desk_in(folder: Path) -> AsyncIterator[Desk]:
    fake = FakeGoogleDrive()
    async with served(fake) as url:
        desk = Desk(fake, url, folder)
        try:
            yield desk
        finally:
            await desk.close()
