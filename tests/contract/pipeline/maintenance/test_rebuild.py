"""One store made anew beside the old one: whatever happens meanwhile, both stores end as the ledger says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Generation, Store
from pipeline.generations import building
from pipeline.generations.building import connect
from pipeline.ledger import builds, generations
from pipeline.ledger import generation_tables as tables
from pipeline.maintenance import rebuild as rebuilding
from pipeline.stores import vectors as stored
from pipeline.stores.elasticsearch import REFRESH_INTERVAL, tune_index
from pipeline.stores.postgres import Connection
from tests.support.pipeline.build_kit import Site, access, deletion, document, sections, vector
from tests.support.pipeline.oracle import assert_equal
from tests.support.space import Space
from topics.messages import DocumentUpserted


@pytest.fixture
async def site(space: Space) -> AsyncIterator[Site]:
    async with Site.create(space) as site:
        yield site


def library(count: int = 6) -> list[DocumentUpserted]:
    return [document(f"{n}.md", sections(f"first {n}", f"second {n}", f"third {n}")) for n in range(count)]


async def assert_rebuilt(site: Site, store: Store, documents: Sequence[DocumentUpserted], name: str = "g2") -> int:
    """The new generation answers, complete, and nothing is left of what it replaced."""
    chunks = await assert_equal(site.space, documents, vector=vector, refused=lambda text: "poison" in text)
    [(refused,)] = await site.space.query("SELECT sum(cardinality(refused)) FROM index_state")
    states = await site.states()
    assert states.pop(name) == "active"
    assert set(states.values()) == {"retired"}
    assert await site.tables() == ({f"chunks_{name}"} if store == "vectors" else {"chunks_g1"})
    assert await site.indexes() == ({f"chunks-{name}"} if store == "keywords" else {"chunks-g1"})
    for table in ("index_state", "manifests"):
        assert await site.space.query(f"SELECT DISTINCT generation FROM {table}") == [(name,)]
    [(shown,)] = await site.space.query("SELECT count(*) FROM readers.chunks WHERE cardinality(acl_tags) > 0")
    assert shown == chunks - refused
    valid = "SELECT indisvalid FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE relname LIKE '%%_hnsw'"
    assert await site.space.query(valid) == [(True,)]
    return chunks


async def test_a_deleted_keyword_index_is_rebuilt_without_embedding(site: Site) -> None:
    documents = library()
    await site.put(*documents)
    embedded = len(site.embedder.texts)
    await site.es.indices.delete(index=f"{site.space.settings.elasticsearch.index_prefix}chunks-g1")
    result = await site.run("keywords")
    chunks = await assert_rebuilt(site, "keywords", documents)
    assert (result.generation, result.replaced, result.documents, result.written) == ("g2", "g1", 6, chunks)
    assert len(site.embedder.texts) == embedded
    settings = await site.es.indices.get_settings(index=f"{site.space.settings.elasticsearch.index_prefix}chunks-g2")
    assert next(iter(settings.body.values()))["settings"]["index"]["refresh_interval"] == REFRESH_INTERVAL


async def test_a_rebuild_of_vectors_copies_equal_chunks_instead_of_embedding_them(site: Site) -> None:
    documents = library()
    await site.put(*documents)
    embedded = len(site.embedder.texts)
    async with site.rebuild() as rebuild:
        plan = await rebuild.plan("vectors")
    result = await site.run("vectors")
    chunks = await assert_rebuilt(site, "vectors", documents)
    assert (plan.documents, plan.chunks, plan.copied, plan.embedded, plan.tokens) == (6, chunks, chunks, 0, 0)
    assert result.written == 0
    assert len(site.embedder.texts) == embedded


async def test_a_rebuild_gives_sketches_to_rows_of_an_older_version(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "COPIED_AT_ONCE", 4)
    documents = library(3)
    await site.put(*documents)
    async with site.pool.connection() as connection:
        await connection.execute("ALTER TABLE chunks_g1 DROP COLUMN sketch")
        await connection.execute("UPDATE generations SET centred = false, centre = NULL")
    await site.run("vectors")
    await assert_rebuilt(site, "vectors", documents)
    [(sketched,)] = await site.space.query("SELECT sketched FROM generations WHERE state = 'active'")
    assert sketched


async def test_a_rebuild_that_an_older_version_began_is_completed_without_sketches(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = builds.begin

    async def begin_as_before(connection: Connection, new: Generation, origin: Generation) -> builds.Build:
        await connection.execute("ALTER TABLE chunks_g2 DROP COLUMN sketch")
        return await begin(connection, replace(new, sketched=False, centred=False), origin)

    monkeypatch.setattr(builds, "begin", begin_as_before)
    documents = library(3)
    await site.put(*documents)
    await site.run("vectors")
    await assert_rebuilt(site, "vectors", documents)


@pytest.mark.parametrize("loss", ["TRUNCATE chunks_g1", "DROP TABLE chunks_g1 CASCADE"])
async def test_a_rebuild_embeds_lost_vectors_again(site: Site, loss: str) -> None:
    documents = library(3)
    await site.put(*documents)
    async with site.pool.connection() as connection:
        await connection.execute(loss.encode())
    embedded = len(site.embedder.texts)
    async with site.rebuild() as rebuild:
        plan = await rebuild.plan("vectors")
    result = await site.run("vectors")
    chunks = await assert_rebuilt(site, "vectors", documents)
    assert (plan.chunks, plan.copied, plan.embedded) == (chunks, 0, chunks)
    assert plan.tokens > 50 * chunks
    assert chunks >= result.written == len(site.embedder.texts) - embedded > 3


async def test_repeated_rebuilds_of_both_stores_leave_one_table_and_one_index(site: Site) -> None:
    documents = [*library(3), document("poison.md", sections("sound", "poison"))]
    await site.put(*documents)
    await site.put(deletion(documents.pop(0)), access(documents[0]))
    for store in ("keywords", "keywords", "vectors", "vectors"):
        await site.run(store)
    async with site.pool.connection() as connection:
        active = await generations.active(connection)
    assert (active.name, active.chunk_table) == ("g5", "chunks_g5")
    assert active.keyword_index.endswith("chunks-g3")
    assert await site.tables() == {"chunks_g5"}
    assert await site.indexes() == {"chunks-g3"}
    documents[0] = documents[0].model_copy(update={"acl_tags": []})
    await assert_equal(site.space, documents, vector=vector, refused=lambda text: "poison" in text)


@pytest.mark.parametrize("store", ["keywords", pytest.param("vectors", marks=pytest.mark.slow)])
async def test_live_changes_reach_both_generations_during_a_rebuild(
    site: Site, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "PAGE", 2)
    documents = {d.external_id: d for d in library(12)}
    await site.put(*documents.values())
    embedded = len(site.embedder.texts)
    order = [name for (name,) in await site.space.query("SELECT external_id FROM documents ORDER BY id")]
    pages = 0

    async def change_and_hint(hints: Any) -> int:
        """One change of each kind, of documents that are filled in already and of some that are not."""
        nonlocal pages
        pages += 1
        for name in (order[pages - 1], order[-pages]):
            old = documents[name]
            match pages:
                case 1:
                    new = document(name, sections(f"first {name}", "edited"), acl_tags=old.acl_tags)
                    documents[name] = new
                    await site.accept(new)
                case 2:
                    await site.accept(deletion(documents.pop(name)))
                case 3:
                    documents[name] = old.model_copy(update={"acl_tags": ["board"]})
                    await site.accept(access(old, "board"))
                case 4:
                    documents[name] = old.model_copy(update={"acl_tags": []})
                    await site.accept(access(old))
                case 5:
                    documents[f"new {name}"] = document(f"new {name}", sections(f"created beside {name}"))
                    await site.accept(documents[f"new {name}"])
                case _:
                    await site.accept(deletion(old))
                    documents[name] = document(name, sections("recreated", f"first {name}"))
                    await site.accept(documents[name])
            if pages % 2:
                await site.work()
        return await site.hint(hints)

    await site.run(store, hint=change_and_hint)
    await site.work()
    assert pages >= 6
    await assert_rebuilt(site, store, list(documents.values()))
    assert len(site.embedder.texts) - embedded <= 16, "only what changed is embedded"


def after(calls: int, then: Callable[[], None]) -> Callable[[Any], Any]:
    """Wrap a coroutine function: the call of that number is done, and then something happens."""

    def wrap(function: Any) -> Any:
        left = calls

        async def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal left
            result = await function(*args, **options)
            left -= 1
            if left == 0:
                then()
            return result

        return wrapped

    return wrap


class Killed(BaseException):
    pass


def kill() -> None:
    raise Killed


@pytest.mark.parametrize(
    ("store", "module", "step", "calls"),
    [
        pytest.param("keywords", rebuilding, "create_index", 1, marks=pytest.mark.slow),
        pytest.param("keywords", builds, "begin", 1, marks=pytest.mark.slow),
        ("keywords", builds, "fill", 2),
        pytest.param("keywords", building, "tune_index", 1, marks=pytest.mark.slow),
        ("keywords", builds, "cut_over", 1),
        ("keywords", building, "drop_index", 1),
        pytest.param("keywords", tables, "clear_rows", 1, marks=pytest.mark.slow),
        pytest.param("vectors", rebuilding, "create_chunk_table", 1, marks=pytest.mark.slow),
        pytest.param("vectors", builds, "fill", 2, marks=pytest.mark.slow),
        ("vectors", builds, "fill", 4),
        pytest.param("vectors", tables, "create_graph", 1, marks=pytest.mark.slow),
        ("vectors", builds, "cut_over", 1),
        pytest.param("vectors", tables, "drop_table", 1, marks=pytest.mark.slow),
    ],
)
async def test_a_rebuild_killed_at_any_step_is_completed_by_the_next_run(
    site: Site, store: Store, module: Any, step: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "PAGE", 2)
    documents = library(5)
    await site.put(*documents)
    embedded = len(site.embedder.texts)
    with monkeypatch.context() as patch:
        patch.setattr(module, step, after(calls, kill)(getattr(module, step)))
        with pytest.raises(Killed):
            await site.run(store)
    changed = documents[0] = document("0.md", sections("first 0", "changed in between"))
    await site.put(changed)
    await site.run(store)
    [(active,)] = await site.space.query("SELECT name FROM generations WHERE state = 'active'")
    await assert_rebuilt(site, store, documents, active)
    assert len(site.embedder.texts) - embedded <= 3


async def test_hints_a_killed_rebuild_did_not_send_are_sent_by_the_next_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "PAGE", 2)
    documents = library(5)
    await site.put(*documents)

    async def dies(hints: Any) -> int:
        if hints:
            raise Killed
        return 0

    with pytest.raises(Killed):
        await site.run("keywords", hint=dies)
    assert (await site.states())["g2"] == "building"
    await site.run("keywords")
    await assert_rebuilt(site, "keywords", documents)


async def test_a_build_whose_new_index_was_deleted_is_started_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = library(3)
    await site.put(*documents)
    with monkeypatch.context() as patch:
        patch.setattr(building, "tune_index", after(1, kill)(tune_index))
        with pytest.raises(Killed):
            await site.run("keywords")
    await site.es.indices.delete(index=f"{site.space.settings.elasticsearch.index_prefix}chunks-g2")
    await site.run("keywords")
    await assert_rebuilt(site, "keywords", documents, "g3")


async def test_a_rebuild_does_not_cut_over_while_a_document_is_failed(site: Site) -> None:
    documents = library(3)
    await site.put(*documents)
    site.store.failing = frozenset({"1.md"})
    with pytest.raises(Retryable, match=r"wiki/1\.md: mapper_parsing_exception.*run the command again"):
        await site.run("keywords")
    assert await site.states() == {"g1": "active", "g2": "building"}
    async with connect(site.space.settings.postgres) as connection:
        build = await builds.under_way(connection)
        assert build is not None
        assert await builds.cut_over(connection, build) == 1
    assert (await site.states())["g1"] == "active"
    site.store.failing = frozenset()
    await site.run("keywords")
    await assert_rebuilt(site, "keywords", documents)


async def test_a_partly_embedded_document_does_not_block_a_rebuild(site: Site) -> None:
    documents = [document("a.md", sections("sound", "poison"))]
    await site.put(*documents)
    await site.run("vectors")
    await assert_rebuilt(site, "vectors", documents)


async def test_a_rebuild_without_a_running_worker_is_rejected_before_it_begins(site: Site) -> None:
    async def nobody(_store: Store) -> bool:
        return False

    with pytest.raises(Retryable, match=r"no vectors worker runs.*penstock up.*run this command again"):
        await site.run("vectors", served=nobody)
    assert await site.states() == {"g1": "active"}


async def test_only_one_rebuild_of_one_store_runs_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await site.put(*library(2))
    async with site.rebuild():
        with pytest.raises(Misconfigured, match="another rebuild"):
            await site.run("keywords")
    with monkeypatch.context() as patch:
        patch.setattr(builds, "begin", after(1, kill)(builds.begin))
        with pytest.raises(Killed):
            await site.run("keywords")
    with pytest.raises(Misconfigured, match=r"g2 is being built \(new keywords\)"):
        await site.run("vectors")


async def test_a_worker_paused_during_the_cut_over_cannot_restore_deleted_chunks(site: Site) -> None:
    """The index is shared by the old generation and the new; the old one's worker slept through its retirement."""
    documents = library(2)
    await site.put(*documents)
    index = f"{site.space.settings.elasticsearch.index_prefix}chunks-g1"
    await site.es.indices.put_settings(index=index, settings={"index.gc_deletes": "1ms"})
    async with site.pool.connection() as connection:
        old = await generations.active(connection)
    changed = document("0.md", sections("first 0", "second and short-lived"))
    await site.accept(changed)
    site.hints.waiting.clear()
    [(id_,)] = await site.space.query("SELECT id FROM documents WHERE external_id = '0.md'")

    async def swapped_and_deleted() -> None:
        await site.run("vectors")
        await site.put(deletion(changed))
        await asyncio.sleep(1.2)
        await site.es.indices.refresh(index=index)

    site.store.pause = swapped_and_deleted
    await site.keywords.converge(old, [id_])
    assert await site.entries_of(id_), "its bulk did land"
    async with site.pool.connection() as connection:
        active = await generations.active(connection)
    assert active.name == "g2"
    await site.keywords.converge(active, [id_])  # the sweeper finds it pending
    await assert_equal(site.space, documents[1:], vector=vector)


