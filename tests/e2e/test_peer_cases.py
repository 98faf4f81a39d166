"""The seven cases that break other pipelines, counted in texts embedded and rows that stand in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from pipeline.core.relevance import EVERYDAY
from tests.e2e.test_stream import changed, detail, document, prose
from tests.fakes.server import EmbeddingServer, serving
from tests.support.pipeline.oracle import assert_equal
from tests.support.space import Space, now
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

pytestmark = pytest.mark.slow


@dataclass
class Case:
    space: Space
    model: EmbeddingServer

    async def load(self, *documents: DocumentUpserted) -> int:
        """Publish and wait; returns how many texts that embedded."""
        before = await self.model.inputs()
        await self.space.publish(*documents)
        await self.space.settled(documents)
        return await self.model.inputs() - before


@pytest.fixture
async def case(stack: Stack, tmp_path: Path) -> AsyncIterator[Case]:
    async with serving() as model:
        embedding = {"provider": "openai", "base_url": model.url, "dimensions": 64, "timeout_seconds": 5}
        async with Space.create(stack, tmp_path, embedding=embedding) as space:
            space.start("detect", "vectors", "keywords")
            yield Case(space, model)


def guide(name: str, paragraphs: int = 80) -> DocumentUpserted:
    return document(name, f"# {name}\n\n" + prose(name.partition(".")[0], paragraphs))


async def test_a_an_edit_of_one_paragraph_embeds_only_the_changed_chunks(case: Case) -> None:
    old = guide("guide.md")
    chunks = await case.load(old)
    assert chunks == await assert_equal(case.space, [old]) > 10
    edited = changed(old, content=old.content.replace(f"detail {detail(40)} differs", "every detail agrees"))
    assert await case.load(edited) in (1, 2, 3)
    await assert_equal(case.space, [edited])


async def test_b_deleting_one_of_two_identical_files_keeps_the_other_without_embedding(case: Case) -> None:
    one, two = (document(name, "# Same\n\n" + prose("sameness", 12)) for name in ("one.md", "two.md"))
    embedded = await case.load(one, two)
    chunks = await assert_equal(case.space, [one, two])
    assert embedded in range(chunks // 2, chunks + 1)
    gone = DocumentDeleted(tenant="acme", source="wiki", external_id="one.md", observed_at=now(), version=1)
    before = await case.model.inputs()
    await case.space.publish(gone)
    await case.space.settled([gone])
    assert await assert_equal(case.space, [two]) == chunks // 2
    assert await case.model.inputs() == before


async def test_c_old_chunks_stay_until_the_new_ones_are_embedded_when_the_model_fails(
    case: Case,
) -> None:
    old = guide("guide.md")
    chunks = await case.load(old)
    new = changed(old, content="# guide.md\n\n" + prose("something else", 80))
    await case.model.faults(errors=10_000)
    await case.space.publish(new)
    await _until(case.space, "SELECT count(*) = 2 FROM index_state WHERE want_seq > seq OR store = 'keywords'")
    await asyncio.sleep(3)
    rows = await case.space.query("SELECT count(*) FROM chunks_g1")
    assert rows == [(chunks,)], "the old rows stand until the new ones can"
    before = await case.model.inputs()
    await case.model.faults(errors=0)
    await case.space.settled([new])
    assert await assert_equal(case.space, [new]) == await case.model.inputs() - before
    assert await case.space.query("SELECT count(*) FROM dead_letters") == [(0,)]


async def test_d_an_audit_repairs_lost_rows_and_embeds_only_texts_without_a_copy(case: Case) -> None:
    documents = [guide(f"{n}.md", 10) for n in range(10)]
    await case.load(*documents)
    chunks = await assert_equal(case.space, documents)
    twin = changed(documents[0], external_id="twin.md")
    assert await case.load(twin) == 0, "the twin's texts are embedded already"
    rows = [i for (i,) in await case.space.query("SELECT id FROM chunks_g1 ORDER BY id")]
    lost = random.Random(7).sample(rows, len(rows) // 10)
    await case.space.execute("DELETE FROM chunks_g1 WHERE id = ANY(%s)", lost)
    [(unique,)] = await case.space.query(
        "SELECT count(*) FROM unnest(%s::uuid[]) AS l (id) WHERE NOT EXISTS (SELECT FROM chunks_g1 c JOIN manifests m"
        " ON m.document_id = c.document_id JOIN manifests o ON l.id = ANY(o.chunk_ids) WHERE m.content_hash ="
        " o.content_hash AND array_position(m.chunk_ids, c.id) = array_position(o.chunk_ids, l.id))",
        lost,
    )
    before = await case.model.inputs()
    code, report = await case.space.penstock("audit", "--repair", "--sample", "0", "--json")
    assert (code, report["clean"]) == (0, True), report
    assert report["documents"] == 11
    assert await case.model.inputs() - before == unique < len(lost) + 1
    assert await assert_equal(case.space, [*documents, twin]) > chunks


async def test_e_a_burst_of_429_defers_work_without_failures_or_repeated_embedding(case: Case) -> None:
    documents = [guide(f"{n}.md", 10) for n in range(12)]
    await case.model.faults(throttle=25, throttle_headers={"retry-after-ms": "200"})
    await case.load(*documents)
    await assert_equal(case.space, documents)
    stats = await case.model.stats()
    assert stats["statuses"]["429"] >= 5
    questions = {question[:60] for question in EVERYDAY}  # the calibration, which a 429 ends, asks them again
    assert set(stats["repeated"]) <= questions, "nothing is paid twice"
    assert await case.space.query("SELECT count(*) FROM index_state WHERE attempts > 0 OR error IS NOT NULL") == [(0,)]
    assert await case.space.query("SELECT count(*) FROM dead_letters") == [(0,)]


async def test_f_changes_of_metadata_and_access_embed_nothing(case: Case) -> None:
    old = guide("guide.md", 20)
    await case.load(old)
    titled = changed(old, title="Another title", author="Somebody", metadata={"team": "water"})
    assert await case.load(titled) == 0
    await assert_equal(case.space, [titled])
    before = await case.model.inputs()
    access = AccessChanged(tenant="acme", source="wiki", external_id="guide.md", observed_at=now(), acl_tags=["board"])
    await case.space.publish(access)
    await case.space.settled([access])
    assert await case.model.inputs() == before
    await assert_equal(case.space, [titled.model_copy(update={"acl_tags": ["board"]})])


async def test_g_republishing_unchanged_documents_embeds_and_writes_nothing(case: Case) -> None:
    documents = [guide(f"{n}.md", 10) for n in range(10)]
    await case.load(*documents)
    seqs = await case.space.query("SELECT id, seq FROM documents ORDER BY id")
    written = await case.space.query("SELECT sum(written) FROM index_state")
    again = [changed(d) for d in documents]
    assert await case.load(*again) == 0
    assert await case.space.query("SELECT id, seq FROM documents ORDER BY id") == seqs
    assert await case.space.query("SELECT sum(written) FROM index_state") == written
    await assert_equal(case.space, again)


async def _until(space: Space, statement: str) -> None:
    async with asyncio.timeout(60):
        while (await space.query(statement)) != [(True,)]:
            await asyncio.sleep(0.1)
