"""Building, cutting over, rolling back and retiring generations, on the real stores, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.setup import prepare
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import EmbeddingService, Generation
from pipeline.embedding.failures import ThrottledAlone
from pipeline.embedding.port import Embedded
from pipeline.generations import lifecycle
from pipeline.generations.building import connect
from pipeline.generations.limits import Limits, Paused
from pipeline.generations.migration import Change, Migration, Result
from pipeline.generations.models import Models
from pipeline.ledger import builds, generations
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import dist
from pipeline.stages.hints import read_hint
from pipeline.stages.stage import Incoming
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.postgres import create_chunk_table
from tests.support.pipeline.build_kit import Site, deletion, document, sections, vector
from tests.support.pipeline.oracle import assert_equal
from tests.support.space import Space

SMALLER = Change(chunk_tokens=100)


@pytest.fixture
async def site(space: Space) -> AsyncIterator[Site]:
    async with Site.create(space) as site:
        yield site


@asynccontextmanager
async def migration(site: Site) -> AsyncIterator[Migration]:
    async with site.builder() as builder:
        yield Migration(builder, site.space.settings.embedding, dist() / "models")


async def build(site: Site, change: Change = SMALLER, limits: Limits | None = None) -> Result:
    async with migration(site) as work:
        return await work.run(change, limits or Limits(), wait=True)


async def test_a_generation_with_other_chunk_sizes_embeds_only_the_chunks_that_differ(site: Site) -> None:
    """Short documents are one chunk in either; the first cut is of 200 tokens, the second of 100."""
    short = [document(f"short{n}.md", f"A note about subject {n}.") for n in range(6)]
    long = [document(f"long{n}.md", sections(f"first {n}", f"second {n}")) for n in range(2)]
    await site.put(*short, *long)
    embedded = len(site.embedder.texts)
    async with migration(site) as work:
        plan = await work.plan(replace(SMALLER, price=2.0))
        assert await site.states() == {"g1": "active"}
    estimate = plan.estimate
    assert (estimate.documents, estimate.exact) == (8, True)
    assert estimate.copied >= 6
    assert estimate.money == pytest.approx(estimate.tokens * 2e-6, abs=1e-4)

    # An earlier run was killed when it had a table (of another model) and no row yet.
    async with site.pool.connection() as connection:
        active = await generations.active(connection)
        await create_chunk_table(connection, replace(active, chunk_table="chunks_g2", dimensions=64))
    with pytest.raises(Paused, match=r"g2 is paused: .* tokens of its budget"):
        await build(site, limits=Limits(budget_tokens=estimate.tokens // 3))
    with pytest.raises(Misconfigured, match="g2 is not complete: run `penstock generation build --wait`"):
        await cutover(site)
    with pytest.raises(Misconfigured, match=r"g2 is being built: finish it .* retire g2"):
        await build(site, Change(chunk_tokens=120))
    with pytest.raises(Misconfigured, match="g2 is being built"):
        await site.run("keywords")
    result = await build(site, Change())
    assert (result.generation, result.ready, result.documents, result.chunks) == ("g2", True, 8, estimate.chunks)
    new = site.embedder.texts[embedded:]
    assert len(new) == len(set(new)) <= estimate.embedded
    assert not any("A note" in text for text in new)
    assert result.tokens <= estimate.tokens

    assert (await cutover(site)).active == "g2"
    assert await site.states() == {"g1": "previous", "g2": "active"}
    await assert_equal(site.space, [*short, *long], vector=vector)
    with pytest.raises(Misconfigured, match=r"nothing would change: the active generation g2 .* 100 tokens"):
        await build(site)

    # What fails there is no reason to show something old, unless somebody insists.
    changed = document("short0.md", "A note that was changed.")
    await site.accept(changed)
    site.hints.waiting = [h for h in site.hints.waiting if h.generation == "g2"]
    await site.work()
    late = (
        "UPDATE index_state SET pending_since = now() - interval '2 minutes' WHERE generation = 'g1' AND seq < want_seq"
    )
    assert await site.space.execute(late) == 2
    async with connect(site.space.settings.postgres, lock=False) as connection:
        with pytest.raises(Retryable, match="2 changes are not in generation g1 yet"):
            await lifecycle.rollback(connection)
        assert (await lifecycle.rollback(connection, force=True)).active == "g1"
        assert (await lifecycle.rollback(connection)).active == "g2"
    # The next one takes its place; the one before is retired.
    await build(site, Change(chunk_tokens=120))
    assert (await cutover(site)).retired == ["g1"]
    async with site.builder() as builder:
        with pytest.raises(Misconfigured, match="generation g3 is active"):
            await lifecycle.retire(builder, "g3")
        assert await lifecycle.retire(builder) == lifecycle.Retired("g2")
    assert await site.tables() == {"chunks_g3"}
    assert await site.indexes() == {"chunks-g3"}
    for table in ("index_state", "manifests"):
        assert await site.space.query(f"SELECT DISTINCT generation FROM {table}") == [("g3",)]
    await assert_equal(site.space, [changed, *short[1:], *long], vector=vector)


async def test_a_text_that_the_new_model_defers_each_time_is_named_and_can_be_left_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build waited for ever, and its note pointed to `penstock status`, which knew nothing of it."""
    large = document("large.md", sections("one", "two", "DEFERRED", "four"))
    await site.put(large, *(document(f"{n}.md", f"A note about {n}.") for n in range(3)))
    embed, handle = site.embedder.embed_documents, site.vectors.handle

    async def deferring(texts: Sequence[str]) -> Embedded:
        known = await embed(texts)
        if any("DEFERRED" in text for text in texts):
            error = ThrottledAlone("the server answers 429", retry_after=20.0, service="embedding")
            error.arrived = {n: known.vectors[n] for n, text in enumerate(texts) if "DEFERRED" not in text}
            raise error
        return known

    async def putting_off(batch: Sequence[Incoming]) -> None:
        for record in batch:
            try:
                await handle([record])
            except ThrottledAlone as error:
                await site.vectors.put_off(record, error)

    monkeypatch.setattr(site.embedder, "embed_documents", deferring)
    monkeypatch.setattr(site.vectors, "handle", putting_off)
    named = r"1 documents cannot be brought into the new vectors \(g2\), .* wiki/large.md: the server answers 429 "
    async with asyncio.timeout(60):
        with pytest.raises(Retryable, match=named + r"\(`penstock why large.md` .* --without-failing"):
            await build(site)
    with pytest.raises(Misconfigured, match="g2 is not complete"):
        await cutover(site)
    notes: list[str] = []
    async with asyncio.timeout(60), site.builder() as builder:
        builder._note = notes.append
        work = Migration(builder, site.space.settings.embedding, dist() / "models")
        assert (await work.run(SMALLER, Limits(), wait=True, without_failing=True)).ready
    assert notes == ["1 documents are brought in without the passages that the model does not embed"]
    assert (await cutover(site)).active == "g2"
    [(refused, chunks, error)] = await site.space.query(
        "SELECT cardinality(s.refused), cardinality(m.chunk_ids), s.error FROM index_state s"
        " JOIN manifests m USING (document_id, generation) WHERE cardinality(s.refused) > 0"
    )
    assert 0 < refused < chunks
    assert error == f"{refused} of {chunks} chunks can not be embedded"
    [(rows,)] = await site.space.query("SELECT count(*) FROM chunks_g2 WHERE text LIKE '%%DEFERRED%%'")
    assert rows == 0
    held = "SELECT count(*) FROM chunks_g2 c JOIN documents d ON d.id = c.document_id WHERE d.external_id = 'large.md'"
    assert await site.space.query(held) == [(chunks - refused,)]


