"""Every table of the real schema has a bound, and those that nothing else tests hold."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pipeline.audit import runs
from pipeline.ledger.documents import EVENTS_PER_DOCUMENT
from pipeline.ledger.growth import CHUNKS, GROWTH
from pipeline.ledger.personal import PLACES
from tests.support.query.library import Library, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


async def test_every_table_is_listed_with_what_bounds_it(library: Library) -> None:
    rows = await library.execute(
        "SELECT CASE n.nspname WHEN 'public' THEN '' ELSE n.nspname || '.' END || c.relname FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition"
        " AND n.nspname NOT LIKE 'pg\\_%%' AND n.nspname <> 'information_schema'"
    )
    tables = {CHUNKS if name.startswith("chunks_") else name for (name,) in rows}
    assert tables - GROWTH.keys() == set(), "say in pipeline/ledger/growth.py what bounds these tables"
    assert GROWTH.keys() - tables == set(), "these tables do not exist"


async def test_the_bound_of_a_table_that_is_erased_by_age_names_the_setting() -> None:
    for place in PLACES:
        if place.age is not None:
            assert f"PENSTOCK_RETENTION_{place.age.setting.upper()}" in GROWTH[place.table].bound, place.table


async def test_a_document_with_many_events_keeps_only_the_newest(library: Library, tenant: str) -> None:
    event = document("busy.md", "text 0", tenant=tenant)
    for n in range(EVENTS_PER_DOCUMENT + 4):
        moment = event.observed_at + timedelta(seconds=n)
        await library.put(event.model_copy(update={"content": f"text {n}", "observed_at": moment, "version": n + 1}))
    [(events, newest)] = await library.execute(
        "SELECT count(*), max(e.version) FROM document_events e JOIN documents d ON d.id = document_id"
        " WHERE d.tenant = %s",
        tenant,
    )
    assert (events, newest) == (EVENTS_PER_DOCUMENT, EVENTS_PER_DOCUMENT + 4)


async def test_only_the_newest_audits_are_retained(library: Library) -> None:
    async with library.pool.connection() as connection:
        for _ in range(runs.MAX_RUNS + 5):
            await runs.start(connection, library.generation.name, "all")
        cursor = await connection.execute("SELECT count(*) FROM audit_runs WHERE scope = 'all'")
        assert await cursor.fetchone() == (runs.MAX_RUNS + 1,)
