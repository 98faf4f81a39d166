"""In which order a runner writes its intent, hands events to Kafka and records them, on lists instead of services."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Any, cast

import pytest

from connectors.clock import Clock, version_at
from connectors.runner.compare import Row
from connectors.runner.identities import Identities, _compare
from connectors.runner.membership import (
    ChangedSet,
    GroupMembers,
    MembershipTables,
    PublishedSet,
    changed_sets,
    digest,
    expressible,
)
from connectors.runner.publish import Publisher
from connectors.runner.rows import Holder, LeaseLost
from connectors.source import Document, Entry, Gone, Listed
from pipeline.core.errors import Retryable
from pipeline.core.model import Lane
from pipeline.kafka.producer import Delivery, DeliveryUnknown, Stored
from pipeline.stores.postgres import Pool
from topics.codec import encode
from topics.messages import MAX_CONTENT_BYTES, MAX_GROUPS, AnyMessage, IdentityChanged
from topics.registry import MAX_MESSAGE_BYTES, Topic

AT = datetime(2026, 11, 21, tzinfo=UTC)
HOLDER = Holder("t", "s", 1)


@dataclass
class Desk:
    """Rows, membership tables and producer in one: what was asked of them, in order."""

    known: dict[str, Row] = field(default_factory=dict)
    lost: bool = False
    """Another runner has the lease."""
    away: bool = False
    """Kafka acknowledges nothing."""
    slow: bool = False
    """Kafka acknowledges only after a moment, in which other tasks run."""
    calls: list[str] = field(default_factory=list)
    sent: list[tuple[str, AnyMessage]] = field(default_factory=list)
    saved: list[Row] = field(default_factory=list)
    holder: Holder = HOLDER

    async def find(self, ids: Collection[str]) -> dict[str, Row]:
        return {name: row for name, row in self.known.items() if name in ids}

    async def intend(self, _rows: object, _at: object = None, _events: object = ()) -> None:
        self.calls.append("intend")
        if self.lost:
            raise LeaseLost("another runner has it")

    async def save(self, rows: Sequence[Row], _at: datetime, **_cursors: object) -> None:
        self.calls.append("save")
        self.saved += rows

    async def mark_in_doubt(self, _differences: object, _stamp: datetime) -> None:
        self.calls.append("mark")

    async def confirm(self, _batch: object) -> None:
        self.calls.append("confirm")

    async def send(self, topic: Topic, message: AnyMessage) -> Delivery:
        self.calls.append("send")
        self.sent.append((topic.name, message))
        delivery: Delivery = asyncio.get_running_loop().create_future()
        if self.away:
            delivery.set_exception(DeliveryUnknown("no answer"))
        elif self.slow:
            asyncio.get_running_loop().call_later(0.01, delivery.set_result, Stored(0, len(self.sent)))
        else:
            delivery.set_result(Stored(0, len(self.sent)))
        return delivery

    async def publish(self, *entries: Entry, lane: Lane = "live") -> None:
        await Publisher(cast(Any, self), cast(Any, self)).publish(entries, AT, lane)

    async def tell(self, batch: Sequence[ChangedSet]) -> None:
        runner = Identities(
            cast(Any, None), cast(Any, self), cast(Any, None), HOLDER, Clock(None), between_pages=lambda: None
        )
        runner._tables = cast(Any, self)
        await runner._publish(batch)


def document(content: str = "text", **fields: Any) -> Document:
    return Document(**{"external_id": "d", "title": "T", "content": content, "acl_tags": ["a"], **fields})


async def test_publishing_writes_the_intent_then_sends_then_saves_the_rows() -> None:
    desk = Desk()
    await desk.publish(document())
    assert desk.calls == ["intend", "send", "save"]


async def test_an_event_that_kafka_did_not_acknowledge_is_not_saved() -> None:
    desk = Desk(away=True)
    with pytest.raises(Retryable):
        await desk.publish(document())
    assert desk.calls == ["intend", "send"]


async def test_a_runner_that_lost_its_lease_sends_nothing() -> None:
    desk = Desk(lost=True)
    with pytest.raises(LeaseLost):
        await desk.publish(document())
    assert desk.calls == ["intend"]


async def test_an_entry_older_than_its_row_changes_nothing() -> None:
    desk = Desk({"d": Row(external_id="d", version=1, fingerprint=b"1", content_at=AT + timedelta(seconds=1))})
    await desk.publish(document())
    assert (desk.calls, desk.saved) == ([], [])


async def test_entries_that_were_read_before_their_request_are_published_with_that_time() -> None:
    desk = Desk()
    earlier = AT - timedelta(minutes=10)
    await desk.publish(document(read_at=earlier))
    [(_, message)] = desk.sent
    assert message.observed_at == desk.saved[0].content_at == earlier


async def test_access_that_was_listed_before_its_request_is_published_with_that_time() -> None:
    earlier, published = AT - timedelta(minutes=10), AT - timedelta(minutes=20)
    desk = Desk({"d": Row(external_id="d", version=1, fingerprint=b"1", acl_tags=("a",), access_at=published)})
    listed = Listed(external_id="d", acl_tags=["b"], read_at=earlier)
    await Publisher(cast(Any, desk), cast(Any, desk)).publish_access({"d": listed}, AT)
    [(_, message)] = desk.sent
    assert message.observed_at == desk.saved[0].access_at == earlier


async def test_a_delete_during_a_backfill_uses_the_live_lane() -> None:
    desk = Desk({"d": Row(external_id="d", version=1, fingerprint=b"1", content_at=AT)})
    await desk.publish(Gone("d"), document(external_id="other"), lane="backfill")
    topics = {message.kind: topic for topic, message in desk.sent}
    assert topics == {"document.deleted.v1": "documents.live.v1", "document.upserted.v1": "documents.backfill.v1"}


async def test_the_later_of_two_entries_for_the_same_document_is_published() -> None:
    desk = Desk()
    await desk.publish(document("earlier"), document("later"))
    assert [getattr(message, "content", None) for _, message in desk.sent] == ["later"]


async def test_of_one_document_two_tasks_publish_one_after_the_other_and_of_two_at_once() -> None:
    async def both(*names: str) -> list[str]:
        desk = Desk(slow=True)
        publisher = Publisher(cast(Any, desk), cast(Any, desk))
        await asyncio.gather(*(publisher.publish([document(external_id=name)], AT, "live") for name in names))
        return desk.calls

    assert await both("d", "d") == ["intend", "send", "save"] * 2
    assert await both("d", "e") == ["intend", "send"] * 2 + ["save"] * 2


async def test_a_document_is_not_marked_as_in_doubt_while_it_is_being_published() -> None:
    """Saving the row would remove the mark."""
    desk = Desk(slow=True)
    publisher = Publisher(cast(Any, desk), cast(Any, desk))
    publishing = asyncio.create_task(publisher.publish([document()], AT, "live"))
    while "send" not in desk.calls:
        await asyncio.sleep(0)
    await publisher.mark_in_doubt({"d": (1, "newer")}, lambda: AT)
    await publishing
    assert desk.calls == ["intend", "send", "save", "mark"]


async def test_a_membership_is_intended_before_sending_and_confirmed_after_the_acknowledgement() -> None:
    batch = [ChangedSet("ann", frozenset({"staff"}), AT)]
    desk = Desk()
    await desk.tell(batch)
    assert desk.calls == ["intend", "send", "confirm"]
    away, lost = Desk(away=True), Desk(lost=True)
    with pytest.raises(Retryable):
        await away.tell(batch)
    with pytest.raises(LeaseLost):
        await lost.tell(batch)
    assert (away.calls, lost.calls) == (["intend", "send"], ["intend"])


def test_a_changed_membership_has_a_later_observation_time_than_the_last_one() -> None:
    last = PublishedSet(digest(["staff"]), AT + timedelta(seconds=5))
    (changed,) = changed_sets({"ann": frozenset({"board"})}, {"ann": last}, ["ann"], AT)
    assert changed.observed_at > last.observed_at


def test_a_principal_missing_from_all_group_listings_holds_no_groups() -> None:
    published = {"ann": PublishedSet(digest(["staff"]), AT), "bob": PublishedSet(digest(["staff"]), AT)}
    listed = [GroupMembers("staff", ("bob",), (), AT + timedelta(seconds=1))]
    _, held, changed, _ = _compare({}, published, listed, AT + timedelta(seconds=1))
    assert held == {"staff"}
    assert [(change.principal, change.tags) for change in changed] == [("ann", frozenset())]


async def test_other_tasks_have_turns_while_large_documents_are_compared() -> None:
    """A page of fifty documents of 4 MiB stopped all connectors of the process for seconds."""
    turns: list[int] = []

    async def others(desk: Desk) -> None:
        while not desk.calls:  # the intent follows the comparison
            turns.append(1)
            await asyncio.sleep(0)

    desk = Desk()
    waiting = asyncio.create_task(others(desk))
    await asyncio.sleep(0)
    before = len(turns)
    await desk.publish(*(document("a" * MAX_CONTENT_BYTES, external_id=f"{n}") for n in range(6)))
    await waiting
    assert len(turns) - before >= 6


@pytest.mark.parametrize(
    "tags",
    [
        frozenset(f"issue:{n}" for n in range(MAX_GROUPS + 10)),
        frozenset(f"{n:05}{chr(1) * 490}" for n in range(12_000)),
        frozenset(f"{n:05}{chr(0x4E00) * 490}" for n in range(30_000)),
    ],
    ids=["many", "long in JSON", "long in UTF-8"],
)
async def test_somebody_with_more_tags_than_a_message_holds_stops_nobody_elses(tags: frozenset[str]) -> None:
    """The message was refused, and with it those of all other people of the source: nobody lost a group any more."""
    bob = GroupMembers("staff", ("bob",), (), AT)
    groups = [bob, *(GroupMembers(tag, ("ann",), (), AT) for tag in tags)]
    _, _, changed, cut = _compare({}, {}, groups, AT)
    assert cut == 1
    desk = Desk()
    await desk.tell(changed)
    sent = {message.principal: message for _, message in desk.sent if isinstance(message, IdentityChanged)}
    assert sent["bob"].groups == ["staff"]
    held = sent["ann"].groups
    assert held == sorted(tags)[: len(held)]
    assert len(held) > 5_000
    assert len(encode(sent["ann"]).value) <= MAX_MESSAGE_BYTES
    published = {change.principal: PublishedSet(digest(change.tags), AT) for change in changed}
    assert _compare({}, published, groups, AT)[2] == []  # what does not fit is not published again and again


async def test_memberships_do_not_wait_for_threads_that_convert_large_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All threads of asyncio may be busy for minutes, and the transaction of a lost group ended after one."""

    async def containing(_tables: object, _connection: object, column: str, _names: object) -> list[tuple[str, str]]:
        return [("ann", "staff")] if column == "members" else []

    async def published(*_: object) -> dict[str, PublishedSet]:
        return {}

    monkeypatch.setattr(MembershipTables, "_containing", containing)
    monkeypatch.setattr(MembershipTables, "_published", published)
    tables, converted = MembershipTables(cast(Pool, None), HOLDER), Event()
    conversions = [asyncio.create_task(asyncio.to_thread(converted.wait, 30)) for _ in range(40)]
    try:
        changed = await asyncio.wait_for(tables._changed_sets(cast(Any, None), ["ann"], AT), 10)
    finally:
        converted.set()
        await asyncio.gather(*conversions)
    assert [(change.principal, change.tags) for change in changed] == [("ann", frozenset({"staff"}))]


