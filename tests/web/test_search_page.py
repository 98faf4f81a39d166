"""Searching in a real browser: live results, why they were found, filters, keyboard, address, a document's story."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime

import httpx
import pytest

from pipeline.ledger import metadata_keys
from query.auth.authenticator import local_user
from tests.support.query.library import deletion, document
from tests.web.conftest import PHONE, Site, Tab, Tabs

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]


async def test_results_appear_while_typing_with_matching_words_marked(tab: Tab) -> None:
    await tab.open()
    await tab.page.locator("#query").press_sequentially("undoing comm", delay=20)
    assert "Undoing things" in (await tab.results())[:2]
    marked = await tab.page.locator("#results mark").all_inner_texts()
    assert {"commit", "undo"} <= {word.lower() for word in marked}
    assert re.fullmatch(r"\d+ passages? · \d+ ms", await tab.page.inner_text("#status"))
    assert "q=undoing+comm" in tab.page.url
    assert await tab.page.title() == "undoing comm – Penstock"


async def test_the_line_above_the_results_says_up_to_when_sources_are_complete(tab: Tab, site: Site) -> None:
    async with site.certified("2026-01-02 03:04:05Z"):
        await tab.open("?q=undo+a+hard+reset")
        await tab.results()
        shown = tab.page.locator("#status time")
        assert str(await shown.get_attribute("datetime")).startswith("2026-01-02T03:04:05")
        assert "complete until" in await tab.page.inner_text("#status")


async def test_a_result_shows_its_ranks_its_duplicates_and_its_origin(tab: Tab) -> None:
    await tab.open("?q=undo+a+hard+reset+with+the+reflog")
    titles = await tab.results()
    assert titles[0] in ("Reset, restore and revert", "Reset (copied from the guide)")
    first = tab.page.locator("#results article").first
    why = await first.locator(".why").inner_text()
    assert "meaning #" in why
    assert "words #" in why
    assert "Also in Reset" in await first.locator(".also").inner_text()
    link = first.locator(".origin a")
    assert await link.get_attribute("rel") == "noopener noreferrer"
    assert re.match(r"(git|wiki)\.example\.com ↗\s+\(opens the source in a new tab\)", await link.inner_text())


async def test_a_late_response_never_overwrites_the_results_of_a_newer_query(tab: Tab) -> None:
    """The first answer is held back until after the second has come."""
    await tab.open()
    held: list[str] = []

    async def hold(route) -> None:  # type: ignore[no-untyped-def]
        queries = route.request.post_data_json["query"]
        if queries == "receipts":
            held.append(queries)
            await asyncio.sleep(1.0)
        await route.continue_()

    await tab.page.route("**/v1/search", hold)
    await tab.page.fill("#query", "receipts")
    async with asyncio.timeout(10):
        while not held:
            await asyncio.sleep(0.02)
    async with tab.page.expect_event("requestfailed", lambda request: request.url.endswith("/v1/search")):
        await tab.page.fill("#query", "stash pop")
    await tab.page.wait_for_selector("#results:not([aria-busy]) article")
    await tab.page.wait_for_timeout(1_200)
    assert (await tab.results())[0] == "Putting work aside"


async def test_results_that_the_user_may_not_read_are_not_shown(tabs: Tabs) -> None:
    tab = await tabs.new()
    await tab.open("?q=the+board+undoes+commits+by+decree")
    assert "For the board" not in await tab.results()
    stranger = await tabs.new(who="mallory")
    await stranger.open("?q=undo+commits")
    await stranger.page.wait_for_selector("#empty h2")
    assert await stranger.page.inner_text("#empty h2") == "Nothing relevant was found"


async def test_filters_narrow_the_results_and_can_be_removed(tab: Tab) -> None:
    await tab.open("?q=undo+reset+release")
    everything = await tab.results()
    await tab.page.click("#filters-open")
    await tab.page.check("#filter-source-runbooks")
    await tab.until("document.querySelectorAll('#results article').length === 1")
    assert await tab.results() == ["Rolling back a release"]
    assert "source=runbooks" in tab.page.url
    await tab.page.click(".chip")
    await tab.until(f"document.querySelectorAll('#results article').length === {len(everything)}")
    await tab.page.fill("#filter-before", "2026-02-15")
    await tab.until("document.querySelector('#results h3').textContent.includes('copied')")
    assert "before=2026-02-15" in tab.page.url


@pytest.mark.slow
async def test_keys_of_metadata_order_and_further_pages(site: Site, tabs: Tabs) -> None:
    """Zoe alone reads the minutes: 20 of them, one a day."""
    minutes = [
        document(
            f"minutes/{n}",
            f"Minutes number {n} of the harbour committee on the new crane.",
            title=f"Minutes {n}",
            source="minutes",
            acl_tags=["minutes"],
            source_modified_at=datetime(2026, 3, 1 + n, tzinfo=UTC),
            metadata={"labels": ["crane", "budget"] if n % 4 == 0 else ["crane"], "number": n},
        )
        for n in range(20)
    ]
    async with site.library.pool.connection() as connection:
        await metadata_keys.declare(connection, "acme", "labels", "keyword")
    await site.library.put(*minutes)
    await site.library.execute(
        "INSERT INTO memberships (tenant, source, principal, groups, observed_at)"
        " VALUES ('acme', 'minutes', 'zoe', '{minutes}', now()) RETURNING 1"
    )
    tab = await tabs.new(who="zoe")
    await tab.open("?q=harbour+committee+crane")
    await tab.results()
    await tab.page.select_option("#sort", "oldest")
    await tab.until("document.querySelector('#results h3')?.textContent === 'Minutes 0'")
    assert await tab.results() == [f"Minutes {n}" for n in range(12)]
    await tab.page.click("#more-results")
    await tab.until("document.querySelectorAll('#results article').length === 20")
    assert await tab.results() == [f"Minutes {n}" for n in range(20)]
    await tab.until("document.querySelector('#more-results').hidden")
    assert "sort=oldest" in tab.page.url

    await tab.page.click("#filters-open")
    labels = tab.page.locator("#filters fieldset", has=tab.page.locator("legend", has_text="labels"))
    assert re.split(r"\s+", (await labels.inner_text()).strip()) == ["labels", "crane", "20", "budget", "5"]
    await labels.locator("label", has_text="budget").click()
    await tab.until("document.querySelectorAll('#results article').length === 5")
    assert await tab.results() == [f"Minutes {n}" for n in range(0, 20, 4)]
    assert await tab.page.locator(".chip").inner_text() == "labels: budget ×"

    await tab.page.click("#modes label:has-text('Meaning')")
    await tab.until("document.querySelector('#sort').disabled")
    assert await tab.page.input_value("#sort") == "relevance"
    await tab.page.go_back()
    await tab.until("!document.querySelector('#sort').disabled")
    assert await tab.page.input_value("#sort") == "oldest"


async def test_back_and_forward_go_through_the_query_history(tab: Tab) -> None:
    await tab.open()
    for words in ("stash", "travel receipts"):
        await tab.page.fill("#query", words)
        await tab.page.press("#query", "Enter")
        await tab.until("!document.querySelector('#results[aria-busy]') && document.querySelector('#results article')")
    await tab.page.click("#modes label:has-text('Words')")
    await tab.until("location.search.includes('mode=keyword')")
    await tab.page.go_back()
    await tab.until("!location.search.includes('mode')")
    assert await tab.page.is_checked("#modes input[value=hybrid]")
    await tab.page.go_back()
    await tab.until("document.querySelector('#query').value === 'stash'")
    await tab.until("document.querySelector('#results h3')?.textContent === 'Putting work aside'")
    await tab.page.go_forward()
    await tab.until("document.querySelector('#results h3')?.textContent === 'Travel expenses'")


async def test_the_page_is_usable_with_the_keyboard_alone(tab: Tab) -> None:
    keyboard = tab.page.keyboard
    await tab.open("?q=undo+commits")
    titles = await tab.results()
    await tab.page.evaluate("document.activeElement.blur()")
    focused = "document.activeElement.closest('article')?.querySelector('.title').textContent"
    await keyboard.press("j")
    assert await tab.page.evaluate(focused) == titles[0]
    await keyboard.press("ArrowDown")
    await keyboard.press("k")
    await keyboard.press("j")
    assert await tab.page.evaluate(focused) == titles[1]
    await keyboard.press("Enter")
    await tab.page.wait_for_selector("#story[open] .verdict")
    assert await tab.page.inner_text("#story-title") == titles[1]
    await keyboard.press("Escape")
    await tab.page.wait_for_selector("#story", state="hidden")
    assert await tab.page.evaluate(focused) == titles[1], "focus goes back to where it was"
    await tab.until("!location.search.includes('doc=')")  # a dialog tells that it was closed a little later
    await keyboard.press("/")
    assert await tab.page.evaluate("document.activeElement.id") == "query"
    await keyboard.press("Escape")
    await keyboard.press("?")
    assert await tab.page.is_visible("#help[open]")
    await keyboard.press("Escape")
    assert not await tab.page.is_visible("#help")


async def test_a_documents_story_shows_its_history_text_and_matching_passage(tabs: Tabs) -> None:
    tab = await tabs.new()
    await tab.open("?q=how+do+I+undo+a+commit+others+already+have")
    await tab.page.click("#results a.title:has-text('Undoing things')")
    await tab.page.wait_for_selector("#story .timeline")
    story = await tab.page.inner_text("#story")
    assert "It is searchable" in story
    assert "Published: new" in story
    assert "By meaning: up to date" in story
    assert "By words: up to date" in story
    assert "Ann Archer" in story
    assert "git revert -m 1 MERGE" in await tab.page.inner_text("#story .whole")
    assert "undo a commit that others" in (await tab.page.inner_text("#story .here")).replace("\n", " ")
    assert f"{tab.url}/?q=how" in tab.page.url
    assert "doc=" in tab.page.url
    await tab.shoot("story")
    again = await tabs.new()
    await again.open(tab.page.url.removeprefix(f"{tab.url}/"))
    await again.page.wait_for_selector("#story[open] .timeline")


async def test_only_an_operator_sees_the_next_step_and_notes_in_a_documents_story(site: Site, tabs: Tabs) -> None:
    library, mine = site.library, [f"user:{local_user()}"]
    new, old = (
        document("mended.md", f"The zorilla's {word} burrow.", acl_tags=mine, version=version)
        for version, word in ((7, "new"), (3, "old"))
    )
    await library.put(new)
    await library.put(old)
    await library.execute(
        'INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, first_failed_at, document_id,'
        " tenant, source, external_id) SELECT 'page:0:1', 'page', 0, 1, 'detect', 'invalid', 'title: too long', now(),"
        " id, tenant, source, external_id FROM documents WHERE external_id = 'mended.md'"
    )
    try:
        tab = await tabs.new(who=None)
        await tab.open("?q=zorilla")
        await tab.page.click("#results a.title")
        await tab.page.wait_for_selector("#story .timeline")
        story = await tab.page.inner_text("#story .story")
        assert "Next step: fix the cause, then run penstock dead replay page:0:1" in story
        assert await tab.page.inner_text("#story .next code") == "penstock dead replay page:0:1"
        assert "its newest event (version 3, arrived" in await tab.page.inner_text("#story .notes")
        reader = await tabs.new()
        await reader.open("?q=undo+commits")
        await reader.page.click("#results a.title >> nth=0")
        await reader.page.wait_for_selector("#story .timeline")
        assert await reader.page.locator("#story :is(.next, .notes)").count() == 0
    finally:
        await library.execute("DELETE FROM dead_letters WHERE id = 'page:0:1'")
        await library.put(deletion(new))


async def test_a_link_in_the_drawer_leads_to_the_source(tab: Tab) -> None:
    """The drawer's own listener prevented the default action of every click in it."""
    await tab.open("?q=undo+a+hard+reset&source=git-guide")
    await tab.results()
    await tab.page.click("#results a.title")
    await tab.page.wait_for_selector("#story .facts a.host")
    clicked = """new Promise(prevented => {
        document.addEventListener("click", event => { prevented(event.defaultPrevented); event.preventDefault(); });
        document.querySelector("#story .facts a.host").click();
    })"""
    assert await tab.page.evaluate(clicked) is False


