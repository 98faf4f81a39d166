"""Documents through real Kafka and real worker processes into both stores, and every kind of change after that."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from pipeline.ledger.arrivals import embedded_ever
from pipeline.stores.postgres import open_pool
from tests.support.pipeline.oracle import assert_equal
from tests.support.space import Space, document, now
from topics.codec import Record
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE

WORKERS = ("detect", "vectors", "keywords")


def changed(old: DocumentUpserted, **fields: object) -> DocumentUpserted:
    return old.model_copy(update={"observed_at": now(), "version": old.version + 1, **fields})


def detail(n: int) -> int:
    return n * 104729 % 10007


def prose(topic: str, paragraphs: int) -> str:
    return "\n\n".join(
        f"Paragraph {n} about {topic}. The {topic} of section {n} is described here at some length, with remarks on how"
        f" {topic} number {n} relates to {topic} number {n + 1}, why that matters, and what {n * 7919 % 1000} has to do"
        f" with it. A reader who looks for {topic} will want to know that detail {detail(n)} differs."
        for n in range(paragraphs)
    )


async def counts(space: Space) -> tuple[int, int]:
    """(chunks embedded ever, keyword entries written ever)."""
    ids = [row[0] for row in await space.query("SELECT id FROM documents")]
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        embedded = await embedded_ever(connection, ids)
    [(written,)] = await space.query(
        "SELECT coalesce(sum(written), 0)::bigint FROM index_state WHERE store = 'keywords'"
    )
    return embedded, written


async def test_every_kind_of_change_reaches_both_stores_with_minimal_embedding_and_writing(space: Space) -> None:
    space.start(*WORKERS)
    long = document("long.md", "# Turbines\n\n" + prose("turbine", 120))
    twins = [document(f"twin-{n}.md", "# Twin\n\nExactly the same words in two files.") for n in (1, 2)]
    other = document("other.md", "# Other\n\n" + prose("reservoir", 10))
    first = [long, *twins, other]
    await space.publish(*first, topic=DOCUMENTS_BACKFILL)
    await space.settled(first)
    chunks = await assert_equal(space, first)
    loaded = await counts(space)
    assert loaded[1] == chunks
    assert loaded[0] in (chunks - 1, chunks), "the twins' one text is embedded once when they meet in a batch"

    # Again, unchanged: nothing is embedded, nothing is written.
    again = [changed(d) for d in first]
    await space.publish(*again)
    await space.settled(again)
    assert await counts(space) == loaded

    # One word: one to three chunks.
    long = changed(
        again[0], content=long.content.replace(f"detail {detail(60)} differs", f"detail {detail(60)} deviates")
    )
    assert long.content != again[0].content
    await space.publish(long)
    await space.settled([long])
    embedded, written = await counts(space)
    assert 1 <= embedded - loaded[0] <= 3
    assert written - loaded[1] == embedded - loaded[0]
    await assert_equal(space, [long, *again[1:]])

    # A title: rewritten for keywords, nothing embedded.
    titled = changed(again[3], title="A better title")
    await space.publish(titled)
    await space.settled([titled])
    after_title = await counts(space)
    assert after_title[0] == embedded
    assert after_title[1] > written

    # Tags: nothing embedded, both stores follow.
    tagged = AccessChanged(
        tenant="acme", source="wiki", external_id="other.md", observed_at=now(), acl_tags=["board"], required_tags=[]
    )
    await space.publish(tagged)
    await space.settled([tagged])
    other = titled.model_copy(update={"acl_tags": ["board"]})
    assert (await counts(space))[0] == embedded
    await assert_equal(space, [long, *again[1:3], other])

    # One of two identical files deleted: the other stays.
    gone = DocumentDeleted(tenant="acme", source="wiki", external_id="twin-1.md", observed_at=now(), version=1)
    await space.publish(gone)
    await space.settled([gone])
    await assert_equal(space, [long, again[2], other])

    # Nobody may read: withdrawn. Somebody again: back.
    nobody = AccessChanged(tenant="acme", source="wiki", external_id="other.md", observed_at=now(), acl_tags=[])
    await space.publish(nobody)
    await space.settled([nobody])
    await assert_equal(space, [long, again[2]])
    back = nobody.model_copy(update={"observed_at": now(), "acl_tags": ["board"]})
    await space.publish(back)
    await space.settled([back])
    await assert_equal(space, [long, again[2], other])

    # Shrunk to one paragraph: no orphans.
    long = changed(long, content="# Turbines\n\nNothing is left of it.")
    await space.publish(long)
    await space.settled([long])
    await assert_equal(space, [long, again[2], other])

    rescued = [line for line in space.log("detect").splitlines() if '"hints_rescued"' in line]
    assert rescued == [], "hints do the work; the sweeper is the net"
    announced = await space.query("SELECT count(*) FROM documents WHERE announced_seq < seq")
    assert announced == [(0,)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", WORKERS)
async def test_a_worker_killed_during_ingestion_loses_no_document(space: Space, victim: str) -> None:
    space.start(*WORKERS)
    documents = [document(f"{n}.md", f"# Document {n}\n\n" + prose(f"subject-{n}", 6)) for n in range(60)]
    await space.publish(*documents, topic=DOCUMENTS_BACKFILL)
    await _until_some(space, victim)
    space.kill(victim)
    space.start(victim)
    await space.settled(documents, within_seconds=150)
    await assert_equal(space, documents)


async def _until_some(space: Space, victim: str) -> None:
    """Wait until the victim is in the midst of its work: it has done some and not all."""
    statement = {
        "detect": "SELECT count(*) FROM documents WHERE version IS NOT NULL",
        "vectors": "SELECT count(*) FROM index_state WHERE store = 'vectors' AND seq >= want_seq",
        "keywords": "SELECT count(*) FROM index_state WHERE store = 'keywords' AND cardinality(claimed) > 0",
    }[victim]
    deadline = time.monotonic() + 60
    while (await space.query(statement))[0][0] < 1:
        assert time.monotonic() < deadline


async def test_a_detect_worker_killed_between_commit_and_hint_loses_no_document(space: Space) -> None:
    space.start("vectors", "keywords")
    space.start("detect", program=["-m", "tests.support.pipeline.dies_before_hinting"])
    documents = [document(f"{n}.md", f"# Document {n}\n\n" + prose(f"subject-{n}", 3)) for n in range(10)]
    await space.publish(*documents)
    assert space.processes["detect"].wait(60) == -9
    assert (await space.query("SELECT count(*) FROM index_state WHERE seq < want_seq"))[0][0] > 0
    space.processes.pop("detect")
    space.start("detect")
    await space.settled(documents)
    await assert_equal(space, documents)
    assert '"hints_rescued"' not in space.log("detect"), "the unacked event comes again and hints again"


async def test_an_invalid_event_becomes_a_dead_letter_and_blocks_no_other(space: Space) -> None:
    space.start(*WORKERS)
    good = document("good.md", "# Good\n\nThis one is fine.")
    better = changed(good, content="# Good\n\nThis one is better.")
    from pipeline.kafka.client import deliver, producer

    future = document("future.md", "x", observed_at=now() + timedelta(hours=1))
    async with producer(space.settings.kafka) as kafka:
        broken = Record(
            good.key.encode(),
            b'{"tenant": "acme", "content": "secret-canary',
            [("ce_type", b"io.penstock.document.upserted.v1")],
        )
        await deliver(
            [
                kafka.send(DOCUMENTS_LIVE, good),
                kafka.send_raw(DOCUMENTS_LIVE, broken.key, broken.value, broken.headers),
                kafka.send(DOCUMENTS_LIVE, better),
                kafka.send(DOCUMENTS_LIVE, future),
            ]
        )
    await space.settled([better])
    await assert_equal(space, [better])
    letters = await space.query("SELECT code, message, external_id FROM dead_letters ORDER BY code")
    assert [(code, name) for code, _, name in letters] == [("from_the_future", "future.md"), ("invalid", "good.md")]
    assert "secret-canary" not in space.log("detect") + str(letters)


@pytest.mark.slow
async def test_workers_that_are_stopped_drain_and_their_successors_continue(space: Space) -> None:
    space.start(*WORKERS)
    documents = [document(f"{n}.md", f"# Document {n}\n\n" + prose(f"subject-{n}", 4)) for n in range(30)]
    await space.publish(*documents)
    for name in WORKERS:
        assert space.stop(name) == 0
    space.start(*WORKERS)
    await space.settled(documents)
    await assert_equal(space, documents)
