"""Finds out which parts of a text that is still being written are code for every Markdown renderer. Pure.

Only code is shown without links, and renderers differ in details. Therefore this module never guesses: where it does
not know for certain whether the next character is code, it says so.
"""

from __future__ import annotations

import regex

_MARKERS = r"[ \t>*+\-]*+(?:\d{1,9}[.)][ \t>*+\-]*+)*+"
"""Indentation, and the marks of quotations and list items."""
_FENCE = regex.compile(r"( {0,3})(`{3,})[^`]*")
_UNCERTAIN_FENCE = regex.compile(_MARKERS + r"(?:`{3,}[^`]*|~{3,}.*)", regex.DOTALL)
"""A line that begins or ends a block of code only for some indentations of the lines around it."""
_HTML = regex.compile(_MARKERS + r"<[a-z/!?]", regex.IGNORECASE)
_RAW_HTML = regex.compile(_MARKERS + r"</?(?:pre|script|style|textarea)\b", regex.IGNORECASE)


class CodeTracker:
    """Follows a text (with ``\\n`` as line ends) and knows where it is within code."""

    def __init__(self) -> None:
        self.last = ""
        """The last character."""
        self.line = ""
        """The current line so far."""
        self._fence: tuple[int, int] | None = None
        """The indentation and length of the fence of the current block of code."""
        self._is_html = False
        """Within a block of HTML, which ends at a blank line."""
        self._is_lost = False
        """Whether the blocks of the text are not known any more."""
        self.has_open_ticks = False
        """Whether the current paragraph has backticks that are not known to be in pairs."""
        self._has_dollar = False

    @property
    def in_block(self) -> bool:
        """Whether this is within a block of code, unless ``is_certain`` is false."""
        return self._fence is not None

    @property
    def is_certain(self) -> bool:
        return not self._is_lost and not self.has_open_ticks

    @property
    def may_be_formula(self) -> bool:
        """Whether the current paragraph has a dollar sign: some renderers take what follows for a formula, in which
        backticks mean nothing."""
        return self._has_dollar or "$" in self.line

    @property
    def may_open_block(self) -> bool:
        """Whether backticks here can begin a block of code."""
        return len(self.line) <= 3 and not self.line.strip(" ")

    def leave_open(self) -> None:
        """The next backticks are not known to have a partner."""
        self.has_open_ticks = True

    def feed(self, text: str) -> None:
        if not text:
            return
        self.last = text[-1]
        *ended, rest = text.split("\n")
        for line in ended:
            self._end_line(self.line + line)
            self.line = ""
        self.line += rest

    def _end_line(self, line: str) -> None:
        words = line.strip(" \t")
        self._has_dollar = bool(words) and (self._has_dollar or "$" in line)
        if self._fence is not None:
            self._continue_block(line, words)
        elif not words:
            self._is_html = self.has_open_ticks = False
        elif (fence := _FENCE.fullmatch(line)) and not self._is_html:
            self._fence = len(fence[1]), len(fence[2])
        elif fence or _UNCERTAIN_FENCE.fullmatch(line) or _RAW_HTML.match(line):
            self._is_lost = True
        elif _HTML.match(line):
            self._is_html = True

    def _continue_block(self, line: str, words: str) -> None:
        assert self._fence is not None
        indentation, length = self._fence
        spaces = len(line) - len(line.lstrip(" "))
        if not words:
            return
        if len(words) >= length and not words.strip("`"):
            self._fence = None
            self._is_lost = self._is_lost or not indentation <= spaces <= 3 or "\t" in line
        elif spaces < indentation:  # the list item that holds the block may have ended
            self._fence, self._is_lost = None, True
