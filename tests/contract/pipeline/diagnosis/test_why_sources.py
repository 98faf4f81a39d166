"""Documents that never arrived: what the connector's own rows, Kafka and its consumer groups say of them. Real servers,
no workers: the runner's own writers write its rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import Result
from psycopg.types.json import Jsonb
from typer.testing import CliRunner

from cli.main import app
from connectors.runner.compare import Row
from connectors.runner.rows import Holder, Rows
from connectors.runner.state import State
from deploy.local.stack import Stack
from pipeline.kafka.groups import Groups
from pipeline.stores.postgres import Pool, open_pool
from pipeline.stores.stored_json import to_jsonb
from tests.support.connectors.hostile_pdfs import damaged_pdf
from tests.support.connectors.pdf_files import pdf_of
from tests.support.query.library import document
from tests.support.space import Space
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

NOW = datetime.now(UTC)
CURSOR = {"since": "2026-11-20", "after": "an id with \x00"}
"""Postgres refuses the id, and the runner stores the cursor in another form."""


@dataclass
class Town:
    space: Space
    pool: Pool

    async def why(self, tenant: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Exit code and answer."""
        done = await asyncio.to_thread(
            CliRunner().invoke,
            app,
            ["why", *arguments, "--tenant", tenant, "--json"],
            env={"PENSTOCK_HOME": str(self.space.home)},
        )
        return done.exit_code, json.loads(done.stdout) if done.stdout else {"error": f"{done.stderr}{done.exception}"}

    async def connector(
        self,
        tenant: str,
        *rows: Row,
        paused: bool = False,
        loaded: bool = True,
        seen: str = "now()",
        activities: dict[str, Any] | None = None,
        guard: dict[str, Any] | None = None,
    ) -> None:
        async with self.pool.connection() as connection:
            await connection.execute(
                "INSERT INTO connectors (tenant, source, kind, epoch, paused, loaded_at, changes_cursor, guard,"
                f" activities, seen_at) VALUES (%s, 'wiki', 'confluence', 1, %s, %s, %s, %s, %s, {seen})".encode(),
                [
                    tenant,
                    paused,
                    NOW if loaded else None,
                    to_jsonb(CURSOR),
                    Jsonb(guard) if guard else None,
                    Jsonb(activities or {"changes": {"state": "idle", "succeeded_at": NOW.isoformat()}}),
                ],
            )
        if rows:
            await Rows(self.pool, Holder(tenant, "wiki", 1)).save(rows, NOW)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def town(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Town]:
    async with AsyncExitStack() as closing:
        space = await closing.enter_async_context(Space.create(stack, tmp_path_factory.mktemp("why")))
        pool = await closing.enter_async_context(open_pool(space.settings.postgres))
        yield Town(space, pool)


async def test_an_unknown_document_is_reported_together_with_the_paused_sources(town: Town, tenant: str) -> None:
    code, explanation = await town.why(tenant, "nothing.md")
    assert code == 1
    assert "no event about it has ever arrived" in explanation["error"]
    await town.connector(tenant, paused=True)
    _, explanation = await town.why(tenant, "nothing.md")
    assert "do not follow their source at present: wiki (paused)" in explanation["error"]


@pytest.mark.parametrize(
    ("code", "message", "step"),
    [
        ("too_large", "has 9 MiB of text; at most 4 MiB", "make it smaller"),
        ("needs_ocr", "its pages are pictures", "with a version that has text"),
        ("encrypted", "needs a password", "without a password"),
        ("rule", "left out by exclude = ['*.md']", "fix it at the source"),
    ],
)
async def test_why_gives_the_connectors_reason_for_refusing_a_document(
    town: Town, tenant: str, code: str, message: str, step: str
) -> None:
    await town.connector(tenant, Row(external_id="a.pdf", problem_code=code, problem_message=message))
    exit_code, explanation = await town.why(tenant, "a.pdf")
    assert (exit_code, explanation["document"], explanation["state"]) == (1, None, "refused")
    assert explanation["reason"] == f"connector wiki cannot publish it ({code}: {message})"
    assert step in explanation["next"]
    assert "penstock connector run wiki --document a.pdf" in explanation["next"]
    assert explanation["source"]["cursor"] == CURSOR


