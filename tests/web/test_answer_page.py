"""Answers in a real browser: streamed, with citations that lead to their passage, and plain about what they lack."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest

from tests.fakes.chat_faults import UNSUPPORTED, Faults
from tests.support.query.http_kit import as_, service_over
from tests.web.conftest import Site, Tab, Tabs

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]

QUESTION = "how do I undo a commit that others already have"
ADDRESS = f"?q={QUESTION.replace(' ', '+')}&answer=1"
WRITTEN = "#answer:not([aria-busy]) .by"


async def test_an_answer_is_streamed_and_its_citations_lead_to_their_passage(tabs: Tabs) -> None:
    tabs.site.chat.faults = Faults(token_seconds=0.02)
    tab = await tabs.new()
    await tab.open()
    await tab.search(QUESTION)
    await tab.page.keyboard.press("Control+Enter")
    await tab.page.wait_for_selector("#answer .writing .cite, #answer .writing")
    growing = len(await tab.page.inner_text("#answer .prose"))
    await tab.page.wait_for_selector(WRITTEN)
    assert growing < len(await tab.page.inner_text("#answer .prose"))
    assert "answer=1" in tab.page.url
    assert "Written by copyist" in await tab.page.inner_text("#answer")
    cite = tab.page.locator("#answer .cite").first
    number = await cite.inner_text()
    await cite.click()
    assert await tab.page.evaluate("document.activeElement.id") == f"passage-{number}"
    assert await tab.page.locator(f"#passage-{number}.lit").count() == 1
    assert await tab.page.inner_text(f"#passage-{number} .number") == number
    assert await tab.page.locator(f"#passage-{number}").is_visible()


async def test_the_line_below_an_answer_says_up_to_when_sources_are_complete(tab: Tab, site: Site) -> None:
    async with site.certified("2026-01-02 03:04:05Z"):
        await tab.open(ADDRESS)
        line = await tab.page.wait_for_selector(WRITTEN)
        assert line is not None
        assert "complete until" in await line.inner_text()
        shown = tab.page.locator("#answer .by time")
        assert str(await shown.get_attribute("datetime")).startswith("2026-01-02T03:04:05")


async def test_a_sentence_that_no_passage_supports_is_marked(tabs: Tabs) -> None:
    async with httpx.AsyncClient(base_url=tabs.site.url, headers=as_("ann"), timeout=30) as client:
        first = (await client.post("/v1/answers", json={"question": QUESTION, "stream": True})).text
    passages = json.loads(re.search(r"event: sources\s+data: (.*)", first)[1])["passages"]  # type: ignore[index]
    undo, reset = (
        next(passage["n"] for passage in passages if passage["title"] == title)
        for title in ("Undoing things", "Reset, restore and revert")
    )
    said = (
        f"Use `git revert` to undo a commit that others already have [{undo}]. It records a new commit whose changes"
        f" are the opposite of the old one's [{undo}].",
        f"For a commit that was never pushed, a reset takes it back [{undo}]:",
        f"- `git reset --soft HEAD~1` keeps its changes staged [{undo}]\n"
        f"- with `--hard` the changes are thrown away too [{undo}]",
        f"To undo a hard reset, look into the reflog [{reset}]. {UNSUPPORTED}",
    )
    tabs.site.chat.faults = Faults(say="\n\n".join(said))
    tab = await tabs.new()
    await tab.open(ADDRESS)
    await tab.page.wait_for_selector(WRITTEN)
    marked = await tab.page.locator("#answer .unsupported").all_inner_texts()
    assert any(UNSUPPORTED in " ".join(text.split()) for text in marked)
    assert "underlined" in await tab.page.inner_text("#answer .notes")
    await tab.page.evaluate("document.activeElement.blur()")
    await tab.shoot("answer")


async def test_markup_in_an_answer_is_shown_as_text(tabs: Tabs) -> None:
    """The service takes markup out of answers; should it ever miss some, the page shows it as the text that it is.
    That nothing was loaded and nothing ran is asserted by the fixture."""
    hostile = (
        'Here <img src=x onerror="window.harmed=1"> and ![pixel](http://harm.invalid/p.png?q=secret) and'
        " [click](javascript:alert(1)) [99].\n\n```\n<script>window.harmed=1</script>\n```\n\n"
        "- one **bold** `code`\n- two"
    )
    events = [
        ("sources", {"passages": [], "mode": "hybrid", "notes": ["<b onclick=alert(1)>note</b>"], "steps": []}),
        ("delta", {"text": hostile}),
        (
            "done",
            {
                "answer": hostile,
                "citations": [],
                "grounded": False,
                "mode": "hybrid",
                "notes": [],
                "model": "m",
                "relevant": True,
                "unsupported": ["<svg onload=alert(1)>"],
                "review": False,
                "answer_id": None,
            },
        ),
    ]
    stream = "".join(f"event: {event}\r\ndata: {json.dumps(data)}\r\n\r\n" for event, data in events)
    tab = await tabs.new()
    await tab.page.route("**/v1/answers", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    await tab.open(ADDRESS)
    await tab.page.wait_for_selector(WRITTEN)
    shown = await tab.page.inner_text("#answer")
    assert "![pixel](http://harm.invalid/p.png?q=secret)" in shown
    assert "<img src=x onerror" in shown
    assert "<b onclick=alert(1)>note</b>" in shown
    assert await tab.page.inner_text("#answer pre") == "<script>window.harmed=1</script>"
    assert await tab.page.locator("#answer li strong").inner_text() == "bold"
    assert await tab.page.evaluate("window.harmed") is None
    made = "#answer :is(img, script, svg[onload], b, a)"
    assert await tab.page.locator(made).count() == 0


MARKDOWN = """> To undo it, *before* you push, keep `a_b*c` and 2 * 3 * 4 and snake_case_name:
>
> ```sh
> # the last commit
> git revert HEAD
> ```
>
> [1]

