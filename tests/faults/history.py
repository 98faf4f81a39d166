"""The history of operations on the sources and of what people were shown, and a check for violations.

Each pair of a document and a person is a register: readable or not. A revocation (a restriction, a deletion, a lost
membership) counts from the moment at which the ledger was seen to have accepted it; from then on no query that starts
later may return the document to that person, until somebody begins to grant it again.

All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

Register = tuple[str, str]
"""The pair (document, person)."""


@dataclass(slots=True)
class Revocation:
    """A revocation of one register. ``accepted`` is None until the ledger is known to have accepted it."""

    register: Register
    kind: str
    invoked: float
    completed: float
    accepted: float | None = None
    granted_again: float | None = None
    """The time at which an operation began that may grant the access again."""

    def forbids(self, start: float, end: float) -> bool:
        """Whether a query that ran from ``start`` to ``end`` had to know about this revocation."""
        if self.accepted is None or start <= self.accepted:
            return False
        return self.granted_again is None or end < self.granted_again


@dataclass(frozen=True, slots=True)
class Query:
    """A query of one person over one interface, and the documents that it returned."""

    person: str
    interface: str
    start: float
    end: float
    returned: frozenset[str]


@dataclass
class History:
    """The revocations and queries of one scenario, in the order in which they were recorded."""

    revocations: list[Revocation] = field(default_factory=list)
    queries: list[Query] = field(default_factory=list)

    def revoke(self, registers: Iterable[Register], kind: str, invoked: float, completed: float) -> None:
        self.revocations += [Revocation(register, kind, invoked, completed) for register in registers]

    def grant(self, registers: Collection[Register], invoked: float) -> None:
        """Record the start of an operation that may grant access to these registers."""
        for revocation in self.revocations:
            if revocation.register in registers and revocation.granted_again is None:
                revocation.granted_again = invoked

    def awaiting_acceptance(self) -> list[Revocation]:
        return [r for r in self.revocations if r.accepted is None and r.granted_again is None]

    def violations(self) -> list[str]:
        """Return every query that returned a document whose revocation was accepted; empty for a correct history."""
        by_register: Mapping[Register, list[Revocation]] = _grouped(self.revocations)
        return [
            f"{query.interface}: {document} shown to {query.person} {query.start - revocation.accepted:.2f} s after"
            f" its {revocation.kind} was accepted"
            for query in self.queries
            for document in sorted(query.returned)
            for revocation in by_register.get((document, query.person), ())
            if revocation.accepted is not None and revocation.forbids(query.start, query.end)
        ]


def _grouped(revocations: Iterable[Revocation]) -> dict[Register, list[Revocation]]:
    grouped: dict[Register, list[Revocation]] = {}
    for revocation in revocations:
        grouped.setdefault(revocation.register, []).append(revocation)
    return grouped
