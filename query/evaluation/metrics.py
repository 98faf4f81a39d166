"""What a run of the golden judgements shows to Prometheus. Labels, bounded: the slice (a source) and the measure."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from query.settings import EvalSettings

ALL = "*"
"""The slice of every question."""
MOST_SLICES = 30
"""Sources with a series of their own, those with most questions; the others are in ``*`` only."""


class EvalMetrics:
    """Makes its metrics in a registry that is there: that of ``query.telemetry.QueryMetrics``."""

    def __init__(self, registry: CollectorRegistry, settings: EvalSettings) -> None:
        r = registry
        self.ndcg = Gauge("penstock_eval_ndcg", "nDCG@5 of the golden judgements, by source", ["slice"], registry=r)
        self.recall = Gauge("penstock_eval_recall", "recall@50 of the golden judgements", ["slice"], registry=r)
        self.faithfulness = Gauge(
            "penstock_eval_faithfulness", "Share of the answers' statements that their passages support",
            ["slice"], registry=r,
        )  # fmt: skip
        self.answers = Gauge(
            "penstock_eval_answers", "answer_relevancy, context_precision and context_recall of the answers",
            ["measure", "slice"], registry=r,
        )  # fmt: skip
        self.change = Gauge(
            "penstock_eval_change_ratio", "Against the run before: -0.05 is 5 % worse", ["measure", "slice"], registry=r
        )
        self.floor = Gauge("penstock_eval_floor", "Below it somebody should look", ["measure"], registry=r)
        self.floor.labels("nDCG@5").set(settings.ndcg_floor)
        self.floor.labels("faithfulness").set(settings.faithfulness_floor)
        self.queries = Gauge("penstock_eval_queries", "Golden questions that were asked", ["slice"], registry=r)
        self.lost = Gauge(
            "penstock_eval_lost_judgements", "Judgements whose document or words are not there any more", registry=r
        )
        self.ran_at = Gauge("penstock_eval_last_run_timestamp_seconds", "When the last whole run began", registry=r)
        self.failures = Counter("penstock_eval_failures", "Runs that could not be finished", registry=r)
