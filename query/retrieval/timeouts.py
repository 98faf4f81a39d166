"""How a search's time is shared out, so that its parts end before it does.

One after another a search waits for the ledger three times (who asks, what that caller may read, the last word on every
passage), for the slower of both halves (embedding and then vectors; keywords), and for the reranker:

    3 × ledger + max(embed + 2 × vectors, keywords) + rerank ≤ search_seconds

(vectors twice: counting what may be read, then the scan, which has what counting leaves.) A half that is late is left
out and the answer says so; only the ledger and the whole end a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.core.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds."""

    ledger: float
    embed: float
    vectors: float
    keywords: float
    rerank: float

    @property
    def total(self) -> float:
        return 3 * self.ledger + max(self.embed + 2 * self.vectors, self.keywords) + self.rerank


def share(search_seconds: float, rerank_seconds: float) -> Budget:
    """rerank_seconds: 0 where nothing is reranked. Raises Misconfigured when that leaves the search less than half."""
    if rerank_seconds > search_seconds / 2:
        raise Misconfigured(
            f"PENSTOCK_RERANK_TIMEOUT_SECONDS is {rerank_seconds:g}, more than half of the"
            f" {search_seconds:g} s of PENSTOCK_SERVE_SEARCH_SECONDS: lower it, or raise that"
        )
    left = search_seconds - rerank_seconds
    return Budget(
        ledger=0.15 * left, embed=0.22 * left, vectors=0.14 * left, keywords=0.5 * left, rerank=rerank_seconds
    )
