"""The tags that a listing of groups still has to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.source import CursorExpired
from connectors.tag_queue import TagQueue

TAGS = [f"{kind}:{n}" for kind in ("account", "group", "site-group") for n in range(4)]


@given(
    st.dictionaries(st.sampled_from(TAGS), st.sets(st.sampled_from(TAGS))),
    st.sets(st.sampled_from(TAGS)),
    st.integers(1, 5),
    st.integers(0, 5),
)
def test_every_tag_that_is_named_is_taken_once_also_after_an_interruption(
    named: Mapping[str, set[str]], first: set[str], number: int, interrupted_after: int
) -> None:
    queue, taken, batches = TagQueue(first), list[str](), 0
    while batch := queue.take(number):
        assert len({tag.partition(":")[0] for tag in batch}) == 1
        taken += batch
        for tag in batch:
            queue.add(named.get(tag, ()))
        batches += 1
        if batches == interrupted_after:
            queue = TagQueue.from_cursor(json.loads(json.dumps(queue.cursor)))
    reachable = set(first)
    while more := {inner for tag in reachable for inner in named.get(tag, ())} - reachable:
        reachable |= more
    assert sorted(taken) == sorted(reachable)


def test_a_tag_that_is_put_back_is_taken_again_from_the_cursor_alone() -> None:
    queue = TagQueue(["group:1", "group:2"])
    assert queue.take(8) == ["group:1", "group:2"]
    queue.put_back("group:1")
    assert queue.take(8) == []
    continued = TagQueue.from_cursor(queue.cursor)
    assert continued.is_continued
    assert continued.take(8) == ["group:1"]


def test_a_listing_of_which_every_tag_failed_has_read_nothing() -> None:
    queue = TagQueue(["group:1", "group:2"])
    for tag in queue.take(8):
        queue.put_back(tag)
    assert not TagQueue.from_cursor(queue.cursor).is_continued


@pytest.mark.parametrize("cursor", [{}, {"waiting": 3, "taken": []}, {"waiting": []}])
def test_a_malformed_cursor_counts_as_expired(cursor: Mapping[str, Any]) -> None:
    with pytest.raises(CursorExpired):
        TagQueue.from_cursor(cursor)
