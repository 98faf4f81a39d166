"""Expired rows are erased, in small batches, and no others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from cli.forget import Work
from pipeline.ledger import personal
from pipeline.ledger.personal import (
    CHUNKS,
    PLACES,
    Scope,
    erase,
    erase_access_sets,
    erase_unused_access_sets,
    lock_deleted,
)
from pipeline.maintenance.retention import Retention
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import RetentionSettings
from pipeline.stores.postgres import Connection, migrations
from tests.support.query.library import Library, access, deletion, document

if TYPE_CHECKING:
    from pipeline.kafka.producer import Producer

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


async def run_retention(library: Library, most: int = 500, **days: float) -> bool:
    return await Retention(library.pool, library.metrics, RetentionSettings(**days), most=most).turn()


async def document_fields(library: Library, tenant: str) -> list[tuple[Any, ...]]:
    return await library.execute(
        "SELECT external_id, title, author, source_url FROM documents WHERE tenant = %s ORDER BY external_id", tenant
    )


async def test_a_deleted_document_loses_its_personal_fields_after_the_retention_and_stays_deleted(
    library: Library, tenant: str
) -> None:
    fields = {"title": "Termination of Jane Doe", "author": "boss@acme.com", "source_url": "https://hr/jane-doe"}
    jane = document("termination-jane-doe.md", "reason: illness", tenant=tenant, **fields)
    other = document("rules.md", "be kind", tenant=tenant)
    await library.put(jane)
    await library.put(other)
    gone = deletion(jane)
    await library.put(gone)
    await run_retention(library)
    assert await document_fields(library, tenant) != [], "not before its time"
    assert ("termination-jane-doe.md", *fields.values()) in await document_fields(library, tenant)
    await library.execute(
        "UPDATE documents SET deleted_at = now() - interval '31 days' WHERE tenant = %s AND deleted_at IS NOT NULL",
        tenant,
    )
    await library.execute("UPDATE documents SET announced_seq = seq WHERE tenant = %s", tenant)
    await run_retention(library, deleted_days=0)
    assert ("termination-jane-doe.md", *fields.values()) in await document_fields(library, tenant), "0: for ever"
    await run_retention(library)
    [erased, kept] = await document_fields(library, tenant)
    assert kept[0] == "rules.md"
    assert re.fullmatch(r"erased:[0-9a-f-]{36}", erased[0])
    assert erased[1:] == (None, None, None)

    await library.put(jane)  # from Kafka once more: the floor stands
    assert (await document_fields(library, tenant))[0][1] is None
    again = jane.model_copy(update={"observed_at": gone.observed_at + timedelta(seconds=1), "version": 1})
    await library.put(again)
    assert ("termination-jane-doe.md", *fields.values()) in await document_fields(library, tenant), (
        "made anew by its source"
    )
    assert await library.execute(
        "SELECT erased_at FROM documents WHERE tenant = %s AND title = %s", tenant, fields["title"]
    ) == [(None,)]


async def test_a_deleted_document_keeps_its_name_until_both_stores_have_followed(library: Library, tenant: str) -> None:
    """Repairs and announcements need the row."""
    one = document("one.md", "text", tenant=tenant)
    await library.put(one)
    await library.put(deletion(one))
    await library.execute(
        "UPDATE documents SET deleted_at = now() - interval '31 days', announced_seq = seq WHERE tenant = %s", tenant
    )
    await library.execute(
        "UPDATE index_state SET want_seq = seq + 1 WHERE store = 'keywords' AND document_id ="
        " (SELECT id FROM documents WHERE tenant = %s)",
        tenant,
    )
    await run_retention(library)
    assert [row[0] for row in await document_fields(library, tenant)] == ["one.md"]
    await library.execute("UPDATE index_state SET want_seq = seq WHERE seq < want_seq")
    await run_retention(library)
    assert [row[0][:7] for row in await document_fields(library, tenant)] == ["erased:"]


async def test_a_table_that_cannot_be_erased_keeps_no_other_from_it(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right that is missing after an upgrade ended all erasure by age."""
    refused = [
        personal.Place(table, age=personal.Age("deleted_days", statement))
        for table, statement in (
            ("refused", "SELECT FROM erase_by_nobody(%(days)s, %(most)s)"),
            ("broken", "SELECT 1 / 0 WHERE %(days)s > 0 AND %(most)s > 0"),
            ("late", "SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(9) WHERE %(days)s > 0 AND %(most)s > 0"),
        )
    ]
    monkeypatch.setattr("pipeline.maintenance.retention.PLACES", (*refused, *PLACES))
    await library.execute(
        "INSERT INTO memberships VALUES (%s, 'wiki', 'jane', '{}', now() - interval '200 days')", tenant
    )
    await run_retention(library)
    assert await library.execute("SELECT principal FROM memberships WHERE tenant = %s", tenant) == []


