"""Storage format → plain HTML → Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape

from bs4 import BeautifulSoup
from bs4.element import Tag
from markdownify import MarkdownConverter

from connectors.confluence import macros, tables
from connectors.confluence.storage import Element, attribute, child, name, read, text_of

MAX_DEPTH = 80
"""What is nested deeper is taken as text: nobody wrote it by hand, and Python's stack is finite."""
INLINE = frozenset({"a", "b", "strong", "i", "em", "code", "del", "s"})
BLOCKS = frozenset({"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr"})
DROPPED = frozenset({"script", "style", "head", "ac:parameter", "ac:placeholder", "ac:adf-attribute", "ac:task-id",
                     "ac:task-uuid", "ac:task-status", "title"})  # fmt: skip
LINKS = ("http://", "https://", "mailto:")
FENCE = re.compile(r"`{3,}")
GAPS = re.compile(r"\n{3,}")
INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")


def markdown(storage: str, names: Mapping[str, str] = {}) -> str:
    """names: display name by account id, user key or username, of ``storage.users``. Empty when there is no text."""
    if not storage.strip():
        return ""
    body = _Renderer(names).children(read(storage), 0)
    soup = BeautifulSoup(f"<html><body>{body}</body></html>", "lxml")
    text = _Markdown(
        heading_style="ATX", bullets="-", escape_asterisks=False, escape_underscores=False, escape_misc=False,
        autolinks=False, table_infer_header=False, newline_style="backslash",
    ).convert_soup(soup)  # fmt: skip
    return _tidy(text)


