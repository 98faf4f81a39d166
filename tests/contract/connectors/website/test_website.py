"""The source of a website, against a real server of pages."""

from __future__ import annotations

import gc
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, get_ident
from time import sleep
from typing import Any

import pytest

from connectors.declared import options
from connectors.set_aside import UNEXPECTED, SetAside
from connectors.source import Context, Document, Entry, Gone, Listed, Unlisted, Unreadable
from connectors.web import Denied, Limits
from connectors.website.known import KnownPage, KnownPages
from connectors.website.listings import parse
from connectors.website.page import head_of
from connectors.website.playground import Site
from connectors.website.source import Website
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.runtime.http_server import served
from tests.support.connectors.pdf_files import pdf_of
from tests.support.connectors.slack_kit import Notes

IMPATIENT = Limits(patience_seconds=0.5, backoff_base_seconds=0.01, backoff_cap_seconds=0.02)


@dataclass
class Desk:
    site: Site
    folder: Path
    memory: Notes = field(default_factory=Notes)
    set_aside: SetAside = field(default_factory=SetAside)
    opened: list[Website] = field(default_factory=list)

    def source(self, **more: Any) -> Website:
        declared = {"url": self.site.base, "acl_tags": ["team"], "requests_per_second": 100, **more}
        context = Context(name="s", tenant="t", memory=self.memory, folder=self.folder, set_aside=self.set_aside)
        source = Website(options(Website, declared, "s", {}), context, limits=IMPATIENT)  # type: ignore[arg-type]
        self.opened.append(source)
        return source

    def page(self, path: str, text: str = "Some text.", *, head: str = "", lastmod: str | None = None) -> str:
        self.site.pages[path] = f"<html><head><title>About {path}</title>{head}</head><body><p>{text}".encode()
        if lastmod is not None:
            self.site.lastmod[path] = lastmod
        return self.site.base + path

    def requested(self) -> list[tuple[str, int]]:
        """Return the requests for pages since the last call."""
        requests = [request for request in self.site.requests if request[0] not in ("/robots.txt", "/sitemap.xml")]
        self.site.requests.clear()
        return requests


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    site = Site()
    async with served(site) as address:
        site.base = address
        desk = Desk(site, tmp_path)
        yield desk
        for source in desk.opened:
            await source.close()


async def entries(source: Website) -> list[Listed | Unlisted]:
    return [entry async for page in source.list() for entry in page]


async def listing(source: Website) -> dict[str, Listed]:
    listed = await entries(source)
    assert all(isinstance(entry, Listed) for entry in listed), listed
    return {entry.external_id: entry for entry in listed if isinstance(entry, Listed)}


async def one(source: Website, external_id: str) -> Entry:
    [entry] = await source.fetch([external_id])
    return entry


async def test_pages_and_files_of_the_sitemap_are_documents(desk: Desk) -> None:
    page = desk.page("/guide/über pumps", "The pump is red.")
    desk.site.pages["/report.pdf"] = pdf_of(["The otter sleeps."])
    desk.site.headers["/report.pdf"] = {
        "content-type": "application/pdf",
        "last-modified": "Fri, 02 Jan 2026 10:00:00 GMT",
    }
    desk.site.pages["/logo.png"] = b"\x89PNG"
    source = desk.source(members={"team": ["ada@example.com"]})
    listed = await listing(source)
    assert len(listed) == 2
    for external_id, entry in listed.items():
        document = await one(source, external_id)
        assert isinstance(document, Document)
        assert (document.revision, document.acl_tags, document.source_url) == (
            entry.revision,
            entry.acl_tags,
            external_id,
        )
    html = await one(source, next(url for url in listed if "guide" in url))
    assert isinstance(html, Document)
    assert "The pump is red." in html.content
    assert html.title.startswith("About /guide")
    pdf = await one(source, f"{desk.site.base}/report.pdf")
    assert isinstance(pdf, Document)
    assert "otter" in pdf.content
    assert pdf.source_modified_at is not None
    assert await source.check() == []
    assert [problem.code for problem in await desk.source().check()] == ["nobody"]
    assert page
    left = [file.name for file in desk.folder.rglob("*") if file.is_file()]
    assert left == ["pages.json"]


