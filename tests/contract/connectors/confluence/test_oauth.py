"""Access tokens by rotating refresh tokens: renewed, stored, and shared between processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from connectors.confluence import Confluence, ConfluenceOptions
from connectors.confluence.oauth import AtlassianToken
from connectors.conform.memory_runner import InMemory
from connectors.fakes.atlassian_oauth import CLIENT_ID, CLIENT_SECRET, GRACE_SECONDS, FakeAtlassianOAuth
from connectors.source import CREDENTIAL, Context
from connectors.web import Limits
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.runtime.http_server import served
from tests.support.connectors.confluence_kit import Wiki, wiki


@dataclass
class Desk:
    """A wiki whose account has authorized an app, and instances that share what is stored."""

    site: Wiki
    folder: Path
    memory: InMemory = field(default_factory=InMemory)
    seconds: float = 1_000_000.0
    url: str = ""
    opened: list[Confluence] = field(default_factory=list)

    def __post_init__(self) -> None:
        issue, credentials = lambda: self.site.fake.token_for(self.site.bot), self.site.fake.credentials
        self.oauth = FakeAtlassianOAuth(issue, lambda token: credentials.pop(token, None), clock=lambda: self.seconds)
        self.first = self.oauth.authorize()

    def source(self, **options: Any) -> Confluence:
        given: dict[str, Any] = {
            "base_url": self.site.url,
            "oauth_url": self.url,
            "client_id": CLIENT_ID,
            "client_secret": CLIENT_SECRET,
            "refresh_token": self.first,
            **options,
        }
        context = Context(name="wiki", tenant="t", memory=self.memory, folder=self.folder)
        self.opened.append(Confluence(ConfluenceOptions(**given), context, limits=Limits(patience_seconds=1)))
        return self.opened[-1]

    def expire_access_tokens(self) -> None:
        for pair in self.oauth.pairs.values():
            self.site.fake.credentials.pop(pair.access, None)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with AsyncExitStack() as stack:
        made = Desk(await stack.enter_async_context(wiki("cloud", tmp_path)), tmp_path)
        made.url = await stack.enter_async_context(served(made.oauth))
        yield made
        for source in made.opened:
            await source.close()


async def spaces(source: Confluence) -> list[str]:
    return [group.tag async for group in source.groups() if group.tag.startswith("space:")]


async def test_a_token_is_renewed_when_it_is_refused_and_survives_a_restart(desk: Desk) -> None:
    source = desk.source()
    assert await spaces(source) == ["space:ENG"]
    assert desk.oauth.exchanges == 1
    desk.expire_access_tokens()
    assert await spaces(source) == ["space:ENG"]
    assert desk.oauth.exchanges == 2
    desk.seconds += GRACE_SECONDS + 1
    desk.oauth.elapse()
    assert await spaces(desk.source()) == ["space:ENG"], "the first refresh token is revoked by now"
    assert desk.oauth.exchanges == 2, "the stored access token is still valid"


async def test_a_process_uses_the_token_that_another_one_has_received(desk: Desk) -> None:
    mine, other = desk.source(), desk.source()
    await spaces(mine)
    await spaces(other)
    assert desk.oauth.exchanges == 1
    desk.expire_access_tokens()
    await spaces(other)
    desk.seconds += GRACE_SECONDS + 1
    desk.oauth.elapse()
    await spaces(mine)
    assert desk.oauth.exchanges == 2


async def test_a_process_that_was_too_late_uses_the_newer_token(desk: Desk) -> None:
    slow, fast = desk.source(), desk.source()
    await spaces(slow)
    desk.expire_access_tokens()
    stored = desk.memory.stored[CREDENTIAL]
    await spaces(fast)
    newer = desk.memory.stored[CREDENTIAL]
    desk.seconds += GRACE_SECONDS + 1
    answers = iter([stored, newer])  # it reads what is stored just before the other process stores its own
    desk.memory.get = lambda _name: anext_of(answers)  # type: ignore[method-assign]
    assert await spaces(slow) == ["space:ENG"]
    assert desk.oauth.exchanges == 2


async def anext_of(answers: Any) -> Any:
    return next(answers)


async def test_a_token_that_could_not_be_stored_is_not_lost(desk: Desk) -> None:
    source = desk.source()
    put = desk.memory.put

    async def failing(_name: str, _value: Any) -> None:
        raise Retryable("Postgres does not respond")

    desk.memory.put = failing  # type: ignore[method-assign]
    with pytest.raises(Retryable):
        await spaces(source)
    desk.memory.put = put  # type: ignore[method-assign]
    desk.seconds += GRACE_SECONDS + 1
    assert await spaces(source) == ["space:ENG"]
    assert desk.oauth.exchanges == 1
    assert await spaces(desk.source()) == ["space:ENG"]


async def test_an_answer_without_a_refresh_token_keeps_the_old_one(desk: Desk) -> None:
    desk.oauth.omits_refresh_token = True
    source = desk.source()
    await spaces(source)
    desk.site.fake.credentials.clear()
    assert await spaces(source) == ["space:ENG"]


async def test_a_refresh_token_that_is_not_accepted_needs_a_new_one_of_the_settings(desk: Desk) -> None:
    await spaces(desk.source())
    desk.expire_access_tokens()
    desk.oauth.pairs.clear()
    with pytest.raises(Misconfigured, match="authorize the app again"):
        await spaces(desk.source())
    desk.first = desk.oauth.authorize()
    assert await spaces(desk.source()) == ["space:ENG"]


async def test_a_wrong_secret_is_misconfigured_and_nothing_that_is_stored_can_be_read_with_it(desk: Desk) -> None:
    await spaces(desk.source())
    text = json.dumps(desk.memory.stored)
    assert all(secret not in text for pair in desk.oauth.pairs.items() for secret in (pair[0], pair[1].access))
    with pytest.raises(Misconfigured, match="check client_id and client_secret"):
        await spaces(desk.source(client_secret="another"))


@pytest.mark.parametrize(
    "options",
    [
        {"client_id": "a"},
        {"client_id": "a", "client_secret": "b", "refresh_token": "c", "token": "d"},
        {"client_id": "a", "client_secret": "b", "refresh_token": "c", "flavour": "data-center"},
        {},
    ],
)
def test_credentials_of_two_kinds_or_of_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ConfluenceOptions(base_url="https://wiki.example", **options)


def test_a_repr_shows_no_token() -> None:
    token = AtlassianToken(
        InMemory(),
        url="https://auth.example",
        client_id="c",
        client_secret=SecretStr("hidden").get_secret_value(),
        refresh_token="hidden",
        name="wiki",
        limits=Limits(),
    )
    assert "hidden" not in repr(token)
