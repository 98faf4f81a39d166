"""The stores for several rankings of one question: what two of them need alike is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from pipeline.embedding.port import Vectors
from query.model import Passage
from query.retrieval.steps import Steps
from query.retrieval.stores import DerivedStores, Embedding, Offers, Query, Scope, Stores


class RememberingStores(DerivedStores):
    """The live stores for one question of one caller, which rankings ask one after the other. Each ranking checks by
    itself what the caller may read: where that has changed, its candidates are read again."""

    def __init__(self, live: Stores) -> None:
        super().__init__(live)
        self._offers: dict[tuple[object, ...], tuple[Offers, Mapping[UUID, Passage]]] = {}
        self._embeddings: dict[tuple[str, UUID], Vectors] = {}
        self._word_scores: dict[tuple[object, ...], dict[UUID, float]] = {}

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
        search = question.text, question.mode, question.sort, depth, spare
        key = *search, scope.generation.name, scope.caller, scope.access, scope.filters
        if key not in self._offers:
            self._offers[key] = await super().offers(question, scope, embedding, steps, depth=depth, spare=spare)
        return self._offers[key]

    async def embeddings(self, scope: Scope, ids: Sequence[UUID]) -> dict[UUID, Vectors]:
        name = scope.generation.name
        missing = [id_ for id_ in ids if (name, id_) not in self._embeddings]
        for id_, vector in (await super().embeddings(scope, missing)).items():
            self._embeddings[name, id_] = vector
        return {id_: self._embeddings[name, id_] for id_ in ids if (name, id_) in self._embeddings}

    async def bm25_scores(
        self, scope: Scope, ids: Sequence[UUID], text: str, more: Mapping[str, float]
    ) -> dict[UUID, float]:
        key = scope.generation.name, text, tuple(ids), tuple(sorted(more.items()))
        if key not in self._word_scores:
            self._word_scores[key] = await super().bm25_scores(scope, ids, text, more)
        return self._word_scores[key]
