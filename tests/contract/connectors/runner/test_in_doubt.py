"""A runner that is cut off after Kafka has its events and before its rows say so, while the source changes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from connectors.clock import Clock
from connectors.runner.publish import Publisher
from connectors.runner.rows import Holder, LeaseLost, Row, Rows  # type: ignore[attr-defined]
from connectors.source import Document, Unreadable
from pipeline.core.errors import Retryable
from pipeline.core.fold import State
from pipeline.core.identity import document_id
from pipeline.maintenance.recover import republish
from tests.support.connectors.runner_kit import Bench
from tests.support.pipeline.folded import fold_all
from topics.messages import DocumentUpserted

pytestmark = pytest.mark.stack


async def ledger(bench: Bench) -> dict[str, State]:
    """Return the state of the ledger after everything that was published so far."""
    await bench.take()
    return fold_all(bench.taken)


@asynccontextmanager
async def cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str) -> AsyncIterator[asyncio.Event]:
    """A runner whose rows cannot be written once it has published. how: "killed" while it writes, or "postgres away",
    in which case it is killed only after it has tried again. Yields what is set when Kafka has acknowledged."""
    acknowledged = asyncio.Event()

    async def save(self: Rows, rows: object, *arguments: object, **cursors: object) -> None:
        if list(rows):  # type: ignore[call-overload]
            acknowledged.set()
            if how == "killed":
                await asyncio.Event().wait()
            raise Retryable("connector_items: no connection became free in time", service="postgres")
        await real(self, [], *arguments, **cursors)  # type: ignore[arg-type]

    real = Rows.save
    with monkeypatch.context() as patch:
        patch.setattr(Rows, "save", save)
        async with bench.running():
            yield acknowledged
            await asyncio.wait_for(acknowledged.wait(), 30)


async def ledger_after_takeover(bench: Bench) -> dict[str, State]:
    """After another runner took over, nothing is in doubt and a sweep finds nothing more to publish."""
    async with bench.running() as instance:
        await bench.until(lambda: bench.done(instance, "full", "changes", "sweep"))
        await bench.ask("sweep")
        assert await bench.mine("external_id", "connector_items", "in_doubt_since IS NOT NULL") == []
        ledger_rows = await ledger(bench)
        assert "upserted" not in await bench.ask("sweep")
        assert await bench.take() == []
    return ledger_rows


async def ask_for_changes(bench: Bench) -> None:
    """Without waiting for the answer."""
    await bench.query(
        "INSERT INTO connector_asks (tenant, source, action) VALUES (%s, %s, 'changes')", bench.tenant, bench.name
    )


def _share_with_everyone(bench: Bench) -> None:
    bench.world.write("d000", acl_tags=["everyone"], revision="1")


def _take_back(bench: Bench) -> None:
    bench.world.silently("d000", acl_tags=["staff"])


@pytest.mark.parametrize("how", ["killed", "postgres away"])
async def test_an_unconfirmed_access_change_that_was_reverted_is_reverted_in_the_ledger(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    bench.world.write("d000", revision="1")
    async with bench.loaded():
        pass
    async with cut_off(bench, monkeypatch, how) as acknowledged:
        _share_with_everyone(bench)
        await ask_for_changes(bench)
        await acknowledged.wait()
    assert (await ledger(bench))["d000"].acl_tags == ("everyone",)
    _take_back(bench)
    assert (await ledger_after_takeover(bench))["d000"].acl_tags == ("staff",)


async def test_a_document_deleted_after_an_unconfirmed_publication_is_deleted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row was never confirmed, and no feed tells of it."""
    bench.world.fill(1)
    async with cut_off(bench, monkeypatch, "killed"):
        pass
    assert (await ledger(bench))["d000"].alive
    del bench.world.documents["d000"]
    assert not (await ledger_after_takeover(bench))["d000"].alive


async def test_a_document_restored_after_an_unconfirmed_deletion_is_published_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.world.fill(2)
    async with bench.loaded():
        pass
    kept = bench.world.documents["d000"]
    async with cut_off(bench, monkeypatch, "killed") as acknowledged:
        bench.world.remove("d000")
        await ask_for_changes(bench)
        await acknowledged.wait()
    assert not (await ledger(bench))["d000"].alive
    bench.world.documents["d000"] = kept
    assert (await ledger_after_takeover(bench))["d000"].alive


