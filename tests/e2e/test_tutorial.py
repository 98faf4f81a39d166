"""docs/tutorial.md, followed from its first line to its last by somebody who starts with nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deploy.console import follow
from tests.support.space import PROJECT

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_every_command_of_the_tutorial_prints_the_documented_output(tmp_path: Path) -> None:
    tutorial = PROJECT / "docs" / "tutorial.md"
    printed = follow(tutorial, tmp_path, state=tmp_path / "penstock-tutorial" / ".penstock", least=21)
    assert "warning" not in printed
