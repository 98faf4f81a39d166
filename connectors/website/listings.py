"""Sitemaps (sitemaps.org) and feeds (RSS 2.0, RSS 1.0, Atom): the addresses of pages, and when they changed. Pure.

The library for feeds that most programs use needs a package that exists only as source, which `make setup` refuses.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from lxml import etree  # type: ignore[import-untyped]

from connectors.web.client import Gunzip
from pipeline.core.retry import http_date

MAX_LISTING_BYTES = 50 * 1024 * 1024
"""The largest sitemap that the protocol permits, uncompressed."""
MAX_PAGES, MAX_SITEMAPS = 1_000_000, 1_000
MAX_ELEMENTS, MAX_ENTRY_ELEMENTS = 2_000_000, 10_000
"""The elements of a listing and those of an entry, or of what stands between two of them. The protocol permits 50,000
pages; each may have alternatives in other languages."""
MAX_ELEMENT_BYTES = 2 * 1024 * 1024
"""The longest tag or text."""
MAX_LINE_CHARACTERS = 10_000
PIECE_BYTES = 64 * 1024
LISTED_PAGE_BYTES = 8_000
"""For each page that a site may have: an entry with thirty languages has 4 kB, one with twenty pictures 5 kB."""
MAX_URL_BYTES = 2_000
"""Longer addresses are left out: the protocol permits 2,047 characters, an external id 2,000 bytes."""
MAX_DECODED = 3
"""How often a path may have been encoded."""
_DOTS = frozenset({".", ".."})
_BASE = "{http://www.w3.org/XML/1998/namespace}base"
_GZIP = b"\x1f\x8b"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_ATOM_MOMENTS = ("updated", "modified", "published", "issued")
"""The times of an entry in Atom 1.0 and in Atom 0.3, the best first."""
_HARMLESS = frozenset({etree.ErrorTypes.NS_ERR_UNDEFINED_NAMESPACE})
"""Mistakes in XML after which nothing is missing."""
_HARMLESS_IN_FEEDS = _HARMLESS | {
    etree.ErrorTypes.ERR_UNDECLARED_ENTITY,
    etree.ErrorTypes.WAR_UNDECLARED_ENTITY,
    etree.ErrorTypes.ERR_INVALID_CHAR,
    etree.ErrorTypes.ERR_INVALID_ENCODING,
}
"""Mistakes that lose only the characters that they concern. In a sitemap an address could lose them, and the page of
the correct one would count as deleted; a page that a feed does not name stays."""
_FEEDS = frozenset({"rss", "rdf", "feed"})


class BadListing(Exception):
    """The content of an address is no sitemap or feed. The message says what it is, without quoting it."""


@dataclass(slots=True)
class Room:
    """The bytes that all listings of a site may have together, unpacked. Reading 50 MB takes a processor up to half a
    minute, and they may be some kilobytes when packed."""

    bytes: int

    @classmethod
    def of(cls, max_pages: int) -> Room:
        return cls(MAX_LISTING_BYTES + LISTED_PAGE_BYTES * max_pages)

    @property
    def of_one(self) -> int:
        """The most bytes of the next listing."""
        return max(0, min(MAX_LISTING_BYTES, self.bytes))


@dataclass(slots=True)
class Listing:
    """The content of a sitemap or feed."""

    pages: dict[str, str | None] = field(default_factory=dict)
    """By address: a text that differs after each change, or None if the listing does not say."""
    sitemaps: dict[str, None] = field(default_factory=dict)
    """Further sitemaps, each once: a rest is left out only where there are too many, which is an error."""

    def exceeds(self, most: int) -> bool:
        """Return whether it has more pages than that, or more than MAX_SITEMAPS sitemaps."""
        return len(self.pages) > most or len(self.sitemaps) > MAX_SITEMAPS


def parse(body: bytes, url: str, most: int = MAX_PAGES, room: Room | None = None) -> Listing:
    """Parse a sitemap, an index of sitemaps, a feed, or a list of addresses in plain text, each of them perhaps with
    gzip. url: its address, for relative ones. most: with more pages or MAX_SITEMAPS sitemaps the rest is not read.
    room: what it has unpacked is taken from it. Raises BadListing. Law: it takes little more memory than the body and
    what it returns."""
    room = room or Room(MAX_LISTING_BYTES)
    body = _unpacked(body, room)
    body = body.lstrip(b"\xef\xbb\xbf \t\r\n")  # XML must begin with its declaration
    if not body:
        raise BadListing("is empty")
    if not body.startswith((b"<", *_UTF_16)):
        return _plain(body, url, most)
    try:
        return _read(body, url, most)
    except etree.XMLSyntaxError as error:
        if re.match(rb"(?i)\s*(<!doctype html|<html)", body[:1_000]):
            raise BadListing("is an HTML page") from error
        raise BadListing("is not valid XML") from error


def normalised(location: str | None, base: str) -> str | None:
    """Return the absolute address of a page without its fragment; None: it is no address of a page. Longer ones are not
    looked into: the standard library keeps the last addresses that it took apart. Nor is one an address that leads to
    another one, ``/public/../private``: rules and patterns are compared with the address as it is written."""
    if not location or not (location := location.strip()) or len(location) > MAX_URL_BYTES:
        return None
    try:
        url, _ = urldefrag(urljoin(base, location))
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        return None
    if _leads_elsewhere(parts.path):
        return None
    default = {"http": 80, "https": 443}[parts.scheme]
    host = parts.hostname if port in (None, default) else f"{parts.hostname}:{port}"
    url = parts._replace(netloc=host, path=parts.path or "/").geturl()
    return url if url.isprintable() and len(url.encode()) <= MAX_URL_BYTES else None


def _leads_elsewhere(path: str) -> bool:
    """Return whether a server may read another path than the one that is written: some leave out what follows a
    semicolon (``/public/..;/private``), and some decode a path more than once."""
    for _ in range(MAX_DECODED + 1):
        if any(segment.partition(";")[0] in _DOTS for segment in path.replace("\\", "/").split("/")):
            return True
        if (decoded := unquote(path)) == path:
            return False
        path = decoded
    return True


def _plain(body: bytes, url: str, most: int) -> Listing:
    listing = Listing()
    lines = io.TextIOWrapper(io.BytesIO(body), "utf-8-sig", "replace")
    while (line := lines.readline(MAX_LINE_CHARACTERS)) and not listing.exceeds(most):
        if line.strip() and not re.match(r"https?://", line.strip()):
            raise BadListing("is neither XML nor a list of addresses")
        _add(listing, url, line, None)
    return listing


def _unpacked(body: bytes, room: Room) -> bytes:
    if not body.startswith(_GZIP):
        room.bytes -= len(body)
        return body
    gunzip, unpacked, most_bytes = Gunzip(), bytearray(), room.of_one
    try:
        for part in gunzip.feed(body):
            unpacked += part
            if len(unpacked) > most_bytes:
                raise BadListing(f"has more than {most_bytes:,} bytes unpacked")
    except zlib.error as error:
        raise BadListing("is a damaged gzip file") from error
    finally:
        room.bytes -= len(unpacked)
    if not gunzip.complete:
        raise BadListing("is a gzip file that was cut off")
    return bytes(unpacked)


def _read(body: bytes, url: str, most: int) -> Listing:
    """Read XML, with mistakes after which nothing is missing. Raises XMLSyntaxError and BadListing."""
    try:
        return _Reader(url, most).read(body)
    except etree.XMLSyntaxError:
        lenient = _Reader(url, most, recover=True)
        listing = lenient.read(body)
        harmless = _HARMLESS_IN_FEEDS if lenient.kind in _FEEDS else _HARMLESS
        if lenient.kind == "" or any(entry.type not in harmless for entry in lenient.mistakes):
            raise
        return listing


class _Reader:
    """Reads XML in pieces, and keeps no element longer than the entry that it is in."""

    def __init__(self, url: str, most: int, *, recover: bool = False) -> None:
        self._url = url
        self._most = most
        self._parser = etree.XMLPullParser(
            ("start", "end"),
            base_url=url,
            resolve_entities=False,
            load_dtd=False,
            no_network=True,
            huge_tree=False,
            remove_comments=True,
            remove_pis=True,
            recover=recover,
        )
        self._listing = Listing()
        self._open: list[etree._Element] = []
        self._entry: etree._Element | None = None
        self._elements = self._held = self._base_characters = 0
        self.kind = ""
        """The name of the root element."""

    @property
    def mistakes(self) -> Sequence[etree._LogEntry]:
        return list(self._parser.feed_error_log)

    def read(self, body: bytes) -> Listing:
        """Raises XMLSyntaxError and BadListing."""
        event_at = 0
        for start in range(0, len(body), PIECE_BYTES):
            if start - event_at > MAX_ELEMENT_BYTES:  # a tag of very many attributes takes fifty times as much memory
                raise BadListing("has an element that is too long")
            self._parser.feed(body[start : start + PIECE_BYTES])
            for event, element in self._parser.read_events():
                event_at = start
                self._begin(element) if event == "start" else self._end(element)
            if self._listing.exceeds(self._most):
                return self._listing
        self._parser.close()
        return self._listing

    def _begin(self, element: etree._Element) -> None:
        if not self._open:
            self.kind = _name(element)
            if self.kind == "html":
                raise BadListing("is an HTML page")
            if self.kind not in _ENTRIES:
                raise BadListing("is XML, but neither a sitemap nor a feed")
        elif self._entry is None and _name(element) == _ENTRIES[self.kind]:
            self._entry = element
        self._open.append(element)
        self._base_characters += len(element.get(_BASE, ""))
        if self._base_characters > MAX_URL_BYTES:  # it would be put together anew for each entry
            raise BadListing("has a base address that is too long")
        self._elements += 1
        self._held += 1
        if self._elements > MAX_ELEMENTS or self._held > MAX_ENTRY_ELEMENTS:
            raise BadListing("has too many elements")

    def _end(self, element: etree._Element) -> None:
        self._open.pop()
        self._base_characters -= len(element.get(_BASE, ""))
        if element is self._entry:
            _ADD[self.kind](self._listing, element, self._url)
            self._entry = None
        if self._entry is None and self._open:
            if element.getparent() is not self._open[-1]:  # after a tag without an end, lxml reports fewer ends
                raise BadListing("is not valid XML")
            # The element itself stays, with its tail: the parser may still be appending to that.
            element.clear(keep_tail=True)
            while (before := element.getprevious()) is not None:
                self._open[-1].remove(before)
            self._held = len(self._open) + 1


def _add_page(listing: Listing, entry: etree._Element, url: str) -> None:
    _add(listing, url, _text(entry, "loc"), _text(entry, "lastmod"))


def _add_sitemap(listing: Listing, entry: etree._Element, url: str) -> None:
    if location := normalised(_text(entry, "loc") or entry.text, url):
        listing.sitemaps[location] = None


def _add_item(listing: Listing, item: etree._Element, url: str) -> None:
    link = _text(item, "link") or _permalink(item)
    _add(listing, item.base or url, link, _moment(_text(item, "pubDate")) or _text(item, "date"))


def _add_entry(listing: Listing, entry: etree._Element, url: str) -> None:
    links = (link for link in _children(entry, "link") if link.get("rel", "alternate") == "alternate")
    link = next(links, None)
    base, location = (entry.base, _text(entry, "id")) if link is None else (link.base, link.get("href"))
    moments = (_text(entry, name) for name in _ATOM_MOMENTS)
    _add(listing, base or url, location, next(filter(None, moments), None))


_ENTRIES = {"urlset": "url", "sitemapindex": "sitemap", "rss": "item", "rdf": "item", "feed": "entry"}
"""The name of an entry, by that of the root element."""
_ADD = {"urlset": _add_page, "sitemapindex": _add_sitemap, "rss": _add_item, "rdf": _add_item, "feed": _add_entry}


def _name(element: etree._Element) -> str:
    return str(element.tag).rpartition("}")[2].lower()  # QName refuses a prefix that is not declared


def _children(element: etree._Element, name: str) -> Iterator[etree._Element]:
    yield from element.iterchildren(f"{{*}}{name}")


def _text(element: etree._Element, name: str) -> str | None:
    """Return the first text: an element of the same name in another namespace, such as ``atom:link``, has none."""
    texts = (str(child.text).strip() for child in _children(element, name) if child.text)
    return next(filter(None, texts), None)


def _permalink(item: etree._Element) -> str | None:
    guid = next(_children(item, "guid"), None)
    return None if guid is None or guid.get("isPermaLink") == "false" else guid.text


def _moment(text: str | None) -> str | None:
    """Return a feed's date as it is compared: two forms of one moment are equal."""
    moment = None if text is None else http_date(text)
    return text if moment is None else moment.isoformat()


def _add(listing: Listing, base: str, location: str | None, changed: str | None) -> None:
    if (url := normalised(location, base)) is not None:
        listing.pages[url] = changed[:100] if changed else listing.pages.get(url)
