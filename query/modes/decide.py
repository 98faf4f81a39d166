"""The choice of an answer mode: a pure decision on facts that are gathered one by one, only as far as needed.

The order is that of docs/modes.md: explicit → focused → long context → missing embeddings → semantic or hybrid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from query.model import AnswerMode

SLIGHTLY_OVER = 1.25
"""How many times the budget is still read without retrieval: the newest four fifths of it are better than a search."""
MAX_OVER_BUDGET = 2.0
"""How many times the budget is read, trimmed, if too many chunks have no vector yet. Of more, less than half would be
left, while a keyword search covers all of it."""
MAX_MISSING_SHARE = 0.20
"""The largest share of readable chunks without an embedding up to which a vector search is trusted."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the selected documents that the caller may read, from the manifests."""

    tokens: int
    documents: int
    complete: bool
    """False: counting stopped or failed early, and there is more than this."""


UNKNOWN_SIZE = Size(0, 0, False)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of the readable chunks have no vector yet."""

    chunks: int
    missing: int
    sampled: bool = False
    """Whether the counts are those of a sample, because there are many documents."""

    @property
    def share(self) -> float:
        return self.missing / self.chunks if self.chunks else 0.0


UNKNOWN_COVERAGE = Coverage(0, 0)


@dataclass(frozen=True, slots=True)
class Known:
    """The facts that are known so far; None: not gathered yet."""

    budget_tokens: int
    explicit: AnswerMode | None = None
    documents_named: bool = False
    personal: bool = False
    """Whether all searchable documents belong to one person."""
    size: Size | None = None
    coverage: Coverage | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    mode: AnswerMode
    reason: str
    """One line for the caller."""


Needed = Literal["size", "coverage"]
"""The fact that is needed next."""


def decide(known: Known) -> Decision | Needed:
    """The decision, or the fact that it needs next.

    Law: it requests a fact only if the decision depends on it, and never the same fact twice.
    """
    if known.explicit is not None:
        return Decision(known.explicit, "requested")
    if known.documents_named:
        return Decision("focused", "the request names documents")
    if known.size is None:
        return "size"
    if fits(known.size, known.budget_tokens, 1.0):
        return Decision("long_context", "all readable documents fit the budget")
    if fits(known.size, known.budget_tokens, SLIGHTLY_OVER):
        return Decision("long_context", "the readable documents slightly exceed the budget: the newest are used")
    if known.coverage is None:
        return "coverage"
    if known.coverage.share > MAX_MISSING_SHARE:
        if fits(known.size, known.budget_tokens, MAX_OVER_BUDGET):
            return Decision("long_context", "too many passages have no embedding yet: the newest documents are used")
        return Decision("keyword", "too many passages have no embedding yet, and the documents exceed the budget")
    if known.personal:
        return Decision("semantic", "a personal collection is searched by meaning and by time")
    return Decision("hybrid", "the readable documents exceed the budget")


def fits(size: Size, budget_tokens: int, times: float) -> bool:
    return size.complete and size.tokens <= times * budget_tokens


def max_tokens(budget_tokens: int) -> int:
    """Where counting may stop, because more tokens do not change the decision."""
    return int(MAX_OVER_BUDGET * budget_tokens)
