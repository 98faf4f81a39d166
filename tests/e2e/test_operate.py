"""docs/operate.md, followed from its first line to its last by somebody who starts with nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deploy.console import clean_environment, commands, shell
from tests.support.space import PROJECT

pytestmark = [pytest.mark.stack, pytest.mark.slow]

GUIDE = PROJECT / "docs" / "operate.md"


@pytest.mark.timeout(1500)
def test_every_command_of_the_operating_guide_prints_the_documented_output(tmp_path: Path) -> None:
    documented = commands(GUIDE.read_text())
    assert len(documented) > 50
    env = clean_environment(tmp_path)
    with shell(PROJECT, env) as bash:
        try:
            for command in documented:
                bash.run(command)
        finally:
            subprocess.run(
                [sys.executable, "-m", "cli.main", "down"],
                cwd=PROJECT,
                capture_output=True,
                check=True,
                env={**env, "PENSTOCK_HOME": str(tmp_path / "penstock-trial" / "state")},
            )
