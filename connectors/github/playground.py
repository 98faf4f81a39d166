"""A fake GitHub for the contract suite: each document is an issue in a private repository of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from connectors.fakes.github import WEBHOOK_SECRET, FakeGitHub, Object, Place
from connectors.fakes.misbehaviour import Misbehaving
from connectors.source import Request
from pipeline.runtime.http_server import served

TOKEN_VARIABLE, SECRET_VARIABLE = "GITHUB_TOKEN", "GITHUB_WEBHOOK_SECRET"


class GitHubPlayground:
    inside = "ines@acme.example"
    outside = "otto@acme.example"

    def __init__(self, fake: FakeGitHub, url: str, misbehaving: Misbehaving) -> None:
        self.fake = fake
        self.misbehaving = misbehaving
        fake.organization("acme", ines=self.inside, sam="sam@acme.example", otto=self.outside)
        self.issues: dict[str, tuple[Place, int]] = {}
        """The suite's name of a document → its repository and number."""
        self.removed: dict[str, Object] = {}
        self.options: Mapping[str, Any] = {
            "api_url": url,
            "organization": "acme",
            "page_size": 3,
            "sweep_page_size": 3,
            "token": {"env": TOKEN_VARIABLE},
            "webhook_secret": {"env": SECRET_VARIABLE},
        }
        self.environment: Mapping[str, str] = {TOKEN_VARIABLE: fake.token, SECRET_VARIABLE: WEBHOOK_SECRET}

    async def write(self, name: str, text: str) -> str:
        if name in self.issues:
            place, number = self.issues[name]
            self.fake.edit(place, number, body=text)
        else:
            place = self.fake.repository(f"acme/about-{name}", "ines", "sam")
            number = self.fake.add(place, "Issue", name.title(), text)
            self.fake.comment(place, number, "ines", "I have read it.")
            self.issues[name] = place, number
        return f"{place.id}/{number}"

    async def move(self, name: str) -> None:
        place, _ = self.issues[name]
        self.fake.rename(place, f"{place.full_name}-renamed")

    async def relabel(self, name: str) -> None:
        self.fake.edit(*self.issues[name], labels=["policy", "travel"])

    async def remove(self, name: str) -> None:
        self.removed[name] = self.fake.delete(*self.issues[name])

    async def restore(self, name: str) -> None:
        self.fake.restore(self.issues[name][0], self.removed.pop(name))

    async def restrict(self, name: str) -> None:
        """Remove Ines from the repository."""
        self.issues[name][0].collaborators.discard("ines")

    async def leave(self) -> None:
        """Remove Ines from the team that has access to every repository."""
        for place, _ in self.issues.values():
            place.collaborators.discard("ines")

    async def add_places(self) -> Mapping[str, str]:
        """Add nothing. Returns the node id and the name of the repository of ``broken`` (``node``, ``repository``), and
        the node id of that of ``edited`` (``other``)."""
        place, _ = self.issues["broken"]
        other, _ = self.issues["edited"]
        return {"node": place.node, "repository": place.full_name, "other": other.node}

    def sent(self) -> Sequence[Request]:
        return self.fake.sent()

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        self.fake.faults.throttled = throttled
        self.fake.faults.failing = failing
        self.fake.faults.truncated = truncated
        if expired:
            self.fake.epoch += 1


@asynccontextmanager
async def playing() -> AsyncIterator[GitHubPlayground]:
    fake = FakeGitHub()
    misbehaving = Misbehaving(fake)
    async with served(misbehaving) as url:
        yield GitHubPlayground(fake, url, misbehaving)
