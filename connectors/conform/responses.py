"""The responses of a service as a dictionary: JSON by path, with names in braces where the documents of a playground
belong (``connectors.conform.samples.over_http``)."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

if TYPE_CHECKING:
    from connectors.conform.samples import Samples

PAGE_DOCUMENTS = 3
_DOCUMENT = frozenset(
    {"external_id", "title", "text", "revision", "changed_at", "acl_tag", "acl_tags", "required_tags"}
)
_ARRAYS = frozenset({"acl_tags", "required_tags", "members"})
_ALONE = frozenset(f"{{{name}}}" for name in _ARRAYS)
_GROUP = frozenset({"tag", "members"})
_NEXT, _SINCE = "{next}", "{since}"


class Responses:
    """Responses by path, and the names that they use."""

    def __init__(self, responses: Mapping[str, Any]) -> None:
        """Raises ValueError for a name that is unknown, and for an array within a text."""
        self._routes = [_Route(path, body) for path, body in responses.items()]
        self.names = frozenset(name for body in responses.values() for name in _names(body))
        if unknown := sorted(self.names - _DOCUMENT - _GROUP - {"next"}):
            known = ", ".join(sorted(_DOCUMENT | _GROUP | {"next"}))
            raise ValueError(f"no document or group has {{{unknown[0]}}}: write one of {known}, or double the braces")
        for text in (text for body in responses.values() for text in _texts(body)):
            if within := sorted(_ARRAYS & set(_names(text)) if text not in _ALONE else ()):
                raise ValueError(
                    f"{{{within[0]}}} is no text: write it alone, without the rest of {text!r}; a document's only tag"
                    " is {acl_tag}"
                )

    def answer(self, samples: Samples, path: str, query: Mapping[str, str]) -> Any | None:
        """Return the JSON for a request, or None if there is nothing at this path."""
        for route in self._routes:
            if (parts := route.match(path, query)) is not None:
                return route.answer(samples, parts, query)
        return None


class _Route:
    def __init__(self, path: str, body: Any) -> None:
        path, _, query = path.partition("?")
        pattern = "".join(
            re.escape(text) + (f"(?P<{name}>[^/]+)" if name else "")
            for text, name, *_ in string.Formatter().parse(path)
        )
        parameters = dict(parse_qsl(query, keep_blank_values=True))
        self._body = body
        self._path = re.compile(pattern)
        self._after = next((name for name, value in parameters.items() if value == _NEXT), None)
        """The parameter with the place at which a page begins."""
        self._since = next((name for name, value in parameters.items() if value == _SINCE), None)
        """The parameter with the time from which on a listing shows changes."""
        self._parameters = {name: value for name, value in parameters.items() if value not in (_NEXT, _SINCE)}

    def match(self, path: str, query: Mapping[str, str]) -> Mapping[str, str] | None:
        """Return what the path names, or None if it is another one."""
        matched = self._path.fullmatch(path)
        if matched is None or not self._parameters.items() <= query.items():
            return None
        return {name: unquote(value) for name, value in matched.groupdict().items()}

    def answer(self, samples: Samples, parts: Mapping[str, str], query: Mapping[str, str]) -> Any | None:
        if (external_id := parts.get("external_id")) is not None:
            sample = samples.documents.get(external_id)
            return None if sample is None else _filled(self._body, _values(sample), [], {})
        if (tag := parts.get("tag")) is not None:
            members = samples.members.get(tag)
            return None if members is None else _filled(self._body, {"tag": tag, "members": members}, [], {})
        listed, following = samples.listed, None
        if self._since is not None:
            listed = [sample for sample in listed if sample.changed_at >= query.get(self._since, "")]
        if self._after is not None:
            listed = [sample for sample in listed if sample.external_id > query.get(self._after, "")]
            if len(listed) > PAGE_DOCUMENTS:
                listed = listed[:PAGE_DOCUMENTS]
                following = listed[-1].external_id
        documents = [_values(sample) for sample in listed]
        return _filled(self._body, {"next": following, "members": samples.members}, documents, samples.members)


def _values(sample: Any) -> Mapping[str, Any]:
    tags = {"acl_tag": sample.acl_tags[0] if sample.acl_tags else None}
    return {name: getattr(sample, name) for name in _DOCUMENT - tags.keys()} | tags


def _filled(
    body: Any,
    values: Mapping[str, Any],
    documents: Sequence[Mapping[str, Any]],
    members: Mapping[str, Sequence[str]],
) -> Any:
    """Return JSON with the values of the names in it. A list of one item that names what ``values`` lacks has an item
    for each document, or for each group."""

    def filled(value: Any) -> Any:
        return _filled(value, values, documents, members)

    if isinstance(body, str):
        return _text(body, values)
    if isinstance(body, Mapping):
        return {key: filled(value) for key, value in body.items()}
    if not isinstance(body, Sequence):
        return body
    names = frozenset(_names(body)) - values.keys()
    if len(body) == 1 and names & _DOCUMENT:
        return [_filled(body[0], {**values, **document}, [], {}) for document in documents]
    if len(body) == 1 and "tag" in names:
        return [_filled(body[0], {**values, "tag": tag, "members": held}, [], {}) for tag, held in members.items()]
    return [filled(value) for value in body]


def _text(text: str, values: Mapping[str, Any]) -> Any:
    """Return the value of ``{name}``, or a text with values in it; None if one of them is None."""
    names = list(_names(text))
    if len(names) == 1 and text == f"{{{names[0]}}}":
        return values[names[0]]
    return None if any(values[name] is None for name in names) else text.format_map(values)


def _names(body: Any) -> Iterator[str]:
    """Yield the names in the texts of a JSON value."""
    for text in _texts(body):
        yield from (name for _, name, *_ in string.Formatter().parse(text) if name is not None)


def _texts(body: Any) -> Iterator[str]:
    if isinstance(body, str):
        yield body
    elif isinstance(body, Mapping | Sequence):
        for value in body.values() if isinstance(body, Mapping) else body:
            yield from _texts(value)