@pytest.mark.parametrize(
    ("how", "state", "step"),
    [
        ({"paused": True}, "source_paused", "penstock connector resume wiki"),
        ({"seen": "NULL"}, "source_not_running", "penstock worker connectors"),
        ({"seen": "now() - interval '1 minute'"}, "source_not_running", "penstock worker connectors"),
        ({"loaded": False}, "source_loading", "penstock connector status wiki"),
        (
            {"activities": {"changes": {"state": "needs attention", "reason": "the token is refused"}}},
            "source_failing",
            "penstock connector check wiki",
        ),
        ({}, "unknown", "penstock connector run wiki --document a.md"),
    ],
)
async def test_the_state_of_the_source_explains_a_document_that_never_arrived(
    town: Town, tenant: str, how: dict[str, Any], state: str, step: str
) -> None:
    await town.connector(tenant, **how)
    done = await asyncio.to_thread(
        CliRunner().invoke,
        app,
        ["why", "a.md", "--source", "wiki", "--tenant", tenant],
        env={"PENSTOCK_HOME": str(town.space.home)},
    )
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"({step})" in str(done.exception)
    if state == "source_failing":
        assert "changes: the token is refused" in str(done.exception)


async def test_why_reports_a_document_whose_published_state_is_in_doubt(town: Town, tenant: str) -> None:
    await town.connector(tenant)
    await Rows(town.pool, Holder(tenant, "wiki", 1)).mark_in_doubt({"a.md": (3, "unknown")}, NOW)
    _, explanation = await town.why(tenant, "a.md")
    assert explanation["source"]["document"]["difference"] == "unknown"
    assert explanation["source"]["document"]["in_doubt_since"] is not None
    done = await asyncio.to_thread(
        CliRunner().invoke, app, ["why", "a.md", "--tenant", tenant], env={"PENSTOCK_HOME": str(town.space.home)}
    )
    assert "differed from the ledger (unknown)" in done.stdout + done.stderr + str(done.exception)


async def test_why_reports_a_published_document_that_is_queued_in_its_partition(town: Town, tenant: str) -> None:
    published = document("a.md", "Some text.", tenant=tenant)
    await town.connector(tenant, Row(external_id="a.md", version=published.version, content_at=NOW))
    await town.space.publish(published, topic=DOCUMENTS_BACKFILL)
    code, queued = await town.why(tenant, "a.md")
    assert (code, queued["state"]) == (1, "queued")
    assert "no detect worker runs to process it" in queued["reason"]
    assert queued["next"] == "penstock worker detect"
    [queue] = [q for q in queued["queues"] if q["topic"] == DOCUMENTS_BACKFILL.name]
    assert (queue["behind"] > 0, queue["members"]) == (True, 0)

    kafka = town.space.settings.kafka
    async with Groups(kafka.bootstrap, kafka.topic_prefix) as groups:
        logs = await groups.logs([DOCUMENTS_BACKFILL.name, DOCUMENTS_LIVE.name], NOW)
        assert logs[queue["topic"], queue["partition"]].end == queue["behind"]  # it does stand there
        await groups.commit("penstock-detect", {place: log.end for place, log in logs.items()})
    _, taken = await town.why(tenant, "a.md")
    assert all(q["behind"] == 0 for q in taken["queues"])


async def test_why_notes_a_sweep_held_back_by_the_mass_delete_guard(town: Town, tenant: str) -> None:
    """The runner's guard stands in its row; the document is not in the ledger's way of knowing."""
    guard = {"missing": 80, "published": 100, "at": (NOW + timedelta(days=1)).isoformat()}
    await town.connector(tenant, Row(external_id="a.md", version=1, content_at=NOW), guard=guard)
    holder = Holder(tenant, "wiki", 1)
    await Rows(town.pool, holder).mark_unlisted(["a.md"], NOW + timedelta(days=1))
    await State(town.pool, holder).set_guard(guard)
    async with town.pool.connection() as connection:
        await connection.execute(
            "WITH a AS (INSERT INTO access_sets (tenant, digest, acl_tags, required_tags)"
            " VALUES (%(tenant)s, 'x', '{wiki/staff}', '{}') RETURNING id)"
            " INSERT INTO documents (id, tenant, source, external_id, version, access_id, seq)"
            " SELECT gen_random_uuid(), %(tenant)s, 'wiki', 'a.md', 1, id, 0 FROM a",
            {"tenant": tenant},
        )
    _, explanation = await town.why(tenant, "a.md")
    [note] = [note for note in explanation["notes"] if "no longer listed it" in note]
    assert "80 of 100 documents" in note
    assert "penstock connector run wiki --allow-mass-delete" in note


