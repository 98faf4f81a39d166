"""What is missing from whole documents, said to people. All numbers are of what the asker may read."""

from __future__ import annotations

from query.modes.documents import Whole


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def unknown_documents(missing: int, named: int) -> str:
    """Whether they do not exist or may not be read is not told: to the asker both are the same."""
    what = f"{missing} of the {named} documents named" if named > 1 else "the document named"
    return f"{what} could not be found among what you may read"


def left_out(whole: Whole, budget_tokens: int) -> str:
    named = whole.read + whole.left_out
    return f"{whole.read} of {plural(named, 'document')} {_fit(whole)} the budget of {budget_tokens} tokens"


def trimmed(whole: Whole, budget_tokens: int) -> str:
    return f"the newest {left_out(whole, budget_tokens)}; the older rest was left out"


def unprepared(documents: int) -> str:
    return f"{plural(documents, 'document')} changed a moment ago and cannot be read yet"


def not_embedded(share: float) -> str:
    return f"{round(100 * share)} % of the passages have no embedding yet"


def _fit(whole: Whole) -> str:
    return "fit, the last one without its end," if whole.is_cut else "fit"
