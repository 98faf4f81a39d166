"""A fake Jira of either flavour for the contract suite: each document is an issue, in a project that a role may
browse."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar

from connectors.fakes.jira import FakeJira, Flavour
from connectors.fakes.jira_state import Grant, Issue
from connectors.fakes.misbehaviour import Misbehaving
from connectors.jira.source import Jira
from connectors.source import Playing, Request
from pipeline.runtime.http_server import served

TOKEN_VARIABLE, SECRET_VARIABLE = "JIRA_TOKEN", "JIRA_WEBHOOK_SECRET"  # names, no secrets


class JiraPlayground:
    inside = "ines@example.com"
    outside = "otto@example.com"

    def __init__(self, fake: FakeJira, url: str, misbehaving: Misbehaving) -> None:
        self.fake = fake
        self.misbehaving = misbehaving
        self.state = state = fake.state
        self.bot = state.add_user("penstock", is_admin=True)
        self.ines = state.add_user("ines")
        state.add_user("otto")
        self.staff = state.add_group("staff", self.bot, self.ines)
        role = state.add_role("Developers")
        self.eng = state.add_project("ENG", Grant("projectRole", role), roles={role: {"%staff"}})
        self.level = state.add_level(self.eng, "Board", Grant("user", self.bot.account_id))
        self.archive = state.add_project("OLD", Grant("group", "staff"))
        self.issues: dict[str, Issue] = {}
        """The suite's name of an issue → the issue."""
        self.options: Mapping[str, Any] = {
            "base_url": url + fake.context,
            "page_size": 3,
            "sweep_page_size": 3,
            "token": {"env": TOKEN_VARIABLE},
            "webhook_secret": {"env": SECRET_VARIABLE},
            **({"email": self.bot.email} if fake.cloud else {"flavour": "data-center", "email_domain": "example.com"}),
        }
        self.environment: Mapping[str, str] = {
            TOKEN_VARIABLE: fake.token_for(self.bot),
            SECRET_VARIABLE: fake.webhook_secret,
        }

    async def add_places(self) -> Mapping[str, str]:
        """Add the issue ``far`` to the project OLD, and a comment and a file to the issue ``ask``. Returns its id, that
        of the project (``old``), and those of the file: as a document (``file``) and in Jira (``attachment``)."""
        ask = self.issues["ask"]
        self.state.comment(ask, "A comment.")
        attached = self.state.attach(ask, "file.txt", b"About file.")
        ids = {"far": self.state.add_issue(self.archive, "Far", "About far.").id, "old": self.archive.id}
        return {**ids, "file": f"{ask.id}/attachment/{attached.id}", "attachment": attached.id}

    async def write(self, name: str, text: str) -> str:
        if name in self.issues:
            self.state.edit(self.issues[name], description=text)
        else:
            self.issues[name] = self.state.add_issue(self.eng, name.title(), text)
        return self.issues[name].id

    async def move(self, name: str) -> None:
        """Move the issue to another project, which changes its key."""
        self.state.move(self.issues[name], self.archive)

    async def relabel(self, name: str) -> None:
        self.state.edit(self.issues[name], labels=["policy", "travel"])

    async def remove(self, name: str) -> None:
        self.state.delete(self.issues[name])

    async def restore(self, name: str) -> None:
        self.state.restore(self.issues[name])

    async def restrict(self, name: str) -> None:
        """Give the issue a security level of which Ines is no member, and leave its update time as it is."""
        self.issues[name].level = self.level.id

    async def leave(self) -> None:
        self.staff.members.discard(self.ines.account_id)

    def sent(self) -> Sequence[Request]:
        return self.fake.sent()

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        self.fake.faults.throttled = throttled
        self.fake.faults.failing = failing
        self.fake.faults.truncated = truncated
        if expired:
            self.fake.expire_tokens()


@asynccontextmanager
async def _playing(flavour: Flavour) -> AsyncIterator[JiraPlayground]:
    fake = FakeJira(flavour)
    misbehaving = Misbehaving(fake)
    async with served(misbehaving) as url:
        yield JiraPlayground(fake, url, misbehaving)


def cloud() -> AbstractAsyncContextManager[JiraPlayground]:
    return _playing("cloud")


def data_center() -> AbstractAsyncContextManager[JiraPlayground]:
    return _playing("data-center")


class JiraDataCenter(Jira):
    """Data Center, for ``penstock connector conform connectors.jira.playground:JiraDataCenter``."""

    playground: ClassVar[Playing] = staticmethod(data_center)
