"""References to characters in HTML, such as ``&#8212;``."""

from __future__ import annotations

import re

_LONG_NUMBER = re.compile(r"&#[0-9]{8,}")


def without_long_numbers(html: str) -> str:
    """Return a text for the standard library's ``html``: it ends with a ValueError at a number of 4,301 digits. Numbers
    of more than seven are those of no character, as the one in their place."""
    return _LONG_NUMBER.sub("&#9999999", html)
