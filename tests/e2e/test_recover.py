"""Rebuild and recover as an operator runs them, with real workers."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from pipeline.ledger import producers
from pipeline.stores.elasticsearch import connect
from pipeline.stores.keywords import Keywords, Write
from pipeline.stores.postgres import open_pool
from tests.e2e.test_cli import run
from tests.e2e.test_producers import enrol, publish
from tests.support.pipeline.oracle import assert_equal
from tests.support.space import Space, now
from tests.support.space import document as published
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted, IdentityChanged
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES
from topics.signatures import key_id, public_key_of

WORKERS = ("detect", "vectors", "keywords")


async def answer(space: Space, *arguments: str) -> Any:
    process = await asyncio.to_thread(run, space, *arguments, "--json")
    assert process.returncode == 0, process.stderr + process.stdout
    return json.loads(process.stdout)


async def search_ids(space: Space, query: str, *options: str) -> set[str]:
    return {r["external_id"] for r in (await answer(space, "search", query, *options))["results"]}


def document(name: str, *subjects: str, **fields: object) -> DocumentUpserted:
    text = "\n\n".join(f"# {s}\n\n" + f"This chapter of the handbook is about {s}. " * 25 for s in subjects)
    return published(name, text, **fields)


def deletion(name: str) -> DocumentDeleted:
    return DocumentDeleted(tenant="acme", source="wiki", external_id=name, observed_at=now(), version=time.time_ns())


def access(name: str, *tags: str) -> AccessChanged:
    return AccessChanged(tenant="acme", source="wiki", external_id=name, observed_at=now(), acl_tags=list(tags))


@pytest.fixture
def local(space: Space) -> Iterator[Stack]:
    """Workers as ``penstock up`` starts them, on this test's services."""
    stack = Stack(space.home)
    yield stack
    for name in [worker.name for worker in stack.workers()]:
        stack.stop(name)


def start(stack: Stack, space: Space, *names: str) -> None:
    for name in names:
        stack.start_worker(name, env={k: v for k, v in space.environment.items() if k not in os.environ}, wait=False)
    for name in names:
        stack.start_worker(name)


def stop(stack: Stack, *names: str) -> None:
    for name in names:
        stack.stop(name)


class Backup:
    """A copy of the database, made and put back while nobody is connected."""

    def __init__(self, space: Space) -> None:
        parts = conninfo_to_dict(space.settings.postgres.dsn.get_secret_value())
        self.name = str(parts["dbname"])
        self.copy = f"{self.name}_backup"
        self._admin = make_conninfo(**{**parts, "dbname": "postgres"})

    def take(self) -> None:
        self._execute(f'CREATE DATABASE "{self.copy}" TEMPLATE "{self.name}"')

    def restore(self) -> None:
        self._execute(f'DROP DATABASE "{self.name}" WITH (FORCE)')
        self._execute(f'ALTER DATABASE "{self.copy}" RENAME TO "{self.name}"')

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self._admin, autocommit=True) as connection:
            connection.execute(statement.encode())


async def leave_ghosts(space: Space, entries: Mapping[UUID, dict[str, Any]]) -> None:
    """Write what a sink of the lost hour may have left in Elasticsearch: a chunk of a revision that is lost, and one of
    a document that the restored ledger will never have. Their versions are ahead."""
    index = f"{space.settings.elasticsearch.index_prefix}chunks-g1"
    body = next(e for e in entries.values() if e["external_id"] == "same.md")
    stranger = {**body, "external_id": "ghost.md", "document_id": str(document_id("acme", "wiki", "ghost.md"))}
    store = Keywords(connect(space.settings.elasticsearch))
    await store.apply([Write(index, uuid4(), 1_000_000 - n, body) for n, body in enumerate((body, stranger))])
    await store.aclose()


