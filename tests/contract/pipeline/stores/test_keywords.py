"""The keyword store's laws, on a real Elasticsearch."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from aiohttp import web
from elastic_transport import ConnectionError
from elasticsearch import AsyncElasticsearch, BadRequestError

from deploy.local.service import HOST, free_port
from deploy.local.stack import Service, Stack
from pipeline.audit.reading import KEEP_ALIVE
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.identity import EVERYONE
from pipeline.runtime.settings import ElasticsearchSettings
from pipeline.stores import elasticsearch as es_store
from pipeline.stores import keywords as keywords_module
from pipeline.stores.keywords import PATIENT_AT_ONCE, Keywords, Outcome, Write
from pipeline.stores.refresh import AT_ONCE, INTERVAL_SECONDS, Refresher
from tests.support.pipeline.es_proxy import Proxy, answer, api_error, proxied

pytestmark = pytest.mark.stack

WRITTEN = Outcome("written")
CANARY = "canary-7f3a"


def entry(text: str = "", **fields: object) -> dict[str, object]:
    return {
        "document_id": str(UUID(int=1)),
        "tenant": "t",
        "source": "s",
        "external_id": "a.md",
        "title": "",
        "headings": [],
        "text": text,
        "acl_tags": ["s/all"],
        "required_tags": [EVERYONE],
        "required_count": 1,
        "metadata": {},
        **fields,
    }


def server(stack: Stack) -> Service:
    return next(service for service in stack.services() if service.name == "elasticsearch")


@pytest.fixture
def elasticsearch_settings(stack: Stack) -> ElasticsearchSettings:
    return ElasticsearchSettings(url=server(stack).url)


@pytest.fixture
async def es(elasticsearch_settings: ElasticsearchSettings) -> AsyncIterator[AsyncElasticsearch]:
    client = es_store.connect(elasticsearch_settings)
    yield client
    await client.close()


@pytest.fixture
async def index(es: AsyncElasticsearch) -> AsyncIterator[str]:
    name = f"chunks-test-{uuid4().hex[:12]}"
    await es_store.create_index(es, name)
    yield name
    await es_store.drop_index(es, name)
    await es.indices.delete_index_template(name=name)


@pytest.fixture
async def store(elasticsearch_settings: ElasticsearchSettings) -> AsyncIterator[Keywords]:
    keywords = Keywords(es_store.connect(elasticsearch_settings), retry_seconds=2.0)
    yield keywords
    await keywords.aclose()


@pytest.fixture
async def proxy(elasticsearch_settings: ElasticsearchSettings) -> AsyncIterator[Proxy]:
    async with proxied(elasticsearch_settings.url) as running:
        yield running


@pytest.fixture
async def behind_proxy(proxy: Proxy) -> AsyncIterator[Keywords]:
    keywords = Keywords(es_store.connect(ElasticsearchSettings(url=proxy.url)), retry_seconds=2.0)
    yield keywords
    await keywords.aclose()


async def search_ids(es: AsyncElasticsearch, index: str, query: Mapping[str, object]) -> set[str]:
    await es.indices.refresh(index=index)
    return {hit["_id"] for hit in (await es.search(index=index, query=query))["hits"]["hits"]}


# --- the index ------------------------------------------------------------------------------------------------------


async def test_nobody_opens_a_search_that_shows_erased_passages_for_hours(es: AsyncElasticsearch, index: str) -> None:
    with pytest.raises(BadRequestError, match="too large"):
        await es.open_point_in_time(index=index, keep_alive="24h")
    opened = await es.open_point_in_time(index=index, keep_alive=KEEP_ALIVE)
    await es.close_point_in_time(id=opened["id"])


async def test_a_request_that_one_node_does_not_answer_is_sent_to_the_next_only_if_it_reads(
    elasticsearch_settings: ElasticsearchSettings,
) -> None:
    nobody = f"http://{HOST}:{free_port()}"
    both = elasticsearch_settings.model_copy(update={"url": f"{nobody},{elasticsearch_settings.url}"})
    async with es_store.connect(both, reads_only=True) as reads, es_store.connect(both) as writes:
        for _ in range(4):
            assert (await reads.cluster.health())["status"] in ("green", "yellow")
        outcomes = await asyncio.gather(*(writes.cluster.health() for _ in range(2)), return_exceptions=True)
        assert sum(isinstance(outcome, ConnectionError) for outcome in outcomes) == 1


async def test_creating_the_keyword_index_again_changes_nothing(es: AsyncElasticsearch, index: str) -> None:
    before = (await es.indices.get(index=index)).body
    await asyncio.gather(*(es_store.create_index(es, index) for _ in range(3)))
    assert (await es.indices.get(index=index)).body == before


async def test_concurrent_creation_of_the_index_succeeds(es: AsyncElasticsearch) -> None:
    name = f"chunks-test-{uuid4().hex[:12]}"
    await asyncio.gather(*(es_store.create_index(es, name) for _ in range(4)))
    assert await es.indices.exists(index=name)
    await es_store.drop_index(es, name)
    await es_store.drop_index(es, name)  # again: fine
    await es.indices.delete_index_template(name=name)


async def test_an_index_with_another_mapping_is_misconfigured(es: AsyncElasticsearch) -> None:
    name = f"chunks-test-{uuid4().hex[:12]}"
    await es.indices.create(index=name, mappings={"properties": {"text": {"type": "keyword"}, "own": {"type": "long"}}})
    with pytest.raises(Misconfigured, match=rf"{name} has other settings than expected") as raised:
        await es_store.create_index(es, name)
    assert "\n" not in str(raised.value)
    await es_store.drop_index(es, name)
    await es.indices.delete_index_template(name=name)


async def test_an_index_of_an_earlier_version_gets_the_new_fields(
    es: AsyncElasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"chunks-test-{uuid4().hex[:12]}"
    earlier = {k: v for k, v in es_store.MAPPING["properties"].items() if k not in es_store.ADDED_FIELDS}
    with monkeypatch.context() as before:
        before.setattr(es_store, "MAPPING", {**es_store.MAPPING, "properties": earlier})
        await es_store.create_index(es, name)
    for _ in range(2):
        await es_store.extend_index(es, name)
    fields = (await es.indices.get_mapping(index=name))[name]["mappings"]["properties"]
    assert fields["keys"] == {"type": "keyword"}
    await es_store.create_index(es, name)  # and counts as one of this version
    await es_store.extend_index(es, f"{name}-missing")
    await es_store.drop_index(es, name)
    await es.indices.delete_index_template(name=name)


async def test_a_live_index_can_be_tuned(es: AsyncElasticsearch, index: str) -> None:
    await es_store.tune_index(es, index, replicas=0, refresh_interval="-1")
    settings = (await es.indices.get_settings(index=index))[index]["settings"]["index"]
    assert (settings["refresh_interval"], settings["translog"]["durability"]) == ("-1", "request")
    await es_store.create_index(es, index)  # tuning does not make it another index


# --- searching what was written -------------------------------------------------------------------------------------


async def test_english_text_is_stemmed_and_the_exact_field_is_not(
    es: AsyncElasticsearch, index: str, store: Keywords
) -> None:
    a, b = uuid4(), uuid4()
    writes = [
        Write(index, a, 1, entry("The runners were running, see PROJ-4821.", title="Connections")),
        Write(index, b, 1, entry("See PROJ-4822 and foo_bar.")),
    ]
    assert await store.apply(writes) == [WRITTEN, WRITTEN]
    assert await search_ids(es, index, {"match": {"text": "run"}}) == {str(a)}
    assert await search_ids(es, index, {"match": {"title": "connect"}}) == {str(a)}
    assert await search_ids(es, index, {"match": {"text.exact": "run"}}) == set()
    assert await search_ids(es, index, {"match_phrase": {"text.exact": "proj-4821"}}) == {str(a)}
    assert await search_ids(es, index, {"match": {"text.exact": "FOO_BAR"}}) == {str(b)}
    assert await search_ids(es, index, {"term": {"title.raw": "Connections"}}) == {str(a)}


async def test_bm25_uses_the_configured_parameters(es: AsyncElasticsearch, index: str, store: Keywords) -> None:
    chunk = uuid4()
    await store.apply([Write(index, chunk, 1, entry("turbine water"))])
    await store.refreshed(index)
    for field in ("text", "text.exact"):
        answer = await es.explain(index=index, id=str(chunk), query={"match": {field: "turbine"}})
        explained = str(answer["explanation"])
        assert "'value': 1.5, 'description': 'k1" in explained
        assert "'value': 0.75, 'description': 'b" in explained


async def test_an_entry_is_matched_only_with_all_required_tags(
    es: AsyncElasticsearch, index: str, store: Keywords
) -> None:
    free, bound, broken = uuid4(), uuid4(), uuid4()
    await store.apply(
        [
            Write(index, free, 1, entry("x")),
            Write(index, bound, 1, entry("x", required_tags=[EVERYONE, "s/r1", "s/r2"], required_count=3)),
            Write(index, broken, 1, entry("x", required_tags=[], required_count=0)),
        ]
    )

    async def seen_with(*tags: str) -> set[str]:
        terms = {"terms": [EVERYONE, *tags], "minimum_should_match_field": "required_count"}
        return await search_ids(es, index, {"bool": {"filter": [{"terms_set": {"required_tags": terms}}]}})

    assert await seen_with() == {str(free)}
    assert await seen_with("s/r1") == {str(free)}
    assert await seen_with("s/r1", "s/r2", "s/r3") == {str(free), str(bound)}


# --- versions -------------------------------------------------------------------------------------------------------


async def test_a_write_of_the_same_version_succeeds_and_an_older_one_is_stale(index: str, store: Keywords) -> None:
    chunk = uuid4()
    assert await store.apply([Write(index, chunk, 7, entry("first"))]) == [WRITTEN]
    assert await store.apply([Write(index, chunk, 7, entry("retried"))]) == [WRITTEN]
    assert await store.apply([Write(index, chunk, 6, entry("late"))]) == [Outcome("stale", newer_version=7)]
    assert await store.apply([Write(index, chunk, 6, None)]) == [Outcome("stale", newer_version=7)]
    stands = await store.get(index, chunk)
    assert stands is not None
    assert (stands[0], stands[1]["text"]) == (7, "retried")


async def test_a_write_older_than_a_delete_is_stale(index: str, store: Keywords) -> None:
    chunk = uuid4()
    await store.apply([Write(index, chunk, 3, entry("old"))])
    assert await store.apply([Write(index, chunk, 5, None)]) == [WRITTEN]
    assert await store.apply([Write(index, chunk, 4, entry("late"))]) == [Outcome("stale", newer_version=5)]
    assert await store.get(index, chunk) is None
    assert await store.apply([Write(index, chunk, 5, None)]) == [WRITTEN]  # a repeat


async def test_deleting_a_missing_entry_succeeds_and_makes_older_writes_stale(index: str, store: Keywords) -> None:
    chunk = uuid4()
    assert await store.apply([Write(index, chunk, 9, None)]) == [WRITTEN]
    assert await store.apply([Write(index, chunk, 8, entry("late"))]) == [Outcome("stale", newer_version=9)]


async def test_one_call_may_hold_several_writes_of_one_chunk(index: str, store: Keywords) -> None:
    chunk = uuid4()
    outcomes = await store.apply(
        [Write(index, chunk, 2, entry("b")), Write(index, chunk, 1, entry("a")), Write(index, chunk, 3, None)]
    )
    assert outcomes == [WRITTEN, Outcome("stale", newer_version=2), WRITTEN]
    assert await store.apply([]) == []


# --- faults ---------------------------------------------------------------------------------------------------------


async def test_a_refused_entry_does_not_affect_others_and_is_not_quoted(index: str, store: Keywords) -> None:
    writes = [
        Write(index, uuid4(), 1, entry("good")),
        Write(index, uuid4(), 1, entry("x", surprise=CANARY)),
        Write(index, uuid4(), 1, entry("x", required_count=CANARY)),
        Write(index, uuid4(), 1, entry("x", source_modified_at=CANARY)),
        Write(index, uuid4(), 1, entry("x", author="a" * 40_000)),
        Write(index, uuid4(), 1, entry("also good")),
    ]
    outcomes = await store.apply(writes)
    assert [outcome.result for outcome in outcomes] == ["written", *["refused"] * 4, "written"]
    assert outcomes[1].reason == "strict_dynamic_mapping_exception: surprise"
    assert outcomes[2].reason == "document_parsing_exception: required_count"
    assert CANARY not in repr(outcomes)
    assert all(len(outcome.reason) < 250 for outcome in outcomes)


async def test_metadata_with_unusual_names_and_long_values_is_accepted(
    es: AsyncElasticsearch, index: str, store: Keywords
) -> None:
    """Names with dots or odd signs, and values longer than Lucene takes, harm nothing."""
    values = {"short": "yes", "list": [1, 2.5, True], "null": None, "long": "ß" * 40_000, "한" * 200: "한" * 8_000}
    names = {"a": 1, "a.b": 2, "a..c": 3, ".": 4, "..": 5, " ": 6, "a.": 7, ".a": 8, "_id": 9, "🏖": "🏖" * 8_000}
    chunks = [uuid4() for _ in range(3)]
    bodies = [entry("x", metadata=metadata) for metadata in (values, names, {str(n): n for n in range(2_000)})]
    writes = [Write(index, chunk, 1, body) for chunk, body in zip(chunks, bodies, strict=True)]
    assert await store.apply(writes) == [WRITTEN] * 3
    assert await search_ids(es, index, {"term": {"metadata.short": "yes"}}) == {str(chunks[0])}
    assert await search_ids(es, index, {"term": {"metadata.list": "true"}}) == {str(chunks[0])}
    assert await search_ids(es, index, {"term": {"metadata.a.b": "2"}}) == {str(chunks[1])}


async def test_the_longest_fields_allowed_on_the_wire_are_accepted(index: str, store: Keywords) -> None:
    longest = entry(
        "x",
        external_id="한" * 2_000,
        title="한" * 4_000,
        author="한" * 1_000,
        media_type="한" * 200,
        source_url="한" * 8_000,
        acl_tags=["한" * 701],
        source_modified_at="0002-01-01T00:00:00+00:00",
    )
    latest = entry("x", source_modified_at="9998-12-31T23:59:59.999999+00:00", source_url=None, author=None)
    assert await store.apply([Write(index, uuid4(), 1, longest), Write(index, uuid4(), 1, latest)]) == [WRITTEN] * 2


@pytest.mark.parametrize("cluster_would_create_it", [False, True])
async def test_a_dropped_index_stays_dropped(
    es: AsyncElasticsearch, index: str, store: Keywords, cluster_would_create_it: bool
) -> None:
    await store.apply([Write(index, uuid4(), 1, entry("x"))])
    await es_store.drop_index(es, index)
    if cluster_would_create_it:
        await es.cluster.put_settings(transient={"action.auto_create_index": "true"})
    try:
        for body in (entry("late"), None):
            with pytest.raises(Misconfigured, match="index_not_found_exception"):
                await store.apply([Write(index, uuid4(), 2, body)])
        for call in (store.refreshed(index), store.count(index), store.get(index, uuid4())):
            with pytest.raises(Misconfigured, match="the index does not exist"):
                await call
        assert not await es.indices.exists(index=index)
    finally:
        await es.cluster.put_settings(transient={"action.auto_create_index": None})


async def test_a_bulk_request_rejected_as_too_large_is_split(
    proxy: Proxy, behind_proxy: Keywords, index: str, store: Keywords
) -> None:
    """Proxies take less than Elasticsearch does (nginx: 1 MB unless told otherwise)."""
    proxy.fault = lambda path, body: api_error(413, "too_large") if len(body) > 20_000 else None
    writes = [Write(index, uuid4(), 1, entry("word " * 1_000)) for _ in range(10)]
    writes.insert(4, Write(index, uuid4(), 1, entry("word " * 6_000)))
    outcomes = await behind_proxy.apply(writes)
    assert outcomes.pop(4) == Outcome("refused", reason="request_too_large")
    assert outcomes == [WRITTEN] * 10
    await store.refreshed(index)
    assert await store.count(index) == 10


async def test_bulk_requests_stay_within_their_size_and_operation_limits(
    proxy: Proxy, behind_proxy: Keywords, index: str
) -> None:
    large = [Write(index, uuid4(), 1, entry("ü " * 130_000)) for _ in range(4)]
    small = [Write(index, uuid4(), 1, None) for _ in range(1_500)]
    assert await behind_proxy.apply([*large, *small]) == [WRITTEN] * 1_504
    sizes = [len(body) for _, body in proxy.requests]
    operations = [body.count(b"version_type") for _, body in proxy.requests]
    assert max(sizes) <= keywords_module.MAX_REQUEST_BYTES
    assert operations == [2, 1_000, 502]


async def test_only_throttled_bulk_items_are_sent_again(
    proxy: Proxy, behind_proxy: Keywords, index: str, store: Keywords
) -> None:
    proxy.put_off = 8
    writes = [Write(index, uuid4(), 1, entry(f"text {n}")) for n in range(10)]
    writes[3] = Write(index, writes[3].id, 1, entry("x", surprise=1))
    outcomes = await behind_proxy.apply(writes)
    assert [outcome.result for outcome in outcomes] == [*["written"] * 3, "refused", *["written"] * 6]
    operations = [body.count(b"version_type") for path, body in proxy.requests]
    assert operations == [10, 5, 3]
    await store.refreshed(index)
    assert await store.count(index) == 9


async def test_a_server_that_stays_overloaded_is_retryable(proxy: Proxy, behind_proxy: Keywords, index: str) -> None:
    proxy.put_off = 1_000_000
    with pytest.raises(Retryable, match="puts off 1 write"):
        await behind_proxy.apply([Write(index, uuid4(), 1, entry("x"))])
    assert len(proxy.requests) > 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_an_overloaded_server_is_retried_and_then_retryable(
    proxy: Proxy, behind_proxy: Keywords, index: str, status: int
) -> None:
    proxy.fault = lambda path, body: api_error(status, "busy") if len(proxy.requests) == 1 else None
    assert await behind_proxy.apply([Write(index, uuid4(), 1, entry("x"))]) == [WRITTEN]
    proxy.fault = lambda path, body: api_error(status, "busy")
    with pytest.raises(Retryable, match=f"{status} busy"):
        await behind_proxy.apply([Write(index, uuid4(), 1, entry("x"))])


async def test_a_retry_after_header_is_passed_to_the_caller(proxy: Proxy, behind_proxy: Keywords, index: str) -> None:
    proxy.fault = lambda path, body: answer(429, {"error": {"type": "busy"}}, **{"retry-after": "60"})
    with pytest.raises(Retryable) as raised:
        await behind_proxy.apply([Write(index, uuid4(), 1, entry("x"))])
    assert raised.value.retry_after == 60
    assert len(proxy.requests) == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (lambda: api_error(401, "security_exception", CANARY), Misconfigured),
        (lambda: api_error(403, "security_exception", CANARY), Misconfigured),
        (lambda: api_error(400, "illegal_argument_exception", CANARY), Misconfigured),
        (lambda: web.json_response({"items": []}), Misconfigured),  # some other server
        (lambda: web.Response(text=f"<html>{CANARY}", status=502, content_type="text/html"), Retryable),
        (lambda: web.Response(body=b"{", content_type="application/json"), Retryable),
        (
            lambda: answer(200, {"items": [{"index": {"status": 403, "error": {"type": "security_exception"}}}]}),
            Misconfigured,
        ),
    ],
)
async def test_error_responses_are_classified_and_not_quoted(
    proxy: Proxy, behind_proxy: Keywords, index: str, reply: Callable[[], web.Response], kind: type[Exception]
) -> None:
    proxy.fault = lambda path, body: reply()
    with pytest.raises(kind) as raised:
        await behind_proxy.apply([Write(index, uuid4(), 1, entry("x"))])
    assert CANARY not in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_an_unreachable_server_is_retryable() -> None:
    store = Keywords(es_store.connect(ElasticsearchSettings(url="http://127.0.0.1:9")))
    with pytest.raises(Retryable, match="cannot be reached"):
        await store.apply([Write("chunks-none", uuid4(), 1, None)])
    with pytest.raises(Retryable):
        await store.refreshed("chunks-none")
    await store.aclose()


async def test_a_refresh_without_all_primary_shards_is_retryable(
    es: AsyncElasticsearch, proxy: Proxy, behind_proxy: Keywords
) -> None:
    """Elasticsearch answers the refresh of a missing shard, after a minute (not waited for here), as this proxy does:
    200, nothing failed. What was written is not found then."""
    name = f"chunks-test-{uuid4().hex[:12]}"
    nowhere = {"number_of_replicas": 0, "routing.allocation.require.shelf": "none"}
    await es.indices.create(index=name, settings=nowhere, wait_for_active_shards=0)
    nothing = {"_shards": {"total": 1, "successful": 0, "failed": 0}}
    proxy.fault = lambda path, body: answer(200, nothing) if path.endswith("/_refresh") else None
    with pytest.raises(Retryable, match="not all of its shards"):
        await behind_proxy.refreshed(name)
    await es_store.drop_index(es, name)


async def test_a_failed_refresh_is_retryable_for_all_waiters(proxy: Proxy, behind_proxy: Keywords, index: str) -> None:
    proxy.fault = lambda path, body: answer(200, {"_shards": {"total": 2, "successful": 1, "failed": 1}})
    done = await asyncio.gather(*(behind_proxy.refreshed(index) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in done] == [Retryable] * 3
    proxy.fault = lambda path, body: None
    await behind_proxy.refreshed(index)


# --- refreshing -----------------------------------------------------------------------------------------------------


async def refreshes(es: AsyncElasticsearch, index: str) -> int:
    stats = await es.indices.stats(index=index, metric="refresh")
    return int(stats["_all"]["primaries"]["refresh"]["external_total"])


async def test_concurrent_waiters_share_refreshes(es: AsyncElasticsearch, index: str, store: Keywords) -> None:
    await es_store.tune_index(es, index, replicas=0, refresh_interval="-1")
    before = await refreshes(es, index)
    clock = asyncio.get_running_loop()
    began = clock.time()

    async def write_and_find(n: int) -> None:
        chunk = uuid4()
        await asyncio.sleep(n % 10 / 100)
        await store.apply([Write(index, chunk, 1, entry(f"w{n}", document_id=str(chunk)))])
        await store.refreshed(index)
        assert await store.versions(index, chunk) == {chunk: 1}

    await asyncio.gather(*(write_and_find(n) for n in range(50)))
    most = 1 + AT_ONCE + (clock.time() - began) / INTERVAL_SECONDS
    assert 1 <= await refreshes(es, index) - before <= most


async def test_after_a_pause_only_a_few_refreshes_run_without_delay(es: AsyncElasticsearch, index: str) -> None:
    clock = asyncio.get_running_loop()
    refresher = Refresher(es, index, interval_seconds=5.0)
    began = clock.time()
    for _ in range(1 + AT_ONCE):
        await refresher.refreshed()
    assert clock.time() - began < AT_ONCE * 5.0 / 2, "at an even pace it would be twice that"
    await refresher.refreshed()
    assert clock.time() - began >= 5


async def test_a_patient_waiter_joins_a_later_refresh_unless_another_waiter_needs_one_sooner(
    es: AsyncElasticsearch, index: str
) -> None:
    await es_store.tune_index(es, index, replicas=0, refresh_interval="-1")
    clock = asyncio.get_running_loop()
    refresher = Refresher(es, index, interval_seconds=2.0)
    with refresher.writing(), refresher.writing(), refresher.writing():  # both who wait here, and somebody else
        began = clock.time()
        await refresher.refreshed()
        await refresher.refreshed(patient=True)
        assert clock.time() - began >= 4
        began, before = clock.time(), await refreshes(es, index)
        patient = asyncio.create_task(refresher.refreshed(patient=True))
        await asyncio.sleep(0)
        await refresher.refreshed()
        await asyncio.wait_for(patient, 60)
        assert await refreshes(es, index) - before == 1
        assert clock.time() - began < 3, "by patience it would be four"


@pytest.mark.parametrize("how", ["come to wait", "leave"])
async def test_a_patient_waiter_is_served_once_no_other_writer_is_left(
    es: AsyncElasticsearch, index: str, how: str
) -> None:
    clock = asyncio.get_running_loop()
    refresher = Refresher(es, index, interval_seconds=5.0)
    await refresher.refreshed()
    began = clock.time()

    async def writes() -> None:
        with refresher.writing():
            await refresher.refreshed(patient=True)

    with refresher.writing():
        first = asyncio.create_task(writes())
        await asyncio.sleep(1.5)
        assert not first.done(), "somebody still writes: one refresh may do for both"
        if how == "come to wait":
            await refresher.refreshed(patient=True)
    await first
    assert clock.time() - began < 5, "nobody could have joined: it would be ten"


async def test_a_cancelled_waiter_does_not_cancel_the_others(index: str, store: Keywords) -> None:
    waiters = [asyncio.create_task(store.refreshed(index)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    done = await asyncio.gather(*waiters, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert done[1:] == [None, None]


async def test_closing_the_store_ends_waiting_for_a_refresh(
    elasticsearch_settings: ElasticsearchSettings, index: str
) -> None:
    store = Keywords(es_store.connect(elasticsearch_settings))
    await store.refreshed(index)
    with store.writing(index), store.writing(index):
        waiter = asyncio.create_task(store.refreshed(index, patient=True))  # a second from now
        await asyncio.sleep(0.05)
        await store.aclose()
        with pytest.raises(Retryable):
            await waiter


async def test_backfill_bulks_are_limited_in_number_and_do_not_delay_live_ones(
    index: str, store: Keywords, monkeypatch: pytest.MonkeyPatch
) -> None:
    bulk, under_way, go_on = store._bulk, 0, asyncio.Event()
    most = 0

    async def held_up(operations: Sequence[Any]) -> list[Mapping[str, Any]]:
        nonlocal most, under_way
        if operations[0].write.version == 1:  # the backfill's
            under_way += 1
            most = max(most, under_way)
            await go_on.wait()
            under_way -= 1
        return await bulk(operations)

    monkeypatch.setattr(store, "_bulk", held_up)
    backfill = [
        asyncio.create_task(store.apply([Write(index, uuid4(), 1, entry("old"))], patient=True)) for _ in range(8)
    ]
    assert await asyncio.wait_for(store.apply([Write(index, uuid4(), 2, entry("live"))]), 60) == [WRITTEN]
    go_on.set()
    assert await asyncio.gather(*backfill) == [[WRITTEN]] * 8
    assert most == PATIENT_AT_ONCE


# --- reading back ---------------------------------------------------------------------------------------------------


async def test_all_chunks_of_a_large_document_are_listed(index: str, store: Keywords) -> None:
    document, other = uuid4(), uuid4()
    chunks = {uuid4(): n + 1 for n in range(10_000)}
    body = entry("some words here", document_id=str(document))
    outcomes = await store.apply([Write(index, chunk, version, body) for chunk, version in chunks.items()])
    assert outcomes == [WRITTEN] * 10_000
    await store.apply([Write(index, uuid4(), 10_500, entry("x", document_id=str(other)))])
    await store.refreshed(index)
    assert await store.versions(index, document) == chunks
    assert list((await store.versions(index, other)).values()) == [10_500]
    assert await store.versions(index, uuid4()) == {}
    assert await store.count(index) == 10_001
    assert await store.highest_version(index) == 10_500


async def test_an_empty_index_has_no_highest_version(index: str, store: Keywords) -> None:
    assert await store.highest_version(index) == 0


# --- a server that stops --------------------------------------------------------------------------------------------


async def sent_until_done(store: Keywords, writes: list[Write]) -> list[Outcome]:
    for _ in range(240):  # a busy machine takes a minute and more to start Elasticsearch
        try:
            return await store.apply(writes)
        except Retryable:
            await asyncio.sleep(0.5)
    raise TimeoutError("the server did not come back")


async def test_a_hanging_server_is_retryable_and_the_repeated_write_succeeds(
    stack: Stack, elasticsearch_settings: ElasticsearchSettings, index: str
) -> None:
    """Paused, the server neither answers nor refuses. The caller sends all again, and nothing was harmed."""
    impatient = elasticsearch_settings.model_copy(update={"request_timeout_seconds": 1.0})
    store = Keywords(es_store.connect(impatient))
    writes = [Write(index, uuid4(), 1, entry("x")) for _ in range(20)]
    await store.apply(writes[:5])
    pid = server(stack).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(Retryable, match="may or may not"):
            await store.apply(writes)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert await sent_until_done(store, writes) == [WRITTEN] * 20
    await store.refreshed(index)
    assert await store.count(index) == 20
    await store.aclose()


async def test_a_killed_server_loses_no_acknowledged_write(stack: Stack, index: str, store: Keywords) -> None:
    before = [Write(index, uuid4(), 5, entry("x")) for _ in range(500)]
    gone = uuid4()
    await store.apply([*before, Write(index, gone, 9, None)])
    stack.kill("elasticsearch")
    try:
        with pytest.raises(Retryable):
            await store.apply([Write(index, uuid4(), 6, entry("x"))])
        with pytest.raises(Retryable):
            await store.refreshed(index)
    finally:
        starting = asyncio.create_task(asyncio.to_thread(stack.start, "elasticsearch"))
    outcomes = await sent_until_done(store, [Write(index, write.id, 4, None) for write in before[:10]])
    await starting
    assert outcomes == [Outcome("stale", newer_version=5)] * 10
    # A delete's version outlives the server too: it stands in the translog.
    assert await store.apply([Write(index, gone, 8, entry("late"))]) == [Outcome("stale", newer_version=9)]
    await store.refreshed(index)
    assert await store.count(index) == 500
