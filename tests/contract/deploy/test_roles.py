"""Least privilege on the real Postgres: what each process does works as its role, and nothing more does."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from connectors.runner.membership import MembershipTables
from connectors.runner.reconcile import Differences, Key, StoredDifference
from connectors.runner.rows import Holder, Rows
from connectors.runner.state import State
from deploy.local.stack import Stack
from pipeline.audit.background import BackgroundAudit
from pipeline.audit.refill import IndexGuard
from pipeline.core.conversations import WHOLE_TENANT
from pipeline.core.identity import document_id
from pipeline.core.kafka_log import Mark, Witness
from pipeline.core.model import ChunkParams, Generation
from pipeline.core.trail import Keys, Record
from pipeline.core.webhooks import Secret
from pipeline.diagnosis import ledger, story
from pipeline.diagnosis.health import LEDGER_PARTS
from pipeline.diagnosis.ledger import ledger_report
from pipeline.diagnosis.pipeline_view import pipeline_view
from pipeline.ledger import generations, kafka_marks, webhooks
from pipeline.ledger import trail as trail_table
from pipeline.ledger.personal import ERASED, raise_tenant_floor
from pipeline.maintenance.retention import Retention
from pipeline.runtime.settings import AuditSettings, PostgresSettings, RetentionSettings
from pipeline.stages.dead import DeadLetters
from pipeline.stages.graph import GraphKeeper
from pipeline.stages.hints import Sweeper
from pipeline.stages.identities import Identities
from pipeline.stages.keywords import LateBulks
from pipeline.stages.segments import read_segments
from pipeline.stages.stage import Incoming
from pipeline.stores import graph
from pipeline.stores.graph import create_graph
from pipeline.stores.keywords import Keywords
from pipeline.stores.leader import leading
from pipeline.stores.postgres import (
    CANARY_LOCK,
    EVAL_LOCK,
    GENERATIONS_LOCK,
    RETENTION_LOCK,
    SWEEPER_LOCK,
    WEBHOOKS_LOCK,
    create_chunk_table,
    migrate,
    open_pool,
    unlimited,
)
from pipeline.trail import open_trail, record_now
from query.access.tenant_rows import rows_of
from query.answers import review
from query.answers.answers import Answers
from query.answers.review import Feedback
from query.embedding.embedders import QueryEmbedder
from query.embedding.generations import GenerationFollower
from query.evaluation import golden
from query.evaluation import shadow as shadowed
from query.evaluation.golden import Golden, Judged
from query.evaluation.place import NoKafka, assembled
from query.evaluation.shadow import Shadowed
from query.modes.gather import Modes
from query.modes.material import Question
from query.settings import ChatSettings, RetrievalSettings
from query.telemetry import QueryMetrics
from tests.support.deploy.roles_kit import ROLES, define_roles, logins, run_file
from tests.support.query.library import Library, WordEmbedder, access, deletion, document
from topics.codec import encode
from topics.messages import IdentityChanged

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

INSIDERS = ("penstock_worker", "penstock_connectors", "penstock_query")
OWNERS_ALONE = {
    "schema_migrations",
    "generations",
    "builds",
    "fence",
    "producers",
    "producer_keys",
    "webhooks",
    "tenant_readers",
    "connector_logins",
    "query_use",
    "metadata_keys",
    "membership_floors",
    "person_floors",
    "sketch_rotations",
}
"""Tables that only the owner may write: versions, generations, their builds and rotations, accepted servers, producers,
and the tenants of readers. Usage of budgets is written by functions alone."""


@dataclass
class Place:
    library: Library
    """As an administrator."""
    logins: dict[str, str]

    @asynccontextmanager
    async def as_(self, role: str) -> AsyncIterator[Library]:
        """The same library, through a pool of that role's."""
        mine = PostgresSettings(dsn=self.logins[role])  # type: ignore[arg-type]  # pydantic makes it a secret
        settings = self.library.settings.model_copy(update={"postgres": mine})
        async with open_pool(mine) as pool:
            library = self.library
            own = assembled(settings, pool, library.es, library.generation, library.embedder)
            yield Library.over(own, library.embedder)

    async def refused(self, role: str, statement: str) -> bool:
        async with await psycopg.AsyncConnection.connect(self.logins[role]) as connection:
            try:
                await connection.execute(statement.encode())
            except psycopg.errors.InsufficientPrivilege:
                return True
            finally:
                await connection.rollback()
        return False


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def place(stack: Stack) -> AsyncIterator[Place]:
    async with Library.create(stack, WordEmbedder()) as library:
        admin = library.settings.postgres.dsn.get_secret_value()
        define_roles(admin)
        with logins(admin) as dsns:
            yield Place(library, dsns)


# What each process does


