"""Confluence's storage format as Markdown.

https://confluence.atlassian.com/doc/confluence-storage-format-790796544.html. Namespaced XHTML becomes a tree whose
names are ``ac:link``, ``p``, ``ri:user``. It is read as XML; where it is not well-formed (old migrations, apps that
write by hand) as HTML, which loses only structure. Parameters of macros are settings and may be passwords, so only
those listed here are shown. Tables with merged cells become a full grid: a merged cell's text is repeated in every
position that it covers, so that each row can be read alone, as a chunk will be.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import TypeAlias

from bs4 import BeautifulSoup
from bs4.element import NavigableString, Tag
from lxml import etree, html  # type: ignore[import-untyped]

from connectors.references import without_long_numbers
from pipeline.core.html import LinearConverter

NAMESPACES = {
    "ac": "http://atlassian.com/content",
    "ri": "http://atlassian.com/resource/identifier",
    "at": "http://atlassian.com/template",
}
PREFIXES = {uri: prefix for prefix, uri in NAMESPACES.items()}
ROOT = "storage-format"
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
CDATA = re.compile(r"<!\[CDATA\[(.*?)(?:\]\]>|\Z)", re.DOTALL)
NAMED_ENTITY = re.compile(r"&(?!(?:amp|lt|gt|quot|apos);)([A-Za-z][A-Za-z0-9]*);")
BARE_AMPERSAND = re.compile(r"&(?!(?:[A-Za-z][A-Za-z0-9]*|#[0-9]+|#x[0-9A-Fa-f]+);)")
PARAMETER = re.compile(r"<ac:parameter\b(?:[^<]|<(?!/?ac:parameter\b))*+</ac:parameter\s*>")
"""One without another in it: from each of many that are never closed, a search for the end would read the whole
page."""
TAG = re.compile(r"<[^<>]*>")
RAW_TEXT = re.compile(r"</?(?:script|style|textarea|title|xmp|iframe|plaintext|noscript)\b[^<>]*>", re.IGNORECASE)
"""HTML reads everything inside these as text, so one that is never closed would hide the rest of the page."""
SELF_CLOSED = re.compile(r"""<([A-Za-z]+:[\w.-]+)((?:"[^"]*"|'[^']*'|[^'"<>])*?)/>""")

MAX_TAGS = 300_000
"""A page of more is read without its markup: an element takes a kilobyte of memory, and twenty microseconds."""
MAX_ATTRIBUTES = 500
"""A page with an element of more is read without its markup, if it is read as HTML: the library looks at all attributes
before each."""

Element: TypeAlias = etree._Element


def parse(storage: str) -> Element:
    """Parse storage format; never raises. Entities that a document declares are not expanded, and nothing is loaded."""
    text = _prepare(storage)
    if text.count("<") > MAX_TAGS:
        return _without_markup(text)
    spaces = " ".join(f'xmlns:{prefix}="{uri}"' for prefix, uri in NAMESPACES.items())
    strict = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, remove_comments=True, remove_pis=True
    )
    try:
        return etree.fromstring(f"<{ROOT} {spaces}>{text}</{ROOT}>", strict)
    except etree.XMLSyntaxError:
        pass
    text = SELF_CLOSED.sub(r"<\1\2></\1>", RAW_TEXT.sub("", text))
    tree = _parse_html(text)
    return tree if text_of(tree).strip() else _without_markup(text)  # nested too deeply for the parser


def _without_markup(text: str) -> Element:
    bare = etree.Element(ROOT)
    bare.text = unescape(without_long_numbers(TAG.sub(" ", PARAMETER.sub(" ", text))))
    return bare


class _Counting:
    """Receives a page from the parser, and keeps nothing of it."""

    def __init__(self) -> None:
        self.most = 0
        """The attributes of the element that has most."""

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        self.most = max(self.most, len(attributes))

    def end(self, name: str) -> None: ...

    def close(self) -> int:
        return self.most


def _most_attributes(text: str) -> int:
    parser = etree.HTMLParser(target=_Counting(), no_network=True, huge_tree=True)
    return int(etree.fromstring(f"<html><body><div>{text}</div></body></html>", parser))


def _parse_html(text: str) -> Element:
    if _most_attributes(text) > MAX_ATTRIBUTES:
        return _without_markup(text)
    lenient = html.HTMLParser(no_network=True, remove_comments=True, remove_pis=True, huge_tree=True)
    return html.document_fromstring(f"<html><body><div>{text}</div></body></html>", parser=lenient)


def name(element: Element) -> str:
    """Return the qualified name in lower case, such as ``ac:link`` or ``td``, for either parser."""
    return _qualified(element.tag)


def attribute(element: Element, qualified: str) -> str:
    """Return the value of an attribute such as ``ac:name``, or an empty text."""
    for key, value in element.attrib.items():
        if _qualified(key) == qualified:
            return str(value).strip()
    return ""


def child(element: Element, qualified: str) -> Element | None:
    return next((part for part in element if name(part) == qualified), None)


def text_of(element: Element | None) -> str:
    """Return all text inside an element, unchanged."""
    return "" if element is None else "".join(str(part) for part in element.itertext())


def users(storage: str) -> set[str]:
    """Return the account ids, user keys and usernames of everybody who is mentioned, so that their display names can be
    read before conversion."""
    if "ri:user" not in storage:
        return set()
    return {id_ for element in _all(parse(storage)) if name(element) == "ri:user" and (id_ := user(element))}


def user(element: Element) -> str:
    """Return the account id, user key or username in a ``ri:user``."""
    return next(filter(None, (attribute(element, f"ri:{key}") for key in ("account-id", "userkey", "username"))), "")


def _all(root: Element) -> Iterator[Element]:
    return (element for element in root.iter() if isinstance(element.tag, str))


def _qualified(tag: object) -> str:
    if not isinstance(tag, str):
        return ""
    if tag.startswith("{"):
        uri, _, local = tag[1:].partition("}")
        prefix = PREFIXES.get(uri)
        return f"{prefix}:{local}".lower() if prefix else local.lower()
    return tag.lower()


def _prepare(storage: str) -> str:
    """Replace CDATA by escaped text, and HTML's named entities, of which XML knows only five, by their characters."""
    parts, at = [], 0
    text = CONTROLS.sub("", storage)
    for match in CDATA.finditer(text):
        parts += [_replace_entities(text[at : match.start()]), escape(match.group(1), quote=False)]
        at = match.end()
    return "".join([*parts, _replace_entities(text[at:])])


