"""The messages of Kafka's topics, for programs that publish or read them without a connector (docs/wire.md).

``publication_token`` names published messages, so that a search can wait for them (docs/consistency.md).
``encode`` makes the key, value and headers of a record, which any Kafka client can send; ``decode`` reads one.
``Signer`` signs records where the operator requires it; it needs the package cryptography.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.packages import check

check()

from pipeline.core import publication  # noqa: E402
from pipeline.core.identity import document_id  # noqa: E402
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
    "publication_token",
]


def publication_token(messages: Iterable[DocumentUpserted | DocumentDeleted | AccessChanged]) -> str:
    """The token that names these messages in a search: ``at_least`` waits until the caller can see their changes.

    Make it after Kafka has acknowledged the messages. Raises ValueError for more than 10,000 documents.
    """
    return publication.token(map(_publication_of, messages))


def _publication_of(message: DocumentUpserted | DocumentDeleted | AccessChanged) -> publication.Publication:
    id_ = document_id(message.tenant, message.source, message.external_id)
    match message:
        case DocumentUpserted():
            return publication.content(id_, message.version)
        case AccessChanged():
            return publication.access(id_, message.observed_at)
        case DocumentDeleted():
            return publication.deletion(id_, message.observed_at)


def __getattr__(name: str) -> Any:
    """Import what signs when it is first used, because a base installation has no cryptography."""
    if name not in ("NotAKey", "Signer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from topics import signatures

    return getattr(signatures, name)
