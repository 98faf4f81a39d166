"""Measures what each part of hybrid retrieval adds, on judged collections: docs/evaluation.md has the table.

    python -m bench.retrieval [cranfield|python_docs|german|spanish|FOLDER]...

Cranfield lies in ../shared/data/cranfield beside the project or in the folder that PENSTOCK_TEST_CRANFIELD names, and
the documentation that Python brings is made into a collection (bench/python_docs.py). Without an argument, both are
measured. German and Spanish manual pages (bench/manual_pages.py) played no part in any choice. The results go to
bench/results/retrieval.json, from which ``python -m bench.judged`` writes the tables; those of a FOLDER, as `penstock
eval` takes it, are printed. Uses the running local stack (``penstock up``), in a place of its own. Each line is
compared with the one before it, on the same queries.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

import structlog

from bench.machine import moment
from bench.manual_pages import collection as manual_pages
from bench.python_docs import write
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Embedder
from pipeline.runtime.settings import Settings, dist, load
from query.embedding.embedders import QueryEmbedder
from query.evaluation import place
from query.evaluation.dataset import Dataset, read
from query.evaluation.measures import Values, compare, interval, measure
from query.evaluation.rank import rank
from query.model import Mode, Ranker
from query.retrieval.fusion import Fused, Ranking
from query.retrieval.search import Search, Timeouts
from query.settings import RetrievalSettings

CRANFIELD = Path(
    os.environ.get("PENSTOCK_TEST_CRANFIELD", Path(__file__).parent.parent.parent / "shared" / "data" / "cranfield")
)
PYTHON_DOCS = "python_docs"
LANGUAGES = ("german", "spanish")
RESULTS = Path(__file__).parent / "results" / "retrieval.json"
RRF_K = 60
TESTED = ("nDCG@10", "recall@50")
PATIENT = Timeouts(60.0, 60.0, 60.0)


def reciprocal_ranks(rankings: Mapping[Ranker, Ranking], _: object = None) -> list[Fused]:
    """Cormack, Clarke and Büttcher (2009): Σ 1 / (60 + rank)."""
    ranks: dict[UUID, dict[Ranker, int]] = {}
    for ranker, ranking in rankings.items():
        for position, chunk_id in enumerate(ranking.ids, start=1):
            ranks.setdefault(chunk_id, {})[ranker] = position
    fused = [Fused(id_, sum(1 / (RRF_K + r) for r in of.values()), of) for id_, of in ranks.items()]
    return sorted(fused, key=lambda f: (-f.score, min(f.ranks.values()), f.chunk_id))


def plain(words: str, _: object = None) -> dict[str, Any]:
    return {"must": {"match": {"text": words}}}


def no_words(*_: object) -> dict[str, float]:
    return {}


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    mode: Mode = "hybrid"
    feedback: bool = False
    neighbour_weight: float = RetrievalSettings.model_fields["neighbour_weight"].default
    instead: tuple[tuple[str, Callable[..., object]], ...] = ()
    """Functions of the service by name, with their replacements."""


TEXT_ONLY = ("query.retrieval.keywords.clauses", plain)
RRF = ("query.retrieval.ranking.fuse", reciprocal_ranks)
NO_WORDS = ("query.retrieval.feedback.expansion_words", no_words)
VARIANTS = (
    Variant("vector alone", "vector"),
    Variant("keyword alone, text only", "keyword", instead=(TEXT_ONLY,)),
    Variant("keyword alone", "keyword"),
    Variant("hybrid: reciprocal ranks, text only", instead=(TEXT_ONLY, RRF)),
    Variant("+ title, headings, nearness", instead=(RRF,)),
    Variant("+ standardised scores instead of ranks"),
    Variant("+ relevance feedback: moved vector", feedback=True, neighbour_weight=0.0, instead=(NO_WORDS,)),
    Variant("+ relevance feedback: typical words", feedback=True, neighbour_weight=0.0),
    Variant("+ relevance feedback: nearest candidates (complete)", feedback=True),
)


async def run(settings: Settings, model: Embedder, dataset: Dataset) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    before: Values | None = None
    measured: dict[str, Values] = {}
    async with place.opened(settings, model, dataset) as here:
        await here.load(dataset.documents)
        for variant in VARIANTS:
            search = Search(
                here.pool,
                here.es,
                QueryEmbedder(lambda: model, embed_seconds=60),
                timeouts=PATIENT,
                settings=RetrievalSettings(
                    feedback=variant.feedback, neighbour_weight=variant.neighbour_weight, cached_queries=0
                ),
            )
            caller = await search.identify(place.TENANT, tags=[place.TAG])
            with ExitStack() as patches:
                for name, function in variant.instead:
                    patches.enter_context(patch(name, function))
                rankings, degraded = await rank(search, caller, dataset, [variant.mode])
            assert not degraded, degraded
            values = measure(rankings[variant.mode], dataset.judgements)
            lines.append(_line(dataset, variant, values, before))
            sys.stderr.write(f"{dataset.name}: {variant.name}\n")
            before = measured[variant.name] = values
    return {
        "documents": len(dataset.documents),
        "queries": len(dataset.queries),
        "kinds": list(dict.fromkeys(dataset.slices.values())),
        "lines": lines,
        "complete over": {
            alone: {name: _difference(before, measured[alone], name) for name in TESTED}
            for alone in ("vector alone", "keyword alone")
            if before is not None
        },
    }


def _difference(values: Values, others: Values, name: str) -> dict[str, float]:
    c = compare(values[name], others[name])
    return {
        "mean": round(c.difference.mean, 4),
        "low": round(c.difference.low, 4),
        "high": round(c.difference.high, 4),
        "p": round(c.p_randomisation, 4),
        "better": c.wins,
        "worse": c.losses,
    }


def _line(dataset: Dataset, variant: Variant, values: Values, before: Values | None) -> dict[str, Any]:
    line: dict[str, Any] = {"variant": variant.name}
    for name in ("nDCG@5", *TESTED):
        mean = interval(values[name])
        line[name] = [round(mean.mean, 4), round(mean.low, 4), round(mean.high, 4)]
        if before is not None and name in TESTED:
            line[f"{name} over the line before"] = _difference(values, before, name)
    for kind in dict.fromkeys(dataset.slices.values()):
        of = [n for n, query in enumerate(dataset.queries) if dataset.slices.get(query) == kind]
        line[f"nDCG@5 {kind}"] = round(float(values["nDCG@5"][of].mean()), 4)
    return line


async def main(names: Sequence[str]) -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    settings, model = load(), embedder(load().embedding, dist() / "models")
    try:
        with tempfile.TemporaryDirectory() as made:
            write(Path(made) / PYTHON_DOCS)
            folders = {CRANFIELD.name: CRANFIELD, PYTHON_DOCS: Path(made) / PYTHON_DOCS}
            for name in names or folders:
                began = moment()
                dataset = manual_pages(name) if name in LANGUAGES else read(folders.get(name, Path(name)))
                result = {**began, **await run(settings, model, dataset)}
                if name in folders or name in LANGUAGES:
                    _store(name, result)
                else:
                    json.dump(result, sys.stdout, indent=1)
    finally:
        await model.aclose()


def _store(name: str, result: Mapping[str, Any]) -> None:
    """Replace the results of this collection; those of another one stay."""
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(dict(sorted((results | {name: result}).items())), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
