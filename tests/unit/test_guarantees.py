"""docs/guarantees.md, security.md and retention.md name tests and settings that exist: no claim outlives its proof."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from pipeline.ledger.personal import PLACES
from pipeline.runtime.settings import DEAD_LETTER_DAYS, RetentionSettings
from topics.registry import DAY_MS, DEAD_LETTERS

ROOT = Path(__file__).parent.parent.parent
RETENTION = (ROOT / "docs" / "retention.md").read_text()
SECURITY = (ROOT / "docs" / "security.md").read_text()
TEXTS = (ROOT / "docs" / "guarantees.md").read_text() + SECURITY + RETENTION
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXTS)))


@cache
def functions(file: str) -> frozenset[str]:
    path = ROOT / file
    return frozenset(re.findall(r"^(?:async )?def (\w+)\(", path.read_text(), re.MULTILINE) if path.is_file() else ())


def test_the_test_named_as_proof_of_each_guarantee_exists() -> None:
    assert len(NAMED) > 300
    assert [(file, test) for file, test in NAMED if not functions(file) or (test and test not in functions(file))] == []


def test_every_guarantee_names_its_proof() -> None:
    rows = [line for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines() if line.startswith("| **")]
    assert len(rows) > 20
    assert all("`tests/" in row for row in rows)


def test_every_threat_names_its_proof() -> None:
    threats = SECURITY.partition("\n## Threats\n")[2].partition("\n## ")[0]
    lines = [line for line in threats.splitlines() if line.startswith("|") and not line.startswith("|---")]
    rows = [line for line in lines if not line.endswith("| proved by | remains |")]
    assert len(rows) > 20
    for row in rows:
        cells = row.strip("|").split(" | ")
        assert len(cells) == 4, f"attack | is stopped by | proved by | remains: {row}"
        assert "`tests/" in cells[2], row


def test_the_retention_table_names_exactly_the_retention_settings() -> None:
    table = RETENTION.partition("\n## ")[0]
    assert {name.lower() for name in re.findall(r"`(\w+_DAYS)`", table)} == RetentionSettings.model_fields.keys()
    assert {place.age.setting for place in PLACES if place.age} | {
        "backups_days"
    } == RetentionSettings.model_fields.keys()


def test_former_memberships_are_retained_longer_than_dead_letters_can_be_replayed() -> None:
    assert DEAD_LETTERS.retention_ms == DAY_MS * DEAD_LETTER_DAYS
    assert RetentionSettings().memberships_days > DEAD_LETTER_DAYS
    with pytest.raises(ValueError, match="more than 90"):
        RetentionSettings(memberships_days=90)