async def test_the_worker_role_permits_all_work_of_the_workers(place: Place) -> None:
    async with place.as_("penstock_worker") as library:
        first = document("roles.md", "The owner makes tables, and the worker fills them.", tenant="worker")
        await library.put(first)
        await library.put(document("roles.md", "The worker fills tables that the owner makes.", tenant="worker"))
        await library.put(access(first, ["board"]))
        other = document("gone.md", "It is deleted soon after.", tenant="worker")
        await library.put(other)
        await library.put(deletion(other))
        dead = DeadLetters(library.pool, NoKafka(), library.metrics)  # type: ignore[arg-type]
        members = encode(
            IdentityChanged(
                tenant="worker", source="wiki", principal="ada", groups=["board"], observed_at=datetime.now(UTC)
            )
        )
        identities = Identities(library.pool, dead)
        record = Incoming("identities.v1", 0, 1, members.key, members.value, members.headers, "live")
        broken = replace(record, offset=2, value=b"{")
        await identities.handle([record, broken])
        sweeper = Sweeper(
            library.pool,
            NoKafka(),
            library.detect._announcer,
            library.metrics,  # type: ignore[arg-type]
            interval_seconds=1,
            again_in_seconds=60,
        )
        await sweeper.sweep()
        await library.execute("UPDATE open_bulks SET next_at = now()")
        await LateBulks(library.pool, Keywords(library.es), library.metrics).check_due()
        await read_segments(library.es, library.generation.keyword_index)
        await library.es.indices.forcemerge(index=library.generation.keyword_index, max_num_segments=1)
        await library.execute(
            f"DELETE FROM {library.generation.chunk_table} WHERE document_id ="
            " (SELECT id FROM documents WHERE tenant = 'worker' AND external_id = 'roles.md')"
        )
        audit = BackgroundAudit(
            library.pool,
            library.es,
            NoKafka(),
            library.metrics,
            AuditSettings(repair=True),  # type: ignore[arg-type]
            second_look_seconds=0,
        )
        await audit.turn()
        guard = IndexGuard(
            library.pool,
            library.es,
            Keywords(library.es),
            NoKafka(),
            library.metrics,  # type: ignore[arg-type]
            confirm_seconds=0,
        )
        await guard.look()
        await library.execute("UPDATE keyword_indexes SET index_uuid = 'another'")
        assert len(await guard.look()) == 1
        await guard.turn()
        await library.execute("UPDATE keyword_indexes SET change = NULL, changed_at = NULL")  # for the other tests
        async with library.pool.connection() as connection:
            new = replace(library.generation, centre=None)  # as the first worker with its model reads it
            await generations.check_model(connection, new, library.embedder)
            partition, mark = ("topic", 0), Mark("log", (Witness(1, 2, 3),))
            assert await kafka_marks.claim(connection, "group", [partition]) == {partition: (1, None)}
            assert await kafka_marks.save(connection, "group", {partition: (1, mark)}) == {partition}
            assert await kafka_marks.claim(connection, "group", [partition]) == {partition: (2, mark)}
        await place.library.execute(
            "INSERT INTO access_sets (tenant, digest, acl_tags, required_tags) VALUES ('worker', '', '{unused}', '{}')"
        )
        await Retention(library.pool, library.metrics, RetentionSettings()).turn()
    assert await place.library.execute("SELECT id FROM access_sets WHERE acl_tags = '{unused}'") == []
    assert await place.library.execute("SELECT groups FROM memberships WHERE tenant = 'worker'") == [(["board"],)]
    assert await place.library.execute("SELECT count(*) FROM dead_letters WHERE stage = 'identities'") == [(1,)]
    assert ("missing",) in await place.library.execute("SELECT kind FROM audit_differences WHERE store = 'vectors'")
    [(want, seq)] = await place.library.execute(
        "SELECT s.want_seq, s.seq FROM index_state s JOIN documents d ON d.id = s.document_id"
        " WHERE d.tenant = 'worker' AND d.external_id = 'roles.md' AND s.store = 'vectors'"
    )
    assert want > seq, "the audit did not ask for a repair"


async def test_the_worker_role_may_insert_into_the_graph_but_not_build_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.graph.GRAPH_FROM_ROWS", 1)
    await place.library.put(document("graph.md", "A row waits outside of the graph.", tenant="graph"))
    await place.library.execute("UPDATE index_state SET seq = want_seq")  # the keeper puts off rows while much waits
    settings = PostgresSettings(dsn=place.logins["penstock_worker"])  # type: ignore[arg-type]

    async def living() -> dict[str, Generation]:
        return {"g1": place.library.generation}

    keeper = GraphKeeper(settings, living, place.library.metrics)
    async with unlimited(settings, "test") as connection:
        assert not await graph.may_build(connection, place.library.generation)
        while await keeper.turn(connection):
            pass
    assert await place.library.execute("SELECT count(*) FROM chunks_g1 WHERE NOT in_graph") == [(0,)]


async def test_the_connectors_role_permits_comparing_documents_with_the_ledger(place: Place) -> None:
    await place.library.put(document("mine.md", "A text that is none of the connectors' business.", tenant="compared"))
    await place.library.execute("INSERT INTO connectors (tenant, source, kind) VALUES ('compared', 'wiki', 'notes')")
    await place.library.execute("INSERT INTO memberships VALUES ('compared', 'wiki', 'ada', '{board}', now())")
    async with open_pool(PostgresSettings(dsn=place.logins["penstock_connectors"])) as pool:  # type: ignore[arg-type]
        rows, tables = Rows(pool, Holder("compared", "wiki")), MembershipTables(pool, Holder("compared", "wiki"))
        [(id_, accepted)] = await rows.ledger("", 10)
        assert (accepted.external_id, await rows.ledger_lacks([id_])) == ("mine.md", [])
        assert [(name, holds) for name, _, holds in await tables.ledger("", 10)] == [("ada", True)]
        assert await tables.ledger_lacks(["ada", "eve"]) == ["eve"]
        assert await rows.ledger_letters([id_]) == {}
        await rows.handled()
        await rows.mark_in_doubt({"mine.md": (accepted.version, "unknown")}, datetime.now(UTC))
        await tables.mark_in_doubt({"ada": datetime.now(UTC)})
        differences = Differences(pool, Holder("compared", "wiki"))
        seen: dict[Key, StoredDifference] = {("document", "mine.md"): StoredDifference(b"x", datetime.now(UTC))}
        await differences.save(seen, [("principal", "ada")])
        await differences.mark_repaired(seen)
        assert (await differences.load()).keys() == seen.keys()
        await State(pool, Holder("compared", "wiki")).save_reconciliation(
            {"found": {}, "documents": 0, "principals": 0}
        )


async def test_the_query_role_permits_all_work_of_the_query_service(place: Place) -> None:
    put = document("pumps.md", "The reactor is cooled by two pumps.", tenant="asked")
    await place.library.put(put)
    async with place.as_("penstock_query") as library:
        caller = await library.caller("asked", "staff")
        response = await library.search.search("reactor pumps", caller)
        assert [r.passage.external_id for r in response.results] == ["pumps.md"]
        answers = Answers(
            Modes(library.search, library.pool, RetrievalSettings(), ChatSettings()), None, library.pool, ChatSettings()
        )
        answer = await answers.whole(Question("How is the reactor cooled by its pumps?"), caller)
        assert [p.result.passage.external_id for p in answer.cited] == ["pumps.md"]
        async with rows_of(library.pool, "asked") as connection:
            voice = review.author_digests([b"a key"], "asked", principal="ada", key=None)
            await review.store_feedback(connection, caller, voice, Feedback("up", answer_id=answer.answer_id))
            await review.record(connection, "asked", "pumps?", answer, answer.cited, private=False)
            assert [entry.up for entry in await review.list_pending(connection, caller)] == [1]
            assert await review.resolve(connection, "asked", answer.answer_id, "right")
            [(of, _)] = await story.find(connection, "asked", ["pumps.md"])
            assert (await story.read(connection, of.id)).events
            one = Golden(
                "asked", "what cools the reactor", (Judged("wiki", "pumps.md", "two pumps", 1),), (), ("staff",)
            )
            await golden.store(connection, one)
            assert (await golden.current(connection, [one]))[1] == 0

        async def nothing_waits() -> dict[str, Any]:
            return {"records": 0, "groups": []}

        following = GenerationFollower(library.pool, QueryEmbedder(WordEmbedder), QueryMetrics())
        await following.refresh()
        async with library.pool.connection() as connection:
            await shadowed.record(connection, "g1", "g2", (0.9, 0.8))
            await shadowed.record(connection, "g1", "g2", None)
            assert await shadowed.shadowed(connection, "g1", "g2") == Shadowed(1, 0.9, 0.8, 1)

        view = await pipeline_view(library.pool, library.es, library.settings, lag=nothing_waits)
        assert view["away"] == []
        away: list[str] = []
        report = await ledger_report(library.settings.postgres, {}, away)
        assert (away, report.keys()) == ([], set(LEDGER_PARTS) - {"skipped"})  # names of sources are not for its role


