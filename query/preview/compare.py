"""An answer before and after an edit. Pure.

The answer is its quotations (``query.answers.quotations``): which passages are cited, and which of their sentences. A
model writes from the same passages, but never twice in the same words, so its texts cannot be compared.
"""

from __future__ import annotations

from collections.abc import Set
from uuid import UUID

from query.answers.quotations import MAX_QUOTED_PASSAGES as QUOTED
from query.answers.quotations import excerpt
from query.answers.sentences import terms_of
from query.answers.visible import visible
from query.evaluation.golden import Golden, ranking
from query.model import SearchResults
from query.preview.contradict import contradictions
from query.preview.model import Cited, Finding, Kind, Moved


def compare(
    golden: Golden,
    before: SearchResults,
    after: SearchResults,
    new: Set[UUID] = frozenset(),
    *,
    standing_id: UUID | None = None,
) -> Finding | None:
    """How the answer changes; None if it stays the same. golden: with the judgements that hold before the edit. new:
    the new chunks. standing_id: that of a standing question."""
    old, quoted = cited(golden.text, before), cited(golden.text, after)
    moved = _moved(golden, before, after)
    contradicting = contradictions(before.results, after.results, new)
    kind: Kind
    if (old and not quoted) or any(passage.after is None for passage in moved):
        kind = "lost"
    elif moved:
        kind = "uncited"
    elif contradicting:
        kind = "contradicts"
    elif _quoted(old) != _quoted(quoted):
        kind = "changed"
    else:
        return None
    return Finding(golden.text, kind, moved, old, quoted, contradicting, standing_id)


def cited(question: str, results: SearchResults) -> tuple[Cited, ...]:
    """The passages that an answer quotes, best first, without those that have less than half as many of the question's
    words as the best: where there is little to quote, they have nothing to do with the question."""
    words = terms_of(question)
    quoted = [(result.passage, *excerpt(words, visible(result.text))) for result in results.results[:QUOTED]]
    most = max((hits for _, hits, _ in quoted), default=0)
    return tuple(
        Cited(p.document_id, p.external_id, p.source, p.title, p.source_url, text)
        for n, (p, hits, text) in enumerate(quoted)
        if text and (2 * hits >= most if most else n == 0)
    )


def _quoted(answer: tuple[Cited, ...]) -> set[tuple[UUID, str]]:
    """The quotations of an answer, without their order: passages that change places say the same."""
    return {(c.document_id, c.excerpt) for c in answer}


def _moved(golden: Golden, before: SearchResults, after: SearchResults) -> tuple[Moved, ...]:
    old = {key: rank for rank, key in enumerate(ranking(golden, before), start=1)}
    new = {key: rank for rank, key in enumerate(ranking(golden, after), start=1)}
    return tuple(
        Moved(judged.source, judged.external_id, judged.anchor, was, rank)
        for judged in golden.judged
        if (was := old.get(judged.key)) is not None and ((rank := new.get(judged.key)) is None or was <= QUOTED < rank)
    )
