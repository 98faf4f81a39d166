"""Facets: the values of declared keys, with the number of documents that the caller may read and that match.

They are counted in the ledger and never in a store: a store's copy of the access sets may be older, and a count must
not reveal that a document exists which the caller may not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from psycopg import sql

from pipeline.core.metadata_keys import KeyType, Scalar, value_of
from pipeline.ledger.metadata_keys import declared
from pipeline.stores.postgres import Connection
from query.access.callers import Caller, Readable, readable
from query.access.filters import NONE, Filters, conditions, require_keys, values
from query.model import BadQuery, Facet, FacetValue

MAX_FACETS = 20
"""The most keys that one request counts."""
FACET_DOCUMENTS = 20_000
"""The most documents that are counted; with more that match, the counts are of so many of them."""
FACET_VALUES = 50
"""The most values of one key that are returned."""

_COUNT = """
    WITH mine AS MATERIALIZED (
        SELECT d.keys FROM documents d
        WHERE d.tenant = %(tenant)s AND d.access_id = ANY(%(ids)s::bigint[]) AND d.deleted_at IS NULL
          AND d.version IS NOT NULL AND cardinality(d.keys) > 0 {filters}
        LIMIT %(documents)s + 1
    ), counted AS (
        SELECT split_part(term, '=', 1) AS name, term, count(*) AS documents
        FROM mine, unnest(mine.keys) AS term WHERE split_part(term, '=', 1) = ANY(%(names)s::text[]) GROUP BY term
    )
    SELECT total.few, name, term, documents
    FROM (SELECT count(*) <= %(documents)s AS few FROM mine) total LEFT JOIN (
        SELECT *, row_number() OVER (PARTITION BY name ORDER BY documents DESC, term) AS place FROM counted
    ) ranked ON place <= %(values)s ORDER BY name, place
"""


async def count(
    connection: Connection, caller: Caller, names: Collection[str], filters: Filters = NONE
) -> dict[str, Facet]:
    """The facets of these keys, over documents that the caller may read now and that match the filters. The filter by a
    key itself does not restrict its own facet, so that other values can be chosen besides.

    Raises BadQuery for a key that the tenant has not declared, and psycopg.Error.
    """
    if len(names) > MAX_FACETS:
        raise BadQuery(f"{len(names)} facets are requested; the maximum is {MAX_FACETS}")
    kinds = (await declared(connection, [caller.tenant])).get(caller.tenant, {})
    require_keys({*names, *(key.name for key in filters.keys)}, kinds)
    access = await readable(connection, caller)
    filtered = {key.name for key in filters.keys}
    facets: dict[str, Facet] = {}
    together = [name for name in names if name not in filtered]
    for group in [together, *([name] for name in names if name in filtered)]:
        if group:
            others = replace(filters, keys=tuple(key for key in filters.keys if key.name not in group))
            facets |= await _count(connection, caller, access, group, others, kinds)
    return {name: facets[name] for name in names}


async def count_all(connection: Connection, caller: Caller) -> dict[str, Facet]:
    """The facets of the first MAX_FACETS declared keys of the caller's tenant. Raises psycopg.Error."""
    kinds = (await declared(connection, [caller.tenant])).get(caller.tenant, {})
    names = sorted(kinds)[:MAX_FACETS]
    return await _count(connection, caller, await readable(connection, caller), names, NONE, kinds) if names else {}


async def _count(
    connection: Connection,
    caller: Caller,
    access: Readable,
    names: Sequence[str],
    filters: Filters,
    kinds: Mapping[str, KeyType],
) -> dict[str, Facet]:
    parameters: dict[str, Any] = {
        **values(filters),
        "tenant": caller.tenant,
        "ids": list(access.access_ids),
        "documents": FACET_DOCUMENTS,
        "names": list(names),
        "values": FACET_VALUES,
    }
    statement = sql.SQL(_COUNT).format(filters=conditions(filters))
    cursor = await connection.execute(statement, parameters, prepare=False)  # the best plan depends on the values
    rows = await cursor.fetchall()
    complete = all(row[0] for row in rows)
    by_name: dict[str, list[FacetValue]] = {name: [] for name in names}
    for _, name, term, documents in rows:
        if name is not None:  # without any term there is one row, which says whether all documents were counted
            by_name[name].append(FacetValue(_shown(term, kinds[name]), documents))
    return {name: Facet(kinds[name], tuple(counted), complete) for name, counted in by_name.items()}


def _shown(term: str, kind: KeyType) -> Scalar:
    """The value of a term. While a key gets another type, a document may still have a term of the former one."""
    try:
        return value_of(term, kind)
    except ValueError:
        return term.partition("=")[2]