async def test_a_page_with_an_unchanged_lastmod_is_not_requested_again(desk: Desk) -> None:
    a, b = desk.page("/a", lastmod="2026-01-01"), desk.page("/b", lastmod="2026-01-01")
    source = desk.source()
    before = await listing(source)
    assert desk.requested() == [], "the sitemap says it all"
    desk.page("/a", "Other text.", lastmod="2026-01-02")
    after = await listing(source)
    assert after[a].revision != before[a].revision
    assert after[b] == before[b]


async def test_a_page_without_lastmod_is_requested_conditionally(desk: Desk) -> None:
    a = desk.page("/a")
    before = await listing(desk.source())
    assert desk.requested() == [("/a", 200)]
    again = desk.source()  # after a restart
    assert await listing(again) == before
    assert desk.requested() == [("/a", 304)]
    desk.page("/a", "Other text.")
    assert (await listing(again))[a].revision != before[a].revision
    distrusting = desk.source(trust_lastmod=False)
    desk.page("/a", "Third text.", lastmod="2020-01-01")
    first = await listing(distrusting)
    desk.page("/a", "Fourth text.", lastmod="2020-01-01")
    assert (await listing(distrusting))[a].revision != first[a].revision


async def test_robots_txt_is_obeyed(desk: Desk) -> None:
    desk.page("/open")
    secret = desk.page("/secret/a")
    desk.site.robots = "User-agent: penstock\nDisallow: /secret/\nUser-agent: *\nDisallow: /\n"
    source = desk.source()
    assert list(await listing(source)) == [f"{desk.site.base}/open"]
    assert await one(source, secret) == Gone(secret)
    desk.site.statuses["/robots.txt"] = 500
    with pytest.raises(Retryable):
        await listing(source)
    desk.site.statuses["/robots.txt"] = 403
    assert len(await listing(source)) == 2
    desk.site.statuses["/robots.txt"] = 401
    with pytest.raises(Denied):
        await listing(source)


async def test_a_robots_txt_of_too_many_rules_stops_its_site(desk: Desk) -> None:
    desk.page("/open")
    desk.site.robots = "User-agent: *\n" + "Disallow: /x\n" * 20_000
    with pytest.raises(Misconfigured, match=r"robots\.txt"):
        await listing(desk.source())


