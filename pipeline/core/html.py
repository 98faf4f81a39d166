"""HTML → Markdown: what a reader of the page sees, as text.

Pages are hostile: every step takes time in proportion to the page, whatever stands in it. Elements are left out while
the page is parsed: taking one out of a tree, like some of what ``markdownify`` does, looks at all its siblings.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

from bs4 import BeautifulSoup, CData
from bs4.element import NavigableString, Tag
from lxml import etree  # type: ignore[import-untyped]
from markdownify import MarkdownConverter

from pipeline.core.errors import Poison
from pipeline.core.normalise import clean
from pipeline.core.styles import examine

_HIDDEN_TAGS = frozenset(
    {"script", "style", "template", "noscript", "noframes", "noembed", "head", "title", "datalist"}
    | {"audio", "video", "svg", "iframe", "object", "embed", "canvas"}
)
_SPACE = re.compile(r"[\t \r\n]+")
_MAX_HTML_DEPTH = 150
"""Deeper elements are flattened to their text: the Markdown converter is recursive."""
_MAX_ELEMENTS = 50_000
"""A page of more is converted in a simple way: the library takes 80 µs of processor for each, while others wait."""
_ELEMENT = re.compile(r"<[A-Za-z_:.]")
_BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "details", "div", "dl", "dt"}
    | {"fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr"}
    | {"li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "tr", "ul"}
)
"""Elements that begin a line."""
_PREFIXES = {"li": "- ", "pre": "```\n", **{f"h{n}": "#" * n + " " for n in range(1, 7)}}
_MAX_NUMBER = 999_999_999
"""The largest number of a list item in Markdown (CommonMark, "List items")."""
_MAX_COLUMNS = 1_000
"""The most columns that one cell spans in browsers (the HTML standard, "Attributes common to td and th elements")."""
_DROPPED_FROM_ADDRESSES = re.compile(r"[\t\r\n]")
"""Browsers remove these from an address (the URL standard, "basic URL parser")."""
_PLACE = re.compile(r"https?:[^?#]*", re.IGNORECASE)
"""The host and path of an address, where browsers read a backslash as a slash (the URL standard, "special scheme")."""
_NOT_IN_ADDRESSES = re.compile(r"[\x00-\x20\x7f<>\"`|\\]")
"""Characters that end the target of a link in Markdown, or begin something else that counts before it."""
_ESCAPED_IN_TITLES = re.compile(r"[\\\"`<]")
_UNSAFE_IN_LINKS = re.compile(r"\][(\[]|\\[\[\]]")
_ESCAPED_IN_LINKS = re.compile(r"\\(?!\|)|[\[\]]")
"""A backslash before a bar is our own, in a table."""
MAX_MARKDOWN = 16 * 1024**2
"""Characters. Quotations in quotations and cells of many columns grow: four times the most that a page may have."""


class _Visible(BeautifulSoup):
    """A page without what its reader does not see: hidden elements, comments, declarations."""

    def __init__(self, html: str) -> None:
        self._hidden = 0
        """Open elements that are not kept, because the outermost of them is hidden."""
        self._flattened = 0
        """Open elements that are not kept, because they are too deep; their text is."""
        self._preformatted = 0
        self._tiny = [False]
        """Whether the letters are too small to be seen, outside of all elements and in each open one that is not
        hidden."""
        super().__init__(html, "lxml")

    def reset(self) -> None:
        self._hidden = self._flattened = self._preformatted = 0
        self._tiny = [False]
        super().reset()

    def handle_starttag(self, name: str, namespace: Any, nsprefix: Any, attrs: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, tiny = (True, None) if self._hidden else _seen(name, attrs)
        if hidden:
            self.endData()
            self._hidden += 1
            return None
        self._tiny.append(self._tiny[-1] if tiny is None else tiny)
        if len(self.tagStack) > _MAX_HTML_DEPTH:
            self.handle_data(" ")
            self._flattened += 1
            return None
        tag = super().handle_starttag(name, namespace, nsprefix, attrs, *args, **kwargs)
        self._preformatted += name == "pre"
        return tag

    def handle_endtag(self, name: str, nsprefix: str | None = None) -> None:
        if self._hidden:
            self.current_data = []
            self._hidden -= 1
            return
        if self._flattened:
            self.handle_data(" ")
            self._flattened -= 1
        else:
            super().handle_endtag(name, nsprefix)
            self._preformatted -= name == "pre"
        if len(self._tiny) > 1:
            self._tiny.pop()

    def handle_data(self, data: str) -> None:
        if not self._tiny[-1]:
            super().handle_data(data)

    def endData(self, containerClass: Any = None) -> None:
        if self._hidden or containerClass not in (None, NavigableString, CData):
            self.current_data = []
        elif self.current_data and not self._preformatted:
            self.current_data = [_SPACE.sub(_one_space, "".join(self.current_data))]
        super().endData(containerClass)


def _one_space(match: re.Match[str]) -> str:
    """Return what a run of white space becomes, as the converter would, which takes the square of the run's length."""
    return "\n" if "\n" in match[0] or "\r" in match[0] else " "