@pytest.mark.parametrize("role", [*INSIDERS, "penstock_trail_reader"])
async def test_every_role_may_write_the_audit_trail_and_only_its_reader_may_read_it(place: Place, role: str) -> None:
    settings = place.library.settings.model_copy(
        update={"postgres": PostgresSettings(dsn=place.logins[role]), "trail": "required"}  # type: ignore[arg-type]
    )
    acted = Record(datetime.now(UTC), role, "command", "tried")
    async with open_trail(settings, role) as trail:
        await trail.write(acted)
    await record_now(settings, role, acted)
    [(count,)] = await place.library.execute("SELECT count(*) FROM trail.records WHERE actor = %s", role)
    assert count == 2
    if role == "penstock_trail_reader":
        async with await psycopg.AsyncConnection.connect(place.logins[role]) as connection:
            assert len(await trail_table.page(connection, trail_table.RecordFilter(person=role), 10)) == 2
            examined = await trail_table.examine(connection, Keys(), retention_days=0, since=None, noted=())
            assert (examined.findings, examined.records >= 2) == ([], True)
    if role == "penstock_worker":
        async with await psycopg.AsyncConnection.connect(place.logins[role]) as connection:
            assert await (await connection.execute("SELECT trail.expire(400, 500)")).fetchall() == []


HEAD = (
    "INSERT INTO trail.heads SELECT {}, {}, {}, gen_random_uuid(), 1, '\\x00', 'none', {}"
    " FROM (SELECT coalesce(max(number), 0) AS newest FROM trail.heads) h"
)


@pytest.mark.parametrize("role", [*INSIDERS, "penstock_trail_reader"])
@pytest.mark.parametrize(
    "values",
    [
        ("9223372036854775807", "now()", "now()::date", "'\\x00'"),
        ("newest + 2", "now()", "now()::date", "'\\x00'"),
        ("newest + 1", "'infinity'", "now()::date", "'\\x00'"),
        ("newest + 1", "now()", "'infinity'", "'\\x00'"),
        ("newest + 1", "now()", "now()::date", "convert_to(repeat('x', 1000000), 'UTF8')"),
    ],
    ids=["the last number", "a gap", "no time", "no day", "a long code"],
)
async def test_no_login_can_insert_a_trail_head_that_blocks_later_records(
    place: Place, role: str, values: tuple[str, ...]
) -> None:
    settings = place.library.settings.model_copy(update={"trail": "required"})
    await record_now(settings, "before", Record(datetime.now(UTC), "before", "command", "tried"))
    async with await psycopg.AsyncConnection.connect(place.logins[role]) as connection:
        with pytest.raises(psycopg.errors.IntegrityError):
            await connection.execute(HEAD.format(*values).encode())
        await connection.rollback()
    await record_now(settings, "after", Record(datetime.now(UTC), "after", "command", "tried"))


RECORD = (
    "INSERT INTO trail.records (day, chain, number, at, tenant, actor, credential, access, action, object, documents,"
    " decision, reason, address, request, process, key_id, mac) VALUES ((now() AT TIME ZONE 'UTC')::date,"
    " gen_random_uuid(), {number}, now(), '', 'eve', '', {access}, '', '', {documents}, '', {reason}, '', '', '', '',"
    " {mac})"
)


@pytest.mark.parametrize("role", [*INSIDERS, "penstock_trail_reader"])
@pytest.mark.parametrize(
    "field",
    [
        {"access": "ARRAY[NULL]::text[]"},
        {"access": "ARRAY[ARRAY['a']]"},
        {"access": "array_fill('a'::text, ARRAY[1001])"},
        {"access": "ARRAY[repeat('a', 2001)]"},
        {"documents": "ARRAY[NULL]::uuid[]"},
        {"documents": "array_fill(gen_random_uuid(), ARRAY[100001])"},
        {"reason": "repeat('a', 2001)"},
        {"mac": "decode(repeat('00', 65), 'hex')"},
        {"number": "0"},
    ],
    ids=str,
)
async def test_no_login_can_add_a_record_that_makes_the_audit_trail_unreadable(
    place: Place, role: str, field: dict[str, str]
) -> None:
    """One record with NULL among the names ended `penstock trail`, `trail verify` and `export` with an error, for as
    long as the trail is kept."""
    row = {"number": "1", "access": "'{}'", "documents": "'{}'", "reason": "''", "mac": "''", **field}
    async with await psycopg.AsyncConnection.connect(place.logins[role]) as connection:
        with pytest.raises(psycopg.errors.CheckViolation):
            await connection.execute(RECORD.format(**row).encode())


@pytest.mark.parametrize(
    "field",
    [
        {"activities": '{"sweep": {"state": "idle", "succeeded_at": "yesterday"}}'},
        {"activities": '{"sweep": {"state": "idle", "succeeded_at": "2026-02-30T00:00:00+00:00"}}'},
        {"activities": '{"sweep": {"state": "idle", "succeeded_at": "2026-02-01T00:00:00"}}'},
        {"activities": '{"sweep": {"state": "idle", "since": "9999-12-31T23:59:59-14:00"}}'},
        {"activities": '{"sweep": {"state": ["idle"]}}'},
        {"activities": '{"sweep": "idle"}'},
        {"activities": "[]"},
        {"activities": "null"},
        {"counts": "[]"},
        {"counts": '{"upserts": "many"}'},
        {"problems": '["many"]'},
        {"guard": '"many"'},
        {"guard": '{"missing": 3, "published": 4, "at": "yesterday"}'},
        {"reconciliation": "{}"},
        {"seen_at": "infinity"},
        {"loaded_at": "infinity"},
    ],
    ids=str,
)
async def test_no_connector_can_report_what_makes_the_state_of_all_others_unreadable(
    place: Place, field: dict[str, str]
) -> None:
    """A time that is none left all sources without their age, and the backlog without its metrics, so that no alert
    was raised; `penstock status` and the page ended with an error."""
    [(name, value)] = field.items()
    async with await psycopg.AsyncConnection.connect(place.logins["penstock_connectors"]) as connection:
        with pytest.raises(psycopg.errors.CheckViolation):
            await connection.execute(
                f"INSERT INTO connectors (tenant, source, kind, {name}) VALUES ('acme', 'eve', 'notes', %s)".encode(),
                [value],
            )


