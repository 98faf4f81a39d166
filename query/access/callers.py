"""Who is asking, and what that caller may read at this moment.

A caller is a tenant and a set of qualified tags (``source/tag``). Tags come from the ledger's memberships or from
whoever operates the command line; never from an unauthenticated client. No tags: nothing is read. Names are compared
code point by code point: neither case nor Unicode form is folded. The model on one page: docs/access.md.
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
    """Qualified. Good for one query: what a principal holds may have changed at the next one."""


@dataclass(frozen=True, slots=True)
class Readable:
    """The access sets that a caller satisfies, and those of the caller's tags that occur in them."""

    access_ids: tuple[int, ...]
    acl_tags: tuple[str, ...]
    required_tags: tuple[str, ...]


async def identify(
    connection: Connection, tenant: str, *, principals: Sequence[str] = (), tags: Sequence[str] = ()
) -> Caller:
    """The caller that holds what all these principals and tags hold.

    A principal holds its groups in every source of the tenant, and ``user:PRINCIPAL`` in each of them; an unknown
    one holds only the latter. A tag that begins with the name of a source and ``/`` is taken as it is; any other
    stands for the tag of that name in every source. Names that no message can carry open nothing. Canaries' sources are
    their reader's alone: everybody else would carry twice the tags.
    """
    if not sayable([tenant]):
        return Caller(tenant, frozenset())
    principals, tags = sayable(principals), sayable(tags)
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


def sayable(names: Iterable[str]) -> list[str]:
    """Without those that hold U+0000 or a lone surrogate: no message can carry them and no store can be asked."""
    return [name for name in names if "\x00" not in name and name == name.encode("utf-8", "replace").decode()]


async def sources_of(connection: Connection, tenant: str) -> tuple[str, ...]:
    """The sources that a tenant has documents of: one index probe each, however many documents there are."""
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
    """Any of acl_tags, all of required_tags, within the tenant."""
    if not caller.tags:
        return Readable((), (), ())
    cursor = await connection.execute(_READABLE, {"tenant": caller.tenant, "tags": sorted(caller.tags)})
    row = await cursor.fetchone()
    ids, acl, required = row or (None, None, None)
    return Readable(tuple(ids or ()), tuple(acl or ()), tuple(required or ()))


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a caller may read what carries certain tags, and what decides it."""

    may_read: bool
    by: tuple[str, ...]
    """The acl_tags that the caller holds; none: nothing lets it in."""
    lacks: tuple[str, ...]
    """The required_tags that it does not hold."""


def decide(caller: Caller, acl_tags: Collection[str], required_tags: Collection[str]) -> Decision:
    """The rule itself, for one document of the caller's tenant: to explain an answer, never to give one (that is
    ``query.access.verify``, on the ledger)."""
    by = tuple(tag for tag in acl_tags if tag in caller.tags)
    lacks = tuple(tag for tag in required_tags if tag not in caller.tags)
    return Decision(bool(by) and not lacks, by, lacks)
