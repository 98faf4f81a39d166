"""Normalisation: idempotent, storable, nothing invisible, HTML as Markdown."""

from __future__ import annotations

import sys
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pipeline.core import normalise as rules
from pipeline.core.errors import Poison
from pipeline.core.normalise import normalise
from tests.support.portion import portion

PLAIN = "text/plain"
SCOTLAND = "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f"
awkward = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(
            "\r\n\x00\x0b\x0c\x85\u2028\u200b\u200c\u200d\ufeff\u202e\u2067\u00ad\u0301e한ᄒ\U000e0041\U0001f3f4\U000e007f\ufe0f\u212a"
        ),
    ),
    max_size=60,
)


@settings(max_examples=portion(400), deadline=None)
@given(awkward, st.sampled_from([PLAIN, "text/markdown", "text/x-penstock-messages", "text/x-python; charset=utf-8"]))
def test_normalisation_is_idempotent_and_yields_storable_text(content: str, media_type: str) -> None:
    text, kind = normalise(content, media_type)
    assert normalise(text, kind) == (text, kind)
    assert unicodedata.is_normalized("NFC", text)
    assert not any(character in text for character in "\x00\r\x0b\x0c\x85\u2028\u200b\ufeff\u202e\u2067\u00ad")
    assert text.encode().decode() == text


HTML = """<p> </p> <div> </div> <b> </b> <ul><li> </li></ul> <table><tr><td> </td></tr></table> <pre> </pre> <code>
</code> <h1> </h1> <br> <a> <a/href='https://e.org'> </a> text &lt; &#8203; &#x202e; <script>x</script> <!--c--> * _ # `
| < > é <svg> <![CDATA[ 1. --- &nbsp;"""
html_parts = st.sampled_from([*HTML.split(), "\n", " ", "   "])


@settings(max_examples=portion(200), deadline=None)
@given(st.lists(html_parts, max_size=40).map("".join))
def test_html_normalises_to_markdown_that_normalises_to_itself(html: str) -> None:
    text, kind = normalise(html, "text/html")
    assert kind == "text/markdown"
    assert normalise(text, kind) == (text, kind)
    assert "\u200b" not in text
    assert "\u202e" not in text


def test_html_conversion_keeps_structure_and_drops_hidden_content() -> None:
    html = """<!doctype html><html><head><title>no</title><style>no{}</style></head><body>
    <h2>Set up</h2><p>Run <code>make</code> &amp; wait.</p><ol><li>one<li>two</ol>
    <table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
    <pre><code class="language-python">def f():
    return 1</code></pre>
    <p hidden>no</p><p style="display: none">no</p><span aria-hidden="true">no</span><!-- no --><script>no()</script>
    <img src="x.png" alt="A diagram"> <a href="javascript:no()">link</a> <a href="https://e.org/x">other</a></body></html>"""
    text, _ = normalise(html, "text/html; charset=utf-8")
    assert "## Set up\n" in text
    assert "Run `make` & wait." in text
    assert "1. one\n2. two" in text
    assert "| a | b |\n| --- | --- |\n| 1 | 2 |" in text
    assert "```python\ndef f():\n    return 1\n```" in text
    assert "A diagram" in text
    assert "[other](https://e.org/x)" in text
    assert "no" not in text.replace("not", "")


GOOD = "https://good.example/"


def links(markdown: str) -> list[str]:
    """The targets of links and pictures, as a renderer of Markdown understands them."""
    parser = MarkdownIt("commonmark")
    parser.validateLink = lambda url: True  # type: ignore[method-assign]  # also those that it would refuse to show
    children = [child for token in parser.parse(markdown) for child in token.children or []]
    return [str(child.attrs[key]) for child in children for key in ("href", "src") if key in child.attrs]


