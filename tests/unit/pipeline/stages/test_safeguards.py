"""Each safeguard of the protocol by itself, on the simulation's services, where another one stands behind it and the
simulation would not notice its loss (docs/mutants.md)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from elastic_transport import ApiResponseMeta, HttpHeaders, NodeConfig
from elasticsearch import ApiError

from pipeline.core.errors import Retryable
from pipeline.core.fold import State
from pipeline.core.identity import document_id
from pipeline.core.model import Manifest
from pipeline.ledger import bulks, documents, work
from pipeline.ledger.bulks import Entry, OpenBulk
from pipeline.ledger.documents import Known
from pipeline.stages import detect, keywords, manifests
from pipeline.stages.announce import Announcer
from pipeline.stages.detect import _build_manifests, _Chunked
from pipeline.stages.events import to_arrival
from pipeline.stages.folding import fold_batch
from pipeline.stages.hints import Sweeper
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Incoming
from pipeline.stores.elasticsearch import GC_DELETES
from pipeline.stores.keywords import Keywords, Outcome, Write
from query.access.callers import Readable, identify
from query.retrieval.cache import access_digest
from tests.simulation.faults import RATES
from tests.simulation.kafka import PARTITIONS
from tests.simulation.keyword_store import GC_DELETES_SECONDS, Elasticsearch
from tests.simulation.play import simulated
from tests.simulation.recovery import audited
from tests.simulation.scheduler import VirtualLoop, use
from tests.simulation.world import SOURCE, TENANT, Process, World
from topics.codec import decode, encode
from topics.messages import AccessChanged, AnyMessage, DocumentDeleted, DocumentIndexed, DocumentUpserted
from topics.registry import DOCUMENTS_INDEXED, DOCUMENTS_LIVE, INDEX_LIVE

NAME = "a"
ID = document_id(TENANT, SOURCE, NAME)
INDEX = "chunks-g1"


class Interrupted(Process):
    """A process to which something happens just before one of its requests."""

    def __init__(self, world: World, part: str, happens: Callable[[], Awaitable[object]]) -> None:
        super().__init__(world, "interrupted")
        self._part, self._happens = part, [happens]

    async def reach(self, service: str, doing: str) -> None:
        if self._part in doing and self._happens:
            await self._happens.pop()()
        await super().reach(service, doing)


class Bench:
    """A world in which nothing fails by itself, and one process of each stage."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        use(self.loop, 0)
        self.world = World(self.loop, 0, tuple(RATES))
        self.generation = self.world.generation
        self.tables = self.world.database.tables
        self.row_of_generation = self.tables["generations"][self.generation.name,]
        self.detect = self.stage("detect")
        self._sent = 0

    def stage(self, name: str, process: Process | None = None) -> Any:
        return self.world.stage(name, process or Process(self.world, name))[0]

    def run(self, work: Awaitable[Any]) -> Any:
        asyncio.set_event_loop(self.loop)
        try:
            return self.loop.run_until_complete(work)
        finally:
            asyncio.set_event_loop(None)

    def event(self, kind: type[AnyMessage], second: int, **fields: Any) -> Any:
        at = self.loop.now() - timedelta(hours=1) + timedelta(seconds=second)
        names = {"tenant": TENANT, "source": SOURCE, "external_id": NAME, "observed_at": at}
        if kind is DocumentUpserted:
            fields = {"title": "T", "content": "one\n\ntwo", "acl_tags": ["staff"], "version": second, **fields}
        return kind(**(names | fields))

    def incoming(self, event: AnyMessage) -> Incoming:
        record = encode(event)
        self._sent += 1
        return Incoming(DOCUMENTS_LIVE.name, 0, self._sent, record.key, record.value, record.headers, "live")

    async def accept(self, second: int, kind: type[AnyMessage] = DocumentUpserted, **fields: Any) -> None:
        """detect handles one event of the document."""
        await self.detect.handle([self.incoming(self.event(kind, second, **fields))])

    def state(self, store: str) -> Any:
        return self.tables["index_state"][ID, self.generation.name, store]

    def sent(self, topic: str) -> list[AnyMessage]:
        logs = self.world.broker.logs
        return [decode(value, headers) for n in range(PARTITIONS) for _, value, headers in logs[topic, n]]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with simulated():
        bench = Bench()
        yield bench
        bench.loop.end()


