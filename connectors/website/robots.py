"""Reads robots.txt (RFC 9309) within limits. Pure."""

from __future__ import annotations

import re

from protego import Protego

MAX_ROBOTS_BYTES = 512_000
"""As much as RFC 9309 asks a crawler to read at least."""
MAX_RULES, MAX_COPIES = 10_000, 200_000
"""The lines of robots.txt other than names of crawlers; and those lines, each as often as its group has names: the
library copies the rules of a group for each of them, 225 million in 280 kB. An address may be compared with all rules,
and a rule takes up to 3 µs."""
_NAME = re.compile(r"user[- ]?agent\s*:", re.I)
_RULE = re.compile(r"(?:(?:dis)?allow|crawl[- ]delay|request[- ]rate|visit[- ]time)\s*:", re.I)
"""A name after a rule begins another group. Lines that the library may read as a name or a rule in another spelling
never begin one, so that more copies are counted than it makes, and not fewer."""
_SITE_WIDE = re.compile(r"(?:sitemaps?|site-map|host)\s*:", re.I)


def parsed_robots(body: bytes) -> Protego | None:
    """Return the rules; None: it has too many."""
    text = body.decode("utf-8", "replace")
    names = rules = copies = 0
    begins_anew = False
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#") or _SITE_WIDE.match(line):
            continue
        if line[:4].lower() == "user":
            names = 0 if begins_anew and _NAME.match(line) else names
            names, begins_anew = names + 1 + ("*" in line), False  # with a wildcard, the library keeps the name twice
        else:
            rules, copies, begins_anew = rules + 1, copies + names, begins_anew or bool(_RULE.match(line))
        if rules > MAX_RULES or copies > MAX_COPIES:
            return None
    return Protego.parse(text)
