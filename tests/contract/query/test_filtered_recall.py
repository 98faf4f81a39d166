"""A search finds the nearest passages that pass a narrow filter: the graph alone would miss many of them."""

from __future__ import annotations

import pytest

from bench.load_corpus import Corpus, WordVectors
from bench.load_library import TENANT, fill
from bench.load_runs import tag
from bench.query_load import recalled
from bench.selectivity import metadata
from deploy.local.stack import Stack
from pipeline.core.metadata_keys import key_filter
from pipeline.core.model import ChunkParams, VectorIndex
from query.access.filters import Filters
from query.retrieval.vectors import Tuning
from tests.support.query.library import Library

pytestmark = pytest.mark.stack

CHUNKS, DIMENSIONS = 3_000, 96
LEAST = 0.97
SMALL = Tuning(always_exact_rows=0)
"""The choice between the graph and an exact scan as in a collection of any size."""


PARAMS = ChunkParams(target=100, min_tokens=40, max_tokens=128)


@pytest.mark.slow
@pytest.mark.parametrize("index", ["pgvector", "elasticsearch"])
async def test_recall_under_filters_of_any_selectivity(stack: Stack, index: VectorIndex) -> None:
    corpus = Corpus()
    vectors = WordVectors(DIMENSIONS, corpus)
    async with Library.create(stack, vectors, params=PARAMS, vectors=index) as library:
        carried = index == "elasticsearch"
        await fill(library, corpus, vectors, CHUNKS, [TENANT], metadata=metadata, keywords=carried)
        everything = await library.caller(TENANT, tag("100 %"))
        measured = await recalled(library, corpus, vectors, everything, questions=10, tuning=SMALL)
        assert measured["recall@10"] >= LEAST, measured
        scans: set[str] = set()
        for key in ("spread", "topic"):
            for share in ("0.1 %", "1 %", "50 %"):
                for access in ("100 %", "10 %"):
                    filters = Filters(keys=(key_filter(key, any=[share]),))
                    caller = await library.caller(TENANT, tag(access))
                    measured = await recalled(
                        library, corpus, vectors, caller, filters, questions=10, depth=10, tuning=SMALL
                    )
                    assert measured["recall@10"] >= LEAST, (key, share, access, measured)
                    scans |= measured["scans"].keys()
        assert scans == ({"sketched", "index"} if carried else {"sketched", "graph"}), "both ways were tried"
