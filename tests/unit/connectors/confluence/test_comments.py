"""Pages of very many long comments."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from connectors.confluence import cloud, data_center
from connectors.confluence.cloud import page_comments
from connectors.confluence.data_center import DataCenter


class Endless:
    """Answers each request with comments without end."""

    def __init__(self) -> None:
        self.results = 0

    async def all_results(self, _path: str, **_: object) -> AsyncIterator[Any]:
        while True:
            self.results += 1
            version = {"number": 1, "createdAt": "2026-05-23T14:47:28.592Z", "when": "2026-05-23T14:47:28.592Z"}
            body = {"storage": {"value": f"<p>{'a' * 1_000}</p>"}}
            yield {"id": f"{self.results}", "version": version, "body": body, "history": {}}


async def test_a_page_of_very_many_long_comments_takes_a_bounded_amount_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cloud, "MAX_STORAGE_CHARACTERS", 50_000)
    monkeypatch.setattr(data_center, "MAX_TEXTS_BYTES", 50_000)
    page = SimpleNamespace(kind="page", id="1")
    assert len(await page_comments(cast(Any, Endless()), cast(Any, page))) == 50
    site = DataCenter(cast(Any, Endless()), cast(Any, None))
    expanded = {"comment": {"results": [], "_links": {"next": "x"}}}
    assert 20 < len(await site._nested_results(expanded, "1", "descendant/comment", "body.storage")) < 60


async def test_a_page_has_at_most_two_thousand_comments() -> None:
    page = SimpleNamespace(kind="page", id="1")
    assert len(await page_comments(cast(Any, Endless()), cast(Any, page))) == cloud.MAX_COMMENTS
