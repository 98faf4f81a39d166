"""The CSS declarations by which an element hides its text from the people who look at the page."""

from __future__ import annotations

import re

_COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)", re.DOTALL)
"""One without an end hides the rest of a style (CSS Syntax, "Consume comments")."""
_ESCAPE = re.compile(r"\\(?:([0-9a-f]{1,6})\s?|(.))", re.IGNORECASE)
_ZERO = r"(?:0+(?:\.0*)?|\.0+)(?![\d.])"
_BELOW_ONE = rf"(?:{_ZERO}|0*\.\d+(?:px|pt))"
_FAR = r"-\s*\d{3,}"
_HIDING = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse)|mso-hide\s*:\s*all"
    rf"|font-size\s*:\s*{_BELOW_ONE}|(?<![-\w])font\s*:\s*(?:[a-z]+\s+){{0,4}}{_BELOW_ONE}"
    r"|opacity\s*:\s*(?:0+(?:\.0\d*)?|\.0\d*)(?![\d.])|(?<![-\w])color\s*:\s*transparent"
    rf"|(?<![-\w])(?:text-indent|left|right|top|margin-left)\s*:\s*{_FAR}"
    r"|(?<![-\w])clip\s*:\s*rect\(\s*[01](?:px)?[\s,]|clip-path\s*:\s*inset\(\s*(?:50|100)%"
    rf"|transform\s*:\s*scale\(\s*{_ZERO}"
)
_EMPTY_BOX = re.compile(rf"(?<![-\w])(?:max-)?(?:height|width)\s*:\s*{_ZERO}")
_CUT_OFF = re.compile(r"overflow\s*:\s*hidden")


def hides(style: str) -> bool:
    """Whether an element with these declarations shows no text. What a style sheet says of it is not known here, nor
    that letters have the colour of what is behind them."""
    if "/*" in style:
        style = _COMMENT.sub("", style)
    if "\\" in style:
        style = _ESCAPE.sub(_unescaped, style)
    style = style.lower()
    return bool(_HIDING.search(style) or (_CUT_OFF.search(style) and _EMPTY_BOX.search(style)))


def _unescaped(match: re.Match[str]) -> str:
    if match[1] is None:
        return match[2]
    number = int(match[1], 16)
    return chr(number) if number < 0x110000 else "\ufffd"
