"""A website as a source. A document is a page or file that a sitemap or feed names; its external id is its address."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from protego import Protego

from connectors.base import SmallSource
from connectors.errors import NotPublic
from connectors.extract import extracted_revision
from connectors.file_documents import document_from_file
from connectors.files import may_hold_text, remove_abandoned, temporary_file
from connectors.set_aside import Failures, code_of, may_be_set_aside, reading_data
from connectors.source import Context, Entry, Gone, Listed, MetadataKeys, Playground, Unlisted, Unreadable
from connectors.web import Denied, Fetched, Forbidden, Limits, Missing, Resolver, Web, system_resolver
from connectors.website.known import KnownPage, KnownPages
from connectors.website.listings import MAX_SITEMAPS, BadListing, Listing, Room, normalised, parse
from connectors.website.options import WebsiteOptions
from connectors.website.page import HTML_TYPES, MAX_HEAD_BYTES, Head, head_of
from connectors.website.robots import MAX_ROBOTS_BYTES, parsed_robots
from pipeline.core.errors import Deferred, Misconfigured, PenstockError
from pipeline.core.retry import http_date
from pipeline.runtime.tasks import gather_or_cancel
from topics.messages import Metadata

PAGE_LISTED = 100
MAX_CRAWL_DELAY_SECONDS = 30.0
MAX_VALIDATOR_CHARACTERS = 200
"""Longer etags are not kept: pages are then requested without conditions."""
CHECKED_AT_ONCE = 8
"""The pages that a listing has on disk at a time."""
_SLASHES = re.compile("/{2,}")
FEED_PAGES = "feed-pages"
"""Name in the source's memory: the pages that feeds have named."""
FEED_PAGE_CHARACTERS = 200
"""For each page that a site may have: the addresses that feeds have named are stored as a whole after each new one."""