def test_a_claim_of_an_outdated_sequence_number_claims_nothing(bench: Bench) -> None:
    bench.run(bench.accept(1))
    expected = bench.state("keywords")["want_seq"]
    bench.run(bench.accept(2, title="newer"))

    async def claim() -> set[UUID]:
        async with Process(bench.world, "keywords").pool.connection() as connection:
            return await work.claim(connection, bench.generation.name, [(ID, expected, [UUID(int=1)])])  # type: ignore[arg-type]

    assert bench.run(claim()) == set()
    assert not bench.state("keywords")["claimed"]


def test_an_overtaken_worker_confirms_nothing_and_its_entries_are_reopened(bench: Bench) -> None:
    bench.run(bench.accept(1))
    slow, quick = bench.stage("keywords"), bench.stage("keywords")
    claimed = bench.run(slow._plan(bench.generation, [ID]))
    bench.run(bench.accept(2, content="three"))
    bench.run(quick.converge(bench.generation, [ID]))
    assert bench.state("keywords")["seq"] == bench.state("keywords")["want_seq"]
    assert bench.run(slow._apply(bench.generation, claimed)) == set()
    state = bench.state("keywords")
    assert state["seq"] < state["want_seq"]
    assert {write.id for plan in claimed.plans for write in plan.writes} <= set(state["claimed"])


def test_the_ledger_raises_its_sequence_number_above_an_index_that_is_ahead(bench: Bench) -> None:
    bench.run(bench.accept(1))
    sink = bench.stage("keywords")
    claimed = bench.run(sink._plan(bench.generation, [ID]))
    chunk = claimed.plans[0].writes[0].id
    meta = {"_id": str(chunk), "version": 50, "version_type": "external"}
    bench.world.index.apply("index", meta, {"document_id": str(ID)}, 0.0)
    assert bench.run(sink._apply(bench.generation, claimed)) == set()
    assert bench.state("keywords")["want_seq"] > 50
    bench.run(sink.converge(bench.generation, [ID]))
    assert bench.world.index.entries[str(chunk)].version > 50


class Stumbling(Elasticsearch):
    """Does the first bulk, and answers 503: a proxy gave up waiting."""

    stumbled = False

    async def bulk(self, **request: Any) -> dict[str, Any]:
        answer = await super().bulk(**request)
        if not self.stumbled:
            self.stumbled = True
            node = NodeConfig("http", "localhost", 9200)
            raise ApiError("busy", ApiResponseMeta(503, "1.1", HttpHeaders(), 0.0, node), {})
        return answer


def test_a_bulk_that_was_retried_after_a_lost_response_stays_recorded_as_open(bench: Bench) -> None:
    bench.run(bench.accept(1))
    sink = bench.stage("keywords")
    bench.run(sink.converge(bench.generation, [ID]))
    assert not bench.tables["open_bulks"]
    bench.run(bench.accept(2, title="newer"))
    sink._keywords = Keywords(Stumbling(Process(bench.world, "keywords")))  # type: ignore[arg-type]
    bench.run(sink.converge(bench.generation, [ID]))
    assert len(bench.tables["open_bulks"]) == 1


def test_a_text_recreated_around_a_late_bulk_check_is_searchable_again(
    bench: Bench,
) -> None:
    """The check deletes what nobody wants at that moment. The ledger must not go on believing that it stands there."""
    bench.run(bench.accept(1))
    sink = bench.stage("keywords")
    sink._keywords = Keywords(Stumbling(Process(bench.world, "keywords")))  # type: ignore[arg-type]
    bench.run(sink.converge(bench.generation, [ID]))
    bench.run(bench.accept(2, kind=DocumentDeleted, version=1))
    bench.run(asyncio.sleep(keywords.CHECK_SECONDS + 1))
    process = Process(bench.world, "keywords")
    checks = keywords.LateBulks(process.pool, Keywords(Elasticsearch(process)), bench.world.metrics)  # type: ignore[arg-type]
    assert bench.run(checks.check_due()) == 2
    bench.run(bench.accept(3))
    bench.run(sink.converge(bench.generation, [ID]))
    assert len(bench.world.index.standing()) == 2


