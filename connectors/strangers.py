"""Ids in texts that belong to nobody whom a source knows."""

from __future__ import annotations

import time
from collections.abc import Iterable

HOUR_SECONDS = 3_600.0
MAX_REMEMBERED, MAX_ID_CHARACTERS = 10_000, 200


class Strangers:
    """Law: a source is asked for about so many ids in an hour that it does not know, and then for no name. Whoever
    writes a text can invent any number of ids, and requests for their names would take the place of all others."""

    def __init__(self, most_in_an_hour: int) -> None:
        self._most = most_in_an_hour
        self._ids: dict[str, None] = {}
        """Those that were asked for last, the newest at the end."""
        self._number, self._until = 0, time.monotonic() + HOUR_SECONDS
        """How many were asked for in the hour that ends then, on time.monotonic()."""

    def may_be_known(self, id: str) -> bool:
        """Return whether to ask for the name of an id."""
        if (now := time.monotonic()) >= self._until:
            self._number, self._until = 0, now + HOUR_SECONDS
        return self._number < self._most and len(id) <= MAX_ID_CHARACTERS and id not in self._ids

    def add(self, ids: Iterable[str]) -> None:
        """Remember ids that the source does not know."""
        for id in ids:
            self._number += 1
            self._ids[id] = None
            if len(self._ids) > MAX_REMEMBERED:
                del self._ids[next(iter(self._ids))]

    def forget(self) -> None:
        """Let ids be asked for again: their people may have come since."""
        self._ids.clear()
