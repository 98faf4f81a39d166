"""Patterns of file names, as .gitignore reads the simple ones."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """Matches paths relative to the folder that holds the pattern, with "/" between.

    ``*`` and ``?`` stay within one name, ``**`` crosses folders, ``[abc]`` is a set. A pattern without "/" (other than
    at its end) matches at any depth. A folder that matches stands for all that it holds.
    """
    bare = pattern.strip("/")
    anchored = "/" in pattern.rstrip("/")
    parts = [] if anchored else ["(?:.*/)?"]
    position = 0
    while position < len(bare):
        if bare.startswith("**/", position):
            parts.append("(?:.*/)?")
            position += 3
        elif bare.startswith("**", position):
            parts.append(".*")
            position += 2
        else:
            text, position = _one(bare, position)
            parts.append(text)
    return re.compile("".join(parts) + "(?:/.*)?", re.DOTALL)


def _one(pattern: str, position: int) -> tuple[str, int]:
    char = pattern[position]
    if char == "[" and (end := pattern.find("]", position + 2)) > 0:
        inner = pattern[position + 1 : end].replace("\\", r"\\").replace("[", r"\[")
        inner = f"^{inner[1:]}" if inner[0] in "!^" else inner
        return f"(?!/)[{inner}]", end + 1
    return {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)), position + 1
