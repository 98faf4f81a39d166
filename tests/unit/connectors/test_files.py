"""Names and sizes of files decide whether they may hold text."""

from __future__ import annotations

import pytest

from connectors.files import file_type, may_hold_text


@pytest.mark.parametrize(
    ("path", "size", "may"),
    [
        ("docs/a.md", 1, True),
        ("docs/a.md", 0, False),
        ("docs/LOGO.PNG", 1, False),
        ("docs.zip/readme", 1, True),
        ("bin/zip", 1, True),
        ("lib/a", 1, True),
        ("lib/lib.a", 1, False),
    ],
)
def test_a_file_may_hold_text_unless_it_is_empty_or_its_ending_says_otherwise(path: str, size: int, may: bool) -> None:
    assert may_hold_text(path, size) == may


@pytest.mark.parametrize("ending", ["doc", "xls", "ppt", "msg"])
def test_old_formats_of_office_are_read_or_refused_but_not_skipped(ending: str) -> None:
    types = {
        "doc": "application/msword",
        "xls": "application/vnd.ms-excel",
        "ppt": "application/vnd.ms-powerpoint",
        "msg": "application/vnd.ms-outlook",
    }
    declared = file_type("a", types[ending])
    assert declared is not None
    assert declared.ending == f".{ending}"
    assert file_type(f"A.{ending.upper()}", "application/octet-stream") is not None
