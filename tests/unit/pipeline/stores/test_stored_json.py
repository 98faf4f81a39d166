"""Cursors of sources as Postgres can store them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.stores.stored_json import from_jsonb, to_jsonb


@pytest.mark.parametrize(
    ("value", "is_plain"),
    [
        ({"after": "a", "page": 1}, True),
        ({"after": "Zürich \U0001f9a6"}, False),
        ({"after": "a\x00b"}, False),
        ({"after": r"a\u0000b"}, False),
        ({"after": "\ud800"}, False),
        (["a", None], True),
        (None, True),
    ],
)
def test_a_cursor_with_a_text_that_postgres_refuses_is_stored_and_read(value: Any, is_plain: bool) -> None:
    stored = to_jsonb(value).obj
    assert from_jsonb(stored) == value
    assert (stored == value) is is_plain
    sent = json.dumps(stored)
    assert r"\u0000" not in sent.replace(r"\\", "")
    assert r"\ud800" not in sent.replace(r"\\", "")