PLANTED = {
    "superseded": "INSERT INTO superseded SELECT id, 1, now() - %(age)s, '', '', 'Jane', NULL, NULL, NULL, NULL, '{}',"
    " 'Jane' FROM documents WHERE tenant = %(tenant)s",
    "connector_principals": "INSERT INTO connector_principals VALUES (%(tenant)s, 'wiki', 'jane', 'x',"
    " now() - %(age)s)",
    "memberships": "INSERT INTO memberships VALUES (%(tenant)s, 'wiki', 'jane', '{}', now() - %(age)s)",
    "dead_letters": 'INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, first_failed_at,'
    " tenant, external_id, at) VALUES (%(tenant)s, 't', 0, 0, 'detect', 'x', 'x', now(), %(tenant)s, 'jane',"
    " now() - %(age)s)",
    "connector_items": "INSERT INTO connector_items (tenant, source, external_id, scope, gone, content_at) VALUES"
    " (%(tenant)s, 'wiki', 'jane', '', true, now() - %(age)s)",
    "answer_reviews": "INSERT INTO answer_reviews (answer_id, tenant, asked_at, question, mode, model, support,"
    " density, reasons, documents, chunks) VALUES (gen_random_uuid(), %(tenant)s, now() - %(age)s, 'Is Jane ill?',"
    " 'm', 'm', 0, 0, '{}', '{}', '{}')",
    "answer_feedback": "INSERT INTO answer_feedback (tenant, giver, subject, chunk_id, verdict, note, given_at) VALUES"
    " (%(tenant)s, '', '', gen_random_uuid(), 'up', 'Jane', now() - %(age)s)",
    "standing_questions": "INSERT INTO standing_questions (tenant, id, principal, question, request, sentences,"
    " generation, asked_at) VALUES (%(tenant)s, gen_random_uuid(), 'jane', 'Is Jane ill?', '{}', '[]', 'g1',"
    " now() - %(age)s)",
    "eval_queries": "INSERT INTO eval_queries (id, tenant, text, principals, tags, added_at) VALUES (gen_random_uuid(),"
    " %(tenant)s, 'Is Jane ill?', '{}', '{}', now() - %(age)s)",
}


async def insert_aged(library: Library, statement: str, tenant: str, days: int) -> None:
    async with library.pool.connection() as connection:
        await connection.execute(statement.encode(), {"tenant": tenant, "age": timedelta(days=days)})


async def counts(library: Library, tenant: str) -> dict[str, int]:
    results = {}
    for table in PLANTED:
        where = (
            "document_id IN (SELECT id FROM documents WHERE tenant = %s)" if table == "superseded" else "tenant = %s"
        )
        [(results[table],)] = await library.execute(f"SELECT count(*) FROM {table} WHERE {where}", tenant)
    return results


@pytest.mark.parametrize(("days", "left"), [(29, 1), (121, 0)])
async def test_reviews_feedback_memberships_and_dead_letters_are_erased_after_their_retention(
    library: Library, tenant: str, days: int, left: int
) -> None:
    await library.put(document("one.md", "text", tenant=tenant))
    for statement in PLANTED.values():
        await insert_aged(library, statement, tenant, days)
    await library.execute(
        "INSERT INTO dead_letter_trail (letter_id, action, by) SELECT id, 'undone', 'jane' FROM dead_letters"
        " WHERE tenant = %s",
        tenant,
    )
    await run_retention(library, golden_days=120, standing_days=120)
    assert await counts(library, tenant) == dict.fromkeys(PLANTED, left)


