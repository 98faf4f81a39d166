"""Markdown blocks found by a pattern are those that markdown-it finds in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.core.chunking import markdown
from pipeline.core.chunking.units import Block
from tests.support.portion import portion

PIECES = [
    *(
        "word",
        "a",
        "1",
        "2.",
        "1. a\n",
        "1)",
        "foo\nbar",
        "text:\n",
        "x\n",
        "é",
        "中文",
        "\u3000",
        "\u00a0",
        "\\",
        "&amp;",
    ),
    *(" ", "  ", "    ", "\t", "\n", "\n", "\n", "\n\n", "\n\n"),
    *(
        "- a\n",
        "- a\n",
        "  - b\n",
        "    - c\n",
        "      - d\n",
        " * x\n",
        "- [ ] t\n",
        "- [l](u)\n",
        "- ",
        "* ",
        "+ ",
        "> ",
    ),
    *("  2. l\n", "   1. m\n", "   2) n\n", "10. o\n", "100. p\n", "    * q\n", "     - r\n", "   + s\n", "١. t\n"),
    *("# ", "## ", "#", "===", "---", "=", "-", "***", "**b**", "*", "_", "__x__", "# a | b\n", "{#id}"),
    *("```", "```\n", "~~~\n", "````\n", "`", "``"),
    *("|", "| a | b |\n|---|:-:|\n| 1 | 2 |\n", "| a |\n| - |\n", "| 1 | 2 |\n", "| 1 |\n", "| \\| |\n", "|---|---|\n"),
    *("<!-- ", "-->", "<div>", "</div>", "<pre>", "</pre>", "<script>", "<?", "?>"),
    *("[a]: x", "[a]", "[a](b)", ":", "(x)", '"q"', "'", "!"),
]


def by_markdown_it_alone(text: str) -> list[Block]:
    walk = markdown._Walk(text, [])
    walk._read(0, len(text), "")
    blocks = walk.blocks
    if not blocks or blocks[0].start:
        blocks.insert(0, Block(0, 8))
    return blocks


@settings(max_examples=portion(600), deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=40).map("".join))
@example("# head | er\n| - | - |\n| 1 | 2 |\n")
@example("- a\n===\n\nb\n")
@example("- a\n\n  more of it\n\nb\n")
@example("text\n~~~\n\n# no heading\n\nsince nothing closes it\n")
@example("<!--\n\n# no heading\n\n-->\n\n# a heading\n")
@example("- ```\n  code\n\nout of the list\n\n  ```\n\n# no heading\n")
@example("- a\n  2. no item under a text\n")
@example("- a\n\n  2. an item\n")
@example("1. a\n   1. b\n   2. c\n")
@example("007) a\n    * no item: neither under the text nor beside it\n")
@example("10. a\n   - b\n    - still b\n")
@example("- a\n  ١. no item: the digits of a number are ASCII\n")
def test_markdown_blocks_equal_the_blocks_of_markdown_it_for_the_whole_text(text: str) -> None:
    if not text.startswith(("---\n", "+++\n")):  # front matter is no Markdown
        assert markdown.parse(text) == by_markdown_it_alone(text)


@pytest.mark.parametrize(
    "block", ["A paragraph.\n\n", "- an item\n", "| a | b |\n", "# A title\n\n", "```\ncode\n```\n\n"]
)
def test_plain_markdown_blocks_are_recognised_without_the_full_parser(
    block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "| x | y |\n|---|---|\n" * block.startswith("|") + block * 200
    expected = by_markdown_it_alone(text)
    monkeypatch.setattr(markdown._Walk, "difficult", lambda walk, start: pytest.fail(f"parsed from {start}"))
    assert markdown.parse(text) == expected