def test_very_many_restricted_pages_take_nobodys_spaces() -> None:
    """The first tags were held in the order of all: a member who restricted 100,000 pages to everybody left nobody a
    space, so that nobody found anything."""
    others = {"group:staff", "space:ENG", "space:OPS", "äußere:Gruppe", "without a kind"}
    restrictions = {f"restriction:{n}" for n in range(MAX_GROUPS + 10)}
    held = expressible(frozenset(others | restrictions))
    assert len(held) == MAX_GROUPS
    assert others <= held
    assert held - others == {*sorted(restrictions)[: MAX_GROUPS - len(others)]}
    assert others <= expressible(frozenset(others | {tag.ljust(480, chr(0x4E00)) for tag in restrictions}))


def test_tags_that_fit_are_all_held() -> None:
    tags = frozenset(f"{n:05}{chr(0x4E00) * 80}" for n in range(50_000))
    assert expressible(tags) == tags


def test_observation_times_never_go_back_even_if_the_clock_does() -> None:
    ahead = datetime.now(UTC) + timedelta(minutes=1)
    clock = Clock(ahead)
    assert ahead < clock.stamp() < clock.stamp()


def test_a_version_is_greater_than_the_last_one_even_if_the_clock_went_back() -> None:
    last = version_at(AT, None)
    assert version_at(AT - timedelta(hours=1), last) > last
