"""Pages of very many long comments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

import connectors.room as room
from connectors.confluence import cloud, data_center
from connectors.confluence.client import comment_v1
from connectors.confluence.cloud import page_comments
from connectors.confluence.data_center import DataCenter
from connectors.confluence.model import Comment
from connectors.portions import in_portions


class Many:
    """Answers each request with very many comments."""

    def __init__(self) -> None:
        self.results = 0

    async def all_results(self, _path: str, **_: object) -> AsyncIterator[Any]:
        for _number in range(3_000):
            self.results += 1
            version = {"number": 1, "createdAt": "2026-05-23T14:47:28.592Z", "when": "2026-05-23T14:47:28.592Z"}
            body = {"storage": {"value": f"<p>{'a' * 1_000}</p>"}}
            yield {"id": f"{self.results}", "version": version, "body": body, "history": {}}


async def test_a_page_of_very_many_long_comments_takes_a_bounded_amount_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All comments are known all the same: the page had another revision than in a listing, and was read again with
    each sweep."""
    for module in (cloud, data_center):
        monkeypatch.setattr(module, "MAX_STORAGE_CHARACTERS", 50_000)
    page = SimpleNamespace(kind="page", id="1")
    comments = await page_comments(cast(Any, Many()), cast(Any, page))
    assert len(comments) == cloud.MAX_COMMENTS
    assert 50_000 < sum(len(comment.body) for comment in comments) < 52_000
    site = DataCenter(cast(Any, Many()), cast(Any, None))
    expanded = {"comment": {"results": [], "_links": {"next": "x"}}}
    comments = [*map(comment_v1, await site._nested_results(expanded, "1", "descendant/comment", "body.storage"))]
    assert len(comments) == 3_000
    assert 50_000 < sum(len(comment.body) for comment in comments) < 52_000


async def test_several_pages_of_very_many_comments_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "MAX_COMMENTS", 100)
    monkeypatch.setattr(room, "MAX_HELD_BYTES", 150_000)
    page = SimpleNamespace(kind="page", id="1")

    async def read_all(numbers: Sequence[int]) -> list[list[Comment]]:
        return [await page_comments(cast(Any, Many()), cast(Any, page)) for _ in numbers]

    assert [len(some) async for _, some in in_portions(range(3), read_all)] == [1, 1, 1]
