"""The topics: names, partitions, retention. ``ensure_topics`` creates what is missing and reports what differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DAY_MS = 24 * 3600 * 1000
MAX_MESSAGE_BYTES = 26 * 1024 * 1024
"""4 MiB of content, each byte at worst escaped to six (``\\u0000``), and the other fields."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic of the contract, with its configuration."""

    name: str
    holds: tuple[str, ...]
    """The message types it may carry (``topics.messages.MESSAGES``); empty for raw records."""
    purpose: str
    partitions: int = 8
    """Live and backfill topics of one stage are co-partitioned: equal counts, equal keys, so equal lanes."""
    cleanup: Literal["delete", "compact"] = "delete"
    retention_ms: int = 14 * DAY_MS
    """Longer than the interval between ledger backups: `penstock recover` replays from here."""
    max_message_bytes: int = 1024 * 1024
    settings: dict[str, str] = field(default_factory=dict)

    def configs(self, *, replication: int) -> dict[str, str]:
        """Return the topic's configuration under Kafka's names."""
        return {
            "cleanup.policy": self.cleanup,
            "retention.ms": str(self.retention_ms if self.cleanup == "delete" else -1),
            "max.message.bytes": str(self.max_message_bytes),
            "min.insync.replicas": str(max(1, replication - 1)),
            **self.settings,
        }


_DOCUMENTS = ("document.upserted.v1", "document.deleted.v1", "document.access-changed.v1")

DOCUMENTS_LIVE = Topic(
    "documents.live.v1", _DOCUMENTS, "changes, as they happen at the sources", max_message_bytes=MAX_MESSAGE_BYTES
)
DOCUMENTS_BACKFILL = Topic(
    "documents.backfill.v1", _DOCUMENTS, "first loads and full crawls", max_message_bytes=MAX_MESSAGE_BYTES
)
IDENTITIES = Topic(
    "identities.v1",
    ("identity.changed.v1",),
    "who is in which group",
    cleanup="compact",
    max_message_bytes=MAX_MESSAGE_BYTES,
)
CONVERSATIONS = Topic(
    "conversations.live.v1",
    ("conversation.recorded.v1", "conversation.forgotten.v1"),
    "what members asked and were answered",
    max_message_bytes=8 * 1024 * 1024,
)
INDEX_LIVE = Topic("index.live.v1", ("index.hint.v1",), "wakes the sinks, live", retention_ms=3 * DAY_MS)
INDEX_BACKFILL = Topic("index.backfill.v1", ("index.hint.v1",), "wakes the sinks, backfill", retention_ms=3 * DAY_MS)
DOCUMENTS_INDEXED = Topic("documents.indexed.v1", ("document.indexed.v1",), "what became searchable or was retired")
CONFLICTS = Topic("conflicts.v1", ("conflict.changed.v1",), "passages that contradict or repeat each other")
ANSWERS_INVALIDATED = Topic("answers.invalidated.v1", ("answer.invalidated.v1",), "kept answers that no longer hold")
DEAD_LETTERS = Topic(
    "dead-letters.v1",
    (),
    "unreadable events, byte for byte",
    partitions=1,
    retention_ms=90 * DAY_MS,
    max_message_bytes=MAX_MESSAGE_BYTES + 2**16,
)

TOPICS = (
    DOCUMENTS_LIVE,
    DOCUMENTS_BACKFILL,
    IDENTITIES,
    CONVERSATIONS,
    INDEX_LIVE,
    INDEX_BACKFILL,
    DOCUMENTS_INDEXED,
    CONFLICTS,
    ANSWERS_INVALIDATED,
    DEAD_LETTERS,
)

COPARTITIONED = ((DOCUMENTS_LIVE, DOCUMENTS_BACKFILL), (INDEX_LIVE, INDEX_BACKFILL))
"""Read by the same workers in the same key lanes: one document's partition must be the same number in both."""

INTAKE = (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, IDENTITIES, CONVERSATIONS)
"""The topics that producers write to; each record is signed by its producer (topics.signatures)."""
