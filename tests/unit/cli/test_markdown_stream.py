"""An answer on a terminal: rendered Markdown, block by block, however it arrives."""

from __future__ import annotations

from io import StringIO

import pytest

from cli.console import SafeConsole
from cli.markdown_stream import MarkdownStream

ANSWER = """Undo it *before* you push:

> ```sh
> # the last commit
> git revert HEAD
> ```
>
> [1]

| Grade | Rate |
| --- | --- |
| A | 10 |

1. one

   more of one
2. two

See [the manual](https://git.example/manual) [2]."""


def shown(*pieces: str) -> str:
    file = StringIO()
    stream = MarkdownStream(SafeConsole(file=file, force_terminal=True, width=60, color_system=None, highlight=False))
    for piece in pieces:
        stream.feed(piece)
    stream.end()
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


@pytest.mark.parametrize("size", [1, 2, 7, 1_000])
def test_the_pieces_of_an_answer_make_no_difference(size: int) -> None:
    assert shown(*(ANSWER[at : at + size] for at in range(0, len(ANSWER), size))) == shown(ANSWER)


def test_code_tables_lists_and_emphasis_are_shown_as_such() -> None:
    text = shown(ANSWER)
    assert "*before*" not in text.replace("\x1b[3m", "")
    assert "```" not in text
    assert "▌  # the last commit\n▌  git revert HEAD\n" in text
    assert "Grade" in text
    assert "| ---" not in text
    assert " 1 one\n" in text
    assert "   more of one\n" in text
    assert "the manual (https://git.example/manual) [2]." in text


def test_a_block_is_printed_when_the_next_one_begins() -> None:
    file = StringIO()
    stream = MarkdownStream(SafeConsole(file=file, width=60))
    stream.feed("One.\n\n```\ncode\n\nmore\n")
    assert file.getvalue().split() == ["One."]
    stream.feed("```\n\nTwo")
    stream.feed(" words.\n\nThree")
    assert file.getvalue().split() == ["One.", "code", "more", "Two", "words."]


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert "\x1b]" not in shown("a\x1b]0;title\x07b\n\n`\x1b[31m`\n")
