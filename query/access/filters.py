"""Filters, which narrow a search further than the caller's access does."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg import sql

from pipeline.ledger.entry import to_the_hour
from query.access.callers import storable
from query.model import BadQuery

MAX_FILTER_VALUES = 1_000
"""The most values of one filter: no person chooses more."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions that all must hold; of a tuple, any one value matches. Empty: everything matches."""

    sources: tuple[str, ...] = ()
    authors: tuple[str, ...] = ()
    media_types: tuple[str, ...] = ()
    """Media types as the ledger has them (``text/markdown``, without parameters); ``text/*`` matches all types that
    begin with ``text/``."""
    since: datetime | None = None
    before: datetime | None = None
    """Bounds of the document's modification time at its source, with a time zone. Either bound leaves out documents
    without such a time."""
    documents: tuple[UUID, ...] = ()

    def __bool__(self) -> bool:
        return self != NONE

    @property
    def families(self) -> list[str]:
        """The prefixes of media types that match, such as ``text/``."""
        return [kind.lower().removesuffix("*") for kind in self.media_types if kind.endswith("/*")]

    @property
    def exact_types(self) -> list[str]:
        return [kind.lower() for kind in self.media_types if not kind.endswith("/*")]


NONE = Filters()


def check(filters: Filters) -> None:
    """Raises BadQuery if no store accepts these filters."""
    for field in fields(filters):
        value = getattr(filters, field.name)
        if isinstance(value, datetime):
            if value.tzinfo is None:
                raise BadQuery(f"{field.name} has no time zone: write, for example, 2026-01-31T00:00:00Z")
        elif isinstance(value, tuple):
            if len(value) > MAX_FILTER_VALUES:
                raise BadQuery(f"{field.name} has {len(value)} values; the maximum is {MAX_FILTER_VALUES}")
            texts = [text for text in value if isinstance(text, str)]
            if len(storable(texts)) < len(texts):
                raise BadQuery(f"{field.name} contains a character that no document can contain")


def conditions(filters: Filters) -> sql.Composable:
    """SQL conditions on ``documents d``, to append to other conditions; their parameters are ``values(filters)``."""
    where = []
    if filters.sources:
        where.append("d.source = ANY(%(sources)s::text[])")
    if filters.authors:
        where.append("d.author = ANY(%(authors)s::text[])")
    if filters.media_types:
        where.append(
            "(d.media_type = ANY(%(exact_types)s::text[])"
            " OR EXISTS (SELECT FROM unnest(%(families)s::text[]) f WHERE starts_with(d.media_type, f)))"
        )
    if filters.since is not None:
        where.append("d.source_modified_at >= %(since)s")
    if filters.before is not None:
        where.append("d.source_modified_at < %(before)s")
    if filters.documents:
        where.append("d.id = ANY(%(filter_documents)s::uuid[])")
    return sql.SQL("".join(f" AND {condition}" for condition in where))  # constants of this module


def values(filters: Filters) -> dict[str, Any]:
    return {
        "sources": list(filters.sources),
        "authors": list(filters.authors),
        "exact_types": filters.exact_types,
        "families": filters.families,
        "since": filters.since,
        "before": filters.before,
        "filter_documents": list(filters.documents),
    }


def _millisecond_later(moment: datetime) -> datetime:
    try:
        return moment + timedelta(milliseconds=1)
    except OverflowError:  # datetime.max, which means "any time"
        return moment


def clauses(filters: Filters) -> list[dict[str, Any]]:
    """The filter clauses of an Elasticsearch bool query. With a time bound they match slightly too much, because an
    entry stores the hour only; the ledger then decides."""
    required: list[dict[str, Any]] = []
    if filters.sources:
        required.append({"terms": {"source": list(filters.sources)}})
    if filters.authors:
        required.append({"terms": {"author": list(filters.authors)}})
    if filters.media_types:
        kinds: list[dict[str, Any]] = [{"prefix": {"media_type": family}} for family in filters.families]
        kinds.append({"terms": {"media_type": filters.exact_types}})
        required.append({"bool": {"should": kinds, "minimum_should_match": 1}})
    since = to_the_hour(filters.since) if filters.since else None
    before = _millisecond_later(filters.before) if filters.before else None  # Elasticsearch counts whole ms
    moments = {name: at.isoformat() for name, at in (("gte", since), ("lt", before)) if at is not None}
    if moments:
        required.append({"range": {"source_modified_at": moments}})
    if filters.documents:
        required.append({"terms": {"document_id": [str(id_) for id_ in filters.documents]}})
    return required
