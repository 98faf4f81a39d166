"""Ids in texts that belong to nobody."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from connectors import strangers
from connectors.slack import access
from connectors.slack.access import Directory
from connectors.slack.client import Absent
from connectors.slack.options import SlackOptions
from connectors.strangers import Strangers
from pipeline.core.errors import Retryable


def test_so_many_unknown_ids_are_requested_in_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(strangers, "time", SimpleNamespace(monotonic=lambda: now))
    unknown = Strangers(2)
    unknown.add(["a"])
    assert [unknown.may_be_known(id) for id in ("a", "b", "x" * 300)] == [False, True, False]
    unknown.add(["b"])
    assert not unknown.may_be_known("c")
    now = strangers.HOUR_SECONDS
    assert [unknown.may_be_known(id) for id in ("a", "c")] == [False, True]
    unknown.forget()
    assert unknown.may_be_known("a")


def test_unknown_ids_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MAX_REMEMBERED", 2)
    unknown = Strangers(100)
    unknown.add("abc")
    assert [unknown.may_be_known(id) for id in "abc"] == [True, False, False]


async def test_invented_mentions_in_slack_do_not_keep_it_from_all_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each was a request: a message of 40,000 characters took an hour of those that Slack answers."""
    requests = 0

    async def call(method: str, **parameters: Any) -> Mapping[str, Any]:
        nonlocal requests
        if method == "auth.test":
            return {"team_id": "T1"}
        requests += 1
        if parameters["user"].startswith("UREAL"):
            return {"user": {"id": parameters["user"], "name": "ann"}}
        raise Absent("unknown", code="user_not_found")

    monkeypatch.setattr(access, "STRANGERS_IN_AN_HOUR", 5)
    directory = Directory(SimpleNamespace(call=call, name="s"), SlackOptions.model_construct(team=None))  # type: ignore[arg-type]
    assert await directory.load_users({f"UREAL{number}" for number in range(20)})
    assert requests == 20
    assert not await directory.load_users({f"UFAKE{number}" for number in range(50)})
    assert not await directory.load_users({f"UMORE{number}" for number in range(50)})
    assert requests == 25


async def test_a_person_of_slack_is_named_although_the_request_for_the_next_one_failed() -> None:
    """The text had the id of the person until it was changed: they counted as known, and no name was rebuilt."""
    failing = True

    async def call(method: str, **parameters: Any) -> Mapping[str, Any]:
        if method == "auth.test":
            return {"team_id": "T1"}
        if parameters["user"] == "U1":
            return {"user": {"id": "U1", "name": "ann"}}
        if failing:
            raise Retryable("down")
        raise Absent("unknown", code="user_not_found")

    directory = Directory(SimpleNamespace(call=call, name="s"), SlackOptions.model_construct(team=None))  # type: ignore[arg-type]
    with pytest.raises(Retryable):
        await directory.load_users({"U1", "U2"})
    failing = False
    assert await directory.load_users({"U1", "U2"})
    assert directory._names.users == {"U1": "ann"}
