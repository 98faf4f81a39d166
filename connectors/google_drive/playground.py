"""The playground of Google Drive for the contract suite: a fake with one shared drive, in which each document has a
folder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from connectors.fakes.google_drive import FakeGoogleDrive
from connectors.fakes.google_drive_corpus import FOLDER, Grant
from connectors.fakes.misbehaviour import Misbehaving
from connectors.google_drive.client import MEMBER_SCOPE
from connectors.source import Request
from pipeline.runtime.http_server import served

ACCOUNT = "penstock@penstock-test.iam.gserviceaccount.com"
ADMIN = "directory@example.com"
STAFF = "staff@example.com"
KEY_VARIABLE = "GOOGLE_DRIVE_KEY"


class GoogleDrivePlayground:
    inside = "ines@example.com"
    outside = "otto@example.com"

    def __init__(self, fake: FakeGoogleDrive, url: str, misbehaving: Misbehaving) -> None:
        self.fake = fake
        self.misbehaving = misbehaving
        corpus = fake.corpus
        for address in (ACCOUNT, ADMIN, self.inside, self.outside):
            corpus.user(address)
        corpus.group(STAFF, self.inside, "sam@example.com")
        fake.tokens.delegated[ACCOUNT] = {MEMBER_SCOPE}
        fake.directory.admins.add(ADMIN)
        # An organizer, so that the account also sees folders with limited access.
        members = Grant(type="user", who=ACCOUNT, role="organizer"), Grant(type="group", who=STAFF, role="writer")
        self.drive = corpus.drive("Company", *members)
        self.archive = corpus.add("Archive", parent=self.drive, mime_type=FOLDER).id
        self.files: dict[str, str] = {}
        self.options: Mapping[str, Any] = {
            "drives": [self.drive],
            "directory_subject": ADMIN,
            "page_size": 3,
            "sweep_page_size": 3,
            "api_url": url,
            "directory_url": url,
            "service_account_key": {"env": KEY_VARIABLE},
        }
        self.environment: Mapping[str, str] = {KEY_VARIABLE: fake.tokens.key(ACCOUNT, url)}

    async def write(self, name: str, text: str) -> str:
        exports = {"text/markdown": text.encode()}
        if name in self.files:
            self.fake.corpus.edit(self.files[name], exports=exports)
        else:
            folder = self.fake.corpus.add(f"{name} (folder)", parent=self.drive, mime_type=FOLDER)
            self.files[name] = self.fake.corpus.add(name, parent=folder.id, exports=exports).id
        return self.files[name]

    async def move(self, name: str) -> None:
        self.fake.corpus.move(self.files[name], self.archive)
        self.fake.corpus.rename(self.files[name], f"{name}, moved")

    async def relabel(self, name: str) -> None:
        """Move it to another folder."""
        self.fake.corpus.move(self.files[name], self.archive)

    async def remove(self, name: str) -> None:
        self.fake.corpus.trash(self.files[name])

    async def restore(self, name: str) -> None:
        self.fake.corpus.trash(self.files[name], trashed=False)

    async def restrict(self, name: str) -> None:
        """Restrict the folder above: the log of changes names that folder only."""
        folder = self.fake.corpus.items[self.files[name]].parent
        assert folder is not None
        self.fake.corpus.limit(folder)

    async def leave(self) -> None:
        self.fake.corpus.groups[STAFF].discard(self.inside)

    async def add_places(self) -> Mapping[str, str]:
        """Share ``broken`` with one more person, so that its permissions have to be listed."""
        self.fake.corpus.share(self.files["broken"], Grant(type="user", who="sam@example.com"))
        return {}

    def sent(self) -> Sequence[Request]:
        return [Request(dict(event.headers), {}, b"") for event in self.fake.channels.take()]

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        self.fake.faults.throttled = throttled
        self.fake.faults.failing = failing
        self.fake.faults.truncated = truncated
        if expired:
            self.fake.pages.epoch += 1


@asynccontextmanager
async def playing() -> AsyncIterator[GoogleDrivePlayground]:
    fake = FakeGoogleDrive()
    misbehaving = Misbehaving(fake)
    async with served(misbehaving) as url:
        yield GoogleDrivePlayground(fake, url, misbehaving)
