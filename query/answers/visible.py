"""The visible text of a document, made safe to quote to a model. Pure.

Ingestion cleans texts already. Titles, authors and texts of older versions are cleaned here again, because instructions
to a model are hidden in text that it reads and that people do not see.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pipeline.core.normalise import clean
from pipeline.core.styles import hides

_UNSEEN = re.compile("[\u115f\u1160\u180b-\u180f\u200c\u200d\u3164\ufe00-\ufe0d\uffa0\U000e0000-\U000e0fff]")
"""Characters that ``clean`` keeps because some scripts or flags need them; a quotation does not."""
_CODE = re.compile(
    r"(^ {0,3}(`{3,12}|~{3,12})[^\n]*\n.*?(?:^ {0,3}\2[`~]*[ \t]*$|\Z)|`[^`\n]+`)", re.DOTALL | re.MULTILINE
)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_MARKDOWN_COMMENT = re.compile(r"^[ \t]{0,3}\[[^\]\n]{0,100}\]:[ \t]*(?:#|<>)[ \t]*[(\"'].*$", re.MULTILINE)
"""``[//]: # (…)``: a link definition that is used as a comment and is never displayed."""
_TAG = re.compile(r"<(/?)([a-z][a-z0-9]*)\b([^<>]{0,2000})>", re.IGNORECASE)
_HIDDEN_ELEMENTS = frozenset(("script", "style", "template", "noscript", "head", "object", "iframe", "svg", "title"))
_VOID = frozenset(("area", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"))
_HIDDEN_STYLE = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*hidden|(?:font-size|opacity|max-height|height|width)\s*:\s*0(?![.\d]*[1-9])"
    r"|text-indent\s*:\s*-\d{3,}|(?:^|\s)hidden(?:\s|=|/|$)|aria-hidden\s*=\s*[\"']?true",
    re.IGNORECASE,
)

_TEMPLATE = re.compile(
    r"<[|｜][^|｜<>\n]{1,40}[|｜]>|<<?/?SYS>>?|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS)\]|</?s>"
    r"|<(?:start|end)_of_(?:turn|text|image)>|<(?:bos|eos)>|</?think>",
    re.IGNORECASE,
)
"""Markers that chat templates end a turn with; some servers interpret them in the text of a message."""
_MARKS = r"(?:[^\w\n]|_){0,40}"
_ROLE = re.compile(
    rf"^(?={_MARKS}(?:system|assistant|user|developer|human|tool|instructions?)(?:\s+(?:prompt|message|note))?{_MARKS}:"
    r"|#{1,6}[ \t]{0,4}(?:system|assistant|user|developer|human|new instructions?|instructions?)\b"
    rf"|{_MARKS}(?:end|begin|start|close)\b[^\n]{{0,40}}\b(?:passages?|contexts?|documents?|sources?|quot\w{{0,8}}|data)\b"
    r"[^\n\w]{0,10}[0-9a-f]{0,32}[^\n\w]{0,10}$"
    rf"|{_MARKS}(?:end|passage)[ \t]{{1,4}}(?:\d{{1,4}}|history|question|conversation)\b)",
    re.IGNORECASE | re.MULTILINE,
)
_FENCES = str.maketrans({"\u27e6": "[", "\u27e7": "]", "\u301a": "[", "\u301b": "]", "\u2e28": "(", "\u2e29": ")"})
"""The brackets of our own delimiters, and similar ones."""
_REFERENCE = re.compile(r"[\[\u3010](\d{1,3}(?:\s*[,;–-]\s*\d{1,3})*)[\]\u3011](?!\()")


def visible(text: str) -> str:
    """The text without what is not displayed: zero-width, direction and tag characters, comments and hidden elements.
    Code stays as it is, because it is displayed."""
    text = _UNSEEN.sub("", clean(text))
    return _outside_code(text, lambda part: _MARKDOWN_COMMENT.sub("", _without_hidden(_COMMENT.sub("", part)))).strip()


def one_line(text: str, max_characters: int = 200) -> str:
    """A visible title or name in one line, shortened to max_characters."""
    flat = " ".join(visible(text).split())
    return flat if len(flat) <= max_characters else flat[:max_characters].rstrip() + " …"


def quotable(text: str) -> str:
    """``visible`` text, ``disarmed``."""
    return disarmed(visible(text))


def disarmed(text: str) -> str:
    """Replace everything that looks like a delimiter, a turn of a chat or one of our citations. text: ``visible`` text.

    A reference mark (``[3]``) becomes ``(3)``, because a model that copies a sentence must not repeat the document's
    own citations. Inside code it stays.
    """
    text = _TEMPLATE.sub(lambda m: m[0].translate(_BROKEN), text.translate(_FENCES))
    text = _ROLE.sub("\u2502 ", text)
    return _outside_code(text, lambda part: _REFERENCE.sub(r"(\1)", part))


Changer = Callable[[str], str]
_BROKEN = str.maketrans({"<": "\u2039", ">": "\u203a", "[": "(", "]": ")"})


def _outside_code(text: str, change: Changer) -> str:
    parts, at = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, change(text[at:])])


def _without_hidden(text: str) -> str:
    """The text without hidden elements; one that does not end in this passage hides the rest of it. It is a single pass
    over all tags, because a passage may contain a hundred thousand hidden elements."""
    parts, at = [], 0
    hidden, depth = "", 0  # the name of the open hidden element, and its nesting depth
    for tag in _TAG.finditer(text):
        is_end, name, attributes = bool(tag[1]), tag[2].lower(), tag[3]
        if depth:
            if name == hidden:
                depth += -1 if is_end else 1
            if not depth:
                at = tag.end()
        elif not is_end and (name in _HIDDEN_ELEMENTS or _HIDDEN_STYLE.search(attributes) or hides(attributes)):
            parts.append(text[at : tag.start()])
            at = tag.end()
            if not attributes.endswith("/") and name not in _VOID:
                hidden, depth, at = name, 1, len(text)
    return "".join([*parts, text[at:]])
