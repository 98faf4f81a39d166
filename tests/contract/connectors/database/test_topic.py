"""The source of topics on real Kafka: what the records of a table's changes make of documents."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from connectors.database.source import Database
from connectors.declared import options
from connectors.set_aside import SetAside
from connectors.source import Context, CursorExpired, Document, Gone, Unreadable
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.kafka.batches import POLL_BYTES
from pipeline.kafka.follow import Follower
from pipeline.runtime.settings import KafkaSettings
from tests.support.connectors.reading import changed, everything
from tests.support.pipeline import hostile_batches

pytestmark = pytest.mark.stack

RECORDED = Path(__file__).parents[3] / "data" / "debezium-postgres.jsonl"
PLACEHOLDER = "__debezium_unavailable_value"


@dataclass
class Desk:
    """A cluster, and sources that follow a topic of it."""

    bootstrap: str
    folder: Path
    producer: AIOKafkaProducer
    admin: AIOKafkaAdminClient
    topic: str = field(default_factory=lambda: f"t{uuid.uuid4().hex[:12]}")
    set_aside: SetAside = field(default_factory=SetAside)
    opened: list[Database] = field(default_factory=list)

    async def create(self, partitions: int = 1, **configs: str) -> None:
        settings = {"cleanup.policy": "compact", **configs}
        answer = await self.admin.create_topics([NewTopic(self.topic, partitions, 1, topic_configs=settings)])
        assert [code for _, code, *_ in answer.topic_errors] == [0]

    def source(self, folder: str = "state", **more: Any) -> Database:
        declared = {
            "topic": self.topic,
            "kafka": {"bootstrap": self.bootstrap},
            "title": "{subject}",
            "text": "{body}",
            "acl": ["team"],
            **more,
        }
        (self.folder / folder).mkdir(exist_ok=True)
        context = Context(
            name="s",
            tenant="t",
            memory=None,  # type: ignore[arg-type]
            folder=self.folder / folder,
            set_aside=self.set_aside,
        )
        source = Database(options(Database, declared, "s", {}), context)
        source.page_documents = 3
        self.opened.append(source)
        return source

    async def send(self, key: object, value: object, partition: int = 0) -> None:
        await self.producer.send_and_wait(self.topic, encoded(value), encoded(key), partition=partition)

    async def replay(self, records: Sequence[Mapping[str, str | None]]) -> None:
        for record in records:
            key, value = record["key"], record["value"]
            await self.send(key and key.encode(), value and value.encode())

    async def put(self, id_: object, *, op: str = "c", partition: int = 0, **values: Any) -> None:
        row = {"id": id_, "subject": f"Subject {id_}", "body": f"Body {id_}", "team": ["staff"], **values}
        await self.send({"id": id_}, {"op": op, "before": None, "after": row}, partition)

    async def remove(self, id_: object) -> None:
        await self.send({"id": id_}, {"op": "d", "before": {"id": id_}, "after": None})
        await self.send({"id": id_}, None)


def encoded(value: object) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()


@pytest.fixture
async def desk(stack: Stack, tmp_path: Path) -> AsyncIterator[Desk]:
    bootstrap = json.loads((stack.home / "endpoints.json").read_text())["kafka"]["bootstrap"]
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await producer.start()
    await admin.start()
    desk = Desk(bootstrap, tmp_path, producer, admin)
    yield desk
    for source in desk.opened:
        await source.close()
    await producer.stop()
    await admin.close()


async def listing(source: Database) -> dict[str, list[str]]:
    return {e.external_id: [*e.acl_tags] async for page in source.slim() for e in page}  # type: ignore[union-attr]


async def test_rows_of_all_partitions_become_documents_and_changes_are_read_once(desk: Desk) -> None:
    await desk.create(partitions=3)
    for number in range(8):
        await desk.put(number, partition=number % 3)
    source = desk.source()
    cursor = await source.start()
    assert set(await everything(source)) == set(await listing(source)) == set(map(str, range(8)))
    assert await changed(source, cursor) == ({}, cursor)
    await desk.put(4, op="u", partition=1, body="edited")
    for number in range(10, 18):
        await desk.put(number, partition=2)
    entries, cursor = await changed(source, cursor)
    assert set(entries) == {"4", *map(str, range(10, 18))}
    assert entries["4"].content == "edited"  # type: ignore[union-attr]
    assert (await changed(source, cursor))[0] == {}


async def test_deletes_tombstones_and_changed_keys_withdraw_documents(desk: Desk) -> None:
    await desk.create()
    for number in range(4):
        await desk.put(number)
    source = desk.source()
    cursor = await source.start()
    await desk.remove(0)
    await desk.send({"id": 1}, None)
    await desk.remove(2)
    await desk.put(22)
    entries, _ = await changed(source, cursor)
    assert {id_: type(entry) for id_, entry in entries.items()} == {"0": Gone, "1": Gone, "2": Gone, "22": Document}
    assert set(await listing(source)) == {"3", "22"}
    assert [type(entry) for entry in await source.fetch(["1", "3", "none"])] == [Gone, Document, Gone]


async def test_nothing_of_a_deleted_row_is_left_on_disk_while_its_connector_runs(desk: Desk) -> None:
    await desk.create()
    for number in range(40):
        await desk.put(number, body=f"{number} Zebulon Quartermaine " * 100)
    source = desk.source()
    cursor = await source.start()
    for number in range(40):
        await desk.remove(number)
    await changed(source, cursor)
    files = [path for path in (desk.folder / "state").iterdir() if path.name.startswith("topic")]
    assert [path for path in files if b"Quartermaine" in path.read_bytes()] == []
    assert [path for path in files if path.stat().st_mode & 0o077] == []


async def test_an_id_that_is_no_key_may_move_to_another_row(desk: Desk) -> None:
    """The document of the id before stayed, because only the key's row was replaced."""
    await desk.create()
    row = {"number": "a", "subject": "s", "body": "b", "team": "staff"}
    await desk.send({"pk": 1}, {"op": "c", "after": row})
    source = desk.source(id=["number"])
    cursor = await source.start()
    await desk.send({"pk": 1}, {"op": "u", "after": {**row, "number": "b"}})
    entries, _ = await changed(source, cursor)
    assert {id_: type(entry) for id_, entry in entries.items()} == {"a": Gone, "b": Document}
    assert set(await listing(source)) == {"b"}


