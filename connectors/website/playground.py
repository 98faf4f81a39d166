"""A website for the laws of connectors: a real server with robots.txt, a sitemap, ETags and faults."""

from __future__ import annotations

import hashlib
import html
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from connectors.conform.samples import DeclaredMembers
from connectors.fakes.misbehaviour import Misbehaving
from pipeline.runtime.http_server import served


@dataclass
class Site:
    """An ASGI application that serves pages by path."""

    pages: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Further headers of the responses, by path; without a content type the page is HTML."""
    lastmod: dict[str, str] = field(default_factory=dict)
    """The times of change in the sitemap, by path."""
    unlisted: set[str] = field(default_factory=set)
    """Paths that the sitemap leaves out."""
    statuses: dict[str, int] = field(default_factory=dict)
    """Paths that answer with an error or a redirect."""
    robots: str = ""
    throttled: int = 0
    failing: int = 0
    base: str = ""
    requests: list[tuple[str, int]] = field(default_factory=list)
    """Path and status of each response."""

    def __post_init__(self) -> None:
        self._app = Starlette(routes=[Route("/{path:path}", self._respond)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _respond(self, request: HttpRequest) -> Response:
        response = self._answer(request)
        self.requests.append((request.url.path, response.status_code))
        return response

    def _answer(self, request: HttpRequest) -> Response:
        path = request.url.path
        if self.throttled:
            self.throttled -= 1
            return Response(status_code=429, headers={"retry-after": "1"})
        if self.failing:
            self.failing -= 1
            return Response(status_code=500)
        if path in self.statuses:
            return Response(status_code=self.statuses[path], headers=self.headers.get(path))
        if path == "/robots.txt":
            return Response(self.robots, media_type="text/plain")
        if path == "/sitemap.xml" and path not in self.pages:
            return Response(self.sitemap(), media_type="application/xml")
        if (body := self.pages.get(path)) is None:
            return Response(status_code=404)
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"etag": etag})
        headers = {"content-type": "text/html; charset=utf-8", "etag": etag, **self.headers.get(path, {})}
        return Response(body, headers=headers)

    def sitemap(self) -> str:
        entries = "".join(
            f"<url><loc>{html.escape(self.base + path)}</loc>"
            + (f"<lastmod>{self.lastmod[path]}</lastmod>" if path in self.lastmod else "")
            + "</url>"
            for path in self.pages
            if path not in self.unlisted
        )
        return f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{entries}</urlset>'


class WebsitePlayground(DeclaredMembers):
    def __init__(self, site: Site, members_file: Path, misbehaving: Misbehaving) -> None:
        super().__init__(members_file)
        self.site = site
        self.misbehaving = misbehaving
        self._removed: dict[str, bytes] = {}
        self.environment: Mapping[str, str] = {}
        self.options: Mapping[str, Any] = {
            "url": site.base,
            "acl_tags": ["team"],
            "members_file": str(self.members_file),
            "requests_per_second": 100,
        }

    async def write(self, name: str, text: str) -> str:
        paragraphs = "".join(f"<p>{html.escape(part)}</p>" for part in text.split("\n\n"))
        self.site.pages[f"/{name}"] = f"<html><head><title>{name}</title></head><body>{paragraphs}</body>".encode()
        return f"{self.site.base}/{name}"

    async def move(self, name: str) -> None:
        """Serve the page with another attribute. At another address it would be another page."""
        self.site.pages[f"/{name}"] = self.site.pages[f"/{name}"].replace(b"<body>", b"<body class='moved'>")

    async def remove(self, name: str) -> None:
        self._removed[name] = self.site.pages.pop(f"/{name}")

    async def restore(self, name: str) -> None:
        self.site.pages[f"/{name}"] = self._removed.pop(name)

    async def restrict(self, name: str) -> None:
        self.site.headers[f"/{name}"] = {"x-robots-tag": "noindex"}
        self.site.pages[f"/{name}"] += b"<!-- not for an index -->"

    async def add_places(self) -> Mapping[str, str]:
        """Add nothing: the entries name pages by their paths."""
        return {}

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """truncated: the sitemap is HTML, as where a site shows a page of its own in place of errors."""
        self.site.throttled, self.site.failing = throttled, failing
        if truncated:
            self.site.pages["/sitemap.xml"] = b"<!doctype html><html><body>We are working on it.</body></html>"
        else:
            self.site.pages.pop("/sitemap.xml", None)


@asynccontextmanager
async def playing() -> AsyncIterator[WebsitePlayground]:
    site = Site()
    misbehaving = Misbehaving(site)
    with tempfile.TemporaryDirectory(prefix="penstock-website-") as folder:
        async with served(misbehaving) as address:
            site.base = address
            yield WebsitePlayground(site, Path(folder, "members.toml"), misbehaving)
