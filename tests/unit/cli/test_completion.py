"""The names that the command line knows: completion in a real shell, and usage errors."""

from __future__ import annotations

import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import Worker, app
from tests.support.space import PROJECT

PENSTOCK = f"{sys.executable} -m penstock"


def bash(script: str, home: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", f"{script}\ntrue"],
        env={**os.environ, "HOME": str(home), "PYTHONPATH": str(PROJECT), "SHELL": "/bin/bash"},
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.heavy
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    command = tmp_path / "penstock"
    command.write_text(f'#!/bin/sh\nexec {PENSTOCK} "$@"\n')
    command.chmod(0o700)
    expected = {"penstock se": {"serve", "search"}, "penstock dead re": {"replay"}, "penstock worker k": {"keywords"}}
    lines = [f'eval "$({command} --show-completion)"']
    for words in expected:
        lines.append(f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _penstock_completion {command}")
        lines.append('echo "${COMPREPLY[@]}"')
    assert [set(line.split()) for line in bash("\n".join(lines), tmp_path).splitlines()] == list(expected.values())


def test_completion_is_installed_into_the_shells_own_files(tmp_path: Path) -> None:
    assert "completion installed" in bash(f"{PENSTOCK} --install-completion", tmp_path)
    assert "_penstock_completion penstock" in (tmp_path / ".bash_completions" / "penstock.sh").read_text()
    assert "penstock.sh" in (tmp_path / ".bashrc").read_text()


def test_an_unknown_worker_is_a_usage_error_that_names_all_of_them() -> None:
    result = CliRunner().invoke(app, ["worker", "nonsense"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert all(name in result.output for name in typing.get_args(Worker))