def test_a_bulk_sent_after_elasticsearch_may_have_forgotten_its_delete_is_checked_again(
    bench: Bench,
) -> None:
    """Two workers stood still for longer than Elasticsearch remembers deletes: the one that wrote an old text looks at
    the document again, which the one that deleted it confirms after that."""
    bench.run(bench.accept(1))
    writer, deleter = bench.stage("keywords"), bench.stage("keywords")
    written = bench.run(writer._plan(bench.generation, [ID]))
    bench.run(bench.accept(2, kind=DocumentDeleted, version=1))
    deleted = bench.run(deleter._plan(bench.generation, [ID]))
    bench.run(deleter._keywords.apply([w for plan in deleted.plans for w in plan.writes]))
    bench.run(asyncio.sleep(GC_DELETES_SECONDS + 1))
    assert bench.run(writer._apply(bench.generation, written)) == set()
    assert len(bench.world.index.standing()) == 2
    bench.run(deleter._confirm(bench.generation, deleted.plans, _all_written(deleted), None))
    assert bench.state("keywords")["seq"] == bench.state("keywords")["want_seq"]
    process = Process(bench.world, "keywords")
    checks = keywords.LateBulks(process.pool, Keywords(Elasticsearch(process)), bench.world.metrics)  # type: ignore[arg-type]
    assert bench.run(checks.check_due()) == 2
    assert not bench.world.index.standing()


def _all_written(claimed: Any) -> dict[UUID, Outcome]:
    return {write.id: Outcome("written") for plan in claimed.plans for write in plan.writes}


def test_a_worker_that_stalls_too_long_after_its_claim_sends_nothing(bench: Bench) -> None:
    bench.run(bench.accept(1))
    sink = bench.stage("keywords")
    claimed = bench.run(sink._plan(bench.generation, [ID]))
    bench.run(asyncio.sleep(keywords.SEND_SECONDS + 1))
    with pytest.raises(Retryable):
        bench.run(sink._apply(bench.generation, claimed))
    assert not bench.world.index.entries


def test_deletes_of_a_late_bulk_are_repeated_before_elasticsearch_forgets_them() -> None:
    assert GC_DELETES.endswith("m")
    assert 60 * int(GC_DELETES.removesuffix("m")) > 2 * keywords.CHECK_SECONDS
    assert keywords.SEND_SECONDS < keywords.EXPIRE_SECONDS / 10


async def _unwanted(bench: Bench, entry: Entry) -> bulks.Unwanted:
    async with Process(bench.world, "keywords").pool.connection() as connection:
        return await bulks.unwanted(connection, OpenBulk(UUID(int=7), INDEX, [entry], expired=False))  # type: ignore[arg-type]


def test_entries_of_a_late_bulk_are_deleted_at_the_ledgers_sequence_number(bench: Bench) -> None:
    bench.run(bench.accept(1))
    bench.run(bench.accept(2, kind=DocumentDeleted, version=1))
    unwanted = bench.run(_unwanted(bench, Entry(ID, UUID(int=1), 1)))
    assert unwanted.entries == [Entry(ID, UUID(int=1), bench.state("keywords")["want_seq"])]


def test_late_entries_of_a_document_without_a_manifest_are_not_deleted(bench: Bench) -> None:
    bench.run(bench.accept(1))
    bench.tables["manifests"].clear()
    unwanted = bench.run(_unwanted(bench, Entry(ID, UUID(int=1), 1)))
    assert (unwanted.entries, unwanted.complete) == ([], False)


def test_a_new_sequence_number_is_above_the_documents_own_even_after_a_restore(bench: Bench) -> None:
    async def draw() -> list[int]:
        async with Process(bench.world, "detect").pool.connection() as connection:
            return await documents.draw_seqs(connection, [Known(State(), 40), Known(State(), 0)])  # type: ignore[arg-type]

    assert bench.run(draw()) == [41, 2]


def test_a_manifest_precomputed_from_another_text_is_recomputed(bench: Bench) -> None:
    arrival = to_arrival(bench.event(DocumentUpserted, 1), "live")
    folded = fold_batch([arrival], {})
    digest, fields = folded[ID].state.content_hash, arrival.fields
    assert digest is not None
    assert fields is not None
    for source in (
        (b"of another text", fields.media_type, fields.title),
        (digest, "text/of another type", fields.title),
        (digest, fields.media_type, "another title"),
    ):
        foreseen = {ID: _Chunked(source, {bench.generation.name: Manifest(b"wrong")})}
        made = _build_manifests(
            list(folded.values()), [(bench.generation, lambda texts: [1 for _ in texts])], foreseen, Counter()
        )
        assert made[ID].manifests[bench.generation.name].content_hash == digest, source


