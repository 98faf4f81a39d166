"""A small company's Confluence, served, and the source that reads it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connectors.confluence import Confluence, ConfluenceOptions
from connectors.fakes.confluence import FakeConfluence, Flavour, requests
from connectors.fakes.confluence_state import Item, State, User
from connectors.source import Context, Cursor, Entry, Group, Listed, Page, Reaction, Unlisted
from connectors.web import Limits
from pipeline.runtime.http_server import served
from tests.support.connectors.reading import everything, groups, listing

FLAVOURS: Sequence[Flavour] = ("cloud", "data-center")
SECRET = "what both sides know"


class NoMemory:
    async def get(self, name: str) -> Any | None:
        raise AssertionError("Confluence keeps nothing besides its cursors")

    async def put(self, name: str, value: Any | None) -> None:
        raise AssertionError("Confluence keeps nothing besides its cursors")


@dataclass
class Wiki:
    """Space ENG: group ``staff`` (bot, ann) and bob may view it. ``bot`` is the connector's account."""

    fake: FakeConfluence
    url: str
    folder: Path
    options: dict[str, Any]
    bot: User = field(init=False)
    ann: User = field(init=False)
    bob: User = field(init=False)
    source: Confluence = field(init=False)
    context: Context = field(init=False)
    """The context of the last ``connect``."""
    connected: list[Confluence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bot, self.ann, self.bob = (self.state.add_user(name) for name in ("bot", "ann", "bob"))
        self.state.groups["staff"] = {self.bot.account_id, self.ann.account_id}
        self.state.add_space("ENG", groups={"staff"}, users={self.bob.account_id})
        self.source = self.connect()

    @property
    def state(self) -> State:
        return self.fake.state

    def connect(self, *, limits: Limits | None = None, patient: bool = True, **options: Any) -> Confluence:
        """patient: without ``limits``, whether failures are tried again."""
        given = {
            "flavour": "cloud" if self.fake.cloud else "data-center",
            "base_url": self.url,
            "page_size": 3,
            "webhook_secret": SECRET,
            "token": self.fake.token_for(self.bot),
            **({"email": self.bot.email} if self.fake.cloud else {"email_domain": "example.com"}),
        }
        self.context = Context(name="wiki", tenant="t", memory=NoMemory(), folder=self.folder)
        limits = limits or (Limits() if patient else Limits(patience_seconds=0))
        self.connected.append(
            Confluence(ConfluenceOptions(**{**given, **self.options, **options}), self.context, limits=limits)
        )
        return self.connected[-1]

    def page(self, title: str, body: str = "", **more: Any) -> Item:
        return self.state.add_page("ENG", title, body or f"<p>About {title}.</p>", **more)

    async def full(self, cursor: Cursor | None = None) -> dict[str, Entry]:
        return await everything(self.source, cursor)

    async def slim(self) -> dict[str, Listed]:
        return await listing(self.source)

    async def unlisted(self) -> dict[str, str | None]:
        """Return the parts that a listing sets aside, each with the tag of its documents."""
        return {item.part: item.tag async for some in self.source.slim() for item in some if isinstance(item, Unlisted)}

    async def changes(self, cursor: Cursor) -> tuple[list[Entry], Cursor]:
        pages: list[Page] = [page async for page in self.source.changes(cursor)]
        return [entry for page in pages for entry in page.entries], pages[-1].cursor

    async def groups(self, tags: Sequence[str] | None = None) -> dict[str, Group]:
        return await groups(self.source, tags)

    async def events(self) -> list[Reaction]:
        """Read the changes of everything that happened since the last call."""
        happened, self.state.events = self.state.events, []
        return [await self.source.on_event(request) for request in requests(happened, SECRET, cloud=self.fake.cloud)]

    def count_requests(self, part: str) -> int:
        return sum(part in request for request in self.fake.requests)


@asynccontextmanager
async def wiki(flavour: Flavour, folder: Path, **options: Any) -> AsyncIterator[Wiki]:
    fake = FakeConfluence(flavour)
    async with served(fake) as address:
        site = Wiki(fake, address + fake.context, folder, options)
        try:
            yield site
        finally:
            for source in site.connected:
                await source.close()
