"""Documents, queries and judgements from a folder: BEIR's layout, or the Cranfield files."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.errors import PenstockError

Judgements = Mapping[str, Mapping[str, int]]
"""The gain of each document for each query. Other documents are not relevant."""


class BadDataset(PenstockError):
    """The folder is not a valid test collection; the message names the file and the problem."""


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    title: str
    text: str
    author: str | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    documents: Sequence[Document]
    queries: Mapping[str, str]
    """The queries that have a relevant document, in the order of the file."""
    judgements: Judgements
    """The judgements of these queries."""
    slices: Mapping[str, str] = field(default_factory=dict)
    """The kind of each query, if its file has one (``metadata.kind``)."""


def read(folder: Path) -> Dataset:
    """corpus.jsonl, queries.jsonl and qrels/*.tsv (test.tsv where there are several; or qrels.tsv); or cran.all.1400,
    cran.qry and cranqrel. Raises BadDataset."""
    if not folder.is_dir():
        raise BadDataset(f"{folder} is not a folder: give one with corpus.jsonl, queries.jsonl and qrels/*.tsv")
    try:
        if (folder / "corpus.jsonl").exists():
            return _beir(folder)
        if (folder / "cran.qry").exists():
            return _cranfield(folder)
    except (OSError, UnicodeDecodeError) as error:
        raise BadDataset(f"{folder}: {type(error).__name__} while reading: {error}") from error
    raise BadDataset(f"{folder} holds neither corpus.jsonl (BEIR's layout) nor cran.qry (Cranfield)")


# BEIR


def _beir(folder: Path) -> Dataset:
    documents = [
        Document(_named(line, "_id"), str(line.get("title") or ""), str(line.get("text") or ""))
        for line in _lines(folder / "corpus.jsonl")
    ]
    queries: dict[str, str] = {}
    slices: dict[str, str] = {}
    for line in _lines(folder / "queries.jsonl"):
        id_ = _named(line, "_id")
        queries[id_] = str(line.get("text") or "")
        metadata = line.get("metadata")
        if isinstance(metadata, Mapping) and isinstance(kind := metadata.get("kind"), str):
            slices[id_] = kind
    return _dataset(folder, documents, queries, _qrels(_qrels_file(folder)), slices)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        raise BadDataset(f"{path} is missing")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                parsed = json.loads(line)
            except json.JSONDecodeError as error:
                raise BadDataset(f"{path}:{number} is not JSON") from error
            if not isinstance(parsed, dict):
                raise BadDataset(f"{path}:{number} is not an object")
            yield parsed


def _named(line: Mapping[str, Any], key: str) -> str:
    if not isinstance(line.get(key), str | int) or line[key] == "":
        raise BadDataset(f'a line has no "{key}": every document and query needs one')
    return str(line[key])


def _qrels_file(folder: Path) -> Path:
    paths = sorted((folder / "qrels").glob("*.tsv"))
    for path in (folder / "qrels" / "test.tsv", *paths, folder / "qrels.tsv"):
        if path.exists():
            return path
    raise BadDataset(f"{folder / 'qrels'} holds no *.tsv: the judgements are missing")


def _qrels(path: Path) -> Judgements:
    """Three columns with a header, or TREC's four without one."""
    judged: dict[str, dict[str, int]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
            cells = row if len(row) > 1 else " ".join(row).split()
            if not cells or cells[0] in ("query-id", "query_id", "qid"):
                continue
            try:
                query, document, gain = cells[0], cells[-2], int(cells[-1])
            except (IndexError, ValueError) as error:
                raise BadDataset(f"{path}:{number} is not a query, a document and a whole number") from error
            judged.setdefault(query, {})[document] = gain
    return judged


# Cranfield


def _cranfield(folder: Path) -> Dataset:
    """Grades 1 (a complete answer) to 4 (of minimum interest) become gains 4 to 1; others say that it is not relevant.
    Judgements number the queries as they stand, not by their ``.I``."""
    documents = [
        Document(r["I"], r.get("T", ""), r["W"], r.get("A") or None)
        for r in _records(folder / "cran.all.1400")
        if r.get("W")  # two are empty
    ]
    queries = {str(number): r["W"] for number, r in enumerate(_records(folder / "cran.qry"), start=1)}
    judged: dict[str, dict[str, int]] = {}
    for number, line in enumerate((folder / "cranqrel").read_text().splitlines(), start=1):
        try:
            query, document, grade = line.split()
            gain = 5 - int(grade) if 1 <= int(grade) <= 4 else 0
        except ValueError as error:
            raise BadDataset(f"{folder / 'cranqrel'}:{number} is not a query, a document and a grade") from error
        judged.setdefault(query, {})[document] = gain
    return _dataset(folder, documents, queries, judged, {})


def _records(path: Path) -> Iterator[dict[str, str]]:
    """``.I n`` begins a record, ``.X`` a field."""
    for block in re.split(r"^\.I ", path.read_text(), flags=re.MULTILINE)[1:]:
        number, *fields = re.split(r"^\.([A-Z])\n", block, flags=re.MULTILINE)
        pairs = zip(fields[::2], fields[1::2], strict=True)
        yield {"I": number.strip(), **{name: " ".join(text.split()) for name, text in pairs}}


def _dataset(
    folder: Path,
    documents: Sequence[Document],
    queries: Mapping[str, str],
    judged: Judgements,
    slices: Mapping[str, str],
) -> Dataset:
    relevant = {query: {d: g for d, g in gains.items() if g > 0} for query, gains in judged.items()}
    questions = {id_: text for id_, text in queries.items() if text.strip() and relevant.get(id_)}
    if not documents or not questions:
        raise BadDataset(
            f"{folder}: {len(documents)} documents and {len(questions)} judged queries; at least one of each"
        )
    return Dataset(
        folder.resolve().name,
        documents,
        questions,
        {id_: relevant[id_] for id_ in questions},
        {id_: kind for id_, kind in slices.items() if id_ in questions},
    )
