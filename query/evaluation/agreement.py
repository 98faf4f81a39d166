"""How far two rankings of the same question agree. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from query.model import Found

DEPTH = 10
PERSISTENCE = 0.9
"""p of rank-biased overlap: the first ten ranks have 86 % of the weight (Webber, Moffat and Zobel 2010)."""


def documents(found: Found) -> list[str]:
    """The first DEPTH documents, each where its best passage stands. Not passages: another generation may cut
    otherwise."""
    ranked = {str(result.passage.document_id): None for result in found.results}
    return list(ranked)[:DEPTH]


def overlap(one: Sequence[str], other: Sequence[str]) -> float:
    """Share of the first DEPTH that both have, whatever their order; of the longer ranking, where neither is so long.
    Two empty ones agree."""
    first, second = set(one[:DEPTH]), set(other[:DEPTH])
    longest = max(len(first), len(second))
    return len(first & second) / longest if longest else 1.0


def rank_biased(one: Sequence[str], other: Sequence[str], p: float = PERSISTENCE) -> float:
    """Extrapolated rank-biased overlap (Webber, Moffat and Zobel 2010, equation 32), 0 to 1: as ``overlap``, and the
    higher a rank, the more it counts. No ranking may name anything twice."""
    short, long = sorted((one, other), key=len)
    s, l = len(short), len(long)  # noqa: E741  (the paper's names)
    if not s:
        return 0.0 if l else 1.0
    common = [len(set(short[:d]) & set(long[:d])) for d in range(l + 1)]
    total = sum(common[d] / d * p**d for d in range(1, l + 1))
    total += sum(common[s] * (d - s) / (s * d) * p**d for d in range(s + 1, l + 1))
    return (1 - p) / p * total + ((common[l] - common[s]) / l + common[s] / s) * p**l
