"""docs/operate.md, followed from its first line to its last by somebody who starts with nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deploy.console import follow
from tests.support.space import PROJECT

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.mark.timeout(1500)
def test_every_command_of_the_operating_guide_prints_the_documented_output(tmp_path: Path) -> None:
    follow(PROJECT / "docs" / "operate.md", tmp_path, state=tmp_path / "penstock-trial" / "state", least=51)