async def test_no_document_is_left_out_where_the_new_model_has_embedded_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key that the server does not accept, a generation without any vector was ready for the cut-over."""
    await site.put(document("large.md", sections("one", "two", "three", "four")))

    async def setting_aside(batch: Sequence[Incoming]) -> None:
        for record in batch:
            await site.vectors.set_aside(record, Misconfigured("the server answers 401", service="embedding"))

    monkeypatch.setattr(site.vectors, "handle", setting_aside)
    async with asyncio.timeout(60), migration(site) as work:
        with pytest.raises(Retryable, match=r"wiki/large\.md: the server answers 401"):
            await work.run(SMALLER, Limits(), wait=True, without_failing=True)


async def test_a_document_that_fails_without_the_passages_that_are_left_out_ends_the_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried again for ever, as if the model were at fault once more."""
    await site.put(document("failing.md", sections("one", "two")), document("sound.md", "A note."))
    [(failing,)] = await site.space.query("SELECT id FROM documents WHERE external_id = 'failing.md'")
    handle = site.vectors.handle

    async def setting_aside(batch: Sequence[Incoming]) -> None:
        for record in batch:
            if read_hint(record)[0] == failing:
                await site.vectors.set_aside(record, Misconfigured("no space is left", service="postgres"))
            else:
                await handle([record])

    monkeypatch.setattr(site.vectors, "handle", setting_aside)
    notes: list[str] = []
    async with site.builder() as builder:
        builder._note = notes.append
        work = Migration(builder, site.space.settings.embedding, dist() / "models")
        for _ in range(2):
            with pytest.raises(Retryable, match=r"wiki/failing\.md: no space is left") as raised:
                async with asyncio.timeout(30):
                    await work.run(SMALLER, Limits(), wait=True, without_failing=True)
            assert "--without-failing" not in str(raised.value)
    assert notes == ["1 documents are brought in without the passages that the model does not embed"]