REVIEW = {
    "answer_id": "gen_random_uuid()",
    "tenant": "'acme'",
    "question": "''",
    "mode": "''",
    "model": "''",
    "support": "1",
    "density": "1",
    "reasons": "'{}'",
    "documents": "'{}'",
    "chunks": "'{}'",
}


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("answer_reviews", REVIEW | {"asked_at": "'infinity'"}),
        ("answer_reviews", REVIEW | {"resolved_at": "'-infinity'", "resolved_as": "'right'"}),
        ("answer_reviews", REVIEW | {"support": "'NaN'"}),
        ("answer_reviews", REVIEW | {"reasons": "ARRAY[NULL]::text[]"}),
        ("answer_reviews", REVIEW | {"documents": "ARRAY[[gen_random_uuid()]]"}),
        ("answer_reviews", REVIEW | {"answer": "''", "unsupported": "ARRAY[NULL]::text[]"}),
        (
            "answer_feedback",
            {
                "tenant": "'acme'",
                "giver": "'\\x00'",
                "subject": "'\\x00'",
                "answer_id": "gen_random_uuid()",
                "verdict": "'up'",
                "given_at": "now() + interval '2 days'",
            },
        ),
        (
            "answer_provenance",
            {"tenant": "'acme'", "answer_id": "gen_random_uuid()", "documents": "ARRAY[NULL]::uuid[]"},
        ),
        (
            "answer_provenance",
            {"tenant": "'acme'", "answer_id": "gen_random_uuid()", "documents": "'{}'", "made_at": "'infinity'"},
        ),
        (
            "eval_queries",
            {
                "id": "gen_random_uuid()",
                "tenant": "'acme'",
                "text": "''",
                "principals": "ARRAY[NULL]::text[]",
                "tags": "'{}'",
            },
        ),
        (
            "eval_runs",
            {
                "started_at": "now()",
                "generation": "''",
                "slice": "''",
                "measure": "''",
                "value": "'NaN'",
                "queries": "1",
            },
        ),
    ],
    ids=str,
)
async def test_no_query_service_can_write_rows_that_others_cannot_read_or_erase(
    place: Place, table: str, row: dict[str, str]
) -> None:
    """`penstock export` and the copies of a conversation's answers read them, and retention erases them by age."""
    async with await psycopg.AsyncConnection.connect(place.logins["penstock_query"]) as connection:
        await connection.execute("SELECT set_config('penstock.tenant', 'acme', true)")
        with pytest.raises(psycopg.errors.CheckViolation):
            await connection.execute(
                f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(row.values())})".encode()
            )


async def test_rows_with_times_that_python_cannot_express_are_readable(place: Place) -> None:
    async with place.as_("penstock_worker") as worker, worker.pool.connection() as connection:
        times = "('infinity'), ('-infinity'), ('4000-01-01 BC'), ('20000-01-01'), ('2026-01-02Z')"
        for kind in ("timestamptz", "date"):
            rows = await connection.execute(f"SELECT at::{kind} FROM (VALUES {times}) v (at)".encode())
            assert [row[0].year for row in await rows.fetchall()] == [9999, 1, 1, 9999, 2026]


@pytest.mark.parametrize("mode", ["on", "required"])
@pytest.mark.parametrize("held", ["the next head", "the next record"])
async def test_an_open_transaction_of_another_login_blocks_no_trail_record(place: Place, mode: str, held: str) -> None:
    """With `required` every search waited for it and was refused; with `on` records were lost in the end."""
    settings = place.library.settings.model_copy(update={"trail": mode})
    actor = uuid.uuid4().hex

    def acted(n: int) -> Record:
        return Record(datetime.now(UTC), f"{actor}{n}", "command", "tried")

    async def written() -> list[str]:
        rows = await place.library.execute(
            "SELECT actor FROM trail.records WHERE starts_with(actor, %s) ORDER BY at", actor
        )
        return [name.removeprefix(actor) for (name,) in rows]

    async with await psycopg.AsyncConnection.connect(place.logins["penstock_connectors"]) as other:
        async with open_trail(settings, "held") as trail, asyncio.timeout(20):
            if held == "the next record":
                await trail.write(acted(1))
                while await written() != ["1"]:
                    await asyncio.sleep(0.05)
                await other.execute(
                    "INSERT INTO trail.records SELECT day, chain, count + 1, at, '', 'eve', '', '{}', '', '', '{}', '',"
                    " '', '', '', '', '', '' FROM trail.heads ORDER BY number DESC LIMIT 1"
                )
            else:
                await other.execute(HEAD.format("newest + 1", "now()", "now()::date", "'\\x00'").encode())
                await trail.write(acted(1))
            await trail.write(acted(2))
            while await written() != ["1", "2"]:
                await asyncio.sleep(0.05)
            await record_now(settings, "held", acted(3))
            assert await written() == ["1", "2", "3"]
        await other.rollback()


async def test_advisory_locks_of_another_login_do_not_block_the_audit_trail(place: Place) -> None:
    settings = place.library.settings.model_copy(update={"trail": "required"})
    async with await psycopg.AsyncConnection.connect(place.logins["penstock_operator"]) as reader:
        await reader.execute("SELECT pg_advisory_lock(7300039), pg_advisory_lock(7300040)")
        await record_now(settings, "locked", Record(datetime.now(UTC), "locked", "command", "tried"))
        async with await psycopg.AsyncConnection.connect(place.logins["penstock_worker"]) as writer:
            await writer.execute("SET statement_timeout = '20s'")
            await writer.execute("SELECT trail.prepare()")


