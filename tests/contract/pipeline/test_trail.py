"""The audit trail on a real Postgres: what is done leaves its record, and what is done to the records is found."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
import pytest_asyncio
from click.testing import Result
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr
from typer.testing import CliRunner

from cli.main import app
from cli.recorded import able_to_record
from deploy.local.stack import Stack
from pipeline import trail as writing
from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.core.identity import document_id
from pipeline.core.trail import Keys, Record, Sealed, seal
from pipeline.ledger import trail as table
from pipeline.ledger.trail import RecordFilter, TrailReport
from pipeline.runtime.settings import Settings, TrailSettings
from pipeline.stores.postgres import Connection
from pipeline.trail import Trail, open_trail
from query.modes.history import History, Piece
from query.modes.material import Material
from query.service import Service
from tests.faults.tcp_proxy import TcpProxy, tcp_proxy
from tests.support.query.http_kit import as_, problem, service_over
from tests.support.query.library import Library, WordEmbedder, document
from tests.support.query.mcp_kit import call, connected, refused

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

KEY = "a key of the tests, and of no others"
KEYS = Keys(KEY)
GUIDE, SECRET = document_id("acme", "wiki", "guide.md"), document_id("acme", "wiki", "secret.md")


@dataclass
class Place:
    library: Library
    client: httpx.AsyncClient
    service: Service

    def settings(self, mode: str) -> Settings:
        return self.library.settings.model_copy(update={"trail": mode})

    async def records(self, **chosen: Any) -> list[Sealed]:
        """The oldest first."""
        async with self.library.pool.connection() as connection:
            return (await table.page(connection, RecordFilter(**chosen), 10_000))[::-1]

    async def written(self, request: str, count: int = 1) -> list[Sealed]:
        """The records of a request, as soon as there are so many."""
        async with asyncio.timeout(60):
            while True:
                records = [sealed for sealed in await self.records() if sealed.record.request == request]
                if len(records) >= count:
                    return records
                await asyncio.sleep(0.05)

    async def of(self, response: httpx.Response) -> Record:
        [sealed] = await self.written(response.headers["request-id"])
        return sealed.record

    async def examined(self, **fields: Any) -> TrailReport:
        async with self.library.pool.connection() as connection:
            return await examined(connection, **fields)


async def examined(connection: Connection, **fields: Any) -> TrailReport:
    arguments: dict[str, Any] = {"retention_days": 0, "since": None, "noted": (), **fields}
    return await table.examine(connection, KEYS, **arguments)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(stack: Stack) -> AsyncIterator[Place]:
    async with Library.create(stack, WordEmbedder()) as created:
        keyed = created.settings.model_copy(update={"trail_keys": TrailSettings(key=SecretStr(KEY))})
        library = replace(created, settings=keyed)
        await library.put(
            document("guide.md", "The reactor is cooled by two pumps."),
            document("secret.md", "The reactor vault opens with 4711.", acl_tags=["board"]),
        )
        await library.execute("INSERT INTO memberships VALUES ('acme', 'wiki', 'ann', '{staff}', now())")
        async with service_over(library) as (client, service):
            yield Place(library, client, service)


# What is done leaves its record


async def test_a_search_is_recorded_with_its_actor_and_the_documents_shown(place: Place) -> None:
    response = await place.client.post("/v1/search", json={"query": "how is the reactor cooled"}, headers=as_("ann"))
    assert [result["document_id"] for result in response.json()["results"]] == [str(GUIDE)]
    record = await place.of(response)
    assert (record.actor, record.tenant, record.credential, record.action) == ("ann", "acme", "development", "search")
    assert (record.documents, record.decision, record.address) == ((GUIDE,), "allowed", "127.0.0.1")
    [(row,)] = await place.library.execute(
        "SELECT to_jsonb(r)::text FROM trail.records r WHERE request = %s", record.request
    )
    assert "cooled" not in row, "no question is kept"


async def test_successful_and_refused_reads_of_a_document_are_recorded(place: Place) -> None:
    shown = await place.of(await place.client.get(f"/v1/documents/{GUIDE}", headers=as_("ann")))
    assert (shown.action, shown.documents, shown.decision) == ("document.read", (GUIDE,), "allowed")
    response = await place.client.get(f"/v1/documents/{SECRET}", headers=as_("ann"))
    assert problem(response) == (404, "not-found")
    tried = await place.of(response)
    assert (tried.action, tried.documents, tried.decision, tried.reason) == (
        "document.read",
        (),
        "refused",
        "not-found",
    )
    assert tried.object == f"document:{SECRET}"
    why = await place.of(await place.client.get(f"/v1/documents/{GUIDE}/why", headers=as_("ann")))
    assert (why.action, why.documents) == ("document.why", (GUIDE,))
    assert {record.record.request for record in await place.records(document=SECRET)} == {tried.request}
    assert {shown.request, why.request} <= {record.record.request for record in await place.records(document=GUIDE)}


TRIED = UUID("0b0f7a52-6d2e-4a55-9c3c-3a4a7c1de0aa")


@pytest.mark.parametrize("spelled", [TRIED.hex, str(TRIED).upper(), TRIED.urn, f"{{{TRIED}}}"])
async def test_a_refused_read_is_recorded_under_the_document_id_however_it_was_spelled(
    place: Place, spelled: str
) -> None:
    response = await place.client.get(f"/v1/documents/{spelled}", headers=as_("ann"))
    assert problem(response) == (404, "not-found")
    assert (await place.of(response)).object == f"document:{TRIED}"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_recorded_with_the_documents_it_was_made_from(place: Place, stream: bool) -> None:
    request = {"question": "how is the reactor cooled", "stream": stream}
    response = await place.client.post("/v1/answers", json=request, headers=as_("ann"))
    assert "two pumps" in response.text
    record = await place.of(response)
    assert (record.action, record.documents, record.decision) == ("answer", (GUIDE,), "allowed")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_recorded_with_the_documents_behind_its_history(
    place: Place, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = type(place.service.answers._modes)
    gather, at, behind = modes.gather, datetime.now(UTC), uuid4()
    said = History("whole", [Piece("The vault opens.", at, at, 9, documents=frozenset({behind}))], 0, 9)

    async def with_history(*arguments: Any) -> Material:
        return replace(await gather(*arguments), history=said)

    monkeypatch.setattr(modes, "gather", with_history)
    request = {"question": "how is the reactor cooled", "stream": stream}
    record = await place.of(await place.client.post("/v1/answers", json=request, headers=as_("ann")))
    assert record.documents == (GUIDE, behind)


async def test_feedback_and_the_review_queue_are_recorded(place: Place) -> None:
    answer = str(uuid4())
    given = {"answer_id": answer, "verdict": "up"}
    record = await place.of(await place.client.post("/v1/feedback", json=given, headers=as_("ann")))
    assert (record.action, record.object) == ("feedback.give", f"answer:{answer}")
    refused_ = await place.of(await place.client.get("/v1/review", headers=as_("ann")))
    assert (refused_.action, refused_.decision, refused_.reason) == ("review.list", "refused", "forbidden")
    operator = {"X-Penstock-Tenant": "acme"}
    listed = await place.of(await place.client.get("/v1/review", headers=operator))
    assert (listed.action, listed.decision) == ("review.list", "allowed")
    resolved = await place.client.post(f"/v1/review/{answer}", json={"verdict": "right"}, headers=operator)
    record = await place.of(resolved)
    assert (record.action, record.object, record.reason) == ("review.resolve", f"answer:{answer}", "not-found")


async def test_invalid_requests_and_unaudited_routes_are_not_recorded(place: Place) -> None:
    before = len(await place.records())
    for path, body in (("/v1/search", {"nothing": 1}), ("/v1/search", "no json")):
        assert (await place.client.post(path, json=body, headers=as_("ann"))).status_code == 422
    for path in ("/v1/me", "/v1/facets", "/", "/livez"):
        assert (await place.client.get(path, headers=as_("ann"))).status_code == 200
    last = await place.client.get(f"/v1/documents/{GUIDE}", headers=as_("ann"))
    await place.of(last)  # written in order
    assert len(await place.records()) == before + 1


async def test_calls_of_mcp_tools_are_recorded(place: Place) -> None:
    address = str(place.client.base_url).rstrip("/")
    since = datetime.now(UTC)
    async with connected(address, headers=as_("mia")) as client:
        assert (await call(client, "search", query="reactor"))["results"] == []
        await refused(client, "fetch", id=str(GUIDE))
        await refused(client, "fetch", id="what I typed")
    async with connected(address, headers=as_("ann")) as client:
        await call(client, "search", query="reactor pumps")
        await call(client, "fetch", id=str(GUIDE))
    await place.of(await place.client.get(f"/v1/documents/{GUIDE}", headers=as_("ann")))
    records = [
        (
            record.record.actor,
            record.record.action,
            record.record.documents,
            record.record.decision,
            record.record.object,
        )
        for record in await place.records(since=since)
    ]
    assert records[:-1] == [
        ("mia", "mcp.search", (), "allowed", ""),
        ("mia", "mcp.fetch", (), "refused", f"document:{GUIDE}"),
        ("mia", "mcp.fetch", (), "refused", ""),
        ("ann", "mcp.search", (GUIDE,), "allowed", ""),
        ("ann", "mcp.fetch", (GUIDE,), "allowed", ""),
    ]


# Commands


@pytest.fixture
def home(place: Place, tmp_path: Path) -> Path:
    place.library.write_home(tmp_path)
    return tmp_path


async def penstock(home: Path, *arguments: str, **env: str) -> Result:
    env = {"PENSTOCK_HOME": str(home), "PENSTOCK_TRAIL_KEY": KEY, **env}
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env=env)


async def run_json(home: Path, *arguments: str, **env: str) -> Any:
    done = await penstock(home, *arguments, "--json", **env)
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


async def test_commands_that_show_or_change_data_are_recorded(place: Place, home: Path) -> None:
    mine = await place.of(await place.client.get(f"/v1/documents/{GUIDE}", headers=as_("ann")))
    since = mine.at + timedelta(microseconds=1)
    await penstock(home, "why", "guide.md", "--tenant", "acme", "--as", "bob", "--tag", "staff")
    await run_json(home, "dead", "list", "--source", "wiki")
    await penstock(home, "dead", "show", "documents:0:7")
    exported = await run_json(home, "export", "ann", "--tenant", "acme")
    await penstock(home, "producer", "remove", "nobody")
    records = [record.record for record in await place.records(since=since)]
    assert {record.credential for record in records} == {"command"}
    assert [(record.action, record.object, record.documents) for record in records if record.action != "export"] == [
        ("document.why", "", (GUIDE,)),
        ("dead.list", "source:wiki", ()),
        ("dead.show", "letter:documents:0:7", ()),
        ("producer.remove", "producer:nobody", ()),
    ]
    assert records[0].access == ("user:bob", "tag:staff")
    [export] = [record for record in records if record.action == "export"]
    assert "ann" not in (export.object, export.actor)
    of_ann = exported["postgres"]["trail.records"]
    assert {row["actor"] for row in of_ann if row["action"] != "export"} == {"ann"}, "an export holds one's trail"
    assert [row["object"] for row in of_ann if row["action"] == "export"] == [export.object], "and who looked at it"
    await penstock(home, "why", "guide.md", "--tenant", "acme", "--tag", "wiki/user:eve", "--tag", "wiki/user:steve")
    await penstock(home, "why", "guide.md", "--tenant", "acme", "--tag", "user:eve")
    as_eve = (await run_json(home, "export", "eve", "--tenant", "acme"))["postgres"]["trail.records"]
    # An export has no order: Postgres returns the rows as they are stored.
    assert sorted(row["access"] for row in as_eve if row["action"] == "document.why") == [
        ["tag:user:eve"],
        ["tag:wiki/user:eve", "tag:wiki/user:steve"],
    ]
    as_steve = (await run_json(home, "export", "steve", "--tenant", "acme"))["postgres"]["trail.records"]
    assert [row["action"] for row in as_steve if row["action"] != "export"] == ["document.why"]
    for _ in range(2):
        as_bob = await run_json(home, "trail", "--person", "bob")
    assert [record["action"] for record in as_bob["records"]] == ["trail.read", "trail.read", "document.why"]
    about_ann = await run_json(home, "trail", "--person", "ann", "--action", "export")
    assert len(about_ann["records"]) == 1, "who had her data exported is found by her name"


async def test_penstock_trail_shows_who_was_shown_a_document_and_is_itself_recorded(place: Place, home: Path) -> None:
    since = datetime.now(UTC).isoformat()
    for _ in range(3):
        await place.of(await place.client.get(f"/v1/documents/{GUIDE}", headers=as_("ann")))
    for name in ((str(GUIDE),), ("guide.md", "--tenant", "acme"), ("guide.md", "--tenant", "acme", "--source", "wiki")):
        output = await run_json(home, "trail", "--document", *name, "--since", since)
        assert [(record["actor"], record["action"]) for record in output["records"]] == [("ann", "document.read")] * 3
        assert output["next"] is None
    first = await run_json(home, "trail", "--document", str(GUIDE), "--since", since, "--limit", "2")
    rest = await run_json(home, "trail", "--document", str(GUIDE), "--since", since, "--after", first["next"])
    numbers = [record["number"] for record in (*first["records"], *rest["records"])]
    assert len(set(numbers)) == 3
    assert numbers == sorted(numbers, reverse=True)
    reads = await place.records(action="trail.read", since=datetime.fromisoformat(since))
    assert {read.record.object for read in reads} == {f"trail-of:{GUIDE}"}
    assert len(reads) == 5
    text = await penstock(home, "trail", "--document", str(GUIDE), "--since", since)
    assert "3 records" in text.stdout
    assert "ann" in text.stdout
    assert (await penstock(home, "trail", "--after", "nonsense")).exit_code == 2
    missing = await penstock(home, "trail", "--document", "no-such.md")
    assert "give the document's id" in str(missing.exception)


async def test_trail_verify_checks_the_records_against_heads_stored_elsewhere(place: Place, home: Path) -> None:
    await penstock(home, "dead", "list", "--json")
    head = await run_json(home, "trail", "head")
    kept = home / "heads.jsonl"
    kept.write_text(f"{json.dumps(head)}\n2026 [info] {json.dumps({**head, 'event': 'trail_head'})}\nsomething else\n")
    fine = await run_json(home, "trail", "verify", "--noted", str(kept))
    assert (fine["intact"], fine["keyed"], fine["noted"], fine["findings"]) == (True, True, 1, [])
    assert fine["records"] > 0
    removed = {**head, "mac": "00" * 32}  # the newest line is of a head that got the number of one that was removed
    nonsense = '{"a":' * 200_000 + '\n{"number": 1e999, "mac": "00"}\n'
    kept.write_text(nonsense + f"{json.dumps(removed)}\n{json.dumps(head)}\n")
    done = await penstock(home, "trail", "verify", "--noted", str(kept))
    assert done.exit_code == 1
    assert f"heads-cut-off: head {head['number']}" in done.stdout
    kept.write_text("nothing")
    assert (await penstock(home, "trail", "verify", "--noted", str(kept))).exit_code == 2
    other = await penstock(home, "trail", "verify", PENSTOCK_TRAIL_KEY="k" * 32, PENSTOCK_TRAIL="off")
    assert "unknown-key" in other.stdout


@pytest.mark.parametrize("mode", ["on", "required"])
async def test_a_command_without_the_trail_key_warns_or_fails_and_adds_no_record(
    place: Place, home: Path, mode: str
) -> None:
    await penstock(home, "dead", "list", "--json")
    before = len(await place.records())
    done = await penstock(home, "dead", "list", "--json", PENSTOCK_TRAIL_KEY="", PENSTOCK_TRAIL=mode)
    assert "PENSTOCK_TRAIL_KEY is not set here" in (done.stderr if mode == "on" else str(done.exception))
    assert (done.exit_code == 0) == (mode == "on")
    assert len(await place.records()) == before
    assert (await place.examined()).findings == []


async def test_a_command_that_runs_the_query_service_without_the_trail_key_records_nothing(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """`penstock ask` and `penstock mcp`."""
    await writing.record_now(place.settings("on"), "before", record("before"))
    without = place.library.settings.model_copy(update={"trail_keys": TrailSettings(key=None)})
    assert (await able_to_record(without)).trail == "off"
    assert "PENSTOCK_TRAIL_KEY is not set here" in capsys.readouterr().err
    with pytest.raises(Misconfigured, match="PENSTOCK_TRAIL_KEY"):
        await able_to_record(without.model_copy(update={"trail": "required"}))
    assert (await able_to_record(place.library.settings)).trail == "on"


# What is done to the records is found


@asynccontextmanager
async def tampering(place: Place) -> AsyncIterator[Connection]:
    """As a superuser, in a transaction that is taken back."""
    async with place.library.pool.connection() as connection:
        await connection.execute("SET LOCAL session_replication_role = replica")  # no trigger
        try:
            yield connection
        finally:
            await connection.rollback()


async def chain(place: Place, count: int = 6) -> Sealed:
    """A process's chain of today that has ended in order; its last record."""
    async with open_trail(place.settings("required"), "test") as trail:
        for number in range(count):
            await trail.write(record(f"n{number}"))
    [last] = [record for record in await place.records(action="test") if record.number == count][-1:]
    return last


