"""The messages of Kafka's topics, for programs that publish or read them without a connector (docs/wire.md).

``encode`` makes the key, value and headers of a record, which any Kafka client can send; ``decode`` reads one.
``Signer`` signs records where the operator requires it; it needs the package cryptography.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.packages import check

check()

from topics.codec import BadMessage, Record, decode, encode  # noqa: E402
from topics.messages import (  # noqa: E402
    AccessChanged,
    AnyMessage,
    ConversationForgotten,
    ConversationRecorded,
    DocumentDeleted,
    DocumentIndexed,
    DocumentUpserted,
    IdentityChanged,
    Pair,
)
from topics.registry import (  # noqa: E402
    CONVERSATIONS,
    DEAD_LETTERS,
    DOCUMENTS_BACKFILL,
    DOCUMENTS_INDEXED,
    DOCUMENTS_LIVE,
    IDENTITIES,
    Topic,
)

if TYPE_CHECKING:
    from topics.signatures import NotAKey, Signer

__all__ = [
    "CONVERSATIONS",
    "DEAD_LETTERS",
    "DOCUMENTS_BACKFILL",
    "DOCUMENTS_INDEXED",
    "DOCUMENTS_LIVE",
    "IDENTITIES",
    "AccessChanged",
    "AnyMessage",
    "BadMessage",
    "ConversationForgotten",
    "ConversationRecorded",
    "DocumentDeleted",
    "DocumentIndexed",
    "DocumentUpserted",
    "IdentityChanged",
    "NotAKey",
    "Pair",
    "Record",
    "Signer",
    "Topic",
    "decode",
    "encode",
]


def __getattr__(name: str) -> Any:
    """Import what signs when it is first used, because a base installation has no cryptography."""
    if name not in ("NotAKey", "Signer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from topics import signatures

    return getattr(signatures, name)