async def test_a_login_that_prepares_the_audit_trail_and_stays_open_blocks_no_record_for_a_month(place: Place) -> None:
    settings = place.library.settings.model_copy(update={"trail": "required"})
    async with await psycopg.AsyncConnection.connect(place.logins["penstock_query"]) as other:
        await other.execute("SELECT trail.prepare()")
        async with await psycopg.AsyncConnection.connect(place.logins["penstock_worker"]) as writer:
            await writer.execute("SET lock_timeout = '2s'")
            await writer.execute("SELECT trail.prepare()")
        await record_now(settings, "prepared", Record(datetime.now(UTC), "prepared", "command", "tried"))
    [(last_day,)] = await place.library.execute(
        "SELECT max(relname) FROM pg_class WHERE relname LIKE 'records_2%%' AND relkind = 'r'"
    )
    assert str(last_day) == f"records_{datetime.now(UTC) + timedelta(days=30):%Y%m%d}"


@pytest.mark.parametrize("role", ["penstock_query", "penstock_connectors", "penstock_analysis"])
async def test_a_query_service_or_connector_that_was_taken_over_cannot_hold_the_locks_of_detect(
    place: Place, role: str
) -> None:
    """A process that held the lock of generations would keep all tenants' access as it was."""
    for function in ("lock", "xact_lock", "lock_shared", "xact_lock_shared"):
        assert await place.refused(role, f"SELECT pg_advisory_{function}({GENERATIONS_LOCK})"), function
        assert await place.refused(role, f"SELECT pg_try_advisory_{function}({GENERATIONS_LOCK})"), function
    for lock in (GENERATIONS_LOCK, SWEEPER_LOCK, RETENTION_LOCK, WEBHOOKS_LOCK):
        assert await place.refused(role, f"SELECT lead_query_service({lock})"), lock
    assert not await place.refused("penstock_worker", f"SELECT pg_advisory_xact_lock_shared({GENERATIONS_LOCK})")


REACHES_OTHERS = (
    "UPDATE connectors SET epoch = epoch + 1, paused = true WHERE tenant = 'theirs'",
    "DELETE FROM connectors WHERE tenant = 'theirs'",
    "UPDATE connectors SET tenant = 'theirs', source = 'moved' WHERE tenant = 'mine'",
    "INSERT INTO connectors (tenant, source, kind) VALUES ('theirs', 'more', 'notes')",
    "INSERT INTO connector_asks (tenant, source, action) VALUES ('theirs', 'wiki', 'full')",
    "UPDATE connector_memory SET value = '1' WHERE tenant = 'theirs'",
    "SELECT FROM connectors WHERE tenant = 'theirs'",
    "SELECT FROM connector_memory WHERE tenant = 'theirs'",
    "SELECT FROM ledger_documents('theirs', 'wiki', '00000000-0000-0000-0000-000000000000', 10)",
    "SELECT FROM ledger_members('theirs', 'wiki', '', 10)",
    "SELECT lead_connector('theirs', 'wiki')",
    "SELECT lock_uploads('theirs', 'wiki')",
    "SELECT FROM lead_webhooks() leads WHERE leads",
    "SELECT pg_try_advisory_lock(7300008, hashtext('theirs/wiki'))",
    "SELECT pg_advisory_xact_lock(7302, hashtext('instance theirs/wiki'))",
)


async def test_a_connectors_login_that_is_bound_to_tenants_reaches_nothing_of_another_tenant(place: Place) -> None:
    """A connectors process that was taken over could end the leases of all others, and read what they remember."""
    dsn = place.logins["penstock_connectors"]
    login = conninfo_to_dict(dsn)["user"]
    for tenant in ("mine", "theirs"):
        await place.library.put(document("1.md", "A text.", tenant=tenant))
        await place.library.execute("INSERT INTO memberships VALUES (%s, 'wiki', 'ada', '{board}', now())", tenant)
        await place.library.execute(
            "INSERT INTO connectors (tenant, source, kind) VALUES (%s, 'wiki', 'notes')", tenant
        )
        await place.library.execute("INSERT INTO connector_memory VALUES (%s, 'wiki', 'token', '0')", tenant)
    [(theirs,)] = await place.library.execute("SELECT id FROM documents WHERE tenant = 'theirs'")

    async def reaches(statement: str) -> bool:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            try:
                return (await connection.execute(statement.encode())).rowcount > 0
            except psycopg.errors.InsufficientPrivilege:
                return False
            finally:
                await connection.rollback()

    lacks = f"SELECT FROM ledger_lacks(ARRAY['{theirs}'::uuid])"
    assert not await reaches(lacks)
    # Whether the ledger has a version of another tenant's document, recorded as one of its own.
    await place.library.execute(
        "INSERT INTO connector_publications (tenant, source, document_id, kind, observed_at)"
        " VALUES ('mine', 'wiki', %s, 'content', '-infinity')",
        theirs,
    )
    applied = "SELECT FROM forget_applied_publications('mine', 'wiki', 10) f WHERE f > 0"
    assert await reaches(applied)
    await place.library.execute("SELECT bind_connectors(%s, 'mine', 'more')", login)
    try:
        assert [statement for statement in REACHES_OTHERS if await reaches(statement)] == []
        assert await reaches(lacks)
        assert not await reaches(applied)
        mine = [statement.replace("theirs", "mine") for statement in REACHES_OTHERS]
        assert [statement for statement in mine if not await reaches(statement)] == mine[-3:]
    finally:
        await place.library.execute("SELECT unbind_connectors(%s)", login)
    assert [statement for statement in REACHES_OTHERS if not await reaches(statement)] == list(REACHES_OTHERS[-2:])
    for refused in ("penstock_owner", "penstock_worker", "penstock_operator", "penstock_analysis", "penstock_query"):
        with pytest.raises(psycopg.errors.RaiseException, match="of every tenant"):
            await place.library.execute(
                "SELECT bind_connectors(%s, 'mine')", conninfo_to_dict(place.logins[refused])["user"]
            )


async def test_every_table_of_connectors_is_divided_for_their_logins(place: Place) -> None:
    rows = await place.library.execute(
        "SELECT c.relname, c.relrowsecurity AND 2 = ("
        "   SELECT count(*) FROM pg_policy WHERE polrelid = c.oid AND polname IN ('rows_of_a_login', 'planned_rows'))"
        " FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'"
        " AND has_any_column_privilege('penstock_connectors', c.oid, 'SELECT, INSERT, UPDATE')"
    )
    assert {name for name, is_divided in rows if not is_divided} == {"schema_migrations", "fence", "handled"}


