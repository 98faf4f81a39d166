"""The effects of the product's statements, in memory: for each of its modules one here, mostly of the same name.

The product's ledger functions run as they are; only Postgres is replaced. A statement is recognised by a part of its
text that says what it does, and one that nobody here knows fails loudly. ``test_servers`` runs the same random
sequences of calls on this and on the real Postgres and compares everything.
"""

from tests.simulation.statements import (
    access,
    announce,
    audit,
    bulks,
    documents,
    freshness,
    marks,
    memberships,
    republish,
    rows,
    runner,
    superseded,
    vectors,
    work,
)
from tests.simulation.statements.registry import GENERATION, find

__all__ = [
    "GENERATION",
    "access",
    "announce",
    "audit",
    "bulks",
    "documents",
    "find",
    "freshness",
    "marks",
    "memberships",
    "republish",
    "rows",
    "runner",
    "superseded",
    "vectors",
    "work",
]
