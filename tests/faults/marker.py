"""Texts of documents that can be recognised wherever they are shown."""

from __future__ import annotations

import re

_MARKER = re.compile(r"\bmark\w+x\d+\b")


def text_with_marker(word: str, number: int) -> str:
    """Return a paragraph that is short enough to be one chunk. word: occurs in every document of the scenario."""
    return f"{word} notes on matter {number} with the marker mark{word}x{number} and nothing else to say."


def markers_in(text: str) -> set[str]:
    return set(_MARKER.findall(text))


def marker_of(text: str) -> str:
    """Return the only marker. Raises ValueError if there is none, or more than one."""
    [marker] = markers_in(text)
    return marker
