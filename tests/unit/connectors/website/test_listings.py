"""Sitemaps, feeds and heads of pages, with the forms and the mistakes that sites publish."""

from __future__ import annotations

import gzip
import subprocess
import sys
import tracemalloc

import pytest

from connectors.website import listings
from connectors.website.listings import (
    MAX_ENTRY_ELEMENTS,
    MAX_LISTING_BYTES,
    MAX_SITEMAPS,
    BadListing,
    Room,
    normalised,
    parse,
)
from connectors.website.page import Head, head_of

BASE = "https://docs.example.com/sitemap.xml"
SITEMAP = """<?xml version="1.0" encoding="UTF-8"?>
<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">
  <url><loc> https://docs.example.com/a?x=1&amp;y=2#part </loc><lastmod>2026-01-02</lastmod></url>
  <url><loc>/relative</loc></url>
  <url><loc>HTTPS://Docs.Example.com:443</loc><lastmod/></url>
  <url><loc>ftp://docs.example.com/b</loc></url>
  <url><loc>https://user@docs.example.com/b</loc></url>
  <url></url>
</urlset>"""
PAGES = {
    "https://docs.example.com/a?x=1&y=2": "2026-01-02",
    "https://docs.example.com/relative": None,
    "https://docs.example.com/": None,
}


@pytest.mark.parametrize("body", [SITEMAP.encode(), gzip.compress(SITEMAP.encode()), SITEMAP[39:].encode()])
def test_a_sitemap_names_pages_with_the_time_of_their_last_change(body: bytes) -> None:
    assert parse(body, BASE).pages == PAGES


def test_sitemaps_without_or_with_another_namespace_are_read() -> None:
    for namespace in ("", ' xmlns="https://www.google.com/schemas/sitemap/0.84"'):
        body = f"<urlset{namespace}><url><loc>https://docs.example.com/a</loc></url></urlset>"
        assert list(parse(body.encode(), BASE).pages) == ["https://docs.example.com/a"]


def test_a_sitemap_whose_namespace_is_not_declared_is_read() -> None:
    url = "<url><loc>https://docs.example.com/a</loc><image:image>a</image:image></url>"
    assert list(parse(f"<urlset>{url}</urlset>".encode(), BASE).pages) == ["https://docs.example.com/a"]


def test_an_index_names_further_sitemaps() -> None:
    index = (
        "<sitemapindex><sitemap><loc>/one.xml.gz</loc></sitemap><sitemap><loc>/two.xml</loc></sitemap></sitemapindex>"
    )
    assert list(parse(index.encode(), BASE).sitemaps) == [
        "https://docs.example.com/one.xml.gz",
        "https://docs.example.com/two.xml",
    ]


def test_a_list_of_addresses_in_plain_text_is_a_sitemap() -> None:
    assert parse("\ufeffhttps://docs.example.com/a\r\n\r\nhttps://docs.example.com/b\n".encode(), BASE).pages == {
        "https://docs.example.com/a": None,
        "https://docs.example.com/b": None,
    }


@pytest.mark.parametrize(
    ("feed", "pages"),
    [
        (
            "<rss version='2.0'><channel><link>https://docs.example.com</link>"
            "<item><link>https://docs.example.com/a</link><pubDate>Fri, 02 Jan 2026 10:00:00 GMT</pubDate></item>"
            "<item><guid>https://docs.example.com/b</guid><pubDate>yesterday</pubDate></item>"
            "<item><guid isPermaLink='false'>b-17</guid></item></channel></rss>",
            {"https://docs.example.com/a": "2026-01-02T10:00:00+00:00", "https://docs.example.com/b": "yesterday"},
        ),
        (
            "<feed xmlns='http://www.w3.org/2005/Atom'><entry><link rel='self' href='/feed/a'/><link href='/a'/>"
            "<updated>2026-01-02T10:00:00Z</updated></entry><entry/></feed>",
            {"https://docs.example.com/a": "2026-01-02T10:00:00Z"},
        ),
        (
            "<rdf:RDF xmlns:rdf='http://www.w3.org/1999/02/22-rdf-syntax-ns#' xmlns='http://purl.org/rss/1.0/'"
            " xmlns:dc='http://purl.org/dc/elements/1.1/'><channel/><item><link>/a</link>"
            "<dc:date>2026-01-02</dc:date></item></rdf:RDF>",
            {"https://docs.example.com/a": "2026-01-02"},
        ),
    ],
    ids=["RSS 2.0", "Atom", "RSS 1.0"],
)
def test_a_feed_names_the_pages_of_its_entries(feed: str, pages: dict[str, str | None]) -> None:
    assert parse(feed.encode(), BASE).pages == pages


