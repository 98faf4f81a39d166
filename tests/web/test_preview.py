"""A preview of an edit in the drawer of a document, in a real browser over the real stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pipeline.core.identity import document_id
from query.evaluation import golden as judgements
from query.evaluation.golden import Golden, Judged
from tests.support.query.library import deletion, document
from tests.web.conftest import PHONE, Site, Tab, Tabs
from tests.web.test_accessible import faults

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]

QUESTION = "How many buoys mark the fairway of Ebeltoft?"
TEXT = "Seventy buoys mark the fairway of Ebeltoft. Each of them has a lamp."


@asynccontextmanager
async def judged(site: Site, name: str, question: str = QUESTION) -> AsyncIterator[str]:
    """The only question that is asked for Ann, a golden one that a document answers, which she may read. Yields the
    address of its drawer."""
    await site.library.execute("DELETE FROM standing_questions WHERE tenant = 'acme' AND principal = 'ann'")
    made = document(name, TEXT, acl_tags=["user:ann"])
    await site.library.put(made)
    golden = Golden("acme", question, (Judged("wiki", name, "Seventy buoys"),))
    async with site.library.pool.connection() as connection:
        await judgements.store(connection, golden)
    yield f"?doc={document_id('acme', 'wiki', name)}"
    await site.library.execute("DELETE FROM eval_queries WHERE id = %s", golden.id)
    gone = deletion(made)
    await site.library.put(gone.model_copy(update={"version": gone.version + 1_000}))


async def edit(tab: Tab, address: str) -> None:
    """Open the document's drawer, and in it the text to edit."""
    await tab.open(address)
    await tab.page.click("#story .preview summary")
    await tab.until("document.querySelector('#edit-text').value !== ''")


async def previewed(tab: Tab) -> str:
    await tab.page.click("#story .edit .primary")
    await tab.until(
        "document.querySelector('#story .busy').hidden && document.querySelector('#story [role=status]').textContent"
    )
    return await tab.page.inner_text("#story [role=status]")


async def test_a_reader_sees_which_answers_an_edit_would_change_and_nothing_is_stored(tabs: Tabs) -> None:
    site = tabs.site
    async with judged(site, "buoys.md") as address:
        tab = await tabs.new()
        await edit(tab, address)
        assert await tab.page.input_value("#edit-text") == TEXT
        assert "no answer changes" in await previewed(tab)
        await tab.page.fill("#edit-text", "Each of the buoys has a lamp.")
        assert (await previewed(tab)).startswith("1 answer would be worse. 1 question asked, 1 of them affected")
        entry = tab.page.locator(f"#story .findings > li:has-text('{QUESTION}')")
        shown = await entry.inner_text()
        assert shown.startswith("Lost")
        assert "“Seventy buoys” in buoys.md: result 1 now, no result with the edit" in shown
        assert "Seventy buoys mark" in await entry.locator(".removed").first.inner_text()
        assert await faults(tab) == []
        await tab.page.get_by_role("button", name="Undo the edit").click()
        assert await tab.page.input_value("#edit-text") == TEXT
        text = "SELECT text FROM document_bodies b JOIN documents d ON d.id = b.document_id WHERE d.external_id = %s"
        assert await site.library.execute(text, "buoys.md") == [(TEXT,)]


async def test_closing_the_drawer_keeps_the_edit_for_its_author_and_for_nobody_else(tabs: Tabs) -> None:
    async with judged(tabs.site, "draft.md") as address:
        tab = await tabs.new()
        await edit(tab, address)
        await tab.page.fill("#edit-text", "A draft of Ann.")
        await tab.page.keyboard.press("Escape")
        await tab.until("!location.search.includes('doc=')")
        await tab.page.go_back()
        await tab.page.click("#story .preview summary")
        await tab.until("document.querySelector('#edit-text')?.value === 'A draft of Ann.'")
        await tab.page.keyboard.press("Escape")
        await tab.until("!location.search.includes('doc=')")
        await tab.page.click("#who")
        await tab.page.click("#signin button[type=submit]")
        await tab.until("!document.querySelector('#signin').open")
        await tab.page.go_back()
        await tab.page.click("#story .preview summary")
        await tab.until(f"document.querySelector('#edit-text')?.value === {TEXT!r}")


async def test_a_preview_that_waits_shows_its_progress_and_can_be_stopped(tabs: Tabs) -> None:
    async with judged(tabs.site, "waits.md") as address:
        tab = await tabs.new()
        await edit(tab, address)
        async with tabs.site.service.previewing.of("another", 1):
            await tab.page.click("#story .edit .primary")
            await tab.page.wait_for_selector("#story progress")
            assert await faults(tab) == []
            await tab.page.get_by_role("button", name="Stop").click()
            await tab.page.wait_for_selector("#story .busy", state="hidden")
            assert await tab.page.inner_text("#story [role=status]") == "Stopped."
            async with asyncio.timeout(20):  # the service has noticed that nobody waits
                while "acme" in tabs.site.service.previewing._tenants:
                    await asyncio.sleep(0.05)
        async with tabs.site.service.previewing.of("acme", 1):
            assert "another preview is running" in await previewed(tab)


async def test_on_a_phone_a_preview_is_not_too_wide_and_markup_in_it_is_text(tabs: Tabs) -> None:
    """No script runs and nothing is loaded: the fixture asserts it too."""
    hostile = "<img src=x onerror=window.harmed=1><svg onload=window.harmed=1>"
    async with judged(tabs.site, "wide.md", f"{QUESTION} {hostile} {'w' * 200}") as address:
        tab = await tabs.new(size=PHONE, theme="dark")
        await edit(tab, address)
        await tab.page.fill("#edit-text", f"Buoys mark the fairway of Ebeltoft. {hostile} {'x' * 300}")
        assert "1 answer would be worse" in await previewed(tab)
        assert hostile in await tab.page.inner_text("#story .findings")
        assert await tab.page.locator("#story .findings :is(img, svg, script, a)").count() == 0
        assert await tab.page.evaluate("window.harmed") is None
        assert await tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert await tab.page.evaluate("document.querySelector('#story').scrollWidth") <= PHONE["width"]
        assert await faults(tab) == []