def _seen(name: str, attributes: Any) -> tuple[bool, bool | None]:
    """As ``examine``: whether an element is hidden, and whether its letters are tiny."""
    if name in _HIDDEN_TAGS or "hidden" in attributes or str(attributes.get("aria-hidden", "")).lower() == "true":
        return True, None
    return examine(str(attributes.get("style", "")))


class LinearConverter(MarkdownConverter):
    """The library's conversion, with lists in time proportional to their items, and links that end where they end in
    the page."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._autolinks = bool(options.get("autolinks", True))
        self._items: Counter[int] = Counter()
        """The items so far of each list that is being converted, by its element's identity."""

    def convert_a(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        """Nothing in a text, a target or a title becomes another link: the library writes them as they are. Invisible
        characters are removed first, because brackets between which one stood would meet later."""
        stated, words = str(element.get("href") or ""), clean(text).strip()
        if "_noformat" in parent_tags or not stated:
            return text
        if not words:
            return ""
        if element.find(self._is_link) is not None:
            return text  # Markdown, like browsers, has no link in a link; escaped ones would double at every level
        target, title = _link_target(stated), " ".join(clean(str(element.get("title") or "")).split())
        before, after = " " * text.startswith(" "), " " * text.endswith(" ")
        if self._autolinks and words == stated == target and not title:
            return f"{before}<{target}>{after}"
        if title:
            target += ' "' + _ESCAPED_IN_TITLES.sub(r"\\\g<0>", title) + '"'
        return f"{before}[{_link_text(words)}]({target}){after}"

    def _is_link(self, element: Tag) -> bool:
        return element.name == "a" and bool(element.get("href"))

    def convert_li(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        """Numbered by counting; the library counts the items before each anew."""
        bullet = "- "
        if (parent := element.parent) is not None and parent.name == "ol":
            bullet = f"{_number(parent.get('start'), 1, _MAX_NUMBER) + self._items[id(parent)]}. "
            self._items[id(parent)] += 1
        text = text.strip()
        if not text:
            return "\n"
        indented = "\n".join(" " * len(bullet) + line if line else "" for line in text.split("\n"))
        return f"{bullet}{indented[len(bullet) :]}\n"


class _PageConverter(LinearConverter):
    """No images (their alternative text stays), and of links only those that lead somewhere."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._with_head: dict[int, bool] = {}
        """Tables that have a ``thead``, by their element's identity."""

    def process_tag(self, node: Tag, parent_tags: set[str] | None = None) -> str:
        text = str(super().process_tag(node, parent_tags))  # type: ignore[misc]
        if len(text) > MAX_MARKDOWN:
            raise Poison("too_large", f"as Markdown it is longer than {MAX_MARKDOWN:,} characters: split it")
        return text

    def convert_img(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        return str(element.get("alt") or "")

    def _is_link(self, element: Tag) -> bool:
        return element.name == "a" and str(element.get("href") or "").startswith(("http://", "https://", "mailto:"))

    def convert_a(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        return super().convert_a(element, text, parent_tags) if self._is_link(element) else text

    def convert_pre(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        if not text:
            return ""
        start = text[: len(text) - len(text.lstrip(" \n"))]
        return f"\n\n```{_language(element)}\n{text[start.rfind(chr(10)) + 1 :].rstrip(' ' + chr(10))}\n```\n\n"

    def convert_td(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        return " " + text.strip().replace("\n", " ") + " |" * _columns(element)

    convert_th = convert_td

    def convert_tr(self, element: Tag, text: str, parent_tags: set[str]) -> str:
        """A table's first row is its head, unless a ``thead`` says otherwise."""
        row = f"|{text}\n"
        if element.find_previous_sibling() is not None:
            return row
        cells = element.find_all(["td", "th"])
        columns = sum(map(_columns, cells))
        rule = "| " + " | ".join(["---"] * columns) + " |\n"
        parent = element.parent
        if parent is None or parent.name != "tbody" or not self._has_head(parent.parent):
            return row + rule
        if all(cell.name == "th" for cell in cells):
            return row + rule
        if parent.find_previous_sibling() is None:  # its head comes later
            return "| " + " | ".join([""] * columns) + " |\n" + rule + row
        return row

    def _has_head(self, table: Tag | None) -> bool:
        if table is None:
            return False
        if (known := self._with_head.get(id(table))) is None:
            known = self._with_head[id(table)] = table.find("thead") is not None
        return known


def _link_target(address: str) -> str:
    """Return an address as the target of a link in Markdown: a browser follows it to the same place."""
    address = clean(_DROPPED_FROM_ADDRESSES.sub("", address)).strip()
    if place := _PLACE.match(address):
        address = place[0].replace("\\", "/") + address[place.end() :]
    address = _NOT_IN_ADDRESSES.sub(lambda match: f"%{ord(match[0]):02X}", address)
    if "](" in address:
        address = address.replace("[", "%5B").replace("]", "%5D")
    if not _is_balanced(address, "(", ")"):
        address = address.replace("(", "%28").replace(")", "%29")
    return address


def _link_text(words: str) -> str:
    """Escape brackets that would end the text of a link, or be one within it."""
    if _UNSAFE_IN_LINKS.search(words) or not _is_balanced(words, "[", "]"):
        return _ESCAPED_IN_LINKS.sub(r"\\\g<0>", words)
    ending = len(words) - len(words.rstrip("\\"))
    return words + "\\" * (ending % 2)


def _is_balanced(text: str, opening: str, closing: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == opening) - (character == closing)
        if depth < 0:
            return False
    return depth == 0


def _columns(cell: Tag) -> int:
    return max(1, _number(cell.get("colspan"), 1, _MAX_COLUMNS))


def _number(value: Any, default: int, most: int) -> int:
    """The number in an attribute, at most ``most``; the default when it holds none."""
    text = str(value or "")
    return min(int(text[:20]), most) if text.isascii() and text.isdigit() else default


def to_markdown(html: str) -> str:
    """HTML as Markdown, without what a reader does not see. Raises Poison."""
    if any(islice(_ELEMENT.finditer(html), _MAX_ELEMENTS, None)):
        parser = etree.HTMLParser(target=_Lines(), encoding="utf-8")
        parser.feed(html.encode())
        markdown = parser.close()
    else:
        markdown = _PageConverter(
            heading_style="atx", escape_asterisks=False, escape_underscores=False, table_infer_header=True
        ).convert_soup(_Visible(html))
    markdown = "\n".join(line.rstrip(" \t") for line in markdown.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", markdown).strip("\n") + "\n" if markdown.strip() else ""


class _Lines:
    """Receives a page of any number of elements from the parser: a line for each block, with marks of headings, list
    items and code blocks."""

    def __init__(self) -> None:
        self._parts = [""]
        self._hidden = 0
        """Open elements, beginning with the outermost hidden one."""
        self._preformatted = 0
        self._tiny = [False]

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        hidden, tiny = (True, None) if self._hidden else _seen(name, attributes)
        if hidden:
            self._hidden += 1
            return
        self._tiny.append(self._tiny[-1] if tiny is None else tiny)
        if name in _BLOCKS:
            self._parts.append(f"\n{_PREFIXES.get(name, '')}")
            self._preformatted += name == "pre"
        elif name in ("td", "th") and not self._at_start():
            self._parts.append(" ")

    def end(self, name: str) -> None:
        if self._hidden:
            self._hidden -= 1
            return
        if len(self._tiny) > 1:
            self._tiny.pop()
        if name in _BLOCKS:
            self._parts.append("\n```\n" if name == "pre" else "\n")
            self._preformatted -= name == "pre"

    def data(self, text: str) -> None:
        if self._hidden or self._tiny[-1]:
            return
        if not self._preformatted:
            text = _SPACE.sub(" ", text)
            if self._at_start():
                text = text.removeprefix(" ")
        if text:
            self._parts.append(text)

    def _at_start(self) -> bool:
        return not self._parts[-1] or self._parts[-1].endswith(("\n", " "))

    def close(self) -> str:
        return "".join(self._parts)


def _language(element: Tag) -> str:
    """The language of a code block from ``class="language-x"``, as most generators write it."""
    for candidate in (element, element.find("code")):
        if isinstance(candidate, Tag):
            for name in candidate.get_attribute_list("class"):
                if match := re.fullmatch(r"(?:language|lang|highlight)-([\w+#-]{1,30})", str(name)):
                    return match[1]
    return ""