async def test_a_document_that_does_not_exist_gives_a_plain_message(tab: Tab) -> None:
    await tab.open("?q=stash&doc=7b7e4f0c-9f0b-4f57-93c5-3a3b8f2f0d11")
    await tab.page.wait_for_selector("#story .doubt")
    assert "you may not read it" in await tab.page.inner_text("#story .doubt")


@pytest.mark.slow
async def test_colours_follow_the_system_until_the_user_chooses(tabs: Tabs) -> None:
    tab = await tabs.new(theme="dark")
    await tab.open("?q=undo+commits")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = await tab.page.evaluate(background)
    await tab.results()
    await tab.page.evaluate("document.activeElement.blur()")
    await tab.shoot("dark")
    await tab.page.click("#theme")
    light = await tab.page.evaluate(background)
    assert light != dark
    await tab.page.reload()
    assert await tab.page.evaluate(background) == light
    await tab.page.click("#theme")
    assert await tab.page.evaluate(background) == dark


async def test_on_a_phone_nothing_is_too_wide_and_no_target_too_small(tabs: Tabs) -> None:
    tab = await tabs.new(size=PHONE, scale=2)
    await tab.open("?q=how+do+I+undo+a+commit")
    await tab.results()
    await tab.page.evaluate("document.activeElement.blur()")
    await tab.shoot("phone")
    await tab.page.click("#filters-open")
    assert await tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    small = await tab.page.evaluate(
        """[...document.querySelectorAll('button, .tabs a, #modes label')].filter(e => e.offsetParent)
           .filter(e => !e.matches('.link') && e.getBoundingClientRect().height < 24).map(e => e.outerHTML)"""
    )
    assert small == [], "WCAG 2.2: a target is at least 24 pixels"


