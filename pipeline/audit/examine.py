"""Three streams as one: documents of the ledger, their rows in pgvector, their entries in Elasticsearch."""

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
    """One document of a page: known to the ledger (``desired``), or only to a store."""

    document: UUID
    desired: Desired | None
    differences: Sequence[Difference] = ()
    strangers: dict[Place, int] = field(default_factory=dict)
    """How many chunks a store holds of a document that the ledger does not know."""
    highest: int = 0
    """The highest version of its entries."""
    entries: tuple[UUID, ...] = ()
    """The entries that the keyword index has of it, where the ledger knows it."""

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
    """Compares one generation, a range at a time. Memory is bounded by ``Limits``, whatever the stores hold."""

    def __init__(
        self, pool: Pool, es: AsyncElasticsearch, generation: Generation, limits: Limits | None = None
    ) -> None:
        self.pool = pool
        self.es = es
        self.generation = generation
        self.limits = limits or Limits()
        self.held = 0
        """Rows and entries in memory now, not counting those of the one document being compared."""
        self.peak = 0

    def _hold(self, change: int) -> None:
        self.held += change
        self.peak = max(self.peak, self.held)

    async def refresh(self) -> None:
        """Make everything written so far visible to searches."""
        with es_translated(f"refresh {self.generation.keyword_index}"):
            await self.es.indices.refresh(index=self.generation.keyword_index)

    async def following(self, after: UUID | None, *, run: int | None = None) -> list[UUID]:
        """The next documents to compare together, in the order of their ids; none: the ledger has no more. ``run``:
        of the scope of that run."""
        with translated("audit"):
            async with self.pool.connection() as connection:
                return await ledger.next_documents(connection, self.generation, after, self.limits, run=run)

    async def examine(self, scope: Scope, documents: Sequence[UUID]) -> AsyncGenerator[Verdict, None]:
        """Everything that stands in the scope, in the order of ids. ``documents``: those that the ledger has there."""
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
        """Read these documents again, alone, from refreshed stores: those that still differ and stood still while they
        were read. Whatever moved is on its way and is no difference."""
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
    """Documents that only a store has heard of, up to the next one that the ledger knows."""
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
    """The range that these documents close; without any, all that is left."""
    return Range(after, documents[-1] if documents else None)
