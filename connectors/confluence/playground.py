"""A fake Confluence of either flavour for the contract suite: one space that a group may view, in which each document
has a parent of its own (a folder in Cloud, a page in Data Center, which has no folders)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from html import escape
from typing import Any, ClassVar

from connectors.confluence.source import Confluence
from connectors.fakes.confluence import FakeConfluence, Flavour, requests
from connectors.fakes.misbehaviour import Misbehaving
from connectors.source import Playing, Request
from pipeline.runtime.http_server import served

TOKEN_VARIABLE, SECRET_VARIABLE = "CONFLUENCE_TOKEN", "CONFLUENCE_WEBHOOK_SECRET"  # names, no secrets


class ConfluencePlayground:
    inside = "ines@example.com"
    outside = "otto@example.com"

    def __init__(self, fake: FakeConfluence, url: str, misbehaving: Misbehaving) -> None:
        self.fake = fake
        self.misbehaving = misbehaving
        self.state = fake.state
        self.bot = self.state.add_user("penstock")
        self.ines = self.state.add_user("ines")
        self.state.add_user("otto")
        self.state.groups["staff"] = {self.bot.account_id, self.ines.account_id}
        self.state.add_space("ENG", groups={"staff"})
        self.pages: dict[str, str] = {}
        """The suite's name of a page → its id."""
        cloud = fake.cloud
        self.options: Mapping[str, Any] = {
            "base_url": url + fake.context,
            "page_size": 3,
            "token": {"env": TOKEN_VARIABLE},
            "webhook_secret": {"env": SECRET_VARIABLE},
            **({"email": self.bot.email} if cloud else {"flavour": "data-center", "email_domain": "example.com"}),
        }
        self.environment: Mapping[str, str] = {
            TOKEN_VARIABLE: fake.token_for(self.bot),
            SECRET_VARIABLE: fake.webhook_secret,
        }

    async def add_places(self) -> Mapping[str, str]:
        """Add the space OPS with the page ``far``. Returns its id (``ops``), that of ENG (``eng``), and that of what is
        above the page ``broken`` (``parent``)."""
        self.state.add_space("OPS", groups={"staff"})
        far = self.state.add_page("OPS", "Far", "<p>About far.</p>").id
        ids = {"far": far, "eng": self.state.spaces["ENG"].id, "ops": self.state.spaces["OPS"].id}
        return {**ids, "parent": self.state.items[self.pages["broken"]].parent or ""}

    def _add_parent(self, title: str) -> str:
        return self.state.add_page("ENG", title, kind="folder" if self.fake.cloud else "page").id

    async def write(self, name: str, text: str) -> str:
        body = "".join(f"<p>{escape(part)}</p>" for part in text.split("\n\n"))
        if name in self.pages:
            self.state.edit(self.pages[name], body=body)
        else:
            self.pages[name] = self.state.add_page("ENG", name, body, parent=self._add_parent(f"Above {name}")).id
        return self.pages[name]

    async def move(self, name: str) -> None:
        self.state.move(self.pages[name], self._add_parent(f"Archive of {name}"))
        self.state.edit(self.pages[name], title=f"{name}, moved")

    async def relabel(self, name: str) -> None:
        self.state.label(self.pages[name], "policy", "travel")

    async def remove(self, name: str) -> None:
        self.state.trash(self.pages[name])

    async def restore(self, name: str) -> None:
        self.state.restore(self.pages[name])

    async def restrict(self, name: str) -> None:
        """Restrict the page's parent: neither the page itself nor search shows an inherited restriction."""
        parent = self.state.items[self.pages[name]].parent
        self.state.restrict(parent or self.pages[name], users={self.bot.account_id})

    async def leave(self) -> None:
        self.state.groups["staff"].discard(self.ines.account_id)

    def sent(self) -> Sequence[Request]:
        events, self.state.events = self.state.events, []
        return requests(events, self.fake.webhook_secret, cloud=self.fake.cloud)

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        self.fake.faults.throttled = throttled
        self.fake.faults.failing = failing
        self.fake.faults.truncated = truncated
        if expired:
            self.fake.expire_cursors()


@asynccontextmanager
async def _playing(flavour: Flavour) -> AsyncIterator[ConfluencePlayground]:
    fake = FakeConfluence(flavour)
    misbehaving = Misbehaving(fake)
    async with served(misbehaving) as url:
        yield ConfluencePlayground(fake, url, misbehaving)


def cloud() -> AbstractAsyncContextManager[ConfluencePlayground]:
    return _playing("cloud")


def data_center() -> AbstractAsyncContextManager[ConfluencePlayground]:
    return _playing("data-center")


class ConfluenceDataCenter(Confluence):
    """Data Center, for ``penstock connector conform connectors.confluence.playground:ConfluenceDataCenter``."""

    playground: ClassVar[Playing] = staticmethod(data_center)
