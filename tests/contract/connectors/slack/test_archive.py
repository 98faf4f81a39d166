"""An export archive as a first load: it spares requests, adds no document, and cannot be used to break in."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from connectors.fakes.slack import FakeSlack
from connectors.slack.archive import MAX_FILE_BYTES, Archive
from pipeline.core.errors import Misconfigured
from tests.support.connectors.reading import everything, listing
from tests.support.connectors.slack_kit import Desk, desk_in


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


def write_export(fake: FakeSlack, path: Path) -> Path:
    """Write the archive that Slack itself would export of the workspace."""
    w = fake.workspace
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, private in (("channels.json", False), ("groups.json", True)):
            rows = [c.as_json() for c in w.channels.values() if c.kind == "channel" and c.is_private == private]
            archive.writestr(name, json.dumps(rows))
        archive.writestr("users.json", json.dumps(list(w.users.values())))
        archive.writestr("integration_logs.json", "[]")
        for channel in w.channels.values():
            days: dict[str, list[Any]] = {}
            for ts, message in sorted(channel.messages.items()):
                day = datetime.fromtimestamp(float(ts), UTC).strftime("%Y-%m-%d")
                days.setdefault(day, []).append(channel.as_returned(message))
            archive.writestr(f"{channel.name}/", "")
            for day, messages in days.items():
                archive.writestr(f"{channel.name}/{day}.json", json.dumps(messages))
    return path


async def test_a_first_load_from_an_archive_gives_the_same_documents_with_fewer_requests(
    desk: Desk, tmp_path: Path
) -> None:
    w = desk.workspace
    ann, ben = w.user("Ann Lee"), w.user("Ben Roy")
    ops, secret = w.channel("ops", ann), w.channel("secret", ann, is_private=True)
    outside = w.channel("outside", ann, bot=False)
    for channel in (ops, secret, outside):
        for n in range(5):
            ts = w.post(channel, ann, f"question {n}")
            w.post(channel, ben, f"answer {n}", thread=ts)
    archive = write_export(desk.fake, tmp_path / "export.zip")
    w.post(ops, ann, "since then", thread=ts.replace(ts, next(iter(w.channels[ops].messages))))
    gone = next(ts for ts, m in w.channels[secret].messages.items() if "thread_ts" not in m)
    w.delete(secret, w.channels[secret].replies(gone)[0]["ts"])
    w.delete(secret, gone)

    expected = await everything(desk.slack())
    desk.fake.requests.clear()
    documents = await everything(desk.slack(archive=archive))
    assert documents == expected
    assert desk.fake.requests["conversations.replies"] == 1
    assert {id: entry.revision for id, entry in (await listing(desk.slack())).items()} == {
        id: entry.revision for id, entry in documents.items()
    }
    assert await desk.slack(archive=archive).check() == []


async def test_the_archive_supplies_names_of_users_whom_slack_no_longer_lists(desk: Desk, tmp_path: Path) -> None:
    w = desk.workspace
    ann, old = w.user("Ann Lee"), w.user("Old Hand")
    ops = w.channel("ops", ann)
    w.post(ops, old, "hello")
    archive = write_export(desk.fake, tmp_path / "export.zip")
    del w.users[old]
    [entry] = (await everything(desk.slack(archive=archive))).values()
    assert entry.content == "Old Hand: hello"


def made(path: Path, **members: str | bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


CHANNELS = json.dumps([{"id": "C1", "name": "ops"}, {"id": "C2", "name": ".."}, {"id": "C3", "name": "a/../ops"}])
DAY = json.dumps([{"ts": "2.000000", "thread_ts": "1.000000", "text": "x"}])


def test_only_day_files_of_known_channels_are_read_from_an_archive(tmp_path: Path) -> None:
    path = made(
        tmp_path / "e.zip",
        **{
            "channels.json": CHANNELS,
            "ops/2026-01-01.json": DAY,
            "../2026-01-01.json": DAY,
            "/2026-01-01.json": DAY,
            "a/../ops/2026-01-01.json": DAY,
            "ops/deep/2026-01-01.json": DAY,
            "ops/notes.json": DAY,
        },
    )
    archive = Archive(path)
    assert list(archive.threads("C1")) == ["1.000000"]
    assert archive.threads("C2") == archive.threads("C3") == archive.threads("C9") == {}
    archive.close()


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"other.json": "[]"}, "not a Slack export"),
        ({"channels.json": "[{"}, "damaged"),
        ({"channels.json": "[" * 100_000}, "damaged"),
        ({"channels.json": b"\xff\xfe\x00"}, "damaged"),
    ],
)
def test_an_archive_that_is_no_slack_export_is_misconfigured(
    tmp_path: Path, members: dict[str, Any], said: str
) -> None:
    with pytest.raises(Misconfigured, match=said):
        Archive(made(tmp_path / "e.zip", **members))


def test_truncated_invalid_and_missing_archives_are_misconfigured(tmp_path: Path) -> None:
    whole = made(tmp_path / "e.zip", **{"channels.json": CHANNELS, "ops/2026-01-01.json": DAY}).read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:-30])
    (tmp_path / "text.zip").write_text("hello")
    for name in ("cut.zip", "text.zip", "none.zip"):
        with pytest.raises(Misconfigured, match="cannot be read"):
            Archive(tmp_path / name)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("channels.json", CHANNELS)
        with archive.open("ops/2026-01-01.json", "w", force_zip64=True) as file:
            for _ in range(MAX_FILE_BYTES // (8 * 2**20) + 1):
                file.write(b" " * (8 * 2**20))
    assert path.stat().st_size < 2**20
    bomb = Archive(path)
    with pytest.raises(Misconfigured, match="128 MiB"):
        bomb.threads("C1")
    bomb.close()


def test_a_channel_that_is_too_large_in_the_archive_is_read_from_the_api(tmp_path: Path) -> None:
    path = made(
        tmp_path / "e.zip", **{"channels.json": CHANNELS, "ops/2026-01-01.json": DAY, "ops/2026-01-02.json": DAY}
    )
    raw = bytearray(path.read_bytes())
    for match in re.finditer(rb"PK\x01\x02", bytes(raw)):
        if raw[match.start() + 46 :].startswith(b"ops/"):
            raw[match.start() + 24 : match.start() + 28] = (2**30).to_bytes(4, "little")
    path.write_bytes(raw)
    archive = Archive(path)
    assert archive.threads("C1") == {}
    archive.close()


def test_an_archive_with_duplicate_names_or_encryption_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("channels.json", CHANNELS)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("channels.json", "[]")
    with pytest.raises(Misconfigured, match="two files of one name"):
        Archive(path)
    sealed = made(tmp_path / "sealed.zip", **{"channels.json": CHANNELS})
    raw = bytearray(sealed.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    sealed.write_bytes(raw)
    with pytest.raises(Misconfigured, match="encrypted"):
        Archive(sealed)


async def test_check_reports_a_missing_archive(desk: Desk, tmp_path: Path) -> None:
    desk.workspace.channel("ops")
    [problem] = await desk.slack(archive=tmp_path / "none.zip").check()
    assert problem.code == "archive"
