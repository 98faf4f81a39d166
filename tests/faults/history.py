"""The history of operations on the sources and of what people were shown, and a check for violations.

Each pair of a document and a person is a register: readable or not. A revocation (a restriction, a deletion, a lost
membership) counts from the moment at which the ledger was seen to have accepted it; from then on no query that starts
later may return the document to that person, until somebody begins to grant it again.

All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
class Certificate:
    """A freshness certificate of one source: which of its changes a query claims to know. None: no claim."""

    complete_until: float | None
    access_until: float | None


@dataclass(frozen=True, slots=True)
class Write:
    """A text that a document was given at its source, recognised by its marker."""

    document: str
    marker: str
    invoked: float
    completed: float


@dataclass(frozen=True, slots=True)
class Query:
    """A query of one person over one interface, and the documents that it returned."""

    person: str
    interface: str
    start: float
    end: float
    returned: frozenset[str]
    texts: Mapping[str, str] = field(default_factory=dict)
    """The marker of the text that was shown of a document, by document."""
    certificates: Mapping[str, Certificate] = field(default_factory=dict)
    """By source."""


@dataclass
class History:
    """The revocations and queries of one scenario, in the order in which they were recorded."""

    revocations: list[Revocation] = field(default_factory=list)
    queries: list[Query] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)

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

    def overclaims(self) -> list[str]:
        """Return every claim of a certificate that what the query returned contradicts: a document whose revocation was
        completed before ``access_until``, or a text that was replaced before ``complete_until``; empty for a correct
        history. Writes of one document are in order."""
        by_register = _grouped(self.revocations)
        return [
            f"{query.interface}: {document} shown to {query.person} by a certificate that is {why}"
            for query in self.queries
            for document in sorted(query.returned)
            if (certificate := query.certificates.get(document.partition("/")[0])) is not None
            for why in (
                *_revoked(query, certificate, by_register.get((document, query.person), ())),
                *_replaced(query, certificate, [write for write in self.writes if write.document == document]),
            )
        ]


def _revoked(query: Query, certificate: Certificate, revocations: Iterable[Revocation]) -> Iterator[str]:
    until = certificate.access_until
    for revocation in revocations:
        is_granted = revocation.granted_again is not None and revocation.granted_again <= query.end
        if until is not None and revocation.completed < until and not is_granted:
            yield f"{until - revocation.completed:.2f} s newer than its {revocation.kind}"


def _replaced(query: Query, certificate: Certificate, writes: Sequence[Write]) -> Iterator[str]:
    """writes: of one document. A text that was written again counts as of the last time."""
    until = certificate.complete_until
    shown = [
        n
        for n, write in enumerate(writes)
        if write.marker == query.texts.get(write.document) and write.invoked <= query.end
    ]
    newer = writes[shown[-1] + 1 : shown[-1] + 2] if shown else []
    if until is not None and newer and newer[0].completed < until:
        yield f"{until - newer[0].completed:.2f} s newer than the text that replaced it"


def _grouped(revocations: Iterable[Revocation]) -> dict[Register, list[Revocation]]:
    grouped: dict[Register, list[Revocation]] = {}
    for revocation in revocations:
        grouped.setdefault(revocation.register, []).append(revocation)
    return grouped
