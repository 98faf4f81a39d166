"""The Pipeline tab in a real browser, over the real stores and the real Kafka."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import pytest
import pytest_asyncio
from aiokafka.admin import AIOKafkaAdminClient

from deploy.local.stack import Stack
from pipeline.audit import runs
from pipeline.core.identity import document_id
from pipeline.kafka.admin import ensure_topics
from pipeline.kafka.client import deliver, producer
from pipeline.runtime.settings import KafkaSettings
from pipeline.stages.stage import Incoming
from tests.fakes.chat_faults import UNSUPPORTED, Faults
from tests.support.query.http_kit import service_over
from tests.support.query.library import document
from tests.web.conftest import PHONE, Site, Tabs
from topics.registry import DOCUMENTS_LIVE

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def kafka(stack: Stack) -> AsyncIterator[KafkaSettings]:
    """Topics of one's own, with a few events that nobody has taken."""
    endpoints = json.loads((stack.home / "endpoints.json").read_text())
    settings = KafkaSettings(bootstrap=endpoints["kafka"]["bootstrap"], topic_prefix=f"w{uuid4().hex[:8]}.")
    await ensure_topics(settings.bootstrap, prefix=settings.topic_prefix)
    async with producer(settings) as sending:
        await deliver(sending.send(DOCUMENTS_LIVE, document(f"late{n}", "Late.")) for n in range(4))
    yield settings
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.bootstrap)
    await admin.start()
    await admin.delete_topics([t for t in await admin.list_topics() if t.startswith(settings.topic_prefix)])
    await admin.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lived(site: Site) -> Site:
    """A day's life: documents that became searchable hour by hour, connectors, an audit, dead letters."""
    library = site.library
    await library.pool.check()  # another test may have killed the server since the site was made
    await library.put(*(document(f"past/{n}", f"What happened at {n}.", tenant="busy") for n in range(96)))
    await library.execute("UPDATE documents SET changed_at = received_at - interval '2 seconds'")
    dice = random.Random(7)
    rows = await library.execute("SELECT id FROM documents WHERE tenant = 'busy' ORDER BY external_id")
    for n, (id_,) in enumerate(rows):
        ago, fresh = n * 15 + 1, dice.lognormvariate(1.2, 0.7) + (150 if n == 40 else 0)
        await library.execute(
            "UPDATE documents SET received_at = now() - make_interval(mins => %s),"
            " changed_at = now() - make_interval(mins => %s, secs => 1) WHERE id = %s",
            ago,
            ago,
            id_,
        )
        await library.execute(
            "UPDATE index_state SET pending_since = now() - make_interval(mins => %s), settled_at = now()"
            " - make_interval(mins => %s) + make_interval(secs => %s) WHERE document_id = %s",
            ago,
            ago,
            fresh,
            id_,
        )
    async with library.pool.connection() as connection:
        run = await runs.start(connection, library.generation.name, "background")
        await runs.save(connection, replace(run, documents=106, chunks=120), [], finished=True)
    statuses = {
        "wiki": ("confluence", {"changes": ("idle", 20), "sweep": ("idle", 300)}, {"upserted": 48_211}),
        "git-guide": ("git", {"changes": ("idle", 45), "sweep": ("idle", 480)}, {"upserted": 3_020, "deleted": 12}),
        "chat": ("slack", {"changes": ("needs attention", 9_000), "sweep": ("idle", 9_100)}, {"upserted": 99_211}),
    }
    for source, (kind, activities, counts) in statuses.items():
        await library.execute(
            "INSERT INTO connectors (tenant, source, kind, loaded_at, activities, counts, seen_at) SELECT 'acme', %s,"
            " %s, now(), jsonb_object_agg(key, jsonb_build_object('state', value->>0, 'reason',"
            " CASE WHEN value->>0 <> 'idle' THEN 'the token was revoked: make a new one'"
            " END, 'succeeded_at', now() - make_interval(secs => (value->>1)::int))), %s, now() + interval '1 hour'"
            " FROM jsonb_each(%s::jsonb)",
            source,
            kind,
            json.dumps(counts),
            json.dumps(activities),
        )
    return site


