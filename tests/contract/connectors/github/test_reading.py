"""Reading issues, pull requests and discussions, their listing, and what a poll finds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from connectors.fakes.github import FakeGitHub, Place
from connectors.github import queries
from connectors.source import CursorExpired, Document, Gone, Unreadable
from pipeline.core.normalise import RECORD_SEPARATOR
from tests.support.connectors.github_kit import Desk, desk_in
from tests.support.connectors.reading import changed, everything, listing, one, read


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


class Clock:
    """A clock that the test moves; seconds since 1970."""

    def __init__(self, fake: FakeGitHub) -> None:
        self.seconds = fake.clock()
        fake.clock = lambda: self.seconds

    def back(self, seconds: float) -> None:
        self.seconds -= seconds


def said(document: Document) -> list[str]:
    return document.content.split(RECORD_SEPARATOR)


def furnish(fake: FakeGitHub) -> Place:
    """Something of every kind, on more than one page."""
    place = fake.repository("acme/handbook", "ines", "sam")
    for number in range(4):
        fake.add(place, "Issue", f"Issue {number}", f"Text {number}.", labels=["bug"], milestone="Spring")
    fake.comment(place, 1, "ines", "A comment.")
    number = fake.add(place, "PullRequest", "Fix", "It fixes.")
    fake.review(place, number, "ines", "Good.", "APPROVED", **{"a.py": "A detail."})
    number = fake.add(place, "Discussion", "Idea", "Shall we?")
    fake.comment(place, number, "ines", "Yes.", isAnswer=True)
    return place


async def test_a_full_read_and_a_listing_agree_on_documents_access_and_revisions(desk: Desk) -> None:
    furnish(desk.fake)
    furnish(desk.fake).name = "other"
    source = desk.github()
    entries, listed = await everything(source), await listing(source)
    assert len(entries) == 12
    assert entries.keys() == listed.keys()
    for id_, entry in entries.items():
        assert isinstance(entry, Document)
        assert (entry.revision, entry.acl_tags) == (listed[id_].revision, listed[id_].acl_tags)
        assert await read(source, id_) == entry


async def test_a_pull_request_holds_reviews_and_comments_in_the_order_of_time_with_authors(desk: Desk) -> None:
    clock, fake = Clock(desk.fake), desk.fake
    place = fake.repository("acme/handbook", "ines")
    clock.back(5_000)
    number = fake.add(place, "PullRequest", "Repair  the\nprinter", "It burns.", isDraft=True, labels=["fire"])
    clock.back(-1_000)
    fake.comment(place, number, "ines", "Which one?")
    clock.back(-1_000)
    fake.review(place, number, "otto", "Please wait.", "CHANGES_REQUESTED", **{"a.py": "Why here?"})
    clock.back(-1_000)
    fake.comment(place, number, "ines", "Later.")
    document = await read(desk.github(), f"{place.id}/{number}")
    assert document.title == f"Repair the printer · acme/handbook#{number}"
    assert said(document) == [
        "sam: It burns.",
        "ines: Which one?",
        "otto (requested changes): Please wait.",
        "otto on a.py: Why here?",
        "ines: Later.",
    ]
    assert document.author == "sam"
    assert document.source_url == f"https://github.example/acme/handbook/pull/{number}"
    assert document.source_modified_at is not None
    assert document.source_modified_at.timestamp() == int(clock.seconds)
    expected = {"kind": "pull request", "state": "draft", "labels": ["fire"], "comments": 4}
    assert {**document.metadata, **expected} == document.metadata


async def test_a_discussion_holds_its_answer_and_replies(desk: Desk) -> None:
    place = desk.fake.repository("acme/handbook")
    number = desk.fake.add(place, "Discussion", "Idea", "Shall we?", isAnswered=True)
    answer = desk.fake.comment(place, number, "ines", "Yes.", isAnswer=True)
    desk.fake.reply(answer, "sam", "Thanks.")
    desk.fake.reply(answer, "sam", "Removed.", deletedAt=desk.fake.now())
    document = await read(desk.github(), f"{place.id}/{number}")
    assert said(document) == ["sam: Shall we?", "ines (answer): Yes.", "sam: Thanks."]
    assert (document.metadata["category"], document.metadata["answered"]) == ("Ideas", True)


async def test_hidden_comments_and_reviews_that_were_not_submitted_are_left_out(desk: Desk) -> None:
    place = desk.fake.repository("acme/handbook")
    number = desk.fake.add(place, "PullRequest", "Fix", "")
    desk.fake.comment(place, number, "mallory", "Buy this.", isMinimized=True)
    desk.fake.review(place, number, "ines", "Not yet.", "PENDING", **{"a.py": "A draft."})
    review = desk.fake.review(place, number, "otto", "Spam.", "COMMENTED", **{"b.py": "Spam, too."})
    review["isMinimized"] = review["comments"][0]["isMinimized"] = True
    document = await read(desk.github(), f"{place.id}/{number}")
    assert said(document) == ["sam opened this pull request."]


async def test_a_text_cannot_forge_a_message_and_a_deleted_account_is_called_ghost(desk: Desk) -> None:
    place = desk.fake.repository("acme/handbook")
    number = desk.fake.add(place, "Issue", "One", f"Innocent.{RECORD_SEPARATOR}ines: I agree.", author=None)
    assert said(await read(desk.github(), f"{place.id}/{number}")) == ["ghost: Innocent. ines: I agree."]


async def test_the_name_of_a_file_cannot_forge_a_message(desk: Desk) -> None:
    """Git allows every character but NUL in the names of files, and a pull request may add any."""
    place = desk.fake.repository("acme/handbook")
    number = desk.fake.add(place, "PullRequest", "Fix", "Please.")
    path = f"a.py{RECORD_SEPARATOR}ines (approved): I agree.\n"
    desk.fake.review(place, number, "mallory", "", "COMMENTED", **{path: "Nothing."})
    expected = ["sam: Please.", "mallory on a.py ines (approved): I agree.: Nothing."]
    assert said(await read(desk.github(), f"{place.id}/{number}")) == expected


@pytest.mark.parametrize("kind", ["Issue", "PullRequest", "Discussion"])
async def test_all_pages_of_comments_are_read(desk: Desk, kind: str) -> None:
    place = desk.fake.repository("acme/handbook")
    number = desk.fake.add(place, kind, "Long", "The first.")
    comments = [desk.fake.comment(place, number, "ines", f"Comment {n}.") for n in range(230)]
    expected = 231
    if kind == "PullRequest":
        for n in range(25):
            desk.fake.review(place, number, "otto", f"Review {n}.", "COMMENTED")
        many = {f"{n}.py": f"Detail {n}." for n in range(70)}
        desk.fake.review(place, number, "otto", "", "COMMENTED", **many)
        expected += 25 + 70
    if kind == "Discussion":
        for n in range(40):
            desk.fake.reply(comments[3], "otto", f"Reply {n}.")
        expected += 40
    document = await read(desk.github(), f"{place.id}/{number}")
    assert len(said(document)) == len(set(said(document))) == expected


async def test_a_document_of_more_than_4_mib_is_unreadable_under_its_access(desk: Desk) -> None:
    place = desk.fake.repository("acme/handbook")
    number = desk.fake.add(place, "Issue", "Large", "x" * (4 * 1024 * 1024 + 1))
    entry = await one(desk.github(), f"{place.id}/{number}")
    assert isinstance(entry, Unreadable)
    assert (entry.code, entry.acl_tags) == ("too_large", (f"repository:{place.id}",))


async def test_a_document_whose_comments_do_not_fit_is_unreadable_under_its_access_and_stops_no_other(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_DOCUMENT_BYTES", 50_000)
    place = desk.fake.repository("acme/handbook")
    numbers = [desk.fake.add(place, "Issue", title, "Text.") for title in ("Large", "Small")]
    for _ in range(150):
        desk.fake.comment(place, numbers[0], "ines", "x" * 500)
    source = desk.github()
    large, small = [await one(source, f"{place.id}/{number}") for number in numbers]
    assert isinstance(large, Unreadable)
    assert (large.code, large.acl_tags) == ("too_large", (f"repository:{place.id}",))
    assert isinstance(small, Document)
    assert (await listing(source))[large.external_id].revision == large.revision


async def test_a_renamed_or_transferred_repository_keeps_its_ids_although_the_settings_name_it(desk: Desk) -> None:
    place = furnish(desk.fake)
    source = desk.github(repositories=["acme/handbook"])
    before = await listing(source)
    desk.fake.rename(place, "elsewhere/manual")
    after = await listing(source)
    assert after.keys() == before.keys()
    assert (await read(source, f"{place.id}/1")).metadata["repository"] == "elsewhere/manual"


async def test_a_repository_that_leaves_the_pattern_is_gone(desk: Desk) -> None:
    place, _ = furnish(desk.fake), desk.fake.repository("acme/handbook-2")
    source = desk.github(repositories=["acme/hand*"])
    assert isinstance(await one(source, f"{place.id}/1"), Document)
    desk.fake.rename(place, "acme/secrets")
    assert await listing(source) == {}
    assert await one(source, f"{place.id}/1") == Gone(f"{place.id}/1")


async def test_an_issue_that_was_transferred_is_gone_in_its_old_repository(desk: Desk) -> None:
    old, new = furnish(desk.fake), desk.fake.repository("acme/manual")
    source = desk.github()
    item = desk.fake.delete(old, 2)
    number = desk.fake.add(new, "Issue", item["title"], item["body"])
    assert await one(source, f"{old.id}/2") == Gone(f"{old.id}/2")
    assert (await read(source, f"{new.id}/{number}")).content == "sam: Text 1."


@pytest.mark.parametrize("id_", ["", "1", "1/2/3", "a/1", "1/x", "٣/1", "-1/2", "99999999999999999999/1"])
async def test_an_id_that_is_not_one_of_ours_is_gone(desk: Desk, id_: str) -> None:
    assert await one(desk.github(), id_) == Gone(id_)


async def test_only_selected_kinds_are_read(desk: Desk) -> None:
    place = furnish(desk.fake)
    source = desk.github(kinds=["pull_requests"])
    assert {*await listing(source)} == {f"{place.id}/5"}
    assert await one(source, f"{place.id}/1") == Gone(f"{place.id}/1")


async def test_a_full_read_continues_after_each_page(desk: Desk) -> None:
    furnish(desk.fake)
    furnish(desk.fake).name = "other"
    source = desk.github()
    pages: list[Any] = [page async for page in source.full(None)]
    ids = [[entry.external_id for entry in page.entries] for page in pages]
    assert len(pages) == 8
    for number, page in enumerate(pages):
        rest = [[entry.external_id for entry in later.entries] async for later in source.full(page.cursor)]
        assert rest == ids[number + 1 :]


async def test_a_cursor_that_github_does_not_know_expires(desk: Desk) -> None:
    furnish(desk.fake)
    source = desk.github()
    pages: list[Any] = [page async for page in source.full(None)]
    [cursor] = [page.cursor for page in pages if page.cursor["after"]]
    desk.fake.epoch += 1
    with pytest.raises(CursorExpired):
        await everything(source, cursor)


@pytest.mark.parametrize(
    "change",
    [
        {"title": "Other"},
        {"labels": ["feature"]},
        {"milestone": "Autumn"},
    ],
)
async def test_a_revision_shows_changes_of_a_document(desk: Desk, change: dict[str, Any]) -> None:
    """Renaming a label or milestone changes no time, so these changes leave it as it is."""
    place = furnish(desk.fake)
    source = desk.github()
    before = await listing(source)
    place.items[1] |= change
    if "title" in change:
        place.items[1]["updatedAt"] = "2030-01-01T00:00:00Z"
    after = await listing(source)
    assert {id_ for id_ in before if before[id_] != after[id_]} == {f"{place.id}/1"}
    assert (await read(source, f"{place.id}/1")).revision == after[f"{place.id}/1"].revision


async def test_a_revision_shows_an_edited_and_a_deleted_comment_even_if_the_issues_time_stays(desk: Desk) -> None:
    place = furnish(desk.fake)
    source = desk.github()
    revisions = [(await listing(source))[f"{place.id}/1"].revision]
    place.items[1]["comments"][0] |= {"body": "Edited.", "updatedAt": "2030-01-01T00:00:00Z"}
    revisions.append((await listing(source))[f"{place.id}/1"].revision)
    place.items[1]["comments"].clear()
    revisions.append((await listing(source))[f"{place.id}/1"].revision)
    assert len(set(revisions)) == 3


# Polls


async def test_a_poll_reads_what_was_updated_since_and_nothing_else(desk: Desk) -> None:
    clock = Clock(desk.fake)
    clock.back(10_000)
    place, quiet = furnish(desk.fake), desk.fake.repository("acme/quiet")
    desk.fake.add(quiet, "Issue", "Old", "Old.")
    source = desk.github()
    cursor = await source.start()
    clock.back(-10_000)
    desk.fake.edit(place, 2, body="New.")
    desk.fake.comment(place, 6, "ines", "A remark.")
    desk.fake.review(place, 5, "ines", "Done.", "APPROVED")
    results, cursor = await changed(source, cursor)
    assert results.keys() == {f"{place.id}/2", f"{place.id}/5", f"{place.id}/6"}
    assert cursor.keys() == {"at"}


async def test_a_poll_finds_more_updates_than_one_request_shows_and_continues_after_each_page(desk: Desk) -> None:
    clock = Clock(desk.fake)
    clock.back(10_000)
    place, second = desk.fake.repository("acme/busy"), desk.fake.repository("acme/second")
    desk.fake.add(place, "Issue", "Old", "Old.")
    source = desk.github(page_size=50)
    cursor = await source.start()
    clock.back(-10_000)
    for number in range(75):
        desk.fake.add(place, "Issue", f"Issue {number}", "New.")
    desk.fake.add(second, "PullRequest", "Fix", "It fixes.")
    pages: list[Any] = [page async for page in source.changes(cursor)]
    ids = [{entry.external_id for entry in page.entries} for page in pages]
    everything_new = {f"{place.id}/{n}" for n in range(2, 77)} | {f"{second.id}/1"}
    assert set().union(*ids) == everything_new
    for number, page in enumerate(pages[:-1]):
        rest, _ = await changed(source, page.cursor)
        assert rest.keys() | set().union(*ids[: number + 1]) == everything_new


async def test_a_cursor_of_another_version_expires(desk: Desk) -> None:
    furnish(desk.fake)
    with pytest.raises(CursorExpired):
        await changed(desk.github(), {"page": 4})
    with pytest.raises(CursorExpired):
        await everything(desk.github(), {"done": True})
