"""The lines in which ``penstock connector run`` reports its outcome."""

from __future__ import annotations

from typing import Any

import pytest

from cli.connector_show import show_outcome
from pipeline.core import publication


def shown(capsys: pytest.CaptureFixture[str], outcomes: dict[str, Any], *, ok: bool) -> list[str]:
    show_outcome({"ok": ok, "outcomes": outcomes, "problems": [], "token": publication.token([])})
    return capsys.readouterr().out.splitlines()


def test_a_load_that_was_complete_before_does_not_say_that_nothing_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    """The worker had just published 15 documents."""
    lines = shown(capsys, {"load": {}, "changes": {}, "sweep": {"listed": 15}}, ok=True)
    assert lines[:3] == ["load: complete", "changes: nothing new", "sweep: listed 15"]
    assert lines[3] == "everything that was published is in both stores"


def test_a_failed_run_does_not_end_as_if_all_were_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, {"load": {"error": "KeyError at source.py:14"}}, ok=False) == []
