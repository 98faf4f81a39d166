"""``penstock webhook``: receivers are added, tested, rotated, paused and removed by an operator."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.main import app
from tests.fakes.webhooks import FakeWebhook

pytestmark = pytest.mark.stack

KEY = "a key of thirty-two characters and more"


@pytest.fixture
def operator(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POSTGRES_DSN", dsn)
    monkeypatch.setenv("PENSTOCK_WEBHOOKS_KEY", KEY)


async def typed(*arguments: str) -> Result:
    """The command in a thread, because it has an event loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["webhook", *arguments])


async def answer(*arguments: str) -> Any:
    ended = await typed(*arguments, "--json")
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


async def test_a_receiver_from_its_addition_to_its_removal(operator: None) -> None:
    async with FakeWebhook() as receiver:
        added = await answer(
            "add", "shop", receiver.url, "--tenant", "acme", "--source", "wiki*", "--allow-private", "--conflicts"
        )
        assert (added["webhook"], added["tenant"], added["sources"]) == ("shop", "acme", ["wiki*"])
        assert added["secret"].startswith("whsec_")
        receiver.secrets.append(added["secret"])
        assert await answer("test", "shop") == {"webhook": "shop", "status": 204, "delivered": True, "reason": None}
        assert receiver.received[0]["type"] == "io.penstock.webhook.test.v1"

        rotated = await answer("rotate", "shop", "--overlap-hours", "1")
        receiver.secrets.append(rotated["secret"])
        assert len(set(receiver.secrets)) == 2
        assert (await answer("test", "shop"))["delivered"], "both secrets verify it"
        [listed] = await answer("list")
        assert (listed["state"], listed["rotating"], listed["url"]) == ("working", True, receiver.url)
        assert (listed["answers"], listed["conflicts"]) == (False, True)
        assert not any(secret in json.dumps(listed) for secret in receiver.secrets)
        await answer("pause", "shop")
        shown = await typed("list")
        assert "paused: 0 delivered, 0 wait, 0 parked; paused by an operator" in shown.stdout
        assert (await answer("resume", "shop"))["waiting"] == 0
        assert await answer("deliveries", "shop") == []

        receiver.faults.errors = 1
        failed = await typed("test", "shop")
        assert (failed.exit_code, "answered 503" in failed.stderr) == (1, True)
        assert await answer("remove", "shop") == {"webhook": "shop", "removed": True}
        assert await answer("list") == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["add", "shop", "http://shop.example.com"], "has to be https://"),
        (["add", "shop", "https://ann:pw@shop.example.com"], "no user name, password"),
        (["remove", "nobody"], "no webhook is called nobody"),
        (["rotate", "nobody"], "no webhook is called nobody"),
        (["test", "nobody"], "no webhook is called nobody"),
        (["deliveries", "nobody"], "no webhook is called nobody"),
    ],
)
async def test_a_mistake_is_explained_in_one_line(operator: None, arguments: list[str], expected: str) -> None:
    ended = await typed(*arguments)
    assert ended.exit_code == 1
    assert expected in str(ended.exception)
    assert "pw" not in str(ended.exception).split()


async def test_without_the_key_no_webhook_is_added_and_a_name_is_taken_once(
    operator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await typed("add", "one", "https://shop.example.com")).exit_code == 0
    assert "a webhook one exists" in str((await typed("add", "one", "https://shop.example.com")).exception)
    assert (await typed("add", "Two!", "https://shop.example.com")).exit_code == 2
    monkeypatch.setenv("PENSTOCK_WEBHOOKS_KEY", "another key of thirty-two characters")
    assert "is not the key" in str((await typed("test", "one")).exception)
    monkeypatch.delenv("PENSTOCK_WEBHOOKS_KEY")
    assert "PENSTOCK_WEBHOOKS_KEY is not set" in str((await typed("add", "two", "https://a.example.com")).exception)
    await answer("remove", "one")
