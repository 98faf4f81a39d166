"""A scan of a folder publishes its changes, over a real checkpoint."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from connectors.folder import sweep as sweep_module
from connectors.folder.checkpoint import Checkpoint, Intent, Item
from connectors.folder.connector import FolderConnector, FolderOptions
from connectors.folder.publisher import Publisher
from connectors.folder.walk import Candidate
from connectors.runner.compare import Row
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.kafka.producer import DeliveryUnknown
from tests.support.connectors.folder_kit import Desk, codes
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted
from topics.registry import DOCUMENTS_LIVE

pytestmark = pytest.mark.stack


async def test_a_file_becomes_a_document(desk: Desk) -> None:
    path = desk.write("guides/intro.md", "# Welcome\n\nHello.")
    os.utime(path, (1_700_000_000, 1_700_000_000))
    before = datetime.now(UTC)
    report = await desk.scan(required_tags=("nda",))
    [event] = desk.recorder.take()
    assert isinstance(event, DocumentUpserted)
    assert event.external_id == str(path)
    assert event.source_url == path.as_uri()
    assert (event.source, event.tenant) == ("folder", desk.tenant)
    assert (event.title, event.media_type, event.content) == ("Welcome", "text/markdown", "# Welcome\n\nHello.")
    assert (event.acl_tags, event.required_tags) == (["staff"], ["nda"])
    assert event.source_modified_at == datetime.fromtimestamp(1_700_000_000, UTC)
    assert event.metadata == {"path": "guides/intro.md", "size": 17, "extension": ".md", "folder": ["guides"]}
    assert before <= event.observed_at <= datetime.now(UTC)
    assert [(p.external_id, p.version, p.kind) for p in report.published] == [(str(path), event.version, "upserted")]


async def test_unchanged_files_are_not_even_read(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(5):
        desk.write(f"{n}.txt")
    monkeypatch.setattr("connectors.folder.content.SETTLED_NS", 0)
    first = await desk.scan()
    monkeypatch.setattr(sweep_module, "_read_group", pytest.fail)
    second = await desk.scan()
    assert second.published == []
    assert sorted(second.unchanged) == sorted((p.external_id, p.version) for p in first.published)


async def test_a_file_changed_just_now_is_read_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the file system's step of time an edit may leave size and times as they were."""

    def without_ctime(stat: os.stat_result) -> dict[str, int]:
        return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}

    monkeypatch.setattr(sweep_module, "describe", without_ctime)
    monkeypatch.setattr("connectors.folder.content.describe", without_ctime)
    path = desk.write("a.txt", "one")
    stat = path.stat()
    await desk.scan()
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    desk.recorder.take()
    await desk.scan()
    assert [event.content for event in desk.recorder.take()] == ["two"]


async def test_a_touched_file_with_unchanged_content_is_not_published(desk: Desk) -> None:
    path = desk.write("a.txt")
    await desk.scan()
    os.utime(path, (1, 1))
    report = await desk.scan()
    assert (len(report.published), len(report.unchanged)) == (0, 1)


async def test_an_edit_has_a_greater_version_and_observation_time(desk: Desk) -> None:
    path = desk.write("a.txt", "one")
    await desk.scan()
    path.write_text("three")
    os.utime(path, (1, 1))  # a restored old file counts as newer
    await desk.scan()
    old, new = desk.recorder.take()
    assert new.version > old.version
    assert new.observed_at > old.observed_at
    assert new.content == "three"


async def test_every_event_of_a_source_has_its_own_observation_time(desk: Desk) -> None:
    for n in range(300):
        desk.write(f"{n}.txt", f"text {n}")
    await desk.scan()
    stamps = [event.observed_at for event in desk.recorder.take()]
    assert len(set(stamps)) == 300


async def test_a_change_of_access_alone_publishes_no_content(desk: Desk) -> None:
    path = desk.write("a.txt")
    await desk.scan()
    desk.recorder.take()
    report = await desk.scan(acl_tags=("b", "a", "b"), required_tags=("r",))
    [event] = desk.recorder.take()
    assert isinstance(event, AccessChanged)
    assert (event.external_id, event.acl_tags, event.required_tags) == (str(path), ["a", "b"], ["r"])
    assert report.published[0].kind == "access"
    assert (await desk.scan(acl_tags=("a", "b"), required_tags=("r",))).published == []


