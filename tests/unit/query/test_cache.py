"""The memory of cached results is bounded, whatever a search asks for and returns."""

from __future__ import annotations

from dataclasses import replace
from sys import getsizeof
from uuid import UUID, uuid4

import pytest

from pipeline.core.model import ChunkParams, Generation
from query.access.filters import NONE, Filters
from query.model import Passage, Result
from query.retrieval import cache as module
from query.retrieval.cache import Cache, CachedResults, ChunkKey, Key, packed, unpacked

GENERATION = Generation("g1", "active", "words", "1", 64, 254, ChunkParams(), "", "", "chunks", "index")
KEY = Key("moss", "hybrid", 10, NONE, True, "relevance", None, GENERATION, "acme", b"a")


def cached(text: str = "", *, counted: int = 0) -> CachedResults:
    passage = Passage(uuid4(), uuid4(), "x", "wiki", "T", None, 0)
    chunks = [ChunkKey(UUID(int=n), UUID(int=n + 1)) for n in range(counted)]
    return CachedResults([Result(passage, text, 1.0, {})], [], True, None, packed(chunks), "1:1:")


def test_packed_chunks_are_unpacked_unchanged() -> None:
    chunks = [ChunkKey(uuid4(), uuid4()) for _ in range(3)]
    assert unpacked(packed(chunks)) == chunks


def test_more_than_a_thousand_ordinary_results_are_cached() -> None:
    """Ten passages of 2,500 characters, of 250 that were ranked. There were 580 of them."""
    passages = [Passage(uuid4(), uuid4(), "handbook/leave.md", "wiki", "Leave", None, 0) for _ in range(250)]
    results = [Result(passage, "m" * 2_500, 1.0, {}) for passage in passages[:10]]
    ordinary = CachedResults(results, [], True, None, packed(passages), "1:1:")
    cache = Cache(2_000)
    keys = [replace(KEY, query=str(n)) for n in range(2_000)]
    for key in keys:
        cache.store_results(key, ordinary)
    assert sum(cache.results(key) is not None for key in keys) > 1_200


@pytest.mark.parametrize("large", [cached("m" * 300_000), cached(counted=10_000)], ids=["texts", "counted"])
def test_large_results_take_the_place_of_many_small_ones(large: CachedResults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1_000_000)
    cache = Cache(100)
    keys = [replace(KEY, query=str(n)) for n in range(10)]
    for key in keys:
        cache.store_results(key, large)
    assert [n for n, key in enumerate(keys) if cache.results(key) is not None] == [7, 8, 9]


def test_results_that_are_larger_than_the_cache_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1_000_000)
    cache = Cache(100)
    cache.store_results(KEY, cached("m" * 1_000_000))
    assert cache.results(KEY) is None


def test_no_more_results_are_cached_than_is_set() -> None:
    cache = Cache(3)
    keys = [replace(KEY, query=str(n)) for n in range(5)]
    for key in keys:
        cache.store_results(key, cached())
    assert [n for n, key in enumerate(keys) if cache.results(key) is not None] == [2, 3, 4]


def test_a_search_with_very_long_filters_is_stored_under_a_digest() -> None:
    names = tuple(f"{n}{'x' * 490}" for n in range(100))
    long = replace(KEY, query="moss " * 1_000, filters=Filters(names, names, names))
    assert getsizeof(long.digest) < 100
    assert long.digest == replace(long).digest
    others = [replace(long, filters=Filters(names, names)), replace(long, tenant="other"), replace(long, access=b"b")]
    assert len({key.digest for key in [long, KEY, *others]}) == 5
