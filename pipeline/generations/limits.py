"""How fast and how far a build may spend tokens. Arithmetic alone: the caller tells the time and what was spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.core.errors import Retryable

PAGES_A_MINUTE = 6
"""A limit on tokens a minute is kept in steps of ten seconds."""


class Paused(Retryable):
    """The budget is spent: the build stays as it is, and goes on when it is run again with more."""


@dataclass(frozen=True, slots=True)
class Limits:
    tokens_per_minute: int | None = None
    budget_tokens: int | None = None
    """The budget of the whole build, earlier runs included."""
    price: float = 0.0
    """The price of a million tokens."""

    @property
    def any(self) -> bool:
        return self.tokens_per_minute is not None or self.budget_tokens is not None


class Feed:
    """Decides how many documents come next. Law: never is more under way than fits the budget, as far as the estimate
    of a document (its tokens in the generation that is replaced, times ``ratio``) is right; what was really spent is
    what counts before the next page."""

    def __init__(self, limits: Limits, *, ratio: float = 1.0, name: str = "") -> None:
        self._limits = limits
        self._ratio = ratio
        self._name = name
        self._base: int | None = None
        """The tokens spent when everything before was known to be done."""
        self._under_way = 0.0
        self._not_before = 0.0
        self._last = 0.0

    def fits(self, document: int, spent: int) -> bool:
        """Whether a document of so many tokens may come without knowing what those before it really cost."""
        budget = self._limits.budget_tokens
        if self._base is None:
            self._base = spent
        return budget is None or self._reckoned(spent) + document * self._ratio <= budget

    def all_spent(self) -> None:
        self._base, self._under_way = None, 0.0

    def page(self, ahead: Sequence[int], spent: int) -> int:
        """ahead: tokens of the documents that come next. Raises Paused when not even the first may."""
        if not self.fits(ahead[0], spent):
            raise Paused(self._spent_up(spent))
        most = self._limits.tokens_per_minute
        taken, sum_ = 0, 0.0
        for tokens in ahead:
            more = sum_ + tokens * self._ratio
            if taken and (
                (most is not None and more > most / PAGES_A_MINUTE)
                or (
                    self._limits.budget_tokens is not None and self._reckoned(spent) + more > self._limits.budget_tokens
                )
            ):
                break
            taken, sum_ = taken + 1, more
        self._under_way += sum_
        self._last = sum_
        return taken

    def wait(self, now: float) -> float:
        """Seconds until the page that was just decided may go out."""
        if self._limits.tokens_per_minute is None:
            return 0.0
        start = max(now, self._not_before)
        self._not_before = start + 60 * self._last / self._limits.tokens_per_minute
        return start - now

    def _reckoned(self, spent: int) -> float:
        """Spent for certain, or as estimated, whichever is more."""
        return max(float(spent), (spent if self._base is None else self._base) + self._under_way)

    def _spent_up(self, spent: int) -> str:
        money = f" ({spent * self._limits.price / 1e6:,.2f})" if self._limits.price else ""
        return (
            f"{self._name} is paused: {spent:,} of the {self._limits.budget_tokens:,} tokens of its budget are"
            f" spent{money}. What is built stays and follows live changes; run `penstock generation build` again with a"
            " higher --budget to continue"
        )
