"""Compares the analyzers of each language with the English one: docs/evaluation.md has the table.

    python -m bench.languages [--hybrid] [--choose] [COLLECTION]... > bench/results/languages.json

--hybrid: hybrid search too, for which the model embeds the pages. --choose: with the queries for choosing. Needs the
running local stack (``penstock up``) and a Debian machine: the collections are manual pages (bench/manual_pages.py),
one for each language and ``mixed``, in which all languages are one index. A quarter of the queries, chosen by their
hashes, is for choosing how to search; every number is of the other three quarters.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import structlog
from numpy.typing import NDArray

from bench.machine import description
from bench.manual_pages import PACKAGES, collection
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Embedder
from pipeline.runtime.settings import Settings, dist, load
from query.embedding.embedders import QueryEmbedder
from query.evaluation import place
from query.evaluation.dataset import Dataset
from query.evaluation.measures import Values, compare, measure
from query.evaluation.rank import rank
from query.model import Mode
from query.retrieval.search import Search, Timeouts
from query.settings import RetrievalSettings
from tests.support.query.library import WordEmbedder

PATIENT = Timeouts(60.0, 60.0, 60.0)
MIXED = "mixed"
CHOSEN_WITH = 4
"""One query in this many is for choosing."""


def dataset(name: str) -> Dataset:
    """Raises Misconfigured when a package cannot be fetched."""
    if name != MIXED:
        return collection(name)
    parts = [collection(language) for language in PACKAGES]
    return Dataset(
        MIXED,
        [document for part in parts for document in part.documents],
        {id_: text for part in parts for id_, text in part.queries.items()},
        {id_: judged for part in parts for id_, judged in part.judgements.items()},
        {id_: part.name for part in parts for id_ in part.queries},
    )


def fold(of: Dataset, *, chosen_with: bool) -> Dataset:
    """The queries that are for choosing, or the others."""
    others = {id_: text for id_, text in of.queries.items() if _is_for_choosing(id_) == chosen_with}
    return replace(of, queries=others, judgements={id_: of.judgements[id_] for id_ in others})


def _is_for_choosing(id_: str) -> bool:
    return hashlib.sha256(id_.encode()).digest()[0] % CHOSEN_WITH == 0


async def run(
    settings: Settings, model: Embedder, of: Dataset, modes: Sequence[Mode], *, chosen_with: bool
) -> dict[str, Any]:
    """The measures of one collection, in English analysis and in its own."""
    questions = fold(of, chosen_with=chosen_with)
    async with place.opened(settings, model, of) as here:
        await here.load(of.documents)
        search = Search(
            here.pool,
            here.es,
            QueryEmbedder(lambda: model, embed_seconds=60),
            timeouts=PATIENT,
            settings=RetrievalSettings(cached_queries=0),
        )
        caller = await search.identify(place.TENANT, tags=[place.TAG])
        values: dict[tuple[str, Mode], Values] = {}
        english = patch("query.retrieval.keywords.languages_of_question", lambda text: ())
        for name, context in (("english", english), ("own", nullcontext())):
            with context:
                rankings, degraded = await rank(search, caller, questions, modes)
            assert not degraded, degraded
            for mode in modes:
                values[name, mode] = measure(rankings[mode], questions.judgements)
            sys.stderr.write(f"{of.name}: {name}\n")
    return {
        "documents": len(of.documents),
        "queries": len(questions.queries),
        **{mode: _compared(questions, values["english", mode], values["own", mode]) for mode in modes},
    }


def _compared(questions: Dataset, english: Values, own: Values) -> dict[str, Any]:
    everything = np.ones(len(questions.queries), dtype=bool)
    slices = {"all": everything} | {
        kind: np.array([questions.slices[id_] == kind for id_ in questions.queries])
        for kind in dict.fromkeys(questions.slices[id_] for id_ in questions.queries)
    }
    return {
        name: {kind: _line(english[name][of], own[name][of]) for kind, of in slices.items()}
        for name in ("nDCG@10", "recall@50")
    }


def _line(english: NDArray[np.float64], own: NDArray[np.float64]) -> dict[str, Any]:
    compared = compare(own, english)
    difference = (compared.difference.mean, compared.difference.low, compared.difference.high)
    return {
        "queries": len(own),
        "english": round(float(english.mean()), 4),
        "own": round(float(own.mean()), 4),
        "difference": [round(number, 4) for number in difference],
        "p": round(compared.p_randomisation, 4),
    }


async def main(names: list[str]) -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    settings, hybrid, choosing = load(), "--hybrid" in names, "--choose" in names
    names = [name for name in names if not name.startswith("--")] or [*PACKAGES, MIXED]
    modes: tuple[Mode, ...] = ("keyword", "hybrid") if hybrid else ("keyword",)
    model: Embedder = embedder(settings.embedding, dist() / "models") if hybrid else WordEmbedder()
    try:
        results = {}
        for name in names:
            results[name] = await run(settings, model, dataset(name), modes, chosen_with=choosing)
            sys.stderr.write(f"{json.dumps(results[name])}\n")
    finally:
        await model.aclose()
    json.dump({"machine": description(), "collections": results}, sys.stdout, indent=1)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
