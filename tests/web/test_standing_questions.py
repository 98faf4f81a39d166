"""The reader's standing questions on the page, in a real browser over the real stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.query.http_kit import as_
from tests.support.query.library import access, deletion, document
from tests.web.conftest import Site, Tabs
from tests.web.test_accessible import faults

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]

QUESTION = "How many lanterns hang in the lighthouse of Skagen?"
FOUR = "Four lanterns hang in the lighthouse of Skagen."


@asynccontextmanager
async def kept(site: Site, name: str) -> AsyncIterator[Any]:
    """Ann's only standing question, and the document behind its answer, which she and Eve may read."""
    made = document(name, FOUR, acl_tags=["user:ann", "user:eve"])
    await site.library.put(made)
    await site.library.execute("DELETE FROM standing_questions WHERE tenant = 'acme' AND principal = 'ann'")
    async with httpx.AsyncClient(base_url=site.url, headers=as_("ann"), timeout=60) as client:
        answer = await client.post("/v1/answers", json={"question": QUESTION, "keep": True})
        assert answer.status_code == 200, answer.text
    yield made
    gone = deletion(made)
    await site.library.put(gone.model_copy(update={"version": gone.version + 1_000}))


async def test_a_reader_sees_an_invalidated_answer_asks_again_and_sees_the_difference(tabs: Tabs) -> None:
    site = tabs.site
    async with site.certified("2026-11-28T08:00:00Z"), kept(site, "lanterns.md") as made:
        five = FOUR.replace("Four", "Five")
        edited = made.model_copy(update={"version": made.version + 100, "content": five})
        await site.library.put(edited)
        tab = await tabs.new()
        await tab.open()
        entry = tab.page.locator(f".standing li:has-text('{QUESTION}')")
        await entry.locator("summary").click()
        await entry.locator(f".doubtful:has-text('{FOUR}')").first.wait_for()
        assert "No longer certain: changed" in await entry.inner_text()
        assert await faults(tab) == []
        await entry.get_by_text("Ask again", exact=True).click()
        await entry.locator(f".removed:has-text('{FOUR}')").first.wait_for()
        assert await entry.locator(f".added:has-text('{five}')").count() >= 1
        state = await entry.locator(".when").inner_text()
        assert "Current" in state
        assert "complete until" in state
        assert await faults(tab) == []
        # Whoever may not read the page any more is shown none of its sentences.
        await site.library.accept(access(edited, ["user:eve"]))
        await tab.open()
        await entry.locator("summary").click()
        await entry.locator(".prose:has-text('withheld')").wait_for()
        assert "lanterns hang in the lighthouse" not in (await entry.inner_text()).replace(QUESTION, "")
        await entry.get_by_text("Remove", exact=True).click()
        await entry.wait_for(state="detached")
        await tab.open()
        await tab.page.wait_for_selector(".landing")
        await tab.until("performance.getEntriesByName(document.baseURI + 'v1/standing').length > 0")
        assert await tab.page.locator(".standing").count() == 0


async def test_another_reader_in_the_same_tab_sees_nothing_of_the_questions_before(tabs: Tabs) -> None:
    site = tabs.site
    async with kept(site, "other lanterns.md"):
        tab = await tabs.new()
        await tab.open()
        await tab.page.wait_for_selector(".standing")
        await tab.page.click("#who")
        await tab.page.fill("#signin-as", "eve")
        await tab.page.click("#signin button[type=submit]")
        await tab.until("document.querySelector('#who').textContent.startsWith('eve')")
        await tab.until("performance.getEntriesByName(document.baseURI + 'v1/standing').length > 1")
        assert QUESTION not in await tab.page.inner_text("main")


async def test_markup_in_a_standing_question_and_its_answer_is_shown_as_text(tabs: Tabs) -> None:
    """No script runs and nothing is loaded: the fixture asserts it too."""
    hostile = "<img src=x onerror=window.harmed=1> ![a](javascript:window.harmed=1) <svg onload=window.harmed=1>"
    site = tabs.site
    async with kept(site, "hostile.md") as made:
        await site.library.put(made.model_copy(update={"version": made.version + 100, "content": f"{FOUR} {hostile}"}))
        body = {"question": f"{QUESTION} {hostile}", "keep": True}
        async with httpx.AsyncClient(base_url=site.url, headers=as_("ann"), timeout=60) as client:
            assert (await client.post("/v1/answers", json=body)).status_code == 200
        tab = await tabs.new()
        await tab.open()
        entry = tab.page.locator(".standing li:has-text('onload')")
        await entry.locator("summary").click()
        await entry.locator("ol").wait_for()
        await entry.get_by_text("Ask again", exact=True).click()
        await entry.locator("ul.lines").wait_for()
        assert hostile in await entry.inner_text()
        assert await entry.locator("img, svg, script, a").count() == 0
        assert await tab.page.evaluate("window.harmed") is None