@pytest.mark.parametrize(
    "page",
    [
        f'<a href="{GOOD})[y](javascript:x)">words</a>',
        f'<a href="{GOOD}\n\n[y](javascript:x)">words</a>',
        f"<a href=\"{GOOD} 't')[y](javascript:x)\">words</a>",
        f'<a href="{GOOD}>)[y](javascript:x)">words</a>',
        f'<a href="{GOOD}\\">words</a><a href="{GOOD}\\)[y](javascript:x">words</a>',
        f'<a href="{GOOD}`">words</a> ` <a href="{GOOD})`[y](javascript:x)">words</a>',
        f'<a href="{GOOD}?[y](javascript:x)">words</a>',
        f'<a href="{GOOD})[y](javascript:x)">{GOOD})[y](javascript:x)</a>',
        f'<a href="{GOOD}">words](javascript:x)[y</a>',
        f'<a href="{GOOD}">[words](javascript:x)</a>',
        f'<a href="{GOOD}">[words]&#8203;(javascript:x)</a>',
        f'<a href="{GOOD}">words\\](javascript:x)[y</a>',
        f'<a href="{GOOD}">words\\</a>',
        f'<a href="{GOOD}">![words](javascript:x)</a>',
        f'<a href="{GOOD}"><img alt="words](javascript:x)[y" src="x"></a>',
        f'<a href="{GOOD}"><b>[words]</b></a>',
        f'<a href="{GOOD}" title=\'x")[y](javascript:x)\'>words</a>',
        f"<a href='{GOOD}' title='x\\\\&quot;)[y](javascript:x)'>words</a>",
        f'<a href="{GOOD}" title="x\n\n[y](javascript:x)">words</a>',
        f'<table><tr><th><a href="{GOOD}|)[y](javascript:x)">words](javascript:x)|[y</a></th></tr></table>',
    ],
)
def test_a_link_of_a_page_becomes_no_other_link(page: str) -> None:
    text, kind = normalise(page, "text/html")
    targets = links(text)
    assert targets
    assert all(target.startswith(GOOD) for target in targets), text
    assert normalise(text, kind) == (text, kind)


@pytest.mark.parametrize(
    ("page", "markdown"),
    [
        (f'<a href="{GOOD}Foo_(bar)?a[]=1&amp;b=*é">[Bug] a_b</a>', f"[[Bug] a_b]({GOOD}Foo_(bar)?a[]=1&b=*é)"),
        (f'<a href="{GOOD}">{GOOD}</a>', f"<{GOOD}>"),
        (f'<a href="{GOOD}" title="A  title">a</a>', f'[a]({GOOD} "A title")'),
        (f'a<a href="{GOOD}a b "> b </a>c', f"a [b]({GOOD}a%20b) c"),
        (r'<a href="https://good.example\@evil.example\?a=\">a</a>', f"[a]({GOOD}@evil.example/?a=%5C)"),
        ('<a href="mailto:x?subject=Dear Sir">a</a>', "[a](mailto:x?subject=Dear%20Sir)"),
        (f'<a href="{GOOD}"><code>a[0](1)</code></a>', f"[`a\\[0\\](1)`]({GOOD})"),
        (f'<a href="{GOOD}"></a><code><a href="{GOOD}">a](b</a></code>', "`a](b`"),
    ],
)
def test_ordinary_links_are_written_as_they_are(page: str, markdown: str) -> None:
    assert normalise(page, "text/html") == (f"{markdown}\n", "text/markdown")


def test_of_links_in_each_other_the_inner_ones_stay() -> None:
    page = (
        f'<a href="{GOOD}1"><div>a <a href="{GOOD}2">b</a></div></a><a href="{GOOD}3"><b>c <a href="/d">d</a></b></a>'
    )
    assert normalise(page, "text/html")[0].split() == ["a", f"[b]({GOOD}2)", "[**c", f"d**]({GOOD}3)"]