async def test_a_retired_generation_writes_no_row_into_a_table_that_another_uses(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor while its states are still there, whose numbers stand still."""
    documents = library(2)
    await site.put(*documents)
    async with site.pool.connection() as connection:
        old = await generations.active(connection)
    short_lived = document("0.md", sections("first 0", "second and short-lived"))
    await site.accept(short_lived)
    site.hints.waiting.clear()
    [(id_,)] = await site.space.query("SELECT id FROM documents WHERE external_id = '0.md'")
    documents[0] = document("0.md", sections("first 0"))

    async def nothing_is_cleared(_connection: Any) -> list[Any]:
        return []

    async def swapped_and_edited() -> None:
        await site.run("keywords")
        await site.put(documents[0])

    with monkeypatch.context() as patch:
        patch.setattr(tables, "uncleared", nothing_is_cleared)
        site.embedder.before = swapped_and_edited
        await site.vectors.converge(old, [id_])
    await assert_equal(site.space, documents, vector=vector)
    async with site.builder() as builder:
        await builder.clear()
    await assert_rebuilt(site, "keywords", documents)


async def test_entries_of_a_shared_index_known_only_to_the_retired_generation_are_deleted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edited before it was filled in, converged by the new generation alone, and the old one retired before it was."""
    monkeypatch.setattr(building, "PAGE", 1)
    documents = {d.external_id: d for d in library(3)}
    await site.put(*documents.values())
    [(last,)] = await site.space.query("SELECT external_id FROM documents ORDER BY id DESC LIMIT 1")
    edited = False

    async def edit_and_hint(hints: Any) -> int:
        nonlocal edited
        if not edited:
            edited = True
            documents[last] = document(last, sections("nothing of it is left"))
            await site.accept(documents[last])
            site.hints.waiting = [h for h in site.hints.waiting if h.generation == "g2"]
            await site.work()
        return await site.hint(hints)

    await site.run("vectors", hint=edit_and_hint)
    await assert_rebuilt(site, "vectors", list(documents.values()))
