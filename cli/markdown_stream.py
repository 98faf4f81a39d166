"""Renders Markdown on a terminal while it is being written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markdown_it import MarkdownIt
from rich.console import Console
from rich.markdown import Markdown

from cli.output import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterator


class MarkdownStream:
    """Prints each block (paragraph, list, table, quotation, block of code) as soon as the next one begins.

    Links are printed with their addresses, because what a terminal hides cannot be checked.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        """The text that is not printed yet."""
        self._is_first = True

    def feed(self, piece: str) -> None:
        self._text += printable_text(piece)
        if "\n" in piece:
            *complete, self._text = _blocks(self._text)
            self._print(complete)

    def end(self) -> None:
        blocks, self._text = list(_blocks(self._text)), ""
        self._print(blocks)

    def _print(self, blocks: list[str]) -> None:
        for block in blocks:
            if not block.strip():
                continue
            if not self._is_first:
                self._console.print()
            self._is_first = False
            self._console.print(Markdown(block, code_theme="ansi_dark", hyperlinks=False))


def _blocks(text: str) -> Iterator[str]:
    """The blocks of a text, which are together the text. There is at least one."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    lines = text.splitlines(keepends=True)
    starts = sorted({token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0})
    for start, end in zip([0, *starts[1:]], [*starts[1:], len(lines)], strict=True):
        yield "".join(lines[start:end])
