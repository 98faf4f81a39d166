"""docs/guarantees.md names tests that exist: a promise does not outlive its proof."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "guarantees.md").read_text())))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=lambda value: value or "whole file")
def test_the_proof_of_every_guarantee_exists(file: str, test: str) -> None:
    assert (ROOT / file).is_file(), file
    assert not test or re.search(rf"^(?:async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), test


def test_every_guarantee_names_its_proof() -> None:
    rows = [line for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines() if line.startswith("| **")]
    assert len(rows) > 20
    assert all("`tests/" in row for row in rows)