def record(actor: str, at: datetime | None = None) -> Record:
    return Record(at or datetime.now(UTC), actor, "token", "test", "acme", documents=(GUIDE,))


TAMPERING = {
    "altered": "UPDATE trail.records SET actor = 'eve' WHERE chain = %(chain)s AND number = 3",
    "removed": "DELETE FROM trail.records WHERE chain = %(chain)s AND number = 3",
    "cut-off": "DELETE FROM trail.records WHERE chain = %(chain)s AND number > 4",
    "chain-removed": "DELETE FROM trail.records WHERE chain = %(chain)s",
    "altered, when two are exchanged": "",
    "altered, when one is put in": "INSERT INTO trail.records SELECT day, chain, 7, at, tenant, 'eve', credential,"
    " access, action, object, documents, decision, reason, address, request, process, key_id, mac FROM trail.records"
    " WHERE chain = %(chain)s AND number = 6",
    "altered, when a document is taken off": "UPDATE trail.records SET documents = '{}' WHERE chain = %(chain)s"
    " AND number = 6",
    "head-removed": "DELETE FROM trail.heads WHERE number = (SELECT min(number) FROM trail.heads)",
    "head-altered": "UPDATE trail.heads SET at = now() WHERE number = (SELECT min(number) FROM trail.heads)",
}


