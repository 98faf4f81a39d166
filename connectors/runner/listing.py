"""The documents of a listing, and the parts that it lacks, which the end of a sweep compares with the rows."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from connectors.runner.rows import SweepRow
from connectors.source import Unlisted

SMALL = 100_000
"""Up to so many ids are compared without numpy, whose import takes a command a tenth of a second."""


class ListedIds:
    """The external ids that a listing has shown so far, in memory: a sweep writes nothing for what it finds unchanged.

    It holds a hash of eight bytes for each id (``hash``, keyed anew in each process). After a listing of a million
    documents another document counts as listed with a probability of 5e-14; it is then deleted after a restart."""

    def __init__(self) -> None:
        self._hashes = array("q")
        self._is_sorted = True
        self._small: set[int] | None = None

    def add(self, external_ids: Iterable[str]) -> None:
        self._hashes.extend(map(hash, external_ids))
        self._is_sorted, self._small = False, None

    def lacks(self, external_ids: Sequence[str]) -> list[str]:
        """Return the external ids that the listing has not shown, in their order."""
        if not self._hashes or not external_ids:
            return list(external_ids)
        if len(self._hashes) <= SMALL:
            if self._small is None:
                self._small = set(self._hashes)
            return [external_id for external_id in external_ids if hash(external_id) not in self._small]
        import numpy as np

        known = np.frombuffer(self._hashes, np.int64)
        if not self._is_sorted:
            known.sort()
            self._is_sorted = True
        hashes = np.fromiter(map(hash, external_ids), np.int64, len(external_ids))
        are_listed = known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)] == hashes
        return [external_id for external_id, is_listed in zip(external_ids, are_listed, strict=True) if not is_listed]


class Prefixes:
    """Beginnings of external ids. An id is looked up in time that hardly depends on their number: whoever writes a
    store may have a hundred thousand folders set aside."""

    def __init__(self, prefixes: Iterable[str]) -> None:
        self._sorted: list[str] = []
        """In order, and none within another one."""
        for prefix in sorted(prefixes):
            if not self._sorted or not prefix.startswith(self._sorted[-1]):
                self._sorted.append(prefix)

    def __contains__(self, external_id: str) -> bool:
        """Whether the id begins with any of them: with the last one that does not come after it."""
        at = bisect_right(self._sorted, external_id)
        return at > 0 and external_id.startswith(self._sorted[at - 1])


class UnlistedParts:
    """The parts of a source that could not be listed, without single documents."""

    def __init__(self, parts: Iterable[Unlisted]) -> None:
        places = [part for part in parts if not part.is_document]
        self._prefixes = Prefixes(part.id_prefix for part in places if part.id_prefix is not None)
        tags = {part.tag for part in places if part.id_prefix is None}
        self._may_hold_all = None in tags
        self._tags = tags - {None}

    def may_hold(self, row: SweepRow) -> bool:
        """Return whether a document may belong to one of these parts. One without tags, whose access was not known, may
        belong to any that has no prefix."""
        if self._may_hold_all or row.external_id in self._prefixes:
            return True
        return bool(self._tags) and (not row.acl_tags or not self._tags.isdisjoint(row.acl_tags))