async def test_listings_of_too_many_bytes_together_are_set_aside(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    a = desk.page("/a")
    sitemap = desk.site.sitemap().encode()
    monkeypatch.setattr("connectors.website.listings.MAX_LISTING_BYTES", len(sitemap) + 5_000)
    monkeypatch.setattr("connectors.website.listings.LISTED_PAGE_BYTES", 0)
    for number in range(3):
        desk.site.pages[f"/{number}.xml"] = gzip.compress(sitemap + b"\n" * 4_000)
    desk.requested()
    listed = await entries(desk.source(sitemaps=["/0.xml", "/1.xml", "/2.xml", "/2.xml"]))
    assert [entry.external_id for entry in listed if isinstance(entry, Listed)] == [a]
    assert [entry.part.rpartition("/")[2] for entry in listed if isinstance(entry, Unlisted)] == ["1.xml", "2.xml"]
    assert [path for path, _ in desk.requested() if "xml" in path] == ["/0.xml", "/1.xml"]


async def test_a_robots_txt_that_names_very_many_sitemaps_stops_its_site(desk: Desk) -> None:
    """Each was requested, although none of them existed."""
    desk.site.robots = "".join(f"Sitemap: /{number}.xml\n" for number in range(2_000))
    with pytest.raises(Misconfigured, match="sitemaps"):
        await entries(desk.source())
    assert desk.requested() == []


async def test_an_etag_of_very_many_characters_is_not_stored(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.website.source.MAX_VALIDATOR_CHARACTERS", 3)
    desk.page("/a")
    source = desk.source()
    await listing(source)
    await listing(source)
    assert desk.requested() == [("/a", 200), ("/a", 200)]


async def test_a_page_with_a_number_of_thousands_of_digits_stops_no_other(desk: Desk) -> None:
    number = f"&#{'9' * 5_000};"
    a, b = desk.page("/a", number, head=f"<meta name=description content='{number}'>"), desk.page("/b")
    source = desk.source()
    assert list(await listing(source)) == [a, b]
    assert isinstance(await one(source, a), Document)


async def test_a_page_or_listing_that_our_code_fails_on_stops_no_other(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(body: bytes, url: str, *more: Any) -> Any:
        if b"Bad." in body or url.endswith("/bad.xml"):
            raise ValueError("quotes the page")
        return (head_of if len(more) == 2 and isinstance(more[0], str) else parse)(body, url, *more)

    a, b = desk.page("/a", "Bad."), desk.page("/b")
    desk.site.pages["/bad.xml"] = b"<urlset/>"
    desk.site.unlisted.add("/bad.xml")
    monkeypatch.setattr("connectors.website.source.head_of", failing)
    monkeypatch.setattr("connectors.website.source.parse", failing)
    source = desk.source(sitemaps=["/sitemap.xml", "/bad.xml"])
    [unlisted, listed] = await entries(source)
    assert isinstance(unlisted, Unlisted)
    assert unlisted.reason.startswith("its data are not as expected (ValueError at test_website.py:")
    assert isinstance(listed, Listed)
    assert listed.external_id == b
    assert list(desk.set_aside.reasons()) == [f"page {a}"]
    entry = await one(source, a)
    assert isinstance(entry, Unreadable)
    assert (entry.acl_tags, entry.code) == (("team",), UNEXPECTED)
    assert "(ValueError at test_website.py:" in entry.message


async def test_no_address_leads_around_patterns_and_rules(desk: Desk) -> None:
    a = desk.page("/public/a")
    for path in ("/public/../secret/b", "/public//..//secret/b", "//secret/b", "/public//drafts/c"):
        desk.page(path, "A secret.")
    desk.site.robots = "User-agent: *\nDisallow: /secret/\n"
    assert list(await listing(desk.source(exclude=["public/drafts/**"]))) == [a]
    assert [path for path, _ in desk.requested()] == ["/public/a"]


async def test_a_large_page_is_not_held_in_memory(desk: Desk) -> None:
    """Eight pages of 50 MB at a time, of 50 kB each when they are packed, took 800 MB."""
    a = desk.page("/a")
    desk.site.pages["/a"] = gzip.compress(bytes(20_000_000))
    desk.site.headers["/a"] = {"content-encoding": "gzip"}
    source = desk.source()
    tracemalloc.start()
    try:
        assert list(await listing(source)) == [a]
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


async def test_pages_of_a_site_take_one_thread_and_little_disk_at_a_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred heads of half a second each kept all threads from other sources."""
    examining, most_files, together = Lock(), 0, False

    def examined(*details: Any) -> Any:
        nonlocal most_files, together
        together = together or not examining.acquire(blocking=False)
        most_files = max(most_files, sum(1 for _ in (desk.folder / "reading").iterdir()))
        sleep(0.03)
        if examining.locked():
            examining.release()
        return head_of(*details)

    for number in range(40):
        desk.page(f"/{number}")
    monkeypatch.setattr("connectors.website.source.head_of", examined)
    assert len(await listing(desk.source())) == 40
    assert not together
    assert most_files <= 8


async def test_what_is_known_of_pages_is_not_written_again_for_each_hundred_of_them(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The responses to 50,000 requests were written 500 times at each sweep, while nothing else had its turn."""
    monkeypatch.setattr("connectors.website.source.PAGE_LISTED", 1)
    for number in range(5):
        desk.page(f"/{number}", lastmod="2026-01-01")
    source = desk.source()
    written: list[int] = []
    monkeypatch.setattr(KnownPages, "_write", lambda self, pages: written.append(len(pages)))
    await listing(source)
    for number in range(5):
        await one(source, f"{desk.site.base}/{number}")
    await listing(source)
    await listing(source)
    assert written == [5]


async def test_pages_that_left_the_sitemap_are_not_remembered(desk: Desk) -> None:
    """A site whose addresses change with each listing took a gigabyte a day."""

    def remembered() -> int:
        gc.collect()
        return sum(isinstance(thing, KnownPage) for thing in gc.get_objects())

    source, before = desk.source(), remembered()
    for number in range(4):
        desk.site.pages.clear()
        for page in range(3):
            desk.page(f"/{number}-{page}")
        assert len(await listing(source)) == 3
    assert remembered() - before == 3


async def test_what_an_earlier_release_knew_of_pages_is_remembered(desk: Desk) -> None:
    """It wrote one object; without it, an upgrade requested every page of every site in full."""
    a = desk.page("/a")
    before = await listing(desk.source())
    file = desk.folder / "pages.json"
    file.write_text(json.dumps(dict(map(json.loads, file.read_text().splitlines()))))
    desk.requested()
    assert await listing(desk.source()) == before
    assert list(before) == [a]
    assert desk.requested() == [("/a", 304)]


async def test_what_is_known_of_the_pages_of_a_listing_is_remembered_while_it_fails(desk: Desk) -> None:
    """A minute of failures had all pages of the listing requested in full, and one that failed itself was missing."""
    a, b, c = desk.page("/a"), desk.page("/b"), desk.page("/c")
    desk.site.unlisted |= {"/b", "/c", "/more.xml"}
    desk.site.pages["/more.xml"] = f"<urlset><url><loc>{b}</loc></url><url><loc>{c}</loc></url></urlset>".encode()
    source = desk.source(sitemaps=["/sitemap.xml", "/more.xml"])
    assert list(await listing(source)) == [a, b, c]
    desk.site.statuses["/more.xml"] = 503
    desk.page("/a", "Other text.")  # so that the file is written
    assert len(await entries(source)) == 2
    desk.site.statuses = {"/c": 503}
    desk.requested()
    source = desk.source(sitemaps=["/sitemap.xml", "/more.xml"])
    assert list(await listing(source)) == [a, b, c]
    assert ("/b", 304) in desk.requested()


async def test_feeds_of_very_long_addresses_are_not_stored(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 of them are 100 MB, which were written to Postgres as a whole after each sweep that found a new one."""
    monkeypatch.setattr("connectors.website.source.FEED_PAGE_CHARACTERS", 100)
    items = "".join(f"<item><link>{desk.page(f'/{letter * 90}')}</link></item>" for letter in "ab")
    desk.site.pages["/feed.xml"] = f"<rss><channel>{items}</channel></rss>".encode()
    with pytest.raises(Misconfigured, match="too long"):
        await entries(desk.source(feeds=["/feed.xml"], max_pages=2))
    assert len(await entries(desk.source(feeds=["/feed.xml"], max_pages=3))) == 2


async def test_pages_of_a_feed_that_are_gone_are_forgotten_at_once(desk: Desk) -> None:
    """Each of 50,000 pages that answered 404 had the addresses of all others read and written."""
    items = "".join(f"<item><link>{desk.site.base}/{number}</link></item>" for number in range(5))
    desk.site.pages["/feed.xml"] = f"<rss><channel>{items}</channel></rss>".encode()
    desk.site.unlisted.add("/feed.xml")
    source = desk.source(feeds=["/feed.xml"])
    puts: list[str] = []
    put = desk.memory.put

    async def counted(name: str, value: Any) -> None:
        puts.append(name)
        await put(name, value)

    desk.memory.put = counted  # type: ignore[method-assign]
    assert await listing(source) == {}
    assert puts == ["feed-pages", "feed-pages"]
    assert desk.memory.kept["feed-pages"] == []


@pytest.mark.parametrize(
    ("url", "more", "is_read"),
    [
        ("http://docs.example.com:{port}", {}, False),
        ("http://docs.example.com:{port}", {"allow_private": True}, True),
        ("http://127.0.0.1:{port}", {}, True),
    ],
)
async def test_a_name_of_a_site_leads_to_no_server_within_the_network(
    desk: Desk, url: str, more: dict[str, Any], is_read: bool
) -> None:
    """The owner of a name can let it lead to any address; with https, a certificate says who answers."""

    async def resolver(_name: str, _port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    desk.site.base = url.format(port=desk.site.base.rpartition(":")[2])
    page = desk.page("/a")
    source = desk.source(**more)
    rebound = Website(source.options, source.context, limits=IMPATIENT, resolver=resolver)
    desk.opened.append(rebound)
    if is_read:
        assert list(await listing(rebound)) == [page]
    else:
        with pytest.raises(Misconfigured, match=r"not public.*allow_private"):
            await listing(rebound)
        assert desk.site.requests == []


async def test_a_robots_txt_at_another_host_says_so_and_nothing_of_private_addresses(desk: Desk) -> None:
    redirect(desk, "/robots.txt", "https://www.example.com/robots.txt")
    with pytest.raises(Misconfigured, match=r"www\.example\.com is neither the configured host[^;]*$"):
        await listing(desk.source())


@pytest.mark.parametrize("header", ["etag", "last-modified"])
async def test_a_validator_that_cannot_be_sent_back_stops_no_other_page(desk: Desk, header: str) -> None:
    """The site was not read any more until an operator looked at it, because of a credential that it does not have."""
    a, b = desk.page("/a"), desk.page("/b")
    desk.site.headers["/a"] = {"etag": "", header: '"é"'}
    source = desk.source()
    assert list(await listing(source)) == [a, b]
    assert list(await listing(source)) == [a, b]
    assert desk.requested() == [("/a", 200), ("/b", 200), ("/a", 200), ("/b", 304)]


@pytest.mark.parametrize("lastmod", [None, "2026-01-01"])
async def test_pages_with_noindex_and_copies_are_no_documents(desk: Desk, lastmod: str | None) -> None:
    desk.page("/a", lastmod=lastmod, head="<link rel=canonical href='/a'>")
    copy = desk.page("/a-print", lastmod=lastmod, head="<link rel=canonical href='/a'>")
    hidden = desk.page("/hidden", lastmod=lastmod, head="<meta name=robots content=noindex>")
    alone = desk.page("/alone", lastmod=lastmod, head="<link rel=canonical href='https://elsewhere.example/alone'>")
    source = desk.source()
    await listing(source)
    for url in (copy, hidden):
        assert await one(source, url) == Gone(url)
    desk.requested()
    assert sorted(await listing(source)) == [f"{desk.site.base}/a", alone]
    if lastmod is not None:
        assert desk.requested() == [], "what they are is remembered"


async def test_a_removed_page_is_gone_and_one_that_fails_stays(desk: Desk) -> None:
    a, b = desk.page("/a"), desk.page("/b")
    source = desk.source()
    before = await listing(source)
    desk.site.statuses["/a"] = 500
    assert await listing(source) == before
    assert list(desk.set_aside.reasons()) == [f"page {a}"]
    with pytest.raises(Retryable):
        await one(source, a)
    desk.site.statuses["/a"] = 403
    unreadable = await one(source, a)
    assert isinstance(unreadable, Unreadable)
    assert unreadable.code == "unavailable"
    desk.site.statuses["/a"] = 404
    assert list(await listing(source)) == [b]
    assert not desk.set_aside.reasons()
    assert await one(source, a) == Gone(a)


@pytest.mark.parametrize("lastmod", [None, "2026-11-01"])
async def test_a_page_that_leaves_the_sitemap_is_gone_although_its_address_still_responds(
    desk: Desk, lastmod: str | None
) -> None:
    a, b = desk.page("/a", lastmod=lastmod), desk.page("/b", lastmod=lastmod)
    source = desk.source()
    assert isinstance(await one(source, a), Document)
    desk.site.unlisted.add("/a")
    assert list(await listing(source)) == [b]
    assert await one(source, a) == Gone(a)
    assert await one(desk.source(), a) == Gone(a), "also after a restart"
    desk.site.unlisted.clear()
    assert list(await listing(source)) == [a, b]
    assert isinstance(await one(source, a), Document)


async def test_pages_of_a_feed_stay_documents_when_they_leave_it(desk: Desk) -> None:
    def feed(*paths: str) -> bytes:
        return b"<rss><channel>%s</channel></rss>" % b"".join(
            b"<item><link>%s</link></item>" % (desk.site.base + path).encode() for path in paths
        )

    a, b = desk.page("/a"), desk.page("/b")
    desk.site.pages["/feed.xml"] = feed("/a")
    desk.site.headers["/feed.xml"] = {"content-type": "application/rss+xml"}
    assert list(await listing(desk.source(feeds=["/feed.xml"]))) == [a]
    desk.site.pages["/feed.xml"] = feed("/b")
    source = desk.source(feeds=["/feed.xml"])
    assert list(await listing(source)) == [a, b]
    del desk.site.pages["/a"]
    assert list(await listing(source)) == [b]
    assert desk.memory.kept["feed-pages"] == [b]


async def test_a_listing_that_cannot_be_read_deletes_nothing(desk: Desk) -> None:
    a = desk.page("/a")
    desk.site.pages["/more.xml"] = b"<html><body>We are working on it.</body></html>"
    source = desk.source(sitemaps=["/sitemap.xml", "/more.xml"])
    desk.site.unlisted.add("/more.xml")
    [unlisted, listed] = await entries(source)
    assert isinstance(unlisted, Unlisted)
    assert unlisted.reason == "is an HTML page: name the address of a sitemap or a feed"
    assert (unlisted.tag, isinstance(listed, Listed) and listed.external_id) == (None, a)
    with pytest.raises(Misconfigured, match=r"/more\.xml is an HTML page"):
        await entries(desk.source(sitemaps=["/more.xml"]))
    with pytest.raises(Misconfigured, match="answered 404"):
        await entries(desk.source(sitemaps=["/none.xml"]))


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_page_of_a_listing_that_cannot_be_read_is_not_gone(desk: Desk, is_restarted: bool) -> None:
    """An event or an operator that requested such a page had it deleted."""
    a, b = desk.page("/a"), desk.page("/b")
    desk.site.unlisted |= {"/b", "/more.xml"}
    desk.site.pages["/more.xml"] = f"<urlset><url><loc>{b}</loc></url></urlset>".encode()
    sitemaps = ["/sitemap.xml", "/more.xml"]
    source = desk.source(sitemaps=sitemaps)
    assert list(await listing(source)) == [a, b]
    desk.site.statuses["/more.xml"] = 503
    if is_restarted:
        source = desk.source(sitemaps=sitemaps)
    else:
        assert len(await entries(source)) == 2
    assert [entry.external_id for entry in await source.fetch([a, b])] == [a]
    del desk.site.statuses["/more.xml"]
    assert list(await listing(source)) == [a, b]
    desk.site.pages["/more.xml"] = b"<urlset/>"
    assert list(await listing(source)) == [a]
    assert await one(source, b) == Gone(b)


def redirect(desk: Desk, path: str, to: str) -> str:
    desk.site.pages[path] = b""
    desk.site.statuses[path] = 302
    desk.site.headers[path] = {"location": to}
    return desk.site.base + path


@pytest.mark.parametrize("lastmod", [None, "2026-01-01"])
async def test_a_redirect_to_a_page_that_is_not_read_is_not_followed(desk: Desk, lastmod: str | None) -> None:
    secret = desk.page("/internal/y", "A secret.")
    disallowed = desk.page("/private/z", "A secret.")
    desk.site.unlisted |= {"/internal/y", "/private/z"}
    desk.site.robots = "User-agent: *\nDisallow: /private/\n"
    open_page = desk.page("/public/a", lastmod=lastmod)
    moved = [
        redirect(desk, "/public/b", "/internal/y"),
        redirect(desk, "/public/c", "/private/z"),
        redirect(desk, "/public/d", "https://elsewhere.example/"),
        redirect(desk, "/public/e", "/public/e"),
    ]
    if lastmod is not None:
        desk.site.lastmod.update(dict.fromkeys(desk.site.statuses, lastmod))
    source = desk.source(include=["public/**"])
    listed = await listing(source)
    if lastmod is None:
        assert list(listed) == [open_page]
        assert sorted(desk.set_aside.reasons()) == [f"page {url}" for url in moved]
    for url in moved:
        entry = await one(source, url)
        assert isinstance(entry, Unreadable)
        assert "redirects" in entry.message or "not configured" in entry.message
        assert "internal" not in entry.message
    requested = {path for path, _ in desk.requested()}
    assert not {"/internal/y", "/private/z"} & requested
    assert secret
    assert disallowed


async def test_rules_are_compared_with_redirects_in_a_thread(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of five redirects of a page kept all connectors from their turns for as long as 10,000 rules take."""
    threads: set[int] = set()
    selects = Website._selects

    def noted(self: Website, url: str) -> bool:
        threads.add(get_ident())
        return selects(self, url)

    monkeypatch.setattr(Website, "_selects", noted)
    desk.page("/a")
    old = redirect(desk, "/old", "/a")
    assert isinstance(await one(desk.source(), old), Document | Gone)
    assert threads
    assert get_ident() not in threads


async def test_a_page_that_redirects_to_another_listed_page_is_a_copy(desk: Desk) -> None:
    a = desk.page("/a")
    old = redirect(desk, "/old", "/a")
    desk.page("/b")
    desk.site.unlisted.add("/b")
    moved = redirect(desk, "/moved", "/b")
    source = desk.source()
    assert list(await listing(source)) == [a, moved]
    assert await one(source, old) == Gone(old)
    document = await one(source, moved)
    assert isinstance(document, Document)
    assert document.title == "About /b"


@pytest.mark.parametrize("lastmod", [None, "2026-01-01"])
async def test_copies_of_a_page_that_is_no_document_are_documents(desk: Desk, lastmod: str | None) -> None:
    def canonical(path: str) -> str:
        return f"<link rel=canonical href='{path}'>"

    first = desk.page("/loop-a", lastmod=lastmod, head=canonical("/loop-b"))
    second = desk.page("/loop-b", lastmod=lastmod, head=canonical("/loop-a"))
    of_hidden = desk.page("/of-hidden", lastmod=lastmod, head=canonical("/hidden"))
    hidden = desk.page("/hidden", lastmod=lastmod, head="<meta name=robots content=noindex>")
    of_gone = desk.page("/of-gone", lastmod=lastmod, head=canonical("/gone"))
    gone = desk.page("/gone", lastmod=lastmod)
    desk.site.statuses["/gone"] = 404
    of_unlisted = desk.page("/of-unlisted", lastmod=lastmod, head=canonical("/unlisted"))
    unlisted = desk.page("/unlisted", lastmod=lastmod)
    source = desk.source()
    urls = [first, second, of_hidden, hidden, of_gone, gone, of_unlisted, unlisted]
    for _ in range(2):  # what a page's canonical one is has to be read first
        await listing(source)
        for url in urls:
            await one(source, url)
    documents = {url for url in await listing(source) if isinstance(await one(source, url), Document)}
    assert documents == {first, of_hidden, of_gone, unlisted}
    desk.site.unlisted.add("/unlisted")
    assert of_unlisted in await listing(source), "the page that it is a copy of has left the sitemap"
    assert isinstance(await one(source, of_unlisted), Document)


async def test_a_response_without_content_that_was_not_requested_is_no_page(desk: Desk) -> None:
    a = desk.page("/a")
    desk.site.statuses["/a"] = 304
    source = desk.source()
    assert await listing(source) == {}
    assert list(desk.set_aside.reasons()) == [f"page {a}"]
    del desk.site.statuses["/a"]
    assert list(await listing(source)) == [a]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda sitemap: gzip.compress(sitemap)[:-20], "is a gzip file that was cut off"),
        (lambda sitemap: gzip.compress(sitemap) + b"garbage", "is a damaged gzip file"),
        (lambda sitemap: b"", "is empty"),
        (lambda sitemap: b"\xef\xbb\xbf \n", "is empty"),
        (lambda sitemap: sitemap[: len(sitemap) // 2], "is not valid XML"),
    ],
)
async def test_a_listing_that_was_cut_off_deletes_nothing(
    desk: Desk, damage: Callable[[bytes], bytes], reason: str
) -> None:
    desk.page("/a")
    sitemap = desk.site.sitemap().encode()
    desk.site.pages["/map"] = damage(sitemap)
    with pytest.raises(Misconfigured, match=reason):
        await entries(desk.source(sitemaps=["/map"]))


async def test_a_sitemap_in_several_gzip_members_is_read_whole(desk: Desk) -> None:
    a, b = desk.page("/a"), desk.page("/b")
    sitemap = desk.site.sitemap().encode()
    middle = len(sitemap) // 2
    desk.site.pages["/map"] = gzip.compress(sitemap[:middle]) + gzip.compress(sitemap[middle:])
    desk.site.unlisted.add("/map")
    assert list(await listing(desk.source(sitemaps=["/map"]))) == [a, b]


async def test_a_sitemap_that_redirects_elsewhere_is_set_aside(desk: Desk) -> None:
    a = desk.page("/a")
    redirect(desk, "/more.xml", "https://elsewhere.example/sitemap.xml")
    desk.site.unlisted.add("/more.xml")
    listed = await entries(desk.source(sitemaps=["/sitemap.xml", "/more.xml"]))
    assert [entry.part for entry in listed if isinstance(entry, Unlisted)] == [f"listing {desk.site.base}/more.xml"]
    assert [entry.external_id for entry in listed if isinstance(entry, Listed)] == [a]


async def test_pages_of_other_sites_are_not_requested(desk: Desk) -> None:
    a = desk.page("/a")
    other = Site()
    async with served(other) as address:
        other.pages["/b"] = b"Secret."
        desk.site.pages["/map.txt"] = f"{a}\n{address}/b\n".encode()
        desk.site.statuses["/c"] = 302
        source = desk.source(sitemaps=["/map.txt"])
        assert list(await listing(source)) == [a]
        assert await one(source, f"{address}/b") == Gone(f"{address}/b")
        assert other.requests == []


async def test_patterns_select_pages_and_too_many_are_refused(desk: Desk) -> None:
    for path in ("/guide/a", "/guide/old/b", "/blog/c", "/"):
        desk.page(path)
    source = desk.source(include=["guide/**"], exclude=["old"])
    assert list(await listing(source)) == [f"{desk.site.base}/guide/a"]
    with pytest.raises(Misconfigured, match="more than 3 pages"):
        await entries(desk.source(max_pages=3))


async def test_throttling_is_waited_for(desk: Desk) -> None:
    desk.page("/a")
    desk.site.throttled = 1
    with pytest.raises(Deferred):
        await entries(desk.source())
    assert len(await listing(desk.source())) == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"url": "docs.example.com"}, "write the address of the site"),
        ({"url": "https://user:secret@docs.example.com"}, "write the address of the site"),
        ({"user_agent": "a\nb"}, "write printable ASCII"),
    ],
)
def test_options_are_refused_with_one_line(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=says) as refused:
        Desk(Site(base="https://docs.example.com"), tmp_path).source(**more)
    assert "secret" not in str(refused.value)