@pytest.mark.parametrize("kind", TAMPERING)
async def test_every_kind_of_tampering_is_detected(place: Place, kind: str) -> None:
    last = await chain(place)
    await chain(place, 1)
    before = await place.examined()
    assert [finding.line for finding in before.findings] == []
    async with tampering(place) as connection:
        statement = TAMPERING[kind]
        if "exchanged" in kind:  # not within one statement: the numbers are a key
            move = "UPDATE trail.records SET number = %s WHERE chain = %s AND number = %s"
            await connection.execute(move, [1003, last.chain, 3])
            await connection.execute(move, [3, last.chain, 4])
            statement = "UPDATE trail.records SET number = 4 WHERE chain = %(chain)s AND number = 1003"
        done = await connection.execute(statement.encode(), {"chain": last.chain})
        assert done.rowcount
        differences = await examined(connection)
    assert differences.findings
    assert kind.partition(",")[0] in {finding.kind for finding in differences.findings}
    if "head" not in kind:
        assert all(str(last.chain) in finding.where for finding in differences.findings)


async def test_a_day_of_records_dropped_before_its_retention_is_detected(place: Place) -> None:
    await chain(place)
    today = datetime.now(UTC).date()
    async with tampering(place) as connection:
        await connection.execute(f"DROP TABLE trail.records_{today:%Y%m%d}".encode())
        differences = await examined(connection, retention_days=400)
    assert ("day-removed", today.isoformat()) in {(finding.kind, finding.where) for finding in differences.findings}


