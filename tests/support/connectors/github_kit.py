"""A GitHub to talk to: the fake, served, and the connector against it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connectors.fakes.github import WEBHOOK_SECRET, FakeGitHub
from connectors.github import GitHub, GitHubOptions
from connectors.source import Context
from connectors.web import Limits
from pipeline.runtime.http_server import served
from tests.support.connectors.slack_kit import Notes

IMPATIENT = Limits(patience_seconds=0.5, backoff_base_seconds=0.01, backoff_cap_seconds=0.02)


@dataclass
class Desk:
    fake: FakeGitHub
    url: str
    folder: Path
    memory: Notes = field(default_factory=Notes)
    made: list[GitHub] = field(default_factory=list)

    def github(self, *, limits: Limits = IMPATIENT, events_url: str | None = None, **options: Any) -> GitHub:
        fields = {"api_url": self.url, "webhook_secret": WEBHOOK_SECRET, "page_size": 3, "sweep_page_size": 3}
        credential = {} if "app_id" in options else {"token": self.fake.token}
        reads = {} if options.keys() & {"organization", "repositories"} else {"organization": "acme"}
        context = Context(name="hub", tenant="default", memory=self.memory, folder=self.folder, events_url=events_url)
        self.made.append(GitHub(GitHubOptions(**{**fields, **credential, **reads, **options}), context, limits=limits))
        return self.made[-1]


@asynccontextmanager
async def desk_in(folder: Path) -> AsyncIterator[Desk]:
    fake = FakeGitHub()
    fake.organization("acme", ines="ines@acme.example", sam="sam@acme.example")
    async with served(fake) as url:
        desk = Desk(fake, url, folder)
        try:
            yield desk
        finally:
            for source in desk.made:
                await source.close()


async def members(source: GitHub, tags: list[str] | None = None) -> dict[str, list[str]]:
    return {group.tag: list(group.members) async for group in source.groups(tags)}
