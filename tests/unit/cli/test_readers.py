"""Readers of ingested documents, with and without the options that name them."""

from __future__ import annotations

import getpass

import pytest
import typer

from cli.readers import local_user, readers


def test_readers_default_to_the_user_who_ingests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    assert readers(["staff", "wiki/staff"], ["nda"]) == ["staff", "wiki/staff"]
    assert readers(None, None) == ["user:ann"]


@pytest.mark.parametrize(
    ("acl", "required", "says"),
    [
        (["staff", "folder/board"], None, "write 'board'"),
        (["staff"], ["folder/nda"], "write 'nda'"),
        (None, ["nda"], "--required needs --acl"),
    ],
)
def test_access_options_that_nobody_could_satisfy_are_rejected(
    acl: list[str] | None, required: list[str] | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as refused:
        readers(acl, required)
    output = capsys.readouterr()
    assert refused.value.exit_code == 2
    assert says in output.err
    assert len(output.err.splitlines()) == 1


def test_a_user_without_a_system_name_has_to_state_the_readers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 54321")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert readers(["staff"], None) == ["staff"]
    for ask in (lambda: readers(None, None), lambda: local_user("use --as")):
        with pytest.raises(typer.Exit):
            ask()
    assert capsys.readouterr().err.count("error: the operating system has no user name for you") == 2