class _Markdown(MarkdownConverter):
    """Fences longer than any in the text, and naming the language; the rest is the library's."""

    def convert_pre(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        code = el.get_text().strip("\n")
        if not code.strip():
            return ""
        longest = max((len(found) for found in FENCE.findall(code)), default=2)
        fence = "`" * max(3, longest + 1)
        return f"\n\n{fence}{el.get('data-language') or ''}\n{code}\n{fence}\n\n"

    def convert_br(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        return " " if "_inline" in parent_tags or "td" in parent_tags or "th" in parent_tags else "\n"


class _Renderer:
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def children(self, element: Element, depth: int) -> str:
        parts = [escape(element.text or "", quote=False)]
        for one in element:
            parts += [self.element(one, depth + 1), escape(one.tail or "", quote=False)]
        return "".join(parts)

    def element(self, element: Element, depth: int) -> str:
        tag = name(element)
        if not tag or tag in DROPPED:
            return ""
        if depth > MAX_DEPTH:
            return escape(_flat(element), quote=False)
        if tag == "ac:structured-macro" or tag == "ac:macro":
            return self.macro(element, depth)
        if tag == "table":
            return tables.to_html(tables.grid(element, lambda cell: self.cell(cell, depth + 1)))
        if special := SPECIAL.get(tag):
            return special(self, element, depth)
        inside = self.children(element, depth)
        if tag == "a":
            href = attribute(element, "href")
            return f'<a href="{escape(href)}">{inside}</a>' if href.lower().startswith(LINKS) else inside
        if tag in INLINE or tag in BLOCKS:
            return f"<{tag}>{inside}</{tag}>"
        if tag in (
            "ac:layout",
            "ac:layout-section",
            "ac:layout-cell",
            "ac:rich-text-body",
            "section",
            "dl",
            "dd",
            "dt",
        ):
            return f"<div>{inside}</div>"
        return inside

    def macro(self, element: Element, depth: int) -> str:
        kind = attribute(element, "ac:name")
        if shown := macros.SHOWN.get(kind):
            return escape(macros.parameter(element, shown))
        title = macros.title(element)
        above = f"<p><strong>{escape(title)}</strong></p>" if title else ""
        rich, plain = child(element, "ac:rich-text-body"), child(element, "ac:plain-text-body")
        if rich is not None:
            return f"<div>{above}{self.children(rich, depth)}</div>"
        if plain is not None:
            return f'{above}<pre data-language="{escape(macros.language(element))}">{escape(text_of(plain))}</pre>'
        return escape(macros.file_shown(element))

    def link(self, element: Element, depth: int) -> str:
        for body in ("ac:link-body", "ac:plain-text-link-body"):
            found = child(element, body)
            if found is not None and (text := self.children(found, depth)).strip():
                return text
        return escape(macros.target(element, self.names))

    def image(self, element: Element, depth: int) -> str:
        caption = child(element, "ac:caption")
        parts = (escape(macros.picture(element)), "" if caption is None else self.children(caption, depth))
        return " ".join(filter(None, parts))

    def preformatted(self, element: Element, depth: int) -> str:
        return f"<pre>{escape(text_of(element))}</pre>"

    def task(self, element: Element, depth: int) -> str:
        body = child(element, "ac:task-body")
        return f"<li>[{_mark(element)}] {'' if body is None else self.children(body, depth)}</li>"

    def extension(self, element: Element, depth: int) -> str:
        return "".join(f"<div>{self.children(one, depth)}</div>" for one in _adf(element))

    def cell(self, element: Element, depth: int) -> str:
        """Inline, for a Markdown table has one line a row: blocks are parted by spaces, items by bullets."""
        parts = [_piped(element.text or "")]
        for one in element:
            parts += [self.within(one, depth + 1), _piped(one.tail or "")]
        return "".join(parts)

    def within(self, element: Element, depth: int) -> str:
        tag = name(element)
        if tag in DROPPED or not tag:
            return ""
        if depth > MAX_DEPTH:
            return _piped(_flat(element))
        if tag in ("ac:structured-macro", "ac:macro"):
            rich, plain = child(element, "ac:rich-text-body"), child(element, "ac:plain-text-body")
            if rich is not None:
                return f" {_piped(macros.title(element))} {self.cell(rich, depth)} "
            if plain is not None:
                return f" <code>{_piped(' '.join(text_of(plain).split()))}</code> "
            return self.macro(element, depth).replace("|", "\\|")
        if tag == "table":
            rows = tables.grid(element, lambda cell: self.cell(cell, depth + 1))
            return " " + "; ".join(", ".join(cell.html.strip() for cell in row) for row in rows) + " "
        if tag == "ac:adf-extension":
            return " ".join(self.cell(one, depth) for one in _adf(element))
        if tag == "pre":
            return f" <code>{_piped(' '.join(text_of(element).split()))}</code> "
        if tag == "ac:task":
            body = child(element, "ac:task-body")
            return f" [{_mark(element)}] {'' if body is None else self.cell(body, depth)} "
        if tag != "ac:task-list" and (special := SPECIAL.get(tag)):
            return special(self, element, depth).replace("|", "\\|")
        inside = self.cell(element, depth)
        if tag == "li":
            return f" • {inside.strip()} "
        if tag == "a":
            href = attribute(element, "href")
            return f'<a href="{escape(href)}">{inside}</a>' if href.lower().startswith(LINKS) else inside
        return f"<{tag}>{inside}</{tag}>" if tag in INLINE else f" {inside} " if ":" not in tag else inside


SPECIAL: Mapping[str, Callable[[_Renderer, Element, int], str]] = {
    "ac:link": _Renderer.link,
    "ac:image": _Renderer.image,
    "img": lambda self, element, depth: escape(attribute(element, "alt")),
    "ac:emoticon": lambda self, element, depth: escape(macros.emoticon(element)),
    "ri:user": lambda self, element, depth: escape(macros.person(element, self.names)),
    "ac:task-list": lambda self, element, depth: f"<ul>{self.children(element, depth)}</ul>",
    "ac:task": _Renderer.task,
    "ac:adf-extension": _Renderer.extension,
    "pre": _Renderer.preformatted,
    "br": lambda self, element, depth: "<br>",
    "time": lambda self, element, depth: escape(text_of(element).strip() or attribute(element, "datetime")),
}


def _piped(text: str) -> str:
    return escape(text, quote=False).replace("|", "\\|")


def _mark(task: Element) -> str:
    return "x" if text_of(child(task, "ac:task-status")).strip() == "complete" else " "


def _adf(extension: Element) -> list[Element]:
    """What the new editor knows and storage does not: its contents, or what stands in for them, never both."""
    found: list[Element] = []
    for wanted in ("ac:adf-content", "ac:adf-fallback"):
        some = [one for one in extension.iter() if name(one) == wanted]
        inner = {below for one in some for below in one.iterdescendants()}
        found = found or [one for one in some if one not in inner]
    return found


def _flat(element: Element) -> str:
    """The text below without what is never shown, and without recursion."""
    hidden = {one for found in element.iter() if name(found) in DROPPED for one in found.iter()}
    parts = []
    for one in element.iter():
        if one not in hidden:
            parts.append(one.text or "")
        if one is not element and (one not in hidden or name(one) in DROPPED):
            parts.append(one.tail or "")
    return " ".join(" ".join(parts).split())


def _tidy(text: str) -> str:
    """No runs of empty lines but within code, no soft hyphens and zero-width characters."""
    parts = re.split(r"(^(`{3,})[^\n]*\n.*?^\2$)", INVISIBLE.sub("", text), flags=re.DOTALL | re.MULTILINE)
    kept = [part for n, part in enumerate(parts) if n % 3 != 2]
    tidied = [part if n % 2 else GAPS.sub("\n\n", re.sub(r"[ \t\u00a0]+\n", "\n", part)) for n, part in enumerate(kept)]
    return "".join(tidied).strip()
