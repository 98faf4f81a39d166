"""Building, cutting over, rolling back and retiring generations, on the real stores, step by step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import EmbeddingService, Generation
from pipeline.embedding.port import Embedded
from pipeline.generations import lifecycle
from pipeline.generations.limits import Limits, Paused
from pipeline.generations.migration import Change, Migration, Result
from pipeline.generations.opening import connect
from pipeline.ledger import builds, generations
from pipeline.settings import dist
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.postgres import create_chunk_table
from tests.contract.build_kit import Site, document, sections, vector
from tests.oracle import assert_equal
from tests.space import Space

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


async def test_a_way_of_cutting_is_changed_and_what_comes_out_the_same_is_not_embedded_again(site: Site) -> None:
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
    with pytest.raises(Paused, match=r"g2 is paused: .* tokens that it may cost"):
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
        with pytest.raises(Misconfigured, match="generation g3 answers the searches"):
            await lifecycle.retire(builder, "g3")
        assert await lifecycle.retire(builder) == "g2"
    assert await site.tables() == {"chunks_g3"}
    assert await site.indexes() == {"chunks-g3"}
    for table in ("index_state", "manifests"):
        assert await site.space.query(f"SELECT DISTINCT generation FROM {table}") == [("g3",)]
    await assert_equal(site.space, [changed, *short[1:], *long], vector=vector)


async def cutover(site: Site) -> lifecycle.Switched:
    async with connect(site.space.settings.postgres) as connection:
        return await lifecycle.cutover(connection)


class Away:
    """Of one generation the model is away; the others have theirs."""

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
async def test_a_model_that_only_the_next_generation_has_holds_up_nobody_when_it_is_away(
    site: Site, error: Exception, recorded: str | None
) -> None:
    async with site.pool.connection() as connection:
        active = await generations.active(connection)
        other = EmbeddingService("openai", "http://elsewhere/v1")
        new = replace(
            active, name="g2", state="building", model="other", dimensions=64, chunk_table="chunks_g2",
            keyword_index=f"{active.keyword_index}-2", service=other,
        )  # fmt: skip
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
