"""Bodies of responses of sources."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from connectors.web.client import read_json


def nested(value: Any, times: int) -> Any:
    for _ in range(times):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("sent", "value"),
    [
        (rb'{"\ud800": ["a\uDFFFb", 1, null]}', {"\ufffd": ["a\ufffdb", 1, None]}),
        (rb'["\ud83e\udda6", "\\ud800"]', ["\U0001f9a6", r"\ud800"]),
        (b'["\xed\xa0\x80"]', ["\ufffd"]),
        ('["\ud55c \U0001f9a6"]'.encode(), ["\ud55c \U0001f9a6"]),
        (
            rb'["\\ud83e\udda6", "\\\ud83e", "\ud83e\ud83e\udda6"]',
            [r"\ud83e" + "\ufffd", "\\\ufffd", "\ufffd\U0001f9a6"],
        ),
        ('["\ud800"]'.encode("utf-16", "surrogatepass"), ["\ufffd"]),
        (b'["' + b"\xed\xa0\xbe" + rb'\udda6"]', ["\ufffd\ufffd"]),
        (b"[" * 600 + rb'"\ud83e\udda6"' + b"]" * 600, nested("\U0001f9a6", 600)),
        (b"[" * 600 + rb'"\ud83e\n"' + b"]" * 600, nested("\ufffd\n", 600)),
    ],
)
async def test_half_of_a_character_in_json_is_replaced(sent: bytes, value: Any) -> None:
    """Python reads it, and refuses to write it anywhere: the author of one title stopped the reading of all others."""
    response = httpx.Response(200, stream=httpx.ByteStream(sent))
    read = await read_json(response, "a", 10_000)
    assert read == value
    assert json.dumps(read, ensure_ascii=False).encode()