@pytest.mark.parametrize("form", ["env", "bare", "flat"])
async def test_what_debezium_wrote_becomes_what_the_table_held(desk: Desk, form: str) -> None:
    """Recorded from Debezium 3.3.1 on Postgres 18, by logical decoding: a snapshot, inserts, updates, one of a row with
    a large text, a changed key, a delete, a new column, a truncation, an insert."""
    records = [record for record in map(json.loads, RECORDED.read_text().splitlines()) if record["form"] == form]
    await desk.create(**{"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"})
    source = desk.source(
        format="flat" if form == "flat" else "debezium",
        modified="edited",
        deleted="gone",
        metadata=["price", "details", "ref"],
    )
    await desk.replay(records[:1])
    cursor = await source.start()
    assert set(await listing(source)) == {"1"}
    end = next((n for n, record in enumerate(records) if '"op":"t"' in (record["value"] or "")), len(records) - 1)
    await desk.replay(records[1:end])
    entries, cursor = await changed(source, cursor)
    assert {id_: type(entry) for id_, entry in entries.items()} == {"1": Gone, "2": Gone, "3": Document, "4": Document}
    assert await listing(source) == {"3": ["staff"], "4": ["staff", "board"]}
    large, renamed = entries["3"], entries["4"]
    assert isinstance(large, Document)
    assert isinstance(renamed, Document)
    assert (large.title, large.content[:7], len(large.content)) == ("Large, renamed", "Large. ", 6407)
    assert (renamed.title, renamed.content) == ("After a change of the schema", "It is on fire.")
    assert renamed.source_modified_at == datetime(2026, 11, 21, 8, 30, tzinfo=UTC)
    assert renamed.metadata["price"] == "1.50"
    await desk.replay(records[end:])
    if form == "flat":  # ExtractNewRecordState drops truncations
        assert set((await changed(source, cursor))[0]) == {"5"}
    else:
        with pytest.raises(CursorExpired):
            await changed(source, cursor)
        assert set(await listing(source)) == {"5"}


async def test_two_rows_with_one_id_can_be_read_by_nobody(desk: Desk) -> None:
    await desk.create()
    for key, team in ((1, "staff"), (2, "board")):
        await desk.send({"pk": key}, {"op": "c", "after": {"id": "a", "subject": "s", "body": "b", "team": team}})
    assert await listing(desk.source()) == {"a": []}