async def test_why_asks_for_the_source_when_two_sources_have_the_same_document_name(town: Town, tenant: str) -> None:
    await town.connector(tenant, Row(external_id="a.md", problem_code="empty", problem_message="no text"))
    async with town.pool.connection() as connection:
        await connection.execute("INSERT INTO connectors (tenant, source, kind) VALUES (%s, 'drive', 'x')", [tenant])
    await Rows(town.pool, Holder(tenant, "drive")).save(
        [Row(external_id="a.md", problem_code="empty", problem_message="no text")], NOW
    )
    code, explanation = await town.why(tenant, "a.md")
    assert code == 2
    assert "wiki/a.md" in explanation["error"]
    assert "drive/a.md" in explanation["error"]
    assert (await town.why(tenant, "a.md", "--source", "drive"))[1]["source"]["name"] == "drive"
    assert (await town.why(tenant, "wiki/a.md"))[1]["source"]["name"] == "wiki"


async def test_why_reports_a_file_that_ingest_skipped_until_a_good_version_is_published(
    town: Town, tenant: str, tmp_path: Path
) -> None:
    """Asked of the folder's own command, which leaves no runner's row."""
    damaged, large = tmp_path / "report.pdf", tmp_path / "large.txt"
    damaged.write_bytes(damaged_pdf())
    large.write_bytes(b"x" * (4 * 1024 * 1024 + 1))

    async def penstock(*arguments: str) -> Result:
        command = [*arguments, "--tenant", tenant]
        return await asyncio.to_thread(CliRunner().invoke, app, command, env={"PENSTOCK_HOME": str(town.space.home)})

    done = await penstock("ingest", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    assert "skipped 2" in done.stdout
    code, explanation = await town.why(tenant, str(damaged))
    assert (code, explanation["document"], explanation["state"], explanation["source"]["state"]) == (
        1,
        None,
        "refused",
        "by hand",
    )
    problem = explanation["source"]["document"]["problem_code"]
    assert problem in ("broken", "truncated")
    assert explanation["reason"].startswith("`penstock ingest` skipped it when it last read it on ")
    assert f"({problem}: {explanation['source']['document']['problem_message']})" in explanation["reason"]
    assert explanation["next"].endswith(f"then `penstock ingest {damaged}`")
    code, explanation = await town.why(tenant, str(large))
    assert (code, explanation["state"], explanation["source"]["document"]["problem_code"]) == (
        1,
        "refused",
        "too_large",
    )
    shown = await penstock("why", str(large))
    assert "too_large" in shown.stdout
    assert "by `penstock ingest`" in shown.stdout
    listed = (await penstock("dead", "list")).stdout
    assert "No dead letters." in listed
    assert f"{tenant}/folder  {large}: too_large: " in listed
    assert f"{tenant}/folder  {damaged}: {problem}: " in listed
    assert json.loads((await penstock("dead", "list", "--json")).stdout) == []

    damaged.write_bytes(pdf_of(["The otter sleeps."]))
    large.unlink()
    assert (await penstock("ingest", str(tmp_path))).exit_code == 0
    code, explanation = await town.why(tenant, str(damaged))
    assert (code, explanation["state"], explanation["source"]["document"]["problem_code"]) == (1, "queued", None)
    code, explanation = await town.why(tenant, str(large))
    assert (code, "no event about it has ever arrived" in explanation["error"]) == (1, True)
    assert "cannot be read" not in (await penstock("dead", "list")).stdout
