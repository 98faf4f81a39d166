"""What a question is narrowed to, besides what its asker may read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg import sql

from pipeline.ledger.entry import to_the_hour
from query.access.callers import sayable
from query.model import BadQuery

MOST_VALUES = 1_000
"""Of one filter; a longer list is no filter that somebody chose."""


@dataclass(frozen=True, slots=True)
class Filters:
    """All that is given must hold; of each tuple, any one. Empty: everything."""

    sources: tuple[str, ...] = ()
    authors: tuple[str, ...] = ()
    media_types: tuple[str, ...] = ()
    """As the ledger has them (``text/markdown``, no parameters); ``text/*`` stands for all that begin so."""
    since: datetime | None = None
    before: datetime | None = None
    """Of the document's time at its source; aware. One without a time is left out by either."""
    documents: tuple[UUID, ...] = ()

    def __bool__(self) -> bool:
        return self != NONE

    @property
    def families(self) -> list[str]:
        """What a wanted media type may begin with: ``text/``."""
        return [kind.lower().removesuffix("*") for kind in self.media_types if kind.endswith("/*")]

    @property
    def exact_types(self) -> list[str]:
        return [kind.lower() for kind in self.media_types if not kind.endswith("/*")]


NONE = Filters()


def check(filters: Filters) -> None:
    """Raises BadQuery where no store could be asked so."""
    for field in fields(filters):
        value = getattr(filters, field.name)
        if isinstance(value, datetime):
            if value.tzinfo is None:
                raise BadQuery(f"{field.name} has no time zone: write, for example, 2026-01-31T00:00:00Z")
        elif isinstance(value, tuple):
            if len(value) > MOST_VALUES:
                raise BadQuery(f"{field.name} has {len(value)} values; the maximum is {MOST_VALUES}")
            texts = [text for text in value if isinstance(text, str)]
            if len(sayable(texts)) < len(texts):
                raise BadQuery(f"{field.name} contains a character that no document can contain")


def conditions(filters: Filters) -> sql.Composable:
    """What ``documents d`` must satisfy, to be put behind other conditions; its values are ``values(filters)``."""
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
    return sql.SQL("".join(f" AND {condition}" for condition in where))  # nothing in it is a caller's


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


def _a_little_later(moment: datetime) -> datetime:
    try:
        return moment + timedelta(milliseconds=1)
    except OverflowError:  # the last moment that there is: "any time"
        return moment


def clauses(filters: Filters) -> list[dict[str, Any]]:
    """The same in Elasticsearch's terms: filter clauses of a bool query. They let pass a little more where a moment is
    given, which the ledger decides: an entry knows the hour only."""
    wanted: list[dict[str, Any]] = []
    if filters.sources:
        wanted.append({"terms": {"source": list(filters.sources)}})
    if filters.authors:
        wanted.append({"terms": {"author": list(filters.authors)}})
    if filters.media_types:
        kinds: list[dict[str, Any]] = [{"prefix": {"media_type": family}} for family in filters.families]
        kinds.append({"terms": {"media_type": filters.exact_types}})
        wanted.append({"bool": {"should": kinds, "minimum_should_match": 1}})
    since = to_the_hour(filters.since) if filters.since else None
    before = _a_little_later(filters.before) if filters.before else None  # it counts whole milliseconds: no more
    moments = {name: at.isoformat() for name, at in (("gte", since), ("lt", before)) if at is not None}
    if moments:
        wanted.append({"range": {"source_modified_at": moments}})
    if filters.documents:
        wanted.append({"terms": {"document_id": [str(id_) for id_ in filters.documents]}})
    return wanted