def _replace_entities(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        text = unescape(match.group())
        return f"&amp;{match.group(1)};" if text == match.group() else escape(text, quote=False)

    return NAMED_ENTITY.sub(character, BARE_AMPERSAND.sub("&amp;", text))


DEFAULT_TITLES = {
    "info": "Info",
    "note": "Note",
    "warning": "Warning",
    "tip": "Tip",
    "panel": "",
    "expand": "",
    "details": "",
    "excerpt": "",
}
"""Macro → the title of its body where it has none of its own."""
TITLED_MACROS = frozenset({"code", "noformat", "info", "note", "warning", "tip", "panel", "expand"})
TEXT_PARAMETERS = {
    "status": ("title",),
    "jira": ("key",),
    "jiraissues": ("key",),
    "drawio": ("diagramDisplayName", "diagramName"),
    "gliffy": ("name",),
    "easy-math-block": ("body",),
    "eazy-math-inline": ("body",),
}
"""Macro → the parameters of which the first that is there holds its text (``eazy`` is its vendor's spelling)."""
REFERENCE_MACROS = frozenset(
    {
        "view-file",
        "viewpdf",
        "viewdoc",
        "viewxls",
        "viewppt",
        "multimedia",
        "attachments",
        "include",
        "excerpt-include",
        "profile",
    }
)
"""Macros that display a file, another page or a person, which is named: the text of a file or page is read there."""
LANGUAGES = {
    "c#": "csharp",
    "c++": "cpp",
    "html/xml": "xml",
    "none": "",
    "plain": "",
    "text": "",
    "py": "python",
    "js": "javascript",
    "shell": "bash",
    "sh": "bash",
    "yml": "yaml",
}
EMOTICONS = {
    "smile": "🙂",
    "sad": "🙁",
    "cheeky": "😛",
    "laugh": "😀",
    "wink": "😉",
    "thumbs-up": "👍",
    "thumbs-down": "👎",
    "information": "ℹ️",
    "tick": "✅",
    "cross": "❌",
    "warning": "⚠️",
    "plus": "➕",
    "minus": "➖",
    "question": "❓",
    "light-on": "💡",
    "light-off": "💡",
    "yellow-star": "⭐",
    "red-star": "⭐",
    "green-star": "⭐",
    "blue-star": "⭐",
    "heart": "❤️",
    "broken-heart": "💔",
}
"""https://confluence.atlassian.com/doc/confluence-storage-format-790796544.html, “Emoticons”."""


def parameter(macro: Element, key: str) -> str:
    for element in macro:
        if name(element) == "ac:parameter" and attribute(element, "ac:name") == key:
            return text_of(element).strip()
    return ""


def macro_title(macro: Element) -> str:
    kind = attribute(macro, "ac:name")
    return (parameter(macro, "title") if kind in TITLED_MACROS else "") or DEFAULT_TITLES.get(kind, "")


def language(macro: Element) -> str:
    label = (parameter(macro, "language") or parameter(macro, "lang")).lower()
    fence_label = LANGUAGES.get(label, label)
    return fence_label if all(char.isalnum() or char in "-_+" for char in fence_label) else ""


def reference(macro: Element, names: Mapping[str, str]) -> str:
    """Return the name of the attachment, page or person that a macro displays. ``names`` holds display names by user
    id."""
    if attribute(macro, "ac:name") not in REFERENCE_MACROS:
        return ""
    parameters = (element for element in macro if name(element) == "ac:parameter")
    return next(filter(None, (link_target(element, names) for element in parameters)), "")


def emoticon(element: Element) -> str:
    fallback = attribute(element, "ac:emoji-fallback")
    known = EMOTICONS.get(attribute(element, "ac:name"), "")
    return fallback if fallback and not fallback.startswith(":") else known or fallback


TARGETS = {
    "ri:page": "ri:content-title",
    "ri:blog-post": "ri:content-title",
    "ri:attachment": "ri:filename",
    "ri:shortcut": "ri:parameter",
    "ri:space": "ri:space-key",
}
"""Element → the attribute that names what a link leads to."""
LINK_BODIES = ("ac:link-body", "ac:plain-text-link-body")


def link_target(link: Element, names: Mapping[str, str]) -> str:
    """Return the name of a link's target. ``names`` holds display names by user id."""
    pending = [link]
    while pending:
        element = pending.pop()
        kind = name(element)
        if kind in LINK_BODIES:  # it names no target, and may hold all of the page, in links within links
            continue
        if kind == "ri:user":
            return mention(element, names)
        if text := attribute(element, TARGETS[kind]) if kind in TARGETS else "":
            return text
        pending += reversed(element)
    return attribute(link, "ac:anchor")


def mention(element: Element, names: Mapping[str, str]) -> str:
    """Return ``@`` and the display name. A person without one is ``@unknown``, because an id would only add noise to
    search."""
    keys = (attribute(element, f"ri:{key}") for key in ("account-id", "userkey", "username"))
    display_name = next((names[key] for key in keys if key in names), "") or attribute(element, "ri:username")
    return f"@{display_name}" if display_name else "@unknown"


def picture_label(element: Element) -> str:
    """Return a picture's alternative text, its title or the name of its file."""
    for key in ("ac:alt", "ac:title"):
        if text := attribute(element, key):
            return text
    for resource in element:
        if name(resource) == "ri:attachment":
            return attribute(resource, "ri:filename")
        if name(resource) == "ri:url":
            return attribute(resource, "ri:value").partition("?")[0].rstrip("/").rpartition("/")[2]
    return ""


MAX_SPAN, MAX_CELLS = 200, 20_000
"""Columns or rows of one span; and cells of one document that are repeated, or that make rows equally long. A span
beyond either, a mistake or an attack, counts as 1."""
MAX_REPEATED_CHARACTERS = 1_000_000
"""The characters of one document that spans repeat. A span beyond that counts as 1."""


@dataclass(slots=True)
class Room:
    """How much a document may still take beyond its own markup, with all of its tables, macros and comments: a cell
    takes a kilobyte of memory, and a table of 20,000 has one kilobyte of markup."""

    cells: int = MAX_CELLS
    characters: int = MAX_REPEATED_CHARACTERS
    tags: int = MAX_TAGS
    """Tags in ``html`` macros, whose bodies are texts in the markup of the page."""


@dataclass(frozen=True, slots=True)
class Cell:
    html: str
    header: bool


Grid = Sequence[Sequence[Cell]]


def grid(table: Element, content: Callable[[Element], str], room: Room) -> Grid:
    """Return a table as rows of equal length, with merged cells repeated; of different lengths, if it is a mistake or
    an attack: ten thousand rows of one cell below one of ten thousand. ``content`` renders a cell as inline HTML."""
    rows: list[dict[int, Cell]] = []
    covered: dict[tuple[int, int], Cell] = {}
    for y, row in enumerate(_rows(table)):
        placed: dict[int, Cell] = {}
        x = 0
        for element in row:
            if name(element) not in ("td", "th"):
                continue
            while (y, x) in covered:
                placed[x] = covered.pop((y, x))
                x += 1
            cell = Cell(content(element), name(element) == "th")
            width, height = _span(element, "colspan"), _span(element, "rowspan")
            more = width * height - 1
            if more > room.cells or more * len(cell.html) > room.characters:
                width, height, more = 1, 1, 0
            room.cells -= more
            room.characters -= more * len(cell.html)
            for dx in range(width):
                placed[x + dx] = cell
                for dy in range(1, height):
                    covered[(y + dy, x + dx)] = cell
            x += width
        placed |= {at: covered.pop((y, at)) for (row_y, at) in list(covered) if row_y == y}
        rows.append(placed)
    empty = Cell("", False)
    columns = max((max(row, default=-1) + 1 for row in rows), default=0)
    rows = [row for row in rows if row]
    lacking = columns * len(rows) - sum(map(len, rows))
    if lacking > room.cells:
        return [[row[x] for x in sorted(row)] for row in rows]
    room.cells -= lacking
    return [[row.get(x, empty) for x in range(columns)] for row in rows]


def to_html(cells: Grid) -> str:
    if not cells:
        return ""
    header = all(cell.header for cell in cells[0])
    rows = ["".join(_cell(cell, header and y == 0) for cell in row) for y, row in enumerate(cells)]
    head = f"<thead><tr>{rows.pop(0)}</tr></thead>" if header else ""
    return f"<table>{head}<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def _cell(cell: Cell, head: bool) -> str:
    if head:
        return f"<th>{cell.html}</th>"
    return f"<td><strong>{cell.html}</strong></td>" if cell.header and cell.html.strip() else f"<td>{cell.html}</td>"


def _rows(table: Element) -> list[Element]:
    rows = []
    for part in table:
        if name(part) == "tr":
            rows.append(part)
        elif name(part) in ("thead", "tbody", "tfoot"):
            rows += [row for row in part if name(row) == "tr"]
    return rows


def _span(cell: Element, which: str) -> int:
    value = str(cell.get(which) or "1").strip()[:20]
    return max(1, min(int(value), MAX_SPAN)) if value.isascii() and value.isdigit() else 1


MAX_DEPTH = 80
"""Elements nested deeper are rendered as plain text: no author nests that deeply, and Python's stack is finite."""
INLINE = frozenset({"a", "b", "strong", "i", "em", "code", "del", "s"})
BLOCKS = frozenset({"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr"})
DROPPED = frozenset(
    {
        "script",
        "style",
        "head",
        "ac:parameter",
        "ac:placeholder",
        "ac:adf-attribute",
        "ac:task-id",
        "ac:task-uuid",
        "ac:task-status",
        "title",
    }
)
LINKS = ("http://", "https://", "mailto:")
FENCE = re.compile(r"`{3,}")
GAPS = re.compile(r"\n{3,}")
TRAILING_SPACE = re.compile(r"(?<![ \t\u00a0])[ \t\u00a0]++\n")
"""Each run of spaces is tried once, and not from each of them."""
LONG_GAP = re.compile(r"[ \t]{50,}")
INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")


MAX_MARKDOWN = 16 * 1024**2
"""Characters. Quotations in quotations grow with each line: four times the most that a document may have."""


def markdown(storage: str, names: Mapping[str, str] = {}, room: Room | None = None) -> str:
    """Convert storage format to Markdown; empty if there is no text. ``names`` holds display names by the ids that
    ``users`` returns; ``room`` is that of the document, where this is a part of it. Raises TooLong."""
    if not storage.strip():
        return ""
    body = _Renderer(names, room or Room()).children(parse(storage), 0)
    soup = BeautifulSoup(f"<html><body>{body}</body></html>", "lxml")
    text = _Markdown(
        heading_style="ATX",
        bullets="-",
        escape_asterisks=False,
        escape_underscores=False,
        escape_misc=False,
        autolinks=False,
        table_infer_header=False,
        newline_style="backslash",
    ).convert_soup(soup)
    return _tidy(text)


class TooLong(Exception):
    """A document is too long as Markdown."""


class _Markdown(LinearConverter):
    """The conversion, with code fences that name the language and are longer than any fence in the code."""

    def process_tag(self, node: Tag, parent_tags: set[str] | None = None) -> str:
        text = str(super().process_tag(node, parent_tags))  # type: ignore[misc]
        if len(text) > MAX_MARKDOWN:
            raise TooLong
        return text

    def process_text(self, el: NavigableString, parent_tags: set[str] | None = None) -> str:
        """Fold long gaps first, outside of code: the library takes time with the square of their length."""
        if "pre" not in (parent_tags or ()) and LONG_GAP.search(el):
            folded = NavigableString(LONG_GAP.sub(" ", el))
            el.replace_with(folded)
            el = folded
        return str(super().process_text(el, parent_tags))  # type: ignore[misc]

    def convert_pre(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        code = el.get_text().strip("\n")
        if not code.strip():
            return ""
        longest = max((len(fence) for fence in FENCE.findall(code)), default=2)
        fence = "`" * max(3, longest + 1)
        return f"\n\n{fence}{el.get('data-language') or ''}\n{code}\n{fence}\n\n"

    def convert_br(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        return " " if "_inline" in parent_tags or "td" in parent_tags or "th" in parent_tags else "\n"


class _Renderer:
    def __init__(self, names: Mapping[str, str], room: Room) -> None:
        self.names = names
        self.room = room

    def children(self, element: Element, depth: int) -> str:
        parts = [escape(element.text or "", quote=False)]
        for part in element:
            parts += [self.element(part, depth + 1), escape(part.tail or "", quote=False)]
        return "".join(parts)

    def element(self, element: Element, depth: int) -> str:
        tag = name(element)
        if not tag or tag in DROPPED:
            return ""
        if depth > MAX_DEPTH:
            return escape(_plain_text(element), quote=False)
        if tag == "ac:structured-macro" or tag == "ac:macro":
            return self.macro(element, depth)
        if tag == "table":
            return to_html(grid(element, lambda cell: self.cell(cell, depth + 1), self.room))
        if special := RENDERERS.get(tag):
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
        for key in TEXT_PARAMETERS.get(kind, ()):
            if text := parameter(element, key):
                return escape(text)
        title = macro_title(element)
        above = f"<p><strong>{escape(title)}</strong></p>" if title else ""
        rich, plain = self.macro_body(element), child(element, "ac:plain-text-body")
        if rich is not None:
            return f"<div>{above}{self.children(rich, depth)}</div>"
        if plain is not None:
            return f'{above}<pre data-language="{escape(language(element))}">{escape(text_of(plain))}</pre>'
        return escape(reference(element, self.names))

    def macro_body(self, macro: Element) -> Element | None:
        """Return the body of a macro if it is markup: the text of the ``html`` macro is."""
        plain = child(macro, "ac:plain-text-body")
        if plain is None or attribute(macro, "ac:name") != "html":
            return child(macro, "ac:rich-text-body")
        text = text_of(plain)
        self.room.tags -= text.count("<")
        return _parse_html(text) if self.room.tags >= 0 else _without_markup(text)

    def link(self, element: Element, depth: int) -> str:
        for body in LINK_BODIES:
            label = child(element, body)
            if label is not None and (text := self.children(label, depth)).strip():
                return text
        return escape(link_target(element, self.names))

    def image(self, element: Element, depth: int) -> str:
        label, caption = picture_label(element), child(element, "ac:caption")
        if label == text_of(caption).strip():
            label = ""
        parts = (escape(label), "" if caption is None else self.children(caption, depth))
        return " ".join(filter(None, parts))

    def preformatted(self, element: Element, depth: int) -> str:
        return f"<pre>{escape(text_of(element))}</pre>"

    def task(self, element: Element, depth: int) -> str:
        body = child(element, "ac:task-body")
        return f"<li>[{_checkbox(element)}] {'' if body is None else self.children(body, depth)}</li>"

    def extension(self, element: Element, depth: int) -> str:
        return "".join(f"<div>{self.children(content, depth)}</div>" for content in _extension_contents(element))

    def cell(self, element: Element, depth: int) -> str:
        """Render a cell's contents inline, since a row of a Markdown table is one line: blocks are separated by spaces
        and list items by bullets."""
        parts = [_escape_cell(element.text or "")]
        for part in element:
            parts += [self.inline(part, depth + 1), _escape_cell(part.tail or "")]
        return "".join(parts)

    def inline(self, element: Element, depth: int) -> str:
        tag = name(element)
        if tag in DROPPED or not tag:
            return ""
        if depth > MAX_DEPTH:
            return _escape_cell(_plain_text(element))
        if tag in ("ac:structured-macro", "ac:macro"):
            rich, plain = self.macro_body(element), child(element, "ac:plain-text-body")
            if rich is not None:
                return f" {_escape_cell(macro_title(element))} {self.cell(rich, depth)} "
            if plain is not None:
                return f" <code>{_escape_cell(' '.join(text_of(plain).split()))}</code> "
            return self.macro(element, depth).replace("|", "\\|")
        if tag == "table":
            rows = grid(element, lambda cell: self.cell(cell, depth + 1), self.room)
            return " " + "; ".join(", ".join(cell.html.strip() for cell in row) for row in rows) + " "
        if tag == "ac:adf-extension":
            return " ".join(self.cell(content, depth) for content in _extension_contents(element))
        if tag == "pre":
            return f" <code>{_escape_cell(' '.join(text_of(element).split()))}</code> "
        if tag == "ac:task":
            body = child(element, "ac:task-body")
            return f" [{_checkbox(element)}] {'' if body is None else self.cell(body, depth)} "
        if tag != "ac:task-list" and (special := RENDERERS.get(tag)):
            return special(self, element, depth).replace("|", "\\|")
        inside = self.cell(element, depth)
        if tag == "li":
            return f" • {inside.strip()} "
        if tag == "a":
            href = attribute(element, "href")
            return f'<a href="{escape(href)}">{inside}</a>' if href.lower().startswith(LINKS) else inside
        return f"<{tag}>{inside}</{tag}>" if tag in INLINE else f" {inside} " if ":" not in tag else inside


RENDERERS: Mapping[str, Callable[[_Renderer, Element, int], str]] = {
    "ac:link": _Renderer.link,
    "ac:image": _Renderer.image,
    "img": lambda self, element, depth: escape(attribute(element, "alt")),
    "ac:emoticon": lambda self, element, depth: escape(emoticon(element)),
    "ri:user": lambda self, element, depth: escape(mention(element, self.names)),
    "ac:task-list": lambda self, element, depth: f"<ul>{self.children(element, depth)}</ul>",
    "ac:task": _Renderer.task,
    "ac:adf-extension": _Renderer.extension,
    "pre": _Renderer.preformatted,
    "br": lambda self, element, depth: "<br>",
    "time": lambda self, element, depth: escape(text_of(element).strip() or attribute(element, "datetime")),
}


def _escape_cell(text: str) -> str:
    return escape(text, quote=False).replace("|", "\\|")


def _checkbox(task: Element) -> str:
    return "x" if text_of(child(task, "ac:task-status")).strip() == "complete" else " "


def _extension_contents(extension: Element) -> list[Element]:
    """Return the contents of an element that only the new editor knows, or their fallback, never both."""
    contents: dict[str, list[Element]] = {"ac:adf-content": [], "ac:adf-fallback": []}
    pending = [extension]
    while pending:
        element = pending.pop()
        if (tag := name(element)) in contents:
            contents[tag].append(element)
        else:
            pending += reversed(element)
    return contents["ac:adf-content"] or contents["ac:adf-fallback"]


def _plain_text(element: Element) -> str:
    """Return the text inside an element without the parts that are never rendered. Does not recurse."""
    hidden = set[Element]()
    for root in element.iter():
        if name(root) in DROPPED and root not in hidden:
            hidden.update(root.iter())
    parts = []
    for part in element.iter():
        if part not in hidden:
            parts.append(part.text or "")
        if part is not element and (part not in hidden or name(part) in DROPPED):
            parts.append(part.tail or "")
    return " ".join(" ".join(parts).split())


def _tidy(text: str) -> str:
    """Remove soft hyphens and zero-width characters, and runs of empty lines outside code."""
    lines = [f"{line}\n" for line in INVISIBLE.sub("", text).split("\n")]
    closing: dict[str, list[int]] = {}
    for row, line in enumerate(lines):
        if FENCE.fullmatch(line[:-1]):
            closing.setdefault(line[:-1], []).append(row)
    tidied: list[str] = []
    prose = row = 0
    while row < len(lines):
        fence = FENCE.match(lines[row])
        rows = closing.get(fence[0], []) if fence else []
        if (following := bisect_right(rows, row)) < len(rows):
            end = rows[following]
            tidied += [_tidy_prose("".join(lines[prose:row])), "".join(lines[row : end + 1])[:-1]]
            lines[end] = "\n"  # what follows the code begins with the end of its last line
            prose, row = end, end + 1
        else:
            row += 1
    return "".join([*tidied, _tidy_prose("".join(lines[prose:]))]).strip()


def _tidy_prose(text: str) -> str:
    return GAPS.sub("\n\n", TRAILING_SPACE.sub("\n", text))
