"""Metrics: every name and label in one place. Labels are bounded; no document, user or exception text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal, NamedTuple, get_args
from weakref import WeakMethod

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pipeline.core.model import ConflictKind, Lane, Store
from pipeline.observability.labels import counter, gauge, histogram
from pipeline.observability.lineage import Outcome as LineageOutcome
from pipeline.observability.logs import configure_logging as configure_logging

FRESHNESS_BUCKETS = (1, 2, 5, 10, 20, 30, 60, 90, 120, 180, 240, 300, 450, 600, 1800, 7200)
"""Seconds, with an exact edge at the objective of 300."""
WORK_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)

EmbeddingOutcome = Literal["answered", "throttled", "unavailable", "misconfigured", "rejected"]
"""The outcome of one request to the model; rejected: it does not accept the content."""

EXTRACTION_STATES = ("confined", "refused", "unconfined", "unreachable")

Purpose = Literal["document", "conversation"]
"""The kinds of text that the workers embed."""

PortRefusal = Literal[
    "connections",
    "address",
    "memory",
    "slow_head",
    "slow_body",
    "slow_reader",
    "large_head",
    "small_chunks",
    "malformed",
]
"""connections, address: too many, in all or of one address; memory: too many bytes of bodies at once."""


class PortReasonLabels(NamedTuple):
    port: str
    reason: PortRefusal


class PortLabels(NamedTuple):
    port: str


class OutcomeLaneLabels(NamedTuple):
    outcome: str
    lane: Lane


class StageReasonLabels(NamedTuple):
    stage: str
    reason: str


class StageReasonModeLabels(NamedTuple):
    stage: str
    reason: str
    mode: str


class SinkLabels(NamedTuple):
    sink: Store


class StageLabels(NamedTuple):
    stage: str


class StageServiceLabels(NamedTuple):
    stage: str
    service: str


class ServiceLabels(NamedTuple):
    service: str


class FilesLabels(NamedTuple):
    files: str


class ChangeLabels(NamedTuple):
    change: str


class PurposeLabels(NamedTuple):
    purpose: Purpose


class EmbeddingOutcomeLabels(NamedTuple):
    outcome: EmbeddingOutcome


class GenerationLabels(NamedTuple):
    generation: str


class LaneLabels(NamedTuple):
    lane: Lane


class StateLabels(NamedTuple):
    state: str


class SourceLaneLabels(NamedTuple):
    source: str
    lane: Lane


class StoreKindLabels(NamedTuple):
    store: str
    kind: str


class SourceLabels(NamedTuple):
    source: str


class OutcomeLabels(NamedTuple):
    outcome: str


class SourceOutcomeLabels(NamedTuple):
    source: str
    outcome: str


class SourceActivityLabels(NamedTuple):
    source: str
    activity: str


class SourceOfLabels(NamedTuple):
    source: str
    of: str


class SourceReasonLabels(NamedTuple):
    source: str
    reason: str


class SourceKindLabels(NamedTuple):
    source: str
    kind: str


class TopicKindLabels(NamedTuple):
    topic: str
    kind: str


class TopicLabels(NamedTuple):
    topic: str


class StoreLaneLabels(NamedTuple):
    store: str
    lane: Lane


class StageLaneLabels(NamedTuple):
    stage: str
    lane: Lane


class TableLabels(NamedTuple):
    table: str


WebhookOutcome = Literal["delivered", "failed", "parked"]
"""The outcome of one request to the receiver of a webhook; parked: it is not tried again."""


class WebhookOutcomeLabels(NamedTuple):
    webhook: str
    outcome: WebhookOutcome


class WebhookLabels(NamedTuple):
    webhook: str


class TaskLabels(NamedTuple):
    task: str


class ConflictLabels(NamedTuple):
    kind: ConflictKind
    """number, date, version, unit, name, negation, duplicate or outdated."""


class LineageLabels(NamedTuple):
    outcome: LineageOutcome


class PortMetrics:
    """The HTTP ports of a process; ``port`` is the name of one of them."""

    def __init__(self, registry: CollectorRegistry, prefix: str = "penstock") -> None:
        self.refused = counter(
            f"{prefix}_http_refused",
            "Connections and requests refused before authentication, by reason: connections, address (too many at "
            "once, in all or of one address), memory (of bodies), slow_head, slow_body, slow_reader, large_head, "
            "small_chunks, malformed",
            PortReasonLabels,
            registry=registry,
        )
        self.connections = gauge(f"{prefix}_http_connections", "Open connections", PortLabels, registry=registry)


class Metrics:
    """One registry a process and test."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.ports = PortMetrics(r)
        self.events = counter("penstock_events", "Events by detect's decision", OutcomeLaneLabels, registry=r)
        self.dead_letters = counter(
            "penstock_dead_letters", "Records that became dead letters", StageReasonLabels, registry=r
        )
        self.dead_letter_floods = Counter(
            "penstock_dead_letter_floods", "Times that the limit on dead letters was reached", registry=r
        )
        self.dead_letter_pause = Gauge(
            "penstock_dead_letter_pause_seconds",
            "Remaining time for which bad records wait because there are too many dead letters; 0: they do not wait",
            registry=r,
        )
        self.unauthorised = counter(
            "penstock_unauthorised_records",
            "Records that no enrolled producer signed for its own tenant and source, by mode: refused (enforce) or "
            "accepted (warn)",
            StageReasonModeLabels,
            registry=r,
        )
        self.poison_moved = Counter(
            "penstock_moved_poison",
            "Bad records moved from a live topic to its backfill topic because the limit on dead letters was reached",
            registry=r,
        )
        self.live_deferred = Counter(
            "penstock_live_deferred",
            "Valid documents moved from the live topic to the backfill topic because their source exceeded its budget",
            registry=r,
        )
        self.failed_documents = counter(
            "penstock_failed_documents", "Documents set aside with a reason", SinkLabels, registry=r
        )
        self.retries = counter("penstock_retries", "Retries after a service failed", StageLabels, registry=r)
        self.breaker_open = gauge(
            "penstock_breaker_open",
            "1 while a stage is stopped because a service is down",
            StageServiceLabels,
            registry=r,
        )
        self.outage = gauge(
            "penstock_outage",
            "1 while a detect worker cannot read its figures because this server (postgres, kafka) does not respond; "
            "the worker that exports the backlog reads Kafka, the others only Postgres",
            ServiceLabels,
            registry=r,
        )
        self.ledger_fenced = Gauge(
            "penstock_ledger_fenced",
            "1 while a worker is stopped because the ledger is on a server or timeline that was not accepted, is "
            "being recovered, or is a standby",
            registry=r,
        )
        self.extraction = gauge(
            "penstock_extraction",
            "1 for the way in which PDF, Office and mail files are read for a connectors worker: confined, refused, "
            "unconfined, or unreachable (its extraction service does not respond)",
            FilesLabels,
            registry=r,
        )
        self.index_fenced = Gauge(
            "penstock_keyword_index_fenced",
            "1 while a keyword index is not searched because it was restored, created anew or set back, and has not "
            "been compared with the ledger yet",
            registry=r,
        )
        self.index_changes = counter(
            "penstock_keyword_index_changes",
            "Keyword indexes that are not the one that the ledger filled: recreated (under the same name), "
            "new_history (restored, or forced from a stale copy), rewound (it lost operations)",
            ChangeLabels,
            registry=r,
        )
        self.batch_seconds = histogram(
            "penstock_batch_seconds", "Time to process a batch", StageLabels, buckets=WORK_BUCKETS, registry=r
        )
        self.batch_size = histogram(
            "penstock_batch_size", "Records in a batch", StageLabels, buckets=SIZE_BUCKETS, registry=r
        )
        self.embedded = Counter("penstock_embedded_chunks", "Chunks embedded", registry=r)
        self.reused = Counter("penstock_reused_vectors", "Chunks whose text was embedded before", registry=r)
        self.embedding_tokens = counter(
            "penstock_embedding_tokens",
            "Tokens sent to the embedding model, by purpose: document, conversation (for questions see "
            "penstock_query_embedding_tokens_total)",
            PurposeLabels,
            registry=r,
        )
        self.embedding_requests = counter(
            "penstock_embedding_requests",
            "Requests to the embedding model by outcome: answered, throttled, unavailable, misconfigured, rejected",
            EmbeddingOutcomeLabels,
            registry=r,
        )
        self.embedding_seconds = Histogram(
            "penstock_embedding_seconds", "Time of a request to the embedding model", buckets=WORK_BUCKETS, registry=r
        )
        self.embedding_cost = counter(
            "penstock_embedding_cost",
            "Cost of embeddings, in the currency of PENSTOCK_EMBEDDING_PRICE_PER_MILLION_TOKENS, by purpose: "
            "document, conversation",
            PurposeLabels,
            registry=r,
        )
        self.embedding_budget = Gauge(
            "penstock_embedding_daily_budget",
            "Daily budget for embeddings (PENSTOCK_EMBEDDING_DAILY_BUDGET); 0: no limit is set",
            registry=r,
        )
        for purpose in get_args(Purpose):  # nothing spent is a zero, not an absence
            self.embedding_tokens.labels(purpose=purpose)
            self.embedding_cost.labels(purpose=purpose)
        self.embedding_spent: dict[Purpose, tuple[int, float]] = dict.fromkeys(get_args(Purpose), (0, 0.0))
        """Purpose → tokens and money, as ``penstock_embedding_tokens`` and ``penstock_embedding_cost`` show them."""
        self.embedding_price = 0.0
        """The price of a million tokens. It is no metric."""
        self._fenced: dict[str, bool] = {}
        """By worker, whether the ledger refused it when it was last checked."""
        self._pauses: list[WeakMethod[Callable[[], float]]] = []
        self.truncated = Counter(
            "penstock_truncated_chunks", "Chunks whose end was cut at the model's window", registry=r
        )
        self.written = counter("penstock_written_chunks", "Chunk rows or entries written", SinkLabels, registry=r)
        self.deleted = counter("penstock_deleted_chunks", "Chunk rows or entries deleted", SinkLabels, registry=r)
        self.moved = counter(
            "penstock_moved_documents", "Documents that changed while they were written", SinkLabels, registry=r
        )
        self.front_rows = gauge(
            "penstock_front_rows",
            "Chunk rows outside of a generation's HNSW graph, all of which every query reads; counted up to 50,001, "
            "by the one vectors worker that adds them",
            GenerationLabels,
            registry=r,
        )
        self.graph_rows = Counter("penstock_graph_rows", "Chunk rows added to the HNSW graph", registry=r)
        self.rescued = Counter("penstock_rescued_hints", "Hints sent again by the sweeper", registry=r)
        self.late_entries = Counter(
            "penstock_late_entries",
            "Entries that a bulk request wrote into Elasticsearch long after its worker had died or stopped waiting, "
            "and that were removed again",
            registry=r,
        )
        self.forgotten_versions = Counter(
            "penstock_forgotten_versions",
            "Superseded versions that were discarded although a late delete could still have made one of them "
            "current: their source decreases versions",
            registry=r,
        )
        self.lost_addresses = counter(
            "penstock_dropped_addresses",
            "Documents accepted without their source_url, because it may not be shown as a link",
            LaneLabels,
            registry=r,
        )
        self.announced = counter(
            "penstock_announced_documents",
            "Announcements on documents.indexed.v1, by state of the document",
            StateLabels,
            registry=r,
        )
        self.webhook_deliveries = counter(
            "penstock_webhook_deliveries",
            "Requests to receivers of webhooks by outcome: delivered, failed (it is tried again), parked (it is not)",
            WebhookOutcomeLabels,
            registry=r,
        )
        self.webhook_seconds = histogram(
            "penstock_webhook_seconds",
            "Time of a request to the receiver of a webhook",
            WebhookLabels,
            buckets=WORK_BUCKETS,
            registry=r,
        )
        self.webhook_waiting = gauge(
            "penstock_webhook_waiting_events", "Events that wait for their webhook", WebhookLabels, registry=r
        )
        self.webhook_parked = gauge(
            "penstock_webhook_parked_events",
            "Events that their webhook has refused for too long, and that wait for an operator",
            WebhookLabels,
            registry=r,
        )
        self.webhook_oldest = gauge(
            "penstock_webhook_oldest_seconds", "Age of the oldest event that waits", WebhookLabels, registry=r
        )
        self.webhook_paused = gauge(
            "penstock_webhook_paused", "1 while nothing is sent to a webhook", WebhookLabels, registry=r
        )
        self.analysis_backlog = gauge(
            "penstock_analysis_backlog_messages",
            "Messages that a task of the analysis worker has not handled, of the partitions that this process reads",
            TaskLabels,
            registry=r,
        )
        self.analysis_messages = counter(
            "penstock_analysis_messages", "Messages that a task of the analysis has handled", TaskLabels, registry=r
        )
        self.analysis_failures = counter(
            "penstock_analysis_failures",
            "Failures after which a task of the analysis worker repeats its messages",
            TaskLabels,
            registry=r,
        )
        self.answers_invalidated = counter(
            "penstock_answers_invalidated",
            "Standing questions whose answer no longer holds, by what happened to its passages",
            ChangeLabels,
            registry=r,
        )
        self.analysis_seconds = histogram(
            "penstock_analysis_seconds",
            "Time in which a task of the analysis worker handles up to 200 messages",
            TaskLabels,
            buckets=WORK_BUCKETS,
            registry=r,
        )
        self.conflicts_examined = Counter(
            "penstock_conflicts_examined_passages", "Passages that were compared with their neighbours", registry=r
        )
        self.conflicts_detected = counter(
            "penstock_conflicts_detected",
            "Pairs of passages that contradict or repeat each other, when they were stored or changed",
            ConflictLabels,
            registry=r,
        )
        self.conflicts_closed = Counter(
            "penstock_conflicts_closed", "Conflicts that ended because one of their passages did", registry=r
        )
        self.lineage = counter(
            "penstock_lineage_events",
            "OpenLineage events by outcome: sent, lost (the receiver does not take them, or too many wait for it)",
            LineageLabels,
            registry=r,
        )
        self.freshness = histogram(
            "penstock_freshness_seconds",
            "Time from the source's change until both stores return it",
            SourceLaneLabels,
            buckets=FRESHNESS_BUCKETS,
            registry=r,
        )
        self.divergent = gauge(
            "penstock_divergent_documents",
            "Documents whose newest audit found a difference, by store and kind",
            StoreKindLabels,
            registry=r,
        )
        self.audited = Counter("penstock_audited_documents", "Documents that the background audit read", registry=r)
        self.audit_age = Gauge(
            "penstock_audit_age_seconds", "Time since the background audit last completed a round", registry=r
        )
        self.source_throttled = counter(
            "penstock_source_throttled_seconds",
            "Time for which a source made its connector wait (429, an exhausted budget)",
            SourceLabels,
            registry=r,
        )
        self.conversation_pairs = counter(
            "penstock_conversation_pairs", "Pairs of question and answer, by outcome", OutcomeLabels, registry=r
        )
        self.conversation_chunks = Counter(
            "penstock_embedded_conversation_chunks", "Chunks of conversations embedded", registry=r
        )
        self.conversation_waiting = Gauge(
            "penstock_waiting_conversation_chunks", "Chunks of conversations without an embedding", registry=r
        )
        self.connector_outcomes = counter(
            "penstock_connector_entries", "Entries of sources by outcome", SourceOutcomeLabels, registry=r
        )
        self.connector_age = gauge(
            "penstock_connector_success_age_seconds",
            "Time since an activity of a connector last succeeded",
            SourceActivityLabels,
            registry=r,
        )
        self.connector_waiting = gauge(
            "penstock_connector_not_working",
            "1 while an activity of a connector is waiting or needs attention",
            SourceActivityLabels,
            registry=r,
        )
        self.connector_problems = gauge(
            "penstock_connector_problems",
            "Problems of a connector (of: source) and documents that it cannot publish (of: documents)",
            SourceOfLabels,
            registry=r,
        )
        self.uploads_quota = gauge(
            "penstock_uploads_quota_used_ratio",
            "Used share of the quota for uploads (files or bytes, whichever is fuller) of their tenant (of: tenant) "
            "and of all tenants (of: all); 0 if the connector does not run",
            SourceOfLabels,
            registry=r,
        )
        self.uploads_refused = counter(
            "penstock_uploads_refused",
            "Uploads refused because of a quota, or busy: too many files were being uploaded",
            SourceReasonLabels,
            registry=r,
        )
        self.connector_events = counter(
            "penstock_connector_events",
            "Events that sources sent, by outcome",
            SourceOutcomeLabels,
            registry=r,
        )
        self.reconciled = counter(
            "penstock_reconciliation_differences",
            "Differences between what a connector published and what the ledger accepted, each published again",
            SourceKindLabels,
            registry=r,
        )
        self.in_flight = gauge(
            "penstock_in_flight_records", "Records that were read and are not handled yet", StageLabels, registry=r
        )
        self.log_moved = counter(
            "penstock_kafka_log_moved",
            "Partitions whose log differs from the one that was read (recreated, truncated, regrown: read again from "
            "the newest record that is still the same), or lost unread records (expired)",
            TopicKindLabels,
            registry=r,
        )
        self.expired_records = counter(
            "penstock_kafka_expired_records",
            "Records that Kafka deleted before they were read",
            TopicLabels,
            registry=r,
        )
        self.pending = gauge(
            "penstock_pending_documents",
            "Documents of which a store does not hold the desired state yet",
            StoreLaneLabels,
            registry=r,
        )
        self.oldest_pending = gauge(
            "penstock_oldest_pending_seconds",
            "Age of the oldest pending document; 0: none is pending",
            StoreLaneLabels,
            registry=r,
        )
        self.source_pending = gauge(
            "penstock_source_oldest_pending_seconds",
            "Age of the oldest pending live change of a source; absent for sources without any",
            SourceLabels,
            registry=r,
        )
        self.lag = gauge(
            "penstock_consumer_lag_records",
            "Records from a stage's committed offsets to the end of its topics",
            StageLaneLabels,
            registry=r,
        )
        self.waiting_dead_letters = gauge(
            "penstock_waiting_dead_letters",
            "Dead letters of the last seven days that were neither replayed nor dismissed",
            StageLabels,
            registry=r,
        )
        self.skipped_documents = gauge(
            "penstock_skipped_documents",
            "Documents that cannot be read at their source; absent for sources without any",
            SourceLabels,
            registry=r,
        )
        self.access_age = gauge(
            "penstock_access_age_seconds",
            "Time since a source's access rights were last read completely (the older of its sweep and its groups); "
            "absent for sources whose connector is paused or removed",
            SourceLabels,
            registry=r,
        )
        self.certificate_age = gauge(
            "penstock_certificate_age_seconds",
            "Time since which a source is not known to be complete in both stores (its freshness certificate); absent"
            " for sources without a certificate, and for those whose connector is paused or removed",
            SourceLabels,
            registry=r,
        )
        self.retention_erased = counter(
            "penstock_retention_erased",
            "Rows that were erased because their retention time was over",
            TableLabels,
            registry=r,
        )
        self.access_interval = gauge(
            "penstock_access_interval_seconds",
            "Time between two complete readings of a source's access rights, as its connector is declared",
            SourceLabels,
            registry=r,
        )
        self.seen_age = gauge(
            "penstock_connector_seen_age_seconds",
            "Time since the worker that runs a connector last reported; absent for paused and removed connectors",
            SourceLabels,
            registry=r,
        )

    def fence(self, worker: str) -> Callable[[bool], None]:
        """Return a function that the worker calls with whether the ledger refuses it. ``ledger_fenced`` is 1 while the
        ledger refuses any worker of the process."""

        def show(refused: bool) -> None:
            self._fenced[worker] = refused
            self.ledger_fenced.set(any(self._fenced.values()))

        return show

    def show_pause(self, seconds: Callable[[], float]) -> None:
        """Show the result of this method in ``dead_letter_pause``: the greatest of all objects that still exist."""
        self._pauses.append(WeakMethod(seconds))
        self.dead_letter_pause.set_function(
            lambda: max((alive() for method in self._pauses if (alive := method())), default=0.0)
        )

    def embedding_request(self, outcome: EmbeddingOutcome, seconds: float) -> None:
        self.embedding_requests.labels(outcome=outcome).inc()
        self.embedding_seconds.observe(seconds)

    def embedding_billed(self, tokens: int, price: float | None = None, *, purpose: Purpose = "document") -> None:
        """Count billed tokens and their cost. price: of a million tokens, where the model is not the settings' own."""
        cost = tokens * (self.embedding_price if price is None else price) / 1_000_000
        spent_tokens, spent_cost = self.embedding_spent[purpose]
        self.embedding_spent[purpose] = spent_tokens + tokens, spent_cost + cost
        self.embedding_tokens.labels(purpose=purpose).inc(tokens)
        self.embedding_cost.labels(purpose=purpose).inc(cost)

    def breaker(self, stage: str, service: str | None, *, is_open: bool) -> None:
        self.breaker_open.labels(stage=stage, service=service or "unknown").set(is_open)

    @contextmanager
    def batch(self, stage: str, size: int) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.batch_seconds.labels(stage=stage).observe(perf_counter() - start)
            self.batch_size.labels(stage=stage).observe(size)
