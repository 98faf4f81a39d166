"""The dashboards: ``python -m deploy.grafana.dashboards`` writes them as JSON beside this file."""

from __future__ import annotations

from pathlib import Path

from deploy.grafana.panels import Dashboard, Panel

FOLDER = Path(__file__).parent
RATE = "$__rate_interval"


def quantile(q: float, metric: str, by: str = "", labels: str = "") -> str:
    return f"histogram_quantile({q}, sum by (le{', ' + by if by else ''}) (rate({metric}_bucket{{{labels}}}[{RATE}])))"


def per_second(metric: str, by: str = "", labels: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{{{labels}}}[{RATE}]))"


OVERVIEW = Dashboard(
    "penstock-overview",
    "Penstock",
    [
        (
            "Are we fresh?",
            [
                Panel(
                    "Live changes searchable within 5 minutes, last hour",
                    [("(1 - penstock:freshness_slow:ratio_rate1h) or vector(1)", "")],
                    "percentunit",
                    kind="stat",
                    says="The objective is 99 %. Without changes it is met.",
                    falling=True,
                    warn=0.99,
                    alarm=0.95,
                    runbook="freshness",
                    width=6,
                ),
                Panel(
                    "Oldest live change that waits",
                    [('max(penstock_oldest_pending_seconds{lane="live"})', "")],
                    "s",
                    kind="stat",
                    warn=60,
                    alarm=300,
                    runbook="oldest-pending",
                    width=6,
                ),
                Panel(
                    "Oldest reading of access rights",
                    [("max(penstock_access_age_seconds) or vector(0)", "")],
                    "s",
                    kind="stat",
                    warn=900,
                    alarm=1800,
                    runbook="access-age",
                    width=6,
                ),
                Panel(
                    "Searches within 100 ms, last hour",
                    [("(1 - penstock:search_slow:ratio_rate1h) or vector(1)", "")],
                    "percentunit",
                    kind="stat",
                    falling=True,
                    warn=0.95,
                    alarm=0.9,
                    runbook="query-latency",
                    width=6,
                ),
                Panel(
                    "Freshness, live",
                    [
                        (quantile(0.5, "penstock_freshness_seconds", labels='lane="live"'), "median"),
                        (quantile(0.99, "penstock_freshness_seconds", labels='lane="live"'), "p99"),
                    ],
                    "s",
                    alarm=300,
                    runbook="freshness",
                    width=12,
                ),
                Panel(
                    "Error budgets: how fast they burn",
                    [
                        ("(penstock:freshness_slow:ratio_rate1h / 0.01) or vector(0)", "freshness"),
                        ("(penstock:query_failed:ratio_rate1h / 0.001) or vector(0)", "query errors"),
                        ("(penstock:search_slow:ratio_rate1h / 0.05) or vector(0)", "search latency"),
                    ],
                    "none",
                    says="1: the budget lasts exactly one month. 14.4 pages.",
                    warn=6,
                    alarm=14.4,
                    width=12,
                ),
            ],
        ),
        (
            "Do canaries come through?",
            [
                Panel(
                    "Since each was last found",
                    [
                        (
                            "time() - min by (source, store) (penstock_canary_success_timestamp_seconds)",
                            "{{source}} in {{store}}",
                        )
                    ],
                    "s",
                    alarm=360,
                    runbook="canary",
                    says="A document of our own for each source, published and searched for every minute.",
                ),
                Panel(
                    "Seconds to be found, p95",
                    [(quantile(0.95, "penstock_canary_seconds", "store"), "{{store}}")],
                    "s",
                    warn=60,
                    alarm=300,
                    runbook="canary",
                ),
                Panel(
                    "Seconds to be gone, p95",
                    [(quantile(0.95, "penstock_canary_withdrawn_seconds", "way"), "{{way}}")],
                    "s",
                    says="After it was revoked (access) or deleted.",
                    warn=10,
                    alarm=30,
                    runbook="canary",
                ),
            ],
        ),
        (
            "Are we keeping up?",
            [
                Panel(
                    "Changes that wait, by store",
                    [("max by (store, lane) (penstock_pending_documents)", "{{store}} {{lane}}")],
                    runbook="oldest-pending",
                ),
                Panel(
                    "Records behind, by stage",
                    [("max by (stage, lane) (penstock_consumer_lag_records)", "{{stage}} {{lane}}")],
                    warn=1000,
                    runbook="consumer-lag",
                ),
                Panel(
                    "Events and chunks a second",
                    [
                        (per_second("penstock_events_total"), "events"),
                        (per_second("penstock_embedded_chunks_total"), "chunks embedded"),
                        (per_second("penstock_query_requests_total"), "requests"),
                    ],
                    "ops",
                ),
            ],
        ),
        (
            "What is broken?",
            [
                Panel(
                    "Processes that answer",
                    [('sum by (worker) (up{job="penstock"})', "{{worker}}")],
                    "none",
                    kind="stat",
                    falling=True,
                    warn=1,
                    alarm=1,
                    runbook="worker-absent",
                ),
                Panel(
                    "Stages that are stopped",
                    [("sum by (stage, service) (penstock_breaker_open) or vector(0)", "{{stage}} {{service}}")],
                    "none",
                    alarm=1,
                    runbook="breaker",
                ),
                Panel(
                    "Alerts",
                    [
                        (
                            'count by (alertname, severity) (ALERTS{alertstate="firing"}) or vector(0)',
                            "{{alertname}} {{severity}}",
                        )
                    ],
                    "none",
                    kind="table",
                    says="0: no alert fires.",
                ),
                Panel(
                    "Dead letters that wait",
                    [("max by (stage) (penstock_waiting_dead_letters)", "{{stage}}")],
                    "none",
                    kind="stat",
                    warn=1,
                    runbook="dead-letters",
                    width=6,
                ),
                Panel(
                    "Documents that cannot be read at their source",
                    [("sum(max by (source) (penstock_skipped_documents)) or vector(0)", "")],
                    "none",
                    kind="stat",
                    says="Damaged, too large, encrypted: a connector or an ingest skipped them.",
                    warn=1,
                    runbook="dead-letters",
                    width=6,
                ),
                Panel(
                    "Documents that differ from the ledger",
                    [("sum(max by (store, kind) (penstock_divergent_documents))", "")],
                    "none",
                    kind="stat",
                    warn=1,
                    runbook="divergence",
                    width=6,
                ),
                Panel(
                    "Embeddings, money a day",
                    [
                        (
                            "sum(increase(penstock_embedding_cost_total[1d]))"
                            " + (sum(increase(penstock_query_embedding_cost_total[1d]))"
                            " or vector(0))",
                            "spent",
                        ),
                        ("max(penstock_embedding_daily_budget)", "budget"),
                    ],
                    "none",
                    kind="stat",
                    runbook="embedding-spend",
                    width=6,
                ),
            ],
        ),
        (
            "Who is affected?",
            [
                Panel(
                    "Freshness by source, p99",
                    [(quantile(0.99, "penstock_freshness_seconds", "source", 'lane="live"'), "{{source}}")],
                    "s",
                    alarm=300,
                    runbook="freshness",
                ),
                Panel(
                    "Oldest live change that waits, by source",
                    [("max by (source) (penstock_source_oldest_pending_seconds) or vector(0)", "{{source}}")],
                    "s",
                    warn=60,
                    alarm=300,
                    runbook="oldest-pending",
                ),
                Panel(
                    "Sources whose connector waits",
                    [("max by (source) (penstock_connector_not_working) or vector(0)", "{{source}}")],
                    "none",
                    alarm=1,
                    runbook="connector",
                ),
                Panel(
                    "Requests that failed",
                    [
                        (
                            per_second("penstock_query_requests_total", "route", 'outcome=~"unavailable|failed|shed"')
                            + " or vector(0)",
                            "{{route}}",
                        )
                    ],
                    "reqps",
                    runbook="query-availability",
                ),
            ],
        ),
    ],
)

