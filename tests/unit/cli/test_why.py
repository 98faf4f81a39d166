"""The reasons that `penstock why` gives for a query that does not find a document."""

from __future__ import annotations

from typing import Any, cast

from cli.why import _why_not
from query.model import Result, SearchResults


def page(count: int, cursor: str | None) -> SearchResults:
    return SearchResults(cast("list[Result]", [cast("Any", None)] * count), [], 0.0, True, cursor)


def test_a_page_that_ends_early_does_not_say_that_the_document_is_no_candidate() -> None:
    assert _why_not(page(40, "more"), 100) == "40 passages of other documents rank higher"
    assert _why_not(page(100, "more"), 100) == "100 passages of other documents rank higher"
    assert "is a candidate; the search returned 40 other passages" in _why_not(page(40, None), 100)
