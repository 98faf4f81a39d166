"""WCAG 2.2 AA, as far as axe-core can tell, of every view in both colours; and what it cannot tell."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe

from query.auth.authenticator import local_user
from tests.support.query.http_kit import service_over, token, write_keys
from tests.web.conftest import Tab, Tabs

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]

RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]},
    "resultTypes": ["violations"],
}


COLOURS = {"runOnly": ["color-contrast"], "resultTypes": ["violations"]}


async def faults(tab: Tab, rules: dict[str, Any] = RULES) -> list[tuple[str, list[str]]]:
    await tab.page.wait_for_timeout(400)  # nothing is half faded in
    results = await Axe().run(tab.page, options=rules)
    return [
        (violation["id"], [node["html"][:160] for node in violation["nodes"]])
        for violation in results.response["violations"]
    ]


@pytest.mark.parametrize(("theme", "rules"), [("light", RULES), pytest.param("dark", COLOURS, marks=pytest.mark.slow)])
async def test_every_view_has_no_accessibility_violations(tabs: Tabs, theme: str, rules: dict[str, Any]) -> None:
    tab = await tabs.new(theme=theme, who=None)
    await tab.open("?q=undo+a+hard+reset&source=git-guide")
    await tab.results()
    await tab.page.click("#filters-open")
    assert await faults(tab, rules) == []
    await tab.page.click("#results a.title")
    await tab.page.wait_for_selector("#story .timeline")
    assert await faults(tab, rules) == []
    await tab.open("?q=undo+a+commit&answer=1")
    await tab.page.wait_for_selector("#answer:not([aria-busy]) .by")
    await tab.page.click("#answer .cite")
    assert await faults(tab, rules) == []
    await tab.open("?view=pipeline")
    await tab.page.wait_for_selector(".tile")
    assert await faults(tab, rules) == []
    await tab.open()
    await tab.page.wait_for_selector(".landing")
    await tab.page.click("#help-open")
    assert await faults(tab, rules) == []
    await tab.page.keyboard.press("Escape")
    await tab.page.click("#who")
    assert await faults(tab, rules) == []


async def test_the_token_in_the_printed_url_signs_in_and_is_removed_from_the_address(tabs: Tabs) -> None:
    tab = await tabs.new(who="")
    await tab.page.goto(tab.url)
    await tab.page.wait_for_selector("#signin[open]")
    assert "penstock status" in (await tab.page.text_content("#signin details") or "")
    await tab.page.goto(f"{tab.url}/#token={token()}")
    await tab.page.locator("#who", has_text=local_user()).wait_for()  # the same page with another # is loaded anew
    assert tab.page.url == f"{tab.url}/"
    assert await tab.page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"
    await tab.page.reload()
    await tab.page.locator("#who", has_text=local_user()).wait_for()
    other = await tabs.new(who="")
    await other.page.goto(other.url)
    await other.page.wait_for_selector("#signin[open]")  # it is the tab's own


async def test_an_unknown_user_is_prompted_to_sign_in_and_may_use_an_api_key(tabs: Tabs, tmp_path) -> None:  # type: ignore[no-untyped-def]
    keys = write_keys(tmp_path / "keys.toml", desk={"key": "k" * 40, "tenant": "acme", "principal": "ann"})
    async with service_over(tabs.site.library, auth={"keys_file": str(keys)}) as (client, _):
        url = str(client.base_url).rstrip("/")
        tab = await tabs.new(who="", url=url)
        await tab.page.goto(url)
        await tab.page.wait_for_selector("#signin[open]")
        assert await faults(tab) == []
        await tab.page.fill("#signin-token", "wrong")
        await tab.page.click("#signin button[type=submit]")
        await tab.page.wait_for_selector("#signin[open] .doubt")
        assert "does not know" in await tab.page.inner_text("#signin .doubt")
        await tab.page.fill("#signin-token", "k" * 40)
        await tab.page.click("#signin button[type=submit]")
        await tab.until("document.querySelector('#who').textContent.includes('ann')")
        await tab.search("undo commits")
        assert "Undoing things" in await tab.results()
        assert "k" * 40 not in tab.page.url
        write_keys(keys, desk={"key": "n" * 40, "tenant": "acme", "principal": "ann"})
        await tab.page.fill("#query", "stash")
        await tab.page.wait_for_selector("#signin[open] .doubt")  # the key was changed meanwhile
