"""Which mode answers a question: a pure decision on facts that are gathered one by one, only as far as they are needed.

The order is docs/modes.md's: explicit → focused → long context → what is not embedded yet → semantic or hybrid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from query.model import AnswerMode

SLIGHTLY_OVER = 1.25
"""Times the budget that is still read without retrieval: the newest four fifths of it are better than a search."""
MOST_OVER = 2.0
"""Times the budget that is read, trimmed, where too much has no vector yet; of more than that less than half would be
left, and keywords find all of it."""
MOST_MISSING = 0.20
"""Share of the readable chunks without embedding up to which a search by meaning is believed."""


@dataclass(frozen=True, slots=True)
class Size:
    """What the caller may read of what was chosen, by the manifests."""

    tokens: int
    documents: int
    complete: bool
    """False: counting ended (or failed) before all of it was seen; there is more than this."""


UNKNOWN_SIZE = Size(0, 0, False)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of what the caller may read has no vector yet."""

    chunks: int
    missing: int
    sampled: bool = False
    """Of a sample of the documents, where there are many."""

    @property
    def share(self) -> float:
        return self.missing / self.chunks if self.chunks else 0.0


UNKNOWN_COVERAGE = Coverage(0, 0)


@dataclass(frozen=True, slots=True)
class Known:
    """None: not looked at yet."""

    budget_tokens: int
    explicit: AnswerMode | None = None
    documents_named: bool = False
    personal: bool = False
    """All that may be searched is one person's own."""
    size: Size | None = None
    coverage: Coverage | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    mode: AnswerMode
    reason: str
    """Shown to whoever asked."""


Needed = Literal["size", "coverage"]
"""The fact that the decision waits for."""


def decide(known: Known) -> Decision | Needed:
    """Law: it asks for a fact only where the answer depends on it, and never twice for the same one."""
    if known.explicit is not None:
        return Decision(known.explicit, "asked for")
    if known.documents_named:
        return Decision("focused", "documents are named")
    if known.size is None:
        return "size"
    if fits(known.size, known.budget_tokens, 1.0):
        return Decision("long_context", "everything readable fits the budget")
    if fits(known.size, known.budget_tokens, SLIGHTLY_OVER):
        return Decision("long_context", "slightly more is readable than the budget holds: the newest of it")
    if known.coverage is None:
        return "coverage"
    if known.coverage.share > MOST_MISSING:
        if fits(known.size, known.budget_tokens, MOST_OVER):
            return Decision("long_context", "too much has no embedding yet: the newest is read whole")
        return Decision("keyword", "too much has no embedding yet, and all of it is too long to be read whole")
    if known.personal:
        return Decision("semantic", "a personal collection: by meaning and by time")
    return Decision("hybrid", "more is readable than the budget holds")


def fits(size: Size, budget_tokens: int, times: float) -> bool:
    return size.complete and size.tokens <= times * budget_tokens


def most_tokens(budget_tokens: int) -> int:
    """Where counting may stop: from there on every decision is the same."""
    return int(MOST_OVER * budget_tokens)