@pytest.mark.parametrize(
    ("name", "age"), [("records_20200101", 100), ("records_of_nobody", 100), ("records_of_nobody", -100)]
)
async def test_a_forged_record_in_a_table_that_is_named_after_another_day_is_detected(
    place: Place, name: str, age: int
) -> None:
    """The check went by the names of the tables, and did not read what `penstock trail` showed."""
    await chain(place)
    moment = datetime.now(UTC) - timedelta(days=age)
    day = moment.date()
    ends = f"FROM ('{day}') TO ('{day + timedelta(1)}')"
    async with tampering(place) as connection:
        await connection.execute(f"CREATE TABLE trail.{name} PARTITION OF trail.records FOR VALUES {ends}".encode())
        await table.add(connection, [seal(Keys(None), record("eve", moment), uuid4(), 1, "test", b"")])
        assert [sealed.record.day for sealed in await table.page(connection, RecordFilter(person="eve"), 10)] == [day]
        differences = await examined(connection, retention_days=400)
    assert "unknown-key" in [finding.kind for finding in differences.findings]


async def test_a_check_of_many_years_does_not_lock_the_tables_of_all_days_at_once(place: Place) -> None:
    """Looking for days that no table is named after locked every table and its indexes. With those of six years
    Postgres had no room for so many locks, and the check failed."""
    async with place.library.pool.connection() as connection:
        assert len(await table.days(connection)) > 30
        cursor = await connection.execute(
            "SELECT count(*) FROM pg_locks l JOIN pg_inherits i ON i.inhrelid = l.relation"
            " WHERE l.pid = pg_backend_pid() AND i.inhparent = 'trail.records'::regclass"
        )
        assert await cursor.fetchone() == (0,)


