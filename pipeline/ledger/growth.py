"""How each table of Postgres grows, and the bound of that growth: one list, which docs/growth.md shows and
``bench.year`` holds a simulated year against.

A test compares it with the migrated schema, so that a table that nothing bounds is noticed before it is large. CHUNKS
stands for the chunk tables (``chunks_…``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["documents", "deleted", "age", "number", "declared", "people", "kept"]
"""documents: as many rows as living documents (or chunks) need. deleted: also a small rest of every document that was
deleted. age: rows end by age. number: a fixed number of rows. declared: as many as somebody declared. people: as many
as a source has people or groups. kept: until somebody deletes them."""
CHUNKS = "chunks_*"


@dataclass(frozen=True, slots=True)
class Growth:
    kind: Kind
    rows: str
    """This is what a row stands for."""
    bound: str
    """The rule that ends a row, or limits their number."""
    of_document: int | None = None
    """The most rows of one document; its table grows until each has so many. None: there is no such number."""


_RETENTION = "PENSTOCK_RETENTION_"
_REST = "the text goes at once, what names the document after {days}; the rest stays, so that the deletion holds"
_GENERATION = "a cut-over removes the rows of the generation that it retires"

GROWTH: Mapping[str, Growth] = {
    "documents": Growth("deleted", "a document", _REST.format(days=f"{_RETENTION}DELETED_DAYS")),
    "document_bodies": Growth("deleted", "a document's text", "an emptied row stays with its document's"),
    "document_events": Growth(
        "documents", "one of a document's last 16 events", "goes when the document's names do", 16
    ),
    "index_state": Growth("deleted", "a document in a store of a generation", _GENERATION),
    "manifests": Growth("documents", "the chunks of a document in a generation", "goes with the text"),
    CHUNKS: Growth("documents", "a chunk", "goes with the text; a retired generation's table is dropped"),
    "superseded": Growth("age", "a text that lost by version", f"eight a document; {_RETENTION}SUPERSEDED_DAYS"),
    "access_sets": Growth(
        "documents", "tags that documents have", "goes after its last document; 10,000 are looked at a minute"
    ),
    "conflicts": Growth("documents", "two passages that contradict each other", "goes with either passage"),
    "conflict_decisions": Growth("documents", "what a person decided of a conflict", "goes with the conflict"),
    "conflict_examined": Growth("documents", "a document that was compared", "goes with the document's text", 1),
    "memberships": Growth("people", "a person's groups in a source", f"{_RETENTION}MEMBERSHIPS_DAYS without a group"),
    "person_floors": Growth("kept", "a person who was forgotten", "stays, so that it holds"),
    "membership_floors": Growth("declared", "a source that was forgotten", "stays, so that it holds"),
    "dead_letters": Growth("age", "a dead letter", f"{_RETENTION}DEAD_LETTERS_DAYS"),
    "dead_letter_trail": Growth("age", "what was done with a dead letter", "goes with the dead letter"),
    "connectors": Growth("declared", "a connector", "the connectors that are declared, and those that were removed"),
    "connector_items": Growth("documents", "a document of a connector", f"gone: {_RETENTION}DELETED_DAYS"),
    "connector_asks": Growth("age", "something that was asked of a connector", f"{_RETENTION}DELETED_DAYS"),
    "connector_groups": Growth("people", "a group of a source", "goes when the source has no such group"),
    "connector_principals": Growth("people", "a person of a source", f"{_RETENTION}MEMBERSHIPS_DAYS without a group"),
    "connector_memory": Growth("documents", "what a source remembers", "replaced, or removed by the source"),
    "connector_differences": Growth("age", "a difference from the ledger", "ends with it, or a day after its repair"),
    "connector_sources": Growth("declared", "a source", "the sources that connectors publish"),
    "connector_publications": Growth("documents", "a publication", "goes when both stores have it"),
    "connector_freshness": Growth("declared", "a source", "the sources that connectors publish"),
    "connector_logins": Growth("declared", "a login of connectors", "unbound by an operator"),
    "webhooks": Growth("declared", "a webhook", "removed by an operator"),
    "webhook_deliveries": Growth("age", "an event for a receiver", "until it is taken; PENSTOCK_WEBHOOKS_KEEP_SECONDS"),
    "uploads": Growth("documents", "an uploaded file", f"quotas; deleted: {_RETENTION}DELETED_DAYS"),
    "conversation_pairs": Growth(
        "kept", "a question of a member, and its answer", "32 million tokens a member; `conversation.forgotten.v1`"
    ),
    "conversation_mentions": Growth(
        "kept", "a pair in a conversation", "200,000 a member; `conversation.forgotten.v1`"
    ),
    "conversation_chunks": Growth("kept", "pairs that are embedded together", "`conversation.forgotten.v1`"),
    "conversation_members": Growth("people", "a member with a history", "`conversation.forgotten.v1`"),
    "conversation_floors": Growth("kept", "a conversation or member that was forgotten", "stays, so that it holds"),
    "conversation_provenance": Growth("kept", "an answer that a conversation names", "goes with the pair"),
    "answer_provenance": Growth("age", "an answer", "30 days; 8 KiB for each request of a caller's rate"),
    "standing_questions": Growth("age", "a standing question", f"about 100 a principal; {_RETENTION}STANDING_DAYS"),
    "standing_passages": Growth("age", "a passage behind a standing question", "goes with the question"),
    "standing_changes": Growth("age", "a change of a kept answer", "goes when it is over, and with the question"),
    "answer_reviews": Growth(
        "age", "an answer for review", f"{_RETENTION}REVIEWS_DAYS; 8 KiB for each request of a caller's rate"
    ),
    "answer_feedback": Growth("age", "feedback", f"{_RETENTION}FEEDBACK_DAYS"),
    "eval_queries": Growth("kept", "a golden question", f"{_RETENTION}GOLDEN_DAYS (0: for ever)"),
    "eval_judgements": Growth(
        "kept", "a judged result", f"goes with the question; of deleted documents: {_RETENTION}DELETED_DAYS"
    ),
    "eval_runs": Growth("age", "a measure of an evaluation", "90 days"),
    "shadow_agreement": Growth("age", "an hour of shadow queries", "90 days"),
    "audit_runs": Growth("number", "an audit", "20 of a generation and scope"),
    "audit_documents": Growth("number", "a document that a run compares", "goes when the run ends"),
    "audit_differences": Growth("number", "a difference", "goes with its run"),
    "open_bulks": Growth("number", "a bulk request without an answer", "goes with the answer, or when it expires"),
    "kafka_marks": Growth("declared", "a partition of a consumer group", "as many as there are partitions"),
    "handled": Growth("number", "a stage", "one a stage"),
    "generations": Growth("declared", "a generation", "a row of each that ever was"),
    "builds": Growth("declared", "a build of a generation", "one a generation"),
    "keyword_indexes": Growth("declared", "a keyword index", "one a generation"),
    "metadata_keys": Growth("declared", "a key by which searches filter", "declared by an operator"),
    "sketch_rotations": Growth("declared", "a number of dimensions", "one for each that a generation has had"),
    "fence": Growth("number", "the ledger's identity", "one row"),
    "generations_lock": Growth("number", "a lock", "no row"),
    "tenant_readers": Growth("declared", "a reader's login", "unbound by an operator"),
    "producers": Growth("declared", "a producer", "enrolled by an operator"),
    "producer_keys": Growth("declared", "a producer's key", "enrolled by an operator"),
    "query_use": Growth("age", "a caller's use in a span", f"{_RETENTION}BUDGETS_DAYS"),
    "embedding_days": Growth("age", "the spending of a day for a purpose", "400 days"),
    "schema_migrations": Growth("declared", "a migration", "one a migration"),
    "trail.records": Growth(
        "age",
        "a search, a reading, a command",
        f"{_RETENTION}TRAIL_DAYS, whole days; 8 KiB for each request of a caller's rate",
    ),
    "trail.heads": Growth("age", "the end of a chain at a time", f"a month after {_RETENTION}TRAIL_DAYS"),
}