def change_rules_after_the_listing(desk: Desk, monkeypatch: pytest.MonkeyPatch, rules: str) -> None:
    listed = desk.checkpoint.listed

    async def listed_then_changed(*arguments: Any) -> Any:
        desk.write(".penstock.toml", rules)
        return await listed(*arguments)

    monkeypatch.setattr(desk.checkpoint, "listed", listed_then_changed)


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "unchanged"])
async def test_a_file_restricted_while_it_is_being_scanned_is_published_under_the_new_rules(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Its event is stamped after the listing: with the access that the listing read, it would overrule the access that
    another process has read and published meanwhile, and show the file to people who have just lost it."""
    desk.write("a.txt")
    monkeypatch.setattr("connectors.folder.content.SETTLED_NS", 0)
    if is_known:
        await desk.scan()
        desk.recorder.take()
    change_rules_after_the_listing(desk, monkeypatch, 'acl = ["board"]\n')
    await desk.scan()
    [event] = desk.recorder.take()
    assert event.acl_tags == ["board"]


@pytest.mark.parametrize(
    ("rules", "problems"), [('exclude = ["*.txt"]\n', []), ("acl = 3\n", ["policy"])], ids=["excluded", "invalid"]
)
async def test_a_file_that_the_rules_exclude_while_it_is_being_scanned_is_not_published(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, rules: str, problems: list[str]
) -> None:
    desk.write("a.txt")
    desk.write("b.txt")
    change_rules_after_the_listing(desk, monkeypatch, rules)
    report = await desk.scan()
    assert desk.recorder.take() == []
    assert codes(report.problems) == problems


async def test_a_rename_is_published_as_a_delete_and_an_upsert(desk: Desk) -> None:
    path = desk.write("old.txt")
    await desk.scan()
    [first] = desk.recorder.take()
    path.rename(desk.root / "new.txt")
    await desk.scan()
    events = desk.recorder.take()
    assert desk.names(events) == [("deleted", "old.txt"), ("upserted", "new.txt")]
    assert next(e for e in events if isinstance(e, DocumentDeleted)).version == first.version
    assert (await desk.scan()).published == []


async def test_two_hard_links_to_one_file_are_two_documents(desk: Desk) -> None:
    desk.write("a.txt", "same")
    desk.write("b.txt", "same").unlink()
    os.link(desk.root / "a.txt", desk.root / "b.txt")
    await desk.scan()
    desk.recorder.take()
    (desk.root / "a.txt").unlink()
    await desk.scan()
    assert desk.names(desk.recorder.take()) == [("deleted", "a.txt")]


async def test_mass_deletion_needs_confirmation(desk: Desk) -> None:
    for n in range(60):
        desk.write(f"{n}.txt", f"text {n}")
    await desk.scan()
    desk.recorder.take()
    for n in range(21):
        (desk.root / f"{n}.txt").unlink()
    report = await desk.scan()
    assert (codes(report.problems), desk.recorder.take()) == (["mass_delete"], [])
    assert "21 of 60" in str(report.problems[0])
    report = await desk.scan(allow_mass_delete=True)
    assert (len(report.deleted), report.problems) == (21, [])
    for n in range(21, 41):
        (desk.root / f"{n}.txt").unlink()
    assert len((await desk.scan()).deleted) == 20  # many of a few, yet few


@pytest.mark.parametrize(("how", "code"), [("vanished", "missing"), ("empty", "root_empty")])
async def test_a_missing_or_empty_root_deletes_nothing(desk: Desk, how: str, code: str) -> None:
    path = desk.write("a.txt")
    await desk.scan()
    desk.recorder.take()
    path.unlink()
    if how == "vanished":
        desk.root.rmdir()
    report = await desk.scan()
    assert (codes(report.problems), desk.recorder.take()) == ([code], [])
    if how == "empty":
        assert len((await desk.scan(allow_mass_delete=True)).deleted) == 1


async def test_a_folder_that_cannot_be_listed_keeps_its_documents(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.write("open/a.txt")
    desk.write("shut/b.txt")
    gone = desk.write("open/c.txt")
    await desk.scan()
    desk.recorder.take()
    gone.unlink()
    real = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr("connectors.folder.walk.os.scandir", scandir)
    report = await desk.scan()
    assert codes(report.problems) == ["permission"]
    assert desk.names(desk.recorder.take()) == [("deleted", "open/c.txt")]


@pytest.mark.parametrize("content", [b"\x00\x01binary", b"caf\xe9", b"x" * (4 * 1024 * 1024 + 1)])
async def test_a_file_that_became_unreadable_keeps_its_document_and_follows_access_changes(
    desk: Desk, content: bytes
) -> None:
    path = desk.write("a.txt")
    await desk.scan()
    desk.recorder.take()
    path.write_bytes(content)
    first = await desk.scan(acl_tags=("fewer",))
    assert desk.names(desk.recorder.take()) == [("access-changed", "a.txt")]
    again = await desk.scan(acl_tags=("fewer",))
    assert (codes(again.problems), desk.recorder.take()) == (codes(first.problems), [])
    assert len(again.unchanged) == 1
    path.write_text("readable again")
    assert [p.kind for p in (await desk.scan(acl_tags=("fewer",))).published] == ["upserted"]


async def test_unreadable_files_are_reported_and_the_others_published(desk: Desk) -> None:
    desk.write("empty.txt", b"")
    desk.write("blank.txt", b" \n\n")
    with desk.write("huge.txt").open("wb") as file:
        file.truncate(50 * 1024 * 1024)
    desk.write("binary.txt", os.urandom(5000) + b"\x00")
    desk.write("broken.txt", "日本語".encode()[:-1])
    desk.write("long.txt", b"word " * 200_000)
    os.mkfifo(desk.root / "pipe")
    (desk.root / os.fsdecode(b"bad\xff.txt")).write_text("x")
    desk.write("good.txt")
    report = await desk.scan()
    assert codes(report.problems) == ["binary", "empty", "empty", "encoding", "name", "not_a_file", "too_large"]
    assert desk.names(desk.recorder.take()) == [("upserted", "good.txt"), ("upserted", "long.txt")]
    for line in map(str, report.problems):
        line.encode()
        assert "\n" not in line
    again = await desk.scan()
    assert codes(again.problems) == codes(report.problems)


async def test_a_file_emptied_by_an_edit_withdraws_its_content(desk: Desk) -> None:
    path = desk.write("a.txt", "secret")
    await desk.scan()
    desk.recorder.take()
    path.write_bytes(b"")
    report = await desk.scan()
    [event] = desk.recorder.take()
    assert (event.content, event.external_id) == ("", str(path))
    assert codes(report.problems) == ["empty"]
    assert (await desk.scan()).published == []


async def test_a_file_that_vanishes_before_it_is_read_is_reported(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.write("a.txt")
    doomed = desk.write("b.txt")
    real = sweep_module._read_group

    def read_group(candidates: list[Candidate]) -> Any:
        doomed.unlink(missing_ok=True)
        return real(candidates)

    monkeypatch.setattr(sweep_module, "_read_group", read_group)
    report = await desk.scan()
    assert codes(report.problems) == ["vanished"]
    assert desk.names(desk.recorder.take()) == [("upserted", "a.txt")]


async def test_a_file_that_keeps_changing_is_reported(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    path = desk.write("log.txt", "line\n")
    real = os.pread

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        with path.open("a") as file:
            file.write("another line\n")
        return real(descriptor, length, offset)

    monkeypatch.setattr("connectors.folder.content.os.pread", pread)
    assert codes((await desk.scan()).problems) == ["changing"]


async def test_files_named_explicitly_are_published_and_missing_ones_reported(desk: Desk) -> None:
    a, hidden = desk.write("a.txt"), desk.write(".hidden.txt")
    desk.write("b.txt")
    report = await desk.scan(a, hidden, desk.root / "nothing")
    assert desk.names(desk.recorder.take()) == [("upserted", ".hidden.txt"), ("upserted", "a.txt")]
    assert codes(report.problems) == ["missing"]
    await desk.scan()
    assert desk.names(desk.recorder.take()) == [("upserted", "b.txt")]  # and the hidden one stays: it was named
    a.unlink()
    hidden.unlink()
    await desk.scan()
    assert desk.names(desk.recorder.take()) == [("deleted", ".hidden.txt"), ("deleted", "a.txt")]


async def test_a_hidden_folder_named_explicitly_is_published_along_with_its_parent(desk: Desk) -> None:
    hidden, plain = desk.write(".hidden/a.txt"), desk.write("b.txt")
    report = await desk.scan(desk.root, hidden.parent, plain)
    assert desk.names(desk.recorder.take()) == [("upserted", ".hidden/a.txt"), ("upserted", "b.txt")]
    assert (len(report.published), report.unchanged) == (2, [])


async def test_a_subfolder_ingested_on_its_own_still_belongs_to_the_outer_root(desk: Desk) -> None:
    desk.write("sub/a.txt")
    desk.write("b.txt")
    await desk.scan()
    await desk.scan(desk.root / "sub")
    desk.write(".penstock.toml", 'exclude = ["sub/"]')
    desk.recorder.take()
    await desk.scan()
    assert desk.names(desk.recorder.take()) == [("deleted", "sub/a.txt")]


async def test_large_first_loads_go_to_the_backfill_lane(desk: Desk) -> None:
    for n in range(51):
        desk.write(f"{n}.txt", f"text {n}")
    await desk.scan()
    assert {topic for topic, _ in desk.recorder.sent} == {"documents.backfill.v1"}
    desk.recorder.take()
    desk.write("0.txt", "edited")
    desk.write("new.txt")
    await desk.scan()
    assert {topic for topic, _ in desk.recorder.sent} == {"documents.live.v1"}
    desk.recorder.take()
    desk.write("1.txt", "edited")
    await desk.scan(lane="backfill")
    assert {topic for topic, _ in desk.recorder.sent} == {"documents.backfill.v1"}


async def test_forgotten_documents_are_published_again(desk: Desk) -> None:
    path = desk.write("a.txt")
    first = await desk.scan()
    connector = desk.connector()
    await connector.forget([str(path)])
    second = await connector.scan()
    assert second.published[0].version > first.published[0].version
    assert second.after(first).published == second.published


class Broken(Checkpoint):
    """Postgres goes away between Kafka's acknowledgement and the checkpoint."""

    async def save(self, tenant: str, source: str, scope: str, items: Any) -> None:
        raise Retryable("checkpoint: gone")


async def test_a_crash_between_publish_and_checkpoint_publishes_again(desk: Desk) -> None:
    desk.write("a.txt")
    broken = Broken(desk.checkpoint.pool)
    options = FolderOptions(acl_tags=("staff",), tenant=desk.tenant)
    with pytest.raises(Retryable, match="gone"):
        await FolderConnector([desk.root], options=options, producer=desk.recorder, checkpoint=broken).scan()
    [lost] = desk.recorder.take()
    await desk.scan()
    [again] = desk.recorder.take()
    assert again.version > lost.version
    assert again.content == lost.content


async def test_documents_without_an_acknowledgement_are_published_again(desk: Desk) -> None:
    for n in range(300):
        desk.write(f"{n}.txt", f"text {n}")
    desk.recorder.lose_from = 100
    with pytest.raises(Retryable, match="acknowledged"):
        await desk.scan()
    acknowledged = {event.external_id for event in desk.recorder.take()}
    desk.recorder.lose_from = None
    report = await desk.scan()
    again = {event.external_id for event in desk.recorder.take()}
    assert len(acknowledged) == 100
    assert len(again) == 200  # what was acknowledged is not published again, and nothing is lost
    assert len(acknowledged | again) == len(report.published) + len(report.unchanged) == 300


async def test_an_acknowledgement_after_a_failed_delivery_is_still_checkpointed(desk: Desk) -> None:
    publisher = Publisher(desk.recorder, desk.checkpoint, tenant=desk.tenant, source="folder", scope="/r")
    desk.recorder.held = []
    for n in range(3):
        event = DocumentDeleted(
            tenant=desk.tenant, source="folder", external_id=f"/r/{n}", observed_at=datetime.now(UTC)
        )
        await publisher.publish(DOCUMENTS_LIVE, event, Item(Row(external_id=f"/r/{n}", version=1)))
    settling = asyncio.create_task(publisher.settle())
    async with asyncio.timeout(30):
        while len(desk.recorder.held) < 3:
            await asyncio.sleep(0.01)
    first, second, _ = desk.recorder.held
    second.set_result(None)
    first.set_exception(DeliveryUnknown("Kafka has not acknowledged it"))
    with pytest.raises(Retryable):
        await settling
    await publisher.abandon()
    rows = await desk.checkpoint.listed(desk.tenant, "folder", "/r", ["/r/0", "/r/1", "/r/2"])
    assert {id_ for id_, item in rows.items() if item.row.in_doubt_since is None} == {"/r/1"}
    assert set(rows) == {"/r/0", "/r/1", "/r/2"}, "the others are known to be in doubt"


async def test_a_scan_of_thousands_of_small_files_publishes_each_once(desk: Desk) -> None:
    for n in range(2_500):
        desk.write(f"{n % 100}/{n}.txt", f"tiny {n}")
    seen: list[int] = []
    report = await desk.connector().scan(lambda progress: seen.append(progress.done))
    assert (len(report.published), report.problems) == (2_500, [])
    assert seen[-1] == 2_500
    assert len({event.external_id for event in desk.recorder.take()}) == 2_500
    again = await desk.scan()
    assert (len(again.published), len(again.unchanged)) == (0, 2_500)


async def test_a_clock_set_back_is_refused(desk: Desk) -> None:
    desk.write("a.txt")
    ahead = Intent("/r/a", 1, datetime.now(UTC) + timedelta(hours=1))
    await desk.checkpoint.intend(desk.tenant, "folder", "/r", [ahead])
    with pytest.raises(Misconfigured, match="clock"):
        await desk.scan()
    assert desk.recorder.take() == []


async def test_a_newer_row_of_another_process_is_not_overwritten(desk: Desk) -> None:
    await desk.checkpoint.save(desk.tenant, "folder", "/r", [(Item(Row(external_id="/r/a", version=5)), None)])
    await desk.checkpoint.save(desk.tenant, "folder", "/r", [(Item(Row(external_id="/r/a", version=4)), None)])
    assert (await desk.checkpoint.listed(desk.tenant, "folder", "/r", ["/r/a"]))["/r/a"].row.version == 5


async def test_rows_written_by_an_older_release_cause_no_republication(desk: Desk) -> None:
    """After an upgrade nothing is published again: the fingerprint and the attributes mean what they meant."""
    path = desk.write("notes/a.txt")
    metadata = {"path": "notes/a.txt", "size": 9, "extension": ".txt"}
    fields = ["a.txt", "some text", "text/plain", None, path.as_uri(), metadata]
    digest = hashlib.sha256(json.dumps(fields, ensure_ascii=False, sort_keys=True).encode()).digest()
    async with desk.checkpoint.pool.connection() as connection:
        await connection.execute(
            "INSERT INTO connector_items (tenant, source, scope, external_id, version, fingerprint, acl_tags)"
            " VALUES (%s, 'folder', %s, %s, 7, %s, '{staff}')",
            [desk.tenant, str(desk.root), str(path), digest],
        )
    report = await desk.scan()
    assert (report.published, report.unchanged, desk.recorder.take()) == ([], [(str(path), 7)], [])


async def test_a_document_in_doubt_is_published_with_a_later_observation_time(desk: Desk) -> None:
    """Also where the process that sent it, or Postgres, has a clock that is ahead."""
    path = desk.write("a.txt")
    await desk.scan()
    [first] = desk.recorder.take()
    ahead = datetime.now(UTC) + timedelta(minutes=1)
    async with desk.checkpoint.pool.connection() as connection:
        await connection.execute(
            "UPDATE connector_items SET in_doubt_since = %s, fingerprint = NULL, stat = NULL WHERE tenant = %s",
            [ahead, desk.tenant],
        )
    await desk.scan()
    [again] = desk.recorder.take()
    assert again.observed_at > ahead
    assert again.version > first.version
    path.unlink()
    await desk.scan(allow_mass_delete=True)
    [deleted] = desk.recorder.take()
    assert deleted.observed_at > again.observed_at
