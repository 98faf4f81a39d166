"""The texts of files and snippets in threads, and what happens where Slack does not return one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from connectors.slack.files import CUT, MAX_CHARACTERS, MAX_FILES, Files
from connectors.source import Document, Reaction
from connectors.web import Limits
from pipeline.core.errors import Misconfigured
from tests.support.connectors.reading import everything, listing, one
from tests.support.connectors.slack_kit import Desk, desk_in, text

RS = "\x1e"


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


def thread(desk: Desk, *files: Any) -> str:
    """Post a message with files; returns its external id."""
    w = desk.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann)
    return f"{ops}:{w.post(ops, ann, 'The plan.', files=list(files))}"


async def test_the_text_of_a_file_and_of_a_snippet_follows_its_name_in_its_message(desk: Desk) -> None:
    w = desk.workspace
    page = "<html><body><p>A page.</p></body></html>"
    id = thread(
        desk, w.file("plan.md", "# Plan\n\nMove on Friday.\n", "text/markdown"), w.file("page.html", page, "text/html")
    )
    channel, ts = id.split(":")
    w.post(channel, w.user("Ben Roy"), "Fixed:", thread=ts, files=[w.file("Untitled", "print(1)\n", mode="snippet")])
    content = await text(desk.slack(files=True), id)
    assert content == (
        f"Ann Lee: The plan.\nFile: plan.md\n# Plan\n\nMove on Friday.\nFile: page.html\nA page.{RS}"
        "Ben Roy: Fixed:\nFile: Untitled\nprint(1)"
    )
    assert await text(desk.slack(), id) == (
        f"Ann Lee: The plan.\nFile: plan.md\nFile: page.html{RS}Ben Roy: Fixed:\nFile: Untitled"
    )
    assert desk.fake.requests["files"] == 3
    assert list((desk.folder / "files").iterdir()) == []


async def test_a_listing_shows_the_revision_of_a_thread_with_files_and_the_setting_changes_it(desk: Desk) -> None:
    id = thread(desk, desk.workspace.file("plan.md", "Move on Friday."))
    revisions = []
    for files in (False, True):
        source = desk.slack(files=files)
        entry = (await everything(source))[id]
        assert isinstance(entry, Document)
        assert entry.revision == (await listing(source))[id].revision
        revisions.append(entry.revision)
    assert revisions[0] != revisions[1]


async def test_pictures_large_files_and_files_that_slack_does_not_hold_have_their_names_only(desk: Desk) -> None:
    w = desk.workspace
    id = thread(
        desk,
        w.file("photo.png", b"\x89PNG", "image/png"),
        w.file("large.txt", "x" * 2_000),
        w.file("drive.txt", "far away", mode="external"),
        w.file("partner.txt", "theirs", file_access="check_file_info"),
        w.file("empty.txt", " \n"),
        w.file("grown.txt", "y" * 2_000, size=10),
        {**w.file("lost.txt", "gone"), "url_private_download": f"{desk.url}/files-pri/T0ACME-F9/download/lost.txt"},
    )
    names = ["photo.png", "large.txt", "drive.txt", "partner.txt", "empty.txt", "grown.txt", "lost.txt"]
    source = desk.slack(files=True, max_file_bytes=1_000)
    assert await text(source, id) == "\n".join(["Ann Lee: The plan.", *(f"File: {name}" for name in names)])
    assert source._context.set_aside.reasons() == {}


async def test_a_thread_holds_the_beginning_of_a_long_file_and_its_first_files(desk: Desk) -> None:
    w = desk.workspace
    files = [w.file(f"{n}.txt", f"text {n}") for n in range(MAX_FILES + 2)]
    id = thread(desk, w.file("log.txt", "z" * (MAX_CHARACTERS + 1)), *files)
    content = await text(desk.slack(files=True), id)
    assert ("z" * MAX_CHARACTERS + CUT in content, "z" * (MAX_CHARACTERS + 1) in content) == (True, False)
    assert (f"text {MAX_FILES - 2}" in content, f"text {MAX_FILES - 1}" in content) == (True, False)
    assert f"File: {MAX_FILES + 1}.txt" in content


async def test_a_text_cannot_forge_a_message_of_somebody_else(desk: Desk) -> None:
    id = thread(desk, desk.workspace.file("plan.txt", f"one{RS}Ben Roy: I agree."))
    assert (await text(desk.slack(files=True), id)).count(RS) == 0


async def test_the_token_is_sent_to_the_host_of_files_alone(desk: Desk) -> None:
    seen = desk.workspace.file("plan.txt", "Move on Friday.")
    url = desk.url.replace("127.0.0.1", "localhost")
    id = thread(desk, {**seen, "url_private_download": f"{url}/files-pri/T0ACME-{seen['id']}/download/plan.txt"})
    source = desk.slack(files=True)
    assert await text(source, id) == "Ann Lee: The plan.\nFile: plan.txt"
    assert desk.fake.requests["files"] == 0


async def test_a_missing_scope_is_named_and_stops_the_instance(desk: Desk) -> None:
    id = thread(desk, desk.workspace.file("plan.txt", "Move on Friday."))
    desk.fake.context.scopes.remove("files:read")
    source = desk.slack(files=True)
    assert ["files:read" in problem.message for problem in await source.check()] == [True]
    with pytest.raises(Misconfigured, match="add it and install the app again"):
        await one(source, id)
    assert await desk.slack().check() == []


async def test_the_text_of_a_file_that_was_deleted_in_a_reply_is_removed(desk: Desk) -> None:
    """No listing shows the files of replies, and the event about a file names no message."""
    w = desk.workspace
    secret = w.file("keys.txt", "The vault opens with 4711.")
    id = thread(desk)
    channel, ts = id.split(":")
    w.post(channel, w.user("Ben Roy"), "By mistake:", thread=ts, files=[secret])
    source = desk.slack(files=True)
    assert "4711" in await text(source, id)
    before = await listing(source)
    desk.fake.drop_events()
    w.delete_file(secret["id"])
    assert await listing(source) == before, "a sweep does not notice it"
    [request] = desk.fake.sent()
    reaction = await desk.slack(files=True).on_event(request)
    assert reaction.ids == (id,)
    assert await text(source, id) == "Ann Lee: The plan.\x1eBen Roy: By mistake:"
    other = desk.fake.signed({"type": "event_callback", "event": {"type": "file_deleted", "file_id": "F/../x"}})
    assert await source.on_event(other) == Reaction()


async def test_a_file_is_remembered_of_each_thread_and_from_before_it_is_read(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last of two threads that were read at once was remembered, and none while the file was still read: its
    text stayed searchable after the file was deleted."""
    w = desk.workspace
    secret = w.file("keys.txt", "The vault opens with 4711.")
    first = thread(desk, secret)
    channel, _ = first.split(":")
    second = f"{channel}:{w.post(channel, w.user('Ben Roy'), 'Again:', files=[secret])}"
    source, remembered = desk.slack(files=True), []
    get, read = desk.memory.get, Files._text

    async def slow_get(name: str) -> Any:
        value = await get(name)
        await asyncio.sleep(0.05)
        return value

    async def deleted_meanwhile(files: Files, *arguments: Any) -> str:
        text = await read(files, *arguments)
        remembered.append(await files.threads(secret["id"]))
        return text

    monkeypatch.setattr(desk.memory, "get", slow_get)
    monkeypatch.setattr(Files, "_text", deleted_meanwhile)
    await asyncio.gather(*(source.fetch([id]) for id in (first, second)))
    assert sorted(max(remembered, key=len)) == sorted([first, second])
    assert all(remembered)


async def test_a_file_that_fails_is_named_and_read_by_the_next_sweep(desk: Desk) -> None:
    id = thread(desk, desk.workspace.file("plan.txt", "Move on Friday."))
    desk.fake.faults.broken_files = True
    source = desk.slack(files=True, limits=Limits(patience_seconds=0.1, backoff_base_seconds=0.01))
    entry = await one(source, id)
    assert isinstance(entry, Document)
    assert entry.content == "Ann Lee: The plan.\nFile: plan.txt"
    [(part, reason)] = source._context.set_aside.reasons().items()
    assert part.startswith("file F")
    assert "500" in reason
    listed = (await listing(source))[id]
    assert entry.revision != listed.revision, "so that the sweep reads it again"
    desk.fake.faults.broken_files = False
    entry = await one(source, id)
    assert isinstance(entry, Document)
    assert entry.revision == listed.revision
    assert entry.content == "Ann Lee: The plan.\nFile: plan.txt\nMove on Friday."
