"""The caller of a query, and what it may read at this moment.

A caller is a tenant and a set of qualified tags (``source/tag``). Tags come from the ledger's memberships or from the
operator of the command line, never from an unauthenticated client. A caller without tags reads nothing. Names are
compared code point by code point: neither case nor Unicode form is folded. docs/access.md describes the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pipeline.core.canary import PRINCIPAL, is_canary
from pipeline.core.identity import OWN_TAG, qualify
from pipeline.stores.postgres import Connection


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    tags: frozenset[str]
    """Qualified tags, valid for one query: the principal's groups may have changed by the next one."""


@dataclass(frozen=True, slots=True)
class Readable:
    """The access sets that a caller satisfies, and those of the caller's tags that occur in them."""

    access_ids: tuple[int, ...]
    acl_tags: tuple[str, ...]
    required_tags: tuple[str, ...]


async def identify(
    connection: Connection, tenant: str, *, principals: Sequence[str] = (), tags: Sequence[str] = ()
) -> Caller:
    """The caller that has the access of all these principals and tags.

    A principal holds its groups in every source of the tenant, and ``user:PRINCIPAL`` in each of them; an unknown
    principal holds only the latter. A tag that begins with the name of a source and ``/`` is used as it is; any other
    stands for the tag of that name in every source. Names that no message can contain grant nothing. The sources of
    canaries are considered only for the canaries' own reader, because they would double everyone else's tags.
    """
    if not storable([tenant]):
        return Caller("", frozenset())
    principals, tags = storable(principals), storable(tags)
    held: set[str] = set()
    sources = await sources_of(connection, tenant)
    if PRINCIPAL not in principals:
        sources = tuple(source for source in sources if not is_canary(source))
    own = [f"{OWN_TAG}{principal}" for principal in principals]
    qualified = [tag for tag in tags if tag.partition("/")[0] in sources and "/" in tag]
    bare = [tag for tag in tags if tag not in qualified]
    for source in sources:
        held.update(qualify(source, [*own, *bare]))
    held.update(qualified)
    if principals:
        cursor = await connection.execute(
            "SELECT source, groups FROM memberships WHERE tenant = %s AND principal = ANY(%s)",
            [tenant, principals],
        )
        for source, groups in await cursor.fetchall():
            held.update(qualify(source, groups))
    return Caller(tenant, frozenset(held))


def storable(names: Iterable[str]) -> list[str]:
    """The names without U+0000 and lone surrogates: no message can contain the others and no store accepts them."""
    return [name for name in names if "\x00" not in name and name == name.encode("utf-8", "replace").decode()]


async def sources_of(connection: Connection, tenant: str) -> tuple[str, ...]:
    """The sources of a tenant's documents, with one index probe each, however many documents there are."""
    cursor = await connection.execute(
        """
        WITH RECURSIVE found (source) AS (
            (SELECT source FROM documents WHERE tenant = %(tenant)s ORDER BY source LIMIT 1)
            UNION ALL
            SELECT (SELECT d.source FROM documents d WHERE d.tenant = %(tenant)s AND d.source > f.source
                    ORDER BY d.source LIMIT 1)
            FROM found f WHERE f.source IS NOT NULL
        )
        SELECT source FROM found WHERE source IS NOT NULL
        """,
        {"tenant": tenant},
    )
    return tuple(source for (source,) in await cursor.fetchall())


_READABLE = """
    WITH readable AS MATERIALIZED (SELECT id, tag, required_tags FROM readable_sets(%(tenant)s, %(tags)s::text[]))
    SELECT (SELECT array_agg(DISTINCT id) FROM readable),
        (SELECT array_agg(DISTINCT tag) FROM readable),
        (SELECT array_agg(DISTINCT needed) FROM readable, unnest(required_tags) needed)
"""


async def readable(connection: Connection, caller: Caller) -> Readable:
    """The access sets of the tenant that the caller satisfies: it holds any of their acl_tags and all of their
    required_tags."""
    if not caller.tags:
        return Readable((), (), ())
    cursor = await connection.execute(_READABLE, {"tenant": caller.tenant, "tags": sorted(caller.tags)})
    row = await cursor.fetchone()
    ids, acl, required = row or (None, None, None)
    return Readable(tuple(ids or ()), tuple(acl or ()), tuple(required or ()))


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a caller may read a document with certain tags, and which tags decide it."""

    may_read: bool
    by: tuple[str, ...]
    """The acl_tags that the caller holds; with none it has no access."""
    lacks: tuple[str, ...]
    """The required_tags that the caller does not hold."""


def decide(caller: Caller, acl_tags: Collection[str], required_tags: Collection[str]) -> Decision:
    """The access rule for one document of the caller's tenant. It explains a decision and never makes one: that is done
    by ``query.access.verify``, on the ledger."""
    by = tuple(tag for tag in acl_tags if tag in caller.tags)
    lacks = tuple(tag for tag in required_tags if tag not in caller.tags)
    return Decision(bool(by) and not lacks, by, lacks)
