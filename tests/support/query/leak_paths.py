"""A library and every way to ask it: whole, through the graph, with half of it away, with few candidates a round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from uuid import UUID

import pytest

from deploy.local.stack import Stack
from pipeline.core.errors import Retryable
from pipeline.embedding.port import Vectors
from pipeline.runtime.settings import ElasticsearchSettings
from pipeline.stages.identities import Identities
from pipeline.stages.stage import Incoming
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import open_pool
from query.access.callers import Caller
from query.embedding.embedders import QueryEmbedder
from query.model import MODES, Mode
from query.retrieval import search as retrieval
from query.retrieval.search import Search, Timeouts
from query.retrieval.vectors import Tuning
from tests.support.query.leaks import Asker, Event
from tests.support.query.library import Library, WordEmbedder
from topics.codec import encode
from topics.messages import IdentityChanged


class BrokenModel(WordEmbedder):
    async def embed_query(self, text: str) -> Vectors:
        raise Retryable("the model is overloaded (429)")


async def learn(library: Library, events: Iterable[Event]) -> list[UUID]:
    """Into the ledger only. Returns the documents."""
    identities: list[Incoming] = []
    documents = []
    for event in events:
        if isinstance(event, IdentityChanged):
            record = encode(event)
            library.offset += 1
            identities.append(
                Incoming("identities", 0, library.offset, record.key, record.value, record.headers, "live")
            )
        else:
            documents.append(event)
    await Identities(library.pool, library.detect._dead).handle(identities)
    ids: dict[UUID, None] = {}
    for n in range(0, len(documents), 64):
        ids |= dict.fromkeys(await library.accept(*documents[n : n + 64]))
    assert await library.execute("SELECT code, message FROM dead_letters") == []
    return list(ids)


@dataclass
class Paths:
    """A library and every way to ask it."""

    library: Library
    whole: Search
    walking: Search
    """Through the graph, however little may be read."""
    by_vector: Search
    """Elasticsearch is away."""
    by_keyword: Search
    """The model is away."""

    @classmethod
    @asynccontextmanager
    async def open(cls, stack: Stack) -> AsyncIterator[Paths]:
        async with AsyncExitStack() as closing:
            library = await closing.enter_async_context(Library.create(stack, WordEmbedder()))
            away = connect(ElasticsearchSettings(url="http://127.0.0.1:1"))
            closing.push_async_callback(away.close)
            name = library.settings.elasticsearch.index_prefix.removesuffix("-")
            # So few rows are scanned sooner than walked: new connections are forbidden to.
            await library.execute(f'ALTER DATABASE "{name}" SET enable_seqscan = off')
            pool = await closing.enter_async_context(open_pool(library.settings.postgres))
            model = QueryEmbedder(WordEmbedder)
            yield cls(
                library,
                library.search,
                Search(pool, library.es, model, tuning=Tuning(always_exact_rows=0)),
                Search(library.pool, away, model, timeouts=Timeouts(keywords=1)),
                Search(library.pool, library.es, QueryEmbedder(BrokenModel)),
            )

    @property
    def every(self) -> list[tuple[str, Search, Mode]]:
        whole = [("whole", self.whole, mode) for mode in MODES]
        return [
            *whole,
            ("walking", self.walking, "vector"),
            ("walking", self.walking, "hybrid"),
            ("no Elasticsearch", self.by_vector, "hybrid"),
            ("no model", self.by_keyword, "hybrid"),
        ]

    async def learn(self, events: Iterable[Event]) -> list[UUID]:
        """Into the ledger only. Returns the documents."""
        return await learn(self.library, events)

    async def identify(self, asker: Asker) -> Caller:
        return await self.whole.identify(asker.tenant, principals=asker.principals, tags=asker.tags)


@contextmanager
def cramped() -> Iterator[None]:
    """Few candidates a round: what is withheld crowds out the rest, and the stores are asked again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "CANDIDATES", 4)
        patch.setattr(retrieval, "SPARE", 1)
        yield
