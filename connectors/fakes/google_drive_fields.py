"""Partial answers: ``fields=nextPageToken,files(id,owners/emailAddress)``.

https://developers.google.com/workspace/drive/api/guides/fields-parameter
"""

from __future__ import annotations

import re
from typing import Any

from connectors.fakes.google_drive_errors import ApiError

Mask = dict[str, Any]
"""Name → the mask below it; an empty one takes everything below."""

_TOKEN = re.compile(r"[\w*]+|[(),/]")


def parse(text: str) -> Mask:
    """Raises ApiError where Google would: a selection that is not well formed."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        raise _refused(text)
    mask, rest = _parsed(tokens, text)
    if rest:
        raise _refused(text)
    return mask


def _parsed(tokens: list[str], text: str) -> tuple[Mask, list[str]]:
    mask: Mask = {}
    while tokens:
        path, tokens = [tokens[0]], tokens[1:]
        while tokens[:1] == ["/"] and len(tokens) > 1:
            path, tokens = [*path, tokens[1]], tokens[2:]
        below: Mask = {}
        if tokens[:1] == ["("]:
            below, tokens = _parsed(tokens[1:], text)
            if tokens[:1] != [")"]:
                raise _refused(text)
            tokens = tokens[1:]
        if any(not re.fullmatch(r"[\w*]+", name) for name in path):
            raise _refused(text)
        place = mask
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = below
        if tokens[:1] != [","]:
            return mask, tokens
        tokens = tokens[1:]
    raise _refused(text)


def chosen(value: Any, mask: Mask, known: Mask, path: str = "") -> Any:
    """What the mask takes of a value. known: every name that this kind of answer could have; another one is refused."""
    if isinstance(value, list):
        return [chosen(one, mask, known, path) for one in value]
    check(mask, known, path)
    if not isinstance(value, dict) or not mask or "*" in mask:
        return value
    return {
        name: chosen(value[name], below, known.get(name, {}), f"{path}{name}/")
        for name, below in mask.items()
        if name in value
    }


def check(mask: Mask, known: Mask, path: str = "") -> None:
    for name, below in mask.items():
        if name == "*":
            continue
        if known and name not in known:
            raise _refused(path + name)
        check(below, known.get(name, {}), f"{path}{name}/")


def _refused(what: str) -> ApiError:
    return ApiError(400, "invalidParameter", f"Invalid field selection {what}", location="fields")