async def test_a_large_value_that_was_not_logged_stays_as_it_was(desk: Desk) -> None:
    await desk.create()
    await desk.put(1, body="A long text.")
    source = desk.source()
    cursor = await source.start()
    await desk.put(1, op="u", subject="Renamed", body=PLACEHOLDER)
    [entry] = (await changed(source, cursor))[0].values()
    assert isinstance(entry, Document)
    assert (entry.title, entry.content) == ("Renamed", "A long text.")


async def test_a_placeholder_is_never_a_text_and_admits_nobody(desk: Desk) -> None:
    await desk.create()
    await desk.put(1, op="u", body=PLACEHOLDER)
    await desk.put(2, op="u", team=[PLACEHOLDER])
    entries = await everything(desk.source())
    assert [type(entry) for entry in entries.values()] == [Unreadable, Unreadable]
    assert "REPLICA IDENTITY FULL" in entries["1"].message  # type: ignore[union-attr]
    assert entries["1"].acl_tags == ("staff",)  # type: ignore[union-attr]
    assert entries["2"].acl_tags == ()  # type: ignore[union-attr]


async def test_a_bad_record_denies_its_row_and_no_other_until_a_good_one(desk: Desk) -> None:
    await desk.create()
    for number in (1, 2):
        await desk.put(number)
    source = desk.source()
    cursor = await source.start()
    await desk.send({"id": 1}, b"secret words")
    await desk.send(b"secret key", {"op": "c", "after": {"id": 5}})
    await desk.send({"id": 6}, {"op": "c", "after": {"subject": "no id"}})
    await desk.put(3)
    entries, cursor = await changed(source, cursor)
    assert set(entries) == {"1", "3"}
    assert isinstance(entries["1"], Unreadable)
    assert await listing(source) == {"1": [], "2": ["staff"], "3": ["staff"]}
    reasons = desk.set_aside.reasons()
    assert list(reasons) == ["record 0/3 of the topic", "record 0/4 of the topic"]
    assert "secret" not in f"{reasons}{entries['1'].message}"
    await desk.put(1, op="u")
    assert isinstance((await changed(source, cursor))[0]["1"], Document)
    assert (await listing(source))["1"] == ["staff"]


@pytest.mark.parametrize(
    "record",
    [
        (b'{"id": 2}', b'{"op": "c", "after": {"id": 2, "body": "\\ud800", "subject": "s", "team": ["staff"]}}'),
        (b'{"id": 2}', b'{"op": "c", "after": {"id": "\\ud800", "body": "b", "subject": "s", "team": ["staff"]}}'),
        (b'{"id": "\\ud800"}', b'{"op": "c", "after": {"id": 2, "body": "b", "subject": "s", "team": ["staff"]}}'),
        (b'{"id": 2}', b'{"op": "c", "after": ' + 5_000 * b"[" + 5_000 * b"]" + b"}"),
        (5_000 * b"[" + 5_000 * b"]", b'{"op": "d"}'),
    ],
    ids=["half a character", "in the id", "in the key", "nested", "nested key"],
)
async def test_json_that_python_cannot_store_concerns_its_row_and_no_other(
    desk: Desk, record: tuple[bytes, bytes]
) -> None:
    """JavaScript's JSON has halves of characters where a person typed them: one stopped the reading of all rows."""
    await desk.create()
    await desk.put(1)
    await desk.send(*record)
    await desk.put(3)
    read = await everything(desk.source())
    assert {id_ for id_, entry in read.items() if isinstance(entry, Document)} - {"2"} == {"1", "3"}


async def test_a_column_that_a_record_lacks_is_not_known(desk: Desk) -> None:
    """After a change of the schema the access column had another name."""
    await desk.create()
    await desk.send({"id": 1}, {"op": "c", "after": {"id": 1, "subject": "s", "body": "b", "group": "staff"}})
    [entry] = (await everything(desk.source())).values()
    assert isinstance(entry, Unreadable)
    assert (entry.code, entry.acl_tags) == ("bad_access", ())
    [entry] = (await everything(desk.source("other", deleted="gone", acl=["group"]))).values()
    assert (entry.code, entry.acl_tags) == ("bad_access", ())  # type: ignore[union-attr]


async def test_a_truncated_table_expires_cursors_so_that_a_sweep_compares(desk: Desk) -> None:
    await desk.create(**{"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"})
    for number in (1, 2):
        await desk.put(number)
    source = desk.source()
    cursor = await source.start()
    await desk.send(None, {"op": "t", "before": None, "after": None})
    await desk.put(3)
    with pytest.raises(CursorExpired):
        await changed(source, cursor)
    assert set(await listing(source)) == {"3"}


