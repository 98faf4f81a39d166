"""Writes the tables of docs/evaluation.md from the results of ``bench.retrieval`` and ``bench.confidence``.

python -m bench.judged
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import confidence, retrieval

DOCUMENT = Path(__file__).parent.parent / "docs" / "evaluation.md"
MARKED = re.compile(r"(<!-- (\w+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)
TITLES = {"cranfield": "Cranfield", "python_docs": "Python docs"}
GEOMETRIES = {
    "as-it-is": "bundled model",
    "crowded": "crowded: unrelated texts from .70 on",
    "narrow": "narrow: a few directions in a cone",
    "sparse": "sparse: half noise, low similarities",
}
SHORTEST_P = 0.0002
"""The smallest p that 10,000 draws can show."""


def collection_table(name: str, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of a collection, the comparison with each half, and the commit."""
    of = results[name]
    yield "| " + " | ".join((TITLES[name], "nDCG@10", "Δ (p)", "recall@50", "Δ (p)", *_kinds(of))) + " |"
    yield "|---" * (5 + len(of["kinds"])) + "|"
    for line in of["lines"]:
        cells = [line["variant"]]
        for measure in retrieval.TESTED:
            cells += [_interval(line[measure]), _change(line.get(f"{measure} over the line before"))]
        cells += [_number(line[f"nDCG@5 {kind}"]) for kind in of["kinds"]]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for alone, measures in of["complete over"].items():
        texts = (
            f"{measure} {_signed(c['mean'])} [{_signed(c['low'])}, {_signed(c['high'])}], p {_p(c['p'])}, better on"
            f" {c['better']} queries and worse on {c['worse']}"
            for measure, c in measures.items()
        )
        yield f"Complete, over {alone}: {'; '.join(texts)}."
    yield ""
    yield f"{of['queries']} queries on {of['documents']} documents. {_measured(of)}"


def floor_table(results: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "| geometry | collection | three quarters of the unrelated questions below | floor | own turned away |"
        " others' answered | everyday answered |"
    )
    yield "|---" * 7 + "|"
    for key, of in results["results"].items():
        geometry, _, name = key.partition(", ")
        shares = (f"{of[share]:.1%}" for share in ("own turned away", "others' answered", "everyday answered"))
        cells = (GEOMETRIES[geometry], TITLES[name], _number(of["unrelated"]), _number(of["floor"]), *shares)
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield _measured(results)


def _kinds(of: Mapping[str, Any]) -> list[str]:
    return [f"nDCG@5 {kind}" if n == 0 else kind for n, kind in enumerate(of["kinds"])]


def _measured(results: Mapping[str, Any]) -> str:
    changed = "" if results["clean"] else " with local changes"
    return f"Measured {results['at'][:10]} at {results['commit']}{changed}."


def _interval(value: list[float]) -> str:
    mean, low, high = map(_number, value)
    return f"{mean} [{low}, {high}]"


def _change(difference: Mapping[str, float] | None) -> str:
    return "" if difference is None else f"{_signed(difference['mean'])} ({_p(difference['p']).removeprefix('= ')})"


def _number(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1)


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("0.", ".", 1)


def _p(value: float) -> str:
    if value <= SHORTEST_P:
        return f"≤ {SHORTEST_P:.4f}".replace("0.", ".", 1)
    return f"= {value:.4f}".replace("0.", ".", 1) if value < 0.001 else f"= {_number(value)}"


def written(document: str, retrieved: Mapping[str, Any], floors: Mapping[str, Any]) -> str:
    """Return the document with the tables between its markers. Raises KeyError for a marker without results."""
    tables = {name: collection_table(name, retrieved) for name in retrieved}
    tables |= {"floors": floor_table(floors)} if floors else {}

    def table(match: re.Match[str]) -> str:
        return match[1] + "\n".join(tables[match[2]]) + "\n" + match[3]

    return MARKED.sub(table, document)


def results() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the stored results of both; empty where nothing was measured."""
    retrieved, floors = (
        json.loads(file.read_text("utf-8")) if file.exists() else {} for file in (retrieval.RESULTS, confidence.RESULTS)
    )
    return retrieved, floors


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text("utf-8"), *results()), "utf-8")
    sys.stdout.write(f"the tables in {DOCUMENT.name}\n")


if __name__ == "__main__":
    main()
