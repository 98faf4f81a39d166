"""The source of tables on real Postgres, and on SQLite where that is as good."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from connectors.database.playground import address
from connectors.database.source import Database
from connectors.declared import options
from connectors.source import Context, Document, Gone, Listed, Unreadable
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured, Retryable
from tests.support.connectors.folder_kit import own_database
from tests.support.connectors.reading import changed, everything, listing
from tests.support.waiting import until

pytestmark = pytest.mark.stack

COLUMNS = """
    id bigint PRIMARY KEY, subject text, body text, team text[] NOT NULL DEFAULT '{staff}',
    edited timestamptz NOT NULL DEFAULT clock_timestamp(), gone_at timestamptz
"""


@dataclass
class Desk:
    """A table ``tickets`` in a schema of its own, and sources that read it."""

    dsn: str
    schema: str
    folder: Path
    opened: list[Database] = field(default_factory=list)

    def source(self, **more: Any) -> Database:
        dsn = more.pop("dsn", None) or address(
            self.dsn, options=f"-c search_path={self.schema}", application_name=self.schema
        )
        declared: dict[str, Any] = {"title": "{subject}", "text": "{body}", "acl": ["team"], **more}
        if "query" not in declared:
            declared = {"table": "tickets", **declared}
        settings = options(Database, declared, "s", {"PENSTOCK_S_DSN": dsn})
        source = Database(settings, Context(name="s", tenant="t", memory=None, folder=self.folder))  # type: ignore[arg-type]
        source.page_documents = 3
        self.opened.append(source)
        return source

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True, options=f"-c search_path={self.schema}") as connection:
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def fill(self, count: int) -> None:
        self.run("INSERT INTO tickets SELECT n, 'Subject ' || n, 'Body ' || n FROM generate_series(1, %s) n", count)


@pytest.fixture(scope="module")
def database(stack: Stack) -> Iterator[str]:
    with own_database(stack) as dsn:
        yield dsn


@pytest.fixture
async def desk(database: str, tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(database, f"s{uuid.uuid4().hex[:8]}", tmp_path)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {desk.schema}".encode())
    desk.run(f"CREATE TABLE tickets ({COLUMNS})")
    yield desk
    for source in desk.opened:
        await source.close()


async def test_all_rows_are_read_page_by_page_and_listed_alike(desk: Desk) -> None:
    desk.fill(10)
    source = desk.source()
    pages = [page async for page in source.full(None)]
    assert [len(page.entries) for page in pages] == [3, 3, 3, 1]
    read = await everything(source)
    assert list(read) == [str(n) for n in range(1, 11)]
    revisions = {id_: entry.revision for id_, entry in read.items() if isinstance(entry, Document)}
    assert {id_: listed.revision for id_, listed in (await listing(source)).items()} == revisions
    assert list(await everything(source, dict(pages[1].cursor))) == ["7", "8", "9", "10"]


async def test_a_first_load_continues_where_rows_were_added_and_removed_meanwhile(desk: Desk) -> None:
    desk.fill(9)
    source = desk.source()
    pages = source.full(None)
    first = await anext(pages)
    desk.run("DELETE FROM tickets WHERE id IN (2, 5)")
    desk.run("INSERT INTO tickets VALUES (0, 'new', 'early'), (100, 'new', 'late')")
    rest = [entry.external_id async for page in pages for entry in page.entries]
    assert [entry.external_id for entry in first.entries] == ["1", "2", "3"]
    assert rest == ["4", "6", "7", "8", "9", "100"]


async def test_rows_are_fetched_by_id_as_they_are_now(desk: Desk) -> None:
    desk.fill(2)
    source = desk.source()
    ids = ["2", "3", "no number", "02", "1", "99999999999999999999999999"]
    entries = await source.fetch(ids)
    assert [type(entry) for entry in entries] == [Document, Gone, Gone, Gone, Document, Gone]
    assert [entry.external_id for entry in entries] == ids
    desk.run("UPDATE tickets SET body = 'edited' WHERE id = 1")
    [entry] = await source.fetch(["1"])
    assert isinstance(entry, Document)
    assert entry.content == "edited"


@pytest.mark.parametrize(
    ("columns", "values", "ids"),
    [
        ("id uuid", "('00000000-0000-0000-0000-00000000000a'), ('00000000-0000-0000-0000-00000000000b')", None),
        ("id text", "('a/b'), ('ä'), ('A'), ('''; DROP TABLE tickets --'), ('%s :x')", None),
        ("id numeric(20, 0)", "(1), (12345678901234567890)", None),
        ("a bigint, b text", "(1, 'x/y'), (1, 'z'), (2, 'a')", {"1/x%2Fy", "1/z", "2/a"}),
        ("a bigint, b uuid, c text", "(1, '00000000-0000-0000-0000-00000000000a', '')", None),
    ],
)
async def test_keys_of_any_type_page_and_fetch(desk: Desk, columns: str, values: str, ids: set[str] | None) -> None:
    names = re.findall(r"\b(id|a|b|c) ", columns)
    desk.run(f"CREATE TABLE keyed ({columns}, subject text DEFAULT 's', body text DEFAULT 'b', team text DEFAULT 'x')")
    desk.run(f"INSERT INTO keyed ({', '.join(names)}) VALUES {values}")
    source = desk.source(table="keyed", id=names)
    source.page_documents = 1
    read = await everything(source)
    assert len(read) == desk.run("SELECT count(*) FROM keyed")[0][0]
    assert ids is None or set(read) == ids
    assert await source.fetch(list(read)) == list(read.values())
    assert set(await listing(source)) == set(read)
    resumed = desk.source(table="keyed", id=names)
    first = next(iter(read))
    assert set(await everything(resumed, {"after": first})) == set(read) - {first}


async def test_a_query_may_hold_colons_percents_comments_and_a_semicolon(desk: Desk) -> None:
    desk.fill(2)
    query = """
        WITH recent AS (SELECT * FROM tickets WHERE subject LIKE 'Subject%' AND id % 5 <> 0)
        SELECT id::bigint AS id, subject, to_char(edited, 'HH24:MI') || ' :x ' || body AS body,
               array_agg(t) AS "Team" FROM recent, unnest(team) t GROUP BY 1, 2, 3 -- the last; line
    """
    source = desk.source(query=query + ";", acl=["Team"])
    read = await everything(source)
    assert set(read) == {"1", "2"}
    for entry in read.values():
        assert isinstance(entry, Document)
        assert ":x Body" in entry.content
        assert list(entry.acl_tags) == ["staff"]
    assert await source.fetch(["1", "2"]) == list(read.values())


async def test_a_join_that_returns_a_row_for_each_reader_admits_nobody(desk: Desk) -> None:
    """Pages ended between the rows of one document, and the second page's reader was lost, or the only one."""
    desk.fill(7)
    query = "SELECT t.*, team2 FROM tickets t, (VALUES ('a'), ('b')) v (team2) WHERE id > 1 OR team2 = 'a'"
    source = desk.source(query=query, acl=["team2"])
    read = await everything(source)
    assert set(read) == {str(n) for n in range(1, 8)}
    assert [id_ for id_, entry in read.items() if isinstance(entry, Document)] == ["1"]
    assert [id_ for id_, entry in (await listing(source)).items() if entry.acl_tags] == ["1"]
    assert {entry.code for entry in read.values() if isinstance(entry, Unreadable)} == {"ambiguous"}