@pytest.mark.parametrize("role", ["penstock_query", "penstock_connectors", "penstock_operator"])
async def test_revocations_are_accepted_while_a_login_holds_every_lock_that_a_managed_postgres_leaves_to_it(
    place: Place, role: str
) -> None:
    """Without a superuser nobody can revoke advisory locks from all logins."""
    function = "pg_advisory_lock(bigint)"
    shared = document(f"{role}.md", "The board may read this until it is revoked.", tenant="held")
    await place.library.put(shared)
    for mode in ("ACCESS SHARE", "ROW SHARE", "ROW EXCLUSIVE", "SHARE", "EXCLUSIVE", "ACCESS EXCLUSIVE"):
        assert await place.refused(role, f"LOCK TABLE generations_lock IN {mode} MODE"), mode
    await place.library.execute(f"GRANT EXECUTE ON FUNCTION {function} TO PUBLIC")
    try:
        async with await psycopg.AsyncConnection.connect(place.logins[role]) as other:
            await other.execute("SELECT pg_advisory_lock(lock) FROM generate_series(7300000, 7300050) lock")
            async with place.as_("penstock_worker") as library, asyncio.timeout(20):
                await library.put(access(shared, ["nobody"]))
    finally:
        await place.library.execute(f"REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC")
    assert await place.library.execute(
        "SELECT a.acl_tags FROM documents d JOIN access_sets a ON a.id = d.access_id WHERE d.external_id = %s",
        f"{role}.md",
    ) == [(["wiki/nobody"],)]


async def test_a_change_of_generations_waits_for_workers_of_this_version_and_the_one_before(place: Place) -> None:
    owner = place.library.settings.postgres.dsn.get_secret_value()
    worker = place.logins["penstock_worker"]
    for share in ("LOCK TABLE generations_lock IN ROW EXCLUSIVE MODE", "SELECT pg_advisory_xact_lock_shared(7300002)"):
        async with (
            await psycopg.AsyncConnection.connect(worker) as first,
            await psycopg.AsyncConnection.connect(worker) as second,
            await psycopg.AsyncConnection.connect(owner) as changing,
        ):
            await first.execute(share.encode())
            await second.execute(share.encode())  # they do not wait for each other
            await changing.execute("SET LOCAL lock_timeout = '100ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                await generations.lock_for_change(changing)
    async with (
        await psycopg.AsyncConnection.connect(owner) as changing,
        await psycopg.AsyncConnection.connect(worker) as first,
    ):
        await generations.lock_for_change(changing)
        await first.execute("SET LOCAL lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await generations.keep_unchanged(first)


async def test_no_worker_can_lock_the_list_of_generations_against_others_or_fill_its_table(place: Place) -> None:
    assert await place.refused("penstock_worker", "LOCK TABLE generations_lock IN EXCLUSIVE MODE")
    async with await psycopg.AsyncConnection.connect(place.logins["penstock_worker"]) as worker:
        with pytest.raises(psycopg.errors.CheckViolation):
            await worker.execute("INSERT INTO generations_lock DEFAULT VALUES")


@pytest.mark.parametrize(
    ("role", "lock"),
    [("penstock_query", EVAL_LOCK), ("penstock_query", CANARY_LOCK), ("penstock_connectors", WEBHOOKS_LOCK)],
)
async def test_one_process_of_each_login_becomes_its_leader_until_it_resigns(
    place: Place, role: str, lock: int
) -> None:
    async with (
        await psycopg.AsyncConnection.connect(place.logins[role]) as first,
        await psycopg.AsyncConnection.connect(place.logins[role]) as second,
    ):
        async with leading(first, lock) as leads:
            assert leads
            async with leading(second, lock) as leads_too:
                assert not leads_too
        async with leading(second, lock) as leads_then:
            assert leads_then


async def test_a_generation_added_by_the_owner_has_all_grants_at_once(stack: Stack) -> None:
    admin = json.loads((stack.home / "endpoints.json").read_text())["postgres"]["dsn"]
    name = f"r{uuid.uuid4().hex[:10]}"
    database = make_conninfo(**{**conninfo_to_dict(admin), "dbname": name})
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0'.encode())
    try:
        run_file(database, "1-roles.sql")
        with logins(database) as dsns:
            await _owner(dsns)
    finally:
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


async def _owner(dsns: dict[str, str]) -> None:
    owner = dsns["penstock_owner"]
    assert await migrate(PostgresSettings(dsn=owner))  # type: ignore[arg-type]
    async with await psycopg.AsyncConnection.connect(owner, autocommit=True) as connection:
        first = await generations.ensure_first(connection, WordEmbedder(), ChunkParams(200, 80, 254), index_prefix="")
        for _ in range(2):  # an upgrade runs it again
            run_file(owner, "2-grants.sql")
        later = replace(first, name="g2", state="building", chunk_table="chunks_g2")
        async with connection.transaction():
            await generations.add(connection, later)
            await create_chunk_table(connection, later)
            await create_graph(connection, later)
        cursor = await connection.execute(
            "SELECT t.name, r.name, array_agg(v.name ORDER BY v.name)"
            " FILTER (WHERE has_table_privilege(r.name, t.name, v.name))"
            " FROM unnest(ARRAY['chunks_g1', 'chunks_g2']) t (name), unnest(%s::text[]) r (name),"
            " unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) v (name) GROUP BY 1, 2",
            [[*INSIDERS, "penstock_analysis"]],
        )
        held = {(table, role): may for table, role, may in await cursor.fetchall()}
    for table in ("chunks_g1", "chunks_g2"):
        assert held[table, "penstock_worker"] == ["DELETE", "INSERT", "SELECT", "UPDATE"]
        assert held[table, "penstock_query"] == ["SELECT"]
        assert held[table, "penstock_analysis"] == ["SELECT"]
        assert held[table, "penstock_connectors"] is None


async def test_the_connectors_role_permits_to_send_webhooks_and_others_to_see_their_state(place: Place) -> None:
    secret = Secret.new("k" * 32, b"s" * 16)
    async with place.library.pool.connection() as connection:
        await webhooks.add(connection, "shop", "acme", [], "https://shop.example.com", secret, private=False)
    id_ = document_id("acme", "wiki", "a")
    async with place.as_("penstock_connectors") as library, library.pool.connection() as connection:
        event = webhooks.Event("shop", "acme", id_, "searchable", "1", "{}")
        await webhooks.enqueue(connection, [event, replace(event, event_id="2")])
        [due] = await webhooks.due(connection, "shop", 8)
        failure = webhooks.Failure(due.id, "it answered 500", 60.0, parks=True)
        await webhooks.record(connection, "shop", [], [failure], wait_seconds=1.0, pause="it is gone")
        assert (await webhooks.waiting(connection))["shop"][:2] == (1, 1)
        assert await webhooks.expire(connection, 86_400, 100) == 0
        [endpoint] = await webhooks.endpoints(connection)
        assert endpoint.reason == "it is gone"
    for role in ("penstock_worker", "penstock_query"):
        async with place.as_(role) as library, library.pool.connection() as connection:
            assert await ledger._webhooks(connection) == [
                {
                    "webhook": "shop",
                    "tenant": "acme",
                    "state": "paused",
                    "reason": "it is gone",
                    "waiting": 1,
                    "parked": 1,
                }
            ]
    async with place.library.pool.connection() as connection:
        await webhooks.remove(connection, "shop")


# What none of them may


async def _writable(library: Library, role: str) -> set[str]:
    rows = await library.execute(
        "SELECT c.relname FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')"
        " AND has_table_privilege(%s, c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE')",
        role,
    )
    return {name for (name,) in rows}


async def test_every_table_is_writable_by_exactly_one_role(place: Place) -> None:
    """A migration that adds a table says whose it is."""
    tables = {
        name
        for (name,) in await place.library.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
        )
    }
    written = {role: await _writable(place.library, role) for role in (*INSIDERS, "penstock_analysis")}
    assert set.union(*written.values()) == tables - OWNERS_ALONE
    assert sum(map(len, written.values())) == len(tables - OWNERS_ALONE)
    assert {t.partition("_")[0] for t in written["penstock_connectors"]} == {
        "connector",
        "connectors",
        "uploads",
        "webhook",
    }
    query = {"answer", "conflict", "eval", "shadow", "standing"}
    assert {t.partition("_")[0] for t in written["penstock_query"]} == query
    assert written["penstock_analysis"] == {"conflicts", "conflict_examined", "standing_changes"}


async def test_the_query_service_sees_of_its_transactions_tenant_alone_whether_somebody_was_forgotten(
    place: Place,
) -> None:
    async with await psycopg.AsyncConnection.connect(place.logins["penstock_operator"]) as connection:
        await raise_tenant_floor(connection, "acme")
        await raise_tenant_floor(connection, "acme")  # a second run
    assert await place.refused("penstock_query", "SELECT FROM person_floors")
    async with await psycopg.AsyncConnection.connect(place.logins["penstock_query"]) as connection:
        for tenant, since, forgotten in (
            ("acme", "-1 hour", True),
            ("acme", "1 hour", False),
            ("globex", "-1 hour", False),
        ):
            await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [tenant])
            cursor = await connection.execute(
                "SELECT is_forgotten_since(ARRAY[%s::bytea], now() + %s::interval)", [WHOLE_TENANT, since]
            )
            assert await cursor.fetchall() == [(forgotten,)], (tenant, since)


