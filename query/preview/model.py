"""A proposed edit, and the report of the answers that it would change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from uuid import UUID

from pipeline.core.identity import document_id

MAX_DOCUMENTS = 200
"""The most documents of one edit."""
MAX_NEW_CHUNKS = 1_000
"""The most new chunks of one edit. All are embedded, and compared with every question."""

State = Literal["changed", "new", "deleted", "unchanged", "unknown"]
Kind = Literal["lost", "uncited", "contradicts", "changed"]
KINDS: tuple[Kind, ...] = ("lost", "uncited", "contradicts", "changed")
"""The kinds of findings, the worst first."""
FAILING: frozenset[Kind] = frozenset({"lost", "uncited", "contradicts"})


@dataclass(frozen=True, slots=True)
class ProposedDocument:
    """A document as it would be published."""

    path: str
    """Relative to the root of its source, with ``/``: the ``path`` in its metadata, or its external id."""
    content: str | None = None
    """The extracted text; None: the document is deleted."""
    title: str = ""
    media_type: str = "text/plain"
    """Empty: that of the document at present, else plain text."""
    external_id: str | None = None
    """The id that the source gives it; None: the path decides."""


@dataclass(frozen=True, slots=True)
class Edit:
    source: str
    documents: Sequence[ProposedDocument]
    folders: Sequence[str] = ()
    """Beginnings of paths or ids below which ``documents`` has every document: others that the ledger has there are
    deleted. An empty one is the whole source."""


@dataclass(frozen=True, slots=True)
class EditedDocument:
    """How a document of the edit differs from the index."""

    path: str
    external_id: str
    document_id: UUID
    state: State
    """unknown: it is deleted, and the ledger has no such document that the caller may read."""
    chunks: int = 0
    """How many chunks it would have."""
    new: int = 0
    """How many of them the index lacks."""
    removed: int = 0
    """How many chunks the index would lose."""


@dataclass(frozen=True, slots=True)
class Cited:
    """A passage that an answer quotes, with the part that it quotes."""

    document_id: UUID
    external_id: str
    source: str
    title: str
    source_url: str | None
    excerpt: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A judged passage that the edit would take away from an answer."""

    source: str
    external_id: str
    anchor: str
    """Its words; empty: any passage of the document."""
    before: int
    """Its rank at present, from 1."""
    after: int | None
    """Its rank with the edit; None: it is not among the results."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two statements among the results that say different things. The edit writes the first."""

    kind: str
    """The difference: a ``number``, ``date``, ``version``, ``unit``, ``name`` or ``negation``."""
    new: Cited
    other: Cited


@dataclass(frozen=True, slots=True)
class Finding:
    """A question whose answer would change. The judged passages of a standing question are the documents that its
    answer cites."""

    question: str
    kind: Kind
    """lost: a judged passage, or the whole answer, is not among the results any more. uncited: a judged passage that
    the answer quotes is still a result, but so far down that it is not quoted. contradicts: among the results, a
    statement of the edit contradicts another document. changed: other text is quoted."""
    moved: Sequence[Moved]
    before: Sequence[Cited]
    after: Sequence[Cited]
    contradictions: Sequence[Contradiction]
    standing_id: UUID | None = None
    """The caller's standing question; None: a golden question."""


@dataclass(frozen=True, slots=True)
class Report:
    documents: Sequence[EditedDocument]
    questions: int
    """How many questions were asked."""
    affected: int
    """How many of them were also asked with the edit."""
    skipped: int
    """How many questions were not asked, because the time was over."""
    embedded: int
    """How many texts were embedded."""
    findings: Sequence[Finding]
    """The worst first, in the order of the questions."""
    took_ms: float

    @property
    def fails(self) -> bool:
        """Whether an answer is lost, loses a citation, or starts to contradict."""
        return any(finding.kind in FAILING for finding in self.findings)


def shown_documents(report: Report) -> list[UUID]:
    """The documents that a report shows, in order."""
    edited = [document.document_id for document in report.documents if document.state not in ("new", "unknown")]
    quoted = [c.document_id for finding in report.findings for c in (*finding.before, *finding.after)]
    quoted += [
        contradiction.other.document_id for finding in report.findings for contradiction in finding.contradictions
    ]
    new = {document.document_id for document in report.documents if document.state == "new"}
    return [id_ for id_ in dict.fromkeys([*edited, *quoted]) if id_ not in new]


def read_documents(report: Report, tenant: str) -> set[UUID]:
    """The documents that a report shows or names, which its caller has to be able to read."""
    moved = {document_id(tenant, m.source, m.external_id) for finding in report.findings for m in finding.moved}
    return {*shown_documents(report), *moved}


def as_json(report: Report) -> dict[str, Any]:
    """The response of the command and the service, in JSON's own types."""
    written: dict[str, Any] = _plain(asdict(report))
    return {**written, "fails": report.fails}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, UUID) else value
