"""Computing the writes and deletes after which a store holds exactly the desired chunks. Its present state need not be
known completely. Pure."""

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
    """Write the desired chunks that are absent, and delete the present ones that are not desired. Rows of unchanged
    chunks are left alone. refused: chunks that the model cannot embed, which are not written.
    """
    have = set(present)
    skip = have | set(refused)
    return Diff(tuple(i for i in desired if i not in skip), tuple(sorted(have - set(desired))))


def diff_keywords(desired: Mapping[UUID, int], confirmed: Mapping[UUID, int], claimed: Collection[UUID]) -> Diff:
    """Write the desired entries that are not confirmed with the same hash, and delete all others that may be in the
    index. desired, confirmed: the hash of each chunk's entry. claimed: the chunks that may be in the index in any form.
    """
    write = tuple(i for i, entry_hash in desired.items() if confirmed.get(i) != entry_hash)
    return Diff(write, tuple(sorted((set(claimed) | set(confirmed)) - set(desired))))
