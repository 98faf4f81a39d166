"""Filters by declared keys of metadata, on the real servers: they mean the same in both stores and the ledger."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from pipeline.core.metadata_keys import KeyFilter, KeyType, key_filter
from pipeline.ledger import metadata_keys
from query.access.filters import Filters
from query.embedding.embedders import QueryEmbedder
from query.model import MODES, BadQuery
from query.retrieval.search import Search
from query.retrieval.vectors import Tuning
from tests.support.query.library import Library, WordEmbedder, deletion, document
from tests.support.query.retrieval_kit import find, names
from topics.messages import DocumentUpserted

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

KEYS: dict[str, KeyType] = {"labels": "keyword", "priority": "number", "due": "date", "urgent": "boolean"}


async def declare(library: Library, tenant: str, keys: dict[str, KeyType]) -> None:
    async with library.pool.connection() as connection:
        for name, kind in keys.items():
            await metadata_keys.declare(connection, tenant, name, kind)


async def refill(library: Library, tenant: str, *, most: int = 500) -> list[UUID]:
    """The documents whose terms changed; both stores have followed."""
    changed: list[UUID] = []
    after: UUID | None = None
    async with library.pool.connection() as connection:
        while True:
            page = await metadata_keys.refill(connection, tenant, after, most=most)
            changed += [document.id for document in page.changed]
            if (after := page.last) is None:
                break
    await library.converge(*changed)
    return changed


def reports(tenant: str) -> list[DocumentUpserted]:
    """One document for each combination of what can be asked for."""
    several: list[dict[str, Any]] = [
        {
            "labels": [["policy"], ["policy", "hr"], ["hr"], []][n % 4],
            "priority": [1, 2.5, -3, None, "7"][n % 5],
            "due": ["2026-01-31", "2026-02-01T08:00:00+02:00", "soon"][n % 3],
            "urgent": [True, False, "true"][n % 3],
            "secret": "plum",
        }
        for n in range(20)
    ]
    return [
        document(f"{n}.md", f"Report number {n} on the estuary.", tenant=tenant, metadata=metadata)
        for n, metadata in enumerate([*several, {}])
    ]


CASES: dict[str, tuple[KeyFilter, Any]] = {
    "any": (key_filter("labels", any=["policy", "other"]), lambda m: "policy" in m.get("labels", [])),
    "all": (key_filter("labels", all=["policy", "hr"]), lambda m: {"policy", "hr"} <= set(m.get("labels", []))),
    "none": (key_filter("labels", none=["hr"]), lambda m: "hr" not in m.get("labels", [])),
    "number": (key_filter("priority", any=[7, 2.5]), lambda m: m.get("priority") in ("7", 2.5)),
    "above": (key_filter("priority", gt=1), lambda m: m.get("priority") in ("7", 2.5)),
    "range": (key_filter("priority", gte=-3, lt=2.5), lambda m: m.get("priority") in (1, -3)),
    "day": (key_filter("due", any=["2026-01-31"]), lambda m: m.get("due") == "2026-01-31"),
    "before": (key_filter("due", lt="2026-02-01"), lambda m: m.get("due") == "2026-01-31"),
    "time": (
        key_filter("due", gte="2026-02-01T06:00:00Z"),
        lambda m: m.get("due", "").startswith("2026-02"),
    ),
    "boolean": (key_filter("urgent", any=[True]), lambda m: m.get("urgent") in (True, "true")),
    "nothing": (key_filter("labels", any=["nobody"]), lambda m: False),
    "several": (
        key_filter("labels", any=["policy"], none=["hr"]),
        lambda m: "policy" in m.get("labels", []) and "hr" not in m["labels"],
    ),
}


async def test_keys_filter_alike_in_every_mode_and_scan(library: Library, tenant: str) -> None:
    await declare(library, tenant, KEYS)
    documents = reports(tenant)
    await library.put(*documents)
    walking = Search(library.pool, library.es, QueryEmbedder(WordEmbedder), tuning=Tuning(always_exact_rows=0))
    for name, (condition, rule) in CASES.items():
        filters = Filters(keys=(condition,))
        expected = {d.external_id for d in documents if rule(d.metadata)}
        for mode in MODES:
            results = await find(library, tenant, "estuary report", filters, mode=mode, top=50)
            assert set(names(results)) == expected, (name, mode)
        results = await find(library, tenant, "estuary report", filters, mode="vector", top=50, search=walking)
        assert set(names(results)) == expected, name
    both = Filters(keys=(CASES["any"][0], CASES["above"][0]))
    expected = {d.external_id for d in documents if CASES["any"][1](d.metadata) and CASES["above"][1](d.metadata)}
    assert expected
    for mode in MODES:
        assert set(names(await find(library, tenant, "estuary report", both, mode=mode, top=50))) == expected


async def test_the_keyword_index_alone_leaves_out_what_does_not_match(library: Library, tenant: str) -> None:
    """The ledger verifies every candidate: without the index's own filter, a rare value would be cut off before."""
    await declare(library, tenant, KEYS)
    documents = reports(tenant)
    await library.put(*documents)
    from query.access.callers import readable
    from query.retrieval.keywords import bm25

    caller = await library.caller(tenant, "staff")
    async with library.pool.connection() as connection:
        may = await readable(connection, caller)
    for name, (condition, rule) in CASES.items():
        offered = await bm25(
            library.es, library.generation, caller, may, "estuary report", filters=Filters(keys=(condition,)), limit=100
        )
        assert len(offered) == sum(1 for d in documents if rule(d.metadata)), name


