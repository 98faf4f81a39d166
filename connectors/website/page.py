"""Reads the instructions for search engines in the head of a page. A page is never parsed further in this process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser

from connectors.references import without_long_numbers
from connectors.website.listings import normalised

MAX_HEAD_BYTES = 512 * 1024
PIECE_CHARACTERS = 16 * 1024
"""A head of more characters is parsed in several pieces, until it ends."""
HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
_NO_INDEX = re.compile(r"(?:^|[,\s])(?:noindex|none)(?:$|[,\s])")
_FOR_ONE = re.compile(r"^[a-z0-9_\-]+:")


@dataclass(slots=True)
class Head:
    no_index: bool = False
    canonical: str | None = None
    """The address that stands for this page and its copies; None: it names none."""


def head_of(body: bytes, url: str, media_type: str, headers: Mapping[str, str]) -> Head:
    """body: at least its first MAX_HEAD_BYTES. headers: of the response, with names in lower case. url: the page's
    address."""
    head = Head(no_index=_says_no_index(headers.get("x-robots-tag", "")))
    if media_type in HTML_TYPES:
        parser = _HeadParser(url)
        text = without_long_numbers(body[:MAX_HEAD_BYTES].decode("utf-8", "replace"))
        for start in range(0, len(text), PIECE_CHARACTERS):
            if not parser.is_over:
                parser.feed(text[start : start + PIECE_CHARACTERS])
        head.no_index = head.no_index or parser.no_index
        head.canonical = parser.canonical
    return head


def _says_no_index(value: str) -> bool:
    """A header may hold rules for one crawler alone (``otherbot: noindex``), which are not ours."""
    value = value.strip().lower()
    return not _FOR_ONE.match(value) and _NO_INDEX.search(value) is not None


class _HeadParser(HTMLParser):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._base, self._has_base = url, False
        self.is_over = False
        self.no_index = False
        self.canonical: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.is_over = True
        if self.is_over:
            return
        attributes = {name: value or "" for name, value in attrs}
        if tag == "base" and attributes.get("href") and not self._has_base:  # the first one counts
            self._base, self._has_base = normalised(attributes["href"], self._base) or self._base, True
        elif tag == "meta" and attributes.get("name", "").strip().lower() == "robots":
            self.no_index = self.no_index or _says_no_index(attributes.get("content", ""))
        elif tag == "link" and "canonical" in attributes.get("rel", "").lower().split() and self.canonical is None:
            self.canonical = normalised(attributes.get("href"), self._base)

    def handle_endtag(self, tag: str) -> None:
        self.is_over = self.is_over or tag == "head"

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """Read ``<![x[`` as a comment, like browsers: the library ends with an AssertionError."""
        return self.parse_bogus_comment(i, bool(report))
