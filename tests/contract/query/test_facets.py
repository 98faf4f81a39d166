"""Facets on the real servers: what is counted, and that nothing is counted which the caller may not read."""

from __future__ import annotations

import pytest

from pipeline.core.metadata_keys import key_filter
from pipeline.ledger import metadata_keys
from query.access import facets
from query.access.filters import Filters
from query.model import BadQuery
from tests.support.query.library import Library, access, deletion, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


async def counted(
    library: Library, tenant: str, names: list[str], filters: Filters | None = None, *, tag: str = "staff"
) -> dict[str, dict[object, int]]:
    """The counts by key and value, as a holder of the tag."""
    caller = await library.caller(tenant, tag)
    result = await library.search.facets(caller, names, filters or Filters())
    return {name: {value.value: value.count for value in facet.values} for name, facet in result.items()}


@pytest.fixture
async def declared(library: Library, tenant: str) -> None:
    async with library.pool.connection() as connection:
        await metadata_keys.declare(connection, tenant, "labels", "keyword")
        await metadata_keys.declare(connection, tenant, "priority", "number")


async def test_values_are_counted_with_their_types(library: Library, tenant: str, declared: None) -> None:
    await library.accept(
        document("a.md", "x", tenant=tenant, metadata={"labels": ["hr", "policy"], "priority": 2}),
        document("b.md", "x", tenant=tenant, metadata={"labels": ["policy"], "priority": 2.5}),
        document("c.md", "x", tenant=tenant, source="drive", metadata={"labels": ["policy"], "priority": 2.0}),
    )
    assert await counted(library, tenant, ["labels", "priority"]) == {
        "labels": {"policy": 3, "hr": 1},
        "priority": {2: 2, 2.5: 1},
    }
    assert await counted(library, tenant, ["labels"], Filters(sources=("drive",))) == {"labels": {"policy": 1}}


async def test_a_keys_own_filter_leaves_its_other_values_to_choose(
    library: Library, tenant: str, declared: None
) -> None:
    await library.accept(
        document("a.md", "x", tenant=tenant, metadata={"labels": ["hr"], "priority": 1}),
        document("b.md", "x", tenant=tenant, metadata={"labels": ["policy"], "priority": 2}),
    )
    filters = Filters(keys=(key_filter("labels", any=["hr"]),))
    assert await counted(library, tenant, ["labels", "priority"], filters) == {
        "labels": {"hr": 1, "policy": 1},
        "priority": {1: 1},
    }


async def test_nothing_is_counted_that_the_caller_may_not_read(library: Library, tenant: str, declared: None) -> None:
    """Each way of not being readable: another group, a restriction, another tenant, and revoked or deleted while the
    stores lag. The facets are those of a library without these documents."""
    visible = document("a.md", "x", tenant=tenant, metadata={"labels": ["policy"]})
    secret = {"labels": ["policy", "plum"], "priority": 9}
    revoked = document("revoked.md", "x", tenant=tenant, metadata=secret)
    deleted = document("deleted.md", "x", tenant=tenant, metadata=secret)
    await library.put(
        visible,
        document("board.md", "x", tenant=tenant, acl_tags=["board"], metadata=secret),
        document("restricted.md", "x", tenant=tenant, required_tags=["vault"], metadata=secret),
        document("nobody.md", "x", tenant=tenant, acl_tags=[], metadata=secret),
        document("elsewhere.md", "x", tenant=f"{tenant}-other", metadata=secret),
        revoked,
        deleted,
    )
    assert (await counted(library, tenant, ["labels"]))["labels"] == {"policy": 3, "plum": 2}
    await library.accept(access(revoked, ["board"]), deletion(deleted))
    assert await counted(library, tenant, ["labels", "priority"]) == {"labels": {"policy": 1}, "priority": {}}
    async with library.pool.connection() as connection:
        every = await facets.count_all(connection, await library.caller(tenant, "staff"))
        none = await facets.count_all(connection, await library.caller(tenant))
    assert [value.value for value in every["labels"].values] == ["policy"]
    assert all(not facet.values and facet.complete for facet in none.values())


async def test_many_documents_are_counted_in_part_and_the_facet_says_so(
    library: Library, tenant: str, declared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await library.accept(*(document(f"{n}.md", "x", tenant=tenant, metadata={"labels": [f"l{n}"]}) for n in range(3)))
    caller = await library.caller(tenant, "staff")
    assert (await library.search.facets(caller, ["labels"]))["labels"].complete
    monkeypatch.setattr(facets, "FACET_DOCUMENTS", 2)
    assert not (await library.search.facets(caller, ["labels"]))["labels"].complete
    assert not (await library.search.facets(caller, ["priority"]))["priority"].complete


async def test_a_facet_of_a_key_that_is_not_declared_is_refused(library: Library, tenant: str, declared: None) -> None:
    with pytest.raises(BadQuery, match="space is no declared key"):
        await counted(library, tenant, ["space"])
