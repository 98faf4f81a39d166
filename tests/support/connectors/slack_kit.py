"""A Slack to talk to: the fake, served, and the connector against it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connectors.fakes.slack import FakeSlack
from connectors.slack import Slack, SlackOptions
from connectors.source import Context, Document, Entry, Listed
from connectors.web import Limits
from pipeline.runtime.http_server import served


@dataclass
class Notes:
    """``connectors.source.Memory`` of one test."""

    kept: dict[str, Any] = field(default_factory=dict)

    async def get(self, name: str) -> Any | None:
        return self.kept.get(name)

    async def put(self, name: str, value: Any | None) -> None:
        self.kept[name] = value


@dataclass
class Desk:
    fake: FakeSlack
    url: str
    folder: Path
    memory: Notes = field(default_factory=Notes)
    made: list[Slack] = field(default_factory=list)

    @property
    def workspace(self) -> Any:
        return self.fake.workspace

    def slack(self, *, limits: Limits = Limits(), **options: Any) -> Slack:  # noqa: B008 - frozen
        fields = {
            "token": self.fake.token,
            "signing_secret": self.fake.signing_secret,
            "base_url": f"{self.url}/api",
            "files_url": self.url,
            "page_size": 3,
            "rows_per_request": 3,
            **options,
        }
        context = Context(name="chat", tenant="default", memory=self.memory, folder=self.folder)
        self.made.append(Slack(SlackOptions(**fields), context, limits=limits))
        return self.made[-1]


@asynccontextmanager
async def desk_in(folder: Path) -> AsyncIterator[Desk]:
    fake = FakeSlack()
    async with served(fake.app) as url:
        fake.workspace.files_url = url
        desk = Desk(fake, url, folder)
        try:
            yield desk
        finally:
            for slack in desk.made:
                await slack.close()


async def everything(slack: Slack, cursor: Any = None) -> dict[str, Entry]:
    return {entry.external_id: entry async for page in slack.full(cursor) for entry in page.entries}


async def changed(slack: Slack, cursor: Any) -> tuple[dict[str, Entry], Any]:
    """Return the changes, and the cursor of the next poll."""
    results: dict[str, Entry] = {}
    async for page in slack.changes(cursor):
        results |= {entry.external_id: entry for entry in page.entries}
        cursor = page.cursor
    return results, cursor


async def listing(slack: Slack) -> dict[str, Listed]:
    return {entry.external_id: entry async for page in slack.slim() for entry in page if isinstance(entry, Listed)}


async def one(slack: Slack, external_id: str) -> Entry:
    [entry] = await slack.fetch([external_id])
    return entry


async def text(slack: Slack, external_id: str) -> str:
    entry = await one(slack, external_id)
    assert isinstance(entry, Document)
    return entry.content
