"""Both stores as they would be after an edit, which is only in memory: nothing is written anywhere.

The candidates of the live stores lose the chunks that the edit removes, and gain its new ones: by their exact cosine,
and by the BM25 that the index would give them (``query.retrieval.scoring``). Everything after that (verification,
fusion, feedback, reranking, arrangement) is the code of every search.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import numpy as np

from pipeline.core.errors import PenstockError
from pipeline.embedding.port import Vectors
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection
from query.access.verify import Detail
from query.model import Candidate, Passage
from query.retrieval.scoring import AnalysedEntry, gained, keyword_query
from query.retrieval.steps import Steps
from query.retrieval.stores import Compared, DerivedStores, Embedding, Offer, Offers, Query, Scope, Stores


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A chunk that the index would gain."""

    text: str
    vector: Vectors
    """float32, unit length."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """An edit, in terms of chunks of one generation. Whoever holds it may read the edited documents and wrote the
    edit, so its own texts need no further check of access."""

    passages: Mapping[UUID, Passage] = field(default_factory=dict)
    """Every chunk of every changed or new document, as it would be returned."""
    details: Mapping[UUID, Detail] = field(default_factory=dict)
    new: Mapping[UUID, NewChunk] = field(default_factory=dict)
    """The chunks among them that the index does not have."""
    entries: Sequence[AnalysedEntry] = ()
    """The keyword entries that would be written: those of the new chunks, and of others with a new title or heading."""
    texts: Mapping[UUID, str] = field(default_factory=dict)
    """The texts of these entries."""
    removed: frozenset[UUID] = frozenset()
    """Chunks that the index would lose."""
    documents: frozenset[UUID] = frozenset()
    """The changed, new and deleted documents."""

    def cosine_scores(self, vector: Vectors) -> dict[UUID, float]:
        """The cosines of the new chunks to a vector of unit length."""
        if not self.new:
            return {}
        matrix = np.stack([chunk.vector for chunk in self.new.values()])
        return dict(zip(self.new, map(float, matrix @ np.asarray(vector, dtype=np.float32)), strict=True))


class _EditedStores(DerivedStores):
    """The live stores, and an edit of them. Filters are not supported: the edit's documents pass every one of them."""

    def __init__(self, live: Stores, overlay: Overlay) -> None:
        super().__init__(live)
        self._overlay = overlay
        self._gained = gained(overlay.entries)

    async def _scores(self, scope: Scope, text: str, more: Mapping[str, float] | None = None) -> dict[UUID, float]:
        """BM25 of the edit's entries, without those that do not match. Raises Retryable or Misconfigured."""
        if not self._overlay.entries:
            return {}
        async with time_limit(self.timeouts.keywords, "Elasticsearch"):
            query = await keyword_query(self._es, scope.generation, text, more)
            scores = {}
            for entry in self._overlay.entries:
                if (score := query.score(entry, self._gained)) is not None:
                    scores[entry.chunk_id] = score
                await asyncio.sleep(0)  # a text that is made for it takes 20 ms, and an edit has a thousand
        return scores


class Unaffected(Exception):
    """A search has the same results with the edit, so that the rest of it need not be done."""


class WatchedStores(_EditedStores):
    """The live stores, which end a search that the edit does not change. For one search at a time.

    Everything after the candidates depends on the first ``depth`` of each store, and on the score of the next one. If
    none of them is of an edited document, and no new passage would be among them, the results with the edit are
    therefore the same.
    """

    def __init__(self, live: Stores, overlay: Overlay) -> None:
        super().__init__(live, overlay)
        self._touched = True

    async def offers(
        self,
        question: Query,
        scope: Scope,
        embedding: Embedding | None,
        steps: Steps,
        *,
        depth: int,
        spare: int,
    ) -> tuple[Offers, Mapping[UUID, Passage]]:
        offers, passages = await super().offers(question, scope, embedding, steps, depth=depth, spare=spare)
        # A search that goes deeper asks again, and what touches it then is among the deeper candidates, too.
        self._touched = await self._touches(question, scope, embedding, offers, passages, depth)
        return offers, passages

    async def embeddings(self, scope: Scope, ids: Sequence[UUID]) -> dict[UUID, Vectors]:
        """Raises Unaffected: all candidates are known when feedback begins."""
        self._require_touched()
        return await super().embeddings(scope, ids)

    async def describe(self, scope: Scope, passages: Sequence[Passage]) -> dict[UUID, Detail]:
        """Raises Unaffected."""
        self._require_touched()
        return await super().describe(scope, passages)

    def _require_touched(self) -> None:
        if not self._touched:
            raise Unaffected

    async def _touches(
        self,
        question: Query,
        scope: Scope,
        embedding: Embedding | None,
        offers: Offers,
        passages: Mapping[UUID, Passage],
        depth: int,
    ) -> bool:
        first = {
            ranker: [c for c in offer.candidates if c.chunk_id in passages][: depth + 1]
            for ranker, offer in offers.items()
        }
        if any(c.document_id in self._overlay.documents for candidates in first.values() for c in candidates):
            return True
        # A new passage with a higher score than this would be among the candidates, or be the next one after them.
        least = {
            ranker: candidates[-1].score if len(candidates) > depth else float("-inf")
            for ranker, candidates in first.items()
        }
        if "vector" in least and embedding is not None:
            _, vector = await asyncio.shield(embedding)
            if any(score >= least["vector"] for score in self._overlay.cosine_scores(vector).values()):
                return True
        if "keyword" not in least:
            return False
        return any(score >= least["keyword"] for score in (await self._scores(scope, question.text)).values())


