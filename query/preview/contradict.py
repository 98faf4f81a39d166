"""Contradictions that an edit would bring into the context of an answer. Pure.

The statements of passages with new chunks are compared with the other documents' passages among the same results
(``pipeline.core.conflicts``). What already contradicts at present is no matter of the edit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from uuid import UUID

from pipeline.core.conflicts import Kind, Pair, examine
from pipeline.core.conflicts import passage as read
from pipeline.core.statements import Statement
from query.answers.visible import visible
from query.model import Result
from query.preview.model import Cited, Contradiction

NO_CONTRADICTIONS: frozenset[Kind] = frozenset({"duplicate", "outdated"})
"""Kinds of comparison of which neither passage is wrong."""


def contradictions(before: Sequence[Result], after: Sequence[Result], new: Set[UUID]) -> tuple[Contradiction, ...]:
    """The contradictions with the results before and after the edit. new: its new chunks."""
    edited = {result.passage.document_id for result in after if not new.isdisjoint(result.chunk_ids)}
    known = {
        (other.passage.document_id, pair.of_a.said, pair.of_b.said)
        for result, other, pair in _pairs(before, [r for r in before if r.passage.document_id in edited])
    }
    changed = [result for result in after if not new.isdisjoint(result.chunk_ids)]
    return tuple(
        Contradiction(pair.kind, _cited(result, pair.of_a), _cited(other, pair.of_b))
        for result, other, pair in _pairs(after, changed)
        if (other.passage.document_id, pair.of_a.said, pair.of_b.said) not in known
    )


def _pairs(results: Sequence[Result], of: Sequence[Result]) -> Iterator[tuple[Result, Result, Pair]]:
    """Every place where one of these results contradicts a result of another document."""
    passages = {
        result.passage.chunk_id: read(
            visible(result.text),
            str(result.passage.document_id),
            result.passage.title,
            result.headings,
            result.passage.source_modified_at,
        )
        for result in results
    }
    for result in of:
        others = [other for other in results if other.passage.document_id != result.passage.document_id]
        compared = examine(passages[result.passage.chunk_id], [passages[other.passage.chunk_id] for other in others])
        for other, comparison in zip(others, compared, strict=True):
            for pair in comparison.pairs if comparison is not None else ():
                if pair.kind not in NO_CONTRADICTIONS:
                    yield result, other, pair


def _cited(result: Result, statement: Statement) -> Cited:
    start, end = statement.span
    p = result.passage
    text = visible(result.text)[start:end].strip()
    return Cited(p.document_id, p.external_id, p.source, p.title, p.source_url, text)