class Website(SmallSource):
    """A ``connectors.source.Source``."""

    Options = WebsiteOptions
    metadata_keys: ClassVar[MetadataKeys] = {"path": "keyword", "section": "keyword"}
    options: WebsiteOptions
    page_documents = 10

    def __init__(
        self,
        options: WebsiteOptions,
        context: Context,
        *,
        limits: Limits = Limits(),  # noqa: B008  frozen
        resolver: Resolver = system_resolver,
    ) -> None:
        """Raises Misconfigured."""
        super().__init__(options, context)
        headers = {"user-agent": options.user_agent}
        if options.authorization is not None:
            headers["authorization"] = options.authorization.get_secret_value()
        self.web = Web(
            options.url,
            headers=headers,
            name=context.name,
            limits=limits,
            resolver=resolver,
            base_may_be_private=options.may_be_private,
        )
        self._origin = urlsplit(normalised("/", options.url) or options.url)
        self._robots: Protego | None = None
        self._pages: dict[str, str | None] | None = None
        """By address: the sitemap's ``lastmod``. None: nothing was listed yet."""
        self._is_partial = False
        """Whether a listing could not be read: the pages that it names are not known."""
        self._known = KnownPages(context.folder / "pages.json")
        self._failures = Failures()
        self._checks = asyncio.Semaphore(CHECKED_AT_ONCE)
        self._examining = asyncio.Lock()
        """Held by what takes a thread for long, so that a site has one of those that all sources share."""
        self._pace = asyncio.Lock()
        self._next_request = 0.0
        """When the next request may be sent, on time.monotonic()."""

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        from connectors.website.playground import playing

        return playing()

    # Listing

    async def list(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        await asyncio.to_thread(remove_abandoned, self._reading)
        pages, unlisted = await self._read_listings()
        self._pages, self._is_partial = pages, bool(unlisted)
        if not unlisted or len(self._known) > 2 * self.options.max_pages:
            self._known.keep(pages)
        failing: dict[str, str] = {}
        missing: set[str] = set()
        if not pages:
            yield unlisted
        urls = sorted(pages)
        for start in range(0, len(urls), PAGE_LISTED):
            batch = urls[start : start + PAGE_LISTED]
            revisions = await gather_or_cancel(
                *(self._listed_revision(url, pages[url], failing, missing) for url in batch)
            )
            if self._known.is_due:
                await self._known.save()
            listed = [
                Listed(
                    external_id=url,
                    acl_tags=self.options.acl_tags,
                    required_tags=self.options.required_tags,
                    revision=revision,
                )
                for url, revision in zip(batch, revisions, strict=True)
                if revision is not None
            ]
            yield listed if start else [*unlisted, *listed]
        await self._known.save()
        await self._forget_feed_pages(missing)
        self.context.set_aside.replace("pages", failing)

    async def _read_listings(self) -> tuple[dict[str, str | None], Sequence[Unlisted]]:
        """Read robots.txt, all sitemaps and all feeds. Raises Misconfigured if none can be read."""
        await self._known.load()
        self._robots, room = await self._read_robots(), Room.of(self.options.max_pages)
        sitemaps = [self._absolute(location) for location in self.options.sitemaps]
        if not sitemaps and not self.options.feeds:
            named = [normalised(location, self.options.url) for location in self._robots.sitemaps]
            sitemaps = [url for url in named if url is not None] or [self._absolute("/sitemap.xml")]
        pages: dict[str, str | None] = {}
        failed: dict[str, str] = {}
        seen = set(sitemaps)
        waiting = list(reversed(dict.fromkeys(sitemaps)))
        while True:
            if len(seen) > MAX_SITEMAPS or len(pages) > self.options.max_pages:
                raise Misconfigured(
                    f"the sitemaps name more than {self.options.max_pages:,} pages or {MAX_SITEMAPS:,} sitemaps: raise"
                    " max_pages, or name the sitemaps that you need"
                )
            if not waiting:
                break
            if (listing := await self._listing(waiting.pop(), failed, room)) is not None:
                pages |= listing.pages
                more = [url for url in listing.sitemaps if url not in seen]
                seen.update(more)
                waiting += more
        pages |= await self._feed_pages(pages, failed, room)
        sources = len(seen) + len(self.options.feeds)
        if failed and len(failed) == sources:
            raise Misconfigured("; ".join(f"{url} {reason}" for url, reason in sorted(failed.items())[:3]))
        # In a thread: rules of robots.txt can take as long as all the rest.
        urls = await asyncio.to_thread(lambda: [url for url in pages if self._selects(url)])
        selected = {url: pages[url] for url in urls}
        return selected, [Unlisted(part=f"listing {url}", reason=reason) for url, reason in sorted(failed.items())]

    async def _feed_pages(
        self, of_sitemaps: Mapping[str, str | None], failed: dict[str, str], room: Room
    ) -> dict[str, str | None]:
        """Return the pages of feeds, including those that have left them: only a request shows whether they exist."""
        if not self.options.feeds:
            return {}
        remembered = await self.context.memory.get(FEED_PAGES) or []
        pages: dict[str, str | None] = dict.fromkeys(remembered)
        for location in self.options.feeds:
            if (listing := await self._listing(self._absolute(location), failed, room)) is not None:
                pages |= listing.pages
        pages = {url: moment for url, moment in pages.items() if url not in of_sitemaps}
        if len(pages) + len(of_sitemaps) > self.options.max_pages:
            raise Misconfigured(f"the feeds have named more than {self.options.max_pages:,} pages: raise max_pages")
        if sum(map(len, pages)) > FEED_PAGE_CHARACTERS * self.options.max_pages:
            raise Misconfigured("the addresses that the feeds have named are too long: raise max_pages")
        if sorted(pages) != sorted(remembered):
            await self.context.memory.put(FEED_PAGES, sorted(pages))
        return pages

    async def _listing(self, url: str, failed: dict[str, str], room: Room) -> Listing | None:
        if not room.of_one:
            failed[url] = (
                "is not read, because the listings before it have too many bytes: name fewer, or raise max_pages"
            )
            return None
        try:
            fetched = await self._request(url, max_bytes=room.of_one)
            with reading_data():
                return await asyncio.to_thread(parse, fetched.body, fetched.url, self.options.max_pages, room)
        except BadListing as error:
            failed[url] = f"{error}: name the address of a sitemap or a feed"
        except PenstockError as error:
            if not may_be_set_aside(error):
                raise
            failed[url] = str(error)
        return None

    async def _read_robots(self) -> Protego:
        """A site without robots.txt permits everything, also where absent files are answered with 403; one that fails
        is not read (RFC 9309, 2.3.1)."""
        try:
            fetched = await self._request(self._absolute("/robots.txt"), max_bytes=MAX_ROBOTS_BYTES)
        except Forbidden as error:
            is_private = isinstance(error, NotPublic)
            advice = "; write https, or allow_private = true for a site of your own" if is_private else ""
            raise Misconfigured(f"{error}{advice}") from error
        except (Missing, Denied) as error:
            if error.status == 401:
                raise
            return Protego.parse("")
        if (robots := await asyncio.to_thread(parsed_robots, fetched.body)) is None:
            raise Misconfigured("robots.txt has too many rules: its site is not read until it has fewer")
        return robots

    async def _listed_revision(
        self, url: str, lastmod: str | None, failing: dict[str, str], missing: set[str]
    ) -> str | None:
        """Return the revision of a page, or None if it is no document. Where the sitemap does not say whether it has
        changed, the page is requested. A page that fails keeps its revision; one that does not exist is added to
        ``missing``."""
        known = self._known.get(url)
        if lastmod is not None and self.options.trust_lastmod:
            is_excluded = known is not None and known.lastmod == lastmod and self._is_excluded(url)
            return None if is_excluded else extracted_revision(lastmod)
        try:
            with reading_data():
                known = await self._check(url)
        except Missing:
            self._known.put(url, KnownPage(is_missing=True))
            missing.add(url)
            return None
        except PenstockError as error:
            if not may_be_set_aside(error):
                raise
            failing[f"page {url}"] = str(error)
        return None if known is None or not known.digest or self._is_excluded(url) else extracted_revision(known.digest)

    def _is_excluded(self, url: str) -> bool:
        return self._known.is_excluded(url, self._pages or {})

    async def _check(self, url: str) -> KnownPage:
        """Request a page, conditionally, and record the response."""
        known = self._known.get(url)
        conditions: dict[str, str] = {}
        if known is not None and known.etag:
            conditions["if-none-match"] = known.etag
        elif known is not None and known.last_modified:
            conditions["if-modified-since"] = known.last_modified
        async with self._checks:
            return await self._checked(url, known, conditions)

    async def _checked(self, url: str, known: KnownPage | None, conditions: Mapping[str, str]) -> KnownPage:
        with temporary_file(self._reading) as file:
            fetched = await self._request_page(url, file, conditions)
            if fetched.status == 304 and known is not None:
                return known
            return await self._record(url, fetched, file)

    async def _record(self, url: str, fetched: Fetched, file: Path) -> KnownPage:
        """Record the response to a request, whose body is in the file."""

        def examined() -> tuple[str, Head]:
            with file.open("rb") as body:
                digest = hashlib.file_digest(body, "sha256").hexdigest()
                body.seek(0)
                return digest, head_of(body.read(MAX_HEAD_BYTES), fetched.url, fetched.media_type, fetched.headers)

        async with self._examining:  # a head takes up to half a second
            digest, head = await asyncio.to_thread(examined)
        canonical = head.canonical or normalised(fetched.url, url)
        known = KnownPage(
            digest=digest,
            etag=_validator(fetched.headers.get("etag")),
            last_modified=_validator(fetched.headers.get("last-modified")),
            no_index=head.no_index,
            canonical=None if canonical == url else canonical,
            lastmod=(self._pages or {}).get(url),
        )
        self._known.put(url, known)
        return known

    async def _forget_feed_pages(self, missing: Collection[str]) -> None:
        """Forget the pages of feeds that do not exist."""
        if not missing or not self.options.feeds:
            return
        remembered = await self.context.memory.get(FEED_PAGES) or []
        if not set(remembered).isdisjoint(missing):
            await self.context.memory.put(FEED_PAGES, [page for page in remembered if page not in missing])

    # Reading

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        """Read pages. Those that may be in a listing that could not be read are left out: whether they are documents is
        not known."""
        if self._pages is None:  # after a restart
            pages, unlisted = await self._read_listings()
            self._pages, self._is_partial = pages, bool(unlisted)
        if self._is_partial:
            external_ids = [id_ for id_ in external_ids if id_ in self._pages]
        return await super().fetch(external_ids)

    async def read(self, external_id: str) -> Entry:
        assert self._pages is not None
        if external_id not in self._pages:
            if self._is_partial:  # since a listing that has ended in between
                raise Deferred("a listing that may name the page could not be read")
            return Gone(external_id)
        lastmod = self._pages[external_id] if self.options.trust_lastmod else None
        try:
            with reading_data():
                return await self._read_page(external_id, lastmod)
        except Missing:
            self._known.put(external_id, KnownPage(is_missing=True))
            raise
        except PenstockError as error:
            if not may_be_set_aside(error) or not self._failures.fail(external_id, error):
                raise
            return Unreadable(
                external_id=external_id,
                code=code_of(error),
                message=str(error),
                acl_tags=self.options.acl_tags,
                required_tags=self.options.required_tags,
                revision=None if lastmod is None else extracted_revision(lastmod),
            )

    async def _read_page(self, url: str, lastmod: str | None) -> Entry:
        with temporary_file(self._reading) as file:
            fetched = await self._request_page(url, file, {})
            self._failures.succeed(url)
            known = await self._record(url, fetched, file)
            if self._is_excluded(url):
                return Gone(url)
            return await self._document(url, fetched, file, extracted_revision(lastmod or known.digest))

    async def _document(self, url: str, fetched: Fetched, file: Path, revision: str) -> Entry:
        name = unquote(urlsplit(url).path.rstrip("/").rpartition("/")[2]) or self._origin.hostname or url
        if fetched.media_type in HTML_TYPES and not name.lower().endswith((".html", ".htm")):
            name += ".html"
        return await document_from_file(
            file,
            name,
            external_id=url,
            acl_tags=self.options.acl_tags,
            required_tags=self.options.required_tags,
            revision=revision,
            media_type=fetched.media_type or None,
            source_url=url,
            source_modified_at=http_date(fetched.headers.get("last-modified", "")),
            metadata=page_metadata(url),
        )

    @property
    def _reading(self) -> Path:
        """The folder of files that exist only while they are read."""
        return self.context.folder / "reading"

    # Requests

    async def _request_page(self, url: str, to: Path, conditions: Mapping[str, str]) -> Fetched:
        """Request a page, and write it to a file. Raises Forbidden where it redirects to an address that is not read,
        such as one that robots.txt disallows: it would show the text of that address to the readers of this one."""
        return await self._request(
            url,
            max_bytes=self.options.max_file_bytes,
            headers=conditions,
            ok=(200, 304) if conditions else (200,),
            permits=self._permits_redirect,
            to=to,
        )

    async def _permits_redirect(self, target: str) -> bool:
        if (url := normalised(target, self.options.url)) is None:
            return False
        async with self._examining:  # as pages are: an address may be compared with all rules of robots.txt
            return await asyncio.to_thread(self._selects, url)

    async def _request(
        self,
        url: str,
        *,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
        ok: Sequence[int] = (200,),
        permits: Callable[[str], Awaitable[bool]] | None = None,
        to: Path | None = None,
    ) -> Fetched:
        async with self._pace:
            now = time.monotonic()
            wait, self._next_request = self._next_request - now, max(now, self._next_request) + self._seconds_between
            if wait > 0:
                await asyncio.sleep(wait)
        return await self.web.fetch(url, max_bytes=max_bytes, headers=headers, ok=ok, permits=permits, to=to)

    @property
    def _seconds_between(self) -> float:
        delay = 0.0 if self._robots is None else float(self._robots.crawl_delay(self.options.user_agent) or 0)
        return max(1 / self.options.requests_per_second, min(delay, MAX_CRAWL_DELAY_SECONDS))

    def _absolute(self, location: str) -> str:
        if (url := normalised(location, f"{self.options.url}/")) is None:
            raise Misconfigured(f"{location!r} is no address of a sitemap or feed")
        return url

    def _selects(self, url: str) -> bool:
        parts = urlsplit(url)
        path = _SLASHES.sub("/", parts.path)  # most servers read several as one
        spellings = [url] if path == parts.path else [url, parts._replace(path=path).geturl()]
        assert self._robots is not None
        return (
            (parts.scheme, parts.netloc) == (self._origin.scheme, self._origin.netloc)
            and may_hold_text(parts.path, 1)
            and self.options.selects(_SLASHES.sub("/", unquote(path)))
            and all(self._robots.can_fetch(spelling, self.options.user_agent) for spelling in spellings)
        )


def _validator(value: str | None) -> str | None:
    """Return a value that the next request can send back, or None."""
    is_sendable = (
        value is not None and value.isascii() and value.isprintable() and len(value) <= MAX_VALIDATOR_CHARACTERS
    )
    return value if is_sendable else None


def page_metadata(url: str) -> Metadata:
    """Return the path of an address, and its section: the first part of the path, unless the page is at the top."""
    path = urlsplit(url).path
    first, slash, _ = path.removeprefix("/").partition("/")
    return {"path": path, **({"section": unquote(first)} if first and slash else {})}
