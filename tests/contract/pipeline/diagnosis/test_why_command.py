"""The command ``penstock why`` on a real ledger and real stores: what it sees beside the ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import Result
from typer.testing import CliRunner

from cli.main import app
from deploy.local.stack import Stack
from pipeline.ledger import letters
from tests.support.query.library import Library, WordEmbedder, deletion, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        yield library


async def penstock(home: Path, *arguments: str) -> Result:
    """The real command, in this process."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["why", *arguments], env={"PENSTOCK_HOME": str(home)})


@pytest.fixture
def home(library: Library, tmp_path: Path) -> Path:
    """Leads to the library; its Kafka is away."""
    library.write_home(tmp_path)
    return tmp_path


async def run_why(home: Path, tenant: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and answer."""
    done = await penstock(home, *arguments, "--tenant", tenant, "--json")
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout)


async def test_penstock_why_shows_a_document_and_reports_ambiguous_and_unknown_names(
    library: Library, tenant: str, home: Path
) -> None:
    await library.put(
        document("one/guide.md", "Text.", tenant=tenant), document("two/guide.md", "Text.", tenant=tenant)
    )
    await library.put(document("guide.md", "Text.", tenant=tenant, source="drive", source_url="https://drive/guide"))
    await library.make_dead_letter(tenant, "never.md")

    code, one = await run_why(home, tenant, "one/guide.md")
    assert (code, one["searchable"], one["state"], one["stores"]) == (0, True, "searchable", [])
    shown = await penstock(home, "one/guide.md", "--tenant", tenant)
    assert shown.exit_code == 0
    assert "wiki/staff" in shown.stdout
    assert "settled" in shown.stdout
    assert "agree with the ledger" in shown.stdout
    assert "\x1b" not in shown.stdout
    ambiguous = await penstock(home, "/guide.md", "--tenant", tenant)
    assert ambiguous.exit_code == 2
    assert "wiki/one/guide.md" in ambiguous.stderr
    assert "wiki/two/guide.md" in ambiguous.stderr
    for arguments in (("https://drive/guide",), ("guide.md", "--source", "drive")):
        assert (await run_why(home, tenant, *arguments))[1]["document"]["source"] == "drive"
    unknown = await penstock(home, "nothing.md", "--tenant", tenant)
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    dead = await penstock(home, "never.md", "--tenant", tenant, "--json")
    assert dead.exit_code == 1
    assert len(json.loads(dead.stdout)["dead"]) == 1


async def test_why_says_what_the_dead_letter_of_an_unknown_document_needs(
    library: Library, tenant: str, home: Path
) -> None:
    await library.make_dead_letter(tenant, "never.md")
    _, waits = await run_why(home, tenant, "never.md")
    [letter] = waits["dead"]
    assert (waits["state"], waits["next"]) == ("dead_letter", f"penstock dead show {letter['id']}")
    async with library.pool.connection() as connection:
        await letters.dismiss(connection, [letter["id"]], by="ann", reason="a test run")
    _, dismissed = await run_why(home, tenant, "never.md")
    assert dismissed["state"] == "dismissed"
    assert "ann dismissed the last one" in dismissed["reason"]
    assert "--undo" in dismissed["next"]
    async with library.pool.connection() as connection:
        await letters.undo_dismissal(connection, [letter["id"]], by="ann", reason=None)
        await letters.mark_replayed(connection, [(letter["id"], None)])
    assert (await run_why(home, tenant, "never.md"))[1]["state"] == "replayed"
    shown = await penstock(home, "never.md", "--tenant", tenant)
    assert letter["id"] in shown.stdout


async def test_a_dismissed_dead_letter_no_longer_affects_the_verdict(library: Library, tenant: str, home: Path) -> None:
    await library.put(document("a.md", "Some text.", tenant=tenant))
    await library.make_dead_letter(tenant, "a.md")
    _, before = await run_why(home, tenant, "a.md")
    assert before["next"] == f"fix the cause, then run `penstock dead replay {before['dead'][0]['id']}`"
    async with library.pool.connection() as connection:
        await letters.dismiss(connection, [before["dead"][0]["id"]], by="ann", reason="a test run")
    code, after = await run_why(home, tenant, "a.md")
    assert (code, after["reason"], after["next"]) == (0, "both stores hold its 1 chunks", None)


async def test_why_detects_a_row_missing_from_a_store(library: Library, tenant: str, home: Path) -> None:
    await library.put(document("a.md", "Some text.", tenant=tenant))
    [(id_,)] = await library.execute("SELECT id FROM documents WHERE tenant = %s", tenant)
    await library.execute("DELETE FROM chunks_g1 WHERE document_id = %s", id_)
    code, differs = await run_why(home, tenant, "a.md")
    assert (code, differs["searchable"], differs["state"]) == (0, False, "differs")
    assert differs["next"] == "penstock audit --repair"
    assert differs["stores"] == [{"generation": "g1", "store": "vectors", "kind": "missing", "chunks": 1}]
    assert "vectors: a desired chunk is not in the store (1 of 1 chunks)" in differs["reason"]


async def test_why_detects_outdated_access_in_a_store(library: Library, tenant: str, home: Path) -> None:
    one, other = document("a.md", "Some text.", tenant=tenant), document("b.md", "x", tenant=tenant, acl_tags=["old"])
    await library.put(one, other)
    await library.execute(
        "UPDATE chunks_g1 SET access_id = (SELECT access_id FROM documents WHERE tenant = %s AND external_id = 'b.md')"
        " WHERE document_id = (SELECT id FROM documents WHERE tenant = %s AND external_id = 'a.md')",
        tenant,
        tenant,
    )
    _, differs = await run_why(home, tenant, "a.md")
    assert [(h["store"], h["kind"]) for h in differs["stores"]] == [("vectors", "wrong_access")]
    assert differs["searchable"] is False


async def test_why_notes_a_row_left_of_a_deleted_document(library: Library, tenant: str, home: Path) -> None:
    one = document("a.md", "Some text.", tenant=tenant)
    await library.put(one)
    [(id_,)] = await library.execute("SELECT id FROM documents WHERE tenant = %s", tenant)
    rows = "INSERT INTO chunks_g1 SELECT * FROM kept"
    await library.execute(f"CREATE TABLE kept AS SELECT * FROM chunks_g1 WHERE document_id = '{id_}'")
    await library.put(deletion(one))
    await library.execute(rows)
    await library.execute("DROP TABLE kept")
    code, deleted = await run_why(home, tenant, "a.md")
    assert (code, deleted["state"]) == (0, "deleted")
    assert (await penstock(home, "a.md", "--tenant", tenant)).exit_code == 1
    assert "by an event of source wiki" in deleted["reason"]
    assert deleted["next"] == "publish it again from source wiki"
    assert any("no query shows that" in note for note in deleted["notes"])


async def test_why_says_how_many_documents_are_pending_before_it(library: Library, tenant: str, home: Path) -> None:
    await library.accept(*(document(f"{n}.md", "Text.", tenant=tenant) for n in range(3)))
    await library.accept(document("last.md", "Text.", tenant=tenant))
    code, waits = await run_why(home, tenant, "last.md")
    assert (code, waits["state"]) == (0, "waiting")
    assert waits["generations"][0]["vectors"]["before"] >= 3
    assert "documents before it" in waits["reason"]
    assert any("Kafka" in item for item in waits["away"])
    await library.execute("UPDATE index_state SET seq = want_seq WHERE seq < want_seq")


async def test_why_notes_a_stale_event_and_one_superseded_by_a_higher_version(
    library: Library, tenant: str, home: Path
) -> None:
    late = document("a.md", "Old text.", tenant=tenant)
    newer = document("a.md", "New text.", tenant=tenant)
    await library.put(newer)
    await library.accept(late)
    _, stale = await run_why(home, tenant, "a.md")
    assert stale["events"][-1]["outcome"] == "stale"
    assert any("was stale: older than the accepted one" in note for note in stale["notes"])
    lost = document("a.md", "Restored text.", tenant=tenant).model_copy(update={"version": 1})
    await library.accept(lost)
    _, superseded = await run_why(home, tenant, "a.md")
    assert superseded["superseded"] == [1]
    assert any("was observed later, but lost to version" in note for note in superseded["notes"])


async def test_why_notes_that_only_another_generation_holds_the_document(
    library: Library, tenant: str, home: Path
) -> None:
    await library.put(document("a.md", "Some text.", tenant=tenant))
    [(id_,)] = await library.execute("SELECT id FROM documents WHERE tenant = %s", tenant)
    await library.execute(
        "INSERT INTO generations SELECT 'g0', 'previous', model, revision, dimensions, input_window, params,"
        " document_prefix, query_prefix, chunk_table, keyword_index, vector_type FROM generations WHERE name = 'g1'"
    )
    for table in ("manifests", "index_state"):
        columns = [
            name
            for (name,) in await library.execute(
                "SELECT column_name FROM information_schema.columns WHERE table_name = %s"
                " AND column_name <> 'generation' AND table_schema = 'public'",
                table,
            )
        ]
        listed = ", ".join(columns)
        await library.execute(
            f"INSERT INTO {table} (generation, {listed}) SELECT 'g0', {listed} FROM {table} WHERE document_id = %s", id_
        )
    try:
        await library.execute(
            "UPDATE index_state SET want_seq = seq + 1 WHERE document_id = %s AND generation = 'g1'", id_
        )
        _, elsewhere = await run_why(home, tenant, "a.md")
        assert elsewhere["state"] == "waiting"
        assert "generation g0 (previous) holds it, but queries use g1" in elsewhere["notes"]
    finally:
        for table in ("manifests", "index_state"):
            await library.execute(f"DELETE FROM {table} WHERE generation = 'g0'")
        await library.execute("DELETE FROM generations WHERE name = 'g0'")
        await library.execute("UPDATE index_state SET seq = want_seq WHERE document_id = %s", id_)


async def test_why_says_whether_a_principal_may_read_it_and_when_memberships_were_observed(
    library: Library, tenant: str, home: Path
) -> None:
    await library.put(document("a.md", "Some text.", tenant=tenant, acl_tags=["crew"], required_tags=["nda"]))
    at = datetime(2026, 11, 20, 8, tzinfo=UTC)
    for source, groups in (("wiki", ["crew"]), ("drive", [])):
        await library.execute(
            "INSERT INTO memberships (tenant, source, principal, groups, observed_at) VALUES (%s, %s, 'ann', %s, %s)",
            tenant,
            source,
            groups,
            at,
        )
    code, ann = await run_why(home, tenant, "a.md", "--as", "ann")
    assert (code, ann["searchable"], ann["state"]) == (0, True, "unreadable")
    assert ann["readable_by"] == {"principals": ["ann"], "may_read": False, "by": ["wiki/crew"], "lacks": ["wiki/nda"]}
    assert "ann may not read it: they lack the required wiki/nda" in ann["reason"]
    assert ann["next"] == "add ann to wiki/nda at the source"
    code, eve = await run_why(home, tenant, "a.md", "--as", "eve")
    assert "eve may not read it: they hold none of its access tags (wiki/crew)" in eve["reason"]
    code, both = await run_why(home, tenant, "a.md", "--as", "ann", "--tag", "wiki/nda")
    assert (code, both["readable_by"]["may_read"], both["state"]) == (0, True, "searchable")
    shown = await penstock(home, "a.md", "--as", "ann", "--tenant", tenant)
    assert shown.exit_code == 1
    assert "ann's groups in wiki as of 2026-11-20 08:00:00" in shown.stdout


async def test_why_names_an_unreachable_store_and_shows_the_rest(library: Library, tenant: str, tmp_path: Path) -> None:
    await library.put(document("a.md", "Some text.", tenant=tenant))
    library.write_home(tmp_path)
    written = json.loads((tmp_path / "endpoints.json").read_text())
    written["elasticsearch"]["url"] = "http://127.0.0.1:9"
    (tmp_path / "endpoints.json").write_text(json.dumps(written))
    code, away = await run_why(tmp_path, tenant, "a.md")
    assert (code, away["searchable"], away["stores"]) == (0, True, None)
    assert any(item.startswith("the stores") for item in away["away"])
    assert any(note.startswith("not checked: the stores") for note in away["notes"])


async def test_why_shows_at_which_rank_a_query_finds_the_document(library: Library, tenant: str, home: Path) -> None:
    """The library's own model is not one that the command could load: words alone find it, and that is said."""
    await library.put(
        document("a.md", "The turbine turns.", tenant=tenant),
        document("b.md", "The turbine turns and the turbine hums: turbine.", tenant=tenant),
    )
    _, report = await run_why(home, tenant, "a.md", "--query", "turbine turns")
    assert report["query"]["rank"] in (1, 2)
    assert report["query"]["of"] == 2
    assert report["query"]["ranks"]["keyword"] in (1, 2)
    _, other = await run_why(home, tenant, "a.md", "--query", "hums", "--tag", "nobody")
    assert other["query"]["rank"] is None
    assert other["query"]["reason"]
    assert (await penstock(home, "a.md", "--tenant", tenant, "--query", " ")).exit_code == 2