async def test_a_removal_of_everything_but_the_newest_part_does_not_pass_as_retention(place: Place) -> None:
    """The code of the first head that is left covers one that is gone: its day could be changed without the key."""
    await chain(place)
    last = await chain(place, 2)
    async with tampering(place) as connection:
        await connection.execute("DELETE FROM trail.records WHERE chain <> %s", [last.chain])
        await connection.execute("DELETE FROM trail.heads WHERE number < (SELECT max(number) - 1 FROM trail.heads)")
        first = "UPDATE trail.heads SET day = day - 420 WHERE number = (SELECT min(number) FROM trail.heads)"
        await connection.execute(first.encode())
        differences = await examined(connection, retention_days=400)
    assert [finding.kind for finding in differences.findings] == ["head-removed"]


async def test_trail_records_cannot_be_updated_or_deleted_even_by_the_owner(place: Place) -> None:
    await chain(place, 1)
    for statement in (
        "UPDATE trail.records SET actor = ''",
        "DELETE FROM trail.records",
        "UPDATE trail.heads SET at = now()",
    ):
        with pytest.raises(Exception, match="only ever added to"):
            await place.library.execute(statement)


async def aged(connection: Connection, at: datetime) -> str:
    """Add a record of long ago with its head, and return the name of its day's table. To be rolled back."""
    day: date = at.date()
    name = f"records_{day:%Y%m%d}"
    ends = f"FROM ('{day}') TO ('{day + timedelta(1)}')"
    await connection.execute(f"CREATE TABLE trail.{name} PARTITION OF trail.records FOR VALUES {ends}".encode())
    old = seal(KEYS, record("old", at), uuid4(), 1, "test", b"")
    await table.add(connection, [old])
    await table.add_head(connection, KEYS, at, old)
    return name


async def test_records_removed_by_retention_are_not_reported_and_records_removed_early_are(place: Place) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=401)
    async with place.library.pool.connection() as connection:
        try:
            name = await aged(connection, long_ago)
            assert (await examined(connection, retention_days=400)).findings == []
            dropped = await (await connection.execute("SELECT trail.expire(400, 500)")).fetchall()
            assert dropped == [(name,)]
            assert (await (await connection.execute("SELECT trail.expire(400, 500)")).fetchall()) == []
            assert (await examined(connection, retention_days=400)).findings == [], "retention took it"
            early = await examined(connection, retention_days=0)
            assert [finding.kind for finding in early.findings] == ["day-removed"]
            today = datetime.now(UTC).date()
            await connection.execute("SELECT trail.expire(0.001, 500)")
            assert today in await table.days(connection), "never fewer than thirty days"
        finally:
            await connection.rollback()


