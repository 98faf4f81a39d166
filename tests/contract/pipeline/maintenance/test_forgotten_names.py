"""The name of an author is erased in all entries of Elasticsearch, whatever else happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

import pytest

from cli.forget import Work
from pipeline.core.errors import PenstockError
from pipeline.ledger import builds, generations
from pipeline.stores.postgres import Connection
from tests.support.pipeline.build_kit import Site, document
from tests.support.pipeline.stage_kit import hint
from tests.support.space import Space

JANE = "jane@acme.com"


@pytest.fixture
async def site(space: Space) -> AsyncIterator[Site]:
    async with Site.create(space) as site:
        yield site


def erasing(site: Site, pool: Any, *, wait_seconds: float) -> Work:
    no_producer: Any = None
    return Work(site.space.settings, pool, no_producer, wait_seconds)


async def test_an_author_is_forgotten_while_vectors_of_a_document_are_pending(site: Site) -> None:
    """With a text that the model does not embed, the first run waited in vain, and said that not everything was
    erased."""
    await site.accept(document("rules.md", "Be kind to each other.", author=JANE))
    await site.keywords.handle([hint("rules.md", "g1")])
    work = erasing(site, site.pool, wait_seconds=20)
    forgetting = asyncio.create_task(work._named("acme", JANE))
    while not forgetting.done():
        await site.keywords.handle([hint("rules.md", "g1")])
        await asyncio.sleep(0.1)
    await forgetting
    assert work.erased == {"postgres documents": 1, "elasticsearch documents": 1}
    assert [entry.get("author") for entry in (await site.space.entries()).values()] == [None]


async def test_an_author_who_is_forgotten_while_a_build_begins_is_written_anew_in_its_index(site: Site) -> None:
    """Entries that a worker wrote, or was about to write, into an index that was begun after the first document of the
    author was erased kept the name."""
    await site.put(*(document(f"{n}.md", f"Rule {n}: be kind.", author=JANE) for n in range(2)))
    desired = "SELECT generation, want_seq FROM index_state WHERE store = 'keywords' AND document_id = %s ORDER BY 1"
    before: dict[UUID, list[tuple[Any, ...]]] = {}

    class Pool:
        """Begins a build when one document is left that names the author."""

        @asynccontextmanager
        async def connection(self) -> AsyncIterator[Connection]:
            left = await site.space.query("SELECT id FROM documents WHERE author IS NOT NULL")
            if len(left) == 1 and not before:
                async with site.pool.connection() as connection:
                    g1 = await generations.active(connection)
                    g2 = replace(g1, name="g2", state="building", keyword_index=g1.keyword_index.replace("g1", "g2"))
                    build = await builds.begin(connection, g2, g1)
                    await builds.fill(connection, build, limit=10, grace_seconds=60)
                before[left[0][0]] = await site.space.query(desired, left[0][0])
            async with site.pool.connection() as connection:
                yield connection

    with pytest.raises(PenstockError, match="the documents that named the person: not complete"):
        await erasing(site, cast("Any", Pool()), wait_seconds=0.1)._named("acme", JANE)
    [(last, then)] = before.items()
    anew = await site.space.query(desired, last)
    assert [name for name, _ in then] == [name for name, _ in anew] == ["g1", "g2"]
    assert all(raised > want for (_, want), (_, raised) in zip(then, anew, strict=True))