async def test_the_operators_login_erases_from_documents_and_groups_and_writes_nothing_into_them(place: Place) -> None:
    await place.library.put(
        document(
            "salaries.md", "The salaries of all.", acl_tags=["board"], metadata={"year": 2026, "by": ["ann", "bob"]}
        ),
        document("holidays.md", "The holidays of all.", acl_tags=["everyone"]),
    )
    await place.library.execute(
        "INSERT INTO connector_groups VALUES ('acme', 'wiki', 'board', '{ann,bob}', '{}', now())"
    )
    for statement in (
        "UPDATE documents SET access_id = (SELECT max(id) FROM access_sets)",
        "UPDATE documents SET title = 'Other'",
        "UPDATE documents SET source_url = 'https://another.example.com'",
        "UPDATE documents SET external_id = 'other.md'",
        "UPDATE documents SET keys = '{year=2027}'",
        "UPDATE document_bodies SET text = 'Other'",
        """UPDATE document_bodies SET metadata = '{"year": 2027}'""",
        "UPDATE connector_groups SET members = members || '{eve}'",
        "UPDATE connector_groups SET tag = 'all'",
    ):
        assert await place.refused("penstock_operator", statement), statement
    async with await psycopg.AsyncConnection.connect(place.logins["penstock_operator"]) as connection:
        for erasing in (
            f"UPDATE documents SET {ERASED}",
            """UPDATE document_bodies SET text = '', metadata = '{"by": ["bob"]}' WHERE metadata <> '{}'""",
            "UPDATE connector_groups SET members = array_remove(members, 'ann')",
        ):
            assert (await connection.execute(erasing.encode())).rowcount > 0
        await connection.rollback()


async def test_the_operators_login_erases_from_answers_and_conversations_and_writes_nothing_into_them(
    place: Place,
) -> None:
    await place.library.accept(document("a.md", "A"))
    for statement in (
        "INSERT INTO standing_questions (tenant, id, principal, question, request, sentences, generation)"
        """ VALUES ('acme', gen_random_uuid(), 'ann', 'Q', '{}', '[{"text": "A", "cites": [1]}]', 'g1')""",
        "INSERT INTO superseded (document_id, version, observed_at, content_hash, meta_hash, author, metadata, text)"
        """ SELECT id, 1, now(), '', '', 'ann', '{"by": ["ann", "bob"]}', 'A' FROM documents LIMIT 1""",
        "INSERT INTO conversation_pairs (tenant, member, digest, asked_at, tokens, question, answer)"
        " VALUES ('acme', 'ann', 'd', now(), 1, 'Q', 'A')",
        "INSERT INTO conversation_chunks (tenant, member, digest, position, first_at, last_at, tokens, text)"
        " VALUES ('acme', 'ann', 'd', 0, now(), now(), 1, 'A')",
    ):
        await place.library.execute(statement)
    for statement in (
        """UPDATE standing_questions SET sentences = '[{"text": "B", "cites": [1]}]'""",
        "UPDATE standing_questions SET sentences = '{}'",
        "UPDATE superseded SET author = 'eve'",
        """UPDATE superseded SET metadata = '{"by": ["eve"]}'""",
        "UPDATE conversation_pairs SET answer = 'B'",
        "UPDATE conversation_chunks SET text = 'B'",
    ):
        assert await place.refused("penstock_operator", statement), statement
    async with await psycopg.AsyncConnection.connect(place.logins["penstock_operator"]) as connection:
        for erasing in (
            "UPDATE standing_questions SET sentences = '[]'",
            """UPDATE superseded SET author = NULL, metadata = '{"by": ["bob"]}'""",
            "UPDATE conversation_pairs SET asked_at = now()",
            "UPDATE conversation_chunks SET position = 1, first_at = now(), last_at = now()",
        ):
            assert (await connection.execute(erasing.encode())).rowcount > 0
        await connection.rollback()