ITEM = "<item><link>https://docs.example.com/a</link>{}</item>"


@pytest.mark.parametrize(
    "feed",
    [
        b"\n<?xml version='1.0' encoding='UTF-8'?><rss><channel>" + ITEM.format("").encode() + b"</channel></rss>",
        f"<rss><channel>{ITEM.format('<description>a&nbsp;b</description>')}</channel></rss>".encode(),
        f"<rss><channel>{ITEM.format('<itunes:summary>a</itunes:summary>')}</channel></rss>".encode(),
        f"<rss><channel><itunes:explicit>no</itunes:explicit>{ITEM.format('')}</channel></rss>".encode(),
        f"<rss><channel>{ITEM.format('<title>Notícias</title>')}</channel></rss>".encode("latin-1"),
        f"<?xml version='1.0' encoding='utf-16'?><rss><channel>{ITEM.format('')}</channel></rss>".encode("utf-16"),
        f"<rss><channel>{ITEM.format('').replace('<item>', '<item><atom:link href=/rss />')}</channel></rss>".encode(),
        f"<rss><channel>{ITEM.format('').replace('<link>', '<link><!-- where -->')}</channel></rss>".encode(),
    ],
    ids=[
        "blank line",
        "HTML entity",
        "namespace",
        "namespace of the feed",
        "encoding",
        "UTF-16",
        "second link",
        "comment",
    ],
)
def test_a_feed_with_a_mistake_that_loses_nothing_is_read(feed: bytes) -> None:
    feed = feed.replace(b"<atom:link href=/rss />", b"<a:link xmlns:a='http://www.w3.org/2005/Atom' href='/rss'/>")
    assert list(parse(feed, BASE).pages) == ["https://docs.example.com/a"]


@pytest.mark.parametrize(
    ("entry", "page", "changed"),
    [
        ("<id>https://docs.example.com/a</id>", "https://docs.example.com/a", None),
        ("<id>tag:docs.example.com,2026:a</id>", None, None),
        ("<link href='a' xml:base='/news/'/>", "https://docs.example.com/news/a", None),
        ("<link href='/a'/><modified>2026-01-02</modified>", "https://docs.example.com/a", "2026-01-02"),
        (
            "<link href='/a'/><published>2026-01-01</published><updated>2026-01-02</updated>",
            "https://docs.example.com/a",
            "2026-01-02",
        ),
        ("<link href='/a'/><published>2026-01-01</published>", "https://docs.example.com/a", "2026-01-01"),
    ],
)
def test_an_entry_of_an_atom_feed_names_its_page_and_its_last_change(
    entry: str, page: str | None, changed: str | None
) -> None:
    pages = parse(f"<feed xmlns='http://www.w3.org/2005/Atom'><entry>{entry}</entry></feed>".encode(), BASE).pages
    assert pages == ({} if page is None else {page: changed})


def test_the_base_of_a_feed_is_not_its_address() -> None:
    feed = "<rss xml:base='https://docs.example.com/blog/'><channel><item><link>a</link></item></channel></rss>"
    assert list(parse(feed.encode(), BASE).pages) == ["https://docs.example.com/blog/a"]


def test_a_sitemap_that_is_named_very_often_hides_no_other() -> None:
    """The rest of such an index was left out, and the pages of the sitemaps in it counted as deleted."""
    entries = "<sitemap><loc>/one.xml</loc></sitemap>" * (MAX_SITEMAPS + 1) + "<sitemap><loc>/two.xml</loc></sitemap>"
    assert list(parse(f"<sitemapindex>{entries}</sitemapindex>".encode(), BASE).sitemaps) == [
        "https://docs.example.com/one.xml",
        "https://docs.example.com/two.xml",
    ]


