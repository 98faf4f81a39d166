"""Canaries: one document of our own for each source, published and looked for all the time. What they are called and
what is done with them. Pure.

A canary has a source of its own (``canary.wiki`` stands for ``wiki``), so that no connector's sweep ever misses it and
no count by source holds it, and one reader, whom no identity provider knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

MARK = "canary."
"""The prefix of their sources. No connector may have a name that begins with it."""
PRINCIPAL = "penstock-canary"
EXTERNAL_ID = "canary"
LONGEST_SOURCE = 200
"""Characters, by the contract."""

Withdrawal = Literal["access", "delete"]
WITHDRAWALS: tuple[Withdrawal | None, ...] = (None, "access", "delete")
"""How a round ends, in turn. After None the next one replaces what both stores hold; after the others it begins
anew."""


def is_canary(source: str) -> bool:
    return source.startswith(MARK)


def withdrawal(number: int) -> Withdrawal | None:
    """How the round of this number (from 0) ends."""
    return WITHDRAWALS[number % len(WITHDRAWALS)]


@dataclass(frozen=True, slots=True)
class Canary:
    tenant: str
    stands_for: str
    """A source."""

    @property
    def source(self) -> str:
        return f"{MARK}{self.stands_for}"[:LONGEST_SOURCE]

    def published(self, words: str, token: str, moment: datetime, version: int) -> DocumentUpserted:
        """It holds the words, and the token that it is known by this time; its reader alone may see it."""
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
