"""Issues and discussions of very many long comments."""

from __future__ import annotations

from typing import Any, cast

import pytest

from connectors.github import queries
from connectors.github.queries import TooMuchText, complete

PAGE = {"hasNextPage": True, "endCursor": "x"}


class Endless:
    """Answers each query with another page of comments."""

    def __init__(self) -> None:
        self.requests = 0

    async def query(self, text: str, _variables: object) -> tuple[Any, frozenset[str]]:
        self.requests += 1
        said = {"id": "c", "body": "a" * 10_000, "replies": {"nodes": []}, "comments": {"nodes": []}}
        names = ("comments", "replies", "reviews")
        page = {"hasNextPage": True, "endCursor": f"x{self.requests}"}
        return {"node": {name: {"pageInfo": page, "nodes": [dict(said)] * 5} for name in names}}, frozenset()


@pytest.mark.parametrize("kind", ["issues", "pull_requests", "discussions"])
async def test_a_document_of_very_many_long_comments_takes_a_bounded_amount_of_memory(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GitHub allows 2,500 comments of 64 kB, and twenty documents were read at the same time."""
    monkeypatch.setattr(queries, "MAX_DOCUMENT_BYTES", 1_000_000)
    api, end = Endless(), {"pageInfo": {}, "nodes": []}
    first = {"pageInfo": PAGE, "nodes": []}
    item = {"id": "i", "comments": end if kind == "pull_requests" else first, "reviews": first}
    with pytest.raises(TooMuchText):
        await complete(cast(Any, api), kind, item)
    assert 15 < api.requests < 25


@pytest.mark.parametrize("kind", ["pull_requests", "discussions"])
async def test_comments_that_answer_others_are_counted_once(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They counted as part of the first response, and again by themselves: half of the text was too large."""
    monkeypatch.setattr(queries, "MAX_DOCUMENT_BYTES", 300_000)
    said = {"nodes": [{"id": f"{n}", "body": "a" * 10_000} for n in range(20)]}
    outer, inner = ("comments", "replies") if kind == "discussions" else ("reviews", "comments")
    item = {"id": "i", "comments": {"nodes": []}, outer: {"nodes": [{"id": "c", "body": "", inner: said}]}}
    read = await complete(cast(Any, None), kind, item)
    assert len(str(read)) > 200_000
