"""Finds where "nothing relevant" begins: floors for the cosine of the nearest passage and for the shared words.

    python -m bench.confidence [FOLDER]

Asks two collections (Cranfield's abstracts, and the Python documentation topics) the questions that belong to them and
the questions that do not: the other collection's, and everyday ones. FOLDER: Cranfield, by default
../shared/data/cranfield beside the project.
Uses the local model and no server. Prints the share of right questions that would be turned away
and of wrong ones that would be answered, for a range of floors; the chosen ones are in query/retrieval/ranking.py.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from pipeline.core.chunking import chunk
from pipeline.core.model import ChunkParams
from pipeline.core.normalise import normalise
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Embedder
from pipeline.runtime.settings import EmbeddingSettings, dist
from query.retrieval.ranking import stems
from tests.support.query.questions import QUESTIONS

DEFAULT = Path(__file__).parent.parent.parent / "shared" / "data" / "cranfield"

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


def records(path: Path) -> list[dict[str, str]]:
    """Read records: ``.I n`` begins a record, ``.X`` a field."""
    parsed = []
    for block in re.split(r"^\.I ", path.read_text(), flags=re.MULTILINE)[1:]:
        _, *fields = re.split(r"^\.([A-Z])\n", block, flags=re.MULTILINE)
        parsed.append({name: " ".join(text.split()) for name, text in zip(fields[::2], fields[1::2], strict=True)})
    return parsed


async def signs(model: Embedder, questions: Sequence[str], texts: Sequence[str], vectors: np.ndarray) -> np.ndarray:
    """Return the best cosine and the best coverage of each question, of shape (len(questions), 2)."""
    words = [stems(text) for text in texts]
    best = []
    for question in questions:
        cosines = vectors @ await model.embed_query(question)
        requested = stems(question)
        shares = [len(requested & present) / len(requested) if requested else 0.0 for present in words]
        best.append((float(cosines.max()), max(shares)))
    return np.array(best)


async def main(folder: Path) -> None:
    model = embedder(EmbeddingSettings(), dist() / "models")
    cranfield = [r["T"] + "\n" + r["W"] for r in records(folder / "cran.all.1400") if r.get("W")]
    params = ChunkParams(200, 80, 254)
    python = []
    for text in topics.values():
        body, kind = normalise(text, "text/x-rst")
        python += [c.text for c in chunk(body, kind, params=params, count_tokens=model.count_tokens)]
    questions_of = {"cranfield": [r["W"] for r in records(folder / "cran.qry")], "python": [q for q, _ in QUESTIONS]}
    right, wrong = [], []
    for name, texts in (("cranfield", cranfield), ("python", python)):
        embedded = [await model.embed_documents(texts[n : n + 64]) for n in range(0, len(texts), 64)]
        vectors = np.concatenate([e.vectors for e in embedded])
        other = "python" if name == "cranfield" else "cranfield"
        of = {
            "own": await signs(model, questions_of[name], texts, vectors),
            "others'": await signs(model, questions_of[other], texts, vectors),
            "everyday": await signs(model, EVERYDAY, texts, vectors),
        }
        for kind, values in of.items():
            for column, sign in enumerate(("cosine", "coverage")):
                spread = np.quantile(values[:, column], [0, 0.02, 0.05, 0.5, 0.95, 0.98, 1]).round(3)
                print(f"{name:10} {kind:9} {sign:9} quantiles 0 2 5 50 95 98 100 %: {spread}")
        right.append(of["own"])
        wrong += [of["others'"], of["everyday"]]
    await model.aclose()
    good, bad = np.concatenate(right), np.concatenate(wrong)
    print("\ncosine  coverage  turned away wrongly  answered wrongly")
    for cosine in (0.25, 0.3, 0.35, 0.4, 0.45, 0.5):
        for share in (0.5, 0.6, 0.67, 0.75, 1.0):
            passes = [(v[:, 0] >= cosine) | (v[:, 1] >= share) for v in (good, bad)]
            print(f"{cosine:6.2f}  {share:8.2f}  {1 - passes[0].mean():19.3f}  {passes[1].mean():16.3f}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT))
