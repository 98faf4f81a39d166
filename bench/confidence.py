"""How many questions are answered that should not be, and how many are turned away that should not be, by any model.

    python -m bench.confidence [FOLDER [VECTORS]]

Two collections, Cranfield (FOLDER, by default ../shared/data/cranfield beside the project) and the documentation that
Python brings (bench/python_docs.py), are calibrated and asked their own questions, the other collection's, and everyday
ones: with the bundled model, and with its vectors in the geometries of other models (tests/fakes/geometries.py). The
rules are the product's; no server is used. (Through the stores: tests/contract/query/test_relevance_floor.py.) VECTORS:
an .npz file that keeps the bundled model's vectors between runs. Writes bench/results/confidence.json, from which
``python -m bench.judged`` writes the table of docs/evaluation.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import moment
from bench.python_docs import write
from bench.retrieval import CRANFIELD
from pipeline.core.chunking import chunk
from pipeline.core.model import ChunkParams
from pipeline.core.normalise import normalise
from pipeline.core.relevance import EVERYDAY as CALIBRATED_WITH
from pipeline.core.relevance import known_item, measure
from pipeline.core.titles import embedded_title
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Embedder
from pipeline.generations.calibration import KNOWN_ITEMS
from pipeline.runtime.settings import EmbeddingSettings, dist
from query.evaluation.dataset import Dataset, read
from query.retrieval.ranking import Floors, assess
from query.retrieval.words import stems
from query.settings import RetrievalSettings
from tests.fakes.geometries import GEOMETRIES, Vector

RESULTS = Path(__file__).parent / "results" / "confidence.json"
PARAMS = ChunkParams(200, 80, 254)
BATCH = 64
CANDIDATES = 64

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


class Bundled:
    """The bundled model's vectors by text, each computed once."""

    def __init__(self, model: Embedder, file: Path | None) -> None:
        self._model = model
        self._file = file
        self._by_hash: dict[str, Vector] = {}
        if file is not None and file.exists():
            stored = np.load(file)
            self._by_hash = dict(zip(stored["hashes"].tolist(), stored["vectors"], strict=True))

    async def embed(self, texts: Sequence[str]) -> None:
        missing = [text for text in dict.fromkeys(texts) if _hash(text) not in self._by_hash]
        for n in range(0, len(missing), BATCH):
            batch = missing[n : n + BATCH]
            embedded = await self._model.embed_documents(batch)
            self._by_hash.update(zip(map(_hash, batch), embedded.vectors, strict=True))
        if missing and self._file is not None:
            np.savez(self._file, hashes=list(self._by_hash), vectors=list(self._by_hash.values()))

    def vectors(self, texts: Iterable[str], geometry: str) -> Vector:
        """Return an array of shape (texts, dimensions)."""
        return np.stack([GEOMETRIES[geometry](self._by_hash[_hash(text)], text) for text in texts])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Collection:
    """A collection in chunks, with the stems of each."""

    def __init__(self, dataset: Dataset, model: Embedder) -> None:
        self.name = dataset.name
        self.questions = list(dataset.queries.values())
        self.texts: list[str] = []
        self.embedded: list[str] = []
        self._titled: list[str] = []
        for document in dataset.documents:
            body, kind = normalise(document.text, "text/plain")
            pieces = chunk(body, kind, params=PARAMS, count_tokens=model.count_tokens)
            title = embedded_title(document.title, kind, len(pieces), PARAMS)
            for piece in pieces:
                self.texts.append(piece.text)
                self.embedded.append(f"{title}\n{piece.text}" if title else piece.text)
                self._titled.append(f"{document.title}\n{piece.text}")
        self._chunks_of: dict[str, list[int]] = {}
        for n, text in enumerate(self._titled):
            for stem in stems(text):
                self._chunks_of.setdefault(stem, []).append(n)
        spread = sorted(range(len(self.texts)), key=lambda n: _hash(self.texts[n]))[:KNOWN_ITEMS]
        self.known = [known_item(self.texts[n], seed) for seed, n in enumerate(spread)]

    def candidates(self, question: str, cosines: Vector) -> list[str]:
        """The nearest chunks, and those with most of the question's words: what both stores propose."""
        shared = Counter(n for stem in stems(question) for n in self._chunks_of.get(stem, ()))
        by_words = [n for n, _ in shared.most_common(CANDIDATES)]
        nearest = np.argsort(-cosines)[:CANDIDATES].tolist()
        return [self._titled[n] for n in dict.fromkeys([*nearest, *by_words])]


def run(collection: Collection, others: Collection, bundled: Bundled, geometry: str) -> dict[str, Any]:
    chunks = bundled.vectors(collection.embedded, geometry)

    def cosines(questions: Sequence[str]) -> Vector:
        return bundled.vectors(questions, geometry) @ chunks.T

    everyday, known = (cosines(questions).max(axis=1).tolist() for questions in (CALIBRATED_WITH, collection.known))
    measured = measure(everyday, known)
    floors = Floors(measured.floor, RetrievalSettings().coverage_floor, "", measured.unrelated)

    def answered(questions: Sequence[str]) -> float:
        verdicts = [
            assess(question, float(row.max()), collection.candidates(question, row), floors)[0]
            for question, row in zip(questions, cosines(questions), strict=True)
        ]
        return sum(verdicts) / len(verdicts)

    return {
        "unrelated": round(measured.unrelated, 3),
        "floor": round(measured.floor, 3),
        "known": round(measured.known, 3),
        "own turned away": round(1 - answered(collection.questions), 4),
        "others' answered": round(answered(others.questions), 4),
        "everyday answered": round(answered(EVERYDAY), 4),
    }


async def main(folder: Path, vectors: Path | None) -> None:
    assert not set(EVERYDAY) & set(CALIBRATED_WITH)
    began = moment()
    model = embedder(EmbeddingSettings(), dist() / "models")
    bundled = Bundled(model, vectors)
    with tempfile.TemporaryDirectory() as made:
        write(Path(made) / "python_docs")
        collections = [Collection(read(path), model) for path in (folder, Path(made) / "python_docs")]
    for collection in collections:
        await bundled.embed([*collection.embedded, *collection.questions, *collection.known])
    await bundled.embed([*EVERYDAY, *CALIBRATED_WITH])
    await model.aclose()
    results = {
        f"{geometry}, {collection.name}": run(collection, others, bundled, geometry)
        for geometry in GEOMETRIES
        for collection, others in (collections, collections[::-1])
    }
    RESULTS.write_text(json.dumps({**began, "results": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    asyncio.run(
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else CRANFIELD, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    )
