"""JSON of sources in Postgres, which refuses some texts that JSON can express: U+0000, and half of a character. Whoever
gives a row such an id must not stop the reading of its source, whose cursor may end there."""

from __future__ import annotations

import json
import re
from typing import Any

from psycopg.types.json import Jsonb

_REFUSED = re.compile(r"\\u(?:0000|d[89a-f])")
"""Escapes of JSON that Postgres may refuse: also those of pairs that are one character, which it does not."""
_AS_TEXT = "json as text"


def to_jsonb(value: Any) -> Jsonb:
    """Return a value of JSON in a form that Postgres can store, and ``from_jsonb`` reads."""
    text = json.dumps(value)
    if _REFUSED.search(text):
        return Jsonb({_AS_TEXT: text})
    return Jsonb(value, dumps=lambda _value: text)  # not again: what a source remembers may be large


def from_jsonb(stored: Any) -> Any:
    """Return the value that was stored."""
    return json.loads(stored[_AS_TEXT]) if isinstance(stored, dict) and stored.keys() == {_AS_TEXT} else stored