@pytest.mark.slow
async def test_reduced_motion_disables_animations(tabs: Tabs) -> None:
    tab = await tabs.new(motion="reduce")
    await tab.open("?q=stash")
    await tab.results()
    await tab.page.click("#results a.title")
    duration = await tab.page.evaluate(
        "parseFloat(getComputedStyle(document.querySelector('#story')).animationDuration)"
    )
    assert duration < 0.001


async def test_the_start_page_lists_the_sources(tabs: Tabs) -> None:
    tab = await tabs.new()
    await tab.open()
    await tab.page.wait_for_selector(".landing strong")
    assert "git-guide" in await tab.page.inner_text(".landing")
    await tab.search("how do I undo a commit")
    await tab.page.evaluate("document.activeElement.blur()")
    await tab.shoot("search")


async def test_the_page_is_revalidated_and_its_assets_are_cached_for_good(site: Site) -> None:
    async with httpx.AsyncClient(base_url=site.url) as client:
        page = await client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert page.headers["cache-control"] == "no-cache"
        assert (await client.get("/", headers={"if-none-match": page.headers["etag"]})).status_code == 304
        parts = re.findall(r'(?:href|src)="(assets/[^"]+)"', page.text)
        assert len(parts) >= 5
        for part in parts:
            got = await client.get(f"/{part}")
            assert got.status_code == 200
            assert "immutable" in got.headers["cache-control"]
            assert got.headers["content-encoding"] == "gzip"
            known = await client.get(f"/{part}", headers={"if-none-match": f"W/{got.headers['etag']}"})
            assert known.status_code == 304
            assert known.content == b""
        older = re.sub(r"assets/\w+/", "assets/0123456789abcdef/", parts[0])
        assert (await client.get(f"/{older}")).status_code == 404
        assert (await client.get("/assets/../../secrets")).status_code == 404
        assert not re.search(r"<script>|<style|style=|onclick=", page.text), "nothing inline"
