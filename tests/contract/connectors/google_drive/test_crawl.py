"""The files of a Google Drive that are read, page by page, also while Google is busy or broken."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.extraction import ExtractionSettings, remote, sandbox
from connectors.fakes.google_drive_corpus import FOLDER, Grant
from connectors.source import CursorExpired, Document, Gone, Unreadable
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from tests.support.connectors.google_drive_kit import Desk, desk_in
from tests.support.connectors.pdf_files import pdf_of
from tests.support.connectors.reading import changed, everything, listing, read


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


# Which files


async def test_only_files_below_the_configured_folders_are_read(desk: Desk) -> None:
    drive = desk.drive()
    configured = desk.corpus.add("Wanted", parent=drive, mime_type=FOLDER).id
    deep = desk.corpus.add("Deep", parent=configured, mime_type=FOLDER).id
    other = desk.corpus.add("Other", parent=drive, mime_type=FOLDER).id
    inside = {desk.doc("In", configured), desk.doc("Deep in", deep)}
    outside = {desk.doc("Out", drive), desk.doc("Elsewhere", other)}
    source = desk.source(folders=[configured], page_size=2)
    assert set(await everything(source)) == set(await listing(source)) == inside
    kinds = {entry.external_id: type(entry) for entry in await source.fetch([*inside, *outside])}
    assert kinds == dict.fromkeys(inside, Document) | dict.fromkeys(outside, Gone)


async def test_a_file_moved_out_of_the_configured_folder_is_gone(desk: Desk) -> None:
    drive = desk.drive()
    configured = desk.corpus.add("Wanted", parent=drive, mime_type=FOLDER).id
    other = desk.corpus.add("Other", parent=drive, mime_type=FOLDER).id
    id_ = desk.doc("Document", configured)
    source = desk.source(folders=[configured])
    cursor = await source.start()
    desk.corpus.move(id_, other)
    changes, cursor = await changed(source, cursor)
    assert changes == {id_: Gone(id_)}
    desk.corpus.move(id_, configured)
    changes, _ = await changed(source, cursor)
    assert isinstance(changes[id_], Document)


async def test_a_configured_folder_in_a_users_my_drive_is_read(desk: Desk) -> None:
    folder = desk.corpus.add("Shared", owner="ines@example.com", mime_type=FOLDER)
    desk.corpus.share(
        folder.id, Grant(type="user", who="penstock@penstock-test.iam.gserviceaccount.com", role="writer")
    )
    inside, outside = desk.doc("In", folder.id), desk.mine("Out")
    source = desk.source(folders=[folder.id])
    assert set(await everything(source)) == {inside}
    assert isinstance((await source.fetch([outside]))[0], Gone)


async def test_all_shared_drives_and_newly_created_ones_are_read(desk: Desk) -> None:
    first = desk.doc("First", desk.drive())
    source = desk.source(all_drives=True)
    cursor = await source.start()
    assert set(await everything(source)) == {first}
    second = desk.drive()
    changes, cursor = await changed(source, cursor)
    assert changes == {}
    assert set(cursor["tokens"]) == set(desk.corpus.drives)
    id_ = desk.doc("Second", second)
    changes, cursor = await changed(source, cursor)
    assert set(changes) == {id_}


async def test_a_missing_drive_raises_misconfigured_naming_it(desk: Desk) -> None:
    source = desk.source(drives=["0ANotThere"])
    for reading in (everything(source), listing(source), source.start()):
        with pytest.raises(Misconfigured, match="drives: 0ANotThere does not exist"):
            await reading


# Page by page


async def test_a_full_read_resumes_from_the_cursor_of_any_page(desk: Desk) -> None:
    drives = [desk.drive(), desk.drive()]
    ids = {desk.doc(f"Document {n}", drive) for drive in drives for n in range(5)}
    source = desk.source(drives=drives, page_size=2)
    pages = [page async for page in source.full(None)]
    assert len(pages) == 6
    for number, page in enumerate(pages):
        before = {entry.external_id for earlier in pages[: number + 1] for entry in earlier.entries}
        assert before | set(await everything(desk.source(drives=drives, page_size=2), page.cursor)) == ids
    assert await everything(source, pages[-1].cursor) == {}


async def test_files_edited_or_deleted_during_a_crawl_hide_no_others(desk: Desk) -> None:
    drive = desk.drive()
    ids = [desk.doc(f"Document {n}", drive) for n in range(6)]
    met: set[str] = set()
    async for page in desk.source(drives=[drive], page_size=2).full(None):
        if not met:
            desk.corpus.delete(ids[0])
            desk.corpus.edit(ids[1], exports={"text/markdown": b"Edited."})
        met |= {entry.external_id for entry in page.entries}
    assert met == set(ids)


async def test_an_expired_page_token_expires_the_crawls_cursor(desk: Desk) -> None:
    drive = desk.drive()
    for n in range(4):
        desk.doc(f"Document {n}", drive)
    source = desk.source(drives=[drive], page_size=2)
    pages = source.full(None)
    cursor = (await anext(pages)).cursor
    await pages.aclose()  # type: ignore[attr-defined]
    desk.fake.pages.epoch += 1
    with pytest.raises(CursorExpired):
        await everything(source, cursor)


async def test_a_listing_whose_page_token_is_refused_is_retryable(desk: Desk) -> None:
    """It has no cursor of ours that could have expired."""
    drive = desk.drive()
    for n in range(4):
        desk.doc(f"Document {n}", drive)
    source = desk.source(drives=[drive], sweep_page_size=2)
    pages = source.slim()
    await anext(pages)
    desk.fake.pages.epoch += 1
    with pytest.raises(Retryable):
        await anext(pages)
    assert len(await listing(source)) == 4


async def test_a_listing_that_google_marks_incomplete_is_retryable(desk: Desk) -> None:
    drive = desk.drive()
    desk.doc("Document", drive)
    source = desk.source(drives=[drive])
    desk.fake.faults.incomplete = True
    for reading in (everything(source), listing(source)):
        with pytest.raises(Retryable, match="incompleteSearch"):
            await reading


# When Google says wait


@pytest.mark.parametrize(
    ("status", "reason"),
    [(429, "rateLimitExceeded"), (403, "userRateLimitExceeded"), (403, "rateLimitExceeded"), (503, "backendError")],
)
async def test_rate_limited_and_failed_requests_are_retried(desk: Desk, status: int, reason: str) -> None:
    drive = desk.drive()
    ids = {desk.doc(f"Document {n}", drive) for n in range(3)}
    faults = desk.fake.faults
    faults.throttled, faults.throttle_status, faults.throttle_reason, faults.retry_after = 3, status, reason, 0
    assert set(await everything(desk.source(drives=[drive]))) == ids
    assert faults.throttled == 0


async def test_an_exhausted_daily_quota_is_deferred(desk: Desk) -> None:
    drive = desk.drive()
    faults = desk.fake.faults
    faults.throttled, faults.throttle_status, faults.throttle_reason = 1, 403, "dailyLimitExceeded"
    faults.retry_after = None
    with pytest.raises(Deferred, match="quota"):
        await everything(desk.source(drives=[drive]))


async def test_an_expired_access_token_is_replaced_during_a_read(desk: Desk) -> None:
    drive = desk.drive()
    id_ = desk.doc("Document", drive)
    source = desk.source(drives=[drive])
    await everything(source)
    desk.fake.tokens.issued.clear()
    assert set(await everything(source)) == {id_}
    assert len(desk.fake.tokens.issued) == 1


async def test_one_access_token_serves_many_requests(desk: Desk) -> None:
    drive = desk.drive()
    for n in range(5):
        desk.doc(f"Document {n}", drive)
    source = desk.source(drives=[drive], page_size=2)
    await everything(source)
    await listing(source)
    assert desk.fake.requests.count(("POST", "/token")) == 1


async def test_a_file_that_always_fails_becomes_unreadable_and_the_others_are_read(desk: Desk) -> None:
    drive = desk.drive()
    bad, good = desk.doc("Bad", drive), desk.doc("Good", drive)
    desk.fake.faults.broken.add(bad)
    source = desk.source(drives=[drive], patient=False)
    for _ in range(2):
        with pytest.raises(Retryable):
            await everything(source)
    documents = await everything(source)
    assert isinstance(documents[good], Document)
    assert isinstance(documents[bad], Unreadable)
    assert (documents[bad].code, documents[bad].revision) == ("unavailable", None)  # so that every sweep tries again
    desk.fake.faults.broken.clear()
    assert isinstance(await read(source, bad), Document)


async def test_files_do_not_become_unreadable_while_google_fails_at_all_of_them(desk: Desk) -> None:
    drive = desk.drive()
    desk.fake.faults.broken |= {desk.doc("One", drive), desk.doc("Two", drive)}
    source = desk.source(drives=[drive], patient=False)
    for _ in range(5):
        with pytest.raises(Retryable):
            await everything(source)


async def test_files_do_not_become_unreadable_while_the_extraction_service_is_unreachable(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while Google's own documents beside them are read."""
    drive = desk.drive()
    desk.doc("Good", drive)
    pdf = desk.corpus.add("a.pdf", parent=drive, mime_type="application/pdf", content=pdf_of(["Words"])).id
    source = desk.source(drives=[drive], patient=False)
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.0)
    with monkeypatch.context() as away:
        away.setattr(sandbox, "from_environment", lambda: ExtractionSettings(url="http://127.0.0.1:1"))
        for _ in range(4):
            with pytest.raises(Deferred, match="extraction service"):
                await everything(source)
    results = (await everything(source))[pdf]
    assert isinstance(results, Document), results
    assert results.content.strip() == "Words"


async def test_pages_of_results_that_are_too_large_are_requested_in_parts(desk: Desk) -> None:
    ids = {
        desk.mine(f"Document {n}", *(Grant(type="user", who=f"u{m}@example.com") for m in range(20))) for n in range(9)
    }
    source = desk.source(my_drive=True, answer_bytes=30_000)
    cursor = await source.start()
    assert set(await listing(source)) == set(await everything(source)) == ids
    for id_ in ids:
        desk.corpus.rename(id_, "Renamed")
    assert set((await changed(source, cursor))[0]) == ids
