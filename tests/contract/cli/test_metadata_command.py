"""``penstock metadata``: an operator declares keys, one by one or all of a kind of source."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.main import app
from deploy.local.stack import Stack

pytestmark = pytest.mark.stack


@pytest.fixture
def operator(stack: Stack, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POSTGRES_DSN", dsn)
    monkeypatch.setenv("PENSTOCK_KAFKA_BOOTSTRAP", stack.endpoints()["kafka"]["bootstrap"])


async def typed(*arguments: str) -> Result:
    """The command in a thread, because it has an event loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["metadata", *arguments])


async def answer(*arguments: str) -> Any:
    ended = await typed(*arguments, "--json")
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


async def keys(tenant: str) -> dict[str, str]:
    return {key["name"]: key["type"] for key in await answer("list", "--tenant", tenant)}


async def test_one_command_declares_all_keys_of_a_kind_and_keeps_types_that_were_chosen(operator: None) -> None:
    await answer("declare", "comments", "--tenant", "adopting")
    adopted = await answer("adopt", "github", "--tenant", "adopting")
    assert {"labels", "state", "repository"} <= {*adopted["declared"]}
    assert "comments" not in adopted["declared"]
    held = await keys("adopting")
    assert (held["comments"], held["number"], held["answered"], held["labels"]) == (
        "keyword",
        "number",
        "boolean",
        "keyword",
    )
    again = await typed("adopt", "github", "--tenant", "adopting")
    assert "labels  declared before" in again.stdout
    assert await keys("adopting") == held
    assert await keys("another") == {}


async def test_a_kind_whose_columns_the_settings_name_says_so(operator: None) -> None:
    ended = await typed("adopt", "database")
    assert isinstance(ended.exception, Exception)
    assert "database has no keys of its own" in str(ended.exception)
    unknown = await typed("adopt", "tickets")
    assert "kind 'tickets'" in str(unknown.exception)
