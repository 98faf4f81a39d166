"""Comparing a range of documents: the ledger, the rows in pgvector and the entries in Elasticsearch are read as three
streams in the same order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.audit import reading as ledger
from pipeline.audit.compare import Desired, Difference, Kind, Place, compare
from pipeline.audit.reading import Limits, Range, Scope, Stream, entries, rows
from pipeline.core.model import Generation
from pipeline.stores.elasticsearch import translated as es_translated
from pipeline.stores.postgres import Pool, translated


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference as it is reported."""

    document: UUID
    store: Place
    kind: Kind
    chunks: int
    external_id: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one document, which either the ledger knows (``desired``), or only a store."""

    document: UUID
    desired: Desired | None
    differences: Sequence[Difference] = ()
    strangers: dict[Place, int] = field(default_factory=dict)
    """The number of chunks in each store, for a document that the ledger does not know."""
    highest: int = 0
    """The highest version of its entries."""
    entries: tuple[UUID, ...] = ()
    """Its entries in the keyword index, for a document that the ledger knows."""

    @property
    def clean(self) -> bool:
        return not self.differences and not self.strangers

    @property
    def findings(self) -> list[Finding]:
        name = self.desired.identity.external_id if self.desired is not None else None
        return [Finding(self.document, d.store, d.kind, len(d.chunks), name) for d in self.differences] + [
            Finding(self.document, store, "unknown_document", n) for store, n in self.strangers.items()
        ]


class Examiner:
    """Compares the documents of one generation, range by range. ``Limits`` bounds the memory, whatever the stores
    hold."""

    def __init__(
        self, pool: Pool, es: AsyncElasticsearch, generation: Generation, limits: Limits | None = None
    ) -> None:
        self.pool = pool
        self.es = es
        self.generation = generation
        self.limits = limits or Limits()
        self.held = 0
        """The number of rows and entries in memory, without those of the document that is being compared."""
        self.peak = 0

    def _hold(self, change: int) -> None:
        self.held += change
        self.peak = max(self.peak, self.held)

    async def refresh(self) -> None:
        """Make everything written so far visible to searches."""
        with es_translated(f"refresh {self.generation.keyword_index}"):
            await self.es.indices.refresh(index=self.generation.keyword_index)

    async def following(self, after: UUID | None, *, run: int | None = None) -> list[UUID]:
        """The next documents to compare together, in the order of their ids; empty when the ledger has no more. run:
        only documents in the scope of this run."""
        with translated("audit"):
            async with self.pool.connection() as connection:
                return await ledger.next_documents(connection, self.generation, after, self.limits, run=run)

    async def examine(self, scope: Scope, documents: Sequence[UUID]) -> AsyncGenerator[Verdict, None]:
        """Compare everything in the scope, in the order of document ids. documents: those that the ledger has in it.
        Raises Retryable, Misconfigured."""
        with translated("audit"):
            async with self.pool.connection() as connection:
                known = await ledger.load(connection, self.generation, documents)
        page = self.limits.page
        async with (
            aclosing(rows(self.pool, self.generation, scope, page)) as row_pages,
            aclosing(entries(self.es, self.generation, scope, page)) as entry_pages,
        ):
            in_vectors, in_keywords = Stream(row_pages, self._hold), Stream(entry_pages, self._hold)
            for id_ in sorted(known):
                async for stranger in _strangers(in_vectors, in_keywords, before=id_):
                    yield stranger
                its_rows, its_entries = await in_vectors.take(id_), await in_keywords.take(id_)
                yield Verdict(
                    id_,
                    known[id_],
                    compare(known[id_], its_rows, its_entries),
                    highest=max((e.version for e in its_entries), default=0),
                    entries=tuple(e.id for e in its_entries),
                )
            async for stranger in _strangers(in_vectors, in_keywords, before=None):
                yield stranger

    async def confirmed(self, suspects: Iterable[UUID]) -> AsyncGenerator[Verdict, None]:
        """Compare these documents again, after a refresh of the index, and yield those that still differ. A document
        that changes meanwhile is left out: its sinks have not finished."""
        waiting = sorted(set(suspects))
        if waiting:
            await self.refresh()
        while waiting:
            with translated("audit"):
                async with self.pool.connection() as connection:
                    page = await ledger.fitting(connection, self.generation, waiting, self.limits)
            waiting = waiting[len(page) :]
            async with aclosing(self.examine(tuple(page), page)) as verdicts:
                differing = [v async for v in verdicts if not v.clean]
            with translated("audit"):
                async with self.pool.connection() as connection:
                    now = await ledger.standings(connection, self.generation, [v.document for v in differing])
            for verdict in differing:
                before = verdict.desired.standing if verdict.desired is not None else None
                if now.get(verdict.document) == before:
                    yield verdict


async def _strangers(in_vectors: Stream, in_keywords: Stream, *, before: UUID | None) -> AsyncGenerator[Verdict, None]:  # type: ignore[type-arg]  # either kind
    """Yield the documents that only a store has, up to the next one that the ledger knows (``before``)."""
    while True:
        next_ones = [d for d in (await in_vectors.document(), await in_keywords.document()) if d is not None]
        if not next_ones or (before is not None and min(next_ones) >= before):
            return
        stranger = min(next_ones)
        counts: dict[Place, int] = {
            "vectors": await in_vectors.count(stranger),
            "keywords": await in_keywords.count(stranger),
        }
        yield Verdict(stranger, None, strangers={store: n for store, n in counts.items() if n})


def ranges_end(documents: Sequence[UUID], after: UUID | None) -> Range:
    """The range from ``after`` to the last of these documents; without documents, all that is left."""
    return Range(after, documents[-1] if documents else None)