def test_links_in_each_other_do_not_grow() -> None:
    """Brackets of the inner link were escaped once more at each level: 4 kB took 17 s, and were refused."""
    text, _ = normalise(f'<a href="{GOOD}"><div>' * 70 + "]" * 100, "text/html")
    assert len(text) < 500


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a\r\nb\rc\x0cd\u2028e", "a\nb\nc\nd\ne"),
        ("nul\x00 bell\x07 tab\t", "nul bell tab\t"),
        ("\ufeffcafe\u0301", "café"),
        ("pass\u200bword pass\u200dword pass\u200cword", "password password password"),
        ("ad\u202emin\u202c \u2066x\u2069", "admin x"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("क्\u200dष", "क्\u200dष"),
        ("👩\u200d👩\u200d👧 ❤\ufe0f\u200d🔥", "👩\u200d👩\u200d👧 ❤\ufe0f\u200d🔥"),
        (SCOTLAND, SCOTLAND),
        ("hi\U000e0068\U000e0069", "hi"),
        ("soft\u00adhyphen", "softhyphen"),
        ("pay\U000e00e8\U000e00e9 \ufff3\u2065\U0001d173\U0001bca0Eve\u17b5", "pay Eve"),
        ("1\ufe0f\u20e3 ©\ufe0f ∩\ufe00", "1\ufe0f\u20e3 ©\ufe0f ∩\ufe00"),
        ("葛\U000e0101飾 \u1000\ufe00", "葛\U000e0101飾 \u1000\ufe00"),
        ("ᠪᠠᠢ\u180bᠨ\u180eᠠ ᠮᠣᠩ\u180fᠭᠣᠯ", "ᠪᠠᠢ\u180bᠨ\u180eᠠ ᠮᠣᠩ\u180fᠭᠣᠯ"),
        (
            "ᄀ\u1160 \u115fᅡ \u115f\u1160ᆨ \u3164ㄱㅏ\u3164 \uffa0\uffa1",
            "ᄀ\u1160 \u115fᅡ \u115f\u1160ᆨ \u3164ㄱㅏ\u3164 \uffa0\uffa1",
        ),
    ],
)
def test_invisible_and_control_characters_are_normalised(content: str, text: str) -> None:
    assert normalise(content, PLAIN) == (text, PLAIN)


IGNORED = "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u3164\uffa0" + "".join(
    chr(n)
    for first, last in (
        (0x180B, 0x180F),
        (0x200B, 0x200F),
        (0x202A, 0x202E),
        (0x2060, 0x206F),
        (0xFE00, 0xFE0F),
        (0xFEFF, 0xFEFF),
        (0xFFF0, 0xFFFB),
        (0x1BCA0, 0x1BCA3),
        (0x1D173, 0x1D17A),
        (0xE0000, 0xE0FFF),
    )
    for n in range(first, last + 1)
)
"""Unicode's Default_Ignorable_Code_Point, and the marks of annotations."""


@pytest.mark.parametrize("word", ["payEve", "naïve", "Zürich", "ελλη", "рубль", "x\u0301y"])
def test_no_second_text_is_hidden_between_letters(word: str) -> None:
    """Selectors, and the fillers of Hangul, make an alphabet that people do not see and models read."""
    for hidden in (*IGNORED, IGNORED):
        assert normalise(hidden.join(["", *word, " ", ""]), PLAIN)[0] == f"{word} ", f"{hidden!a}"


@pytest.mark.parametrize(
    ("run", "left"),
    [
        ("\u0345\u0334" * 500_000, "\u0334" * 500_000 + "\u0345" * 500_000),
        ("\u0f73" * 500_000, "\u0f71" * 500_000 + "\u0f72" * 500_000),
        (("\u0345\u0334" * 15 + "\u200b") * 30_000, "\u0334" * 450_000 + "\u0345" * 450_000),
        ("\u0334" * 500 + "\u0345" * 500, "\u0334" * 500 + "\u0345" * 500),
    ],
    ids=["disordered", "compound", "hidden-between", "ordered"],
)
def test_a_run_of_very_many_marks_keeps_nobody_waiting(run: str, left: str) -> None:
    """Half a million, a document of a megabyte, stopped the worker for four minutes: then this test never ends."""
    text, kind = normalise(f"a{run}b", PLAIN)
    assert text == f"a{left}b"
    assert normalise(text, kind) == (text, kind)


@settings(max_examples=portion(200), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text("\u0301\u0323\u0334\u0340\u0344\u0345\u0f73\u0f81\U0001d165\U0001e000", min_size=20, max_size=80),
            st.sampled_from(["e", "\u1ead", "\u1112", "\u1161", "\u09c7\u09be", "\U0001d15e"]),
        ),
        max_size=6,
    ).map("".join)
)
def test_many_marks_are_put_into_the_order_of_unicode(text: str) -> None:
    """No document has another text or hash than before they were put into order here."""
    assert rules.nfc(text) == unicodedata.normalize("NFC", text)


def test_record_separators_are_preserved_only_in_message_texts() -> None:
    assert normalise("a\x1eb", "text/x-penstock-messages")[0] == "a\x1eb"
    assert normalise("a\x1eb", PLAIN)[0] == "ab"


def test_media_types_lose_parameters_and_case() -> None:
    assert normalise("x", "Text/Plain; charset=UTF-8")[1] == PLAIN
    assert normalise("x", "")[1] == PLAIN