@pytest.mark.parametrize(
    "value",
    [
        "repeat('[', 5000) || repeat(']', 5000)",
        "repeat('[', 600) || repeat(']', 600)",
        "repeat('9', 5000)",
        "'[' || repeat('[],', 1200000) || '1]'",
    ],
    ids=["nested", "less nested", "digits", "many lists"],
)
async def test_json_that_python_refuses_denies_its_row_and_no_other(desk: Desk, value: str) -> None:
    """The author of one value stopped the reading of all rows, and so every revocation among them."""
    desk.run("ALTER TABLE tickets ADD data jsonb")
    desk.fill(4)
    desk.run(f"UPDATE tickets SET data = ({value})::jsonb WHERE id = 2")
    source = desk.source(text="{body} {data}")
    read = await everything(source)
    assert {id_ for id_, entry in read.items() if isinstance(entry, Document)} == {"1", "3", "4"}
    assert isinstance(read["2"], Unreadable)
    assert read["2"].code == "bad_value"
    assert {id_: listed.revision for id_, listed in (await listing(source)).items()} == {
        id_: entry.revision for id_, entry in read.items() if not isinstance(entry, Gone)
    }
    denied = (await everything(desk.source(acl=["data"])))["2"]
    assert isinstance(denied, Unreadable)
    assert denied.code == "bad_access"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("timestamptz", "infinity"),
        ("timestamptz", "20210-05-01 00:00Z"),
        ("timestamp", "-infinity"),
        ("date", "0044-03-15 BC"),
        ("time", "24:00"),
        ("interval", "10000000 years"),
    ],
)
async def test_a_time_that_python_does_not_have_denies_its_row_and_no_other(desk: Desk, kind: str, value: str) -> None:
    """The author of one value stopped the reading of all rows, and so every revocation among them."""
    desk.run(f"ALTER TABLE tickets ADD due {kind}")
    desk.fill(4)
    desk.run(f"UPDATE tickets SET due = '{value}'::{kind} WHERE id = 2")
    source = desk.source(acl=["team"], deleted="due")
    read = await everything(source)
    assert {id_ for id_, entry in read.items() if isinstance(entry, Document)} == {"1", "3", "4"}
    assert isinstance(read["2"], Unreadable)
    assert read["2"].acl_tags == ()


