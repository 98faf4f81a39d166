"""Nothing else reveals a document: neither ``why``, nor the views for other teams, nor a store that returns a passage
of another document."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio

from cli.why import names
from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from pipeline.diagnosis import story
from pipeline.stages.stage import Incoming
from query.access.callers import Caller
from query.access.verify import verify
from query.model import Candidate
from tests.support.processes import run_penstock
from tests.support.query.leak_paths import Paths
from tests.support.query.leaks import World
from tests.support.query.library import Library, access, deletion, document
from topics.messages import IdentityChanged

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]
NOW = datetime.now(UTC)


@pytest_asyncio.fixture(loop_scope="module")
async def paths(stack: Stack) -> AsyncIterator[Paths]:
    async with Paths.open(stack) as paths:
        yield paths


def penstock(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_penstock(*arguments, env={**os.environ, "PENSTOCK_HOME": str(home)})


async def test_a_candidate_with_a_forged_document_id_is_not_returned(paths: Paths) -> None:
    library = paths.library
    mine, theirs = document("mine.md", "Open."), document("theirs.md", "Secret.", acl_tags=["board"])
    elsewhere = document("mine.md", "Secret elsewhere.", tenant="globex")
    await library.put(mine, theirs, elsewhere)
    rows = await library.execute(
        "SELECT d.tenant, d.external_id, d.id, c.id FROM documents d JOIN chunks_g1 c ON c.document_id = d.id"
    )
    of = {(tenant, name): (document, chunk) for tenant, name, document, chunk in rows}
    ids = [document for document, _ in of.values()]
    async with library.pool.connection() as connection:
        for _, chunk in of.values():
            for claimed in ids:
                offered = [Candidate(chunk, claimed, "", 1.0)]
                shown = await verify(connection, "g1", Caller("acme", frozenset({"wiki/staff"})), offered)
                assert bool(shown) == ((claimed, chunk) == of["acme", "mine.md"])
        assert await verify(connection, "g1", Caller("acme", frozenset()), offered) == {}
        assert await verify(connection, "g2", Caller("acme", frozenset({"wiki/staff"})), offered) == {}
        document_, chunk = of["acme", "mine.md"]
        offered = [Candidate(chunk, document_, "", 1.0)]
        for half_gone in ("deleted_at = now()", "deleted_at = NULL, version = NULL"):  # whatever its manifest says
            await library.execute(f"UPDATE documents SET {half_gone} WHERE id = %s", document_)
            assert await verify(connection, "g1", Caller("acme", frozenset({"wiki/staff"})), offered) == {}


# why: an operator's command; of the named tenant all, of any other nothing


async def test_why_never_shows_documents_of_another_tenant(paths: Paths) -> None:
    worlds = [World(11_000 + n, f"w{n}") for n in range(8)]
    await paths.learn(event for world in worlds for event in world.first)
    for world in worlds:
        await make_dead_letters(
            paths.library, *(f"{tenant}/wiki/letter-{n}.md" for n, tenant in enumerate(world.tenants))
        )
    rows = await paths.library.execute("SELECT id, tenant, source, external_id, title FROM documents")
    tenants = {tenant for _, tenant, *_ in rows}
    request_count = 0
    async with paths.library.pool.connection() as connection:
        for id_, tenant, source, external_id, title in random.sample(rows, 30):
            for other in random.sample(sorted(tenants), 3):
                for name in (str(id_), external_id, f"{source}/{external_id}", title or "*", external_id[-4:]):
                    documents = await story.find(connection, other, names(name))
                    assert all(identity.tenant == other for identity, _ in documents), name
                    expected = {document_id(*row[1:4]) for row in rows if row[1] == other and row[3] == external_id}
                    if name == external_id:
                        assert {identity.id for identity, _ in documents} == expected
                    if name == str(id_) and other != tenant:
                        assert documents == []
                    request_count += 1
        for world in worlds:
            for n, tenant in enumerate(world.tenants):
                for m in range(3):
                    letters = await story.dead_letters(connection, tenant, names(f"letter-{m}.md"))
                    assert len(letters.dead) == (m == n)
                    by_id = str(document_id(world.tenants[m], "wiki", f"letter-{m}.md"))
                    assert len((await story.dead_letters(connection, tenant, [by_id])).dead) == (m == n)
    assert request_count == 450


async def make_dead_letters(library: Library, *keys: str) -> None:
    records = []
    for key in keys:
        library.offset += 1
        records.append(Incoming("documents", 0, library.offset, key.encode(), b"{broken", [], "live"))
    await library.detect.handle(records)


async def test_why_gives_the_same_error_for_another_tenants_document_as_for_an_unknown_one(
    paths: Paths, tmp_path: Path
) -> None:
    library = paths.library
    await library.put(
        document("plan.md", "A.", tenant="acme", title="Ours"),
        document("plan.md", "B.", tenant="globex", title="Merger"),
        document("only.md", "C.", tenant="globex", title="Takeover"),
    )
    library.write_home(tmp_path)
    [(theirs,)] = await library.execute("SELECT id FROM documents WHERE tenant = 'globex' AND title = 'Merger'")
    output = json.loads(penstock(tmp_path, "why", "plan.md", "--tenant", "acme", "--json").stdout)
    assert (output["document"]["tenant"], output["document"]["title"]) == ("acme", "Ours")
    nothing = "00000000-0000-4000-8000-000000000000"
    unknown = penstock(tmp_path, "why", nothing, "--tenant", "acme", "--json")
    for name in (str(theirs), "only.md", "Takeover", f"globex/wiki/{theirs}"):
        refused = penstock(tmp_path, "why", name, "--tenant", "acme", "--json")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.replace(name, nothing) == unknown.stderr


async def test_why_says_whether_a_principal_may_read_it_and_by_which_tags(paths: Paths, tmp_path: Path) -> None:
    library = paths.library
    await library.put(document("a.md", "Text.", acl_tags=["crew", "user:bob"], required_tags=["nda"]))
    crew = IdentityChanged(tenant="acme", source="wiki", principal="ann", groups=["crew"], observed_at=NOW)
    nda = crew.model_copy(update={"source": "drive", "groups": ["nda"]})
    signed = crew.model_copy(update={"principal": "bob", "groups": ["nda"]})
    await paths.learn([crew, nda, signed])
    library.write_home(tmp_path)
    for principal, decision, line in (
        ("ann", {"may_read": False, "by": ["wiki/crew"], "lacks": ["wiki/nda"]}, "ann: no, lacks wiki/nda"),
        ("bob", {"may_read": True, "by": ["wiki/user:bob"], "lacks": []}, "bob: yes, with wiki/user:bob"),
        ("eve", {"may_read": False, "by": [], "lacks": ["wiki/nda"]}, "eve: no, holds none of its access tags"),
    ):
        output = penstock(tmp_path, "why", "a.md", "--tenant", "acme", "--as", principal, "--json")
        assert json.loads(output.stdout)["readable_by"] == {"principals": [principal], **decision}, output.stderr
        shown = penstock(tmp_path, "why", "a.md", "--tenant", "acme", "--as", principal)
        assert f"  may read  {line}\n" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["\udcff", "a\udcffb"])
async def test_commands_handle_names_that_are_not_valid_text(paths: Paths, tmp_path: Path, name: str) -> None:
    """A shell hands over any bytes."""
    await paths.library.put(document("a.md", "Some text."))
    paths.library.write_home(tmp_path)
    for option in ("--as", "--tag", "--tenant"):
        done = penstock(tmp_path, "search", "text", "--mode", "keyword", "--json", option, name)
        assert (done.returncode, json.loads(done.stdout)["results"]) == (0, []), done.stderr
    for arguments in ((name,), ("a.md", "--tenant", name)):
        done = penstock(tmp_path, "why", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1, done.stderr


# The role for other teams


async def test_the_reader_role_reads_the_views_and_nothing_else(paths: Paths) -> None:
    library = paths.library
    left, gone = document("left.md", "Text."), document("gone.md", "Text.")
    await library.put(left, gone)
    await library.accept(deletion(gone), access(document("stub.md", ""), ["staff"]))  # the stores have not followed
    async with await psycopg.AsyncConnection.connect(library.settings.postgres.dsn.get_secret_value()) as connection:
        cursor = await connection.execute(
            "SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE c.relkind IN ('r', 'v', 'm', 'p', 'f', 'S') AND n.nspname NOT LIKE 'pg_%'"
            " AND n.nspname <> 'information_schema'"
            " AND has_schema_privilege('penstock_reader', n.oid, 'USAGE')"
            " AND (c.relkind = 'S' AND has_sequence_privilege('penstock_reader', c.oid, 'USAGE, SELECT, UPDATE')"
            "  OR c.relkind <> 'S' AND has_any_column_privilege('penstock_reader', c.oid,"
            "   'SELECT, INSERT, UPDATE, REFERENCES'))"
        )
        views = {"readers.documents", "readers.chunks", "readers.generation"}
        assert {name for (name,) in await cursor.fetchall()} == views
        await connection.execute("SET ROLE penstock_reader")
        for view, column in (("documents", "external_id"), ("chunks", "source_url IS NULL")):
            rows = await (await connection.execute(f"SELECT {column} FROM readers.{view}".encode())).fetchall()
            assert rows == [("left.md",)] if view == "documents" else len(rows) == 1
        for statement in (
            "SELECT title FROM documents",
            "SELECT * FROM chunks_g1",
            "SELECT * FROM access_sets",
            "DELETE FROM documents",
            "SELECT nextval('ledger_seq')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                async with connection.transaction():
                    await connection.execute(statement.encode())
