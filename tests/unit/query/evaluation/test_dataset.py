"""Collections as they are found in folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from query.evaluation.dataset import BadDataset, read
from query.evaluation.golden import Golden, Judged
from query.evaluation.golden import read as read_golden
from query.evaluation.golden import write as write_golden


def beir(folder: Path) -> Path:
    (folder / "qrels").mkdir()
    corpus = [{"_id": "d 1", "title": "One", "text": "first"}, {"_id": "d2", "text": "second"}]
    queries = [
        {"_id": "q1", "text": "which?", "metadata": {"kind": "short"}},
        {"_id": "q2", "text": "judged by nobody"},
        {"_id": "q3", "text": "other"},
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in corpus))
    (folder / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in queries))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td 1\t2\nq1\td2\t0\nq3\td2\t1\n")
    return folder


def test_a_collection_in_the_beir_layout_is_read(tmp_path: Path) -> None:
    loaded = read(beir(tmp_path))
    assert [(d.id, d.title, d.text) for d in loaded.documents] == [("d 1", "One", "first"), ("d2", "", "second")]
    assert dict(loaded.queries) == {"q1": "which?", "q3": "other"}
    assert loaded.judgements == {"q1": {"d 1": 2}, "q3": {"d2": 1}}
    assert dict(loaded.slices) == {"q1": "short"}


def test_a_cranfield_collection_is_read_with_inverted_grades_and_queries_numbered_by_position(tmp_path: Path) -> None:
    (tmp_path / "cran.all.1400").write_text(".I 1\n.T\na wing\n.A\nsmith\n.B\n.W\na wing\nin a stream .\n.I 2\n.W\n")
    (tmp_path / "cran.qry").write_text(".I 004\n.W\nwhat of\nwings\n.I 007\n.W\nof slabs\n")
    (tmp_path / "cranqrel").write_text("1 1 1\n1 5 4\n2 1 -1\n")
    loaded = read(tmp_path)
    assert [(d.id, d.title, d.text, d.author) for d in loaded.documents] == [
        ("1", "a wing", "a wing in a stream .", "smith")
    ]
    assert dict(loaded.queries) == {"1": "what of wings"}
    assert loaded.judgements == {"1": {"1": 4, "5": 1}}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "corpus.jsonl").write_text('{"_id": "1"\n'), "corpus.jsonl:1 is not JSON"),
        (lambda f: (f / "corpus.jsonl").write_text('{"text": "x"}\n'), 'no "_id"'),
        (lambda f: (f / "queries.jsonl").unlink(), "queries.jsonl is missing"),
        (lambda f: (f / "qrels" / "test.tsv").unlink(), "judgements are missing"),
        (lambda f: (f / "qrels" / "test.tsv").write_text("q1\td1\tgood\n"), "test.tsv:1"),
        (lambda f: (f / "qrels" / "test.tsv").write_text("q1\td2\t0\n"), "0 judged queries"),
        (lambda f: (f / "corpus.jsonl").unlink(), "neither corpus.jsonl"),
    ],
)
def test_an_invalid_collection_folder_is_reported_with_the_reason(tmp_path: Path, spoil: object, says: str) -> None:
    spoil(beir(tmp_path))  # type: ignore[operator]
    with pytest.raises(BadDataset, match=says):
        read(tmp_path)


def test_golden_judgements_survive_writing_and_reading_a_file() -> None:
    golden = [
        Golden("acme", "Wie geht's?", (Judged("wiki", "a/b", "so „geht“ es", 3), Judged("git", "c")), ("ann",), ("x",)),
        Golden("acme", "why", (Judged("wiki", "d"),), reference="because"),
    ]
    assert list(read_golden(write_golden(golden))) == golden


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"query": "q", "judgements": []}',
        '{"query": " ", "judgements": [{"source": "s", "external_id": "e"}]}',
        '{"query": "q", "judgements": [{"source": "s", "external_id": "e", "gain": 11}]}',
        '{"query": "q", "judgements": [{"source": "s"}]}',
    ],
)
def test_an_invalid_line_of_a_golden_file_is_named(line: str) -> None:
    with pytest.raises(BadDataset, match="line 2"):
        list(read_golden(["", line]))
