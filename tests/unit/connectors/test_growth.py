"""Conversions take work, and yield text, in proportion to a document's length, whatever is repeated in it.

Work is counted in calls of functions, also of those written in C: a quadratic step at a few kilobytes is hours at a few
megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from cProfile import Profile
from typing import NamedTuple

import pytest

from connectors.confluence import markup
from connectors.extraction.titles import byline
from connectors.google_drive.content import without_pictures
from connectors.slack.content import Names, mrkdwn, tidy
from connectors.website.page import head_of
from pipeline.core.chunking import chunk
from pipeline.core.model import ChunkParams
from pipeline.core.normalise import normalise

pytestmark = pytest.mark.heavy

MOST_GROWTH = 3
"""The most that work and length may grow when a text doubles: 2 is linear, 4 quadratic."""


class Block(NamedTuple):
    """A construct: how it begins, what may be in it, and how it ends."""

    begin: str
    inner: str = ""
    end: str = ""


def tags(names: str) -> list[Block]:
    return [Block(f"<{name}>", "x", f"</{name}>") for name in names.split()]


HTML = [
    *tags("p div h1 ul ol li blockquote pre table thead tbody tr td th a code b sub dl dt dd script select svg form"),
    *(Block("<!--", "x", "-->"), Block('<a href="http://x">', "x", "</a>"), Block("<td colspan=9>", "x", "</td>")),
    *(Block("<p hidden>", "x", "</p>"), Block("<ol><li>", "x", "</li></ol>"), Block("&", "x", ";"), Block("<br>")),
    *(Block("<table><tr><td>", "x", "</td></tr></table>"), Block("\n"), Block(" "), Block("|"), Block("`")),
]
STORAGE = [
    *tags("p h1 ul ol li blockquote pre table tr td th a code em ac:link ac:link-body ac:image ac:task-list ac:task"),
    *tags("ac:task-body ac:adf-extension ac:adf-content ac:parameter ac:structured-macro ac:rich-text-body script"),
    *(Block("<![CDATA[", "x", "]]>"), Block("&", "x", ";"), Block('<td colspan="9" rowspan="9">', "x", "</td>")),
    *(Block("<ol><li>", "x", "</li></ol>"), Block("<table><tr><td>", "x", "</td></tr></table>"), Block("|")),
    *(Block('<ri:user ri:account-id="a"/>'), Block("```\n", "x", "\n"), Block("\u00a0"), Block("\n"), Block(" ")),
]
MARKDOWN = [
    *map(Block, ("# ", "- ", "1. ", "> ", "~~~\n", "`", "**", "[", "](", "[x]: ", "<", "<!--", "|", "---\n", "===\n")),
    *map(Block, ("{#", "a", " ", "\n", "\n\n", "    ", "\t", "\\", "a. ", "é", "中", "。", "a_b", "\n: ", ".. a::\n")),
    *(
        Block("```\n", "x", "\n```\n"),
        Block("| a |\n|---|\n"),
        Block("+--+\n"),
        Block("===  ===\n"),
        Block('"', "x", '",'),
    ),
    *(
        Block("<@U1", "x", ">"),
        Block("&lt;"),
        Block("![", "x", "][image1]"),
        Block("[image1]: <data:image/", "x", ">\n"),
    ),
    *(Block("{", '"a":1,', "}"), Block("[", "1,", "]"), Block("<meta ", "a=b", ">"), Block("<title>", "x", "</title>")),
]
CONTAINERS = ("<ol>", "<table>")

Pattern = Callable[[int], str]
"""Returns a text of about so many characters."""


def repeated(one: str, before: str = "", after: str = "") -> Pattern:
    return lambda characters: before + one * (characters // len(one)) + after


def nested(block: Block) -> Pattern:
    """Longer than others, so that the limits of nesting are reached: up to there each level indents those within."""
    begin, inner, end = block
    return lambda characters: repeated(begin)(2 * characters) + inner + repeated(end)(2 * characters)


def patterns(blocks: list[Block]) -> Iterator[tuple[str, Pattern]]:
    """Yield texts made of these blocks, with their names."""
    for block in blocks:
        begin, _, end = block
        yield f"{begin!r} repeated", repeated("".join(block))
        yield f"{begin!r} begun", repeated(begin)
        yield f"{begin!r} before x", repeated(begin, after="x")
        if end:
            yield f"{end!r} repeated", repeated(end)
            yield f"{begin!r} in itself", nested(block)
            yield f"{begin!r} of spaces", repeated(" ", f"{begin}x", f"x{end}")
    for outer in blocks:
        if outer.begin in CONTAINERS:
            for block in blocks:
                yield f"{outer.begin!r} of {block.begin!r}", repeated("".join(block), outer.begin, outer.end)


def work(convert: Callable[[str], int], text: str) -> tuple[int, int]:
    """Return how many functions are called, and the length of the result."""
    profile = Profile()
    length = profile.runcall(convert, text)
    return sum(entry.callcount for entry in profile.getstats()), length


def chunked(media_type: str) -> Callable[[str], int]:
    def characters(text: str) -> int:
        chunks = chunk(
            text, media_type, params=ChunkParams(), count_tokens=lambda texts: [len(text) // 4 + 1 for text in texts]
        )
        return sum(len(chunk.text) for chunk in chunks)

    return characters


def titles(text: str) -> int:
    return len(str([byline(text, f"text/{kind}") for kind in ("markdown", "x-rst", "html")]))


CONVERTERS: dict[str, tuple[Callable[[str], int], list[Block], int]] = {
    "HTML": (lambda text: len(normalise(text, "text/html")[0]), HTML, 1_500),
    "Confluence": (lambda text: len(markup.markdown(text)), STORAGE, 3_000),
    "Slack": (lambda text: len(tidy(mrkdwn(text, Names()))), MARKDOWN, 6_000),
    "pictures of Google": (lambda text: len(without_pictures(text)), MARKDOWN, 6_000),
    "titles": (titles, MARKDOWN, 6_000),
    "heads": (lambda text: len(str(head_of(text.encode(), "https://x.example", "text/html", {}))), MARKDOWN, 6_000),
    "chunks of Markdown": (chunked("text/markdown"), MARKDOWN, 6_000),
    "chunks of reStructuredText": (chunked("text/x-rst"), MARKDOWN, 6_000),
    "chunks of CSV": (chunked("text/csv"), MARKDOWN, 6_000),
    "chunks of JSON": (chunked("application/json"), MARKDOWN, 6_000),
}
"""Each has the number of characters of the shorter text, which are enough for many chunks."""


@pytest.mark.parametrize("name", CONVERTERS)
def test_work_and_length_grow_in_proportion_to_a_text(name: str) -> None:
    convert, blocks, characters = CONVERTERS[name]
    grown = []
    for pattern, text in patterns(blocks):
        small, large = (work(convert, text(size)) for size in (characters, 2 * characters))
        if any(b > MOST_GROWTH * a + 500 for a, b in zip(small, large, strict=True)):
            grown.append(f"{pattern}: {small} → {large}")
    assert not grown
