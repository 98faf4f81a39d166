"""Searching and paging as Drive does it: opaque tokens that hold on to a place and not to a number of results."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from connectors.fakes.google_drive_corpus import Change, Corpus, Item
from connectors.fakes.google_drive_errors import ApiError, invalid_value, missing

Query = Mapping[str, str]

_TERM = re.compile(r"(trashed|mimeType)\s*(=|!=)\s*('[^']*'|true|false)|'([^']+)'\s+in\s+parents")


def matching(q: str, corpus: Corpus) -> Callable[[Item], bool]:
    """The part of the search language that is needed here, terms joined by ``and``; anything else is refused.

    https://developers.google.com/workspace/drive/api/guides/ref-search-terms
    """
    tests: list[Callable[[Item], bool]] = []
    for term in re.split(r"\s+and\s+", q.strip()) if q.strip() else ():
        found = _TERM.fullmatch(term)
        if found is None:
            raise invalid_value("q")
        name, sign, value, parent = found.groups()
        wanted = sign != "!="
        if parent is not None:
            tests.append(lambda item, parent=parent: item.parent == parent)  # type: ignore[misc]
        elif name == "trashed" and value in ("true", "false"):
            is_it = (value == "true") == wanted
            tests.append(lambda item, is_it=is_it: corpus.is_trashed(item) == is_it)  # type: ignore[misc]
        elif name == "mimeType" and value.startswith("'"):
            tests.append(lambda item, kind=value[1:-1], wanted=wanted: (item.mime_type == kind) == wanted)  # type: ignore[misc]
        else:
            raise invalid_value("q")
    return lambda item: all(test(item) for test in tests)


def whole_number(query: Query, name: str, usual: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return usual
    if not text.isdigit() or int(text) < 1:
        raise ApiError(400, "invalidParameter", f"Invalid value '{text}'. Values must be within the range: [1, {most}]")
    return min(int(text), most)


class Pages:
    """``epoch``: raised, it makes every token given so far unknown."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.epoch = 0
        self.gone_status = 400
        """With what a change token that is no longer known is refused: Drive's 400, or 410 as its older feeds do."""

    def files(self, found: list[Item], query: Query, *, truncated: bool) -> tuple[list[Item], str | None]:
        """In the order of creation: whoever is met stays met, whatever moves or goes meanwhile."""
        size = whole_number(query, "pageSize", 100, 1000)
        about = [query.get(name) for name in ("corpora", "driveId", "q", "orderBy")]
        after = self._read(query, about)
        rest = [item for item in found if after is None or item.id > after]
        if truncated:
            return rest[: min(size, len(rest) // 2)], None
        shown = rest[:size]
        return shown, self._token(about, shown[-1].id) if len(rest) > size else None

    def plain(
        self, every: Sequence[dict[str, Any]], query: Query, sizing: str = "pageSize", *, truncated: bool = False,
        most: int = 100, usual: int = 100,
    ) -> tuple[list[dict[str, Any]], str | None]:  # fmt: skip
        size = whole_number(query, sizing, usual, most)
        start = int(self._read(query, ["plain"]) or 0)
        shown = list(every[start : start + size])
        return shown, self._token(["plain"], str(start + size)) if start + size < len(every) else None

    def _token(self, about: list[Any], place: str) -> str:
        return base64.urlsafe_b64encode(json.dumps([self.epoch, about, place]).encode()).decode()

    def _read(self, query: Query, about: list[Any]) -> str | None:
        """Where to go on. A token that is not of this very listing is refused."""
        token = query.get("pageToken")
        if token is None:
            return None
        try:
            epoch, of, place = json.loads(base64.urlsafe_b64decode(token.encode()))
        except ValueError:
            raise invalid_value("pageToken") from None
        if epoch != self.epoch or of != about:
            raise invalid_value("pageToken")
        return str(place)

    # Changes: the token is the number of the next change, in the log of one drive or of the user.

    def start(self, log: str | None) -> str:
        newest = max((entry.number for entry in self._corpus.changes if entry.log == log), default=0)
        return self._change_token(newest + 1, log)

    def changes(self, mine: list[Change], log: str | None, query: Query) -> tuple[list[Change], dict[str, str]]:
        """A file that changed several times stands there once, at its newest change."""
        token = query.get("pageToken")
        if not token:
            raise missing("pageToken")
        size = whole_number(query, "pageSize", 100, 1000)
        first = self.number(token, log)
        newest = {entry.id: entry for entry in mine if entry.number >= first}
        rest = sorted(newest.values(), key=lambda entry: entry.number)
        if query.get("includeRemoved", "true") == "false":
            rest = [entry for entry in rest if entry.id in self._corpus.items]
        if len(rest) > size:
            return rest[:size], {"nextPageToken": self._change_token(rest[size - 1].number + 1, log)}
        after = max([first - 1, *(entry.number for entry in mine)])
        return rest, {"newStartPageToken": self._change_token(after + 1, log)}

    def _change_token(self, number: int, log: str | None) -> str:
        return f"{number}" if not self.epoch and log is None else f"{number}.{self.epoch}.{log or ''}"

    def number(self, token: str, log: str | None) -> int:
        number, _, rest = token.partition(".")
        epoch, _, of = rest.partition(".")
        if not number.isdigit() or (epoch or "0") != str(self.epoch) or of != (log or ""):
            if self.gone_status == 410:
                raise ApiError(410, "deleted", "The page token is no longer valid.", location="pageToken")
            raise invalid_value("pageToken")
        return int(number)
