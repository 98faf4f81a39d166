"""Documents are untrusted: whatever they hold is shown as the text that it is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from query import page
from tests.web.conftest import Tab

pytestmark = [pytest.mark.stack]


@pytest.mark.asyncio(loop_scope="session")
async def test_markup_in_a_document_is_shown_as_text_and_neither_runs_nor_loads(tab: Tab) -> None:
    """That nothing was loaded from elsewhere and no script was refused is asserted by the fixture."""
    await tab.open("?q=turnips+beets+harvest+cellar")
    assert "<img" in (await tab.results())[0]
    for button in await tab.page.locator("#results .more").all():
        await button.click()
    shown = await tab.page.inner_text("#results")
    assert "<script>window.harmed = 'script'</script>" in shown
    assert "![beets](http://harm.invalid/pixel.png)" in shown
    assert "<b onmouseover=alert(1)>Mallory</b>" in shown
    await tab.page.click("#results a.title")
    await tab.page.wait_for_selector("#story .whole")
    assert "<iframe" in await tab.page.inner_text("#story .whole")
    assert await tab.page.evaluate("window.harmed") is None
    made = "#results :is(img, script, iframe, style), #story :is(img, script, iframe, style)"
    assert await tab.page.locator(made).count() == 0
    targets = await tab.page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)")
    assert targets
    assert [target for target in targets if not re.match(r"https?://", target)] == []


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a" + " " * 150_000 + "b", marks=pytest.mark.slow),
        pytest.param("a|b\n" + " " * 100_000 + "x|", marks=pytest.mark.slow),
        "|" + "a|" * 500 + "\n|" + "-|" * 500 + "\n" + "|\n" * 20_000,
        pytest.param("".join("`" * n + "a" for n in range(1, 600)), marks=pytest.mark.slow),
        "**a " * 30_000,
        "-|" * 3_000 + "x",
        pytest.param("\n" * 10_000 + "x", marks=pytest.mark.slow),
    ],
    ids=["spaces", "a row of a table", "a wide table", "code", "bold", "bars", "blank lines"],
)
async def test_no_text_keeps_the_page_busy_with_its_markdown(tab: Tab, text: str) -> None:
    """Texts whose marks are never closed took minutes, in which the tab did not respond: rendered, or on a card."""
    render = """async (text) => {
        const script = document.querySelector("script[type=module]").src;
        const { renderText } = await import(new URL("format.js", script));
        const { snippet } = await import(new URL("words.js", script));
        return renderText(text).textContent.length + snippet(text, []).text.length;
    }"""
    await tab.open("?q=turnips+beets+harvest+cellar")
    async with asyncio.timeout(20):
        assert await tab.page.evaluate(render, text) > 0


@pytest.mark.asyncio(loop_scope="session")
async def test_no_name_of_a_document_is_shown_reversed(tab: Tab) -> None:
    """An override of the direction made an id that ends in exe.fdp look like one that ends in pdf.exe."""
    await tab.open("?q=turnips+beets+harvest+cellar")
    await tab.results()
    await tab.page.click("#results a.title")
    await tab.page.wait_for_selector("#story .whole")
    text = await tab.page.evaluate("document.documentElement.outerHTML")
    assert "of fdp.exe" in text, "the title is cleaned when it is accepted"
    assert "harm/\ufffdfdp.exe" in text
    assert "\u202e" not in text


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("then", ["signs out", pytest.param("signs in as somebody else", marks=pytest.mark.slow)])
async def test_nothing_that_a_person_was_shown_stays_for_the_next_one(tab: Tab, then: str) -> None:
    """On a screen that people share: results, an answer, a document, and values of filters."""
    await tab.open("?q=turnips+beets+harvest+cellar")
    await tab.results()
    await tab.page.click("#answer-it")
    await tab.page.wait_for_selector("#answer footer .thumbs")
    await tab.page.click("#results a.title")
    await tab.page.wait_for_selector("#story .whole")
    await tab.page.keyboard.press("Escape")
    await tab.page.click("#who")
    if then == "signs out":
        await tab.page.click("#signin .buttons .quiet")
        await tab.until("document.querySelector('#who').textContent === 'Sign in'")
    else:
        await tab.page.fill("#signin-as", "nobody")
        await tab.page.click("#signin .primary")
        await tab.until("document.querySelector('#who').textContent.startsWith('nobody')")
    await tab.until("!document.querySelector('#answer .thinking, #results[aria-busy], #answer[aria-busy]')")
    text = await tab.page.evaluate("document.body.textContent")
    assert "Mallory" not in text
    assert "window.harmed" not in text
    assert await tab.page.locator("#results li, #filters input[type=checkbox]").count() == 0


def test_no_script_of_the_page_parses_markup_or_evaluates_code() -> None:
    folder = Path(page.__file__).parent
    scripts = {path.name: path.read_text() for path in folder.glob("*.js")}
    assert len(scripts) > 10
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|\.srcdoc|https?://(?!www\.w3\.org/2000/svg)"
    assert [(name, hit) for name, text in scripts.items() for hit in re.findall(forbidden, text)] == []
    assert all(len(text.splitlines()) < 300 for text in scripts.values())
