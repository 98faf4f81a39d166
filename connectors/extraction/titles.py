"""Finds the title and author that a text states."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

MAX_CHARACTERS = 500
"""A longer title or author is cut."""
_BEGINNING_CHARACTERS = 64 * 1024
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
class Byline:
    """A text's title and author, None where it does not state them."""

    title: str | None = None
    author: str | None = None


def byline(text: str, media_type: str) -> Byline:
    """Find a text's title and author by the rules of its media type."""
    start = text[:_BEGINNING_CHARACTERS].replace("\r\n", "\n")
    match media_type:
        case "text/markdown":
            stated = _markdown(start)
        case "text/x-rst":
            stated = _rst(start)
        case "text/html":
            stated = _html(start)
        case _:
            stated = Byline()
    return Byline(tidy(stated.title), tidy(stated.author))


def tidy(text: str | None) -> str | None:
    """Return a text on one line, without control characters, cut to MAX_CHARACTERS; None if nothing is left."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text or "").split())
    return line[:MAX_CHARACTERS].rstrip() or None


def _markdown(text: str) -> Byline:
    pairs: dict[str, str] = {}
    if front := _FRONT_MATTER.match(text):
        text = text[front.end() :]
        pairs = {key.lower(): _plain_scalar(value) for key, value in _PAIR.findall(front[1])}
    body = _FENCE.sub("", text)
    headings = [match for pattern in (_ATX, _SETEXT) if (match := pattern.search(body))]
    first = min(headings, key=lambda match: match.start(), default=None)
    title = pairs.get("title") or (_heading(first[1]) if first else None)
    return Byline(title, pairs.get("author") or pairs.get("authors"))


def _heading(line: str) -> str:
    line = line[: 4 * MAX_CHARACTERS].rstrip()
    return _MARKUP.sub(r"\1", _CLOSING.sub("", line))


def _plain_scalar(value: str) -> str:
    """Return the text of a YAML scalar or flow list as it is usual in front matter."""
    value = value.strip()
    if value.startswith("[") and value.endswith("]"):
        return ", ".join(part.strip().strip("\"'") for part in value[1:-1].split(",") if part.strip())
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _rst(text: str) -> Byline:
    match = next((m for m in _RST.finditer(text) if len((m["t1"] or m["t2"]).strip()) > 1), None)
    author = _RST_AUTHOR.search(text)
    return Byline((match["t1"] or match["t2"]) if match else None, author[1] if author else None)


def _html(text: str) -> Byline:
    title = None
    for pattern in (_HTML_TITLE, _HTML_H1):
        if (match := pattern.search(text)) and (title := tidy(html.unescape(_TAG.sub(" ", match[1])))):
            break
    author = _HTML_AUTHOR.search(text)
    return Byline(title, html.unescape(author[1] or author[2] or "") if author else None)