STAGES = Dashboard(
    "penstock-stages",
    "Penstock: stages",
    [
        (
            "All stages",
            [
                Panel("Seconds a batch, p95", [(quantile(0.95, "penstock_batch_seconds", "stage"), "{{stage}}")], "s"),
                Panel(
                    "Records a batch, median", [(quantile(0.5, "penstock_batch_size", "stage"), "{{stage}}")], "none"
                ),
                Panel("Records in flight", [("sum by (stage) (penstock_in_flight_records)", "{{stage}}")]),
                Panel(
                    "Retries after a service failed",
                    [(per_second("penstock_retries_total", "stage") + " or vector(0)", "{{stage}}")],
                    "ops",
                    runbook="breaker",
                ),
                Panel(
                    "Records behind",
                    [("max by (stage, lane) (penstock_consumer_lag_records)", "{{stage}} {{lane}}")],
                    warn=1000,
                    runbook="consumer-lag",
                ),
                Panel(
                    "Oldest that waits",
                    [("max by (store, lane) (penstock_oldest_pending_seconds)", "{{store}} {{lane}}")],
                    "s",
                    alarm=300,
                    runbook="oldest-pending",
                ),
            ],
        ),
        (
            "detect",
            [
                Panel(
                    "Events, by outcome",
                    [(per_second("penstock_events_total", "outcome, lane"), "{{outcome}} {{lane}}")],
                    "ops",
                ),
                Panel(
                    "Dead letters, by reason",
                    [
                        (
                            per_second("penstock_dead_letters_total", "stage, reason") + " or vector(0)",
                            "{{stage}} {{reason}}",
                        )
                    ],
                    "ops",
                    runbook="dead-letters",
                ),
                Panel(
                    "Intake is paused for",
                    [("max(penstock_dead_letter_pause_seconds)", "")],
                    "s",
                    alarm=1,
                    runbook="dead-letters",
                ),
                Panel("Announced", [(per_second("penstock_announced_documents_total", "state"), "{{state}}")], "ops"),
                Panel(
                    "Hints sent again by the sweeper",
                    [("sum(increase(penstock_rescued_hints_total[1h]))", "an hour")],
                    "none",
                    warn=100,
                    runbook="sweeper-rescues",
                ),
                Panel(
                    "Differences, by store and kind",
                    [("max by (store, kind) (penstock_divergent_documents)", "{{store}} {{kind}}")],
                    "none",
                    warn=1,
                    runbook="divergence",
                ),
                Panel("Audit: documents a second", [(per_second("penstock_audited_documents_total"), "")], "ops"),
                Panel(
                    "Audit: since the last complete round",
                    [("max(penstock_audit_age_seconds)", "")],
                    "s",
                    alarm=604800,
                    runbook="divergence",
                ),
            ],
        ),
        (
            "vectors",
            [
                Panel(
                    "Chunks a second",
                    [
                        (per_second("penstock_embedded_chunks_total"), "embedded"),
                        (per_second("penstock_reused_vectors_total"), "reused"),
                        (per_second("penstock_written_chunks_total", labels='sink="vectors"'), "written"),
                        (per_second("penstock_deleted_chunks_total", labels='sink="vectors"'), "deleted"),
                    ],
                    "ops",
                ),
                Panel(
                    "Requests to the model",
                    [(per_second("penstock_embedding_requests_total", "outcome"), "{{outcome}}")],
                    "reqps",
                    runbook="breaker",
                ),
                Panel(
                    "Seconds a request to the model",
                    [
                        (quantile(0.5, "penstock_embedding_seconds"), "median"),
                        (quantile(0.95, "penstock_embedding_seconds"), "p95"),
                    ],
                    "s",
                ),
                Panel("Tokens a second", [(per_second("penstock_embedding_tokens_total"), "")], "ops"),
                Panel(
                    "Money an hour",
                    [("sum(increase(penstock_embedding_cost_total[1h]))", "")],
                    "none",
                    runbook="embedding-spend",
                ),
                Panel(
                    "Chunks that lost their end, documents set aside",
                    [
                        ("sum(increase(penstock_truncated_chunks_total[1h]))", "chunks cut"),
                        (
                            "sum by (sink) (increase(penstock_failed_documents_total[1h])) or vector(0)",
                            "documents {{sink}}",
                        ),
                    ],
                    "none",
                    warn=1,
                ),
                Panel("Chunks of conversations that wait", [("max(penstock_waiting_conversation_chunks)", "")], "none"),
            ],
        ),
        (
            "keywords",
            [
                Panel(
                    "Entries a second",
                    [
                        (per_second("penstock_written_chunks_total", labels='sink="keywords"'), "written"),
                        (per_second("penstock_deleted_chunks_total", labels='sink="keywords"'), "deleted"),
                    ],
                    "ops",
                ),
                Panel(
                    "Documents that changed during a write",
                    [(per_second("penstock_moved_documents_total", "sink"), "{{sink}}")],
                    "ops",
                ),
            ],
        ),
    ],
)

