"""What a question is narrowed to, besides what its asker may read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Filters:
    """All that is given must hold; of each tuple, any one. Empty: everything."""

    sources: tuple[str, ...] = ()
    authors: tuple[str, ...] = ()
    media_types: tuple[str, ...] = ()
    """As the source declares them; ``text/*`` stands for all that begin so."""
    since: datetime | None = None
    before: datetime | None = None
    """Of the document's time at its source; aware. One without a time is left out by either."""
    documents: tuple[UUID, ...] = ()


NONE = Filters()
