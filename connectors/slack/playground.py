"""A fake workspace for the contract suite: each document is a thread in a public channel of its own, which every full
member of the workspace may read."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from connectors.fakes.misbehaviour import Misbehaving
from connectors.fakes.slack import FakeSlack
from connectors.fakes.slack_workspace import Object
from connectors.source import Request
from pipeline.runtime.http_server import served

TOKEN_VARIABLE, SECRET_VARIABLE = "SLACK_TOKEN", "SLACK_SIGNING_SECRET"


class SlackPlayground:
    inside = "ines@acme.example"
    outside = "otto@acme.example"

    def __init__(self, fake: FakeSlack, url: str, misbehaving: Misbehaving) -> None:
        self.fake = fake
        self.misbehaving = misbehaving
        self.workspace = fake.workspace
        self.workspace.files_url = url
        self.ines = self.workspace.user("Ines Ito")
        self.sam = self.workspace.user("Sam Sun")
        self.workspace.user("Otto Orr", is_restricted=True)  # a guest reads only channels of which he is a member
        self.threads: dict[str, tuple[str, str, str]] = {}
        """The suite's name of a document → its channel, its ``ts``, and the ``ts`` of its reply."""
        self.removed: dict[str, list[Object]] = {}
        self.options: Mapping[str, Any] = {
            "base_url": f"{url}/api",
            "files_url": url,
            "files": True,
            "page_size": 3,
            "rows_per_request": 3,
            "token": {"env": TOKEN_VARIABLE},
            "signing_secret": {"env": SECRET_VARIABLE},
        }
        self.environment: Mapping[str, str] = {TOKEN_VARIABLE: fake.token, SECRET_VARIABLE: fake.signing_secret}

    async def write(self, name: str, text: str) -> str:
        if name in self.threads:
            channel, ts, _ = self.threads[name]
            self.workspace.edit(channel, ts, text)
        else:
            channel = self.workspace.channel(f"about-{len(self.threads)}", self.sam)
            ts = self.workspace.post(channel, self.sam, text)
            note = self.workspace.file("note.txt", f"A note about {name}.")
            reply = self.workspace.post(channel, self.ines, "Noted.", thread=ts, files=[note])
            self.threads[name] = channel, ts, reply
        return f"{channel}:{ts}"

    async def move(self, name: str) -> None:
        channel = self.threads[name][0]
        self.workspace.rename(channel, f"{self.workspace.channels[channel].name}-renamed")

    async def remove(self, name: str) -> None:
        channel, ts, reply = self.threads[name]
        messages = self.workspace.channels[channel].messages
        self.removed[name] = [copy.deepcopy(messages[ts]), copy.deepcopy(messages[reply])]
        self.workspace.delete(channel, reply)
        self.workspace.delete(channel, ts)

    async def restore(self, name: str) -> None:
        for message in self.removed.pop(name):
            self.workspace.restore(self.threads[name][0], message)

    async def restrict(self, name: str) -> None:
        """Make the thread's channel private. Ines never joined it."""
        self.workspace.convert_to_private(self.threads[name][0])

    async def leave(self) -> None:
        """Make Ines a guest, who reads only channels of which she is a member."""
        self.workspace.change_user(self.ines, is_restricted=True)

    async def add_places(self) -> Mapping[str, str]:
        """Add nothing: the entries name documents only."""
        return {}

    def sent(self) -> Sequence[Request]:
        return self.fake.sent()

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        self.fake.faults.throttled = throttled
        self.fake.faults.failing = failing
        self.fake.faults.truncated.clear()
        if truncated:
            self.fake.faults.truncated |= {"conversations.list", "conversations.history"}
        if expired:
            self.fake.expire_cursors()


@asynccontextmanager
async def playing() -> AsyncIterator[SlackPlayground]:
    fake = FakeSlack()
    misbehaving = Misbehaving(fake.app)
    async with served(misbehaving) as url:
        yield SlackPlayground(fake, url, misbehaving)
