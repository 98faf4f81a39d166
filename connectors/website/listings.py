"""Sitemaps (sitemaps.org) and feeds (RSS 2.0, RSS 1.0, Atom): the addresses of pages, and when they changed. Pure.

The library for feeds that most programs use needs a package that exists only as source, which `make setup` refuses.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urldefrag, urljoin, urlsplit

from lxml import etree  # type: ignore[import-untyped]

from connectors.web.client import Gunzip
from pipeline.core.retry import http_date

MAX_LISTING_BYTES = 50 * 1024 * 1024
"""The largest sitemap that the protocol permits, uncompressed."""
MAX_URL_CHARACTERS = 2_000
"""Longer addresses are left out: the protocol permits 2,047 characters, an external id 2,000."""
_GZIP = b"\x1f\x8b"


class BadListing(Exception):
    """The content of an address is no sitemap or feed. The message says what it is, without quoting it."""


@dataclass(slots=True)
class Listing:
    """The content of a sitemap or feed."""

    pages: dict[str, str | None] = field(default_factory=dict)
    """By address: a text that differs after each change, or None if the listing does not say."""
    sitemaps: list[str] = field(default_factory=list)
    """Further sitemaps."""


def parse(body: bytes, url: str) -> Listing:
    """Parse a sitemap, an index of sitemaps, a feed, or a list of addresses in plain text, each of them perhaps with
    gzip. url: its address, for relative ones. Raises BadListing."""
    body = _unpacked(body)
    content = body.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not content:
        raise BadListing("is empty")
    if not content.startswith(b"<"):
        return _plain(body, url)
    try:
        root = etree.fromstring(body, _parser())
    except etree.XMLSyntaxError as error:
        if re.match(rb"(?i)\s*(<!doctype html|<html)", body[:1_000]):
            raise BadListing("is an HTML page") from error
        raise BadListing("is not valid XML") from error
    kind = etree.QName(root).localname.lower()
    listing = Listing()
    match kind:
        case "urlset":
            for entry in _children(root, "url"):
                _add(listing, url, _text(entry, "loc"), _text(entry, "lastmod"))
        case "sitemapindex":
            for entry in _children(root, "sitemap"):
                if location := normalised(_text(entry, "loc"), url):
                    listing.sitemaps.append(location)
        case "rss" | "rdf":
            for item in root.iter("{*}item", "item"):
                link = _text(item, "link") or _permalink(item)
                _add(listing, url, link, _moment(_text(item, "pubDate")) or _text(item, "date"))
        case "feed":
            for entry in _children(root, "entry"):
                links = [link for link in _children(entry, "link") if link.get("rel", "alternate") == "alternate"]
                _add(listing, url, links[0].get("href") if links else None, _text(entry, "updated"))
        case "html":
            raise BadListing("is an HTML page")
        case _:
            raise BadListing("is XML, but neither a sitemap nor a feed")
    return listing


def normalised(location: str | None, base: str) -> str | None:
    """Return the absolute address of a page without its fragment; None: it is no address of a page."""
    if not location or not location.strip():
        return None
    try:
        url, _ = urldefrag(urljoin(base, location.strip()))
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        return None
    default = {"http": 80, "https": 443}[parts.scheme]
    host = parts.hostname if port in (None, default) else f"{parts.hostname}:{port}"
    url = parts._replace(netloc=host, path=parts.path or "/").geturl()
    return url if len(url) <= MAX_URL_CHARACTERS and url.isprintable() else None


def _plain(body: bytes, url: str) -> Listing:
    listing = Listing()
    lines = body.decode("utf-8-sig", "replace").splitlines()
    for line in lines:
        if line.strip() and not re.match(r"https?://", line.strip()):
            raise BadListing("is neither XML nor a list of addresses")
        _add(listing, url, line, None)
    return listing


def _unpacked(body: bytes) -> bytes:
    if not body.startswith(_GZIP):
        return body
    gunzip, unpacked = Gunzip(), bytearray()
    try:
        for part in gunzip.feed(body):
            unpacked += part
            if len(unpacked) > MAX_LISTING_BYTES:
                raise BadListing(f"has more than {MAX_LISTING_BYTES:,} bytes unpacked")
    except zlib.error as error:
        raise BadListing("is a damaged gzip file") from error
    if not gunzip.complete:
        raise BadListing("is a gzip file that was cut off")
    return bytes(unpacked)


def _parser() -> etree.XMLParser:
    return etree.XMLParser(resolve_entities=False, load_dtd=False, no_network=True, huge_tree=False)


def _children(element: etree._Element, name: str) -> Iterator[etree._Element]:
    yield from element.iterchildren(f"{{*}}{name}")


def _text(element: etree._Element, name: str) -> str | None:
    child = next(_children(element, name), None)
    return None if child is None or not child.text else str(child.text).strip() or None


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