async def test_operators_see_freshness_lag_problems_and_dead_letters(
    tabs: Tabs, lived: Site, kafka: KafkaSettings
) -> None:
    library = replace(lived.library, settings=lived.library.settings.model_copy(update={"kafka": kafka}))
    async with service_over(library) as (client, _):
        tab = await tabs.new(who=None, url=str(client.base_url).rstrip("/"), size={"width": 1200, "height": 1150})
        await tab.open()
        await tab.page.click(".tabs a:has-text('Pipeline')")
        await tab.page.wait_for_selector(".tile:has-text('Lag')", timeout=60_000)  # a busy Kafka is asked again
        shown = await tab.page.inner_text("#view-pipeline")
        assert "Unavailable" not in shown
        assert "needs attention" in shown
        assert "the token was revoked" in shown
        assert "documents.live.v1" in shown
        assert "Both stores agree with the ledger." in shown
        assert "99 of 100 documents within" in str(await tab.page.get_attribute(".spark", "aria-label"))
        assert await tab.page.locator(".spark .line").count() >= 1
        assert await tab.page.inner_text(".tile:has-text('Lag') .value") == "4"
        assert await tab.page.inner_text(".tile:has-text('Dead letters') .value") == "0"
        await tab.shoot("pipeline")
        # It looks again by itself.
        await library.detect.handle([Incoming("documents.live.v1", 0, 90_001, b"acme/wiki/x", b"{", [], "live")])
        await tab.page.wait_for_selector(".tile.bad:has-text('Dead letters')")
        assert await tab.page.inner_text(".tile:has-text('Dead letters') .value") == "1"
        await tab.page.go_back()
        assert not await tab.page.is_visible("#view-pipeline")


async def test_operators_review_unsupported_answers(tabs: Tabs, lived: Site) -> None:
    tabs.site.chat.faults = Faults(say=f"{UNSUPPORTED} Nobody else was asked.")
    asker = await tabs.new()
    await asker.open("?q=who+was+awarded+the+contract+for+stash+entries&answer=1")
    await asker.page.wait_for_selector("#answer:not([aria-busy]) .by:has-text('marked for review')")
    tab = await tabs.new(who=None)
    await tab.open("?view=pipeline")
    entry = tab.page.locator(".reviews > li:has-text('awarded the contract for stash')")
    await entry.locator("summary").click()
    assert UNSUPPORTED in " ".join((await entry.locator(".prose").inner_text()).split())
    assert "0 % supported" in await entry.inner_text()
    await entry.get_by_text("Wrong", exact=True).click()
    await entry.wait_for(state="detached")
    [(verdict,)] = await lived.library.execute(
        "SELECT resolved_as FROM answer_reviews WHERE question LIKE '%%awarded the contract for stash%%'"
    )
    assert verdict == "wrong"


async def test_operators_decide_on_contradictions_that_they_may_read(tabs: Tabs, lived: Site) -> None:
    [(conflict,)] = await lived.library.execute(
        "INSERT INTO conflicts (id, tenant, generation, kind, document_a, document_b, chunk_a, chunk_b, places)"
        " SELECT gen_random_uuid(), a.tenant, m.generation, 'number', a.id, b.id, m.chunk_ids[1], n.chunk_ids[1],"
        " '[[\"number\", [0, 4], [0, 4]]]' FROM documents a JOIN documents b ON b.access_id = a.access_id"
        " JOIN access_sets s ON s.id = a.access_id AND s.acl_tags = ARRAY[a.source || '/staff']"
        " JOIN generations g ON g.state = 'active'"
        " JOIN manifests m ON m.document_id = a.id AND m.generation = g.name AND cardinality(m.chunk_ids) > 0"
        " JOIN manifests n ON n.document_id = b.id AND n.generation = g.name AND cardinality(n.chunk_ids) > 0"
        " WHERE a.tenant = 'acme' AND b.id > a.id AND a.deleted_at IS NULL AND b.deleted_at IS NULL"
        " AND s.required_tags = '{}' LIMIT 1 RETURNING id"
    )
    tab = await tabs.new(who=None)
    await tab.open("?view=pipeline")
    entry = tab.page.locator(".reviews > li:has-text('Different numbers')")
    await tab.page.wait_for_selector(".tile")
    assert await entry.count() == 1, await tab.page.inner_text("#view-pipeline")
    await entry.locator("summary").click()
    assert len((await entry.locator(".prose").first.inner_text()).split()) > 3
    await entry.get_by_text("Dismiss", exact=True).click()
    await entry.wait_for(state="detached")
    [(state,)] = await lived.library.execute("SELECT state FROM conflict_decisions WHERE conflict_id = %s", conflict)
    assert state == "dismissed"


