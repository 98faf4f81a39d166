"""Confluence's storage format, read: namespaced XHTML → a tree whose names are ``ac:link``, ``p``, ``ri:user``.

https://confluence.atlassian.com/doc/confluence-storage-format-790796544.html. It is read as XML; where it is not
well-formed (old migrations, apps that write by hand) as HTML, which loses nothing but structure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape, unescape
from typing import TypeAlias

from lxml import etree, html  # type: ignore[import-untyped]

NAMESPACES = {
    "ac": "http://atlassian.com/content",
    "ri": "http://atlassian.com/resource/identifier",
    "at": "http://atlassian.com/template",
}
PREFIXES = {uri: prefix for prefix, uri in NAMESPACES.items()}
ROOT = "storage-format"
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
CDATA = re.compile(r"<!\[CDATA\[(.*?)(?:\]\]>|\Z)", re.DOTALL)
NAMED = re.compile(r"&(?!(?:amp|lt|gt|quot|apos);)([A-Za-z][A-Za-z0-9]*);")
BARE = re.compile(r"&(?!(?:[A-Za-z][A-Za-z0-9]*|#[0-9]+|#x[0-9A-Fa-f]+);)")
PARAMETER = re.compile(r"<ac:parameter\b.*?</ac:parameter\s*>", re.DOTALL)
TAG = re.compile(r"<[^<>]*>")
RAW_TEXT = re.compile(r"</?(?:script|style|textarea|title|xmp|iframe|plaintext|noscript)\b[^<>]*>", re.IGNORECASE)
"""Within these HTML knows no elements: one that is never closed would swallow the page."""
SELF_CLOSED = re.compile(r"""<([A-Za-z]+:[\w.-]+)((?:"[^"]*"|'[^']*'|[^'"<>])*?)/>""")

Element: TypeAlias = etree._Element


def read(storage: str) -> Element:
    """Never raises for what it is given. Entities of documents are not expanded and nothing is loaded."""
    text = _prepared(storage)
    spaces = " ".join(f'xmlns:{prefix}="{uri}"' for prefix, uri in NAMESPACES.items())
    strict = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, remove_comments=True,
                             remove_pis=True)  # fmt: skip
    try:
        return etree.fromstring(f"<{ROOT} {spaces}>{text}</{ROOT}>", strict)
    except etree.XMLSyntaxError:
        pass
    lenient = html.HTMLParser(no_network=True, remove_comments=True, remove_pis=True, huge_tree=True)
    opened = SELF_CLOSED.sub(r"<\1\2></\1>", RAW_TEXT.sub("", text))
    found = html.document_fromstring(f"<html><body><div>{opened}</div></body></html>", parser=lenient)
    if text_of(found).strip():
        return found
    bare = etree.Element(ROOT)  # nested beyond what the parser takes
    bare.text = unescape(TAG.sub(" ", PARAMETER.sub(" ", text)))
    return bare


def name(element: Element) -> str:
    """``ac:link``, ``td``: lower case, whichever way it was read."""
    return _qualified(element.tag)


def attribute(element: Element, qualified: str) -> str:
    """Of ``ac:name`` and the like; empty where there is none."""
    for key, value in element.attrib.items():
        if _qualified(key) == qualified:
            return str(value).strip()
    return ""


def child(element: Element, qualified: str) -> Element | None:
    return next((one for one in element if name(one) == qualified), None)


def text_of(element: Element | None) -> str:
    """All text below, as it stands: of plain text bodies."""
    return "" if element is None else "".join(str(part) for part in element.itertext())


def users(storage: str) -> set[str]:
    """Who is mentioned, by account id, user key or username: names are asked for before converting."""
    if "ri:user" not in storage:
        return set()
    return {who for element in _all(read(storage)) if name(element) == "ri:user" and (who := user(element))}


def user(element: Element) -> str:
    """Of a ``ri:user``."""
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


def _prepared(storage: str) -> str:
    """CDATA as escaped text, HTML's named entities as the characters that they stand for: XML knows only five."""
    parts, at = [], 0
    text = CONTROLS.sub("", storage)
    for match in CDATA.finditer(text):
        parts += [_entities(text[at : match.start()]), escape(match.group(1), quote=False)]
        at = match.end()
    return "".join([*parts, _entities(text[at:])])


def _entities(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        found = unescape(match.group())
        return f"&amp;{match.group(1)};" if found == match.group() else escape(found, quote=False)

    return NAMED.sub(character, BARE.sub("&amp;", text))
