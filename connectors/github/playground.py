"""Fakes of GitHub for the contract suite: each document is an issue, or a page of the wiki, in a private repository of
its own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import SecretStr

from connectors.fakes.github import WEBHOOK_SECRET, FakeGitHub, Object, Place
from connectors.fakes.misbehaviour import Misbehaving
from connectors.git.options import basic
from connectors.git.playground import Backend, Clone, certificate
from connectors.github.source import GitHub
from connectors.source import Playing, Request
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


@dataclass
class _Wiki:
    """A repository with a wiki that has one page."""

    place: Place
    clone: Clone
    page: str
    """The name of the page's file."""


class WikisPlayground:
    inside = "ines@acme.example"
    outside = "otto@acme.example"

    def __init__(self, fake: FakeGitHub, backend: Backend, folder: Path, urls: tuple[str, str]) -> None:
        """urls: of the API and of git."""
        self.fake = fake
        self.backend = backend
        fake.organization("acme", ines=self.inside, sam="sam@acme.example", otto=self.outside)
        self._folder = folder
        self.wikis: dict[str, _Wiki] = {}
        """By the suite's name of a document."""
        self.removed: dict[str, str] = {}
        self.options: Mapping[str, Any] = {
            "api_url": urls[0],
            "web_url": urls[1],
            "ca_file": str(folder / "certificate.pem"),
            "kinds": ["wikis"],
            "organization": "acme",
            "token": {"env": TOKEN_VARIABLE},
            "webhook_secret": {"env": SECRET_VARIABLE},
        }
        self.environment: Mapping[str, str] = {TOKEN_VARIABLE: fake.token, SECRET_VARIABLE: WEBHOOK_SECRET}

    async def write(self, name: str, text: str) -> str:
        if name not in self.wikis:
            self.wikis[name] = await asyncio.to_thread(self._create, name)
        wiki = self.wikis[name]
        self.removed.pop(name, None)
        wiki.clone.write(wiki.page, text)
        await self._push(wiki)
        return f"{wiki.place.id}/wiki/About-{name}.md"

    async def move(self, name: str) -> None:
        wiki = self.wikis[name]
        old, wiki.page = wiki.clone.folder / wiki.page, f"Renamed-{wiki.page}"
        old.rename(wiki.clone.folder / wiki.page)
        await self._push(wiki)

    async def remove(self, name: str) -> None:
        wiki = self.wikis[name]
        file = wiki.clone.folder / wiki.page
        self.removed[name] = file.read_text()
        file.unlink()
        await self._push(wiki)

    async def restore(self, name: str) -> None:
        await self.write(name, self.removed[name])

    async def restrict(self, name: str) -> None:
        """Remove Ines from the repository."""
        self.wikis[name].place.collaborators.discard("ines")

    async def leave(self) -> None:
        """Remove Ines from the team that has access to every repository."""
        for wiki in self.wikis.values():
            wiki.place.collaborators.discard("ines")

    def sent(self) -> Sequence[Request]:
        return self.fake.sent()

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """expired: replace the history of every wiki by another with the same pages."""
        self.fake.faults.throttled = self.backend.throttled = throttled
        self.fake.faults.failing = self.backend.failing = failing
        self.fake.faults.truncated = truncated
        if expired:
            for wiki in self.wikis.values():
                wiki.clone.git("update-ref", "-d", "HEAD")
                await self._push(wiki)

    def _create(self, name: str) -> _Wiki:
        place = self.fake.repository(f"acme/about-{name}", "ines", "sam")
        remote = self.backend.root / f"{place.full_name}.wiki.git"
        remote.parent.mkdir(exist_ok=True)
        return _Wiki(place, Clone(self._folder / name, remote), f"About-{name}.md")

    async def _push(self, wiki: _Wiki) -> None:
        commit = await asyncio.to_thread(wiki.clone.push)
        self.fake.announce_wiki(wiki.place, wiki.page.removesuffix(".md"), commit)


@asynccontextmanager
async def playing_wikis() -> AsyncIterator[WikisPlayground]:
    fake = FakeGitHub()
    with tempfile.TemporaryDirectory(prefix="penstock-wikis-") as name:
        folder = Path(name)
        (folder / "served").mkdir()
        backend = Backend(folder / "served", f"Basic {basic('x-access-token', SecretStr(fake.token))}")
        async with served(fake) as api, served(backend, tls=certificate(folder)) as git:
            yield WikisPlayground(fake, backend, folder, (api, git))


class GitHubWikis(GitHub):
    """Wikis, for ``penstock connector conform connectors.github.playground:GitHubWikis``."""

    playground: ClassVar[Playing] = staticmethod(playing_wikis)