async def test_markup_in_a_contradiction_is_shown_as_text_and_leads_nowhere(tabs: Tabs, lived: Site) -> None:
    """No script runs and nothing is loaded: the fixture asserts it too."""
    hostile = "<img src=x onerror=window.harmed=1>[a](javascript:window.harmed=1)<script>window.harmed=1</script>"
    made = [document(f"{n}{hostile}", f"{hostile} {n} tons", title=f"{n} {hostile}") for n in (7, 8)]
    await lived.library.put(*made)
    ids = [document_id(of.tenant, of.source, of.external_id) for of in made]
    # As rows that are older than the check of addresses.
    script = "javascript:window.harmed=1"
    await lived.library.execute("UPDATE documents SET source_url = %s WHERE id = ANY(%s)", script, ids)
    await lived.library.execute(
        "INSERT INTO conflicts (id, tenant, generation, kind, document_a, document_b, chunk_a, chunk_b, places)"
        " SELECT gen_random_uuid(), 'acme', g.name, 'unit', %s, %s, m.chunk_ids[1], n.chunk_ids[1], '[]'"
        " FROM generations g JOIN manifests m ON m.generation = g.name JOIN manifests n ON n.generation = g.name"
        " WHERE g.state = 'active' AND m.document_id = %s AND n.document_id = %s",
        *ids,
        *ids,
    )
    tab = await tabs.new(who=None)
    await tab.open("?view=pipeline")
    entry = tab.page.locator(".reviews > li:has-text('Different units')")
    await entry.locator("summary").click()
    assert (await entry.inner_text()).count("<script>window.harmed=1</script>") >= 4
    assert await entry.locator("img, script, a").count() == 0
    assert await tab.page.evaluate("window.harmed") is None
    await entry.get_by_text("Dismiss", exact=True).click()
    await entry.wait_for(state="detached")


async def test_a_contradiction_with_a_passage_that_the_operator_may_not_read_is_not_listed(
    tabs: Tabs, lived: Site
) -> None:
    [_] = await lived.library.execute(
        "INSERT INTO conflicts (id, tenant, generation, kind, document_a, document_b, chunk_a, chunk_b, places)"
        " SELECT gen_random_uuid(), a.tenant, m.generation, 'negation', a.id, b.id, m.chunk_ids[1], n.chunk_ids[1],"
        " '[[\"negation\", [0, 4], [0, 4]]]' FROM documents a JOIN documents b ON b.tenant = a.tenant"
        " JOIN access_sets s ON s.id = a.access_id AND s.acl_tags = ARRAY[a.source || '/staff']"
        " JOIN access_sets t ON t.id = b.access_id AND NOT t.acl_tags && ARRAY[b.source || '/staff']"
        " JOIN generations g ON g.state = 'active'"
        " JOIN manifests m ON m.document_id = a.id AND m.generation = g.name AND cardinality(m.chunk_ids) > 0"
        " JOIN manifests n ON n.document_id = b.id AND n.generation = g.name AND cardinality(n.chunk_ids) > 0"
        " WHERE a.tenant = 'acme' AND a.deleted_at IS NULL AND b.deleted_at IS NULL LIMIT 1 RETURNING id"
    )
    tab = await tabs.new(who=None)
    await tab.open("?view=pipeline")
    await tab.page.wait_for_selector(".tile")
    assert await tab.page.locator(".reviews > li:has-text('Denied on one side')").count() == 0


async def test_unavailable_parts_are_named_and_the_others_shown(tabs: Tabs, lived: Site) -> None:
    """This site has no Kafka, and the queue of answers does not answer."""
    tab = await tabs.new(who=None, size=PHONE, theme="dark")
    refused = {"title": "The service is busy", "detail": "ask again later", "status": 503}
    await tab.page.route("**/v1/review*", lambda route: route.fulfill(status=503, body=json.dumps(refused)))
    await tab.open("?view=pipeline")
    await tab.page.wait_for_selector(".tile")
    shown = await tab.page.inner_text("#view-pipeline")
    assert "Unavailable: Kafka" in shown
    assert "Unavailable: answers to review: ask again later" in shown
    assert await tab.page.locator(".tile:has-text('Lag')").count() == 0
    assert await tab.page.locator(".tile:has-text('Fresh within')").count() == 1
    assert "null" not in await tab.page.inner_text("#view-pipeline")
    assert await tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


async def test_without_the_operator_role_the_pipeline_tab_is_hidden_and_its_address_says_why(tabs: Tabs) -> None:
    tab = await tabs.new()
    await tab.open()
    await tab.page.wait_for_selector(".landing")
    assert not await tab.page.is_visible(".tabs a:has-text('Pipeline')")
    await tab.open("?view=pipeline")
    await tab.page.wait_for_selector("#view-pipeline .doubt")
    assert "for operators only" in await tab.page.inner_text("#view-pipeline")
