"""Reads robots.txt (RFC 9309) within limits. Pure."""

from __future__ import annotations

import re

from protego import Protego

MAX_RULES, MAX_COPIES = 10_000, 200_000
"""The lines of robots.txt other than names of crawlers; and those lines, each as often as its group has names: the
library copies the rules of a group for each of them, 225 million in 280 kB. An address may be compared with all rules,
and a rule takes up to 3 µs."""
_NAME = re.compile(r"user", re.I)
"""How the library's spellings of ``User-agent`` begin."""
_RULE = re.compile(r"(?:dis)?allow\s*:", re.I)
"""Two of its rules. Others are not taken for the end of a group, so that at most too many copies are counted."""


def parsed_robots(body: bytes) -> Protego | None:
    """Return the rules; None: it has too many."""
    text = body.decode("utf-8", "replace")
    names = rules = copies = 0
    begins_anew = False
    for line in map(str.strip, text.splitlines()):
        if _NAME.match(line):
            names, begins_anew = 1 if begins_anew else names + 1, False
        elif line and not line.startswith("#"):
            rules, copies, begins_anew = rules + 1, copies + names, begins_anew or bool(_RULE.match(line))
        if rules > MAX_RULES or copies > MAX_COPIES:
            return None
    return Protego.parse(text)
