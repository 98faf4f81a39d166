"""The contract of a source of documents, for connectors of your own (docs/connectors/your-own.md).

``Source`` is the contract. ``SmallSource`` has defaults for it, with which ``list`` and ``read`` suffice; ``WebSource``
is one for services with an address and a token. A method raises ``Retryable`` (or ``Deferred``) while the source cannot
respond, and ``Misconfigured`` when only a person can help. ``Web`` is an HTTP client that raises these by itself.
``each_entry`` lists items one by one, so that the data of one never stop the others. ``document_from_file`` makes a
document of a file, and ``extract_file`` reads its text; both need the extra ``connectors``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.packages import check

check()

from connectors.base import ReadersOptions, SmallSource, StrictOptions, WebOptions, WebSource  # noqa: E402
from connectors.extraction.result import Extracted  # noqa: E402
from connectors.extraction.result import Unreadable as UnreadableFile  # noqa: E402
from connectors.listings import each_entry  # noqa: E402
from connectors.protocol import Problem  # noqa: E402
from connectors.source import (  # noqa: E402
    Context,
    Cursor,
    CursorExpired,
    Document,
    Entry,
    Gone,
    Group,
    GroupPage,
    Listed,
    Memory,
    MetadataKeys,
    Page,
    Playground,
    Playing,
    Reaction,
    Refused,
    Request,
    Source,
    Unlisted,
    Unreadable,
)
from connectors.web import Denied, Forbidden, Limits, Missing, Rejected, TooLarge, Web  # noqa: E402
from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Retryable  # noqa: E402

if TYPE_CHECKING:
    from connectors.extraction.sandbox import extract_file
    from connectors.file_documents import document_from_file

__all__ = [
    "Context",
    "Cursor",
    "CursorExpired",
    "Deferred",
    "Denied",
    "Document",
    "Entry",
    "Extracted",
    "Forbidden",
    "Gone",
    "Group",
    "GroupPage",
    "Limits",
    "Listed",
    "Memory",
    "MetadataKeys",
    "Misconfigured",
    "Missing",
    "Page",
    "PenstockError",
    "Playground",
    "Playing",
    "Problem",
    "Reaction",
    "ReadersOptions",
    "Refused",
    "Rejected",
    "Request",
    "Retryable",
    "SmallSource",
    "Source",
    "StrictOptions",
    "TooLarge",
    "Unlisted",
    "Unreadable",
    "UnreadableFile",
    "Web",
    "WebOptions",
    "WebSource",
    "document_from_file",
    "each_entry",
    "extract_file",
]


def __getattr__(name: str) -> Any:
    """Import what reads files when it is first used, because it needs the extra ``connectors``."""
    if name == "extract_file":
        from connectors.extraction.sandbox import extract_file

        return extract_file
    if name == "document_from_file":
        from connectors.file_documents import document_from_file

        return document_from_file
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
