"""The tool that previews an edit of one document: what POST /v1/previews does, in a shape that a model can read."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.core.errors import PenstockError
from query.answers.visible import one_line, visible
from query.http.previews import preview as previewed
from query.http.schemas import MovedPassage
from query.mcp.asker import Asker, Outcome
from query.mcp.shapes import (
    MAX_FINDINGS,
    MAX_PLACES,
    MAX_QUOTED_CHARACTERS,
    PreviewArguments,
    PreviewContradictionOutput,
    PreviewFindingOutput,
    PreviewOutput,
    PreviewQuotation,
)
from query.mcp.tools import address_of, displayed_id, readable_document, title_of
from query.preview.model import Cited, Edit, Finding, ProposedDocument, Report, shown_documents
from query.service import Service


class MayNotPreview(PenstockError):
    """The user is a person for whom a service acts that may not preview."""

    def __init__(self) -> None:
        super().__init__("a service needs the scope `previews` to preview edits on behalf of a person")


async def preview(service: Service, asker: Asker, arguments: PreviewArguments) -> Outcome:
    """The answers that the edit would change. Nothing is stored. Raises MayNotPreview, DocumentUnavailable, Problem
    (503), BadQuery, Retryable, Misconfigured and TimeoutError."""
    if not asker.may_preview:
        raise MayNotPreview
    edit = await _edit(service, asker, arguments)
    asker.release_search()
    report = await previewed(
        service,
        edit,
        asker.caller.tenant,
        asker.identify,
        operator=asker.operator,
        principal=asker.principal,
    )
    return Outcome(_output(report), shown_documents(report), arguments.object)


async def _edit(service: Service, asker: Asker, arguments: PreviewArguments) -> Edit:
    if arguments.id is None:
        assert arguments.source is not None
        assert arguments.path is not None
        source, path, external_id = arguments.source, arguments.path, None
    else:
        document = await readable_document(service, asker.caller, arguments.id)
        source, path, external_id = document.source, document.external_id, document.external_id
    proposed = ProposedDocument(path, arguments.content, arguments.title, arguments.media_type, external_id)
    return Edit(source, [proposed])


def _output(report: Report) -> PreviewOutput:
    [edited] = report.documents
    return PreviewOutput(
        state=edited.state,
        new=edited.new,
        removed=edited.removed,
        questions=report.questions,
        affected=report.affected,
        skipped=report.skipped,
        fails=report.fails,
        findings=[_finding(finding) for finding in report.findings[:MAX_FINDINGS]],
        omitted=max(0, len(report.findings) - MAX_FINDINGS),
    )


def _finding(finding: Finding) -> PreviewFindingOutput:
    return PreviewFindingOutput(
        question=one_line(finding.question, MAX_QUOTED_CHARACTERS),
        standing_id=finding.standing_id,
        kind=finding.kind,
        moved=[
            MovedPassage(
                source=moved.source,
                external_id=displayed_id(moved.external_id),
                anchor=one_line(moved.anchor, MAX_QUOTED_CHARACTERS),
                before=moved.before,
                after=moved.after,
            )
            for moved in finding.moved[:MAX_PLACES]
        ],
        before=_quotations(finding.before),
        after=_quotations(finding.after),
        contradictions=[
            PreviewContradictionOutput(kind=pair.kind, new=_quotation(pair.new), other=_quotation(pair.other))
            for pair in finding.contradictions[:MAX_PLACES]
        ],
    )


def _quotations(quoted: Iterable[Cited]) -> list[PreviewQuotation]:
    return [_quotation(passage) for passage in quoted]


def _quotation(of: Cited) -> PreviewQuotation:
    text = visible(of.excerpt)
    return PreviewQuotation(
        id=str(of.document_id),
        title=title_of(of.title, of.external_id),
        url=address_of(of.source_url, of.document_id),
        text=text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[:MAX_QUOTED_CHARACTERS].rstrip()} …",
    )
