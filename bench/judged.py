"""Writes the tables of docs/evaluation.md from the results of bench.retrieval, confidence, conversations, languages
and context, that of docs/conflicts.md from those of bench.conflicts, and that of docs/modes.md from bench.history.

python -m bench.judged
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import retrieval

RESULTS = Path(__file__).parent / "results"
DOCUMENTS = [Path(__file__).parent.parent / "docs" / name for name in ("evaluation.md", "conflicts.md", "modes.md")]
MARKED = re.compile(r"(<!-- (\w+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)
TITLES = {
    "cranfield": "Cranfield",
    "python_docs": "Python docs",
    "german": "German manual pages",
    "spanish": "Spanish manual pages",
}
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


WAYS = ("as typed", "carried over", "always carried over", "written to stand alone")


def conversation_table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of follow-up questions: nDCG@10 of each way to read them, and recall of the first two."""
    yield (
        "| | taken for follow-ups | as typed | carried over | always the whole question before |"
        " written to stand alone | recall@50 |"
    )
    yield "|---" * 7 + "|"
    for questions, of in results["results"].items():
        ranks = [_number(of[way]["nDCG@10"][0]) for way in WAYS]
        recall = " → ".join(_number(of[way]["recall@50"][0]) for way in WAYS[:2])
        cells = (f"{of['questions']} {questions}", str(of["taken for follow-ups"]), *ranks, recall)
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield _measured(results)


def language_table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of languages in one index: English fields alone, and together with the fields of the language."""
    yield (
        "| questions in | | nDCG@10, English fields | both | difference [95 %] | p | recall@50, English fields | both |"
    )
    yield "|---" * 8 + "|"
    measures = results["collections"]["mixed"]["keyword"]
    for language, ranks in measures["nDCG@10"].items():
        recall = measures["recall@50"][language]
        mean, low, high = map(_signed, ranks["difference"])
        compared = (
            _number(ranks["english"]),
            _number(ranks["own"]),
            f"{mean} [{low}, {high}]",
            _p(ranks["p"]).removeprefix("= "),
        )
        cells = (language, str(ranks["queries"]), *compared, _number(recall["english"]), _number(recall["own"]))
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield _measured(results["machine"])


def conflict_table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of planted edits by their kind, and what was reported in unmodified text."""
    yield "| edit | planted | copies: detected | excerpts: detected | of the right kind | false alarms |"
    yield "|---" * 6 + "|"
    planted = results["planted"]
    for kind, of in planted["kinds"].items():
        is_harmless = "detected" not in of
        shares = [
            ""
            if is_harmless or not (most := of.get(f"{form}: edits", 0))
            else f"{of.get(f'{form}: detected', 0) / most:.0%}"
            for form in ("copy", "excerpt")
        ]
        right = "" if is_harmless else f"{of['right kind'] / of['detected']:.0%}"
        yield f"| {' | '.join((kind, str(of['edits']), *shares, right, str(of['false alarms'])))} |"
    yield ""
    yield (
        f"All {planted['edits']:,} edits: precision {_number(planted['precision'])}, recall"
        f" {_number(planted['recall'])}."
    )
    for name, of in results["unmodified"].items():
        yield (
            f"Unmodified {name}: {of['false alarms']} false alarms and {of['duplicates']} pairs of duplicates in"
            f" {of['chunks']:,} chunks; {of['milliseconds a chunk']} ms of CPU a chunk (p95"
            f" {of['milliseconds a chunk p95']})."
        )
    yield _measured(results)


COLLECTIONS = {"chat": "conversations", "paragraphs": "paragraphs as replies"}


def context_table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of what a message's vector gains from text in front of it: nDCG@10 of vector search alone."""
    yield "| nDCG@10 | embedded | reply | Δ (p) | thread | Δ (p) |"
    yield "|---" * 6 + "|"
    for name, of in results["collections"].items():
        for variant, line in of["lines"].items():
            cells = [f"{COLLECTIONS[name]}: {of['queries']} questions, {of['messages']} messages", variant]
            for target in ("reply", "thread"):
                cells += [_interval(line[target]), _change(line.get(f"{target} over the line before"))]
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield _measured(results)


def history_table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of groupings of a history: the share of questions whose pair is among what is read along."""
    lines = results["lines"]
    kinds = results["questions"]
    selections = list(next(iter(lines.values()))[next(iter(kinds))])
    heads = [f"{kind}: {selections[0]}" if n == 0 else name for kind in kinds for n, name in enumerate(selections)]
    yield f"| pairs a chunk | tokens a chunk | {' | '.join(heads)} |"
    yield "|---" * (2 + len(heads)) + "|"
    for size, of in lines.items():
        shares = [_number(of[kind][name]) for kind in kinds for name in selections]
        yield f"| {size} | {of['tokens a chunk']} | {' | '.join(shares)} |"
    yield ""
    numbers = " and ".join(f"{number} of the kind {kind}" for kind, number in kinds.items())
    yield f"A history of {results['pairs']} pairs; questions: {numbers}. {_measured(results)}"


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


def written(document: str, tables: Mapping[str, Iterable[str]]) -> str:
    """Return the document with the tables between its markers. Raises KeyError for a marker without results."""

    def table(match: re.Match[str]) -> str:
        return match[1] + "\n".join(tables[match[2]]) + "\n" + match[3]

    return MARKED.sub(table, document)


def tables() -> dict[str, Iterator[str]]:
    """Return the tables by their markers, from the stored results; those that were not measured are absent."""
    retrieved = _results("retrieval")
    others = {name: name for name in ("conversations", "languages", "conflicts", "context", "history")} | {
        "floors": "confidence"
    }
    writers = {
        "floors": floor_table,
        "conversations": conversation_table,
        "languages": language_table,
        "conflicts": conflict_table,
        "context": context_table,
        "history": history_table,
    }
    measured = {marker: results for marker, name in others.items() if (results := _results(name))}
    return {name: collection_table(name, retrieved) for name in retrieved} | {
        marker: writers[marker](results) for marker, results in measured.items()
    }


def _results(name: str) -> Mapping[str, Any]:
    file = RESULTS / f"{name}.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}


def main() -> None:
    made = {name: list(lines) for name, lines in tables().items()}
    for document in DOCUMENTS:
        document.write_text(written(document.read_text("utf-8"), made), "utf-8")
        sys.stdout.write(f"the tables in {document.name}\n")


if __name__ == "__main__":
    main()