def test_a_lone_surrogate_is_poison() -> None:
    with pytest.raises(Poison, match="surrogate") as caught:
        normalise("ok \ud800", PLAIN)
    assert caught.value.code == "bad_text"


def test_deeply_nested_html_is_flattened() -> None:
    started = time.monotonic()
    text, _ = normalise("<div>" * 20_000 + "<p>deep</p>" + "</div>" * 20_000, "text/html")
    assert "deep" in text
    assert time.monotonic() - started < 20


@pytest.mark.heavy
def test_the_quick_prefilter_patterns_cover_every_character_of_the_rules() -> None:
    every = [chr(n) for n in range(sys.maxunicode + 1) if not 0xD800 <= n < 0xE000]
    unusual = {c for c in every if rules._LINE_ENDS.match(c) or rules._CONTROLS.match(c)}
    assert {c for c in every if rules._UNUSUAL.match(c)} == unusual
    of_hidden = (
        rules._INVISIBLE,
        rules._TAG_CHARACTERS,
        rules._MONGOLIAN,
        rules._FILLERS,
        rules._SELECTORS_AND_JOINERS,
    )
    hidden = {c for c in every if any(rule.match(c) for rule in of_hidden)}
    assert hidden <= {c for c in every if rules._HIDDEN.match(c)}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "page",
    [
        "<ol>" + "<li>x" * 15_000,
        "a<b hidden></b>" * 40_000,
        "a<!---->" * 60_000,
        "<p>a" + " " * 200_000 + "b",
        "<pre>a" + " " * 200_000 + "b",
        "<table><thead>" + "<tr><td>x" * 6_000,
        "<table><thead><tr><td>h</thead>" + "<tbody><tr><td>x" * 5_000,
    ],
    ids=lambda page: page[:30],
)
def test_pathological_html_is_normalised_within_seconds(page: str) -> None:
    """Each took ten times this, and a hundred times as long if ten times as large: a worker was busy for hours."""
    began = time.process_time()
    normalise(page, "text/html")
    assert time.process_time() - began < 10


@pytest.mark.heavy
@pytest.mark.parametrize(
    "element",
    [
        "<b>",
        "<ol><li>x",
        *(pytest.param(e, marks=pytest.mark.slow) for e in ("<br>", "<b></", "<p>x</p>", "<p hidden>x</p>")),
    ],
)
def test_html_of_very_many_elements_is_normalised_within_seconds(element: str) -> None:
    """A page of 4 MB took a minute of a worker's processor, in which nobody's changes were seen."""
    page = (element * 1_000_000)[:4_000_000]
    began = time.process_time()
    normalise(page, "text/html")
    assert time.process_time() - began < 30


def test_html_of_very_many_elements_keeps_its_text_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.core.html._MAX_ELEMENTS", 0)
    page = """<html><head><title>no</title></head><body>intro <b>bold</b><h2>Set   up</h2><p>one<p>two<br>three
    <script>no()</script><ul><li>a</li><li>b <i>c</i></li></ul><p style="display:none">no</p>after
    <pre>def f():
    return  1</pre><table><tr><td>1</td><td>2</td></tr></table><!-- no --></body></html>"""
    lines = [line for line in normalise(page, "text/html")[0].splitlines() if line]
    code = ["```", "def f():", "    return  1", "```"]
    assert lines == ["intro bold", "## Set up", "one", "two", "three", "- a", "- b c", "after", *code, "1 2"]


@given(st.lists(html_parts, max_size=40).map("".join))
def test_html_of_very_many_elements_normalises_to_itself(html: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.core.html._MAX_ELEMENTS", 0)
        text, kind = normalise(html, "text/html")
    assert normalise(text, kind) == (text, kind)


@pytest.mark.heavy
def test_html_that_would_expand_far_beyond_its_length_is_poison() -> None:
    with pytest.raises(Poison, match="longer than"):
        normalise("<table><tr>" + "<td colspan=1000>x" * 12_000, "text/html")


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "x", "½"])
def test_invalid_numbers_in_html_attributes_are_ignored(number: str) -> None:
    page = f"<ol start='{number}'><li>one</ol><table><tr><td colspan='{number}'>two</table>"
    assert "one" in normalise(page, "text/html")[0]
