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
class Listing:
    """The content of a sitemap or feed."""

    pages: dict[str, str | None] = field(default_factory=dict)
    """By address: a text that differs after each change, or None if the listing does not say."""
    sitemaps: list[str] = field(default_factory=list)
    """Further sitemaps."""


def parse(body: bytes, url: str) -> Listing:
    """Parse a sitemap, an index of sitemaps, a feed, or a list of addresses in plain text, each of them perhaps with
    gzip. url: its address, for relative ones. Raises BadListing."""
    body = _unpacked(body).lstrip(b"\xef\xbb\xbf \t\r\n")  # XML must begin with its declaration
    if not body:
        raise BadListing("is empty")
    if not body.startswith((b"<", *_UTF_16)):
        return _plain(body, url)
    try:
        root = _tree(body, url)
    except etree.XMLSyntaxError as error:
        if re.match(rb"(?i)\s*(<!doctype html|<html)", body[:1_000]):
            raise BadListing("is an HTML page") from error
        raise BadListing("is not valid XML") from error
    listing = Listing()
    match _kind(root):
        case "urlset":
            for entry in _children(root, "url"):
                _add(listing, url, _text(entry, "loc"), _text(entry, "lastmod"))
        case "sitemapindex":
            for entry in _children(root, "sitemap"):
                if location := normalised(_text(entry, "loc") or entry.text, url):
                    listing.sitemaps.append(location)
        case "rss" | "rdf":
            for item in root.iter("{*}item", "item"):
                link = _text(item, "link") or _permalink(item)
                _add(listing, item.base or url, link, _moment(_text(item, "pubDate")) or _text(item, "date"))
        case "feed":
            for entry in _children(root, "entry"):
                links = (link for link in _children(entry, "link") if link.get("rel", "alternate") == "alternate")
                link = next(links, None)
                base, location = (entry.base, _text(entry, "id")) if link is None else (link.base, link.get("href"))
                moments = (_text(entry, name) for name in _ATOM_MOMENTS)
                _add(listing, base or url, location, next(filter(None, moments), None))
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


def _tree(body: bytes, url: str) -> etree._Element:
    """Parse XML, with mistakes after which nothing is missing. Raises XMLSyntaxError."""
    try:
        return etree.fromstring(body, _parser(), base_url=url)
    except etree.XMLSyntaxError:
        lenient = _parser(recover=True)
        root = etree.fromstring(body, lenient, base_url=url)
        if root is None:
            raise
        harmless = _HARMLESS_IN_FEEDS if _kind(root) in _FEEDS else _HARMLESS
        if any(entry.type not in harmless for entry in lenient.error_log):
            raise
        return root


def _kind(root: etree._Element) -> str:
    return str(etree.QName(root).localname).lower()


def _parser(*, recover: bool = False) -> etree.XMLParser:
    return etree.XMLParser(
        resolve_entities=False,
        load_dtd=False,
        no_network=True,
        huge_tree=False,
        remove_comments=True,
        remove_pis=True,
        recover=recover,
    )


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
