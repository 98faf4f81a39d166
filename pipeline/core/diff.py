"""What a sink must do so that a store holds exactly the wanted chunks. "Previous may be missing" is an input."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Diff:
    write: tuple[UUID, ...]
    """In reading order."""
    delete: tuple[UUID, ...]


def diff_vectors(wanted: Sequence[UUID], present: Collection[UUID], refused: Collection[UUID] = ()) -> Diff:
    """An unchanged chunk's row is never touched: write what is absent, delete what is not wanted.

    ``refused`` chunks can never be embedded: they are wanted but not tried again.
    """
    have = set(present)
    want = set(wanted)
    skip = have | set(refused)
    return Diff(tuple(i for i in wanted if i not in skip), tuple(sorted(have - want)))


def diff_keywords(wanted: Mapping[UUID, int], confirmed: Mapping[UUID, int], claimed: Collection[UUID]) -> Diff:
    """``wanted`` and ``confirmed`` map a chunk to the hash of its entry; ``claimed`` may stand in the index.

    An entry is written unless it was confirmed with this very hash; whatever else may stand there is deleted.
    """
    write = tuple(i for i, made_of in wanted.items() if confirmed.get(i) != made_of)
    return Diff(write, tuple(sorted((set(claimed) | set(confirmed)) - set(wanted))))