QUERY = Dashboard(
    "penstock-query",
    "Penstock: query service",
    [
        (
            "Requests",
            [
                Panel(
                    "Requests, by outcome",
                    [(per_second("penstock_query_requests_total", "outcome"), "{{outcome}}")],
                    "reqps",
                    runbook="query-availability",
                ),
                Panel(
                    "Failed requests",
                    [("penstock:query_failed:ratio_rate5m or vector(0)", "")],
                    "percentunit",
                    alarm=0.001,
                    runbook="query-availability",
                ),
                Panel(
                    "Searches, p95",
                    [(quantile(0.95, "penstock_query_seconds", labels='route="/v1/search"'), "")],
                    "s",
                    alarm=0.1,
                    runbook="query-latency",
                ),
                Panel("Seconds by route, p95", [(quantile(0.95, "penstock_query_seconds", "route"), "{{route}}")], "s"),
                Panel(
                    "In progress, waiting, streaming",
                    [
                        ("sum(penstock_query_in_work)", "at work"),
                        ("sum(penstock_query_waiting)", "waiting"),
                        ("sum(penstock_query_open_streams)", "streaming"),
                    ],
                    "none",
                ),
                Panel(
                    "Requests refused",
                    [(per_second("penstock_query_shed_total", "reason") + " or vector(0)", "{{reason}}")],
                    "reqps",
                    runbook="query-availability",
                ),
            ],
        ),
        (
            "Retrieval",
            [
                Panel(
                    "Cache hits",
                    [
                        (
                            f'sum by (cache) (rate(penstock_query_cache_total{{outcome="hit"}}[{RATE}]))'
                            f" / sum by (cache) (rate(penstock_query_cache_total[{RATE}])) or vector(0)",
                            "{{cache}}",
                        )
                    ],
                    "percentunit",
                ),
                Panel(
                    "Reranking",
                    [(per_second("penstock_query_rerank_total", "outcome") + " or vector(0)", "{{outcome}}")],
                    "reqps",
                    runbook="rerank-fallback",
                ),
                Panel(
                    "Answers that lacked a part",
                    [(per_second("penstock_query_degraded_total", "part") + " or vector(0)", "{{part}}")],
                    "reqps",
                    runbook="degraded",
                ),
                Panel(
                    "Recall of the vectors' graph, mean",
                    [
                        (
                            f"(sum(rate(penstock_query_recall_ratio_sum[{RATE}]))"
                            f" / (sum(rate(penstock_query_recall_ratio_count[{RATE}])) > 0)) or vector(1)",
                            "",
                        )
                    ],
                    "percentunit",
                    says="Of sampled searches. Also 1 while none was compared.",
                    runbook="vector-recall",
                ),
            ],
        ),
        (
            "Answers",
            [
                Panel(
                    "Answers, by outcome",
                    [(per_second("penstock_query_answers_total", "outcome"), "{{outcome}}")],
                    "reqps",
                ),
                Panel(
                    "First piece of an answer, p95",
                    [(quantile(0.95, "penstock_query_first_token_seconds"), "")],
                    "s",
                    alarm=3,
                ),
                Panel(
                    "Support of written answers, mean",
                    [
                        (
                            f"(sum(rate(penstock_query_answer_support_sum[{RATE}]))"
                            f" / (sum(rate(penstock_query_answer_support_count[{RATE}])) > 0)) or vector(1)",
                            "",
                        )
                    ],
                    "percentunit",
                    says="Also 1 while no model writes.",
                ),
                Panel(
                    "For the review queue",
                    [(per_second("penstock_query_review_total", "reason") + " or vector(0)", "{{reason}}")],
                    "reqps",
                ),
                Panel(
                    "Tokens of the chat model",
                    [(per_second("penstock_query_tokens_total", "kind") + " or vector(0)", "{{kind}}")],
                    "ops",
                ),
                Panel(
                    "Money an hour",
                    [
                        ("sum(increase(penstock_query_answer_cost_total[1h])) or vector(0)", "answers"),
                        ("sum(increase(penstock_query_embedding_cost_total[1h]))", "questions"),
                        ("sum(increase(penstock_query_rerank_cost_total[1h]))", "reranking"),
                    ],
                    "none",
                    says="By the configured prices; 0 without prices.",
                ),
                Panel("Passages that did not fit", [(per_second("penstock_query_left_out_passages_total"), "")], "ops"),
            ],
        ),
        (
            "The next generation, and the next settings of ranking",
            [
                Panel(
                    "Models that have answered here",
                    [("min by (state) (penstock_query_models_ready) or vector(0)", "{{state}}")],
                    "none",
                    falling=True,
                    warn=1,
                    alarm=1,
                    says="1: the model of the generation in this state has responded; 0: not yet.",
                    runbook="model-not-ready",
                ),
                Panel(
                    "Questions asked of both",
                    [
                        (
                            per_second("penstock_query_shadow_total", "compared, outcome") + " or vector(0)",
                            "{{compared}} {{outcome}}",
                        )
                    ],
                    "reqps",
                ),
                Panel(
                    "How far both agree, mean",
                    [
                        (
                            f"({per_second('penstock_query_shadow_agreement_ratio_sum', 'compared')}"
                            f" / ({per_second('penstock_query_shadow_agreement_ratio_count', 'compared')} > 0))"
                            " or vector(1)",
                            "{{compared}} order of the first ten",
                        ),
                        (
                            f"({per_second('penstock_query_shadow_overlap_ratio_sum', 'compared')}"
                            f" / ({per_second('penstock_query_shadow_overlap_ratio_count', 'compared')} > 0))"
                            " or vector(1)",
                            "{{compared}} first ten shared",
                        ),
                    ],
                    "percentunit",
                    says="generation: the next or previous one; ranking: other settings. Also 1 while nothing is"
                    " compared.",
                ),
            ],
        ),
        (
            "Who was shown what, and who used how much",
            [
                Panel(
                    "Records of the audit trail a second",
                    [(per_second("penstock_query_trail_records_total", "outcome"), "{{outcome}}")],
                    "ops",
                    runbook="trail",
                    says="Lost: what was shown is not recorded. Refused: with `required`, requests that were refused.",
                ),
                Panel(
                    "Oldest record that waits for the audit trail",
                    [("max(penstock_query_trail_waiting_seconds)", "")],
                    "s",
                    kind="stat",
                    warn=5,
                    alarm=60,
                    runbook="trail",
                ),
                Panel(
                    "Used of a day's budget",
                    [("max by (budget, of) (penstock_query_budget_used_ratio) or vector(0)", "{{budget}} of a {{of}}")],
                    "percentunit",
                    warn=0.8,
                    alarm=1,
                    runbook="budget",
                    says="The fullest one of each kind; `penstock budget` names them.",
                ),
            ],
        ),
        (
            "Golden questions",
            [
                Panel(
                    "nDCG@5",
                    [
                        ("max by (slice) (penstock_eval_ndcg)", "{{slice}}"),
                        ('max(penstock_eval_floor{measure="nDCG@5"})', "floor"),
                    ],
                    "none",
                    runbook="evaluation",
                ),
                Panel(
                    "Change from the accepted values of the same questions",
                    [('min by (measure) (penstock_eval_change_ratio{slice="*"}) or vector(0)', "{{measure}}")],
                    "percentunit",
                    runbook="evaluation",
                ),
                Panel(
                    "Faithfulness",
                    [
                        ("max by (slice) (penstock_eval_faithfulness)", "{{slice}}"),
                        ('max(penstock_eval_floor{measure="faithfulness"})', "floor"),
                    ],
                    "none",
                    runbook="evaluation",
                ),
                Panel(
                    "Last run",
                    [("max(penstock_eval_last_run_timestamp_seconds) * 1000", "")],
                    "dateTimeFromNow",
                    kind="stat",
                    runbook="evaluation",
                ),
                Panel(
                    "Runs that failed, judgements that are lost",
                    [
                        ("sum(increase(penstock_eval_failures_total[1h]))", "runs"),
                        ("max(penstock_eval_lost_judgements)", "judgements"),
                    ],
                    "none",
                    warn=1,
                    runbook="evaluation",
                ),
            ],
        ),
    ],
)