@pytest.mark.slow
async def test_an_index_deleted_by_accident_is_rebuilt_while_documents_change(space: Space) -> None:
    space.start(*WORKERS)
    documents = {d.external_id: d for d in (document(f"{n}.md", f"turbine {n}", f"dam {n}") for n in range(30))}
    await space.publish(*documents.values(), topic=DOCUMENTS_BACKFILL)
    await space.settled(documents.values())
    embedded = "SELECT sum(written) FROM index_state WHERE store = 'vectors'"
    [(before,)] = await space.query(embedded)
    es = connect(space.settings.elasticsearch)
    await es.indices.delete(index=f"{space.settings.elasticsearch.index_prefix}chunks-g1")
    await es.close()
    rebuilding = asyncio.create_task(answer(space, "rebuild", "keywords"))
    await space.until("SELECT count(*) > 1 FROM generations")
    changed = [document("3.md", "turbine 3", "spillway"), document("new.md", "sediment")]
    documents |= {d.external_id: d for d in changed}
    del documents["4.md"]
    gone = deletion("4.md")
    await space.publish(*changed, gone)
    result = await rebuilding
    assert (result["store"], result["generation"], result["replaced"]) == ("keywords", "g2", "g1")
    await space.settled([*changed, gone])
    await assert_equal(space, documents.values())
    [(after,)] = await space.query(embedded)
    assert after - before <= 5, "only what changed was embedded (of 120 chunks)"
    assert await search_ids(space, "sediment", "--tenant", "acme", "--tag", "wiki/staff", "--mode", "keyword") == {
        "new.md"
    }


async def test_a_rebuild_without_workers_fails_and_a_dry_run_prints_its_plan(space: Space) -> None:
    planned = await answer(space, "rebuild", "vectors", "--dry-run")
    assert {k: planned[k] for k in ("store", "documents", "embedded")} == {
        "store": "vectors",
        "documents": 0,
        "embedded": 0,
    }
    process = await asyncio.to_thread(run, space, "rebuild", "vectors")
    assert process.returncode == 1
    assert "no vectors worker runs" in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr


@pytest.mark.slow
async def test_recover_after_restoring_an_hour_old_ledger_reaches_the_current_state(space: Space, local: Stack) -> None:
    space.environment["PENSTOCK_AUDIT_REPAIR"] = "none"  # the ghosts shall still be there when `recover` looks
    start(local, space, *WORKERS)
    old = {
        name: document(name, f"{name} before", f"{name} kept")
        for name in ("same.md", "edited.md", "deleted.md", "revoked.md", "recreated.md", "torn.md", "withdrawn.md")
    }
    await space.publish(*old.values(), topic=DOCUMENTS_BACKFILL)
    await space.publish(
        IdentityChanged(
            tenant="acme", source="wiki", principal="mallory", observed_at=now(), groups=["staff", "board"]
        ),
        topic=IDENTITIES,
    )
    await space.settled(old.values())
    await space.until("SELECT count(*) = 1 FROM memberships")
    stop(local, *WORKERS)
    backup, taken = Backup(space), now()
    backup.take()

    # The lost hour.
    start(local, space, *WORKERS)
    fleeting, created = document("fleeting.md", "fleeting"), document("created.md", "created one")
    edited, torn = document("edited.md", "edited once"), document("torn.md", "torn once", "torn.md kept")
    first = [fleeting, created, edited, torn, deletion("deleted.md"), deletion("recreated.md"), access("withdrawn.md")]
    await space.publish(*first)
    await space.settled(first)
    mallory = IdentityChanged(tenant="acme", source="wiki", principal="mallory", observed_at=now(), groups=["visitors"])
    await space.publish(mallory, topic=IDENTITIES)
    # Elasticsearch keeps what stood there in between, which the restored ledger never hears of if it folds the events.
    stop(local, "keywords")
    created, edited = document("created.md", "created two"), document("edited.md", "edited twice")
    torn = document("torn.md", "torn.md before", "torn.md kept")
    recreated = document("recreated.md", "recreated.md kept", version=1)
    second = [created, edited, torn, recreated, deletion("fleeting.md"), access("revoked.md", "board")]
    await space.publish(*second)
    await space.until("SELECT count(*) = 1 FROM documents WHERE external_id = 'fleeting.md' AND deleted_at IS NOT NULL")
    await space.until(
        "SELECT count(*) = 1 FROM memberships WHERE groups = ARRAY['wiki/visitors'] OR groups = ARRAY['visitors']",
    )
    stop(local, "detect", "vectors")
    lost_entries = await space.entries()
    await leave_ghosts(space, lost_entries)
    backup.restore()

    start(local, space, *WORKERS)
    result = await answer(space, "recover", "--since", taken.isoformat())
    assert result["audit"]["clean"] is True
    assert result["audit"]["repaired"] >= 2, "the ghosts are found"
    assert result["sequence"]["after"] >= 1_000_000 > result["sequence"]["before"]
    assert result["missing"] == []
    assert result["failed"] == 0
    assert {w.name for w in local.workers() if w.ready} == set(WORKERS), "what was stopped runs again"

    as_staff = ("--tenant", "acme", "--tag", "wiki/staff", "--top", "50")
    for mode in ("hybrid", "vector", "keyword"):
        seen = await search_ids(space, "handbook chapter", *as_staff, "--mode", mode)
        assert seen == {"same.md", "edited.md", "torn.md", "recreated.md", "created.md"}
    assert await search_ids(space, "handbook chapter", "--tenant", "acme", "--as", "mallory") == set()
    revoked = old["revoked.md"].model_copy(update={"acl_tags": ["board"]})
    await assert_equal(space, [old["same.md"], created, edited, torn, recreated, revoked])
    assert lost_entries.keys() - (await space.entries()).keys(), "something stood there that nobody wants any more"

    again = await answer(space, "recover", "--since", taken.isoformat())
    assert again["audit"]["clean"] is True
    await assert_equal(space, [old["same.md"], created, edited, torn, recreated, revoked])