async def test_large_rows_of_postgres_are_in_memory_one_by_one(desk: Desk) -> None:
    """200 rows of 10 MB were in memory at once, and ended all connectors."""
    desk.fill(40)
    desk.run("UPDATE tickets SET body = repeat('x', 10000000) WHERE id > 1")
    source = desk.source()
    await listing(desk.source(query="SELECT * FROM tickets WHERE id = 1"))  # imports the driver
    status, references = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    references.write_text("5")  # the peak is counted anew (proc(5))
    before = _kilobytes(status, "VmRSS")
    assert len(await listing(source)) == 40
    assert _kilobytes(status, "VmHWM") - before < 150_000
    large = (await everything(source))["2"]
    assert isinstance(large, Unreadable)
    assert large.code == "bad_value"
    assert len(await listing(source)) == 40, "a statement that was left early leaves a usable connection"


def _kilobytes(status: Path, name: str) -> int:
    return int(re.findall(rf"^{name}:\s+(\d+) kB$", status.read_text(), re.MULTILINE)[0])


async def test_a_page_of_postgres_ends_after_so_many_bytes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.database.sql.PAGE_BYTES", 2_500_000)
    desk.fill(9)
    desk.run("UPDATE tickets SET body = repeat('x', 1000000)")
    pages = [[entry for entry in page if isinstance(entry, Listed)] async for page in desk.source().slim()]
    assert [entry.external_id for page in pages for entry in page] == [str(n) for n in range(1, 10)]
    assert max(map(len, pages)) <= 3


@pytest.mark.parametrize("kind", ["timestamptz", "timestamp"])
async def test_polls_continue_behind_rows_whose_time_of_change_python_does_not_have(desk: Desk, kind: str) -> None:
    desk.run(f"ALTER TABLE tickets ALTER edited TYPE {kind}")
    desk.fill(3)
    desk.run("UPDATE tickets SET edited = 'infinity' WHERE id = 1")
    desk.run("UPDATE tickets SET edited = '-infinity' WHERE id = 2")
    source = desk.source(changed="edited", overlap_seconds=0)
    cursor = await source.start()
    desk.run("UPDATE tickets SET body = 'x', edited = clock_timestamp() WHERE id = 3")
    entries, _ = await changed(source, cursor)
    assert set(entries) == {"3"}
    assert set(await listing(source)) == {"1", "2", "3"}


async def test_a_poll_reads_what_changed_and_what_is_marked_as_deleted(desk: Desk) -> None:
    desk.fill(5)
    source = desk.source(changed="edited", deleted="gone_at", revision="edited", overlap_seconds=0)
    cursor = await source.start()
    assert await changed(source, cursor) == ({}, cursor)
    desk.run("UPDATE tickets SET body = 'x', edited = clock_timestamp() WHERE id IN (2, 4)")
    desk.run("UPDATE tickets SET gone_at = now(), edited = clock_timestamp() WHERE id = 5")
    entries, cursor = await changed(source, cursor)
    assert {id_: type(entry) for id_, entry in entries.items()} == {"2": Document, "4": Document, "5": Gone}
    assert (await changed(source, cursor))[0] == {}
    assert set(await listing(source)) == {"1", "2", "3", "4"}


async def test_a_change_that_is_committed_late_is_read_because_of_the_overlap(desk: Desk) -> None:
    """A long transaction's rows had the time of its begin, and were committed after a poll had read later ones."""
    desk.fill(1)
    source = desk.source(changed="edited", overlap_seconds=60)
    cursor = await source.start()
    with psycopg.connect(desk.dsn, options=f"-c search_path={desk.schema}") as slow:
        slow.execute("INSERT INTO tickets VALUES (2, 'slow', 'slow', '{staff}', clock_timestamp())")
        desk.run("INSERT INTO tickets VALUES (3, 'fast', 'fast', '{staff}', clock_timestamp())")
        entries, cursor = await changed(source, cursor)
        assert set(entries) == {"1", "3"}
        slow.commit()
    assert "2" in (await changed(source, cursor))[0]


