"""How well the three modes rank, on the Cranfield collection: nDCG@10 and recall@50 of documents.

    python -m bench.retrieval [FOLDER]

FOLDER holds cran.all.1400, cran.qry and cranqrel (default: ../shared/data/cranfield beside the project). Uses the
running local stack (``penstock up``), in a database and index of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from math import log2
from pathlib import Path

import structlog

from deploy.local.stack import Stack
from pipeline.embedding.choose import embedder
from pipeline.settings import EmbeddingSettings, dist, home
from query.model import MODES
from tests.library import Library, document

DEFAULT = Path(__file__).parent.parent.parent / "shared" / "data" / "cranfield"
Judgements = Mapping[str, Mapping[str, int]]
"""Query → document → gain, 4 (complete answer) to 1 (of minimum interest)."""


def records(path: Path) -> list[dict[str, str]]:
    """``.I n`` begins a record, ``.X`` a field."""
    found = []
    for block in re.split(r"^\.I ", path.read_text(), flags=re.MULTILINE)[1:]:
        number, *fields = re.split(r"^\.([A-Z])\n", block, flags=re.MULTILINE)
        pairs = zip(fields[::2], fields[1::2], strict=True)
        found.append({"I": number.strip(), **{name: " ".join(text.split()) for name, text in pairs}})
    return found


def judgements(path: Path) -> Judgements:
    judged: dict[str, dict[str, int]] = {}
    for line in path.read_text().splitlines():
        query, doc, grade = line.split()
        if int(grade) > 0:
            judged.setdefault(query, {})[doc] = 5 - int(grade)
    return judged


def ndcg(ranked: Sequence[str], gains: Mapping[str, int], depth: int = 10) -> float:
    def discounted(values: Sequence[int]) -> float:
        return sum(gain / log2(rank + 1) for rank, gain in enumerate(values[:depth], start=1))

    return discounted([gains.get(d, 0) for d in ranked]) / discounted(sorted(gains.values(), reverse=True))


def recall(ranked: Sequence[str], gains: Mapping[str, int], depth: int = 50) -> float:
    return sum(d in gains for d in ranked[:depth]) / len(gains)


async def measure(library: Library, folder: Path) -> dict[str, dict[str, float]]:
    caller = await library.caller("acme", "staff")
    judged = judgements(folder / "cranqrel")
    scores: dict[str, dict[str, float]] = {mode: {"nDCG@10": 0.0, "recall@50": 0.0} for mode in MODES}
    for number, query in enumerate(records(folder / "cran.qry"), start=1):
        gains = judged[str(number)]
        for mode in MODES:
            found = await library.search.search(query["W"], caller, top=100, mode=mode)
            ranked = list(dict.fromkeys(r.passage.external_id for r in found.results))
            scores[mode]["nDCG@10"] += ndcg(ranked, gains)
            scores[mode]["recall@50"] += recall(ranked, gains)
    return {mode: {name: round(s / len(judged), 4) for name, s in of.items()} for mode, of in scores.items()}


async def main(folder: Path) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    model = embedder(EmbeddingSettings(), dist() / "models")
    try:
        async with Library.create(Stack(home()), model) as library:
            documents = [
                document(r["I"], r["W"], title=r["T"], author=r["A"], media_type="text/plain")
                for r in records(folder / "cran.all.1400")
                if r["W"]
            ]
            await library.put(*documents)
            print(json.dumps({"documents": len(documents), "runs": await measure(library, folder)}))
    finally:
        await model.aclose()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT))