@pytest.mark.slow
async def test_recover_fails_if_producers_of_the_lost_hour_are_not_enrolled_again(space: Space, local: Stack) -> None:
    """The restored ledger does not know them: it refused what they had revoked, and the command reported success."""
    space.environment["PENSTOCK_PRODUCERS"] = "enforce"
    wiki = await enrol(space, "wiki", "acme/wiki")
    start(local, space, *WORKERS)
    plan = document("merger.md", "the merger")
    await publish(space, wiki, DOCUMENTS_BACKFILL, plan)
    await space.settled([plan])
    stop(local, *WORKERS)
    backup, taken = Backup(space), now()
    backup.take()

    start(local, space, "detect")
    late = await enrol(space, "late", "acme/wiki")
    await publish(space, late, DOCUMENTS_LIVE, access("merger.md", "board"))
    revoked = "SELECT a.acl_tags = ARRAY['wiki/board'] FROM documents d JOIN access_sets a ON a.id = d.access_id"
    await space.until(revoked)
    stop(local, "detect")
    backup.restore()

    start(local, space, *WORKERS)
    process = await asyncio.to_thread(run, space, "recover", "--since", taken.isoformat(), "--json")
    assert process.returncode == 1, process.stderr
    assert json.loads(process.stdout)["refused"] == 1
    assert "1 dead letters wait because of who signed their records" in process.stderr
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        public = public_key_of(late.read_bytes())
        await producers.add(connection, "late", ["acme/wiki"], key_id(public), public, since=None, until=None)
    await answer(space, "dead", "replay", "--all", "--code", "unknown_key", "--yes")
    await space.until(revoked)
    assert (await answer(space, "recover", "--since", taken.isoformat()))["refused"] == 0


@pytest.mark.slow
async def test_what_was_refused_from_a_stolen_key_stays_refused_if_its_removal_is_repeated(
    space: Space, local: Stack
) -> None:
    """The restored ledger has the producer still, and accepts what it refused before, unless somebody removes it."""
    space.environment["PENSTOCK_PRODUCERS"] = "enforce"
    wiki, stolen = await enrol(space, "wiki", "acme/wiki"), await enrol(space, "stolen", "acme/wiki")
    start(local, space, *WORKERS)
    plan = document("merger.md", "the merger", acl_tags=["board"])
    await publish(space, wiki, DOCUMENTS_BACKFILL, plan)
    await space.settled([plan])
    stop(local, *WORKERS)
    backup, taken = Backup(space), now()
    backup.take()

    async def remove() -> None:
        async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
            await producers.remove(connection, "stolen")

    await remove()
    start(local, space, "detect")
    await publish(space, stolen, DOCUMENTS_LIVE, access("merger.md", "user:eve"))
    await space.until("SELECT count(*) = 1 FROM dead_letters")
    stop(local, "detect")
    backup.restore()
    await remove()
    start(local, space, *WORKERS)
    process = await asyncio.to_thread(run, space, "recover", "--since", taken.isoformat(), "--json")
    assert json.loads(process.stdout)["refused"] == 1, process.stderr
    tags = await space.query("SELECT a.acl_tags FROM documents d JOIN access_sets a ON a.id = d.access_id")
    assert tags == [(["wiki/board"],)]


@pytest.mark.slow
async def test_recover_refuses_while_a_detect_worker_of_another_stack_runs(space: Space) -> None:
    space.start("detect")
    process = await asyncio.to_thread(run, space, "recover", "--since", "1h")
    assert process.returncode == 1
    assert "detect workers run on 127.0.0.1: stop them" in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr
