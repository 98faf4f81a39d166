"""The last line of ``penstock recover`` names every reason for its exit code."""

from __future__ import annotations

import pytest

from cli.recover import _tell

RESULT = {
    "replayed": 45,
    "replayed_from": "2026-11-20T08:00:00+00:00",
    "failed": 0,
    "audit": {"clean": True, "documents": 42, "repaired": 0},
    "seconds": 38.0,
}


@pytest.mark.parametrize(
    ("refused", "reported"), [(0, ""), (1390, ", 1,390 dead letters wait because of who signed them")]
)
def test_the_last_line_says_why_a_recovery_with_a_clean_audit_has_failed(
    capsys: pytest.CaptureFixture[str], refused: int, reported: str
) -> None:
    _tell({**RESULT, "refused": refused})
    assert capsys.readouterr().out.endswith(f"(42 documents, 0 differences repaired){reported}; 38 s.\n")
