"""Patterns of paths, as in .gitignore. People who may write into a folder choose both patterns and names, so that
matching must take time in proportion to the length of each."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

MAX_PATTERN_CHARACTERS = 1_000
MAX_FAST_WILDCARDS = 2
"""A pattern with at most so many wildcards is matched by a regular expression, which is fast. With more, a name that
nearly matches would take time that grows exponentially with their number."""


class Pattern(Protocol):
    def fullmatch(self, path: str, /) -> object:
        """Truthy if the pattern matches the path, or a folder above it."""


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> Pattern:
    """Matches paths relative to the folder that holds the pattern, with "/" between.

    ``*`` and ``?`` stay within one name, ``**`` crosses folders, ``[abc]`` is a set. A pattern without "/" (other than
    at its end) matches at any depth. A folder that matches stands for all that it holds. Raises re.error.
    """
    bare = pattern.strip("/")
    anchored = "/" in pattern.rstrip("/")
    elements = [] if anchored else [FOLDERS]
    position = 0
    while position < len(bare):
        if bare.startswith("**/", position):
            element, position = FOLDERS, position + 3
        elif bare.startswith("**", position):
            element, position = ANYTHING, position + 2
        else:
            element, position = _element(bare, position)
        if element not in WILDCARDS or elements[-1:] != [element]:  # two equal ones match what one does
            elements.append(element)
    if sum(element in WILDCARDS for element in elements) <= MAX_FAST_WILDCARDS:
        return re.compile("".join(elements) + "(?:/.*)?", re.DOTALL)
    return _Automaton(elements)


def selects(path: str, include: Collection[str], exclude: Collection[str]) -> bool:
    """Whether the path matches a pattern of ``include``, or that is empty, and no pattern of ``exclude``."""
    if any(compiled(pattern).fullmatch(path) for pattern in exclude):
        return False
    return not include or any(compiled(pattern).fullmatch(path) for pattern in include)


ANYTHING, FOLDERS, WITHIN_NAME = ".*", "(?:.*/)?", "[^/]*"
WILDCARDS = frozenset({ANYTHING, FOLDERS, WITHIN_NAME})
"""The elements that match texts of any length. Every other element matches one character."""


def _element(pattern: str, position: int) -> tuple[str, int]:
    """Translate the element at the position: (its regular expression, the position after it)."""
    char = pattern[position]
    first = position + 1 + (pattern[position + 1 : position + 2] in ("!", "^"))  # a "]" there belongs to the set
    if char == "[" and (end := pattern.find("]", first + 1)) > 0:
        inner = pattern[position + 1 : end].replace("\\", r"\\").replace("[", r"\[")
        inner = f"^{inner[1:]}" if inner[0] in "!^" else inner
        return f"(?!/)[{inner}]", end + 1
    return {"*": WITHIN_NAME, "?": "[^/]"}.get(char, re.escape(char)), position + 1


@dataclass(slots=True)
class _Automaton:
    """Follows all ways to match at once. A state is a bit of an integer: the elements before it have matched so far.
    Matching ``FOLDERS`` has a state of its own, the bit after that of its element."""

    elements: list[str]
    _single: dict[int, re.Pattern[str]] = field(default_factory=dict)
    """By state: an element that matches one character."""
    _skipped_once: int = 0
    _skipped_twice: int = 0
    """States from which the next one, and the one after it, is reached without a character."""
    _any: int = 0
    _any_of_name: int = 0
    """States that stay after any character, and after any but "/"."""
    _folders: int = 0
    """States from which "/" leads to the next one."""
    _end: int = 0
    _after: dict[str, int] = field(default_factory=dict)
    """By character: the states that it leads on from."""

    def __post_init__(self) -> None:
        """Raises re.error."""
        state = 0
        for element in self.elements:
            bit = 1 << state
            state += 1
            if element == FOLDERS:
                self._skipped_once |= bit
                self._skipped_twice |= bit
                self._any |= bit << 1
                self._folders |= bit << 1
                state += 1
            elif element in WILDCARDS:
                self._skipped_once |= bit
                if element == ANYTHING:
                    self._any |= bit
                else:
                    self._any_of_name |= bit
            else:
                self._single[bit] = re.compile(element, re.DOTALL)
        self._end = 1 << state

    def fullmatch(self, path: str) -> bool:
        states = self._skip(1)
        for char in path:
            if states & self._end and char == "/":
                return True
            stays = states & (self._any if char == "/" else self._any | self._any_of_name)
            states = self._skip(stays | (states & self._leads_on(char)) << 1)
            if not states:
                return False
        return bool(states & self._end)

    def _leads_on(self, char: str) -> int:
        if char not in self._after:
            single = sum(bit for bit, element in self._single.items() if element.fullmatch(char))
            self._after[char] = single | (self._folders if char == "/" else 0)
        return self._after[char]

    def _skip(self, states: int) -> int:
        while (more := states | (states & self._skipped_once) << 1 | (states & self._skipped_twice) << 2) != states:
            states = more
        return states
