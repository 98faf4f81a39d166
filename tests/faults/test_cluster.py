"""Vectors in an Elasticsearch of three nodes, of which one is killed and a shard is moved while people search."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import UUID

import pytest
from elastic_transport import TransportError

from deploy.local.stack import Stack
from pipeline.audit.examine import Examiner
from pipeline.core.errors import Retryable
from pipeline.core.model import ChunkParams
from pipeline.embedding.port import Vectors
from pipeline.runtime.settings import ElasticsearchSettings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.elasticsearch import connect
from query.embedding.embedders import QueryEmbedder
from query.evaluation.place import empty
from query.retrieval.search import Search
from query.retrieval.vectors import Tuning
from tests.support.elasticsearch_nodes import Nodes, cluster
from tests.support.pipeline.audit_kit import SMALL, Audited, CountingEmbedder, Waking
from tests.support.query.library import Library, access, deletion, document, settings_on
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

pytestmark = [pytest.mark.stack, pytest.mark.slow]

TOPICS = ("turbine", "reservoir", "spillway", "sluice", "weir", "gate", "dam", "intake", "surge", "valve")
DOCUMENTS = 400
LEAST_RECALL = 0.97
TIE = 1e-3
"""Cosines that differ by less are equal to a quantised vector, whose whole one is a halfvec."""
SEARCHES = 60
PAUSE_SECONDS = 0.1
"""Between two searches or changes of one person: a node that starts needs the processors too."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@asynccontextmanager
async def library_on(stack: Stack, nodes: Nodes) -> AsyncIterator[Audited]:
    """A library whose index has three shards on three nodes, each with a copy."""
    settings = settings_on(stack)
    elasticsearch = ElasticsearchSettings(url=",".join(nodes.urls), shards=3, replicas=1)
    embedder = CountingEmbedder()
    async with empty(
        settings.model_copy(update={"elasticsearch": elasticsearch}),
        embedder,
        "cluster_of_three",
        ChunkParams(200, 80, 254),
        vectors="elasticsearch",
    ) as place:
        library = Library.over(place, embedder)
        es = connect(place.settings.elasticsearch, reads_only=True)  # as the query service does
        library.search = Search(library.pool, es, QueryEmbedder(lambda: embedder), tuning=Tuning(always_exact_rows=0))
        examiner = Examiner(library.pool, library.es, library.generation, SMALL)
        yield Audited(library, embedder, Waking(library), examiner)
        await es.close()


