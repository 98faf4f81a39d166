"""Text from elsewhere (names, titles, errors) must not control the terminal on which a command shows it."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 without tab and newline, DEL, and C1, which terminals take for the two-character sequences after ESC."""
_LEFT_BY_JSON = re.compile("[\x7f-\x9f]")


def harmless(text: str) -> str:
    """Replace what controls a terminal; the lines of the text stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def harmless_json(text: str) -> str:
    """Escape what controls a terminal, in a JSON text whose other control characters are escaped already."""
    return _LEFT_BY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
