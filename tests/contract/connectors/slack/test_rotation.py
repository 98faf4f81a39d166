"""Bot tokens that expire after twelve hours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from connectors.fakes.slack import CLIENT_ID, CLIENT_SECRET
from connectors.slack import Slack, SlackOptions
from pipeline.core.errors import Misconfigured
from tests.support.connectors.reading import everything, listing
from tests.support.connectors.slack_kit import Desk, desk_in


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        ann = desk.workspace.user("ann")
        desk.workspace.post(desk.workspace.channel("ops", ann), ann, "Hello there.")
        yield desk


def rotating(desk: Desk, first: str, **more: Any) -> Slack:
    credentials = {"client_id": CLIENT_ID, "client_secret": CLIENT_SECRET, "refresh_token": first}
    return desk.slack(token=None, **{**credentials, **more})


async def test_an_expired_token_is_replaced_and_the_newest_refresh_token_survives_a_restart(desk: Desk) -> None:
    first = desk.fake.turn_on_rotation()
    slack = rotating(desk, first)
    assert len(await everything(slack)) == 1
    assert await slack.check() == []
    assert desk.fake.requests["oauth.v2.access"] == 1
    desk.fake.expired.add(desk.fake.token)
    assert len(await listing(slack)) == 1
    assert desk.fake.requests["oauth.v2.access"] == 2
    assert len(await listing(rotating(desk, first))) == 1, "the first refresh token is revoked by now"
    assert desk.fake.requests["oauth.v2.access"] == 2
    assert desk.fake.token not in str(desk.memory.kept)


async def test_a_refresh_token_that_is_not_accepted_is_misconfigured(desk: Desk) -> None:
    desk.fake.turn_on_rotation()
    with pytest.raises(Misconfigured, match="authorize the app again"):
        await listing(rotating(desk, "xoxe-1-another"))


async def test_a_wrong_client_secret_is_misconfigured_and_is_not_quoted(desk: Desk) -> None:
    first = desk.fake.turn_on_rotation()
    with pytest.raises(Misconfigured, match="bad_client_secret") as raised:
        await listing(rotating(desk, first, client_secret="canary"))
    assert "canary" not in str(raised.value)


@pytest.mark.parametrize(
    "options", [{}, {"client_id": "a"}, {"token": "t", "client_id": "a", "client_secret": "b", "refresh_token": "c"}]
)
def test_two_credentials_or_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SlackOptions(**options)
