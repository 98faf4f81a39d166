"""The query service's metrics: every name and label in one place. Labels are bounded: route templates, modes, outcomes;
never a question, a caller, a document or a tenant."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pipeline.observability.labels import counter, gauge, histogram
from pipeline.observability.metrics import EmbeddingOutcome, PortMetrics
from query.limits.charging import charge

ANSWER_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 60)
"""Seconds, with exact edges at the objectives: 0.1 for a search, 3 for a reranked and written answer."""
PAID_RERANKINGS = frozenset({"reranked", "timeout", "cancelled"})
"""The outcomes of rerankings that cost money: a reranker works on although a search was given up or waits no longer."""
SHARE_BUCKETS = (0.0, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


class RouteOutcomeLabels(NamedTuple):
    route: str
    outcome: str


class RouteModeLabels(NamedTuple):
    route: str
    mode: str


class ReasonLabels(NamedTuple):
    reason: str


class BudgetOfLabels(NamedTuple):
    budget: str
    of: str


class StateLabels(NamedTuple):
    state: str


class OutcomeLabels(NamedTuple):
    outcome: str


class ComparedLabels(NamedTuple):
    compared: str


class ComparedOutcomeLabels(NamedTuple):
    compared: str
    outcome: str


class CacheOutcomeLabels(NamedTuple):
    cache: str
    outcome: str


class ServedLabels(NamedTuple):
    served: str


class KindModelLabels(NamedTuple):
    kind: str
    model: str


class ModelLabels(NamedTuple):
    model: str


class EmbeddingOutcomeLabels(NamedTuple):
    outcome: EmbeddingOutcome


class PartLabels(NamedTuple):
    part: str


class QueryMetrics:
    """All metrics of the query service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.ports = PortMetrics(r, "penstock_query")
        self.requests = counter(
            "penstock_query_requests",
            "Requests by route template and outcome: ok, refused (4xx), unauthorized, limited, shed, unavailable "
            "(503, 504), failed (any other 5xx), cancelled (the client disconnected)",
            RouteOutcomeLabels,
            registry=r,
        )
        self.seconds = histogram(
            "penstock_query_seconds",
            "Time from the request to the last byte of its response, by the chosen mode",
            RouteModeLabels,
            buckets=ANSWER_BUCKETS,
            registry=r,
        )
        self.at_least = histogram(
            "penstock_query_at_least_seconds",
            "Time that a request waited for published changes, by outcome: applied, pending (not all can be seen)",
            OutcomeLabels,
            buckets=ANSWER_BUCKETS,
            registry=r,
        )
        self.first_token = Histogram(
            "penstock_query_first_token_seconds",
            "Time from the request to the first piece of a written answer",
            buckets=ANSWER_BUCKETS,
            registry=r,
        )
        self.shed = counter(
            "penstock_query_shed",
            "Requests refused, by reason: busy (the queue is full), waited (too long in the queue), share (either, "
            "while its tenant or caller exceeded its share), caller (its own limit on concurrent requests), rate (its "
            "own limit on requests a minute), budget (daily, its own or its tenant's), memory (too much is being sent "
            "at once)",
            ReasonLabels,
            registry=r,
        )
        self.budget_used = gauge(
            "penstock_query_budget_used_ratio",
            "Used share of the fullest daily budget of requests, tokens or money, of tenants or callers, as far as "
            "this process knows; 0: there is none",
            BudgetOfLabels,
            registry=r,
        )
        self.in_work = Gauge("penstock_query_in_work", "Requests that are being processed", registry=r)
        self.waiting = Gauge("penstock_query_waiting", "Requests in the queue", registry=r)
        self.streams = Gauge("penstock_query_open_streams", "Answers that are being streamed", registry=r)
        self.ledger_fenced = Gauge(
            "penstock_query_ledger_fenced",
            "1 while all queries are refused because the ledger may lack revocations (a failover, a restored backup, "
            "a recovery that has not ended) or Postgres is a standby",
            registry=r,
        )
        self.next_key_expiry = Gauge(
            "penstock_query_next_key_expiry_timestamp_seconds",
            "Time at which the next valid API key expires; 0: there is none",
            registry=r,
        )
        self.index_fenced = Gauge(
            "penstock_query_keyword_index_fenced",
            "1 while searches use no keyword index, or fail, because it was restored, created anew or set back, and "
            "has not been compared with the ledger yet",
            registry=r,
        )
        self.models_ready = gauge(
            "penstock_query_models_ready",
            "1: the model of the generation in this state (active, building, previous) has responded in this process; "
            "0: not yet",
            StateLabels,
            registry=r,
        )
        self.shadow = counter(
            "penstock_query_shadow",
            "Shadow queries, by what is compared (generation: the next or previous one; ranking: the candidate "
            "settings of ranking) and outcome: measured, failed, dropped (too many were running)",
            ComparedOutcomeLabels,
            registry=r,
        )
        self.shadow_overlap = histogram(
            "penstock_query_shadow_overlap_ratio",
            "Share of the first ten documents that both generations, or both settings of ranking, find",
            ComparedLabels,
            buckets=SHARE_BUCKETS,
            registry=r,
        )
        self.shadow_agreement = histogram(
            "penstock_query_shadow_agreement_ratio",
            "Rank-biased overlap (p = 0.9) of the first ten documents of both",
            ComparedLabels,
            buckets=SHARE_BUCKETS,
            registry=r,
        )
        self.recall = Histogram(
            "penstock_query_recall_ratio",
            "Share of the ten nearest passages that a search through the vectors' graph or by their sketches found, of "
            "sampled searches",
            buckets=SHARE_BUCKETS,
            registry=r,
        )
        self.recall_checks = counter(
            "penstock_query_recall_checks",
            "Searches through the vectors' graph or by their sketches that were sampled, by outcome: compared, "
            "unfinished (the exact scan took longer than 30 s, or Postgres did not answer)",
            OutcomeLabels,
            registry=r,
        )
        self.previews = counter(
            "penstock_query_previews",
            "Previews of edits by outcome: passes, fails (an answer would be lost, lose a citation, or contradict)",
            OutcomeLabels,
            registry=r,
        )
        self.rerank = counter(
            "penstock_query_rerank",
            "Searches that requested reranking, by outcome: reranked, cached, or why it was skipped",
            OutcomeLabels,
            registry=r,
        )
        self.cache = counter(
            "penstock_query_cache",
            "Look-ups by cache (embeddings, results, rerank) and outcome: hit, miss, shared (an embedding that was "
            "computed for callers with other access)",
            CacheOutcomeLabels,
            registry=r,
        )
        self.answers = counter(
            "penstock_query_answers",
            "Answers by outcome: grounded, unsupported, no_information, passages (no model is set), failed",
            OutcomeLabels,
            registry=r,
        )
        self.tokens = counter(
            "penstock_query_tokens", "Tokens of the chat model, by kind: prompt, answer", KindModelLabels, registry=r
        )
        self.answer_cost = counter(
            "penstock_query_answer_cost",
            "Cost of written answers, in the currency of PENSTOCK_CHAT_PRICE_PER_MILLION_PROMPT_TOKENS and "
            "_ANSWER_TOKENS",
            ModelLabels,
            registry=r,
        )
        self.rerank_cost = Counter(
            "penstock_query_rerank_cost",
            "Cost of reranked searches, in the currency of PENSTOCK_RERANK_PRICE_PER_THOUSAND_SEARCHES",
            registry=r,
        )
        self.embedding_tokens = Counter(
            "penstock_query_embedding_tokens",
            "Tokens of questions and previews that the embedding model read",
            registry=r,
        )
        self.embedding_cost = Counter(
            "penstock_query_embedding_cost",
            "Cost of embeddings of questions and previews, in the currency of "
            "PENSTOCK_EMBEDDING_PRICE_PER_MILLION_TOKENS",
            registry=r,
        )
        self.embedding_seconds = histogram(
            "penstock_query_embedding_seconds",
            "Time of a request for a question's embedding, by outcome: answered, throttled, unavailable, "
            "misconfigured, rejected",
            EmbeddingOutcomeLabels,
            buckets=ANSWER_BUCKETS,
            registry=r,
        )
        self.history = counter(
            "penstock_query_history",
            "Answers that used a member's conversation history, by how it was read: whole, nearest (the chunks nearest "
            "to the question), newest (the newest chunks, because there was no vector)",
            ServedLabels,
            registry=r,
        )
        self.left_out = Counter(
            "penstock_query_left_out_passages",
            "Passages that did not fit, or not completely, into the chat model's budget",
            registry=r,
        )
        self.support = Histogram(
            "penstock_query_answer_support",
            "Share of a written answer's claims that are supported by the passages that they cite",
            buckets=SHARE_BUCKETS,
            registry=r,
        )
        self.review = counter(
            "penstock_query_review",
            "Answers put into the review queue, by reason: unsupported, uncited, bad_citation, active_content",
            ReasonLabels,
            registry=r,
        )
        self.degraded = counter(
            "penstock_query_degraded",
            "Responses from which one part was missing: vectors, keywords, rerank, …",
            PartLabels,
            registry=r,
        )

        self.trail = counter(
            "penstock_query_trail_records",
            "Records of the audit trail by outcome: written, lost (they could not be written fast enough), refused "
            "(with PENSTOCK_TRAIL=required the request was refused, because they could not be written)",
            OutcomeLabels,
            registry=r,
        )
        for outcome in ("written", "lost", "refused"):
            self.trail.labels(outcome=outcome)  # from 0 on: an increase is seen from the first one
        self.trail_waiting = Gauge(
            "penstock_query_trail_waiting_seconds",
            "Age of the oldest record of the audit trail that is not written yet; 0: there is none",
            registry=r,
        )

    def trail_counted(self, outcome: str, records: int) -> None:
        self.trail.labels(outcome=outcome).inc(records)

    def answered(self, model: str, *, prompt: int, answer: int, money: float) -> None:
        """Count the tokens (prompt, answer) and the money of a written answer."""
        self.tokens.labels(kind="prompt", model=model).inc(prompt)
        self.tokens.labels(kind="answer", model=model).inc(answer)
        self.answer_cost.labels(model=model).inc(money)
        charge(tokens=prompt + answer, money=money)

    def reranked(self, outcome: str, price_per_thousand: float) -> None:
        """Count a reranking by its outcome. Only a call of the reranker costs money: cached scores do not."""
        self.rerank.labels(outcome=outcome).inc()
        if outcome in PAID_RERANKINGS:
            self.rerank_cost.inc(price_per_thousand / 1_000)
            charge(money=price_per_thousand / 1_000)

    def embedded(self, tokens: int, money: float) -> None:
        self.embedding_tokens.inc(tokens)
        self.embedding_cost.inc(money)
        charge(money=money)

    def question_embedding_timed(self, outcome: EmbeddingOutcome, seconds: float) -> None:
        self.embedding_seconds.labels(outcome=outcome).observe(seconds)
