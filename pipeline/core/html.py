"""HTML → Markdown: what a reader of the page sees, as text."""

from __future__ import annotations

import re
from typing import Any

from bs4 import BeautifulSoup, Comment, Doctype
from bs4.element import Declaration, ProcessingInstruction, Tag
from markdownify import MarkdownConverter

_HIDDEN_TAGS = ("script", "style", "template", "noscript", "head", "svg", "iframe", "object", "embed", "canvas")
_HIDDEN_STYLE = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*hidden|font-size\s*:\s*0(?![.\d])|opacity\s*:\s*0(?![.\d])"
)
_MAX_HTML_DEPTH = 150
"""Deeper elements are flattened to their text: the Markdown converter is recursive."""


class _Converter(MarkdownConverter):
    """No images (their alternative text stays), and of links only those that lead somewhere."""

    def convert_img(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        return str(element.get("alt") or "")

    def convert_a(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        href = str(element.get("href") or "")
        if href.startswith(("http://", "https://", "mailto:")):
            return str(super().convert_a(element, text, parent_tags))  # type: ignore[misc]
        return text


def to_markdown(html: str) -> str:
    """HTML as Markdown, without what a reader does not see."""
    soup = BeautifulSoup(html, "lxml")
    for node in soup.find_all(
        string=lambda string: isinstance(string, Comment | Doctype | Declaration | ProcessingInstruction)
    ):
        node.extract()
    for element in soup.find_all(_HIDDEN_TAGS):
        element.extract()
    for element in soup.find_all(_is_hidden):
        element.extract()
    _flatten(soup)
    markdown = _Converter(
        heading_style="atx",
        bullets="-",
        escape_asterisks=False,
        escape_underscores=False,
        table_infer_header=True,
        code_language_callback=_language,
    ).convert_soup(soup)
    markdown = re.sub(r"[ \t]+$", "", str(markdown), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", markdown).strip("\n") + "\n" if markdown.strip() else ""


def _is_hidden(element: Tag) -> bool:
    if element.has_attr("hidden") or str(element.get("aria-hidden", "")).lower() == "true":
        return True
    return bool(_HIDDEN_STYLE.search(str(element.get("style", "")).lower()))


def _language(element: Tag) -> str:
    """The language of a code block from ``class="language-x"``, as most generators write it."""
    for candidate in (element, element.find("code")):
        if isinstance(candidate, Tag):
            for name in candidate.get_attribute_list("class"):
                if match := re.fullmatch(r"(?:language|lang|highlight)-([\w+#-]{1,30})", str(name)):
                    return match[1]
    return ""


def _flatten(soup: BeautifulSoup) -> None:
    """Replace what is nested too deep by its text."""
    stack: list[tuple[Any, int]] = [(soup, 0)]
    while stack:
        element, depth = stack.pop()
        if depth >= _MAX_HTML_DEPTH:
            element.string = element.get_text(" ")
            continue
        stack.extend((child, depth + 1) for child in element.children if isinstance(child, Tag))
