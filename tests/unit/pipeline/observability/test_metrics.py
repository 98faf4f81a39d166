"""The table of metrics, and what each process shows of itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.local import process
from deploy.prometheus import catalogue, targets
from pipeline.core.errors import Retryable
from pipeline.embedding.openai import OpenAIEmbedder
from pipeline.embedding.tokens import byte_pairs
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import EmbeddingSettings

ROOT = Path(__file__).parents[4]
ENTRIES = [*catalogue.workers(), *catalogue.query_service(), *catalogue.extraction_service()]
UNBOUNDED = {"document", "user", "principal", "member", "question", "query", "error", "tenant", "chunk", "external_id"}


def test_the_documented_table_of_metrics_is_up_to_date() -> None:
    hint = "run `python -m deploy.prometheus.catalogue > docs/metrics.md`"
    assert (ROOT / "docs" / "metrics.md").read_text() == catalogue.document(), hint


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_metric_names_and_labels_follow_the_conventions(entry: catalogue.Entry) -> None:
    assert re.fullmatch(r"penstock(_[a-z]+)+", entry.name)
    assert not {"milliseconds", "ms", "minutes", "percent"} & set(entry.name.split("_"))
    assert entry.kind != "histogram" or entry.name.endswith(("_seconds", "_size", "_support", "_ratio"))
    assert not UNBOUNDED & set(entry.labels)
    assert entry.help
    assert not entry.help.endswith(".")


def test_metric_names_are_unique() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(names) == len(set(names))


def test_embedding_cost_is_the_tokens_times_the_configured_price() -> None:
    metrics = Metrics()
    of_documents = {"purpose": "document"}
    metrics.embedding_billed(500_000)
    assert metrics.registry.get_sample_value("penstock_embedding_cost_total", of_documents) == 0
    metrics.embedding_price = 0.13
    metrics.embedding_billed(2_000_000)
    metrics.embedding_billed(1_000_000, purpose="conversation")
    assert metrics.registry.get_sample_value("penstock_embedding_cost_total", of_documents) == pytest.approx(0.26)
    assert metrics.registry.get_sample_value("penstock_embedding_tokens_total", of_documents) == 2_500_000
    spent = metrics.registry.get_sample_value("penstock_embedding_cost_total", {"purpose": "conversation"})
    assert spent == pytest.approx(0.13)


async def test_a_request_to_an_unreachable_model_is_counted_as_unavailable() -> None:
    metrics = Metrics()
    settings = EmbeddingSettings(provider="openai", base_url="http://127.0.0.1:1/v1", api_key="x")
    embedder = OpenAIEmbedder(settings, byte_pairs(), patience_seconds=0.0)
    embedder.on_request = metrics.embedding_request
    try:
        with pytest.raises(Retryable):
            await embedder.embed_documents(["words"])
    finally:
        await embedder.aclose()
    assert metrics.registry.get_sample_value("penstock_embedding_requests_total", {"outcome": "unavailable"}) == 1
    assert metrics.registry.get_sample_value("penstock_embedding_seconds_count") == 1


def test_a_home_folder_without_a_stack_has_no_scrape_targets(tmp_path: Path) -> None:
    assert targets.targets(tmp_path) == []


def test_a_started_process_stays_a_scrape_target_after_it_died(tmp_path: Path) -> None:
    """That it is down should show."""
    (tmp_path / "run").mkdir()
    for name, address in (("worker-detect-1", "http://127.0.0.1:1"), ("query", "http://127.0.0.1:2")):
        process.save(tmp_path / "run" / f"{name}.json", process.Record(pid=2**22, created=1.0, address=address))
    assert targets.targets(tmp_path) == [
        {"targets": ["127.0.0.1:1"], "labels": {"job": "penstock", "worker": "detect"}},
        {"targets": ["127.0.0.1:2"], "labels": {"job": "penstock", "worker": "query"}},
    ]


def test_workers_of_one_process_show_the_worst_of_what_has_no_label() -> None:
    class Letters:
        def __init__(self, pause: float) -> None:
            self._pause = pause

        def pause(self) -> float:
            return self._pause

    metrics = Metrics()
    detect, vectors = metrics.fence("detect"), metrics.fence("vectors")
    detect(True)
    vectors(False)
    assert metrics.registry.get_sample_value("penstock_ledger_fenced") == 1
    detect(False)
    assert metrics.registry.get_sample_value("penstock_ledger_fenced") == 0
    flooded, calm = Letters(15), Letters(0)
    metrics.show_pause(flooded.pause)
    metrics.show_pause(calm.pause)
    assert metrics.registry.get_sample_value("penstock_dead_letter_pause_seconds") == 15
    del flooded
    assert metrics.registry.get_sample_value("penstock_dead_letter_pause_seconds") == 0
