"""A Jira of either flavour to talk to: the fake, served, and the connector against it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connectors.fakes.jira import FakeJira, Flavour
from connectors.fakes.jira_state import Grant, State
from connectors.jira import Jira, JiraOptions
from connectors.set_aside import SetAside
from connectors.source import Context, Document, Listed, Unlisted
from connectors.web import Limits
from pipeline.runtime.http_server import served
from tests.support.connectors.google_drive_kit import InMemory

IMPATIENT = Limits(patience_seconds=0.3, backoff_base_seconds=0.01, backoff_cap_seconds=0.02)
EVENTS = "https://penstock.example.com/v1/events/jira"


@dataclass
class Office:
    """A company with a project ENG, which the group ``staff`` (the connector's account, Ines) may browse."""

    fake: FakeJira
    url: str
    folder: Path
    memory: InMemory = field(default_factory=InMemory)
    set_aside: SetAside = field(default_factory=SetAside)
    opened: list[Jira] = field(default_factory=list)

    def __post_init__(self) -> None:
        state = self.fake.state
        self.bot = state.add_user("penstock", is_admin=True)
        self.ines, self.otto, self.sam = (state.add_user(name) for name in ("ines", "otto", "sam"))
        self.staff = state.add_group("staff", self.bot, self.ines)
        self.eng = state.add_project("ENG", Grant("group", "staff"))
        self.token = self.fake.token_for(self.bot)

    @property
    def state(self) -> State:
        return self.fake.state

    def jira(self, *, limits: Limits = IMPATIENT, **options: Any) -> Jira:
        """Instances share what is stored, as after a restart."""
        flavour = {"email": self.bot.email} if self.fake.cloud else {"flavour": "data-center"}
        values = {
            "base_url": self.url + self.fake.context,
            "token": self.token,
            "webhook_secret": self.fake.webhook_secret,
            "page_size": 3,
            "sweep_page_size": 3,
            **flavour,
            **options,
        }
        context = Context(
            name="jira",
            tenant="acme",
            memory=self.memory,
            folder=self.folder,
            set_aside=self.set_aside,
        )
        self.opened.append(Jira(JiraOptions(**values), context, limits=limits))
        return self.opened[-1]


@asynccontextmanager
async def office_in(
    folder: Path, flavour: Flavour = "cloud", around: Callable[[FakeJira], Any] = lambda fake: fake
) -> AsyncIterator[Office]:
    """around: wraps the fake's application, such as in a recorder."""
    fake = FakeJira(flavour)
    async with served(around(fake)) as url:
        office = Office(fake, url, folder)
        try:
            yield office
        finally:
            for source in office.opened:
                await source.close()


async def unlisted(source: Jira) -> list[Unlisted]:
    return [entry async for page in source.slim() for entry in page if isinstance(entry, Unlisted)]


async def readers(source: Jira, entry: Document | Listed) -> set[str]:
    """Return the principals who may read a document now: who hold one of its acl_tags and all others."""
    tags = {*entry.acl_tags, *entry.required_tags}
    named = {group.tag: group async for group in source.groups(tags)}

    def holders(tag: str, seen: frozenset[str] = frozenset()) -> set[str]:
        group = named.get(tag)
        if group is None or tag in seen:
            return set()
        return set(group.members).union(*(holders(inner, seen | {tag}) for inner in group.of))

    result = set[str]().union(*map(holders, entry.acl_tags))
    for tag in entry.required_tags:
        result &= holders(tag)
    return result
