"""Canaries: documents of our own, one for each source, which are published and searched for all the time. This module
says what they are called and what their messages are. Pure.

A canary has its own source (``canary.wiki`` for ``wiki``), so that no connector's sweep deletes it and no count of a
source includes it. It has one reader, whom no identity provider knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

MARK = "canary."
"""The prefix of canaries' sources. No connector may have a name with this prefix."""
PRINCIPAL = "penstock-canary"
EXTERNAL_ID = "canary"
LIST_SECONDS = 30.0
"""Interval in which the worker reads the list of sources. Of a source whose connector was removed, it may publish the
canary for so long, and then deletes it."""
LONGEST_SOURCE = 200
"""The most characters of a source's name that the wire format allows."""

Withdrawal = Literal["access", "delete"]
WITHDRAWALS: tuple[Withdrawal | None, ...] = (None, "access", "delete")
"""How the rounds end, in this order, again and again. None: the canary stays, and the next round replaces it in both
stores."""


def is_canary(source: str) -> bool:
    return source.startswith(MARK)


def withdrawal(number: int) -> Withdrawal | None:
    """How the round of this number (from 0) ends."""
    return WITHDRAWALS[number % len(WITHDRAWALS)]


@dataclass(frozen=True, slots=True)
class Canary:
    """The canary of one source."""

    tenant: str
    stands_for: str
    """The source that it belongs to."""

    @property
    def source(self) -> str:
        return f"{MARK}{self.stands_for}"[:LONGEST_SOURCE]

    def published(self, words: str, token: str, moment: datetime, version: int) -> DocumentUpserted:
        """The message that publishes it, with these words and the token by which this round recognises it."""
        return DocumentUpserted(
            tenant=self.tenant,
            source=self.source,
            external_id=EXTERNAL_ID,
            observed_at=moment,
            version=version,
            title="Canary",
            content=f"{words} Canary {token}.",
            media_type="text/plain",
            acl_tags=[f"user:{PRINCIPAL}"],
            source_modified_at=moment,
        )

    def withdrawn(self, way: Withdrawal, moment: datetime) -> AccessChanged | DocumentDeleted:
        if way == "delete":
            return self.deleted(moment)
        return AccessChanged(
            tenant=self.tenant, source=self.source, external_id=EXTERNAL_ID, observed_at=moment, acl_tags=[]
        )

    def deleted(self, moment: datetime) -> DocumentDeleted:
        return DocumentDeleted(tenant=self.tenant, source=self.source, external_id=EXTERNAL_ID, observed_at=moment)
