"""The writes and deletes after which a store holds exactly the desired chunks. The state before may be unknown."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Diff:
    write: tuple[UUID, ...]
    """In reading order."""
    delete: tuple[UUID, ...]


def diff_vectors(desired: Sequence[UUID], present: Collection[UUID], refused: Collection[UUID] = ()) -> Diff:
    """An unchanged chunk's row is never touched: write what is absent, delete what is not desired.

    ``refused`` chunks can never be embedded: they are desired but not tried again.
    """
    have = set(present)
    skip = have | set(refused)
    return Diff(tuple(i for i in desired if i not in skip), tuple(sorted(have - set(desired))))


def diff_keywords(desired: Mapping[UUID, int], confirmed: Mapping[UUID, int], claimed: Collection[UUID]) -> Diff:
    """``desired`` and ``confirmed`` map a chunk to the hash of its entry; ``claimed`` may stand in the index.

    An entry is written unless it was confirmed with this very hash; whatever else may stand there is deleted.
    """
    write = tuple(i for i, entry_hash in desired.items() if confirmed.get(i) != entry_hash)
    return Diff(write, tuple(sorted((set(claimed) | set(confirmed)) - set(desired))))
