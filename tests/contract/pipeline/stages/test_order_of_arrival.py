"""The real ledger ends in the same state whatever the order in which events arrive."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from pipeline.core.identity import content_hash
from tests.support.pipeline.build_kit import Event, Site, document
from tests.support.space import Space
from topics.messages import DocumentDeleted, DocumentUpserted


@pytest.fixture
async def site(space: Space) -> AsyncIterator[Site]:
    async with Site.create(space) as site:
        yield site


def upsert(name: str, version: int, second: int, content: str) -> DocumentUpserted:
    return document(name, content, version=version, observed_at=START + timedelta(seconds=second))


def delete(name: str, second: int) -> DocumentDeleted:
    return DocumentDeleted(
        tenant="acme", source="wiki", external_id=name, observed_at=START + timedelta(seconds=second), version=1
    )


START = datetime(2026, 1, 1, tzinfo=UTC)


async def live_documents(site: Site, *names: str) -> dict[str, tuple[int, str] | None]:
    """(version, text) of each document; None: deleted, or never there."""
    rows = await site.space.query(
        "SELECT d.external_id, d.version, b.text, d.deleted_at FROM documents d"
        " LEFT JOIN document_bodies b ON b.document_id = d.id WHERE d.external_id = ANY(%s)",
        list(names),
    )
    alive = {
        name: (version, text.strip()) for name, version, text, gone in rows if gone is None and version is not None
    }
    return {name: alive.get(name) for name in names}


async def test_a_batch_that_overwrites_and_deletes_an_older_version_keeps_the_recreated_document(site: Site) -> None:
    """Its own content was written over for a moment only: nothing kept it, and the document stayed deleted."""
    await site.put(upsert("a", 1, 30, "the new one"))
    await site.put(upsert("a", 2, 10, "the old one"), delete("a", 20))
    assert await live_documents(site, "a") == {"a": (1, "the new one")}
    [(rows,)] = await site.space.query("SELECT count(*) FROM chunks_g1")
    assert (rows, len(site.embedder.texts)) == (1, 1)


async def test_of_two_superseded_revisions_the_same_one_is_restored_in_either_order(site: Site) -> None:
    for name, order in (("a", ("x", "y")), ("b", ("y", "x"))):
        await site.accept(upsert(name, 5, 10, "first"))
        for content in order:
            await site.accept(upsert(name, 1, 30, content))
        await site.accept(delete(name, 20))
    live = await live_documents(site, "a", "b")
    assert live["a"] == live["b"] is not None


async def test_repeated_observations_of_one_lower_version_keep_one_superseded_row(site: Site) -> None:
    """Each crawl observes the document anew under a version that loses: only the last of them can ever come back."""
    await site.accept(upsert("a", 9, 0, "nine"))
    for second in range(1, 30):
        await site.accept(upsert("a", 1, second, f"one, {second}"))
    assert await site.space.query("SELECT count(*) FROM superseded") == [(1,)]
    await site.accept(delete("a", 15))
    assert await live_documents(site, "a") == {"a": (1, "one, 29")}


async def test_events_in_any_order_and_batches_give_the_same_ledger_state(site: Site) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    events: dict[str, list[Event]] = {}
    for n in range(300):
        name = f"d{n}"
        events[name] = [
            delete(name, chance.randint(1, 5))
            if chance.random() < 0.3
            else upsert(name, chance.randint(1, 4), chance.randint(1, 5), chance.choice("xyz"))
            for _ in range(chance.randint(3, 7))
        ]
    rounds: list[list[Event]] = [[] for _ in range(4)]
    for its in events.values():
        arriving = chance.sample(its, len(its)) + chance.choices(its, k=2)
        for message, place in zip(arriving, sorted(chance.choices(range(4), k=len(arriving))), strict=True):
            rounds[place].append(message)
    for batch in rounds:
        await site.accept(*batch)
    live = await live_documents(site, *events)
    assert {name: live[name] for name in events} == {name: expected_document(its) for name, its in events.items()}


def expected_document(events: Sequence[Event]) -> tuple[int, str] | None:
    floor = max((e.observed_at for e in events if isinstance(e, DocumentDeleted)), default=START)
    upserts = [e for e in events if isinstance(e, DocumentUpserted) and e.observed_at > floor]
    won = max(upserts, key=lambda e: (e.version, e.observed_at, content_hash(e.content)), default=None)
    return (won.version, won.content) if won else None
