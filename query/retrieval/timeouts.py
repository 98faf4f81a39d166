"""Time limits of the parts of a search, which end before the limit of the whole search.

A search waits in sequence for the ledger three times (the caller's identity, its access, the verification of every
passage), for the slower of both stores (embedding and then vectors; keywords), and for the reranker:

    3 × ledger + max(embed + 2 × vectors, keywords) + rerank ≤ search_seconds

(``vectors`` counts twice: counting what may be read, and the scan, which also gets what counting leaves.) A store that
is late is left out, and the response says so; only the limits of the ledger and of the whole search end a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.core.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """The time limits of a search's parts, in seconds."""

    ledger: float
    embed: float
    vectors: float
    keywords: float
    rerank: float

    @property
    def total(self) -> float:
        return 3 * self.ledger + max(self.embed + 2 * self.vectors, self.keywords) + self.rerank


def time_budget(search_seconds: float, rerank_seconds: float) -> TimeBudget:
    """Divide the time of a search. rerank_seconds: 0 without a reranker. Raises Misconfigured when reranking takes more
    than half of it."""
    if rerank_seconds > search_seconds / 2:
        raise Misconfigured(
            f"PENSTOCK_RERANK_TIMEOUT_SECONDS is {rerank_seconds:g}, more than half of the"
            f" {search_seconds:g} s of PENSTOCK_SERVE_SEARCH_SECONDS: lower the first or raise the second"
        )
    left = search_seconds - rerank_seconds
    return TimeBudget(
        ledger=0.15 * left, embed=0.22 * left, vectors=0.14 * left, keywords=0.5 * left, rerank=rerank_seconds
    )