async def test_erase_by_age_cannot_erase_rows_of_today(library: Library, tenant: str) -> None:
    kinds = (
        "memberships",
        "connector_items",
        "answer_reviews",
        "answer_feedback",
        "eval_queries",
        "standing_questions",
    )
    for kind in kinds:
        await insert_aged(library, PLANTED[kind], tenant, 0)
        await library.execute("SELECT FROM erase_by_age(%s, %s, 500)", kind, -9e3)
    assert sum((await counts(library, tenant)).values()) == 6


async def test_rows_still_in_use_are_retained_whatever_their_age(library: Library, tenant: str) -> None:
    await library.execute("INSERT INTO memberships VALUES (%s, 'wiki', 'ann', '{staff}', '-infinity')", tenant)
    await library.execute(
        "INSERT INTO connector_items (tenant, source, external_id, scope, gone, withdrawn_at, content_at) VALUES"
        " (%s, 'wiki', 'alive', '', false, NULL, '2001-01-01'),"
        " (%s, 'wiki', 'withdrawn', '', true, now(), '2001-01-01')",
        tenant,
        tenant,
    )
    await insert_aged(library, PLANTED["eval_queries"], tenant, 5000)
    await run_retention(library)
    row_counts = await counts(library, tenant)
    assert (row_counts["memberships"], row_counts["connector_items"], row_counts["eval_queries"]) == (1, 2, 1)


async def test_only_deleted_documents_that_both_stores_followed_can_be_erased_on_demand(
    library: Library, tenant: str
) -> None:
    gone, alive, behind = (document(f"{name}.md", "text", tenant=tenant) for name in ("gone", "alive", "behind"))
    await library.put(gone, alive, behind)
    await library.put(deletion(gone), deletion(behind))
    await library.execute("UPDATE documents SET announced_seq = seq WHERE tenant = %s", tenant)
    ids = dict(await library.execute("SELECT external_id, id FROM documents WHERE tenant = %s", tenant))
    await library.execute("UPDATE index_state SET want_seq = seq + 1 WHERE document_id = %s", ids["behind.md"])
    async with library.pool.connection() as connection:
        assert await lock_deleted(connection, list(ids.values())) == [ids["gone.md"]]
    await library.execute("UPDATE index_state SET want_seq = seq WHERE document_id = %s", ids["behind.md"])


