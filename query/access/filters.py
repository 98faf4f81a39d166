"""Filters, which narrow a search further than the caller's access does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg import sql

from pipeline.core.metadata_keys import NAME, Interval, KeyFilter
from pipeline.core.normalise import clean
from pipeline.ledger.entry import to_the_hour
from pipeline.ledger.metadata_keys import declared
from pipeline.stores.postgres import Connection
from query.access.callers import storable
from query.model import BadQuery

MAX_FILTER_VALUES = 1_000
"""The most values of one filter: no person chooses more."""
MAX_KEYS = 20
"""The most keys of metadata that one search filters by."""


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
    keys: tuple[KeyFilter, ...] = ()
    """Conditions on declared keys of metadata."""

    def __bool__(self) -> bool:
        return self != NONE

    @property
    def author_names(self) -> list[str]:
        """The authors as they are accepted, without hidden characters, and as they are named: those that were accepted
        before may have some."""
        return sorted({*self.authors, *map(clean, self.authors)})

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
    terms = sum(len(key.any) + len(key.none) + sum(map(len, key.all)) for key in filters.keys)
    if terms > MAX_FILTER_VALUES or len(filters.keys) > MAX_KEYS:
        raise BadQuery(f"the filters by metadata have too many keys (maximum {MAX_KEYS}) or values")
    for key in filters.keys:
        if not NAME.fullmatch(key.name):
            raise BadQuery("a key of metadata has letters, digits, '_', '.' and '-' only, at most 100")


async def require_declared(connection: Connection, tenant: str, filters: Filters) -> None:
    """Raises BadQuery for a filter by a key that the tenant has not declared, which would match nothing."""
    if filters.keys:
        known = (await declared(connection, [tenant])).get(tenant, {})
        require_keys({key.name for key in filters.keys}, known)


def require_keys(names: Collection[str], known: Collection[str]) -> None:
    """Raises BadQuery for a name that is not among the declared keys."""
    if unknown := sorted(set(names) - set(known)):
        there = ", ".join(sorted(known)[:20]) or "none"
        raise BadQuery(f"{unknown[0]} is no declared key of metadata; declared are: {there}")


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
    for n, key in enumerate(filters.keys):
        where += _key_conditions(n, key)
    return sql.SQL("".join(f" AND {condition}" for condition in where))  # constants of this module


def _key_conditions(n: int, key: KeyFilter) -> list[str]:
    """The conditions of the n-th key. The first two use the index ``documents_by_key``, whose condition they repeat."""
    where = []
    if key.any:
        where.append(f"d.keys <> '{{}}' AND d.keys && %(key_{n}_any)s::text[]")
    where += [f"d.keys <> '{{}}' AND d.keys && %(key_{n}_all_{m})s::text[]" for m in range(len(key.all))]
    if key.none:
        where.append(f"NOT d.keys && %(key_{n}_none)s::text[]")
    if key.within:
        low, high = (">=" if key.within.includes_low else ">"), ("<=" if key.within.includes_high else "<")
        where.append(
            f'EXISTS (SELECT FROM unnest(d.keys) term WHERE term {low} %(key_{n}_low)s COLLATE "C"'
            f' AND term {high} %(key_{n}_high)s COLLATE "C")'
        )
    return where


def _key_values(n: int, key: KeyFilter) -> dict[str, Any]:
    within = key.within or Interval("", "")
    return {
        f"key_{n}_any": list(key.any),
        **{f"key_{n}_all_{m}": list(group) for m, group in enumerate(key.all)},
        f"key_{n}_none": list(key.none),
        f"key_{n}_low": within.low,
        f"key_{n}_high": within.high,
    }


def values(filters: Filters) -> dict[str, Any]:
    """The parameters of ``conditions``."""
    return {
        **{name: value for n, key in enumerate(filters.keys) for name, value in _key_values(n, key).items()},
        "sources": list(filters.sources),
        "authors": filters.author_names,
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
        required.append({"terms": {"author": filters.author_names}})
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
    for key in filters.keys:
        required += _key_clauses(key)
    return required


def _key_clauses(key: KeyFilter) -> list[dict[str, Any]]:
    required: list[dict[str, Any]] = [{"terms": {"keys": list(group)}} for group in (key.any, *key.all) if group]
    if key.none:
        required.append({"bool": {"must_not": {"terms": {"keys": list(key.none)}}}})
    if key.within:
        low, high = ("gte" if key.within.includes_low else "gt"), ("lte" if key.within.includes_high else "lt")
        required.append({"range": {"keys": {low: key.within.low, high: key.within.high}}})
    return required
