"""The audit on the real stores: differences are reported, pending documents are not, and a repair corrects them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest

from deploy.local.stack import Stack
from pipeline.audit import runs
from pipeline.audit.compare import KINDS
from pipeline.audit.reading import Range, entries, rows
from pipeline.audit.walk import Walk
from pipeline.core.errors import Misconfigured, Poison
from pipeline.core.identity import document_id
from tests.support.pipeline.audit_kit import SMALL, Audited, named, text
from tests.support.query.library import access, deletion, document

pytestmark = pytest.mark.stack


@pytest.fixture
async def audited(stack: Stack) -> AsyncIterator[Audited]:
    async with Audited.create(stack) as audited:
        yield audited


def id_of(name: str) -> UUID:
    return document_id("acme", "wiki", name)


async def test_stores_that_match_the_ledger_have_no_differences(audited: Audited) -> None:
    gone = named("gone")[0]
    await audited.library.put(*named(*(f"d{n}" for n in range(23))), gone, *named("nobody", acl_tags=[]))
    await audited.library.put(deletion(gone))
    run, findings = await audited.audit(sampled=20)
    assert findings == set()
    chunks = (await audited.library.execute(f"SELECT count(*) FROM {audited.table}"))[0][0]
    assert (run.documents, run.chunks, run.pending) == (25, chunks, 0)
    assert chunks > 40


async def test_chunks_lost_from_each_store_are_reported_and_restored_without_needless_embedding(
    audited: Audited,
) -> None:
    messages = named(*(f"d{n}" for n in range(40)))
    await audited.library.put(*messages)
    vectors_lost, keywords_lost = {"d3", "d11", "d17", "d31"}, {"d5", "d11", "d22", "d39"}
    for name in vectors_lost:
        await audited.library.execute(
            f"DELETE FROM {audited.table} WHERE id = %s", (await audited.rows(id_of(name)))[0]
        )
    all_rows = {name: await audited.rows(id_of(name)) for name in keywords_lost}
    await audited.drop_entries([i for name in keywords_lost - {"d11"} for i in all_rows[name]])
    await audited.drop_entries(all_rows["d11"][:1])
    before = len(audited.embedder.texts)

    run, findings = await audited.audit()
    lost = {(n, "vectors", "missing") for n in vectors_lost} | {(n, "keywords", "missing") for n in keywords_lost}
    assert findings == lost
    result = await audited.repair(run)
    assert (result.requested, result.unsettled) == (7, 0)
    assert set(audited.waking.hinted) == {id_of(n) for n in vectors_lost | keywords_lost}
    assert await audited.differences(run, left=True) == set()
    assert len(audited.embedder.texts) - before <= len(vectors_lost), "keyword entries come from stored bodies"
    assert (await audited.audit())[1] == set()


async def test_every_kind_of_difference_is_reported_and_repaired(audited: Audited) -> None:
    library = audited.library
    names = [
        "v-missing",
        "k-missing",
        "v-orphan",
        "k-orphan",
        "v-access",
        "v-tenant",
        "k-access",
        "v-text",
        "k-text",
        "k-entry",
        "k-ahead",
        "v-state",
        "k-state",
        "manifest",
        "sound",
        "v-gone",
        "k-gone",
    ]
    messages = {m.external_id: m for m in named(*names)}
    await library.put(*messages.values())
    first = {name: (await audited.rows(id_of(name)))[0] for name in names}
    version, body = await audited.entry(first["sound"])
    await library.put(deletion(messages["v-gone"]), access(messages["k-gone"], []))

    def mine(name: str, **fields: Any) -> dict[str, Any]:
        return {**body, "document_id": str(id_of(name)), "external_id": name, **fields}

    copy = f"INSERT INTO {audited.table} (id, document_id, access_id, text, embedding)" + (
        f" SELECT %s, %s, access_id, text, embedding FROM {audited.table} WHERE id = %s"
    )
    vectors_unheard, keywords_unheard = uuid4(), uuid4()
    await library.execute(f"DELETE FROM {audited.table} WHERE id = %s", first["v-missing"])
    await audited.drop_entries([first["k-missing"]])
    await library.execute(copy, uuid4(), id_of("v-orphan"), first["sound"])
    await audited.write_entry(uuid4(), version, mine("k-orphan"))
    [(nobody,)] = await library.execute("SELECT id FROM access_sets WHERE acl_tags = '{}'")
    await library.execute(f"UPDATE {audited.table} SET access_id = %s WHERE id = %s", nobody, first["v-access"])
    await library.execute(f"UPDATE {audited.table} SET tenant = 'globex' WHERE id = %s", first["v-tenant"])
    await library.execute(f"UPDATE {audited.table} SET tenant = NULL WHERE id = %s", first["sound"])
    for name, fields in {
        "k-access": {"acl_tags": ["wiki/everybody"]},
        "k-text": {"text": "Other words."},
        "k-entry": {"title": "Other"},
    }.items():
        its_version, its_body = await audited.entry(first[name])
        await audited.write_entry(first[name], its_version, {**its_body, **fields})
    await audited.write_entry(first["k-ahead"], 10**12, (await audited.entry(first["k-ahead"]))[1])
    await library.execute(f"UPDATE {audited.table} SET text = 'Other words.' WHERE id = %s", first["v-text"])
    for name, store in (("v-state", "vectors"), ("k-state", "keywords")):
        await library.execute("DELETE FROM index_state WHERE document_id = %s AND store = %s", id_of(name), store)
    await library.execute(
        "UPDATE manifests SET spans = jsonb_set(spans, '{0,0,0}', '2') WHERE document_id = %s", id_of("manifest")
    )
    await library.execute(copy, first["v-gone"], id_of("v-gone"), first["sound"])
    await audited.write_entry(uuid4(), version, mine("k-gone"))
    await library.execute(copy, uuid4(), vectors_unheard, first["sound"])
    await audited.write_entry(uuid4(), 10**13, {**body, "document_id": str(keywords_unheard)})

    run, findings = await audited.audit()
    expected = {
        ("v-missing", "vectors", "missing"),
        ("k-missing", "keywords", "missing"),
        ("v-orphan", "vectors", "orphan"),
        ("k-orphan", "keywords", "orphan"),
        ("v-access", "vectors", "wrong_access"),
        ("v-tenant", "vectors", "wrong_access"),
        ("k-access", "keywords", "wrong_access"),
        ("v-text", "vectors", "wrong_text"),
        ("k-text", "keywords", "wrong_text"),
        ("k-entry", "keywords", "wrong_entry"),
        ("k-ahead", "keywords", "ahead"),
        ("v-state", "vectors", "no_state"),
        ("k-state", "keywords", "no_state"),
        ("manifest", "ledger", "stale_manifest"),
        ("v-gone", "vectors", "unknown_document"),
        ("k-gone", "keywords", "unknown_document"),
        (str(vectors_unheard), "vectors", "unknown_document"),
        (str(keywords_unheard), "keywords", "unknown_document"),
    }
    assert findings == expected
    provoked = {kind for _, _, kind in expected} | {"unreachable", "rotten_body"}  # these two: tests of their own
    assert provoked == set(KINDS)

    before = len(audited.embedder.texts)
    await audited.repair(run)
    assert await audited.differences(run, left=True) == set()
    assert (await audited.audit())[1] == set()
    assert len(audited.embedder.texts) - before <= 2, "one row was lost, one held another text"


async def test_documents_not_yet_written_to_the_stores_are_pending_and_not_a_difference(audited: Audited) -> None:
    await audited.library.put(*named("settled", "edited"))
    await audited.library.accept(*named("fresh"), document("edited", text("something else")))
    await audited.library.execute(
        "UPDATE index_state SET attempts = 2, error = 'the model is away' WHERE document_id = %s AND store = 'vectors'",
        id_of("fresh"),
    )
    walk = Walk(audited.examiner, await audited.begin(), second_look_seconds=0.05)
    run = await walk.run()
    assert await audited.differences(run) == set()
    assert run.pending == 2
    assert [(p.external_id, p.reason) for p in walk.pending] == [
        ("fresh", "vectors: the model is away"),
        ("edited", None),
    ]


async def test_an_audit_during_writes_reports_no_false_difference(audited: Audited) -> None:
    library = audited.library
    dice = random.Random(5)
    names = [f"d{n}" for n in range(30)]
    await library.put(*named(*names))
    stop = asyncio.Event()
    writes = 0

    async def write() -> None:
        nonlocal writes
        while not stop.is_set():
            name = dice.choice(names)
            old = document(name, text(f"{name} {dice.random()}", dice.randint(1, 5)))
            match dice.randint(0, 3):
                case 0:
                    await library.put(deletion(old))
                case 1:
                    await library.put(access(old, [dice.choice(["staff", "board"])]))
                case _:
                    await library.put(old)
            writes += 1

    writers = [asyncio.create_task(write()) for _ in range(2)]
    results = set()
    audits = 0
    async with asyncio.timeout(120):
        while audits < 4 or writes < 12:
            results |= (await audited.audit())[1]
            audits += 1
    stop.set()
    await asyncio.gather(*writers)
    assert results == set()
    assert (await audited.audit())[1] == set()


async def test_an_interrupted_audit_resumes_where_it_stopped(audited: Audited) -> None:
    await audited.library.put(*named(*(f"d{n}" for n in range(40))))
    everything = sorted(id_of(f"d{n}") for n in range(40))
    broken = [everything[2], everything[35]]
    for document_ in broken:
        await audited.library.execute(f"DELETE FROM {audited.table} WHERE document_id = %s", document_)
    seen: list[int] = []

    def interrupt(documents: int) -> None:
        seen.append(documents)
        if documents > 20:
            raise KeyboardInterrupt

    walk = Walk(
        audited.examiner, await audited.begin(), progress=interrupt, block_documents=7, second_look_seconds=0.05
    )
    with pytest.raises(KeyboardInterrupt):
        await walk.run()
    async with audited.library.pool.connection() as connection:
        run = await runs.unfinished(connection)
    assert run.position is not None
    assert run.documents == everything.index(run.position) + 1
    assert 7 <= run.documents < 40
    names = {name for name, _, _ in await audited.differences(run)}
    assert len(names) == 1, "what was found before the interruption is kept"
    finished, findings = await audited.audit(run)
    assert finished.documents == 40
    assert len(findings) == 2


async def test_an_audit_since_a_moment_compares_only_documents_changed_after_it(audited: Audited) -> None:
    await audited.library.put(*named("old", "edited", "restored"))
    await audited.library.execute(f"DELETE FROM {audited.table} WHERE document_id = %s", id_of("old"))
    moment = datetime.now(UTC)
    await audited.library.put(document("edited", text("edited again")))
    await audited.library.accept(*named("pending"))
    run, findings = await audited.audit(await audited.begin(moment))
    assert (run.documents, run.pending, findings) == (2, 1, set())
    run, findings = await audited.audit()
    assert (run.documents, findings) == (4, {("old", "vectors", "missing")})
    async with audited.library.pool.connection() as connection:
        since = await runs.last_finished(connection, audited.library.generation.name)
        assert since < moment, "a little further back than the last audit's start: commits come after their stamps"
        assert await connection.execute("SELECT 1 FROM audit_documents") is not None
        assert (await (await connection.execute("SELECT count(*) FROM audit_documents")).fetchone()) == (0,)


async def test_an_audits_memory_is_bounded_by_its_limits(audited: Audited) -> None:
    await audited.library.put(*named(*(f"d{n}" for n in range(60))))
    [(template,)] = await audited.library.execute(f"SELECT id FROM {audited.table} LIMIT 1")
    unheard = uuid4()
    await audited.library.execute(
        f"INSERT INTO {audited.table} (id, document_id, access_id, text, embedding)"
        f" SELECT gen_random_uuid(), %s, access_id, text, embedding FROM {audited.table}, generate_series(1, 300)"
        " WHERE id = %s",
        unheard,
        template,
    )
    run, findings = await audited.audit()
    assert findings == {(str(unheard), "vectors", "unknown_document")}
    assert run.chunks > 100
    assert 0 < audited.examiner.peak <= 2 * SMALL.page, "one page of each store at a time"
    async with audited.library.pool.connection() as connection:
        [recorded] = [r async for r in runs.differences(connection, run.id)]
    assert recorded.finding.chunks == 300
    after, pages = None, []
    while page := await audited.examiner.following(after):
        pages.append(page)
        after = page[-1]
    assert sorted(i for page in pages for i in page) == [i for page in pages for i in page]
    assert max(map(len, pages)) <= SMALL.documents
    assert len(pages) >= 60 / SMALL.documents


async def test_both_stores_return_documents_in_the_same_order(audited: Audited) -> None:
    ids = [*sorted(uuid4() for _ in range(50)), UUID(int=2**128 - 1)]
    await audited.library.put(*named("template"))
    [(template,)] = await audited.library.execute(f"SELECT id FROM {audited.table} LIMIT 1")
    _version, body = await audited.entry(template)
    for id_ in ids:
        await audited.library.execute(
            f"INSERT INTO {audited.table} (id, document_id, access_id, text, embedding)"
            f" SELECT gen_random_uuid(), %s, access_id, text, embedding FROM {audited.table} WHERE id = %s",
            id_,
            template,
        )
    for id_ in ids:
        await audited.library.es.index(index=audited.index, id=str(uuid4()), document={**body, "document_id": str(id_)})
    await audited.library.es.indices.refresh(index=audited.index)
    generation, pool, es = audited.library.generation, audited.library.pool, audited.library.es
    for scope in (Range(), Range(ids[9], ids[30]), Range(ids[40], None), Range(None, ids[3])):
        in_vectors = [r.document async for page in rows(pool, generation, scope, 7) for r in page]
        in_keywords = [e.document async for page in entries(es, generation, scope, 7) for e in page]
        assert list(dict.fromkeys(in_vectors)) == list(dict.fromkeys(in_keywords)) == sorted(set(in_vectors))
        inside = [i for i in ids if (not scope.after or i > scope.after) and (not scope.last or i <= scope.last)]
        assert set(inside) <= set(in_vectors) <= {*inside, id_of("template")}


async def test_chunks_of_documents_unknown_to_the_ledger_are_removed_from_both_stores(audited: Audited) -> None:
    await audited.library.put(*named("sound"))
    rows_before = await audited.rows(id_of("sound"))
    version, body = await audited.entry(rows_before[0])
    unheard = [uuid4() for _ in range(12)]
    for n, id_ in enumerate(unheard):
        await audited.library.execute(
            f"INSERT INTO {audited.table} (id, document_id, access_id, text, embedding)"
            f" SELECT gen_random_uuid(), %s, access_id, text, embedding FROM {audited.table} WHERE id = %s",
            id_,
            rows_before[0],
        )
        await audited.write_entry(uuid4(), version * 10**n, {**body, "document_id": str(id_)})
    run, findings = await audited.audit()
    assert findings == {(str(i), store, "unknown_document") for i in unheard for store in ("vectors", "keywords")}
    await audited.repair(run)
    assert await audited.differences(run, left=True) == set()
    assert (await audited.audit())[1] == set()
    assert await audited.rows(id_of("sound")) == rows_before
    [(documents,)] = await audited.library.execute("SELECT count(*) FROM documents")
    assert documents == 1, "no stub is left behind"


async def test_an_entry_whose_document_id_is_invalid_is_reported(audited: Audited) -> None:
    await audited.library.put(*named("sound"))
    version, body = await audited.entry((await audited.rows(id_of("sound")))[0])
    await audited.write_entry("not-an-id", version, {**body, "document_id": "nor is this"})
    await audited.write_entry(uuid4(), version, {k: v for k, v in body.items() if k != "document_id"})
    await audited.write_entry(uuid4(), version, {**body, "document_id": str(id_of("sound")).upper()})
    _, findings = await audited.audit()
    assert findings == {(str(UUID(int=0)), "keywords", "unknown_document")}


async def test_a_damaged_body_is_reported_and_repaired_only_by_publishing_the_document_again(audited: Audited) -> None:
    rotten, gone, sound = named("rotten", "gone", "sound")
    await audited.library.put(rotten, gone, sound)
    await audited.library.execute(
        "UPDATE document_bodies SET text = 'x' || text WHERE document_id = %s", id_of("rotten")
    )
    await audited.library.execute("DELETE FROM document_bodies WHERE document_id = %s", id_of("gone"))
    expected = {("rotten", "ledger", "rotten_body"), ("gone", "ledger", "rotten_body")}
    run, findings = await audited.audit()
    assert findings == expected
    await audited.repair(run)
    assert await audited.differences(run, left=True) == expected
    assert (await audited.audit())[1] == expected
    await audited.library.put(rotten, gone)  # the very same events
    assert (await audited.audit())[1] == set()


async def test_a_damaged_body_is_not_indexed(audited: Audited) -> None:
    rotten, gone = named("rotten", "gone")
    await audited.library.put(rotten, gone)
    await audited.library.execute(
        "UPDATE document_bodies SET text = 'x' || text WHERE document_id = %s", id_of("rotten")
    )
    await audited.library.execute("DELETE FROM document_bodies WHERE document_id = %s", id_of("gone"))
    ids = await audited.library.accept(access(rotten, ["board"]), access(gone, ["board"]))
    for id_ in ids:
        with pytest.raises(Poison, match="see the audit"):
            await audited.library.keywords.converge(audited.library.generation, [id_])
    run, findings = await audited.audit()
    assert findings == {("rotten", "ledger", "rotten_body"), ("gone", "ledger", "rotten_body")}
    await audited.repair(run)
    await audited.library.put(rotten, gone)
    assert (await audited.audit())[1] == set()
    version, body = await audited.entry((await audited.rows(id_of("rotten")))[0])
    assert (version > 0, body["acl_tags"]) == (True, ["wiki/board"]), "access is the newest, not that of the replay"


async def test_an_entry_under_the_wrong_document_is_moved_back_by_repair(audited: Audited) -> None:
    await audited.library.put(*named("home", "away"))
    row = (await audited.rows(id_of("home")))[0]
    version, body = await audited.entry(row)
    await audited.write_entry(row, version, {**body, "document_id": str(id_of("away"))})
    await audited.library.execute(f"UPDATE {audited.table} SET document_id = %s WHERE id = %s", id_of("away"), row)
    run, findings = await audited.audit()
    assert findings == {
        (n, s, k) for n, k in (("home", "missing"), ("away", "orphan")) for s in ("vectors", "keywords")
    }
    await audited.repair(run)
    assert await audited.differences(run, left=True) == set()
    assert (await audited.audit())[1] == set()


async def test_a_repair_without_running_workers_is_recorded_and_done_later(audited: Audited) -> None:
    await audited.library.put(*named("a", "b"))
    await audited.library.execute(f"DELETE FROM {audited.table} WHERE document_id = %s", id_of("a"))
    run, _ = await audited.audit()
    audited.waking.asleep = True
    result = await audited.repair(run, wait_seconds=0.5)
    assert (result.requested, result.unsettled, result.idle) == (1, 1, True)
    assert await audited.differences(run, left=True) == {("a", "vectors", "missing")}
    await audited.library.converge(id_of("a"))
    assert (await audited.audit())[1] == set()


async def test_refused_chunks_are_not_reported_as_missing(audited: Audited) -> None:
    await audited.library.put(document("partial", text("fine") + "\n\n" + text("unspeakable")))
    assert (await audited.audit())[1] == set()


async def test_a_missing_keyword_index_is_an_error_that_names_the_rebuild_command(audited: Audited) -> None:
    await audited.library.put(*named("a"))
    await audited.library.es.indices.delete(index=audited.index)
    with pytest.raises(Misconfigured, match="penstock rebuild keywords"):
        await audited.audit()


async def test_a_repair_is_not_announced_and_not_counted_in_freshness(audited: Audited) -> None:
    await audited.library.put(*named("d"))
    [before] = await audited.library.execute("SELECT seq, announced_seq FROM documents")
    assert before[0] == before[1]
    samples = audited.library.metrics.registry.get_sample_value
    counted = partial(samples, "penstock_freshness_seconds_count", {"source": "wiki", "lane": "live"})
    counted_before = counted()  # two, where both sinks announced what they completed together
    assert counted_before
    await audited.library.execute(f"DELETE FROM {audited.table}")
    run, _ = await audited.audit()
    await audited.repair(run)
    assert (await audited.audit())[1] == set()
    [after] = await audited.library.execute("SELECT seq, announced_seq FROM documents")
    assert after[0] == after[1] > before[0], "there is nothing new to announce"
    assert counted() == counted_before