def test_an_index_may_name_its_sitemaps_without_loc() -> None:
    index = "<sitemapindex><sitemap>\n/one.xml\n</sitemap><sitemap/></sitemapindex>"
    assert list(parse(index.encode(), BASE).sitemaps) == ["https://docs.example.com/one.xml"]


def test_a_date_beyond_all_calendars_is_taken_as_it_is() -> None:
    date = "Thu, 01 Jan 99999999999999999999 00:00:00 GMT"
    item = ITEM.format(f"<pubDate>{date}</pubDate>")
    assert parse(f"<rss><channel>{item}</channel></rss>".encode(), BASE).pages == {"https://docs.example.com/a": date}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<rss><channel><item><link>https://docs.example.com/a</link></item>", "is not valid XML"),
        (b"<urlset><url><loc>https://docs.example.com/?a=1&b=2</loc></url></urlset>", "is not valid XML"),
        (b"<urlset><url><loc>https://docs.example.com/&eacute;</loc></url></urlset>", "is not valid XML"),
        (b"<urlset><url><loc>https://docs.example.com/\xe9</loc></url></urlset>", "is not valid XML"),
        (b"<!DOCTYPE html><html><body>We are working on it.<br></body></html>", "is an HTML page"),
        (b"<html><head/><body/></html>", "is an HTML page"),
        (b"<urlset><url>", "is not valid XML"),
        (b"<urlset><a<b/><c/></urlset>", "is not valid XML"),
        (b"<rss><channel<item/><item/></channel></rss>", "is not valid XML"),
        (b"<svg/>", "neither a sitemap nor a feed"),
        (b"Not found", "neither XML nor a list of addresses"),
        (b"\x1f\x8b\x08damaged", "is a damaged gzip file"),
        (gzip.compress(b" " * (MAX_LISTING_BYTES + 10)), "has more than 52,428,800 bytes unpacked"),
    ],
)
def test_anything_else_is_refused_and_never_an_empty_listing(body: bytes, says: str) -> None:
    with pytest.raises(BadListing, match=says):
        parse(body, BASE)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<urlset>" + b"<a/>" * 50_000 + b"</urlset>", "too many elements"),
        (b"<urlset><url>" + b"<a/>" * MAX_ENTRY_ELEMENTS + b"</url></urlset>", "too many elements"),
        (b"<rss><channel>" + b"<a><b/>" * MAX_ENTRY_ELEMENTS + b"</channel></rss>", "too many elements|not valid"),
        (b"<urlset><a " + b"".join(b"a%d='' " % n for n in range(300_000)) + b"/></urlset>", "is too long"),
    ],
    ids=["many", "within an entry", "nested", "attributes"],
)
def test_a_listing_of_very_many_elements_or_attributes_is_refused(
    body: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, it has some kilobytes; as a tree, it took gigabytes in the process of all connectors."""
    monkeypatch.setattr(listings, "MAX_ELEMENTS", 50_000)
    with pytest.raises(BadListing, match=says):
        parse(gzip.compress(body), BASE)


@pytest.mark.parametrize(
    ("begin", "entry", "end"),
    [
        ("<urlset>", "<url><loc>/{}</loc><!-- --><a b='c'/></url>\n", "</urlset>"),
        ("<rss><channel>", "<item><link>/{}</link><description>x</description></item>\n", "</channel></rss>"),
        ("<feed>", "<entry><link href='/{}'/></entry>\n", "</feed>"),
        ("", "https://docs.example.com/{}\n", ""),
    ],
)
def test_a_long_listing_takes_little_memory_and_is_read_up_to_the_most_pages(begin: str, entry: str, end: str) -> None:
    body = (begin + "".join(map(entry.format, range(30_000))) + end).encode()
    pages = parse(body, BASE).pages
    assert (len(pages), list(pages)[-1]) == (30_000, "https://docs.example.com/29999")
    assert 100 < len(parse(body, BASE, 100).pages) < 30_000


MEASURE = """
import resource
from connectors.website.listings import parse
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
body = b"<urlset>" + b"<a/>" * 1_000_000 + b"<url><loc>https://docs.example.com/a</loc></url></urlset>"
before = peak()
assert len(parse(body, "https://docs.example.com/").pages) == 1
print((peak() - before) // 1024)
"""


def test_elements_are_dropped_as_they_are_read() -> None:
    """The tree of this listing takes 120 MiB."""
    grown = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, check=True, text=True).stdout
    assert int(grown) < 60, grown


@pytest.mark.parametrize(
    ("begin", "between", "count", "end"),
    [
        (
            "<rss><channel><title>t</title>\n",
            "<!-- a comment -->\n",
            5_000,
            "<item><link>/a</link></item></channel></rss>",
        ),
        ("<urlset>aaaaa<url><loc>/a</loc></url>", "x" * 50 + "&amp;", 1_500, "</urlset>"),
        ("<urlset><url><loc>/a</loc></url>", "x" * 50 + "<?pi?>", 30_000, "<url><loc>/a</loc></url></urlset>"),
    ],
)
def test_text_between_elements_does_not_crash_the_process(begin: str, between: str, count: int, end: str) -> None:
    """libxml2 goes on appending to a text that follows an element whose end it has announced."""
    program = (
        "from connectors.website.listings import parse\n"
        f"body = ({begin!r} + {between!r} * {count} + {end!r}).encode()\n"
        "for _ in range(20):\n"
        f"    assert list(parse(body, {BASE!r}).pages) == ['https://docs.example.com/a']\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("depth", [1, 40])
def test_a_base_address_that_is_put_together_for_each_entry_is_short(depth: int) -> None:
    """With one of 2 MB, two million empty items took a processor half an hour."""
    base = "b" * (2_100 // depth) + "/"
    begin, end = f"<rss xml:base='{BASE}'>", "</rss>"
    nested = f"<channel xml:base='{base}'>" * depth + "<item/>" + "</channel>" * depth
    with pytest.raises(BadListing, match="base address"):
        parse(f"{begin}{nested}{end}".encode(), BASE)
    siblings = f"<item xml:base='{base[:1_000]}'><link>a</link></item>" * 5
    assert len(parse(f"{begin}{siblings}{end}".encode(), BASE).pages) == 1


def test_very_long_addresses_of_a_listing_do_not_stay_in_memory() -> None:
    """The standard library keeps the last 128 addresses that it took apart: 25 of 2 MB took 1 GiB for good."""
    entry = f"<url><loc>https://docs.example.com/{'x' * 500_000}é</loc></url>"
    body = f"<urlset>{entry * 3}</urlset>".encode()
    tracemalloc.start()
    try:
        assert parse(body, BASE).pages == {}
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()


def test_all_listings_of_a_site_have_a_bounded_number_of_bytes_together() -> None:
    """A thousand sitemaps of 50 kB, packed, took a processor nine hours at each sweep."""
    room = Room(1_000)
    page = b"<urlset><url><loc>https://docs.example.com/a</loc></url></urlset>"
    assert len(parse(page + b"\n" * 800, BASE, room=room).pages) == 1
    assert room.of_one < 1_000
    with pytest.raises(BadListing, match="unpacked"):
        parse(gzip.compress(page + b"\n" * 800), BASE, room=room)
    assert room.of_one == 0
    assert Room.of(0).of_one == Room.of(50_000).of_one == MAX_LISTING_BYTES


def test_a_site_in_thirty_languages_with_many_pictures_has_room() -> None:
    """Its last sitemaps were never read: nothing of them was updated or deleted any more."""
    language = '<xhtml:link rel="alternate" hreflang="en-GB" href="https://shop.example.com/en-gb/category/product-1"/>'
    picture = (
        "<image:image><image:loc>https://shop.example.com/pictures/product-1/large-1.jpg</image:loc></image:image>"
    )
    entry = f"<url><loc>https://shop.example.com/en-gb/category/product-1</loc>{language * 30}{picture * 20}</url>"
    assert Room.of(50_000).bytes > 50_000 * len(entry) > 250_000_000


def test_entities_are_not_expanded_and_no_file_is_read() -> None:
    bomb = "<!DOCTYPE u [<!ENTITY a 'https://docs.example.com/'><!ENTITY b SYSTEM 'file:///etc/passwd'>]>"
    listing = parse(f"{bomb}<urlset><url><loc>&a;</loc></url><url><loc>&b;</loc></url></urlset>".encode(), BASE)
    assert listing.pages == {}


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("https://Docs.Example.com:8443/A", "https://docs.example.com:8443/A"),
        ("//docs.example.com/a", "https://docs.example.com/a"),
        ("mailto:ann@example.com", None),
        ("https://[::1", None),
        ("https://docs.example.com:port/", None),
        ("https://docs.example.com/" + "x" * 2_000, None),
        ("https://docs.example.com/" + "\U0001f9a6" * 500, None),
        ("https://docs.example.com/public/../private", None),
        ("https://docs.example.com/public/%2e%2E/private", None),
        ("https://docs.example.com/public/..%2fprivate", None),
        ("https://docs.example.com/public\\..\\private", None),
        ("https://docs.example.com/./private", None),
        ("https://docs.example.com/public/..;/private", None),
        ("https://docs.example.com/public/..;a=1/private", None),
        ("https://docs.example.com/public/..%3Ba/private", None),
        ("https://docs.example.com/public/%252e%252e/private", None),
        ("https://docs.example.com/public/%25252e./private", None),
        ("https://docs.example.com/a%2525b;v=1/100%25", "https://docs.example.com/a%2525b;v=1/100%25"),
        ("../a", "https://docs.example.com/a"),
        ("/v1..2/a...html", "https://docs.example.com/v1..2/a...html"),
        ("https://docs.example.com/\u202e", None),
        ("  ", None),
        (None, None),
    ],
)
def test_addresses_are_brought_into_one_form(location: str | None, url: str | None) -> None:
    assert normalised(location, BASE) == url


@pytest.mark.parametrize(
    ("html", "headers", "head"),
    [
        ("<meta name=robots content='NOINDEX, nofollow'>", {}, Head(no_index=True)),
        ("<meta name='Robots' content=none>", {}, Head(no_index=True)),
        ("<meta name=robots content='index,nofollow'>", {}, Head()),
        ("<meta name=robots content='max-snippet:-1, noindex-this-word'>", {}, Head()),
        ("<body><meta name=robots content=noindex><p>We show robots:", {}, Head()),
        ("", {"x-robots-tag": "noindex"}, Head(no_index=True)),
        ("", {"x-robots-tag": "otherbot: noindex"}, Head()),
        ("<link rel='canonical' href='/b'>", {}, Head(canonical="https://docs.example.com/b")),
        ("<base href='/v2/'><link rel=canonical href=b>", {}, Head(canonical="https://docs.example.com/v2/b")),
        ("<base href='/v2/'><base href=v3/><link rel=canonical href=b>", {}, Head(canonical=f"{BASE[:25]}v2/b")),
        (f"<base href='/{'v' * 2_000}/'><link rel=canonical href=/b>", {}, Head(canonical=f"{BASE[:25]}b")),
        ("<![a[ <![ b]]><meta name=robots content=noindex>", {}, Head(no_index=True)),
        ("<![if !IE]><meta name=robots content=noindex><![endif]>", {}, Head(no_index=True)),
        (f"<title>&#{'9' * 5_000};</title><meta name=robots content=noindex>", {}, Head(no_index=True)),
        (f"<base href='&#{'9' * 5_000}'><link rel=canonical href=/b>", {}, Head(canonical=f"{BASE[:25]}b")),
        (f"<!--{'x' * 60_000}--><meta name=robots content=noindex>", {}, Head(no_index=True)),
        ("<link rel=canonical href=''>", {}, Head()),
        ("<link rel=canonical href='javascript:x'>", {}, Head()),
        (f"<meta name=robots content='&#{'9' * 5_000};, noindex'>", {}, Head(no_index=True)),
    ],
)
def test_the_head_of_a_page_is_understood(html: str, headers: dict[str, str], head: Head) -> None:
    assert head_of(f"<html><head>{html}".encode(), "https://docs.example.com/a", "text/html", headers) == head