async def test_an_answer_that_is_stored_for_review_while_its_document_is_forgotten_is_erased(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = document("one.md", "text", tenant=tenant)
    await library.put(one)
    await library.put(deletion(one))
    await library.execute("UPDATE documents SET announced_seq = seq WHERE tenant = %s", tenant)
    [(id_,)] = await library.execute("SELECT id FROM documents WHERE tenant = %s", tenant)
    erase_locked = Work._erase_locked

    async def store_after(work: Work, *parameters: Any) -> dict[str, int]:
        erased = await erase_locked(work, *parameters)
        await insert_aged(library, PLANTED["answer_reviews"], tenant, 0)
        await library.execute("UPDATE answer_reviews SET documents = %s WHERE tenant = %s", [id_], tenant)
        return erased

    monkeypatch.setattr(Work, "_erase_locked", store_after)
    work = Work(library.settings, library.pool, cast("Producer", None), 0)
    assert await work._erase_documents(tenant, "wiki", {id_: "one.md"}, {}) == 1
    assert (await counts(library, tenant))["answer_reviews"] == 0
    assert work.erased["postgres answer_reviews"] == 1


async def test_access_sets_are_erased_while_events_are_accepted_concurrently(library: Library, tenant: str) -> None:
    await library.put(document("one.md", "text", tenant=tenant))
    await library.execute(
        "INSERT INTO access_sets (tenant, digest, acl_tags, required_tags) SELECT %s, n::text::bytea, '{user:jane}',"
        " '{}' FROM generate_series(1, 150) n",
        tenant,
    )
    ids = [id_ for (id_,) in await library.execute("SELECT id FROM access_sets WHERE tenant = %s", tenant)]
    async with library.pool.connection() as accepting, library.pool.connection() as connection:
        async with accepting.transaction():
            await accepting.execute("LOCK TABLE access_sets IN ROW EXCLUSIVE MODE")
            erasing = asyncio.create_task(erase_access_sets(connection, tenant, ids))
            await asyncio.wait([erasing], timeout=0.5)
            assert not erasing.done(), "it tries again"
        assert await erasing == 150
    assert len(await library.execute("SELECT id FROM access_sets WHERE tenant = %s", tenant)) == 1


async def test_an_access_set_is_erased_after_its_last_document_has_other_tags(library: Library, tenant: str) -> None:
    """Every new combination of tags adds a set, and every search reads all that have one of its caller's tags."""
    one = document("one.md", "text", tenant=tenant, acl_tags=["first"])
    await library.put(one)
    later = one.observed_at + timedelta(seconds=1)
    await library.put(one.model_copy(update={"acl_tags": ["second"], "observed_at": later, "version": 2}))
    sets = "SELECT acl_tags FROM access_sets WHERE tenant = %s"
    assert len(await library.execute(sets, tenant)) == 2
    while await run_retention(library):
        pass
    assert await library.execute(sets, tenant) == [(["wiki/second"],)]


async def test_more_unused_access_sets_than_are_looked_at_are_erased_in_turns(library: Library, tenant: str) -> None:
    await library.put(document("one.md", "text", tenant=tenant))
    await library.execute(
        "INSERT INTO access_sets (tenant, digest, acl_tags, required_tags) SELECT %s, n::text::bytea, '{wiki/jane}',"
        " '{}' FROM generate_series(1, 150) n",
        tenant,
    )
    after, turns, erased = 0, 0, 0
    async with library.pool.connection() as connection:
        while turns == 0 or after:
            after, count = await erase_unused_access_sets(connection, after, 40)
            turns, erased = turns + 1, erased + count
    assert erased >= 150
    assert turns >= 4
    assert len(await library.execute("SELECT id FROM access_sets WHERE tenant = %s", tenant)) == 1


async def test_an_access_set_stays_while_chunks_have_it_that_vectors_have_yet_to_follow(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller with both groups missed the document: a search looks for chunks by their access set."""
    one = document("one.md", "the harvest festival", tenant=tenant, acl_tags=["first"])
    await library.put(one)
    [id_] = await library.accept(access(one, ["second"]))
    sets = "SELECT acl_tags FROM access_sets WHERE tenant = %s ORDER BY acl_tags"
    await run_retention(library)
    assert await library.execute(sets, tenant) == [(["wiki/first"],), (["wiki/second"],)]
    await library.converge(id_)
    other = document("other.md", "text", tenant=tenant, acl_tags=["second"])
    ids = await library.accept(other)
    with monkeypatch.context() as patched:
        patched.setattr(personal, "PENDING_AT_ONCE", 0)
        await run_retention(library)
    assert len(await library.execute(sets, tenant)) == 2, "not while there is a backlog"
    await run_retention(library)
    assert await library.execute(sets, tenant) == [(["wiki/second"],)]
    await library.converge(*ids)


async def test_locked_access_sets_do_not_keep_retention_from_the_rest(library: Library, tenant: str) -> None:
    """A whole turn was lost, and with it the speed of the next."""
    await library.execute(
        "INSERT INTO access_sets (tenant, digest, acl_tags, required_tags) VALUES (%s, '', '{wiki/jane}', '{}')", tenant
    )
    await library.execute(
        "INSERT INTO embedding_days (day, purpose, tokens, cost) VALUES (current_date - 500, 'locked', 1, 0)"
    )
    for _ in range(3):
        await insert_aged(library, PLANTED["answer_reviews"], tenant, 40)
    async with library.pool.connection() as accepting, accepting.transaction():
        await accepting.execute("LOCK TABLE access_sets IN ROW EXCLUSIVE MODE")
        assert await run_retention(library, most=3), "there may be more reviews"
    assert await library.execute("SELECT day FROM embedding_days WHERE purpose = 'locked'") == []
    assert len(await library.execute("SELECT id FROM access_sets WHERE tenant = %s", tenant)) == 1
    while await run_retention(library):
        pass
    assert await library.execute("SELECT id FROM access_sets WHERE tenant = %s", tenant) == []


async def test_only_access_sets_that_were_erased_are_counted(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set that a document took in the meantime is not."""
    one = document("one.md", "text", tenant=tenant, acl_tags=["first"])
    while await run_retention(library):  # what other tests left behind
        pass
    await library.put(one)
    [(first,)] = await library.execute("SELECT id FROM access_sets WHERE tenant = %s", tenant)
    later = {"observed_at": one.observed_at + timedelta(seconds=1), "version": 2}
    await library.put(one.model_copy(update={"acl_tags": ["second"], **later}))
    erase_sets = personal._erase_sets

    async def take_first(connection: Connection, of: str, ids: Sequence[int]) -> int:
        await library.execute("UPDATE documents SET access_id = %s WHERE tenant = %s", first, tenant)
        return await erase_sets(connection, of, ids)

    monkeypatch.setattr(personal, "_erase_sets", take_first)
    async with library.pool.connection() as connection:
        assert (await erase_unused_access_sets(connection, 0, 10_000))[1] == 0
    assert (first,) in await library.execute("SELECT id FROM access_sets WHERE tenant = %s", tenant)


async def test_events_that_an_earlier_version_left_of_an_erased_document_are_erased(
    library: Library, tenant: str
) -> None:
    one, other, alive = (document(f"{name}.md", "text", tenant=tenant) for name in ("one", "other", "alive"))
    await library.put(one, other, alive)
    await library.put(deletion(one), deletion(other))
    await library.execute(
        "UPDATE documents SET erased_at = now(), access_id = NULL WHERE tenant = %s AND deleted_at IS NOT NULL", tenant
    )
    retention = Retention(library.pool, library.metrics, RetentionSettings())
    events = (
        "SELECT DISTINCT external_id FROM document_events e JOIN documents d ON d.id = document_id WHERE tenant = %s"
    )
    assert await retention.turn(), "there may be more"
    assert await library.execute(events, tenant) == [("alive.md",)]
    assert not await retention.turn()


async def test_the_events_of_a_forgotten_document_are_erased(library: Library, tenant: str) -> None:
    one, other = document("one.md", "text", tenant=tenant), document("other.md", "text", tenant=tenant)
    ids = await library.accept(one, other)
    await library.put(deletion(one))
    async with library.pool.connection() as connection, connection.transaction():
        erased = await erase(connection, "document", Scope(tenant, source="wiki", ids=ids[:1], names=["one.md"]))
    assert erased["document_events"] == 2
    assert await library.execute(
        "SELECT DISTINCT external_id FROM document_events e JOIN documents d ON d.id = document_id WHERE tenant = %s",
        tenant,
    ) == [("other.md",)]
    await library.converge(*ids)


async def test_the_events_of_a_deleted_document_are_erased_with_its_names(library: Library, tenant: str) -> None:
    one, other = document("one.md", "text", tenant=tenant), document("other.md", "text", tenant=tenant)
    await library.put(one)
    await library.put(other)
    await library.put(deletion(one))
    await library.execute("UPDATE documents SET announced_seq = seq WHERE tenant = %s", tenant)
    events = (
        "SELECT DISTINCT d.deleted_at IS NULL FROM document_events e JOIN documents d ON d.id = document_id"
        " WHERE tenant = %s ORDER BY 1"
    )
    await run_retention(library)
    assert await library.execute(events, tenant) == [(False,), (True,)], "not before its time"
    await library.execute(
        "UPDATE documents SET deleted_at = now() - interval '31 days' WHERE tenant = %s AND deleted_at IS NOT NULL",
        tenant,
    )
    await run_retention(library)
    assert await library.execute(events, tenant) == [(True,)]


async def test_the_spending_of_days_long_past_is_erased(library: Library) -> None:
    await library.execute(
        "INSERT INTO embedding_days (day, purpose, tokens, cost) SELECT current_date - n, 'test', 1, 0"
        " FROM unnest(ARRAY[399, 402]) n"
    )
    await run_retention(library)
    assert await library.execute("SELECT current_date - day FROM embedding_days WHERE purpose = 'test'") == [(399,)]


async def test_retention_erases_in_small_batches(library: Library, tenant: str) -> None:
    while await run_retention(library):  # what other tests left behind
        pass
    for _ in range(5):
        await insert_aged(library, PLANTED["answer_reviews"], tenant, 40)
    assert await run_retention(library, most=3), "there may be more"
    assert (await counts(library, tenant))["answer_reviews"] == 2
    assert not await run_retention(library, most=3)
    assert (await counts(library, tenant))["answer_reviews"] == 0


def oldest_first(statement: str) -> str:
    """Return the part of a statement of the retention that selects the oldest rows."""
    text = " ".join(statement.split()).replace("%(days)s", "30").replace("%(most)s", "500")
    text = text.replace("before", "now()").replace("LIMIT most", "LIMIT 500")
    match = re.search(r"\( ?(SELECT .* LIMIT 500)", text)
    assert match is not None, statement
    return match[1]


async def test_every_retention_statement_uses_an_index(library: Library) -> None:
    [migration] = [migration.statements for migration in migrations() if migration.name == "0038_erasure"]
    by_owner = migration.partition("CASE kind")[2].partition("END CASE")[0].split("WHEN ")[1:]
    [later] = [migration.statements for migration in migrations() if migration.name == "0047_overviews"]
    by_owner.append(later.partition("FUNCTION erase_use_by_age")[2])
    ages = [place.age.statement for place in PLACES if place.age]
    own = [age for age in ages if "_by_age" not in age and "trail.expire" not in age]  # which drops whole days
    assert (len(own), len(by_owner)) == (2, 8)
    async with library.pool.connection() as connection:
        for way in ("seqscan", "bitmapscan", "sort"):
            await connection.execute(f"SET LOCAL enable_{way} = off".encode())
        for statement in map(oldest_first, [*own, *by_owner]):
            cursor = await connection.execute(f"EXPLAIN {statement}".encode())
            plan = "\n".join(row[0] for row in await cursor.fetchall())
            big = [line for line in plan.splitlines() if "Seq Scan" in line and "generations" not in line]
            assert not big, f"{statement}:\n{plan}"
            assert "Sort" not in plan, f"{statement}:\n{plan}"


async def test_deleting_an_access_set_uses_an_index_on_documents(library: Library) -> None:
    """As the foreign key asks for each, while whoever accepts events waits."""
    async with library.pool.connection() as connection:
        await connection.execute("SET LOCAL enable_seqscan = off")
        cursor = await connection.execute("EXPLAIN SELECT FROM documents d WHERE d.access_id = 1 FOR KEY SHARE OF d")
        plan = "\n".join(row[0] for row in await cursor.fetchall())
    assert "documents_by_access" in plan, plan


async def test_every_column_is_listed_as_personal_or_as_free_of_personal_data(library: Library) -> None:
    """A new table or column has to say which it is: erasure, export and retention go by that list."""
    rows = await library.execute(
        "SELECT CASE table_schema WHEN 'public' THEN '' ELSE table_schema || '.' END || table_name,"
        " array_agg(column_name::text) FROM information_schema.columns JOIN information_schema.tables"
        " USING (table_schema, table_name)"
        " JOIN pg_class c ON c.oid = (quote_ident(table_schema) || '.' || quote_ident(table_name))::regclass"
        " WHERE table_schema IN ('public', 'trail') AND table_type = 'BASE TABLE' AND NOT c.relispartition GROUP BY 1"
    )
    listed = {place.table: {*place.personal.split(), *place.free.split()} for place in PLACES}
    chunks = {*CHUNKS.personal.split(), *CHUNKS.free.split()}
    for table, columns in rows:
        expected = chunks if table.startswith("chunks_") else listed.get(table)
        assert expected is not None, f"{table} is not in pipeline/ledger/personal.py"
        assert set(columns) == expected, f"{table}: {set(columns) ^ expected}"
    assert listed.keys() <= {table for table, _ in rows}


async def test_a_second_worker_skips_retention_while_the_first_runs_it(library: Library, tenant: str) -> None:
    await insert_aged(library, PLANTED["answer_reviews"], tenant, 40)
    async with library.pool.connection() as connection, connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(7300038)")
        assert not await Retention(library.pool, Metrics(), RetentionSettings()).turn()
        assert (await counts(library, tenant))["answer_reviews"] == 1