async def test_many_rows_with_the_same_time_are_all_polled(desk: Desk) -> None:
    source = desk.source(changed="edited")
    cursor = await source.start()
    desk.fill(11)
    desk.run("UPDATE tickets SET edited = '2026-01-01T00:00:00Z'")
    assert len((await changed(source, cursor))[0]) == 11


async def test_a_time_in_the_far_future_hides_no_later_change(desk: Desk) -> None:
    desk.fill(2)
    source = desk.source(changed="edited")
    desk.run("UPDATE tickets SET edited = '9999-01-01T00:00:00Z' WHERE id = 1")
    cursor = await source.start()
    desk.run("UPDATE tickets SET edited = now() + interval '2 days' WHERE id = 2")
    assert set((await changed(source, cursor))[0]) == {"1", "2"}


async def test_groups_are_read_by_a_query(desk: Desk) -> None:
    desk.run("CREATE TABLE people (team text, mail text)")
    people = "('staff', 'Ann@Acme.Example'), ('staff', 'bob'), ('board', NULL), ('a', 'b@c.d')"
    desk.run(f"INSERT INTO people VALUES {people}")
    source = desk.source(members_query="SELECT team AS tag, mail AS principal FROM people")
    assert {g.tag: g.members async for g in source.groups()} == {"a": ["b@c.d"], "staff": ["ann@acme.example", "bob"]}
    assert [group.tag async for group in source.groups(["staff", "none"])] == ["staff"]


async def test_the_source_cannot_write(desk: Desk) -> None:
    desk.fill(1)
    desk.run("CREATE FUNCTION write() RETURNS int LANGUAGE sql AS 'DELETE FROM tickets; SELECT 1'")
    source = desk.source(query="SELECT t.*, write() AS w FROM tickets t", text="{w}")
    with pytest.raises(Misconfigured, match="the query writes"):
        await everything(source)
    assert desk.run("SELECT count(*) FROM tickets") == [(1,)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"table": "absent"}, 'relation "absent" does not exist'),
        ({"text": "{absent}"}, 'column .*absent" does not exist|absent does not exist'),
        ({"query": "SELEKT 1"}, "syntax error"),
        ({"query": "SELECT id, subject, (body::int)::text AS body, team FROM tickets"}, "fails for some row"),
        ({"id": ["edited"]}, "whole numbers, texts or UUIDs"),
        ({"changed": "subject"}, "has to hold times"),
    ],
)
async def test_what_only_an_operator_can_correct_is_one_line_without_content(
    desk: Desk, more: dict[str, Any], message: str
) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'hidden subject', 'hidden body')")
    [problem] = await desk.source(**more).check()
    assert re.search(message, problem.message)
    assert "hidden" not in problem.message
    assert "\n" not in problem.message


async def test_a_database_that_is_away_or_refuses_the_login(desk: Desk) -> None:
    with pytest.raises(Retryable, match="cannot be reached"):
        await listing(desk.source(dsn="postgresql://u:top-secret@127.0.0.1:1/d"))
    for dsn in ("not an address: top-secret", "nothing://top-secret@h/d"):
        with pytest.raises(Misconfigured, match="dsn") as refused:
            desk.source(dsn=dsn)
        assert "top-secret" not in str(refused.value)


async def test_a_locked_table_is_waited_for_only_so_long(desk: Desk) -> None:
    desk.fill(1)
    source = desk.source(timeout_seconds=0.3)
    with psycopg.connect(desk.dsn) as other:
        other.execute(f"LOCK TABLE {desk.schema}.tickets IN ACCESS EXCLUSIVE MODE".encode())
        with pytest.raises(Retryable, match="longer than timeout_seconds"):
            await listing(source)
    assert set(await listing(source)) == {"1"}


async def test_a_connection_that_breaks_is_opened_again(desk: Desk) -> None:
    desk.fill(1)
    source = desk.source()
    assert set(await listing(source)) == {"1"}
    desk.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", desk.schema)
    assert set(await listing(source)) == {"1"}
    with psycopg.connect(desk.dsn) as other:
        other.execute(f"LOCK TABLE {desk.schema}.tickets IN ACCESS EXCLUSIVE MODE".encode())
        reading = asyncio.create_task(listing(source))
        waiting = "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
        await until(lambda: desk.run(waiting, desk.schema))
        desk.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", desk.schema)
        with pytest.raises(Retryable, match=r"closed the connection|does not respond"):
            await reading


async def test_check_names_tags_that_nobody_holds_and_a_source_without_readers(desk: Desk) -> None:
    desk.fill(1)
    assert [p.code for p in await desk.source().check()] == ["nobody"]
    assert [p.code for p in await desk.source(acl=[]).check()] == ["nobody"]
    assert [p.code for p in await desk.source(members={"staff": ["ann"]}).check()] == []
