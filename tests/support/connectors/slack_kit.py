"""A Slack to talk to: the fake, served, and the connector against it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connectors.fakes.slack import FakeSlack
from connectors.slack import Slack, SlackOptions
from connectors.source import Context
from connectors.web import Limits
from pipeline.runtime.http_server import served
from tests.support.connectors.reading import read


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


async def text(slack: Slack, external_id: str) -> str:
    return (await read(slack, external_id)).content