def test_a_batch_decides_on_the_rows_it_has_locked(bench: Bench) -> None:
    slow = Interrupted(bench.world, "INSERT INTO documents (id", lambda: bench.accept(2))
    bench.run(bench.stage("detect", slow).handle([bench.incoming(bench.event(DocumentUpserted, 1))]))
    assert bench.tables["documents"][ID,]["version"] == 2


def test_an_event_redelivered_after_a_kafka_outage_sends_its_hint(bench: Bench) -> None:
    record = bench.incoming(bench.event(DocumentUpserted, 1))
    bench.world.down["kafka"] = bench.loop.time() + 60
    with pytest.raises(Retryable):
        bench.run(bench.detect.handle([record]))
    bench.world.down.clear()
    assert not bench.sent(INDEX_LIVE.name)
    bench.run(bench.detect.handle([record]))
    assert len(bench.sent(INDEX_LIVE.name)) == 1


def test_a_revocation_is_announced_before_the_stores_are_updated(bench: Bench) -> None:
    bench.run(bench.accept(1))
    bench.run(bench.accept(2, kind=AccessChanged, acl_tags=[], required_tags=[]))
    (announcements,) = bench.sent(DOCUMENTS_INDEXED.name)
    assert isinstance(announcements, DocumentIndexed)
    assert announcements.state == "retired"


def test_a_keyword_write_repeated_at_the_same_version_succeeds_and_an_older_one_is_stale(bench: Bench) -> None:
    keywords = Keywords(Elasticsearch(Process(bench.world, "keywords")))  # type: ignore[arg-type]
    write = Write(INDEX, UUID(int=1), 5, {"document_id": str(ID)})
    for _ in range(2):
        (outcome,) = bench.run(keywords.apply([write]))
        assert outcome.result == "written"
    (older,) = bench.run(keywords.apply([replace(write, version=4)]))
    assert older.result == "stale"


def test_vectors_of_an_outdated_plan_are_not_written(bench: Bench) -> None:
    bench.run(bench.accept(1))
    sink = bench.stage("vectors")
    plans = bench.run(sink._plan(bench.generation, [ID], {}))
    bench.run(sink._embed(bench.generation, plans, {}, {}))
    bench.run(bench.accept(2, content="three"))
    assert bench.run(sink._write(bench.generation, plans, {}, {})) == set()
    assert not bench.tables["chunks"]


def test_a_sink_that_chunks_an_old_text_does_not_overwrite_the_manifest_of_a_newer_one(bench: Bench) -> None:
    bench.run(bench.accept(1))
    bench.tables["manifests"].clear()
    slow = Interrupted(
        bench.world, "SELECT content_hash, media_type, title FROM documents", lambda: bench.accept(2, content="three")
    )

    async def complete() -> None:
        chunker = Chunker(bench.world._counter)
        async with slow.pool.connection() as connection:
            work_items = await work.load(connection, bench.generation.name, "keywords", [ID])  # type: ignore[arg-type]
            await chunker.complete(connection, bench.generation, work_items, "keywords")  # type: ignore[arg-type]

    bench.run(complete())
    manifest = bench.tables["manifests"][ID, bench.generation.name]
    assert manifest["content_hash"] == bench.tables["documents"][ID,]["content_hash"]


def test_a_document_that_stays_pending_is_hinted_again(bench: Bench) -> None:
    bench.run(bench.accept(1))
    process = Process(bench.world, "detect")
    announcer = Announcer(process.pool, process.producer, bench.world.metrics)  # type: ignore[arg-type]
    sweeper = Sweeper(
        process.pool, process.producer, announcer, bench.world.metrics, interval_seconds=1.0, again_in_seconds=30.0
    )  # type: ignore[arg-type]
    hints = len(bench.sent(INDEX_LIVE.name))
    bench.run(asyncio.sleep(60.0))
    assert bench.run(sweeper.sweep()) == 1
    assert len(bench.sent(INDEX_LIVE.name)) == hints + 1