CONNECTORS = Dashboard(
    "penstock-connectors",
    "Penstock: connectors",
    [
        (
            "Sources",
            [
                Panel(
                    "Age of access rights",
                    [('max by (source) (penstock_access_age_seconds{source=~"$source"})', "{{source}}")],
                    "s",
                    alarm=1800,
                    runbook="access-age",
                ),
                Panel(
                    "Since the last success",
                    [
                        (
                            'max by (source, activity) (penstock_connector_success_age_seconds{source=~"$source"})',
                            "{{source}} {{activity}}",
                        )
                    ],
                    "s",
                ),
                Panel(
                    "Since the last sign of life",
                    [('max by (source) (penstock_connector_seen_age_seconds{source=~"$source"})', "{{source}}")],
                    "s",
                    alarm=120,
                    runbook="connector",
                ),
                Panel(
                    "Activities that wait",
                    [
                        (
                            'max by (source, activity) (penstock_connector_not_working{source=~"$source"})',
                            "{{source}} {{activity}}",
                        )
                    ],
                    "none",
                    alarm=1,
                    runbook="connector",
                ),
                Panel(
                    "Problems",
                    [('max by (source, of) (penstock_connector_problems{source=~"$source"})', "{{source}}: {{of}}")],
                    "none",
                    warn=1,
                    runbook="connector",
                ),
                Panel(
                    "Differences from the ledger, each published again",
                    [
                        (
                            "sum by (source, kind) (increase(penstock_reconciliation_differences_total"
                            '{source=~"$source"}[1h]))',
                            "{{source}}: {{kind}}",
                        )
                    ],
                    "none",
                    warn=1,
                    runbook="reconciliation",
                ),
                Panel(
                    "Documents that cannot be read",
                    [('max by (source) (penstock_skipped_documents{source=~"$source"}) or vector(0)', "{{source}}")],
                    "none",
                    warn=1,
                    says="At present; `folder` is what `penstock ingest` publishes. `penstock dead list` names them.",
                    runbook="dead-letters",
                ),
                Panel(
                    "Freshness, p99",
                    [
                        (
                            quantile(0.99, "penstock_freshness_seconds", "source, lane", 'source=~"$source"'),
                            "{{source}} {{lane}}",
                        )
                    ],
                    "s",
                    alarm=300,
                    runbook="freshness",
                ),
            ],
        ),
        (
            "What they bring",
            [
                Panel(
                    "Entries, by outcome",
                    [
                        (
                            per_second("penstock_connector_entries_total", "source, outcome", 'source=~"$source"'),
                            "{{source}} {{outcome}}",
                        )
                    ],
                    "ops",
                ),
                Panel(
                    "Events from sources",
                    [
                        (
                            per_second("penstock_connector_events_total", "source, outcome", 'source=~"$source"')
                            + " or vector(0)",
                            "{{source}} {{outcome}}",
                        )
                    ],
                    "ops",
                ),
                Panel(
                    "Throttling",
                    [
                        (
                            'sum by (source) (rate(penstock_source_throttled_seconds_total{source=~"$source"}'
                            f"[{RATE}])) or vector(0)",
                            "{{source}}",
                        )
                    ],
                    "percentunit",
                    says="Share of the time that a source made its connector wait.",
                    warn=0.5,
                    runbook="connector",
                ),
                Panel(
                    "Pairs of conversations",
                    [(per_second("penstock_conversation_pairs_total", "outcome") + " or vector(0)", "{{outcome}}")],
                    "ops",
                ),
                Panel(
                    "Chunks of conversations embedded",
                    [(per_second("penstock_embedded_conversation_chunks_total"), "")],
                    "ops",
                ),
            ],
        ),
        (
            "Webhooks",
            [
                Panel(
                    "Requests, by outcome",
                    [(per_second("penstock_webhook_deliveries_total", "webhook, outcome"), "{{webhook}} {{outcome}}")],
                    "ops",
                    says="What failed is sent again; what is parked, only after `penstock webhook resume`.",
                    runbook="webhooks",
                ),
                Panel(
                    "Time of a request, p99",
                    [(quantile(0.99, "penstock_webhook_seconds", "webhook"), "{{webhook}}")],
                    "s",
                    says="A receiver that has not answered after 15 seconds has failed.",
                    warn=10,
                    runbook="webhooks",
                ),
                Panel(
                    "Events that wait",
                    [("max by (webhook) (penstock_webhook_waiting_events)", "{{webhook}}")],
                    "none",
                    runbook="webhooks",
                ),
                Panel(
                    "Oldest event that waits",
                    [("max by (webhook) (penstock_webhook_oldest_seconds)", "{{webhook}}")],
                    "s",
                    alarm=3600,
                    runbook="webhooks",
                ),
                Panel(
                    "Paused webhooks, parked events",
                    [
                        ("max by (webhook) (penstock_webhook_paused) == 1", "{{webhook}} is paused"),
                        ("max by (webhook) (penstock_webhook_parked_events)", "{{webhook}} parked"),
                    ],
                    "none",
                    says="Both wait for `penstock webhook resume`.",
                    alarm=1,
                    runbook="webhooks",
                ),
            ],
        ),
    ],
    by_source=True,
)

ALL = (OVERVIEW, STAGES, QUERY, CONNECTORS)


def files() -> dict[Path, str]:
    return {FOLDER / f"{dashboard.uid}.json": dashboard.json() for dashboard in ALL}


if __name__ == "__main__":
    for file, text in files().items():
        file.write_text(text)