> | Grade | Rate |
> | --- | --- |
> | **A** | 10 \\| 20 |
> | B | ~~30~~ |
>
> [1]

1. one
   - nested _deeply_

     and more
2. two

---
\\*plain\\* [7]"""


def streamed(answer: str, passages: list[dict]) -> str:
    """The events of an answer that is written at once."""
    done = {
        "answer": answer,
        "citations": [{"n": 1}],
        "grounded": True,
        "mode": "hybrid",
        "notes": [],
        "model": None,
        "relevant": True,
        "unsupported": ["git revert HEAD is not", "two"],
        "review": False,
        "answer_id": None,
    }
    sources = {"passages": passages, "mode": "hybrid", "notes": [], "steps": []}
    events = [("sources", sources), ("delta", {"text": answer}), ("done", done)]
    return "".join(f"event: {event}\r\ndata: {json.dumps(data)}\r\n\r\n" for event, data in events)


async def test_markdown_of_an_answer_and_of_a_passage_is_rendered(tabs: Tabs) -> None:
    passage = {
        "n": 1,
        "chunk_id": "c1",
        "document_id": "d1",
        "external_id": "undo.md",
        "source": "git",
        "title": "Undo",
        "text": MARKDOWN,
        "media_type": "text/markdown",
        "ranks": {},
        "headings": [],
    }
    plain = {
        **passage,
        "n": 2,
        "chunk_id": "c2",
        "media_type": "text/x-python",
        "text": "a = 1\n" + "b = a *c* 2\n" * 4,
    }
    tab = await tabs.new()
    stream = streamed(MARKDOWN, [passage, plain])
    await tab.page.route("**/v1/answers", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    await tab.open(ADDRESS)
    await tab.page.wait_for_selector(WRITTEN)
    for button in await tab.page.locator("#results .more").all():
        await button.click()
    for place in ("#answer .prose", "#passage-1 .text"):
        shown = tab.page.locator(place)
        assert await shown.locator("em").all_inner_texts() == ["before", "deeply"]
        assert await shown.locator("blockquote pre").inner_text() == "# the last commit\ngit revert HEAD"
        assert await shown.locator("p > code").all_inner_texts() == ["a_b*c"]
        assert "2 * 3 * 4 and snake_case_name" in await shown.inner_text()
        assert await shown.locator("th").all_inner_texts() == ["Grade", "Rate"]
        assert await shown.locator("td").all_inner_texts() == ["A", "10 | 20", "B", "30"]
        assert await shown.locator("td strong, td s").all_inner_texts() == ["A", "30"]
        assert await shown.locator("ol > li > ul > li").inner_text() == "nested deeply\n\nand more"
        assert await shown.locator("ol > li").count() == 2
        assert await shown.locator("hr").count() == 1
        assert "*plain* [7]" in await shown.inner_text()
    assert await tab.page.locator("#answer .cite").all_inner_texts() == ["1", "1"]
    assert "two" in await tab.page.locator("#answer .unsupported").inner_text()
    assert await tab.page.locator("#passage-1 mark").count() > 0
    assert await tab.page.inner_text("#passage-2 .text") == plain["text"]


async def test_stopping_an_answer_also_stops_the_model(tabs: Tabs) -> None:
    tabs.site.chat.faults = Faults(stall=1)
    tab = await tabs.new()
    await tab.open(ADDRESS)
    await tab.page.wait_for_selector("#answer .writing")
    await tab.page.click("#answer button:has-text('Stop')")
    streams = tabs.site.service.metrics.registry
    assert "Stopped." in await tab.page.inner_text("#answer .notes")
    async with asyncio.timeout(10):
        while streams.get_sample_value("penstock_query_open_streams"):
            await asyncio.sleep(0.02)


async def test_an_answer_that_breaks_off_shows_a_note(tabs: Tabs) -> None:
    tabs.site.chat.faults = Faults(cut=10)
    tab = await tabs.new()
    await tab.open(ADDRESS)
    await tab.page.wait_for_selector("#answer:not([aria-busy]) .notes:not([hidden]) li")
    assert await tab.page.inner_text("#answer .notes") != ""


@pytest.mark.slow
async def test_escape_closes_the_answer_and_shows_the_results(tab: Tab) -> None:
    await tab.open(ADDRESS)
    await tab.page.wait_for_selector(WRITTEN)
    assert await tab.page.locator("#results .number").count() > 0
    await tab.page.evaluate("document.activeElement.blur()")
    await tab.page.keyboard.press("Escape")
    await tab.results()
    assert not await tab.page.is_visible("#answer")
    assert await tab.page.locator("#results .number").count() == 0
    assert "answer" not in tab.page.url
    await tab.page.go_back()
    await tab.page.wait_for_selector(WRITTEN)


@pytest.mark.slow
async def test_opening_a_document_and_going_back_requests_no_second_answer(tabs: Tabs) -> None:
    tab = await tabs.new()
    await tab.open(ADDRESS)
    await tab.page.wait_for_selector(WRITTEN)
    request_count = len(tabs.site.chat.requests)
    await tab.page.click("#results a.title >> nth=0")
    await tab.page.wait_for_selector("#story .timeline")
    await tab.page.go_back()
    await tab.page.wait_for_selector("#story", state="hidden")
    assert await tab.page.is_visible(WRITTEN)
    await tab.page.go_forward()
    await tab.page.wait_for_selector("#story .timeline")
    assert len(tabs.site.chat.requests) == request_count


async def test_a_follow_up_question_is_understood_by_the_conversation_of_the_visit(tabs: Tabs) -> None:
    tab = await tabs.new()
    await tab.open(ADDRESS)
    await tab.page.wait_for_selector(WRITTEN)
    tabs.site.chat.faults = Faults(rewrite="How do I undo a hard reset?")
    await tab.page.fill("#answer .follow-up input", "And a hard reset?")
    await tab.page.keyboard.press("Enter")
    await tab.until("document.querySelector('#answer .turns') !== null")
    await tab.page.wait_for_selector(WRITTEN)
    assert await tab.page.input_value("#query") == "And a hard reset?"
    assert await tab.page.locator("#answer .turns li").all_inner_texts() == [QUESTION]
    assert "Understood as: How do I undo a hard reset?" in await tab.page.inner_text("#answer .notes")
    rewriting = tabs.site.chat.requests[-2]["messages"][1]["content"]
    assert QUESTION in rewriting
    assert "Answered: " in rewriting
    await tab.page.go_back()
    await tab.page.wait_for_selector(WRITTEN)
    await tab.until("document.querySelector('#answer .turns') === null")
    await tab.page.go_forward()
    await tab.until("document.querySelector('#answer .turns') !== null")
    await tab.search("how do I rename a branch")
    await tab.page.keyboard.press("Control+Enter")
    await tab.page.wait_for_selector(WRITTEN)
    assert await tab.page.locator("#answer .turns").count() == 0, "what is typed at the top begins a new one"


async def test_a_question_without_relevant_documents_is_answered_with_a_plain_message(tabs: Tabs) -> None:
    tab = await tabs.new(who="mallory")
    await tab.open(ADDRESS)
    await tab.page.wait_for_selector("#answer.nothing .by")
    assert "I don't have information on this" in await tab.page.inner_text("#answer .prose")
    assert await tab.page.locator("#results article").count() == 0


async def test_without_an_answering_model_passages_are_quoted_and_a_note_says_so(tabs: Tabs) -> None:
    async with service_over(tabs.site.library) as (client, _):
        tab = await tabs.new(url=str(client.base_url).rstrip("/"))
        await tab.open(ADDRESS)
        await tab.page.wait_for_selector(WRITTEN)
        assert "no answering model is configured" in await tab.page.inner_text("#answer")
        assert await tab.page.locator("#answer blockquote").count() >= 1
        assert not set(">#") & set(await tab.page.inner_text("#answer .prose"))
        assert await tab.page.locator("#answer .cite").count() > 0


async def test_thumbs_up_and_down_are_stored_as_feedback(tabs: Tabs) -> None:
    tab = await tabs.new()
    await tab.open(ADDRESS)
    await tab.page.wait_for_selector(WRITTEN)
    kept = tabs.site.library
    await tab.page.click("#answer .thumbs button[aria-label^='Not helpful']")
    await tab.until("document.querySelector('#said').textContent.startsWith('Thank you')")
    await tab.page.click("#results .thumbs button[aria-label^='Helpful'] >> nth=0")
    await tab.until("document.querySelectorAll('.thumbs [aria-pressed=true]').length === 2")
    async with asyncio.timeout(10):
        while await given(kept) != [("down", True), ("up", False)]:
            await asyncio.sleep(0.02)


async def given(library) -> list[tuple[str, bool]]:  # type: ignore[no-untyped-def]
    return await library.execute("SELECT verdict, answer_id IS NOT NULL FROM answer_feedback ORDER BY verdict")


async def test_a_search_with_one_store_unavailable_shows_results_marked_incomplete(tabs: Tabs, site: Site) -> None:
    """The keyword half's index is closed while somebody searches."""
    index = site.library.generation.keyword_index
    await site.library.es.indices.close(index=index)
    try:
        tab = await tabs.new()
        await tab.open("?q=stash+pop+entry+apply")
        assert len(await tab.results()) > 0
        assert "Incomplete" in await tab.page.inner_text("#notices")
    finally:
        await site.library.es.indices.open(index=index)
        await site.library.es.cluster.health(index=index, wait_for_status="yellow")
