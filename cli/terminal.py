"""Text from elsewhere (names, titles, errors) must not control the terminal on which a command shows it."""

from __future__ import annotations

import re

import typer

_DIRECTION = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
"""The characters that change the direction in which others are shown (Unicode's property Bidi_Control): with them a
name reads differently from what it is, and hides or moves the text beside it."""
_CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_DIRECTION}]")
"""C0 without tab and newline, DEL, C1, which terminals take for the two-character sequences after ESC, and
_DIRECTION."""
_LEFT_BY_JSON = re.compile(f"[\x7f-\x9f{_DIRECTION}]")


def harmless(text: str) -> str:
    """Replace what controls a terminal; the lines of the text stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def harmless_json(text: str) -> str:
    """Escape what controls a terminal, in a JSON text whose other control characters are escaped already."""
    return _LEFT_BY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text as it is, on stdout or stderr, except for what controls a terminal."""
    typer.echo(harmless(text), err=err, nl=nl)