async def test_vectors_move_to_elasticsearch_and_back_without_embedding(site: Site) -> None:
    kept, edited, deleted = (document(f"{name}.md", sections(name)) for name in ("kept", "edited", "deleted"))
    await site.put(kept, edited, deleted)
    embedded = len(site.embedder.texts)
    result = await build(site, Change(vectors="elasticsearch"))
    assert (result.generation, result.ready, result.tokens) == ("g2", True, 0)
    assert len(site.embedder.texts) == embedded
    await site.put(changed := document("edited.md", sections("another")), deletion(deleted))
    assert (await cutover(site)).active == "g2"
    await assert_equal(site.space, [kept, changed], vector=vector)
    assert await site.space.query("SELECT FROM pg_indexes WHERE indexname LIKE 'chunks_g2%%hnsw'") == []
    with pytest.raises(Misconfigured, match="`penstock rebuild keywords` makes their graph anew"):
        await site.run("vectors")
    embedded = len(site.embedder.texts)
    assert (await build(site, Change(vectors="pgvector"))).generation == "g3"
    assert (await cutover(site)).active == "g3"
    await assert_equal(site.space, [kept, changed], vector=vector)
    assert len(site.embedder.texts) == embedded
    assert await site.states() == {"g1": "retired", "g2": "previous", "g3": "active"}


async def test_a_graph_of_signs_is_a_generation_that_embeds_nothing(site: Site) -> None:
    await site.put(kept := document("kept.md", sections("kept")))
    embedded = len(site.embedder.texts)
    with pytest.raises(Misconfigured, match="Elasticsearch always holds one bit"):
        await build(site, Change(vectors="elasticsearch", quantisation="binary"))
    assert (await build(site, Change(quantisation="binary"))).tokens == 0
    assert (await cutover(site)).active == "g2"
    await site.put(added := document("added.md", sections("added")))
    await assert_equal(site.space, [kept, added], vector=vector)
    [(index,)] = await site.space.query("SELECT indexdef FROM pg_indexes WHERE indexname = 'chunks_g2_hnsw'")
    assert "bit_hamming_ops" in index
    with pytest.raises(Misconfigured, match="nothing would change"):
        await build(site, Change(quantisation="binary"))
    assert (await site.run("vectors")).generation == "g3"
    [(index,)] = await site.space.query("SELECT indexdef FROM pg_indexes WHERE indexname = 'chunks_g3_hnsw'")
    assert "bit_hamming_ops" in index, "a rebuilt graph holds the same"
    assert len(site.embedder.texts) > embedded, "of the added document"