class OverlaidStores(_EditedStores):
    """The stores with the edit."""

    def __init__(self, live: Stores, overlay: Overlay) -> None:
        super().__init__(live, overlay)
        self._rewritten = frozenset(entry.chunk_id for entry in overlay.entries)

    async def _vectors(
        self,
        question: Query,
        scope: Scope,
        embedding: Embedding | None,
        steps: Steps,
        limit: int,
        withheld: frozenset[UUID],
        compared: Compared,
        *,
        verified: bool,
    ) -> Offer:
        overlay, wider = self._overlay, limit + len(self._overlay.removed)
        offer = await super()._vectors(question, scope, embedding, steps, wider, withheld, compared, verified=verified)
        if offer.error is None and embedding is not None:
            _, vector = await asyncio.shield(embedding)
            added = [
                Candidate(id_, overlay.passages[id_].document_id, overlay.new[id_].text, score)
                for id_, score in overlay.cosine_scores(vector).items()
            ]
            offer.candidates = _merged(offer.candidates, overlay.removed, added, limit)
        offer.limit = limit
        return offer

    async def _keywords(
        self, question: Query, scope: Scope, steps: Steps, limit: int, withheld: frozenset[UUID]
    ) -> Offer:
        overlay = self._overlay
        replaced = overlay.removed | self._rewritten
        offer = await super()._keywords(question, scope, steps, limit, withheld | replaced)
        offer.withheld = withheld
        if offer.error is None:
            try:
                scores = await self._scores(scope, question.text)
            except PenstockError as error:
                offer.error = error
            else:
                added = [
                    Candidate(id_, overlay.passages[id_].document_id, overlay.texts[id_], score)
                    for id_, score in scores.items()
                ]
                offer.candidates = _merged(offer.candidates, replaced, added, limit)
        return offer

    async def verify(
        self, scope: Scope, candidates: Sequence[Candidate], connection: Connection | None = None
    ) -> dict[UUID, Passage]:
        overlay = self._overlay
        live = [c for c in candidates if c.chunk_id not in overlay.new and c.chunk_id not in overlay.removed]
        verified = await super().verify(scope, live, connection)
        return {id_: overlay.passages.get(id_, passage) for id_, passage in verified.items()} | {
            c.chunk_id: overlay.passages[c.chunk_id] for c in candidates if c.chunk_id in overlay.new
        }

    async def embeddings(self, scope: Scope, ids: Sequence[UUID]) -> dict[UUID, Vectors]:
        new = {id_: self._overlay.new[id_].vector for id_ in ids if id_ in self._overlay.new}
        return await super().embeddings(scope, [id_ for id_ in ids if id_ not in new]) | new

    async def bm25_scores(
        self, scope: Scope, ids: Sequence[UUID], text: str, more: Mapping[str, float]
    ) -> dict[UUID, float]:
        live = await super().bm25_scores(scope, [id_ for id_ in ids if id_ not in self._rewritten], text, more)
        rewritten = self._rewritten.intersection(ids)
        if not rewritten:
            return live
        scores = await self._scores(scope, text, more)
        return live | {id_: score for id_, score in scores.items() if id_ in rewritten}

    async def describe(self, scope: Scope, passages: Sequence[Passage]) -> dict[UUID, Detail]:
        details = self._overlay.details
        live = await super().describe(scope, [p for p in passages if p.chunk_id not in details])
        return live | {p.chunk_id: details[p.chunk_id] for p in passages if p.chunk_id in details}


def _merged(
    live: Sequence[Candidate], replaced: frozenset[UUID], added: Sequence[Candidate], limit: int
) -> list[Candidate]:
    """The candidates after the edit, best first; of equal scores the live ones, in the order of their store."""
    left = [c for c in live if c.chunk_id not in replaced]
    return sorted([*left, *added], key=lambda c: -c.score)[:limit]
