"""The text that people see in a payload, found without the connectors' code, and the parts of it that no document
contains."""

from __future__ import annotations

import gzip
import html
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_INVISIBLE = re.compile(
    r"<!--.*?-->|<ac:parameter\b[^>]*/>|<ac:parameter\b.*?</ac:parameter>|<ac:task-(id|status|uuid)>.*?</ac:task-\1>",
    re.DOTALL,
)
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def of_storage(storage: str) -> str:
    """Return the text of Confluence's storage format."""
    marked = _CDATA.sub(lambda match: html.escape(match[1]), _INVISIBLE.sub(" ", storage))
    return html.unescape(html.unescape(re.sub(r"<[^<>]*>", " ", marked)))


SLACK_KEYS = frozenset(
    (
        *("text", "title", "value", "pretext", "fallback", "footer", "name", "label", "caption", "description"),
        *("author_name", "author_subname", "service_name", "provider_name", "display_name", "alt_text", "preview"),
    )
)
"""The fields of messages that hold text that people read."""
SLACK_REASONS: Mapping[str, str] = {
    "reactions.name": "the name of a reaction",
    "user_profile.name": "a name that is not displayed",
}
"""Why a field is in no document, by the end of its path."""


def of_message(json: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the texts of a message, each with its path."""
    if isinstance(json, Mapping):
        for key, value in json.items():
            yield from of_message(value, (*path, key))
    elif isinstance(json, list):
        for value in json:
            yield from of_message(value, path)
    elif isinstance(json, str) and path and path[-1] in SLACK_KEYS and json.strip():
        yield ".".join(path), json


def lost_in_message(message: Mapping[str, Any], shown: str) -> Collection[str]:
    """Return the paths of the texts of a message that ``shown`` lacks, without those for which there is a reason. Its
    own ``text`` is only the fallback of its blocks."""
    lost = []
    for path, text in of_message(message):
        if path == "text" and message.get("blocks"):
            continue
        plain = re.sub(r"<[^<>|]*\|?([^<>]*)>", r" \1 ", re.sub(r"&(lt|gt|amp);", " ", text))
        is_shown = all(word in shown for word in words(plain))
        if not is_shown and not any(path.endswith(end) for end in SLACK_REASONS):
            lost.append(path)
    return lost


def lost_words(text: str, shown: str) -> Collection[str]:
    """Return the words of a text that ``shown`` lacks."""
    return sorted(word for word in words(text) if word not in shown)


def addresses(body: bytes) -> set[str]:
    """Return the addresses in a sitemap, or those of a feed's entries: for each the first of its alternate links and
    its own id."""
    if body.startswith(b"\x1f\x8b"):
        body = gzip.decompress(body)
    text = re.sub(r"<!--.*?-->", "", body.decode("utf-8", "replace"), flags=re.DOTALL)
    if _ENTRY.search(text) is None:
        return {_inner(match[1]) for match in _LOCATION.finditer(text)}
    text = re.sub(r"<source\b.*?</source>", "", text, flags=re.DOTALL)  # of another feed
    return set(filter(None, (_address(match[2]) for match in _ENTRY.finditer(text))))


def _address(entry: str) -> str | None:
    for match in re.finditer(r"<(?:\w+:)?link\b([^>]*?)/?>", entry):
        href, rel = (re.search(rf"\b{name}\s*=\s*([\"'])(.*?)\1", match[1]) for name in ("href", "rel"))
        if href and (rel is None or rel[2] == "alternate"):
            return html.unescape(href[2])
    for name in ("link", "guid", "id"):
        inner = re.search(rf"<{name}\b([^>]*)>(.*?)</{name}>", entry, re.DOTALL)
        if inner and inner[2].strip() and "false" not in inner[1]:
            return _inner(inner[2])
    return None


def _inner(text: str) -> str:
    cdata = _CDATA.fullmatch(text.strip())
    return (cdata[1] if cdata else html.unescape(text)).strip()


_ENTRY = re.compile(r"<(?:\w+:)?(item|entry)\b[^>]*>(.*?)</(?:\w+:)?\1>", re.DOTALL)
_LOCATION = re.compile(r"<(?:\w+:)?loc>(.*?)</(?:\w+:)?loc>", re.DOTALL)
