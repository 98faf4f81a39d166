"""The title and author that a text names itself."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

LONGEST = 500
"""A heading longer than this is no title; it is cut."""
_BEGINNING = 64 * 1024
# No pattern here may take more than linear time on hostile text: every repetition is bounded, or ends a line.

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_PAIR = re.compile(r"^(title|author|authors)[ \t]*:[ \t]*(.*)$", re.I | re.M)
_FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?(?:^ {0,3}\1|\Z)", re.DOTALL | re.M)
_ATX = re.compile(r"^ {0,3}#{1,6}[ \t]+([^\s#].*)$", re.M)
_CLOSING = re.compile(r"[ \t]#+\Z")
_SETEXT = re.compile(r"^ {0,3}(\S[^\n]*)\n {0,3}(?:=+|-{2,})[ \t]*$", re.M)
_MARKUP = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|<[^>]+>|[*_`]{1,3}(?=\S)|(?<=\S)[*_`]{1,3}")
_RST = re.compile(
    r"^(?P<over>(?P<o>[!-/:-@[-`{-~])(?P=o){2,})[ \t]*\n[ \t]*(?P<t1>\S[^\n]*)\n(?P=over)[ \t]*$"
    r"|^(?P<t2>\S[^\n]*)\n(?P<u>[!-/:-@[-`{-~])(?P=u){2,}[ \t]*$",
    re.M,
)
_RST_AUTHOR = re.compile(r"^:Authors?:[ \t]*(.+)$", re.M)
_HTML_TITLE = re.compile(r"<title[^>]{0,500}>(.{0,2000}?)</title", re.I | re.DOTALL)
_HTML_H1 = re.compile(r"<h1[^>]{0,500}>(.{0,2000}?)</h1", re.I | re.DOTALL)
_HTML_AUTHOR = re.compile(
    r"<meta\b(?=[^>]{0,500}\bname\s*=\s*[\"']?author\b)[^>]{0,500}\bcontent\s*=\s*(?:\"([^\"]{0,1000})\"|'([^']{0,1000})')",
    re.I,
)
_TAG = re.compile(r"<[^>]*>")


@dataclass(frozen=True, slots=True)
class Named:
    title: str | None = None
    author: str | None = None


def named(text: str, media_type: str) -> Named:
    """None where the text does not say."""
    start = text[:_BEGINNING].replace("\r\n", "\n")
    match media_type:
        case "text/markdown":
            found = _markdown(start)
        case "text/x-rst":
            found = _rst(start)
        case "text/html":
            found = _html(start)
        case _:
            found = Named()
    return Named(tidy(found.title), tidy(found.author))


def tidy(text: str | None) -> str | None:
    """On one line, without control characters, not too long; None if nothing is left."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text or "").split())
    return line[:LONGEST].rstrip() or None


def _markdown(text: str) -> Named:
    pairs: dict[str, str] = {}
    if front := _FRONT_MATTER.match(text):
        text = text[front.end() :]
        pairs = {key.lower(): _plain_scalar(value) for key, value in _PAIR.findall(front[1])}
    body = _FENCE.sub("", text)
    headings = [found for pattern in (_ATX, _SETEXT) if (found := pattern.search(body))]
    first = min(headings, key=lambda found: found.start(), default=None)
    title = pairs.get("title") or (_heading(first[1]) if first else None)
    return Named(title, pairs.get("author") or pairs.get("authors"))


def _heading(line: str) -> str:
    line = line[: 4 * LONGEST].rstrip()
    return _MARKUP.sub(r"\1", _CLOSING.sub("", line))


def _plain_scalar(value: str) -> str:
    """A YAML scalar or flow list as people write them in front matter."""
    value = value.strip()
    if value.startswith("[") and value.endswith("]"):
        return ", ".join(part.strip().strip("\"'") for part in value[1:-1].split(",") if part.strip())
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _rst(text: str) -> Named:
    found = next((m for m in _RST.finditer(text) if len((m["t1"] or m["t2"]).strip()) > 1), None)
    author = _RST_AUTHOR.search(text)
    return Named((found["t1"] or found["t2"]) if found else None, author[1] if author else None)


def _html(text: str) -> Named:
    title = None
    for pattern in (_HTML_TITLE, _HTML_H1):
        if (found := pattern.search(text)) and (title := tidy(html.unescape(_TAG.sub(" ", found[1])))):
            break
    author = _HTML_AUTHOR.search(text)
    return Named(title, html.unescape(author[1] or author[2] or "") if author else None)