async def test_a_lost_index_with_vectors_is_rebuilt_from_the_rows(site: Site) -> None:
    messages = [document(f"{name}.md", sections(name)) for name in ("one", "two")]
    await site.put(*messages)
    await build(site, Change(vectors="elasticsearch"))
    await cutover(site)
    embedded = len(site.embedder.texts)
    await site.es.indices.delete(index=f"{site.space.settings.elasticsearch.index_prefix}chunks-g2")
    assert (await site.run("keywords")).generation == "g3"
    await assert_equal(site.space, messages, vector=vector)
    assert len(site.embedder.texts) == embedded


async def cutover(site: Site) -> lifecycle.Switched:
    async with connect(site.space.settings.postgres) as connection:
        return await lifecycle.cutover(connection)


class Away:
    """Replaces the models: that of one generation is unavailable, and those of the others are not."""

    def __init__(self, site: Site, error: Exception) -> None:
        self._present: Any = site.embedder
        self._error = error

    async def of(self, generation: Generation) -> Any:
        return self if generation.name == "g2" else self._present

    async def embed_documents(self, _texts: Sequence[str]) -> Embedded:
        raise self._error


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (Retryable("the server is down", service="embedding"), None),
        (Misconfigured("no key for that server", service="embedding"), "no key for that server"),
    ],
)
async def test_an_unavailable_model_of_the_building_generation_does_not_delay_the_active_one(
    site: Site, error: Exception, recorded: str | None
) -> None:
    async with site.pool.connection() as connection:
        active = await generations.active(connection)
        other = EmbeddingService("openai", "http://elsewhere/v1")
        new = replace(
            active,
            name="g2",
            state="building",
            model="other",
            dimensions=64,
            chunk_table="chunks_g2",
            keyword_index=f"{active.keyword_index}-2",
            service=other,
        )
        await create_chunk_table(connection, new)
        await create_index(site.es, new.keyword_index)
        await connection.commit()
        await builds.begin(connection, new, active)
        await connection.commit()
    site.vectors._models = Away(site, error)
    await site.put(document("a.md", "Something to embed."))
    states = dict(await site.space.query("SELECT generation, seq = want_seq FROM index_state WHERE store = 'vectors'"))
    assert states == {"g1": True, "g2": False}
    assert await site.space.query("SELECT error FROM index_state WHERE store = 'vectors' AND generation = 'g2'") == [
        (recorded,)
    ]
    assert await site.space.query("SELECT DISTINCT seq = want_seq FROM index_state WHERE store = 'keywords'") == [
        (True,)
    ]


class Answering:
    """An embedding service that is far away, of one generation."""

    def __init__(self, generation: Generation, error: Exception | None = None) -> None:
        self.model, self.dimensions = generation.model, generation.dimensions
        self.request_count = 0
        self.closed = False
        self.answers = asyncio.Event()
        self._error = error

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        self.request_count += 1
        await self.answers.wait()
        if self._error is not None:
            raise self._error
        return Embedded(np.ones((len(texts), self.dimensions), dtype=np.float32))

    async def aclose(self) -> None:
        self.closed = True


async def begun(site: Site, **fields: Any) -> Generation:
    """The active generation with something else in it, begun."""
    async with site.pool.connection() as connection:
        active = await generations.active(connection)
        name = await builds.next_name(connection)
        new = replace(
            active, name=name, state="building", chunk_table=f"chunks_{name}", keyword_index=f"chunks-{name}", **fields
        )
        await builds.begin(connection, new, active)
    return new


async def test_a_models_reference_vector_is_reused_only_with_the_same_model_and_document_prefix(site: Site) -> None:
    stored = [1.0] * 384
    await site.space.execute("UPDATE generations SET reference = %s::real[]", stored)
    for fields, same in (({"document_prefix": "passage: "}, False), ({"query_prefix": "query: "}, True)):
        new = await begun(site, **fields)
        async with site.pool.connection() as connection:
            assert await generations.reference(connection, new) == (stored if same else None)
            await builds.give_up(connection, new.name)
    new = await begun(site, dimensions=64)
    embedder: Any = Answering(new)
    embedder.answers.set()
    async with site.pool.connection() as connection:
        await generations.check_model(connection, new, embedder)
        assert await generations.reference(connection, new) == [1.0] * 64
    await site.space.execute("UPDATE generations SET reference = %s::real[]", stored)
    async with site.pool.connection() as connection:
        with pytest.raises(Misconfigured, match=r"answers with 64 dimensions, but .* g4 has 384"):
            await generations.check_model(connection, new, embedder)


