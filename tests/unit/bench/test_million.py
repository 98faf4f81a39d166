"""The benchmark of a million chunks: its arguments, the space that it plans, what it reads, and the tables of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest

from bench import million, million_curves
from bench.curves import DOCUMENT
from bench.load_corpus import Corpus, WordVectors
from bench.load_runs import SHARES


def test_sizes_have_to_ascend() -> None:
    assert million.arguments([]).sizes[-1] == 1_000_000
    assert million.arguments(["--dimensions", "1536"]).json.name == "million_1536.json"
    for wrong in (["--sizes", "30000", "10000"], ["--sizes", "0"]):
        with pytest.raises(SystemExit):
            million.arguments(wrong)


def test_a_million_chunks_fit_into_the_planned_space() -> None:
    small, large = (million.needs(1_000_000, dimensions, migration=True) for dimensions in (384, 1_536))
    assert large.build_mb < small.build_mb < small.shared_buffers_mb, "sketches are smaller than shorter vectors"
    assert small.disk_gb < large.disk_gb
    assert million.needs(1_000_000, 1_536, migration=False).disk_gb < large.disk_gb
    assert large.memory_gb * million.GB / 2**20 > large.shared_buffers_mb + large.build_mb


def test_a_machine_that_is_too_small_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    million.require(million.Needs(0.0, 1, 1, 0.0), tmp_path)
    with pytest.raises(SystemExit, match="more than this machine has"):
        million.require(million.Needs(1e9, 1, 1, 0.0), tmp_path)


def test_a_batch_of_texts_gets_the_same_vectors_as_each_text_alone() -> None:
    corpus = Corpus()
    vectors = WordVectors(8, corpus)
    texts = [million.text_of(corpus, 1), "a word that nobody knows: edit1n2n", ""]
    assert np.allclose(vectors.vectors(texts), [vectors.vector(text) for text in texts], atol=1e-6)


def test_length_and_topic_of_a_document_do_not_follow_from_its_readers() -> None:
    """Every thousandth document was short and of one of two topics: nothing was found by whoever reads only those."""
    corpus = Corpus()
    lengths = {len(million.text_of(corpus, number)) // 1_000 for number in range(0, 40_000, 1_000)}
    assert len(lengths) > 3


def test_the_nearest_are_determined_for_each_width_of_access(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [uuid4() for _ in range(40)]
    embeddings = np.random.default_rng(1).standard_normal((40, 4)).astype(np.float32)
    access_ids = np.arange(40) % 4

    def blocks(*_: object) -> Iterator[tuple[Any, Any, Any]]:
        for part in (slice(0, 7), slice(7, 40)):
            raw = np.array([np.void(id_.bytes) for id_ in ids[part]], dtype="V16")
            yield raw, access_ids[part], embeddings[part].copy()

    monkeypatch.setattr(million, "_blocks", blocks)
    questions = embeddings[[3, 8]] * 5
    nearest = million.true_nearest("", "", questions, {"all": [0, 1, 2, 3], "some": [0]}, vector_type="halfvec")
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    for n, question in enumerate(questions):
        order = np.argsort(-(unit @ question))
        assert nearest["all"][n] == {ids[i] for i in order[:10]}
        assert nearest["some"][n] == {ids[i] for i in order if access_ids[i] == 0}
    assert isinstance(next(iter(nearest["all"][0])), UUID)


def test_the_services_own_check_of_recall_is_read_from_its_metrics() -> None:
    exposition = (
        "# TYPE penstock_query_recall_ratio histogram\n"
        "penstock_query_recall_ratio_sum 1.9\npenstock_query_recall_ratio_count 2.0\n"
        "# TYPE penstock_query_recall_checks counter\n"
        'penstock_query_recall_checks_total{outcome="unfinished"} 3.0\n'
    )
    assert million.self_check(exposition) == {"compared": 2.0, "unfinished": 3.0, "recall": 0.95}
    assert million.self_check("") == {"compared": 0.0, "unfinished": 0.0, "recall": None}


def test_a_part_that_fails_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    report = million.Report(tmp_path / "results.json", {"steps": []}, 0.0)
    step: dict[str, Any] = {}

    async def works() -> dict[str, int]:
        return {"searched": 1}

    async def fails() -> int:
        raise SystemExit("no luck")

    async def both() -> tuple[bool, bool]:
        return await report.part(step, "first", fails), await report.part(step, "second", works)

    assert asyncio.run(both()) == (False, True)
    assert step == {"first": {"failed": "SystemExit: no luck"}, "second": {"searched": 1}}
    assert report.file.exists()


def test_a_run_that_waits_for_a_graph_ends_at_sigterm() -> None:
    class Unfinished(million.System):
        looks = 0

        def __init__(self) -> None:
            self.folder = Path("nowhere")

        def is_graph_settled(self) -> bool:
            self.looks += 1
            if self.looks == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return self.looks == 4

    system = Unfinished()
    with pytest.raises(KeyboardInterrupt), million.ending_on_sigterm():
        asyncio.run(million.graph(system, {}))
    assert system.looks < 4


def _report() -> dict[str, Any]:
    search = {"p50_ms": 20.0, "p95_ms": 40.0}
    step = {
        "size": 10_000,
        "chunks": 10_009,
        "load": {"chunks": 10_000, "chunks_per_s": 1_000.0, "processor_s": {"postgres": 5.0, "model": 9.0}},
        "searches": {"widths": dict.fromkeys(SHARES, search), "self_check": {"recall": None}},
        "recall": {"failed": "no luck"},
    }
    machine = {"at": "2026-11-29T00", "commit": "abc", "clean": True, "cores": 2, "memory_gib": 24, "load_before": 0.1}
    return {
        "dimensions": 384,
        "steps": [step],
        "machine": machine,
        "minutes": 5.0,
        "finished": False,
        "stopped": "KeyboardInterrupt: ",
    }


def test_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    report = _report()
    lines = "\n".join(million_curves.table(report))
    assert "| loaded, chunks/s |  | 1,000 |" in lines
    assert "| processor time of a loaded chunk |  | 0.50 ms |" in lines, "without the model's"
    assert "| recall@10, 10 % readable | ≥ 0.97 | – |" in lines
    assert "It did not finish: KeyboardInterrupt" in lines
    million_curves.draw([report], tmp_path / "first")
    million_curves.draw([report], tmp_path / "second")
    first, second = ((tmp_path / name / "million.svg").read_bytes() for name in ("first", "second"))
    assert first == second


def test_the_tables_of_the_document_equal_the_results() -> None:
    document = DOCUMENT.read_text()
    assert million_curves.MARKED.search(document)
    assert document == million_curves.written(document, million_curves.known()), "run `python -m bench.million_curves`"
