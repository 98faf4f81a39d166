"""Bodies of responses of sources."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from connectors import json_values
from connectors.errors import TooLarge
from connectors.web.client import MAX_NESTED, read_json
from pipeline.core.errors import Retryable


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


@pytest.mark.parametrize(
    ("sent", "value"),
    [
        (b'[{"n": ' + b"9" * 5_000 + b'}, {"n": 17}]', [{"n": math.inf}, {"n": 17}]),
        (b'[{"n": -' + b"9" * 5_000 + b"}]", [{"n": math.inf}]),
        (b'[{"t": ' + b'[{"x":' * 3_000 + b"1" + b"}]" * 3_000 + rb'}, {"t": "[[\"]"}]', None),
        (b'[{"t": ' + b"[" * 3_000 + b'"]"' + b"]" * 3_000 + b', "n": ' + b"9" * 5_000 + b"}, 17]", None),
    ],
)
async def test_a_number_or_a_depth_that_python_does_not_read_concerns_its_item(sent: bytes, value: Any) -> None:
    """One value made the whole response something that is not JSON: no other document of its page was ever read."""
    read = await read_json(httpx.Response(200, stream=httpx.ByteStream(sent)), "a", 1_000_000)
    if value is not None:
        assert read == value
        return
    assert read[1] in ({"t": '[["]'}, 17)
    node, depth = read[0]["t"], 0
    while isinstance(node, list | dict):
        node, depth = next(iter(node.values() if isinstance(node, dict) else node)), depth + 1
    assert node == math.inf
    assert depth == MAX_NESTED - 2


@pytest.mark.parametrize("sent", [b'{"n": ' + b"9" * 5_000, b"[" * 100_000, b'["' + rb"\"" * 100_000, b'{"a": nan}'])
async def test_what_is_no_json_is_still_refused(sent: bytes) -> None:
    with pytest.raises(Retryable, match="not JSON, or was cut off"):
        await read_json(httpx.Response(200, stream=httpx.ByteStream(sent)), "a", 1_000_000)


async def test_json_of_very_many_values_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen million empty objects, 32 kB when packed, took 740 MB and half a second in which nothing else ran."""
    monkeypatch.setattr(json_values, "MAX_VALUES", 20)

    async def read(sent: str) -> Any:
        return await read_json(httpx.Response(200, stream=httpx.ByteStream(sent.encode())), "a", 10_000)

    for value in ("{}", "[]", "1", '"a"', '{"a":1}'):
        with pytest.raises(TooLarge):
            await read(f"[{','.join([value] * 25)}]")
    text = r"a, [b], {c} \" \\" * 25
    assert await read(json.dumps([text, text])) == [text, text]
