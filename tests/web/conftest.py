"""One browser and one site for all tests of the page: the real application over the real stores."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, async_playwright
from pydantic import SecretStr

from deploy.local.browser import require
from deploy.local.stack import Stack
from query.auth.authenticator import local_user
from query.service import Service
from query.settings import ChatSettings
from tests.fakes.chat import FakeChat
from tests.fakes.chat_faults import Faults
from tests.support.query.http_kit import service_over, token
from tests.support.query.library import Library, WordEmbedder
from tests.support.query.library_of_git import documents

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESK = {"width": 1200, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """With a profile of its own, made by Playwright and removed with it."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=str(require()), args=list(FLAGS))
        yield browser
        await browser.close()


@dataclass(frozen=True, slots=True)
class Site:
    url: str
    library: Library
    service: Service
    chat: FakeChat

    @asynccontextmanager
    async def certified(self, until: str) -> AsyncIterator[None]:
        """While entered, the source ``wiki`` is complete up to this time."""
        await self.library.execute(
            "INSERT INTO connector_freshness (tenant, source, epoch, tracked_since, every_seconds, listed_at,"
            " complete_until, access_until, generation) SELECT 'acme', 'wiki', 1, now(), 600, t, t, t, %s"
            " FROM (VALUES (%s::timestamptz)) v (t)",
            self.library.generation.name,
            until,
        )
        try:
            yield
        finally:
            await self.library.execute("DELETE FROM connector_freshness WHERE tenant = 'acme'")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def site(stack: Stack) -> AsyncIterator[Site]:
    async with Library.create(stack, WordEmbedder()) as library:
        await library.put(*documents())
        for source in sorted({document.source for document in documents()}):
            for principal in ("ann", local_user()):
                await library.execute(
                    "INSERT INTO memberships (tenant, source, principal, groups, observed_at)"
                    " VALUES ('acme', %s, %s, '{staff}', now())",
                    source,
                    principal,
                )
        async with FakeChat() as chat:
            model = ChatSettings(base_url=chat.url, api_key=SecretStr("k"), model=chat.model, first_token_seconds=5)
            # Beside a browser, on a busy machine, a part of a search may take longer than its share of ten seconds.
            async with service_over(library, chat=model, serve={"search_seconds": 30}) as (client, service):
                yield Site(str(client.base_url).rstrip("/"), library, service, chat)


class Tab:
    """A browser's tab, signed in as Ann of acme, that notes whatever a page should not do."""

    def __init__(self, page: Page, context: BrowserContext, url: str, folder: Path) -> None:
        self.page = page
        self.context = context
        self.url = url
        self._folder = folder
        self.errors: list[str] = []
        self.foreign: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._heard)
        page.on("request", lambda request: request.url.startswith(url) or self.foreign.append(request.url))

    def _heard(self, message: ConsoleMessage) -> None:
        # An answer of 404 is the service's; a refused script or image would be the page's.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    async def open(self, address: str = "") -> None:
        await self.page.goto(f"{self.url}/{address}")
        await self.until("document.querySelector('#who').textContent !== 'Sign in'")

    async def until(self, true: str) -> None:
        """Wait for a script's expression: Playwright's own way evaluates text in the page, which the page forbids."""
        async with asyncio.timeout(20):
            while not await self.page.evaluate(true):
                await asyncio.sleep(0.02)

    async def search(self, words: str) -> None:
        await self.page.fill("#query", words)
        await self.results()

    async def results(self) -> list[str]:
        """Titles, once those of what is asked are there."""
        await self.until(
            "(list => list.dataset.of === document.querySelector('#query').value.trim() && !list.ariaBusy"
            " && list.childElementCount > 0)(document.querySelector('#results'))"
        )
        return await self.page.locator("#results h3 .title").all_inner_texts()

    async def shoot(self, name: str) -> None:
        """A picture for docs/: into the folder that PENSTOCK_SCREENSHOTS names, else into the test's own."""
        await self.page.evaluate("document.fonts.ready")
        await self.page.wait_for_timeout(400)  # what moves comes to rest
        await self.page.screenshot(path=self._folder / f"{name}.png")


@dataclass(slots=True)
class Tabs:
    browser: Browser
    site: Site
    folder: Path
    open: list[Tab]

    async def new(
        self,
        *,
        theme: str = "light",
        size: dict[str, int] | None = None,
        who: str | None = "ann",
        scale: float = 1,
        motion: str = "no-preference",
        url: str | None = None,
    ) -> Tab:
        """who None: the local user, who operates the service in development mode; "": nobody yet. url: of another
        site than the shared one."""
        context = await self.browser.new_context(
            viewport=size or DESK,
            color_scheme=theme,
            device_scale_factor=scale,
            reduced_motion=motion,
            locale="en-GB",
            timezone_id="UTC",
        )
        access = json.dumps({"tenant": "acme", "token": token()} | ({"as": who} if who else {}))
        if who != "":
            await context.add_init_script(f"sessionStorage['penstock-access'] ??= {json.dumps(access)}")
        page = await context.new_page()
        page.set_default_timeout(20_000)
        tab = Tab(page, context, url or self.site.url, self.folder)
        self.open.append(tab)
        return tab


@pytest_asyncio.fixture(loop_scope="session")
async def tabs(browser: Browser, site: Site, tmp_path: Path) -> AsyncIterator[Tabs]:
    """Law: whatever a test does, no script fails, nothing is loaded from elsewhere."""
    folder = Path(os.environ.get("PENSTOCK_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    site.chat.faults = Faults()
    tabs = Tabs(browser, site, folder, [])
    yield tabs
    for tab in tabs.open:
        await tab.context.close()
    assert [error for tab in tabs.open for error in tab.errors] == []
    assert [url for tab in tabs.open for url in tab.foreign] == []


@pytest_asyncio.fixture(loop_scope="session")
async def tab(tabs: Tabs) -> Tab:
    return await tabs.new()
