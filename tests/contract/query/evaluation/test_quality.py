"""The quality of the whole search, with the bundled model, on parts of two judged collections: a change that ranks
worse fails here. docs/evaluation.md has the figures of the whole collections."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.python_docs import write
from bench.retrieval import CRANFIELD
from deploy.local.stack import Stack
from pipeline.embedding.choose import embedder
from pipeline.runtime.settings import EmbeddingSettings, dist
from query.embedding.embedders import QueryEmbedder
from query.evaluation import place
from query.evaluation.dataset import Dataset, read
from query.evaluation.rank import rank
from query.evaluation.report import report
from query.model import MODES
from query.retrieval.search import Search, Timeouts
from tests.support.query.library import settings_on

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

SEED = 20_261_128
PATIENT = Timeouts(60.0, 60.0, 60.0)


def part(whole: Dataset, *, queries: int, documents: int, longest: int) -> Dataset:
    """A part that is the same each time. Its queries are answered by documents of at most ``longest`` characters, which
    are in the part, together with others to at least ``documents``."""
    dice = random.Random(SEED)
    short = {document.id: document for document in whole.documents if len(document.text) <= longest}
    answered = [query for query in whole.queries if whole.judgements[query].keys() <= short.keys()]
    chosen = sorted(dice.sample(answered, min(queries, len(answered))))
    needed = dict.fromkeys(id_ for query in chosen for id_ in whole.judgements[query])
    others = [id_ for id_ in short if id_ not in needed]
    more = dice.sample(others, max(0, min(documents - len(needed), len(others))))
    return Dataset(
        whole.name,
        [short[id_] for id_ in (*needed, *more)],
        {query: whole.queries[query] for query in chosen},
        {query: whole.judgements[query] for query in chosen},
    )


@asynccontextmanager
async def loaded(stack: Stack, dataset: Dataset) -> AsyncIterator[Search]:
    settings, model = settings_on(stack), embedder(EmbeddingSettings(), dist() / "models")
    try:
        async with place.opened(settings, model, dataset) as here:
            await here.load(dataset.documents)
            yield Search(here.pool, here.es, QueryEmbedder(lambda: model, embed_seconds=60), timeouts=PATIENT)
    finally:
        await model.aclose()


async def quality(stack: Stack, dataset: Dataset) -> Mapping[str, Mapping[str, float]]:
    """Mode → measure → mean over the queries."""
    async with loaded(stack, dataset) as search:
        caller = await search.identify(place.TENANT, tags=[place.TAG])
        rankings, degraded = await rank(search, caller, dataset, MODES)
    assert not degraded
    runs = report(dataset, rankings, degraded)["runs"]
    return {mode: {name: run[name] for name in ("nDCG@10", "recall@50")} for mode, run in runs.items()}


async def test_python_documentation_is_ranked_as_well_as_before(stack: Stack, tmp_path: Path) -> None:
    write(tmp_path / "python_docs")
    dataset = part(read(tmp_path / "python_docs"), queries=160, documents=400, longest=1_500)
    print(await quality(stack, dataset))


async def test_cranfield_is_ranked_as_well_as_before(stack: Stack) -> None:
    folder = Path(os.environ.get("PENSTOCK_TEST_CRANFIELD", CRANFIELD))
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: Cranfield is not part of the repository")
    print(await quality(stack, part(read(folder), queries=60, documents=500, longest=2_500)))