async def test_an_unconfirmed_edit_that_was_reverted_is_reverted_in_the_ledger(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.world.write("d000", "first", revision="1")
    async with bench.loaded():
        pass
    before = bench.world.documents["d000"]
    async with cut_off(bench, monkeypatch, "postgres away") as acknowledged:
        bench.world.write("d000", "second", revision="2")
        await ask_for_changes(bench)
        await acknowledged.wait()
    assert (await ledger(bench))["d000"].content_hash == b"second"
    bench.world.documents["d000"] = before
    assert (await ledger_after_takeover(bench))["d000"].content_hash == b"first"


async def test_an_unconfirmed_access_change_is_reverted_for_a_now_unreadable_document(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.world.write("d000", revision="1")
    async with bench.loaded():
        pass
    async with cut_off(bench, monkeypatch, "killed") as acknowledged:
        _share_with_everyone(bench)
        await ask_for_changes(bench)
        await acknowledged.wait()
    bench.world.documents["d000"] = Unreadable(
        external_id="d000", code="encrypted", message="it has a password", acl_tags=["staff"], revision="2"
    )
    assert (await ledger_after_takeover(bench))["d000"].acl_tags == ("staff",)


async def test_nothing_is_published_before_the_intent_is_stored(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.world.fill(1)
    tried = asyncio.Event()

    async def refused(self: Rows, *_arguments: object) -> None:
        tried.set()
        raise Retryable("connector_items: no connection became free in time", service="postgres")

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "intend", refused)
        async with bench.running():
            await asyncio.wait_for(tried.wait(), 30)
    assert await bench.take() == []


async def _taken_over(bench: Bench) -> tuple[Publisher, Publisher]:
    """The publishers of a runner that lost its lease, and of the one that took it."""
    runners = []
    for epoch in (1, 2):
        await bench.query(
            "INSERT INTO connectors (tenant, source, kind, epoch) VALUES (%s, %s, 'world', %s)"
            " ON CONFLICT (tenant, source) DO UPDATE SET epoch = EXCLUDED.epoch",
            bench.tenant,
            bench.name,
            epoch,
        )
        runners.append(Publisher(bench.producer, Rows(bench.pool, Holder(bench.tenant, bench.name, epoch))))
    return runners[0], runners[1]


def _document(text: str) -> Document:
    return Document(external_id="d", title="T", content=text, acl_tags=["staff"])


async def test_a_runner_that_lost_its_lease_publishes_no_old_text(bench: Bench) -> None:
    old, new = await _taken_over(bench)
    clock = Clock(None)
    stamps = clock.stamp(), clock.stamp()
    with pytest.raises(LeaseLost):
        await old.publish([_document("old text")], stamps[0], "live")
    await new.publish([_document("new text")], stamps[1], "live")
    assert (await old.publish([_document("old text")], stamps[0], "live"))["late"] == 1
    assert [m.content for m in await bench.take() if isinstance(m, DocumentUpserted)] == ["new text"]


async def test_an_older_text_published_after_a_newer_one_does_not_win_in_the_ledger(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused between intent and sending: the fence was passed while the lease was held."""
    await bench.query(
        "INSERT INTO connectors (tenant, source, kind, epoch) VALUES (%s, %s, 'world', 1)", bench.tenant, bench.name
    )
    reached, go_on = asyncio.Event(), asyncio.Event()
    old = Publisher(bench.producer, Rows(bench.pool, Holder(bench.tenant, bench.name, 1)))
    deliver = old._deliver

    async def paused(*arguments: object) -> None:
        reached.set()
        await go_on.wait()
        await deliver(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(old, "_deliver", paused)
    zombie = asyncio.create_task(old.publish([_document("old text")], Clock(None).stamp(), "live"))
    await reached.wait()
    await bench.query("UPDATE connectors SET epoch = 2 WHERE tenant = %s", bench.tenant)
    rows = Rows(bench.pool, Holder(bench.tenant, bench.name, 2))
    new = Publisher(bench.producer, rows)
    clock = Clock(await rows.last_stamp())
    await new.publish([_document("new text")], clock.stamp(), "live")
    go_on.set()
    with pytest.raises(LeaseLost):
        await zombie
    texts = [m.content for m in await bench.take() if isinstance(m, DocumentUpserted)]
    assert texts == ["new text", "old text"], "in the order in which they were sent"
    assert (await ledger(bench))["d"].content_hash == b"new text"
    assert (await new.publish([_document("new text")], clock.stamp(), "live"))["unchanged"] == 1


async def test_a_runner_that_lost_its_lease_cannot_confirm_the_intents_of_its_successor(bench: Bench) -> None:
    old, new = await _taken_over(bench)
    stamp = Clock(None).stamp()
    await new.rows.intend([Row(external_id="d", version=1)], stamp)
    with pytest.raises(LeaseLost):
        await old.rows.save([Row(external_id="d", version=1, fingerprint=b"f")], stamp)
    assert await new.rows.in_doubt(10) == ["d"]


async def test_the_clock_of_the_next_runner_continues_after_the_stamp_of_an_intent(bench: Bench) -> None:
    """A runner whose clock was ahead has sent the events and was killed before it could save their rows."""
    _, runner = await _taken_over(bench)
    stamp = datetime.now(UTC) + timedelta(minutes=3)
    await runner.rows.intend([Row(external_id="d", version=1)], stamp)
    assert Clock(await runner.rows.last_stamp()).stamp() > stamp


@pytest.mark.parametrize("row", ["missing", "gone"])
async def test_after_a_restore_documents_that_the_source_no_longer_has_are_deleted(bench: Bench, row: str) -> None:
    """Kafka has replayed a document that was published after the backup and deleted at its source before the connector
    looked again: the restored rows lack it, or say that it is gone and never was published."""
    bench.world.fill(1)
    async with bench.loaded():
        pass
    await bench.query(
        "INSERT INTO documents (id, tenant, source, external_id, seq, version, observed_at)"
        " VALUES (%s, %s, %s, 'lost', 1, 5, now() - interval '1 hour')",
        document_id(bench.tenant, bench.name, "lost"),
        bench.tenant,
        bench.name,
    )
    if row == "gone":
        await bench.query(
            "INSERT INTO connector_items (tenant, source, scope, external_id, gone) VALUES (%s, %s, '', 'lost', true)",
            bench.tenant,
            bench.name,
        )
    await republish(bench.pool)
    states = await ledger_after_takeover(bench)
    assert "lost" in states, "no delete was published"
    assert not states["lost"].alive


async def test_saving_a_delete_does_not_clear_a_later_intent_of_its_document(bench: Bench) -> None:
    await _taken_over(bench)
    rows = Rows(bench.pool, Holder(bench.tenant, bench.name, 2))
    clock = Clock(await rows.now())
    stamp, later = clock.stamp(), clock.stamp()
    await rows.intend([Row(external_id="d", version=1)], later)
    await rows.save([Row(external_id="d", version=1, gone=True)], stamp)
    [row] = (await rows.find(["d"])).values()
    assert (row.gone, row.in_doubt_since) == (False, later)
