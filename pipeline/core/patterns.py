"""Patterns of tenants and sources, in which ``*`` matches any characters, or none."""

from __future__ import annotations


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name. A regular expression would take exponential time for names that nearly match
    many ``*``."""
    first, *others = pattern.split("*")
    if not others:
        return name == first
    *middle, last = others
    position, end = len(first), len(name) - len(last)
    if position > end or not name.startswith(first) or not name.endswith(last):
        return False
    for literal in middle:
        position = name.find(literal, position, end)
        if position < 0:
            return False
        position += len(literal)
    return True
