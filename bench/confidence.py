"""How many questions are answered that should not be, and how many are turned away that should not be, by any model.

    python -m bench.confidence [FOLDER]

Uses the running servers (``penstock up --no-workers``), in places of its own, and OpenAI-compatible servers that serve
the bundled model with four geometries (tests/fakes/geometries.py). Cranfield (FOLDER, by default
../shared/data/cranfield beside the project) and the documentation that Python brings (bench/python_docs.py) are loaded
with each of them, calibrated, and asked 200 of their own questions, 200 of the other collection's, and everyday ones,
by the real hybrid search. Prints JSON: docs/evaluation.md has the table.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import SecretStr

from bench.python_docs import write
from bench.retrieval import CRANFIELD, PATIENT
from pipeline.core.relevance import EVERYDAY as CALIBRATED_WITH
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Embedder
from pipeline.generations.calibration import calibrate
from pipeline.runtime.settings import EmbeddingSettings, Settings, dist, load
from query.access.callers import Caller
from query.embedding.embedders import QueryEmbedder
from query.evaluation import place
from query.evaluation.dataset import Dataset, read
from query.retrieval.search import Search
from query.settings import RetrievalSettings
from tests.fakes.geometries import GEOMETRIES, FakeGeometry, Vector

AT_ONCE = 4
MOST_QUESTIONS = 200
"""Questions of a collection that are asked, evenly spread."""

EVERYDAY = (
    "how do I bake sourdough bread",
    "best pasta recipe for two",
    "when does the train to Hamburg leave",
    "who won the football match yesterday",
    "symptoms of the flu in children",
    "how many vacation days do I have left",
    "what is our travel expense policy",
    "change my direct deposit bank account",
    "capital of Australia",
    "how to prune apple trees in winter",
    "cheap hotels near the beach",
    "what did the board decide on Tuesday",
    "parental leave eligibility",
    "translate good morning into Spanish",
    "how tall is Mount Everest",
    "when was the French revolution",
    "treat a dog with ear infection",
    "reset the office coffee machine",
    "where can I park my bicycle",
    "order new business cards",
    "guitar chords for beginners",
    "invoice payment overdue",
    "who is responsible for customer onboarding in Asia",
    "quarterly sales numbers of the retail division",
    "how to get a visa for India",
    "water the plants while on holiday",
    "wifi password for guests",
    "Kubernetes pod stuck in pending",
    "rotate the TLS certificate of the load balancer",
    "merge conflict in git",
    "what is the meaning of life",
    "recommend a novel by a Russian author",
    "mortgage interest rate forecast",
    "stain removal from a wool carpet",
    "signs of a failing car battery",
    "penalty shootout rules",
)
"""None of them is among those that the floor is calibrated with."""


def spread(dataset: Dataset) -> list[str]:
    questions = list(dataset.queries.values())
    most = min(MOST_QUESTIONS, len(questions))
    return [questions[n * len(questions) // most] for n in range(most)]


async def answered(search: Search, caller: Caller, questions: Sequence[str]) -> float:
    """The share of questions that are answered."""
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(question: str) -> bool:
        async with places:
            response = await search.search(question, caller, top=10)
        assert not response.degraded, response.degraded
        return response.relevant

    verdicts = await asyncio.gather(*(ask(question) for question in questions))
    return round(sum(verdicts) / len(verdicts), 4)


async def run(settings: Settings, model: Embedder, dataset: Dataset, others: Dataset) -> dict[str, Any]:
    async with place.opened(settings, model, dataset) as here:
        await here.load(dataset.documents)
        began = perf_counter()
        async with here.pool.connection() as connection:
            calibration = await calibrate(connection, here.generation, model)
        assert calibration is not None
        seconds = round(perf_counter() - began, 1)
        search = Search(
            here.pool,
            here.es,
            QueryEmbedder(lambda: model, embed_seconds=60),
            timeouts=PATIENT,
            settings=RetrievalSettings(feedback=False, cached_queries=0),
        )
        caller = await search.identify(place.TENANT, tags=[place.TAG])
        own = await answered(search, caller, spread(dataset))
        return {
            "floor": round(calibration.cosine, 3),
            "unrelated": round(calibration.unrelated, 3),
            "known": round(calibration.known, 3),
            "random": round(calibration.random, 3),
            "calibration seconds": seconds,
            "own turned away": round(1 - own, 4),
            "others' answered": await answered(search, caller, spread(others)),
            "everyday answered": await answered(search, caller, EVERYDAY),
        }


async def main(folder: Path) -> None:
    assert not set(EVERYDAY) & set(CALIBRATED_WITH)
    settings, bundled = load(), embedder(EmbeddingSettings(), dist() / "models")
    vectors: dict[str, Vector] = {}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as made:
        write(Path(made) / "python_docs")
        datasets = [read(folder), read(Path(made) / "python_docs")]
        for geometry in GEOMETRIES:
            async with FakeGeometry(geometry, bundled, vectors) as server:
                chosen = EmbeddingSettings(
                    provider="openai",
                    base_url=server.url,
                    model=geometry,
                    dimensions=server.dimensions,
                    send_dimensions=False,
                    api_key=SecretStr("any"),
                    timeout_seconds=600,
                    input_window=254,
                    chunk_tokens=200,
                )
                model = embedder(chosen, dist() / "models")
                of_model = settings.model_copy(update={"embedding": chosen})
                for dataset, others in (datasets, datasets[::-1]):
                    results[f"{geometry}, {dataset.name}"] = await run(of_model, model, dataset, others)
                    sys.stderr.write(f"{geometry}, {dataset.name}: {results[f'{geometry}, {dataset.name}']}\n")
                await model.aclose()
    await bundled.aclose()
    json.dump(results, sys.stdout, indent=1)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else CRANFIELD))
