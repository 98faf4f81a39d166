"""docs/tutorial.md, followed from its first line to its last by somebody who starts with nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deploy.console import clean_environment, commands, shell
from tests.support.space import PROJECT

pytestmark = [pytest.mark.stack, pytest.mark.slow]

TUTORIAL = PROJECT / "docs" / "tutorial.md"


@pytest.mark.timeout(600)
def test_every_command_of_the_tutorial_prints_the_documented_output(tmp_path: Path) -> None:
    documented = commands(TUTORIAL.read_text())
    assert len(documented) > 20
    env = clean_environment(tmp_path)
    with shell(PROJECT, env) as bash:
        try:
            printed = "".join(bash.run(command) for command in documented)
        finally:
            subprocess.run(
                [sys.executable, "-m", "cli.main", "down"],
                cwd=PROJECT,
                capture_output=True,
                check=True,
                env={**env, "PENSTOCK_HOME": str(tmp_path / "penstock-tutorial" / ".penstock")},
            )
    assert "warning" not in printed