def test_an_announcement_lost_in_a_crash_is_sent_by_the_sweeper(bench: Bench) -> None:
    bench.run(bench.accept(1))
    for store in ("keywords", "vectors"):
        bench.run(bench.stage(store).converge(bench.generation, [ID]))
    announced = len(bench.sent(DOCUMENTS_INDEXED.name))
    bench.tables["documents"][ID,]["announced_seq"] = 0
    process = Process(bench.world, "detect")
    announcer = Announcer(process.pool, process.producer, bench.world.metrics)  # type: ignore[arg-type]
    sweeper = Sweeper(
        process.pool, process.producer, announcer, bench.world.metrics, interval_seconds=1.0, again_in_seconds=3600.0
    )  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        bench.run(asyncio.wait_for(sweeper.run(), 60.0))
    assert len(bench.sent(DOCUMENTS_INDEXED.name)) == announced + 1


def test_a_body_edited_after_its_work_was_loaded_is_not_used(bench: Bench) -> None:
    bench.run(bench.accept(1))

    async def texts_after_an_edit() -> list[dict[UUID, Any]]:
        async with Process(bench.world, "keywords").pool.connection() as connection:
            works = await work.load(connection, bench.generation.name, "keywords", [ID])  # type: ignore[arg-type]
            before = await work.bodies(connection, works)  # type: ignore[arg-type]
        await bench.accept(2, content="three")
        async with Process(bench.world, "keywords").pool.connection() as connection:
            return [before, await work.bodies(connection, works)]  # type: ignore[arg-type]

    before, after = bench.run(texts_after_an_edit())
    assert (set(before), after) == ({ID}, {})


def test_after_the_ledger_lost_recent_commits_the_audit_removes_entries_unknown_to_it(bench: Bench) -> None:
    bench.run(bench.accept(1))
    bench.run(bench.stage("keywords").converge(bench.generation, [ID]))
    bench.run(bench.stage("vectors").converge(bench.generation, [ID]))
    assert bench.world.index.standing()
    assert bench.tables["chunks"]
    bench.world.database.lose_tail(len(bench.world.database.commits))
    bench.tables["generations"][bench.generation.name,] = bench.row_of_generation
    bench.run(audited(Process(bench.world, "operator")))
    assert not bench.world.index.standing()


def test_groups_of_one_source_grant_no_access_in_another(bench: Bench) -> None:
    bench.run(bench.accept(1))
    row = dict(bench.tables["documents"][ID,])
    bench.tables["documents"][UUID(int=9),] = {**row, "source": "drive"}
    at = bench.loop.now()
    bench.tables["memberships"][TENANT, "ann", SOURCE] = {"groups": ["board"], "observed_at": at}

    async def held() -> frozenset[str]:
        async with Process(bench.world, "query").pool.connection() as connection:
            return (await identify(connection, TENANT, principals=["ann"])).tags  # type: ignore[arg-type]

    assert bench.run(held()) == {f"{SOURCE}/board", f"{SOURCE}/user:ann", "drive/user:ann"}


def test_the_access_digest_differs_for_principals_who_may_read_different_documents() -> None:
    mine = Readable((1, 2), ("s/a",), ())
    assert access_digest(mine) == access_digest(Readable((2, 1), ("s/a",), ()))
    assert len({access_digest(r) for r in (mine, Readable((1, 3), ("s/a",), ()), Readable((1, 2), ("s/b",), ()))}) == 3


def test_a_batch_of_large_documents_is_written_in_parts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 documents of 4 MiB took more memory than the worker has."""
    monkeypatch.setattr(keywords, "MAX_PLANNED_CHARACTERS", 100)
    names = [f"{NAME}{n}" for n in range(4)]
    bench.run(
        bench.detect.handle(
            [bench.incoming(bench.event(DocumentUpserted, 1, external_id=name, content="word " * 12)) for name in names]
        )
    )
    ids = [document_id(TENANT, SOURCE, name) for name in names]
    sink = bench.stage("keywords")
    assert len(bench.run(sink._plan(bench.generation, ids)).plans) == 1
    bench.run(sink.converge(bench.generation, ids))
    states = [bench.tables["index_state"][id_, bench.generation.name, "keywords"] for id_ in ids]
    assert all(state["seq"] == state["want_seq"] for state in states)


def test_a_document_whose_entries_would_repeat_very_much_is_set_aside(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MiB of text with a thousand tags of 500 characters took Elasticsearch gigabytes."""
    monkeypatch.setattr(keywords, "MAX_COMMON_BYTES", 4_000)
    bench.run(bench.accept(1, content="one", metadata={"label": "x" * 5_000}))
    sink = bench.stage("keywords")
    bench.run(sink.converge(bench.generation, [ID]))
    assert bench.state("keywords")["seq"] < bench.state("keywords")["want_seq"]
    assert "would take" in bench.state("keywords")["error"]
    assert not bench.world.index.entries
    bench.run(bench.accept(2, content="one"))
    bench.run(sink.converge(bench.generation, [ID]))
    assert bench.state("keywords")["seq"] == bench.state("keywords")["want_seq"]


