"""No mode, note, step or passage has a trace of what its asker may not read: every answer is compared with that of a
library in which the rest never existed, and with a plain filter over random worlds (tests/support/query/leaks.py)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from query.modes.gather import Modes
from query.modes.material import Material, Question
from query.settings import ChatSettings, RetrievalSettings
from tests.support.query.leak_paths import learn
from tests.support.query.leaks import Asker, DocumentKey, Event, Living, Model, World, is_visible_to
from tests.support.query.library import Library, WordEmbedder

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

SEEDS = (pytest.param(3, marks=pytest.mark.slow), None)
"""None: drawn at each run; a failure prints the world's seed."""
WORLDS = 4
BUDGETS = (90, 300, 1_000, 30_000)
OURS = ("scope", "long_context", "embedded", "mode", "read", "recent")
"""Steps that are decided here; what a search tells is compared in test_leaks.py."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def libraries(stack: Stack) -> AsyncIterator[tuple[Library, Library]]:
    """One with everything, one with what the askers may read."""
    async with AsyncExitStack() as closing:
        yield (
            await closing.enter_async_context(Library.create(stack, WordEmbedder())),
            await closing.enter_async_context(Library.create(stack, WordEmbedder())),
        )


def visible_facts(material: Material) -> dict[str, Any]:
    steps = [(s.name, dict(s.facts)) for s in material.steps if s.name in OURS]
    whole = [(r.passage.source, r.passage.external_id, r.passage.chunk_index, r.text) for r in material.passages]
    return {
        "mode": material.mode,
        "whole": material.whole,
        "notes": list(material.notes),
        "steps": steps,
        "budget": material.budget_tokens,
        "passages": whole if material.whole else None,
    }


def questions(world: World, asker: Asker, model: Model) -> Iterator[Question]:
    text = world.question()
    readable = model.readable(asker)
    sources = sorted({source for _, source, _ in readable} | {"wiki"})
    every = [document_id(*key) for tenant in world.tenants for key in _keys(model, tenant)]
    dice = random.Random(world.seed)
    yield Question(text)
    yield Question(text, collection=sources[0])
    yield Question(text, collection=sources[-1])
    yield Question(text, documents=(*dice.sample(every, min(5, len(every))), uuid4()))
    yield Question(text, mode="long_context")
    yield Question(text, mode="hybrid", collection=sources[-1])
    yield Question(f"the latest {text}", mode="hybrid")
    yield Question("What is new?", mode="hybrid")


def _keys(model: Model, tenant: str) -> list[DocumentKey]:
    return sorted(document.key for document in model.living() if document.key[0] == tenant)


def check(material: Material, asker: Asker, readable: dict[DocumentKey, Living]) -> None:
    """Against the plain filter: nothing else is read, and of what is read every word stands in the document."""
    for result in material.passages:
        key = (asker.tenant, result.passage.source, result.passage.external_id)
        assert result.passage.document_id == document_id(*key)
        assert set(result.text.split()) <= set(readable[key].content.split())
    facts = {s.name: s.facts for s in material.steps}
    size = facts.get("long_context", {})
    if "documents" in size and material.budget_tokens == BUDGETS[-1]:
        read = {(asker.tenant, r.passage.source, r.passage.external_id) for r in material.passages}
        assert len(read) == size["documents"]
        for key in read:
            text = " ".join(r.text for r in material.passages if r.passage.document_id == document_id(*key))
            assert Counter(text.split()) == Counter(readable[key].content.split())


@pytest.mark.parametrize("seed", SEEDS)
async def test_answers_in_every_mode_show_no_trace_of_unreadable_documents(
    libraries: tuple[Library, Library], seed: int | None
) -> None:
    everything, only = libraries
    base = random.randrange(10, 10**6) if seed is None else seed
    worlds = [World(base * 1000 + n, f"m{base}w{n}") for n in range(WORLDS)]
    models = {id(world): Model() for world in worlds}
    for world in worlds:
        models[id(world)].learn(*world.first, *world.then)
    askers = {
        id(world): max(world.askers, key=lambda a, w=world: len(models[id(w)].readable(a)))  # type: ignore[misc]
        for world in worlds
    }
    seen: Counter[str] = Counter()

    async def compare(state: str) -> None:
        for world in worlds:
            asker, model = askers[id(world)], models[id(world)]
            readable = model.readable(asker)
            for n, question in enumerate(questions(world, asker, model)):
                budget = BUDGETS[(n + world.seed) % len(BUDGETS)] if n else BUDGETS[world.seed % len(BUDGETS)]
                answers = []
                for library in (everything, only):
                    settings = RetrievalSettings(standard_tokens=budget, personal_sources=frozenset({"wiki", "b"}))
                    modes = Modes(library.search, library.pool, settings, ChatSettings())
                    caller = await library.caller(asker.tenant, *asker.tags, principals=asker.principals)
                    answers.append(await modes.gather(question, caller, "standard"))
                try:
                    check(answers[0], asker, readable)
                    assert visible_facts(answers[0]) == visible_facts(answers[1])
                except (AssertionError, KeyError) as error:
                    raise AssertionError(f"{state}, {world}, {asker}, {question}, {budget}: {error}") from error
                seen[answers[0].mode] += 1

    for library, part in ((everything, "first"), (only, "first"), (everything, "then"), (only, "then")):
        events: list[Event] = [
            event
            for world in worlds
            for event in getattr(world, part)
            if library is everything
            or is_visible_to(event, models[id(world)].readable(askers[id(world)]), askers[id(world)])
        ]
        ids = await learn(library, events)
        if part == "first":
            await library.converge(*ids)
    await compare("the stores have not followed")
    for library in (everything, only):
        rows = await library.execute("SELECT DISTINCT document_id FROM index_state WHERE seq < want_seq")
        await library.converge(*(id_ for (id_,) in rows))
    await compare("settled")
    print(f"{sum(seen.values())} answers: {dict(seen)}")
    assert {"focused", "long_context", "hybrid"} <= seen.keys()
    [(all_rows,)] = await everything.execute("SELECT count(*) FROM manifests")
    [(left,)] = await only.execute("SELECT count(*) FROM manifests")
    assert 0 < left < all_rows / 2
