"""The CSS declarations by which an element hides its text from the people who look at the page."""

from __future__ import annotations

import re

_COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)", re.DOTALL)
"""One without an end hides the rest of a style (CSS Syntax, "Consume comments")."""
_ESCAPE = re.compile(r"\\(?:([0-9a-f]{1,6})\s?|(.))", re.IGNORECASE)
_QUOTED = re.compile(r"[\"'(]")
_ZERO = r"(?:0+(?:\.0*)?|\.0+)(?![\d.])"
_BELOW_ONE = rf"(?:{_ZERO}|0*\.\d+(?:px|pt))"
_FAR = r"-\s*(?:\d{4,}|999(?!\d)|\d{3,}(?:\.\d*)?r?em)"
"""Farther than a hanging indent, half of a page that is centred, or a column beside another."""
_HIDING = re.compile(
    r"display\s*:\s*none|(?<![-\w])(?:content-)?visibility\s*:\s*(?:hidden|collapse)|mso-hide\s*:\s*all"
    r"|(?<![-\w])opacity\s*:\s*(?:0+(?:\.0\d*)?|\.0\d*)(?![\d.])"
    rf"|(?<![-\w])(?:text-indent|left|right|top|margin-left)\s*:\s*{_FAR}"
    r"|(?<![-\w])clip\s*:\s*rect\(\s*[01](?:px)?[\s,]+[\w.]+[\s,]+[01](?:px)?[\s,)]"
    rf"|clip-path\s*:\s*inset\(\s*(?:50|100)%|transform\s*:\s*scale\(\s*{_ZERO}"
)
_TRANSPARENT = re.compile(r"(?<![-\w])color\s*:\s*transparent")
_FILLED = re.compile(r"background-clip\s*:\s*text")
"""The letters show the background of the element, for example a gradient."""
_CUT_OFF = re.compile(r"overflow\s*:\s*hidden")
_LOW = re.compile(rf"(?<![-\w])(?:max-)?height\s*:\s*{_ZERO}")
_HEIGHTENED = re.compile(rf"(?<![-\w])(?:min-height|padding-(?:top|bottom))\s*:\s*(?!{_ZERO})[.\d]")
"""As of a frame that keeps its shape."""
_NARROW = re.compile(rf"(?<![-\w])(?:max-)?width\s*:\s*{_ZERO}")
_WIDENED = re.compile(rf"(?<![-\w])(?:min-width|flex|flex-grow|text-overflow)\s*:\s*(?!{_ZERO})[.\w]")
"""As a cell whose text ends with dots where the column does."""
_TINY = re.compile(rf"font-size\s*:\s*{_BELOW_ONE}|(?<![-\w])font\s*:\s*(?:[a-z]+\s+){{0,4}}{_BELOW_ONE}")
_SIZED = re.compile(
    r"(?<![-\w])font(?:-size\s*:\s*[\d.]*|\s*:[^;]{0,100}?)(?:\d(?:px|pt|pc|cm|mm|in|rem)|(?:small|medium|large)(?![\w-]))"
)
"""A size of letters that does not depend on the size around the element."""


def hides(style: str) -> bool:
    """Whether an element with these declarations shows no text of its own. What a style sheet says of it is not known
    here, nor that letters have the colour of what is behind them."""
    hidden, tiny = examine(style)
    return hidden or bool(tiny)


def examine(style: str) -> tuple[bool, bool | None]:
    """Return whether an element with these declarations and all in it is hidden, and whether its letters are too small
    to be seen. Elements within it have the same size of letters, unless they say another. None: it says no size."""
    if not style:
        return False, None
    if "/*" in style:  # in a string or an address it begins no comment
        style = _COMMENT.sub("", style) + (f";{style}" if _QUOTED.search(style) else "")
    if "\\" in style:
        style = _ESCAPE.sub(_unescaped, style)
    style = style.lower()
    hidden = (
        _HIDING.search(style)
        or (_TRANSPARENT.search(style) and not _FILLED.search(style))
        or (_CUT_OFF.search(style) and _has_no_room(style))
    )
    return bool(hidden), True if _TINY.search(style) else False if _SIZED.search(style) else None


def _has_no_room(style: str) -> bool:
    return bool(
        (_LOW.search(style) and not _HEIGHTENED.search(style)) or (_NARROW.search(style) and not _WIDENED.search(style))
    )


def _unescaped(match: re.Match[str]) -> str:
    if match[1] is None:
        return match[2]
    number = int(match[1], 16)
    return chr(number) if number < 0x110000 else "\ufffd"
