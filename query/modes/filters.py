"""The filters of a question."""

from __future__ import annotations

from dataclasses import replace

from query.access.callers import storable
from query.access.filters import Filters
from query.access.filters import check as check_filters
from query.model import BadQuery
from query.modes.material import Question

MAX_DOCUMENTS_PER_QUESTION = 100
"""The most documents that one question may name."""


def effective_filters(question: Question) -> Filters:
    """The filters of a question, including its collection and, in all but the focused mode, its documents. Raises
    BadQuery if they exclude each other."""
    if question.mode == "focused" and not question.documents:
        raise BadQuery("mode is focused, but no document is named: set documents or another mode")
    if len(question.documents) > MAX_DOCUMENTS_PER_QUESTION:
        raise BadQuery(f"documents has {len(question.documents)} values; the maximum is {MAX_DOCUMENTS_PER_QUESTION}")
    filters = question.filters
    check_filters(filters)
    if question.collection is not None:
        if not storable([question.collection]):
            raise BadQuery("the collection contains a character that no source name can contain")
        if filters.sources and question.collection not in filters.sources:
            raise BadQuery("the collection is not among the sources of the filter: no document can match both")
        filters = replace(filters, sources=(question.collection,))
    if question.documents and question.mode not in (None, "focused"):
        if filters.documents:
            raise BadQuery("documents are set in the question and in its filters: set them once")
        filters = replace(filters, documents=question.documents)
    return filters