@pytest.mark.parametrize(
    ("role", "statement"),
    [
        ("penstock_operator", "INSERT INTO memberships VALUES ('t', 's', 'me', '{board}', now())"),
        ("penstock_operator", "UPDATE memberships SET groups = '{board}'"),
        ("penstock_operator", "UPDATE access_sets SET acl_tags = '{everyone}'"),
        ("penstock_operator", "UPDATE documents SET deleted_at = NULL"),
        ("penstock_operator", "UPDATE chunks_g1 SET text = 'x'"),
        ("penstock_operator", "INSERT INTO producers SELECT * FROM producers"),
        ("penstock_operator", "UPDATE generations SET state = 'retired'"),
        ("penstock_operator", "UPDATE fence SET state = 'open'"),
        ("penstock_operator", "UPDATE connectors SET paused = false"),
        ("penstock_operator", "UPDATE connectors SET kind = 'uploads'"),
        ("penstock_operator", "UPDATE connector_items SET acl_tags = '{board}'"),
        ("penstock_operator", "UPDATE connector_items SET version = 9"),
        ("penstock_operator", "INSERT INTO connector_items SELECT * FROM connector_items"),
        ("penstock_operator", "UPDATE connector_sources SET source = 'other'"),
        ("penstock_operator", "UPDATE index_state SET seq = want_seq"),
        ("penstock_operator", "UPDATE membership_floors SET source = 'other'"),
        ("penstock_operator", "UPDATE person_floors SET subject = 'other'"),
        ("penstock_operator", "UPDATE conversation_members SET member = 'eve'"),
        ("penstock_operator", "DROP TABLE chunks_g1"),
        ("penstock_connectors", "SELECT FROM documents"),
        ("penstock_connectors", "SELECT FROM document_bodies"),
        ("penstock_connectors", "SELECT FROM chunks_g1"),
        ("penstock_connectors", "SELECT FROM index_state"),
        ("penstock_connectors", "SELECT FROM conversation_pairs"),
        ("penstock_connectors", "SELECT FROM memberships"),
        ("penstock_connectors", "SELECT FROM access_sets"),
        ("penstock_connectors", "UPDATE handled SET until = now()"),
        ("penstock_analysis", "SELECT FROM uploads"),
        ("penstock_analysis", "SELECT FROM conversation_pairs"),
        ("penstock_analysis", "SELECT FROM connectors"),
        ("penstock_analysis", "SELECT FROM webhooks"),
        ("penstock_analysis", "UPDATE documents SET title = ''"),
        ("penstock_analysis", "UPDATE standing_questions SET sentences = '[]'"),
        ("penstock_analysis", "UPDATE index_state SET seq = 0"),
        ("penstock_analysis", "INSERT INTO memberships SELECT * FROM memberships"),
        ("penstock_analysis", "DELETE FROM chunks_g1"),
        ("penstock_analysis", "SELECT FROM trail.records"),
        ("penstock_query", "SELECT ledger_documents('t', 's', md5('')::uuid, 9)"),
        ("penstock_worker", "SELECT ledger_members('t', 's', '', 9)"),
        ("penstock_connectors", "SELECT FROM readers.chunks"),
        ("penstock_connectors", "UPDATE webhooks SET url = 'https://another.example.com'"),
        ("penstock_connectors", "INSERT INTO webhooks SELECT * FROM webhooks"),
        ("penstock_worker", "SELECT salt FROM webhooks"),
        ("penstock_worker", "DELETE FROM webhook_deliveries"),
        ("penstock_query", "SELECT event FROM webhook_deliveries"),
        ("penstock_query", "SELECT url FROM webhooks"),
        ("penstock_query", "DELETE FROM documents"),
        ("penstock_query", "UPDATE access_sets SET acl_tags = '{everyone}'"),
        ("penstock_query", "INSERT INTO memberships VALUES ('t', 's', 'me', '{board}', now())"),
        ("penstock_query", "DELETE FROM chunks_g1"),
        ("penstock_query", "DELETE FROM conversation_pairs"),
        ("penstock_query", "SELECT nextval('ledger_seq')"),
        ("penstock_query", "SELECT FROM connector_memory"),
        ("penstock_query", "SELECT FROM uploads"),
        ("penstock_query", "SELECT changes_cursor FROM connectors"),
        ("penstock_query", "SELECT external_id FROM audit_differences"),
        ("penstock_worker", "SELECT changes_cursor FROM connectors"),
        ("penstock_worker", "UPDATE generations SET state = 'retired'"),
        ("penstock_worker", "UPDATE producers SET allow = '{*/*}'"),
        ("penstock_query", "INSERT INTO producer_keys SELECT * FROM producer_keys"),
        ("penstock_worker", "DROP TABLE chunks_g1"),
        ("penstock_worker", "TRUNCATE documents CASCADE"),
        ("penstock_worker", "SELECT FROM connector_memory"),
        ("penstock_worker", "SELECT FROM answer_feedback"),
        ("penstock_worker", "SELECT point_readers_at('chunks_g1', 'g1')"),
        ("penstock_query", "SELECT FROM trail.records"),
        ("penstock_query", "SELECT trail.expire(400, 1)"),
        ("penstock_connectors", "SELECT FROM trail.records"),
        ("penstock_worker", "SELECT FROM trail.records"),
        ("penstock_trail_reader", "SELECT FROM documents"),
        ("penstock_trail_reader", "SELECT trail.expire(400, 1)"),
        *(
            (role, statement)
            for role in (*INSIDERS, "penstock_trail_reader", "penstock_operator")
            for statement in (
                "UPDATE trail.records SET actor = 'eve'",
                "DELETE FROM trail.records",
                "TRUNCATE trail.records",
                "UPDATE trail.heads SET count = 1",
                "DELETE FROM trail.heads",
                "TRUNCATE trail.heads",
            )
        ),
        *((role, "CREATE TABLE mine ()") for role in ROLES if role != "penstock_owner"),
        *(
            (role, f"SET ROLE {another}")
            for role in ROLES
            if role != "penstock_owner"
            for another in ROLES
            if another != role
        ),
        *((role, "INSERT INTO schema_migrations VALUES ('9999_mine')") for role in INSIDERS),
    ],
)
async def test_statements_that_a_role_does_not_need_are_refused(place: Place, role: str, statement: str) -> None:
    assert await place.refused(role, statement), f"{role} may: {statement}"
