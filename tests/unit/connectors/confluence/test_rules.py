"""Confluence: cursors, chains of restrictions, documents, settings. Nothing here asks anybody."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from connectors.atlassian import lookback_minutes
from connectors.confluence import ConfluenceOptions, client, content, markup
from connectors.confluence.changes import Progress, batches_by_document
from connectors.confluence.client import cql_list, path_segment
from connectors.confluence.cloud import is_complete_chain
from connectors.confluence.model import Change, Comment, Content, comments_digest
from connectors.source import CursorExpired, Document, Unreadable
from topics.messages import MAX_CONTENT_BYTES

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
PAGE = Content(
    id="7",
    kind="page",
    space="ENG",
    title="Title",
    version_number=3,
    modified_at="2026-11-21T10:00:00.000Z",
    body="<p>x</p>",
    required_tags=(),
)


def comment(id_: str, version_number: int = 1, **more: Any) -> Comment:
    return Comment(id=id_, version_number=version_number, modified_at="2026-11-21T11:00:00.000Z", **more)


# Cursors


def test_a_poll_covers_the_time_since_the_last_one_plus_an_overlap() -> None:
    progress = Progress(NOON, {}, frozenset())
    assert lookback_minutes(progress.polled_at, NOON, 10) == 10
    assert lookback_minutes(progress.polled_at, NOON + timedelta(seconds=1), 10) == 11
    assert lookback_minutes(progress.polled_at, NOON + timedelta(minutes=150), 10) == 160
    assert lookback_minutes(progress.polled_at, NOON - timedelta(hours=3), 10) == 10  # a clock that went back
    with pytest.raises(CursorExpired):
        lookback_minutes(progress.polled_at, NOON + timedelta(days=40), 10)


def test_progress_survives_a_round_trip_through_its_cursor() -> None:
    progress = Progress(NOON, {"1": "3@x"}, frozenset({"9"}))
    assert Progress.from_cursor(progress.cursor) == progress


def test_only_versions_not_read_before_are_unread() -> None:
    old, edited = Change("1", "page", None, "1@a"), Change("1", "page", None, "2@b")
    progress = Progress(NOON, {}, frozenset())
    assert progress.unread([old]) == [old]
    assert progress.with_read([old]).unread([old, edited]) == [edited]
    after = progress.with_read([old]).completed(NOON, [edited])
    assert after.unread([edited]) == []
    assert set(after.seen.values()) == {"2@b"}  # what the last search no longer shows is forgotten


def test_a_comment_is_batched_with_its_page() -> None:
    page = Change("1", "page", None, "1")
    said = Change("5", "comment", "1", "1")
    other = Change("2", "page", None, "1")
    assert list(batches_by_document([page, other, said], 1)) == [(["1"], [page, said]), (["2"], [other])]
    assert list(batches_by_document([], 3)) == []


# Access


@pytest.mark.parametrize(
    ("parent", "above", "parents", "linked"),
    [
        (None, (), {}, True),
        ("1", ("1",), {"1": None}, True),
        ("2", ("1", "2"), {"1": None, "2": "1"}, True),
        ("2", ("1", "2"), {"1": None, "2": "folder"}, False),  # something stands between them
        ("2", ("1",), {"1": None}, False),
        ("2", (), {}, False),
        (None, ("1",), {"1": None}, False),  # moved since
        ("1", ("1",), {"1": "folder"}, False),  # the first has a parent that is not shown
        ("1", ("1",), {}, False),  # nothing is known of it
    ],
)
def test_a_chain_of_ancestors_is_complete_only_without_gaps(
    parent: str | None, above: tuple[str, ...], parents: dict[str, str | None], linked: bool
) -> None:
    assert is_complete_chain(replace(PAGE, parent=parent), above, parents) is linked


def shown(users: int | None, groups: int | None) -> dict[str, Any]:
    who = {
        name: {"results": [{}] * count, "size": count}
        for name, count in (("user", users), ("group", groups))
        if count is not None
    }
    return {"id": "1", "restrictions": {"read": {"restrictions": who}}}


@pytest.mark.parametrize(
    ("json", "expected"),
    [
        (shown(0, 0), False),
        (shown(1, 0), True),
        (shown(0, 1), True),
        (shown(0, None), None),
        (shown(None, None), None),
        ({}, None),
        ({"restrictions": {}}, None),
        ({"restrictions": None}, None),
        ({"restrictions": {"update": {}}}, None),
    ],
)
def test_restrictions_that_a_response_leaves_out_are_unknown(json: dict[str, Any], expected: bool | None) -> None:
    assert client.is_restricted(json) is expected


def test_one_ancestor_with_unknown_restrictions_makes_the_required_tags_unknown() -> None:
    page = {**shown(0, 0), "id": "3"}
    assert client.required_tags({**page, "ancestors": [{**shown(1, 0), "id": "2"}]}) == ("restriction:2",)
    assert client.required_tags({**page, "ancestors": [{"id": "1"}, {**shown(1, 0), "id": "2"}]}) is None
    assert client.required_tags(page) is None


# Documents


def test_a_page_with_unknown_restrictions_is_unreadable_with_another_revision() -> None:
    unknown = replace(PAGE, required_tags=None)
    entry = content.page(unknown, {}, None)
    assert isinstance(entry, Unreadable)
    assert (entry.code, entry.acl_tags) == ("access_unknown", ())
    assert entry.revision == unknown.revision != PAGE.revision  # read when it heals, and not with every sweep before


def test_a_response_without_a_text_is_read() -> None:
    """The reference of the API shows such a body for a page that was requested without one."""
    json = {"id": "7", "title": "Title", "version": {"number": 1, "createdAt": "2026-11-21T10:00:00.000Z"}}
    for body in ({}, {"storage": {}}, {"storage": None}):
        assert client.content_v2({**json, "body": body}, "page", "ENG").body is None


def test_an_empty_page_has_its_title_as_content() -> None:
    entry = content.page(replace(PAGE, body="<p />"), {}, None)
    assert isinstance(entry, Document)
    assert entry.content == "Title"


def test_a_page_with_too_much_text_is_unreadable() -> None:
    for body in ("ä" * (MAX_CONTENT_BYTES // 2 + 1), "<p>" + "x" * (4 * MAX_CONTENT_BYTES) + "</p>"):
        entry = content.page(replace(PAGE, body=body), {}, None)
        assert isinstance(entry, Unreadable)
        assert (entry.code, entry.acl_tags) == ("too_large", ("space:ENG",))


def test_a_page_that_becomes_too_long_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markup, "MAX_MARKDOWN", 100)
    entry = content.page(replace(PAGE, body=f"<p>{'x' * 101}</p>"), {}, None)
    assert isinstance(entry, Unreadable)
    assert (entry.code, entry.acl_tags) == ("too_large", ("space:ENG",))


def test_comments_are_ordered_by_thread_and_count_for_the_modification_time() -> None:
    comments = (
        comment("12", body="<p>to the second</p>", parent="11", author="b"),
        comment("11", body="<p>second</p>", author="a"),
        comment("13", body="<p>to the first</p>", parent="10", author="b"),
        comment("10", body="<p>first</p>", author="a", selection=" these\n words "),
        comment("14", body="<p> </p>"),
        comment("15", body="<p>lost its root</p>", parent="3"),
    )
    entry = content.page(replace(PAGE, comments=comments), {"a": "Ann"}, "https://wiki.example")
    assert isinstance(entry, Document)
    assert entry.content == (
        "x\n\n## Comments\n\n**Ann** about “these words”:\n\nfirst\n\n**Somebody** answers:\n\nto the first\n\n"
        "**Ann**:\n\nsecond\n\n**Somebody** answers:\n\nto the second\n\n**Somebody**:\n\nlost its root"
    )
    assert entry.source_modified_at == datetime(2026, 11, 21, 11, tzinfo=UTC)
    assert entry.source_url is None


def test_comments_that_reply_to_each_other_in_a_cycle_are_handled() -> None:
    comments = (comment("1", parent="2", body="a"), comment("2", parent="1", body="b"))
    assert isinstance(content.page(replace(PAGE, comments=comments), {}, None), Document)


def test_the_digest_of_comments_does_not_depend_on_their_order() -> None:
    assert comments_digest([comment("1"), comment("2")]) == comments_digest([comment("2"), comment("1")])
    assert comments_digest([comment("1")]) != comments_digest([comment("1", 2)])
    assert comments_digest([]) == ""


@pytest.mark.parametrize(
    ("title", "media_type", "readable"),
    [
        ("a.pdf", "application/pdf", True),
        ("a.docx", "application/octet-stream", True),
        ("README", "", True),
        ("a.PNG", "", False),
        ("a", "image/png", False),
        ("a.zip", "application/octet-stream", False),
        ("~plan.drawio.tmp", "application/vnd.jgraph.mxfile", False),
    ],
)
def test_attachments_of_types_without_text_are_not_readable(title: str, media_type: str, readable: bool) -> None:
    assert replace(PAGE, kind="attachment", title=title, media_type=media_type).is_readable is readable
    assert replace(PAGE, title=title).is_readable


def test_the_same_time_in_another_zone_gives_the_same_revision() -> None:
    """v1 may tell the time of a version in another zone than v2."""
    assert PAGE.revision == replace(PAGE, modified_at="2026-11-21T11:00:00.000+0100").revision
    assert PAGE.revision != replace(PAGE, modified_at="2026-11-21T10:00:00.001Z").revision


# Addresses and settings


def test_ids_are_escaped_in_cql_and_in_paths() -> None:
    assert cql_list(["1", "att2", "~jo", 'x" or type = page or id = "']) == '"1", "att2", "~jo"'
    assert path_segment("a/b?c#d") == "a%2Fb%3Fc%23d"
    assert path_segment("..") == "-"


def test_invalid_options_are_refused() -> None:
    base = {"base_url": "https://wiki.example/", "token": "t"}
    assert ConfluenceOptions(**base).base_url == "https://wiki.example"  # type: ignore[arg-type]
    for wrong in (
        {"flavour": "server"},
        {"flavour": "data-center", "email": "a@b.example"},
        {"anonymous_tag": "everybody"},
        {"overlap_minutes": 0},
        {"page_size": 0},
        {"no_such": 1},
        {"email_domain": "b.example"},
    ):
        with pytest.raises(ValidationError):
            ConfluenceOptions(**base, **wrong)  # type: ignore[arg-type]
