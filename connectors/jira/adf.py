"""The Atlassian Document Format, in which Jira Cloud returns texts, as Confluence's storage format, which
``connectors.confluence.markup`` converts to Markdown. Pure.

https://developer.atlassian.com/cloud/jira/platform/apis/document/structure/. A node of an unknown type is replaced by
what it contains, so that no text of a newer editor is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

Node = Mapping[str, Any]

MAX_DEPTH = 80
"""Nodes that are nested deeper are rendered as plain text."""
MAX_MARKS = 20
"""Marks of one text that are rendered. An editor gives a text each mark once; each is put around all before it."""
_WRAPPERS = {
    "paragraph": "p",
    "bulletList": "ul",
    "orderedList": "ol",
    "listItem": "li",
    "blockquote": "blockquote",
    "table": "table",
    "tableRow": "tr",
    "caption": "p",
    "decisionList": "ul",
    "decisionItem": "li",
    "taskList": "ac:task-list",
    "blockTaskItem": "li",
    "layoutColumn": "div",
    "layoutSection": "div",
    "bodiedExtension": "div",
}
_MARKS = {"strong": "strong", "em": "em", "code": "code", "strike": "del"}
_PANELS = frozenset({"info", "note", "warning", "tip"})


def storage(document: Any) -> str:
    """Convert a document; anything else than a node has no text."""
    return _node(document, 0) if isinstance(document, Mapping) else ""


def nodes(document: Any) -> Iterator[Node]:
    """Yield the document and all nodes in it."""
    pending = [document]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            yield node
            content = node.get("content")
            pending += reversed(content) if isinstance(content, list) else []


def _children(node: Node, depth: int) -> str:
    content = node.get("content")
    return "".join(_node(child, depth + 1) for child in content) if isinstance(content, list) else ""


def _node(node: Any, depth: int) -> str:
    if not isinstance(node, Mapping):
        return ""
    if depth > MAX_DEPTH:
        return escape(" ".join(str(part["text"]) for part in nodes(node) if isinstance(part.get("text"), str)))
    kind = str(node.get("type"))
    if kind in _RENDERERS:
        return _RENDERERS[kind](node, depth)
    inside = _children(node, depth)
    tag = _WRAPPERS.get(kind)
    return f"<{tag}>{inside}</{tag}>" if tag else inside


def _attribute(node: Node, name: str) -> str:
    attributes = node.get("attrs")
    value = attributes.get(name) if isinstance(attributes, Mapping) else None
    return str(value) if isinstance(value, str | int | float) else ""


def _text(node: Node, depth: int) -> str:
    text = escape(str(node.get("text") or ""), quote=False)
    marks = node.get("marks")
    for mark in marks[:MAX_MARKS] if isinstance(marks, list) else []:
        kind = mark.get("type") if isinstance(mark, Mapping) else None
        if kind == "link":
            text = f'<a href="{escape(_attribute(mark, "href"))}">{text}</a>'
        elif kind in _MARKS:
            text = f"<{_MARKS[kind]}>{text}</{_MARKS[kind]}>"
    return text


def _heading(node: Node, depth: int) -> str:
    level = _attribute(node, "level")
    tag = f"h{level if level in {'1', '2', '3', '4', '5', '6'} else 6}"
    return f"<{tag}>{_children(node, depth)}</{tag}>"


def _code(node: Node, depth: int) -> str:
    text = "".join(str(part.get("text") or "") for part in nodes(node) if part.get("type") == "text")
    return _macro("code", {"language": _attribute(node, "language")}, plain=escape(text, quote=False))


def _panel(node: Node, depth: int) -> str:
    kind = _attribute(node, "panelType")
    return _macro(kind if kind in _PANELS else "panel", {}, rich=_children(node, depth))


def _expand(node: Node, depth: int) -> str:
    title = _attribute(node, "title")
    return f"{f'<p><strong>{escape(title)}</strong></p>' if title else ''}<div>{_children(node, depth)}</div>"


def _macro(name: str, parameters: Mapping[str, str], *, rich: str = "", plain: str = "") -> str:
    inside = "".join(
        f'<ac:parameter ac:name="{key}">{escape(value)}</ac:parameter>' for key, value in parameters.items() if value
    )
    if rich:
        inside += f"<ac:rich-text-body>{rich}</ac:rich-text-body>"
    if plain:
        inside += f"<ac:plain-text-body>{plain}</ac:plain-text-body>"
    return f'<ac:structured-macro ac:name="{name}">{inside}</ac:structured-macro>'


def _cell(node: Node, depth: int) -> str:
    tag = "th" if node.get("type") == "tableHeader" else "td"
    spans = "".join(
        f' {name}="{value}"' for name in ("colspan", "rowspan") if (value := _attribute(node, name)).isdecimal()
    )
    return f"<{tag}{spans}>{_children(node, depth)}</{tag}>"


def _task(node: Node, depth: int) -> str:
    status = "complete" if _attribute(node, "state") == "DONE" else "incomplete"
    body = f"<ac:task-body>{_children(node, depth)}</ac:task-body>"
    return f"<ac:task><ac:task-status>{status}</ac:task-status>{body}</ac:task>"


def _date(node: Node, depth: int) -> str:
    """Render a date, which is in milliseconds since 1970."""
    try:
        return datetime.fromtimestamp(int(_attribute(node, "timestamp")) / 1000, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return ""


def _mention(node: Node, depth: int) -> str:
    name = _attribute(node, "text").removeprefix("@")
    return f"@{escape(name, quote=False)}" if name else "@unknown"


def _card(node: Node, depth: int) -> str:
    url = escape(_attribute(node, "url"))
    return f'<a href="{url}">{url}</a>' if url else ""


_RENDERERS: Mapping[str, Callable[[Node, int], str]] = {
    "text": _text,
    "heading": _heading,
    "codeBlock": _code,
    "panel": _panel,
    "expand": _expand,
    "nestedExpand": _expand,
    "tableHeader": _cell,
    "tableCell": _cell,
    "taskItem": _task,
    "date": _date,
    "mention": _mention,
    "inlineCard": _card,
    "blockCard": lambda node, depth: f"<p>{_card(node, depth)}</p>",
    "embedCard": lambda node, depth: f"<p>{_card(node, depth)}</p>",
    "hardBreak": lambda node, depth: "<br/>",
    "rule": lambda node, depth: "<hr/>",
    "emoji": lambda node, depth: escape(_attribute(node, "text") or _attribute(node, "shortName"), quote=False),
    "status": lambda node, depth: escape(_attribute(node, "text"), quote=False),
    "placeholder": lambda node, depth: "",
    "media": lambda node, depth: f"<p>{escape(_attribute(node, 'alt'))}</p>",
    "mediaInline": lambda node, depth: escape(_attribute(node, "alt"), quote=False),
}
