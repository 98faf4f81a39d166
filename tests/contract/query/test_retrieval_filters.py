"""Filters on the real servers: in both stores, in the plan, and by the ledger's word."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from pipeline.core.identity import document_id
from query.access.callers import readable
from query.access.filters import NONE, Filters
from query.embedding.embedders import QueryEmbedder
from query.model import MODES, BadQuery
from query.retrieval import vectors
from query.retrieval.search import Search
from query.retrieval.vectors import NeighbourQuery, Tuning
from tests.support.query.library import Library, WordEmbedder, document
from tests.support.query.retrieval_kit import find, names
from topics.messages import DocumentUpserted

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


DAY = datetime(2026, 3, 1, 12, tzinfo=UTC)


def described(tenant: str) -> list[DocumentUpserted]:
    """One document for each combination of what can be asked for."""
    kinds = ("text/markdown", "text/plain", "application/json")
    return [
        document(
            f"{n}.doc",
            f"Report number {n} on the estuary.",
            tenant=tenant,
            source=("wiki", "drive")[n % 2],
            author=("ann", "bob", None)[n % 3],
            media_type=kinds[n // 3 % 3],
            source_modified_at=DAY + timedelta(days=n) if n % 5 else None,
        )
        for n in range(18)
    ]


def passes(one: DocumentUpserted, filters: Filters) -> bool:
    """The rule, written down a second time."""
    at = one.source_modified_at
    kinds = filters.media_types
    return (
        (not filters.sources or one.source in filters.sources)
        and (not filters.authors or one.author in filters.authors)
        and (not kinds or one.media_type in kinds or ("text/*" in kinds and one.media_type.startswith("text/")))
        and (filters.since is None or (at is not None and at >= filters.since))
        and (filters.before is None or (at is not None and at < filters.before))
        and (not filters.documents or document_id(one.tenant, one.source, one.external_id) in filters.documents)
    )


async def test_filters_alone_and_combined_work_in_every_mode_and_scan(library: Library, tenant: str) -> None:
    documents = described(tenant)
    await library.put(*documents)
    some = tuple(document_id(tenant, d.source, d.external_id) for d in documents[4:9])
    all_filters = [
        Filters(sources=("drive",)),
        Filters(authors=("ann",)),
        Filters(media_types=("text/*",)),
        Filters(media_types=("application/json", "TEXT/PLAIN")),
        Filters(since=DAY + timedelta(days=7)),
        Filters(before=DAY + timedelta(days=7)),
        Filters(documents=some),
        Filters(authors=("nobody",)),
        Filters(sources=("wiki",), authors=("ann", "bob"), media_types=("text/*",), since=DAY, documents=some),
    ]
    walking = Search(library.pool, library.es, QueryEmbedder(WordEmbedder), tuning=Tuning(always_exact_rows=0))
    for filters in all_filters:
        lowered = Filters(**{**_fields(filters), "media_types": tuple(k.lower() for k in filters.media_types)})
        expected = {d.external_id for d in documents if passes(d, lowered)}
        for mode in MODES:
            assert set(names(await find(library, tenant, "estuary report", filters, mode=mode, top=50))) == expected
        results = await find(library, tenant, "estuary report", filters, mode="vector", top=50, search=walking)
        assert set(names(results)) == expected


async def test_date_filters_are_exact_within_the_hour(library: Library, tenant: str) -> None:
    moments = [DAY + timedelta(minutes=n) for n in (0, 10, 20, 59, 60)]
    documents = [
        document(f"{n}.md", f"Report number {n} on the estuary.", tenant=tenant, source_modified_at=at)
        for n, at in enumerate(moments)
    ]
    await library.put(*documents)
    for at in moments:
        for filters in (Filters(since=at), Filters(before=at), Filters(since=at, before=at + timedelta(minutes=11))):
            expected = {d.external_id for d in documents if passes(d, filters)}
            for mode in MODES:
                results = await find(library, tenant, "estuary report", filters, mode=mode, top=50)
                assert set(names(results)) == expected


def _fields(filters: Filters) -> dict[str, Any]:
    return {name: getattr(filters, name) for name in Filters.__slots__}


async def test_filters_use_the_ledgers_values_while_the_stores_lag(library: Library, tenant: str) -> None:
    before = document("a.md", "Notes on the sluice.", tenant=tenant, author="ann", source_modified_at=DAY)
    await library.put(before)
    await library.accept(document("a.md", "Notes on the sluice.", tenant=tenant, author="bob", source_modified_at=DAY))
    for mode in MODES:
        assert names(await find(library, tenant, "sluice", Filters(authors=("ann",)), mode=mode)) == []
    assert names(await find(library, tenant, "sluice", Filters(authors=("bob",)), mode="vector")) == ["a.md"]


async def test_an_invalid_filter_is_rejected(library: Library, tenant: str) -> None:
    for filters in (
        Filters(since=datetime(2026, 1, 1)),
        Filters(authors=("a\x00",)),
        Filters(sources=("\udcff",)),
        Filters(documents=tuple(uuid4() for _ in range(1001))),
    ):
        with pytest.raises(BadQuery):
            await find(library, tenant, "sluice", filters)


async def test_a_wide_filter_uses_the_graph_and_a_narrow_one_an_exact_scan(library: Library, tenant: str) -> None:
    """Both plans, and that the walk finds as many as there are."""
    await library.accept(
        *(document(f"{n}.md", "x", tenant=tenant, author="rare" if n < 3 else "often") for n in range(60))
    )
    caller = await library.caller(tenant, "staff")
    owners = await library.execute("SELECT id, access_id FROM documents WHERE tenant = %s", tenant)
    await library.execute(
        "INSERT INTO chunks_g1 (id, document_id, access_id, text, embedding)"
        " SELECT gen_random_uuid(), d.id, d.access_id, '', (SELECT array_agg(random() - 0.5 + 0 * (n + i))"
        " FROM generate_series(1, 64) i)::vector::halfvec FROM documents d, generate_series(1, 100) n"
        " WHERE d.tenant = %s",
        tenant,
    )
    await library.execute("ANALYZE chunks_g1, documents")
    assert len({access_id for _, access_id in owners}) == 1
    vector = np.asarray(WordEmbedder()._vector("x"))
    tuning = Tuning(always_exact_rows=160)
    async with library.pool.connection() as connection:
        may = await readable(connection, caller)

        async def look(filters: Filters, *, verified: bool = False) -> tuple[str, str, int]:
            query = NeighbourQuery(library.generation, caller, may, filters, verified)
            scan = await vectors.choose_scan(connection, query, limit=50, tuning=tuning)
            statement, values = vectors.build(query, vector, scan, limit=50, walked=50)
            async with connection.transaction():
                await vectors.configure(
                    connection, library.generation, scan, limit=50, timeout_seconds=5, tuning=tuning
                )
                cursor = await connection.execute("EXPLAIN " + statement.as_string(connection), values)
                plan = "\n".join(line for (line,) in await cursor.fetchall())
            results, used = await vectors.nearest(
                connection, query, vector, scan, limit=50, timeout_seconds=30, tuning=tuning
            )
            assert used == ("sketched" if verified else scan)
            return scan, plan, len(results)

        scan, plan, count = await look(Filters(authors=("often",)))
        assert (scan, count) == ("graph", 50)
        assert "chunks_g1_hnsw" in plan
        assert "SubPlan" in plan, "the ledger is asked about what the walk visits, not joined"
        scan, plan, count = await look(Filters(authors=("rare",)))
        assert (scan, count) == ("sketched", 50)
        assert "hnsw" not in plan
        assert "Seq Scan on chunks_g1" not in plan
        scan, plan, count = await look(NONE, verified=True)
        assert (scan, count) == ("graph", 0), "no manifest names these rows: looked for in the graph, then everywhere"
        assert "chunks_g1_hnsw" in plan
    await library.execute(
        "DELETE FROM chunks_g1 c USING documents d WHERE d.id = c.document_id AND d.tenant = %s", tenant
    )
