"""A library whose hints wake the real sinks in the same process, and the audit over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from deploy.local.stack import Stack
from pipeline.audit import runs
from pipeline.audit.examine import Examiner
from pipeline.audit.reading import Limits
from pipeline.audit.repair import Repairer, RepairResult
from pipeline.audit.runs import Run
from pipeline.audit.sample import sample
from pipeline.audit.walk import Walk
from pipeline.core.model import Quantisation, VectorIndex
from pipeline.embedding.port import Embedded
from pipeline.kafka.producer import Stored
from pipeline.stores.keywords import Keywords
from tests.support.pipeline.delivered import delivered
from tests.support.query.library import Library, WordEmbedder, document
from topics.messages import DocumentUpserted, IndexHint

SMALL = Limits(documents=7, chunks=20, body_bytes=100_000, page=10)


class CountingEmbedder(WordEmbedder):
    """Says what it was asked to embed; refuses texts with a certain word."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        self.texts += texts
        embedded = await super().embed_documents(texts)
        return Embedded(embedded.vectors, {n: "refused" for n, t in enumerate(texts) if "unspeakable" in t})


@dataclass
class Waking:
    """Stands where Kafka stands between the audit and the sinks: a hint makes both sinks converge."""

    library: Library
    asleep: bool = False
    hinted: list[UUID] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def send(self, _topic: object, message: object) -> asyncio.Future[Stored]:
        assert isinstance(message, IndexHint)
        self.hinted.append(UUID(message.document_id))
        if not self.asleep:
            task = asyncio.create_task(self.library.converge(UUID(message.document_id)))
            self.tasks.add(task)
        return delivered()

    async def rest(self) -> None:
        """Wait for the sinks; raises what they raised."""
        tasks, self.tasks = self.tasks, set()
        await asyncio.gather(*tasks)


Differences = set[tuple[str, str, str]]


@dataclass
class Audited:
    library: Library
    embedder: CountingEmbedder
    waking: Waking
    examiner: Examiner

    @classmethod
    @asynccontextmanager
    async def create(
        cls,
        stack: Stack,
        limits: Limits = SMALL,
        *,
        vectors: VectorIndex = "pgvector",
        quantisation: Quantisation = "halfvec",
    ) -> AsyncIterator[Audited]:
        embedder = CountingEmbedder()
        async with Library.create(stack, embedder, vectors=vectors, quantisation=quantisation) as library:
            waking = Waking(library)
            yield cls(library, embedder, waking, Examiner(library.pool, library.es, library.generation, limits))
            await waking.rest()

    @property
    def table(self) -> str:
        return self.library.generation.chunk_table

    @property
    def index(self) -> str:
        return self.library.generation.keyword_index

    async def begin(self, since: Any = None) -> Run:
        async with self.library.pool.connection() as connection:
            return await runs.start(connection, self.library.generation.name, "since" if since else "all", since)

    async def audit(self, run: Run | None = None, *, sampled: int = 0) -> tuple[Run, Differences]:
        """A whole audit: the run, and (external id or document id, store, kind) of everything it found."""
        walk = Walk(self.examiner, run or await self.begin(), block_documents=10, second_look_seconds=0.05)
        finished = await walk.run()
        if sampled:
            lost = await sample(self.library.pool, self.library.generation, sampled)
            assert lost.problem is None
            async with self.library.pool.connection() as connection:
                await runs.add(connection, finished.id, lost.unreachable)
        return finished, await self.differences(finished)

    async def differences(self, run: Run, *, left: bool = False) -> Differences:
        async with self.library.pool.connection() as connection:
            return {
                (r.finding.external_id or str(r.finding.document), r.finding.store, r.finding.kind)
                async for r in runs.differences(connection, run.id)
                if not (left and r.repaired)
            }

    async def repair(self, run: Run, wait_seconds: float = 30) -> RepairResult:
        producer: Any = self.waking
        result = await Repairer(self.examiner, Keywords(self.library.es), producer).repair(
            run.id, wait_seconds=wait_seconds
        )
        await self.waking.rest()
        return result

    async def rows(self, of: UUID) -> list[UUID]:
        records = await self.library.execute(f"SELECT id FROM {self.table} WHERE document_id = %s ORDER BY id", of)
        return [id_ for (id_,) in records]

    async def write_entry(self, id_: UUID | str, version: int, body: dict[str, Any]) -> None:
        """Behind everybody's back."""
        await self.library.es.index(
            index=self.index, id=str(id_), document=body, version=version, version_type="external_gte", refresh=True
        )

    async def entry(self, id_: UUID) -> tuple[int, dict[str, Any]]:
        results = await self.library.es.get(index=self.index, id=str(id_))
        return results["_version"], results["_source"]

    async def drop_entries(self, ids: Sequence[UUID]) -> None:
        await self.library.es.bulk(
            operations=[{"delete": {"_index": self.index, "_id": str(i)}} for i in ids], refresh=True
        )


def text(name: str, sections: int = 3) -> str:
    filler = f"It says what there is to say about {name} at some length, with all that follows from it. " * 9
    return "\n\n".join(f"# {name} {n}\n\nThis is part {n} of {name}. {filler}" for n in range(sections))


def named(*names: str, **fields: object) -> list[DocumentUpserted]:
    return [document(name, text(name), **fields) for name in names]