def page(number: int, edition: int = 0, **fields: object) -> DocumentUpserted:
    subjects = [TOPICS[number % 10], TOPICS[number // 10 % 10], TOPICS[number // 100]]
    return document(f"page-{number}", f"Page {number} on {' and '.join(subjects)}, edition {edition}.", **fields)


@dataclass
class Company:
    """Pages that are edited, and people who search them."""

    audited: Audited
    readers: dict[str, set[str]] = field(default_factory=dict)
    """The tags that may read each page, by the ledger."""
    outcomes: Counter[str] = field(default_factory=Counter)

    async def publish(self, *events: DocumentUpserted | DocumentDeleted | AccessChanged) -> None:
        """Accept changes, and apply them to both stores as workers do: what fails is tried again."""
        library = self.audited.library
        ids = await library.accept(*events)
        for event in events:
            tags = event.acl_tags if isinstance(event, DocumentUpserted | AccessChanged) else ()
            self.readers[event.external_id] = set(tags)
        async with asyncio.timeout(120):
            while True:
                try:
                    await library.converge(*dict.fromkeys(ids))
                except Retryable:
                    self.outcomes["write tried again"] += 1
                    await asyncio.sleep(0.2)
                else:
                    return

    def readable(self, tag: str) -> set[str]:
        return {page for page, tags in self.readers.items() if tag in tags}

    async def search(self, number: int) -> float:
        """Search by vectors. Returns the recall of the ten nearest. Raises Retryable."""
        tag = ("staff", "board")[number % 2]
        query = f"a page on {TOPICS[number % 10]} and {TOPICS[number // 2 % 10]}"
        library = self.audited.library
        caller = await library.caller("acme", tag)
        before = self.readable(tag)
        answer = await library.search.search(query, caller, mode="vector", top=10)
        leaked = {result.passage.external_id for result in answer.results} - before - self.readable(tag)
        assert not leaked, f"{tag} was shown {leaked}"
        shown = [result.passage.chunk_id for result in answer.results]
        nearest = await self.nearest(await self.audited.embedder.embed_query(query), tag)
        least = min(nearest[:10], default=(0.0, None))[0]
        as_near = {id_ for cosine, id_ in nearest if cosine >= least - TIE}
        return len(as_near.intersection(shown)) / min(10, len(nearest))

    async def nearest(self, vector: Vectors, tag: str) -> list[tuple[float, UUID]]:
        """All passages that a tag may read with their cosines, nearest first, compared one by one."""
        rows = await self.audited.library.execute(
            f"SELECT 1 - (c.embedding <=> %s::halfvec), c.id FROM {self.audited.table} c JOIN access_sets a"
            " ON a.id = c.access_id WHERE %s = ANY (a.acl_tags) ORDER BY 1 DESC",
            str(vector.tolist()),
            f"wiki/{tag}",
        )
        return [(float(cosine), id_) for cosine, id_ in rows]

    async def all_is_answered(self) -> None:
        """Without changes, each search is answered, and as well as by comparing everything."""
        recalls = [await self.search(number) for number in range(SEARCHES)]
        assert sum(recalls) / len(recalls) >= LEAST_RECALL

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """People search and pages change all the time. A search may be refused for a moment."""

        async def search() -> None:
            for number in itertools.count():
                try:
                    await self.search(number)
                    self.outcomes["answered"] += 1
                except Retryable:
                    self.outcomes["refused"] += 1
                await asyncio.sleep(PAUSE_SECONDS)

        async def change() -> None:
            for number, edition in zip(itertools.cycle(range(0, DOCUMENTS, 3)), itertools.count(1)):
                if number % 2:
                    await self.publish(page(number, edition, acl_tags=["staff"]))
                elif number % 4:
                    await self.publish(access(page(number), ["board"]))
                else:
                    await self.publish(deletion(page(number)))
                await asyncio.sleep(PAUSE_SECONDS)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(search()), group.create_task(search()), group.create_task(change())]
            yield
            await cancel_and_wait(tasks)


async def test_vectors_survive_a_killed_node_and_a_moved_shard_while_people_search(stack: Stack, nodes: Nodes) -> None:
    async with library_on(stack, nodes) as audited:
        es, index = audited.library.es, audited.index
        company = Company(audited)

        async def healthy(**expected: object) -> None:
            """Wait until the cluster says so."""
            async with asyncio.timeout(180):
                while True:
                    try:
                        health = await es.cluster.health(index=index)
                    except TransportError:  # the node that was to answer is the killed one
                        health = {}
                    if expected.items() <= dict(health).items():
                        return
                    await asyncio.sleep(0.2)

        async def shards() -> list[tuple[int, str, bool]]:
            """Number, node and whether it is the primary of each started shard."""
            rows = await es.cat.shards(index=index, format="json", h="shard,node,prirep,state")
            return [
                (int(shard["shard"]), shard["node"], shard["prirep"] == "p")
                for shard in rows
                if shard["state"] == "STARTED"
            ]

        for start in range(0, DOCUMENTS, 100):
            await company.publish(
                *(page(n, acl_tags=["staff"] if n % 4 else ["board", "staff"]) for n in range(start, start + 100))
            )
        await healthy(status="green", number_of_nodes=3)
        await company.all_is_answered()

        victim = next(node for _, node, is_primary in await shards() if is_primary)
        async with company.at_work():
            nodes.kill(victim)
            await healthy(status="yellow", number_of_nodes=2)
            await asyncio.sleep(3)
        await company.all_is_answered()
        assert company.outcomes["answered"] > 0

        async with company.at_work():
            await asyncio.to_thread(nodes.start, victim)
            await healthy(status="green", number_of_nodes=3)
            number, origin, _ = next(shard for shard in await shards() if shard[1] != victim)
            holders = {node for shard, node, _ in await shards() if shard == number}
            target = next(name for name in nodes.stacks if name not in holders)
            move = {"index": index, "shard": number, "from_node": origin, "to_node": target}
            await es.cluster.reroute(commands=[{"move": move}])
            await healthy(status="green", relocating_shards=0)
        assert target in {node for shard, node, _ in await shards() if shard == number}
        await company.all_is_answered()
        assert (await audited.audit())[1] == set()
        print(dict(company.outcomes))
