"""What a question is narrowed to: its filters, its collection and the documents that it names. Pure."""

from __future__ import annotations

from dataclasses import replace

from query.access import sayable
from query.filters import Filters, check
from query.material import Question
from query.model import BadQuery

MOST_NAMED = 100
"""Documents that one question may name."""


def narrowed(question: Question) -> Filters:
    """The filters with the collection, and with the documents where they do not stand for the focused mode.

    Raises BadQuery where nothing could be both.
    """
    if question.mode == "focused" and not question.documents:
        raise BadQuery("mode is focused, but no document is named: give documents, or another mode")
    if len(question.documents) > MOST_NAMED:
        raise BadQuery(f"{len(question.documents)} documents are named, at most {MOST_NAMED} are taken")
    filters = question.filters
    check(filters)
    if question.collection is not None:
        if not sayable([question.collection]):
            raise BadQuery("the collection's name holds characters that no source's name has")
        if filters.sources and question.collection not in filters.sources:
            raise BadQuery("the collection is not among the sources of the filter: nothing can be both")
        filters = replace(filters, sources=(question.collection,))
    if question.documents and question.mode not in (None, "focused"):
        if filters.documents:
            raise BadQuery("documents are named twice, in the question and in its filters: name them once")
        filters = replace(filters, documents=question.documents)
    return filters