async def test_an_unavailable_model_is_requested_once_for_all_callers_and_does_not_block_other_models(
    site: Site,
) -> None:
    new = await begun(site, model="other", dimensions=64)
    async with site.pool.connection() as connection:
        active = await generations.active(connection)
    made = {
        active.name: Answering(active),
        new.name: Answering(new, Retryable("it does not answer", retry_after=7.0)),
    }

    def make(generation: Generation, *_: object) -> Any:
        return made[generation.name]

    models = Models(site.pool, site.space.settings.embedding, Metrics(), Path(), make)
    waiting = [asyncio.create_task(models.of(new)) for _ in range(4)]
    while not made[new.name].request_count:
        await asyncio.sleep(0.01)
    made[active.name].answers.set()
    async with asyncio.timeout(30):
        assert (await models.of(active)) is made[active.name]
    made[new.name].answers.set()
    for said in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(said, Retryable)
        assert (str(said), said.retry_after, said.service) == ("it does not answer", 7.0, "embedding")
    assert made[new.name].request_count == 1


async def test_a_model_is_closed_after_its_last_generation_is_retired(site: Site) -> None:
    new = await begun(site, model="other", dimensions=64)
    async with site.pool.connection() as connection:
        active = await generations.active(connection)
    kept, gone = Answering(active), Answering(new)
    for model in (kept, gone):
        model.answers.set()

    def make(generation: Generation, *_: object) -> Any:
        return {active.name: kept, new.name: gone}[generation.name]

    models = Models(site.pool, site.space.settings.embedding, Metrics(), Path(), make, leave_seconds=0.2)
    assert (await models.of(active), await models.of(new)) == (kept, gone)
    await models.keep([active, new])
    await models.keep([active])
    assert not gone.closed, "a batch may be at work still"
    await asyncio.sleep(0.2)
    await models.keep([active])
    assert (kept.closed, gone.closed) == (False, True)
    assert await models.of(active) is kept
    await models.aclose()
    assert kept.closed


async def test_the_base_generation_of_a_build_cannot_be_retired_and_its_price_can_be_changed(site: Site) -> None:
    await site.put(*(document(f"{n}.md", sections(f"first {n}", f"second {n}")) for n in range(4)))
    await build(site)
    assert (await cutover(site)).active == "g2"
    little = Limits(budget_tokens=1)
    with pytest.raises(Paused):
        await build(site, Change(chunk_tokens=120, price=2.0), little)
    async with connect(site.space.settings.postgres, lock=False) as connection:
        assert (await lifecycle.rollback(connection)).active == "g1"
    async with site.builder() as builder:
        with pytest.raises(Misconfigured, match="g3 is being built from g2"):
            await lifecycle.retire(builder, "g2")
    with pytest.raises(Paused):
        await build(site, Change(), little)

    async with migration(site) as work:
        assert (await work.plan(Change())).price == 2.0
        assert (await work.plan(Change(price=5.0))).price == 5.0
        assert (await work.plan(Change())).price == 2.0, "a plan changes nothing"
    with pytest.raises(Paused):
        await build(site, Change(price=5.0), little)
    async with migration(site) as work:
        assert (await work.plan(Change())).price == 5.0
    async with site.builder() as builder:
        assert [(await lifecycle.retire(builder, name)).left for name in ("g3", "g2")] == [None, None]


async def test_a_build_is_rejected_while_the_active_models_service_is_unknown(site: Site) -> None:
    await site.space.execute("UPDATE generations SET service = NULL")
    with pytest.raises(Misconfigured, match=r"address of the model of generation g1 is not known.* `penstock migrate`"):
        await build(site)
    assert await site.states() == {"g1": "active"}
    await begun(site)
    assert await site.space.query("SELECT count(service) FROM generations") == [(0,)]
    await prepare(site.space.settings)
    assert await site.space.query("SELECT count(service) FROM generations") == [(2,)]