async def test_records_of_a_transaction_are_read_after_its_commit_and_its_marks_are_passed(desk: Desk) -> None:
    await desk.create()
    source = desk.source()
    cursor = await source.start()
    async with AIOKafkaProducer(bootstrap_servers=desk.bootstrap, transactional_id=desk.topic) as producer:
        for id_, is_committed in (("1", False), ("2", True)):
            await producer.begin_transaction()
            row = {"id": id_, "subject": "s", "body": "b", "team": "staff"}
            await producer.send_and_wait(desk.topic, encoded({"op": "c", "after": row}), encoded({"id": id_}))
            entries, cursor = await changed(source, cursor)
            assert entries == {}
            await (producer.commit_transaction() if is_committed else producer.abort_transaction())
        entries, cursor = await changed(source, cursor)
    assert set(entries) == set(await listing(source)) == {"2"}


async def test_a_lost_file_is_made_anew_and_cursors_expire(desk: Desk) -> None:
    await desk.create()
    for number in (1, 2):
        await desk.put(number)
    before = desk.source()
    cursor = await before.start()
    assert (await changed(desk.source(), cursor))[0] == {}
    other = desk.source("other")
    with pytest.raises(CursorExpired):
        await changed(other, cursor)
    assert set(await listing(other)) == {"1", "2"}


async def test_a_topic_that_was_created_again_replaces_all_rows(desk: Desk) -> None:
    await desk.create()
    for number in (1, 2):
        await desk.put(number)
    source = desk.source()
    assert set(await listing(source)) == {"1", "2"}
    await desk.admin.delete_topics([desk.topic])
    async with asyncio.timeout(30):
        while True:
            try:
                await desk.create()
                break
            except AssertionError:
                await asyncio.sleep(0.1)
    for number in (2, 3, 4):
        await desk.put(number)
    assert set(await listing(source)) == {"2", "3", "4"}


async def test_a_file_that_was_not_read_while_tombstones_were_compacted_away_is_made_anew(desk: Desk) -> None:
    """A row was deleted while no connector ran for days; its record and its tombstone were gone, and it stayed."""
    await desk.create(**{"delete.retention.ms": "86400000"})
    await desk.put(1)
    source = desk.source()
    cursor = await source.start()
    await source.close()
    for days, is_expired in ((0.4, False), (0.6, True)):
        with sqlite3.connect(desk.folder / "state" / "topic.sqlite") as file:
            at = (datetime.now(UTC) - timedelta(days=days)).isoformat()
            file.execute("UPDATE facts SET value = ? WHERE name = 'read_at'", [at])
            file.execute("INSERT OR REPLACE INTO rows VALUES ('2', '2', '{\"id\": 2}', NULL, 0, 1)")
        file.close()
        reopened = desk.source()
        assert ("2" in await listing(reopened)) is not is_expired
        if is_expired:
            with pytest.raises(CursorExpired):
                await changed(reopened, cursor)


async def test_a_topic_that_forgets_rows_is_refused(desk: Desk) -> None:
    await desk.create(**{"cleanup.policy": "delete"})
    [problem] = await desk.source(members={"staff": ["ann"]}).check()
    assert "cleanup.policy=compact" in problem.message


async def test_what_only_an_operator_can_correct(desk: Desk) -> None:
    with pytest.raises(Misconfigured, match="does not exist"):
        await listing(desk.source())
    with pytest.raises(Retryable, match="does not respond"):
        await listing(desk.source(kafka={"bootstrap": "127.0.0.1:1"}))
    await desk.create()
    await desk.send({"id": 1}, b"\x00\x00\x00\x00\x01avro")
    with pytest.raises(Misconfigured, match="JsonConverter"):
        await listing(desk.source())


async def test_a_topic_of_very_large_records_is_read_a_few_at_a_time(desk: Desk) -> None:
    """Packed, each takes a kilobyte: five hundred in one poll would fill the memory of all connectors."""
    await desk.create()
    for _ in range(4):
        await hostile_batches.send(desk.producer, desk.topic, 0, hostile_batches.bomb(POLL_BYTES))
    topic = Follower(KafkaSettings(bootstrap=desk.bootstrap), desk.topic)
    try:
        assert [len(records) async for records, _ in topic.read(0, 0, 4) if records] == [1, 1, 1, 1]
    finally:
        await topic.close()
