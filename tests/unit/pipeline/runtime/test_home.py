"""The state folder: where it is, and whose it may be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.core.errors import Misconfigured
from pipeline.runtime.home import home


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_HOME", raising=False)
    return tmp_path


def test_the_state_folder_is_below_the_current_one_unless_another_is_named(
    current_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home() == current_folder / ".penstock"
    (current_folder / ".penstock").mkdir()
    assert home() == current_folder / ".penstock"
    monkeypatch.setenv("PENSTOCK_HOME", "state")
    assert home() == current_folder / "state"


@pytest.mark.parametrize("is_link", [False, True])
def test_a_state_folder_of_another_user_is_used_only_if_it_is_named(
    current_folder: Path, is_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People who may write to the current folder would choose the servers that documents are sent to."""
    folder = current_folder / ".penstock"
    if is_link:
        folder.symlink_to(current_folder)
    else:
        folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 12_345, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(Misconfigured, match="belongs to another user"):
        home()
    monkeypatch.setenv("PENSTOCK_HOME", ".penstock")
    assert home() == folder