async def test_few_large_texts_are_cut_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes up to 300 MB meanwhile, and there are sixteen lanes."""
    monkeypatch.setattr(manifests, "LARGE_CHARACTERS", 10)
    texts = manifests.LargeTexts()
    most = cutting = 0

    async def cut(text: str) -> None:
        nonlocal most, cutting
        async with texts.place([text]):
            cutting += 1
            most = max(most, cutting)
            await asyncio.sleep(0)
            cutting -= 1

    await asyncio.gather(*(cut("large " * 10) for _ in range(16)))
    assert most == manifests.LARGE_AT_ONCE
    most = 0
    await asyncio.gather(*(cut("small") for _ in range(16)))
    assert most == 16


def test_a_batch_of_deletes_loads_few_texts_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 32 documents has up to eight texts of 4 MiB that a delete may bring back, in each of sixteen lanes: a few
    kilobytes of deletes ended detect again and again."""
    names = [f"{NAME}{n}" for n in range(6)]

    def events(kind: type[AnyMessage], second: int, **fields: Any) -> list[Incoming]:
        return [bench.incoming(bench.event(kind, second, external_id=name, **fields)) for name in names]

    bench.run(bench.detect.handle(events(DocumentUpserted, 10, version=9, content="the higher version")))
    bench.run(bench.detect.handle(events(DocumentUpserted, 30, version=1, content="the later one")))
    monkeypatch.setattr(detect, "MAX_STORED_BYTES", 2 * len("the later one\n"))
    monkeypatch.setattr(detect, "MAX_PROMPT_STORED_BYTES", 10)
    monkeypatch.setattr(manifests, "LARGE_CHARACTERS", 10)
    loaded: list[tuple[int, bool]] = []
    load = documents.load_superseded

    async def watched(connection: Any, ids: Collection[UUID]) -> Any:
        rows = await load(connection, ids)
        loaded.append((len(rows), bench.detect._stored._places._value < manifests.LARGE_AT_ONCE))
        return rows

    monkeypatch.setattr(documents, "load_superseded", watched)
    bench.run(bench.detect.handle([*events(DocumentDeleted, 20), *events(AccessChanged, 40, acl_tags=["board"])]))
    assert loaded == [(2, True)] * 3
    for name in names:
        row = bench.tables["documents"][document_id(TENANT, SOURCE, name),]
        assert (row["version"], row["deleted_at"]) == (1, None)


def test_a_revocation_does_not_wait_for_the_stored_texts_of_other_documents(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in one transaction with deletes that waited for a place among large texts, behind long conversions."""

    def one(kind: type[AnyMessage], second: int, name: str, **fields: Any) -> Incoming:
        return bench.incoming(bench.event(kind, second, external_id=name, **fields))

    bench.run(bench.detect.handle([one(DocumentUpserted, 10, "a", version=9, content="the higher version")]))
    bench.run(bench.detect.handle([one(DocumentUpserted, 30, "a", version=1, content="the later one")]))
    bench.run(bench.detect.handle([one(DocumentUpserted, 10, "b", acl_tags=["staff"])]))
    monkeypatch.setattr(detect, "MAX_PROMPT_STORED_BYTES", 10)
    monkeypatch.setattr(manifests, "LARGE_CHARACTERS", 10)
    access = bench.tables["documents"][document_id(TENANT, SOURCE, "b"),]["access_id"]
    revoked: list[bool] = []
    load = documents.load_superseded

    async def watched(connection: Any, ids: Collection[UUID]) -> Any:
        if ids:
            revoked.append(bench.tables["documents"][document_id(TENANT, SOURCE, "b"),]["access_id"] != access)
        return await load(connection, ids)

    monkeypatch.setattr(documents, "load_superseded", watched)

    async def handle() -> None:
        async with bench.detect._large._places, bench.detect._large._places:  # held by conversions
            batch = [one(DocumentDeleted, 20, "a"), one(AccessChanged, 40, "b", acl_tags=["board"])]
            await asyncio.wait_for(bench.detect.handle(batch), 20)

    bench.run(handle())
    assert revoked == [True]