@pytest.mark.parametrize("at_midnight", [False, True])
async def test_a_day_that_retention_drops_during_a_check_is_not_reported(
    place: Place, monkeypatch: pytest.MonkeyPatch, at_midnight: bool
) -> None:
    """A check of many records takes hours. at_midnight: the day's retention ends after the check has begun."""
    long_ago = datetime.now(UTC) - timedelta(days=402)
    days = table.days

    async def dropped_after_this(connection: Connection) -> list[date]:
        present = await days(connection)
        await connection.execute("SELECT trail.expire(400, 500)")
        monkeypatch.setattr(table, "datetime", datetime)
        return present

    class Before(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(days=2)

    async with place.library.pool.connection() as connection:
        try:
            await aged(connection, long_ago)
            monkeypatch.setattr(table, "days", dropped_after_this)
            if at_midnight:
                monkeypatch.setattr(table, "datetime", Before)
            assert (await examined(connection, retention_days=400)).findings == []
        finally:
            await connection.rollback()


# Writing


async def waits(place: Place, task: asyncio.Task[Any]) -> None:
    """Until a writer of the trail waits for a lock."""
    async with asyncio.timeout(60):
        while True:
            waiting = await place.library.execute(
                "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE NOT l.granted"
                " AND a.application_name = 'penstock trail' AND a.datname = current_database()"
            )
            if waiting == [(1,)]:
                return
            assert not task.done(), "it was answered before its record was written"
            await asyncio.sleep(0.05)


async def test_with_a_required_trail_no_response_is_sent_before_its_record_is_committed(place: Place) -> None:
    required = replace(place.library, settings=place.settings("required"))
    async with service_over(required) as (client, _):
        async with place.library.pool.connection() as blocking:
            await blocking.execute("LOCK TABLE trail.records IN EXCLUSIVE MODE")
            reading = asyncio.create_task(client.get(f"/v1/documents/{GUIDE}", headers=as_("ann")))
            await waits(place, reading)
            assert not reading.done()
            await blocking.rollback()
        response = await reading
        assert response.status_code == 200
        requests = [record.record.request for record in await place.records(action="document.read")]
        assert response.headers["request-id"] in requests


@pytest.mark.parametrize("change", ["feedback", "resolve"])
async def test_with_a_required_trail_no_change_is_made_before_its_record_is_committed(
    place: Place, change: str
) -> None:
    """Whether the client is still there or not."""
    answer, library = uuid4(), place.library
    await library.execute(
        "INSERT INTO answer_reviews (answer_id, tenant, question, mode, model, support, density, reasons, documents,"
        " chunks) VALUES (%s, 'acme', '', 'passages', '', 1, 1, '{}', %s, '{}')",
        answer,
        [GUIDE],
    )
    results = await place.client.post("/v1/search", json={"query": "reactor pumps"}, headers=as_("ann"))
    chunk = results.json()["results"][0]["chunk_id"]
    async with asyncio.timeout(60):  # else two writers wait below
        while results.headers["request-id"] not in [
            record.record.request for record in await place.records(action="search")
        ]:
            await asyncio.sleep(0.05)
    path, body, headers, look = {
        "feedback": (
            "/v1/feedback",
            {"chunk_id": chunk, "verdict": "up"},
            as_("ann"),
            "SELECT count(*) = 1 FROM answer_feedback WHERE chunk_id = %s",
        ),
        "resolve": (
            f"/v1/review/{answer}",
            {"verdict": "right"},
            {"X-Penstock-Tenant": "acme"},
            "SELECT resolved_at IS NOT NULL FROM answer_reviews WHERE answer_id = %s",
        ),
    }[change]
    about = chunk if change == "feedback" else answer
    async with service_over(replace(library, settings=place.settings("required"))) as (client, _):
        async with library.pool.connection() as blocking:
            await blocking.execute("LOCK TABLE trail.records IN EXCLUSIVE MODE")
            changing = asyncio.create_task(client.post(path, json=body, headers=headers))
            await waits(place, changing)
            assert await library.execute(look, about) == [(False,)]
            changing.cancel()
            await asyncio.wait({changing})
            await blocking.rollback()
        response = await client.post(path, json=body, headers=headers)
        assert response.status_code in (204, 404), "404: it was resolved, and its record is there"
    assert await library.execute(look, about) == [(True,)]
    object_ = f"passage:{chunk}" if change == "feedback" else f"answer:{answer}"
    made = [record.record for record in await place.records() if record.record.object == object_]
    assert ("allowed", "") in {(record.decision, record.reason) for record in made}
    of_last = [record for record in made if record.request == response.headers["request-id"]]
    assert len(of_last) == 1, "once a request"


@pytest.mark.parametrize("mode", ["on", "required"])
async def test_a_client_that_disconnects_before_the_response_is_recorded(
    place: Place, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, since = asyncio.Event(), datetime.now(UTC)

    async def never(*_: Any, **__: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    async with service_over(replace(place.library, settings=place.settings(mode))) as (client, service):
        monkeypatch.setattr(type(service.search), "identify", never)
        reading = asyncio.create_task(client.get(f"/v1/documents/{GUIDE}", headers=as_("ann")))
        await reached.wait()
        reading.cancel()
        await asyncio.wait({reading})
        async with asyncio.timeout(60):
            while not (left := await place.records(action="document.read", since=since)):
                await asyncio.sleep(0.05)
    assert [(entry.record.decision, entry.record.reason, entry.record.object) for entry in left] == [
        ("failed", "left", f"document:{GUIDE}")
    ]


async def test_with_a_required_trail_that_cannot_be_written_requests_are_refused(place: Place) -> None:
    required = replace(place.library, settings=place.settings("required"))
    async with service_over(required) as (client, service):
        await place.library.execute("ALTER TABLE trail.records RENAME TO away")
        try:
            response = await client.get(f"/v1/documents/{GUIDE}", headers=as_("ann"))
            assert problem(response) == (503, "unavailable")
            assert "two pumps" not in response.text
            stream = {"question": "how is the reactor cooled", "stream": True}
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/v1/answers", json=stream, headers=as_("ann"))
            counted = service.metrics.registry.get_sample_value
            assert counted("penstock_query_trail_records_total", {"outcome": "refused"}) == 2
        finally:
            await place.library.execute("ALTER TABLE trail.away RENAME TO records")
        again = await client.get(f"/v1/documents/{GUIDE}", headers=as_("ann"))
        assert again.status_code == 200
    assert (await place.examined()).findings == []


async def test_with_a_required_trail_whose_connection_is_held_requests_are_refused_in_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a frozen server: nothing answers any more, and nothing is closed."""
    monkeypatch.setattr(writing, "ATTEMPT_SECONDS", 0.5)
    given = place.settings("required")
    async with of_postgres(given.postgres.dsn.get_secret_value()) as (proxy, dsn):
        postgres = given.postgres.model_copy(update={"dsn": SecretStr(dsn)})
        actor = uuid4().hex
        refused: list[int] = []
        async with open_trail(
            given.model_copy(update={"postgres": postgres}),
            "held",
            count=lambda outcome, records: refused.append(records) if outcome == "refused" else None,
        ) as trail:
            await trail.write(record(f"{actor}1"))
            proxy.responses_open.clear()
            async with asyncio.timeout(60):
                with pytest.raises(Retryable):
                    await trail.write(record(f"{actor}2"))
            monkeypatch.setattr(writing, "WRITE_SECONDS", 0.1)
            monkeypatch.setattr(writing, "ATTEMPT_SECONDS", 600.0)
            async with asyncio.timeout(60):
                with pytest.raises(Retryable):
                    await trail.write(record(f"{actor}3"))
            assert refused == [1, 1], "also where the attempt goes on"
            proxy.cut()
            proxy.clear_faults()
            monkeypatch.setattr(writing, "WRITE_SECONDS", 60.0)
            async with asyncio.timeout(60):
                while trail.waiting:
                    await asyncio.sleep(0.05)
            await trail.write(record(f"{actor}4"))
    assert {sealed.record.actor for sealed in await place.records()} >= {f"{actor}1", f"{actor}4"}
    assert (await place.examined()).findings == []


@asynccontextmanager
async def of_postgres(dsn: str) -> AsyncIterator[tuple[TcpProxy, str]]:
    """A proxy before Postgres, and the address that leads through it."""
    parts = conninfo_to_dict(dsn)
    async with tcp_proxy(str(parts["host"]), int(str(parts["port"]))) as proxy:
        yield proxy, make_conninfo(dsn, host="127.0.0.1", port=proxy.listening)


async def test_with_an_optional_trail_an_outage_delays_records_and_reports_lost_ones(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MOST_WAITING", 5)
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.05)
    counted: dict[str, int] = {}

    def count(outcome: str, records: int) -> None:
        counted[outcome] = counted.get(outcome, 0) + records

    actor = uuid4().hex
    await place.library.execute("ALTER TABLE trail.records RENAME TO away")
    try:
        async with open_trail(place.settings("on"), "outage", count=count) as trail:
            for n in range(8):
                await trail.write(record(f"{actor}{n}"))
            assert counted == {"lost": 3}
            assert trail.oldest_seconds > 0
            await place.library.execute("ALTER TABLE trail.away RENAME TO records")
            async with asyncio.timeout(60):
                while trail.waiting:
                    await asyncio.sleep(0.05)
            await trail.write(record(f"{actor}9"))
    finally:
        if (await place.library.execute("SELECT to_regclass('trail.away')::text")) != [(None,)]:
            await place.library.execute("ALTER TABLE trail.away RENAME TO records")
    results = [record.record for record in await place.records() if record.process.startswith("outage@")]
    assert [result.actor for result in results if result.action == "test"] == [
        f"{actor}{n}" for n in (0, 1, 2, 3, 4, 9)
    ]
    assert [result.object for result in results if result.action == "trail.lost"] == ["records:3"], (
        "the trail says what it lacks"
    )
    assert (await place.examined()).findings == []


@pytest.mark.parametrize("mode", ["on", "required"])
async def test_a_record_of_very_many_documents_is_written_and_stops_no_other(place: Place, mode: str) -> None:
    """An answer with a long history could show more documents than a record may have, and the table refused it again
    and again: no other record of the process was written."""
    actor, documents = uuid4().hex, tuple(uuid4() for _ in range(100_001))
    async with open_trail(place.settings(mode), "very many") as trail:
        await trail.write(replace(record(actor), documents=documents))
        await trail.write(record(actor))
    stored = [sealed.record for sealed in await place.records(person=actor)]
    assert {id_ for of in stored for id_ in of.documents} == {*documents, GUIDE}
    assert stored[-1].documents == record(actor).documents
    assert (await place.examined()).findings == []


async def test_a_record_that_the_table_refuses_stops_no_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "parts", property(lambda self: (self,)))
    actor = uuid4().hex
    async with open_trail(place.settings("on"), "refused") as trail:
        await trail.write(record(f"{actor}1"))
        await trail.write(replace(record(actor), documents=tuple(uuid4() for _ in range(100_001))))
        await trail.write(record(f"{actor}2"))
        async with asyncio.timeout(60):
            while trail.waiting:
                await asyncio.sleep(0.05)
        await trail.write(record(f"{actor}3"))
    results = [sealed.record for sealed in await place.records() if sealed.process.startswith("refused@")]
    assert [result.actor for result in results if result.action == "test"] == [f"{actor}{n}" for n in (1, 2, 3)]
    assert [result.object for result in results if result.action == "trail.lost"] == ["records:1"]
    assert (await place.examined()).findings == []


async def test_with_the_trail_off_nothing_is_recorded(place: Place) -> None:
    before = len(await place.records())
    async with open_trail(place.settings("off"), "off") as trail:
        await trail.write(record("nobody"))
        trail.offer(record("nobody"))
        assert trail.waiting == 0
    assert len(await place.records()) == before


CHILD = """
import asyncio, sys
from datetime import UTC, datetime
from pipeline.core.trail import Record
from pipeline.runtime.settings import load
from pipeline.trail import open_trail

async def main():
    async with open_trail(load(), "child") as trail:
        n = 0
        while True:
            n += 1
            await trail.write(Record(datetime.now(UTC), sys.argv[1], "token", "crash", object=f"n:{n}"))
            print(n, trail.waiting, flush=True)
            await asyncio.sleep(0.001)

asyncio.run(main())
"""


async def killed(home: Path, mode: str, actor: str) -> tuple[int, int]:
    """Run a process until it is killed, and return what it had counted: its records, and how many of them waited."""
    env = {**os.environ, "PENSTOCK_HOME": str(home), "PENSTOCK_TRAIL_KEY": KEY, "PENSTOCK_TRAIL": mode}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, actor, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=env
    )
    assert child.stdout is not None
    last = b""
    while not last.startswith(b"300 "):
        last = await child.stdout.readline()
        assert last, "the process ended by itself"
    child.send_signal(signal.SIGKILL)
    rest = [line for line in (await child.stdout.read()).splitlines() if len(line.split()) == 2]
    await child.wait()
    n, waiting = (rest[-1] if rest else last).split()
    return int(n), int(waiting)


@pytest.mark.parametrize("mode", ["on", "required"])
async def test_killed_processes_lose_only_records_not_yet_written(place: Place, home: Path, mode: str) -> None:
    """Two at once: neither hinders the other, and both chains hold."""
    actors = [uuid4().hex, uuid4().hex]
    ends = await asyncio.gather(*(killed(home, mode, actor) for actor in actors))
    for actor, (shown, waited) in zip(actors, ends, strict=True):
        numbers = [int(record.record.object.removeprefix("n:")) for record in await place.records(person=actor)]
        assert numbers == list(range(1, len(numbers) + 1)), "nothing is missing in between"
        assert len(numbers) >= shown - (waited if mode == "on" else 0)
    assert (await place.examined()).findings == []


async def test_a_commit_whose_confirmation_was_lost_is_repeated_without_findings(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chain of its own: a record may be there twice, and is there."""
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.05)
    actor, add, failures = uuid4().hex, table.add, iter(range(2))

    async def unheard(connection: Connection, records: Sequence[Sealed]) -> None:
        await add(connection, records)
        if records[0].number > 1 and next(failures, None) is not None:
            raise psycopg.OperationalError("the connection was lost after the commit")

    monkeypatch.setattr(table, "add", unheard)
    async with open_trail(place.settings("on"), "unheard") as trail:
        for n in range(3):
            await trail.write(record(f"{actor}{n}"))
            async with asyncio.timeout(60):
                while trail.waiting:
                    await asyncio.sleep(0.05)
    actors = [record.record.actor for record in await place.records() if record.process.startswith("unheard@")]
    assert {*actors} == {f"{actor}{n}" for n in range(3)}
    assert (await place.examined()).findings == []


@pytest.mark.parametrize("mode", ["on", "required"])
async def test_forged_records_in_a_chains_next_places_do_not_suppress_real_ones(place: Place, mode: str) -> None:
    """The role may add records, and reads in the heads which chains exist."""
    actor = uuid4().hex
    forged = (
        "INSERT INTO trail.records SELECT day, chain, number + n, at, tenant, 'eve', credential, access, action,"
        " object, documents, decision, reason, address, request, process, key_id, mac"
        " FROM trail.records, generate_series(1, 9) n WHERE actor = %s"
    )
    try:
        async with open_trail(place.settings(mode), "victim") as trail:
            await trail.write(record(f"{actor}0"))
            async with asyncio.timeout(60):
                while not await place.records(person=f"{actor}0"):
                    await asyncio.sleep(0.05)
            await place.library.execute(forged, f"{actor}0")
            for n in range(1, 4):
                await trail.write(record(f"{actor}{n}"))
        records = [record for record in await place.records() if record.record.actor.startswith(actor)]
        assert [record.record.actor for record in records] == [f"{actor}{n}" for n in range(4)]
        places = {finding.where.split("chain ")[1].split(" ")[0] for finding in (await place.examined()).findings}
        assert places == {str(records[0].chain)}, "what was forged is found, and nothing else"
    finally:
        async with place.library.pool.connection() as connection:
            await connection.execute("SET LOCAL session_replication_role = replica")
            await connection.execute("DELETE FROM trail.records WHERE actor = 'eve'")


async def test_concurrent_processes_add_heads_that_link_correctly(place: Place) -> None:
    async def one(n: int) -> None:
        await writing.record_now(place.settings("required"), "crowd", record(f"crowd{n}"))

    await asyncio.gather(*(one(n) for n in range(12)))
    assert (await place.examined()).findings == []


async def test_a_missing_daily_partition_is_created(place: Place) -> None:
    async with place.library.pool.connection() as connection:
        tomorrow = datetime.now(UTC).date() + timedelta(days=1)
        try:
            await connection.execute(f"DROP TABLE trail.records_{tomorrow:%Y%m%d}".encode())
            assert tomorrow not in await table.days(connection)
            await table.prepare(connection, tomorrow)
            assert tomorrow in await table.days(connection)
        finally:
            await connection.rollback()


async def test_an_unreachable_required_trail_raises_errors_instead_of_dropping_records(place: Place) -> None:
    broken = place.settings("required").model_copy(
        update={
            "postgres": place.library.settings.postgres.model_copy(
                update={"dsn": SecretStr("postgresql://nobody@127.0.0.1:1/none")}
            )
        }
    )
    trail = Trail(broken, "broken")
    trail.start()
    with pytest.raises(Retryable):
        await trail.write(record("x"))
    await trail.aclose()
    with pytest.raises(PenstockError):
        await writing.record_now(broken, "x", record("x"))
    assert UUID(int=0) not in {record.chain for record in await place.records()}
