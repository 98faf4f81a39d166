"""The browser of the page's tests, and the message if there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local import browser
from deploy.local.tools import show
from pipeline.core.errors import Misconfigured


def make(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_browser_named_by_the_environment_precedes_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path, named = make(tmp_path, "chromium"), make(tmp_path, "mine")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_CHROMIUM", raising=False)
    assert browser.require() == on_path
    monkeypatch.setenv("PENSTOCK_CHROMIUM", str(named))
    assert browser.require() == named


def test_a_browser_named_by_the_environment_that_is_missing_is_misconfigured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "chromium")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_CHROMIUM", str(tmp_path / "gone"))
    with pytest.raises(Misconfigured, match=r"PENSTOCK_CHROMIUM names .*gone"):
        browser.find()


def test_a_missing_browser_is_reported_in_one_line_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No apt-get on this PATH either, so nothing is installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_CHROMIUM", raising=False)
    assert browser.find() is None
    assert show(browser.look) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "apt-get install chromium" in said


def test_an_error_of_apt_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho 'W: old lists' >&2\necho 'E: Unable to fetch some archives' >&2\nexit 100\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(browser.os, "geteuid", lambda: 0)  # type: ignore[attr-defined]
    with pytest.raises(Misconfigured, match="apt-get update failed: E: Unable to fetch some archives"):
        browser.install()
