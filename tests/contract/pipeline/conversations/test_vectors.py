"""Embeddings of members' chunks: of one model, behind documents, and whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pipeline.conversations import embed
from pipeline.conversations.embed import ConversationVectors
from pipeline.core.conversations import group, made_by
from pipeline.core.errors import Retryable
from pipeline.embedding.port import Embedded, Embedder, OneModel
from pipeline.ledger import generations
from pipeline.runtime.settings import ConversationSettings
from tests.support.pipeline.conversations_kit import (
    Desk,
    as_grouped,
    forgotten,
    moment,
    recorded,
    sent,
)
from topics.messages import Pair as Sent

pytestmark = pytest.mark.stack


async def test_one_more_pair_embeds_only_the_last_chunk(desk: Desk) -> None:
    pairs = [sent(n) for n in range(34)]
    await desk.take(recorded(*pairs))
    await desk.embed()
    before = await desk.chunks()
    assert len(before) == 4
    assert all(row[4] and row[5] == made_by(desk.generation) for row in before)
    await desk.take(recorded(sent(34)))
    after = await desk.chunks()
    assert after[:3] == before[:3]
    assert [row[4] for row in after] == [*(row[4] for row in before[:3]), None]
    embedded = desk.metrics.conversation_chunks._value.get()
    await desk.embed()
    assert desk.metrics.conversation_chunks._value.get() == embedded + 1


async def test_missing_embeddings_are_noted_and_the_history_is_served_without_them(desk: Desk) -> None:
    await desk.take(recorded(*(sent(n) for n in range(30))))
    await desk.embed()
    await desk.take(recorded(*(sent(n) for n in range(30, 45))))
    response = await desk.history("rule 3")
    assert (response.served, len(response.pieces), response.without_embedding) == ("nearest", 3, 2)
    assert response.notes == ["2 chunks of the history are not embedded yet"]
    await desk.take(recorded(*(sent(n) for n in range(35)), member="bob"))
    response = await desk.history("rule 3", member="bob")
    assert (response.served, len(response.pieces), response.without_embedding) == ("newest", 4, 4)
    assert response.pieces[0].first_at == moment(30)


class Other:
    """Another model of the same size: every vector points elsewhere."""

    def __init__(self, real: Embedder, model: str) -> None:
        self.real = real
        self.model = model
        self.revision = "2"
        self.dimensions, self.input_window = real.dimensions, real.input_window
        self.document_prefix = self.query_prefix = ""
        self.count_tokens = real.count_tokens

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        embedded = await self.real.embed_documents(texts)
        return Embedded(np.roll(embedded.vectors, 1, axis=1), embedded.refused, embedded.tokens)


async def test_vectors_of_different_models_are_never_mixed_in_a_history(desk: Desk) -> None:
    await desk.take(recorded(*(sent(n) for n in range(40))))
    await desk.embed()
    first = await desk.chunks()
    await desk.space.execute("UPDATE generations SET model = 'other', revision = '2' WHERE state = 'active'")
    async with desk.pool.connection() as connection:
        new = await generations.active(connection)
    assert await desk.embed() == 0, "a worker with the old model writes nothing"
    desk.generation = new
    history = await desk.history("rule 3")
    assert (history.served, history.without_embedding) == ("newest", 4), "the old vectors are found no more"
    await desk.embed(Other(desk.embedder, "other"))  # type: ignore[arg-type]
    second = await desk.chunks()
    assert {row[5] for row in second} == {made_by(new)}
    assert all(a[4] != b[4] and a[1] == b[1] for a, b in zip(first, second, strict=True))
    assert (await desk.history("rule 3")).without_embedding == 0


async def test_a_generation_with_other_chunk_params_does_not_re_embed_conversations(desk: Desk) -> None:
    await desk.take(recorded(*(sent(n) for n in range(40))))
    await desk.embed()
    before = await desk.chunks()
    await desk.space.execute("UPDATE generations SET params = params || '{\"target\": 99}' WHERE state = 'active'")
    assert await desk.embed() == 0
    assert await desk.chunks() == before


async def test_a_conversation_chunk_longer_than_the_window_is_embedded_including_its_end(desk: Desk) -> None:
    """The local model reads 254 tokens: what is asked last must be found too."""
    filler = " ".join(f"Item {n} of the inventory is stored on shelf {n}." for n in range(60))
    long = [Sent(question=f"List {n}?", answer=filler, asked_at=moment(n)) for n in range(2)]
    end = Sent(question="Who feeds the penguins?", answer="The penguins are fed by Olga.", asked_at=moment(5))
    await desk.take(recorded(*long, end))
    await desk.embed()
    [(_, text, _, _, vector, _)] = await desk.chunks()
    held = np.array([float(x) for x in vector.strip("[]").split(",")])
    beginning = (await desk.embedder.embed_documents([text])).vectors[0]
    question = await desk.embedder.embed_query("Who feeds the penguins?")
    assert np.linalg.norm(held) == pytest.approx(1, abs=1e-2)
    assert held @ question > beginning @ question


class Noting:
    """The real model; notes whether documents were at work whenever it was asked."""

    def __init__(self, desk: Desk, busy: list[bool]) -> None:
        self.busy, self.real, self.seen, self.texts = busy, desk.embedder, list[bool](), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        self.seen.append(self.busy[0])
        self.texts += len(texts)
        assert len(texts) <= embed.REQUEST_INPUTS
        return await self.real.embed_documents(texts)


async def test_conversations_are_embedded_after_documents_but_are_not_starved(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.take(recorded(*(sent(n) for n in range(100))), recorded(*(sent(n) for n in range(100)), member="bob"))
    busy = [True]
    model = Noting(desk, busy)
    worker = ConversationVectors(
        desk.pool,
        OneModel(model),
        desk.metrics,
        ConversationSettings(embeddings_per_second=10_000),  # type: ignore[arg-type]
        busy=lambda: busy[0],
    )
    turn = asyncio.create_task(worker.turn())
    await asyncio.sleep(1)
    assert model.seen == []
    busy[0] = False
    await turn
    assert model.seen == [False], "sixteen chunks in one call"
    busy[0] = True
    monkeypatch.setattr(embed, "STARVED_SECONDS", 0.2)
    await worker.turn()
    assert model.seen == [False, True]


class Failing:
    """The real model, but for one text that it always fails at."""

    def __init__(self, desk: Desk, marker: str) -> None:
        self.marker, self.real, self.failed = marker, desk.embedder, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        if any(self.marker in text for text in texts):
            self.failed += 1
            raise Retryable("500", service="embedding")
        return await self.real.embed_documents(texts)


async def test_one_chunk_that_always_fails_does_not_block_the_others(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.take(recorded(*(sent(n) for n in range(50))))
    monkeypatch.setattr(embed, "RETRY_BASE_SECONDS", 0.01)
    model = Failing(desk, "number 27?")
    worker = ConversationVectors(
        desk.pool,
        OneModel(model),
        desk.metrics,
        ConversationSettings(embeddings_per_second=10_000),  # type: ignore[arg-type]
    )
    for _ in range(20):
        with contextlib.suppress(Retryable):
            await worker.turn()
        await asyncio.sleep(0.05)
    assert [row[0] for row in await desk.chunks() if row[4] is None] == [2]
    assert model.failed < 15, "later and later"


async def test_a_chunk_regrouped_or_forgotten_during_embedding_gets_no_vector(desk: Desk) -> None:
    await desk.take(recorded(*(sent(n) for n in range(40))))
    real = desk.embedder

    class Slow(Noting):
        async def embed_documents(self, texts: Sequence[str]) -> Embedded:
            await desk.take(forgotten(1))
            await desk.take(recorded(*(sent(n) for n in range(5, 45)), observed=2))
            return await real.embed_documents(texts)

    worker = ConversationVectors(
        desk.pool,
        OneModel(Slow(desk, [False])),
        desk.metrics,
        ConversationSettings(embeddings_per_second=10_000),  # type: ignore[arg-type]
    )
    await worker.turn()
    chunks = await desk.chunks()
    assert [row[1] for row in chunks] == [c.text for c in group(as_grouped([sent(n) for n in range(5, 45)]))]
    assert [row[4] for row in chunks] == [None] * 4


async def test_workers_share_the_chunks_and_embed_each_once(desk: Desk) -> None:
    await desk.take(*(recorded(*(sent(n) for n in range(100)), member=f"m{m}") for m in range(5)))
    models = [Noting(desk, [False]) for _ in range(3)]
    workers = [
        ConversationVectors(
            desk.pool,
            OneModel(model),
            desk.metrics,
            ConversationSettings(embeddings_per_second=10_000),  # type: ignore[arg-type]
        )
        for model in models
    ]
    while any(await asyncio.gather(*(worker.turn() for worker in workers))):
        pass
    assert await desk.space.query("SELECT count(*), count(embedding) FROM conversation_chunks") == [(50, 50)]
    assert sum(model.texts for model in models) == 50
    assert all(model.texts for model in models)