async def test_declaring_a_key_reaches_the_documents_that_are_there_and_embeds_nothing(
    library: Library, tenant: str
) -> None:
    documents = reports(tenant)
    await library.put(*documents)
    stored = await library.execute("SELECT id, created_at FROM chunks_g1 ORDER BY id")
    await declare(library, tenant, {"labels": "keyword"})
    changed = await refill(library, tenant, most=7)
    assert len(changed) == sum(1 for d in documents if d.metadata.get("labels"))
    filters = Filters(keys=(key_filter("labels", any=["hr"]),))
    expected = {d.external_id for d in documents if "hr" in (d.metadata.get("labels") or ())}  # type: ignore[operator]
    for mode in MODES:
        assert set(names(await find(library, tenant, "estuary report", filters, mode=mode, top=50))) == expected
    assert await library.execute("SELECT id, created_at FROM chunks_g1 ORDER BY id") == stored
    assert await refill(library, tenant) == [], "a second time there is nothing to do"


async def test_a_change_of_metadata_alone_moves_the_document_between_filters(library: Library, tenant: str) -> None:
    await declare(library, tenant, KEYS)
    await library.put(document("a.md", "Notes on the sluice.", tenant=tenant, metadata={"labels": ["old"]}))
    embedded = await library.execute("SELECT id, created_at FROM chunks_g1 ORDER BY id")
    await library.put(document("a.md", "Notes on the sluice.", tenant=tenant, metadata={"labels": ["new"]}))
    for mode in MODES:
        for label, expected in (("old", []), ("new", ["a.md"])):
            filters = Filters(keys=(key_filter("labels", any=[label]),))
            assert names(await find(library, tenant, "sluice", filters, mode=mode)) == expected
    assert await library.execute("SELECT id, created_at FROM chunks_g1 ORDER BY id") == embedded


async def test_a_key_that_is_not_declared_is_named(library: Library, tenant: str) -> None:
    await declare(library, tenant, {"labels": "keyword"})
    with pytest.raises(BadQuery, match="space is no declared key of metadata; declared are: labels"):
        await find(library, tenant, "sluice", Filters(keys=(key_filter("space", any=["HR"]),)))


async def test_a_key_of_one_tenant_is_no_key_of_another_tenant(library: Library, tenant: str) -> None:
    await declare(library, tenant, {"labels": "keyword"})
    other = f"{tenant}-other"
    await library.put(document("a.md", "Notes on the sluice.", tenant=other, metadata={"labels": ["plum"]}))
    with pytest.raises(BadQuery):
        await find(library, other, "sluice", Filters(keys=(key_filter("labels", any=["plum"]),)))
    own = Filters(keys=(key_filter("labels", any=["plum"]),))
    assert names(await find(library, tenant, "sluice", own)) == []


async def test_deleted_documents_and_undeclared_keys_leave_no_terms(library: Library, tenant: str) -> None:
    await declare(library, tenant, {"labels": "keyword"})
    documents = [document(f"{n}.md", "Notes.", tenant=tenant, metadata={"labels": ["plum"]}) for n in range(2)]
    await library.put(*documents)
    await library.put(deletion(documents[0]))
    stored = "SELECT external_id, keys FROM documents WHERE tenant = %s ORDER BY 1"
    assert await library.execute(stored, tenant) == [("0.md", []), ("1.md", ["labels=plum"])]
    async with library.pool.connection() as connection:
        assert await metadata_keys.remove(connection, tenant, "labels")
        assert not await metadata_keys.remove(connection, tenant, "labels")
    await refill(library, tenant)
    assert await library.execute(stored, tenant) == [("0.md", []), ("1.md", [])]
    hits = await library.es.search(index=library.generation.keyword_index, query={"term": {"tenant": tenant}})
    assert ["keys" in hit["_source"] for hit in hits["hits"]["hits"]] == [False]


async def test_the_audit_finds_terms_that_the_index_lacks(library: Library, tenant: str) -> None:
    """The rule is that of the other fields: an entry whose terms are not the ledger's is a wrong entry."""
    from pipeline.audit.compare import Row, compare
    from pipeline.audit.reading import entries, load

    await declare(library, tenant, {"labels": "keyword"})
    (id_,) = await library.accept(document("a.md", "Notes.", tenant=tenant, metadata={"labels": ["plum"]}))
    await library.converge(id_)
    await library.execute("UPDATE documents SET keys = '{labels=pear}' WHERE id = %s", id_)
    async with library.pool.connection() as connection:
        desired = (await load(connection, library.generation, [id_]))[id_]
        rows = [
            Row(*row)
            for row in await library.execute(
                "SELECT document_id, id, access_id, sha256(convert_to(text, 'UTF8')), tenant FROM chunks_g1"
                " WHERE document_id = %s",
                id_,
            )
        ]
    held = [entry async for page in entries(library.es, library.generation, (id_,), 100) for entry in page]
    assert [(d.store, d.kind) for d in compare(desired, rows, held)] == [("keywords", "wrong_entry")]
