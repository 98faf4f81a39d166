"""Issues of very many long comments."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest

import connectors.room as room
from connectors.jira import client
from connectors.jira.client import Cloud
from connectors.jira.content import _Shown, document, packed, parts, without_text
from connectors.jira.model import Comment, Issue, Rules
from connectors.portions import in_portions
from connectors.rows import size_of
from connectors.source import Document, Unreadable
from tests.unit.connectors.jira.test_model import OPTIONS, PROJECT, issue_json, said

PER_PAGE = 50


class Comments:
    """Answers requests for the comments of an issue: public and internal ones in turn, or the last ones internal."""

    name = "tracker"

    def __init__(self, characters: int, number: int, *, internal: int | None = None) -> None:
        self._text, self._number, self._internal = "a" * characters, number, internal

    async def json(self, _method: str, _path: str, *, params: dict[str, Any], **_: object) -> Any:
        start = int(params["startAt"])
        numbers = range(start, min(start + PER_PAGE, self._number))
        return {"comments": [self._comment(n) for n in numbers], "total": self._number}

    def _comment(self, number: int) -> Any:
        is_public = number % 2 == 0 if self._internal is None else number < self._number - self._internal
        shown = {"type": "media", "attrs": {"type": "file", "alt": f"{number}.pdf"}}
        text = {"type": "text", "text": f"{self._text}{number}"}
        comment = {"id": str(number), "created": "2026-05-23T14:47:28.592+0000", "jsdPublic": is_public}
        return comment | {"body": self.body(text, shown)}

    def body(self, text: Any, shown: Any) -> Any:
        return {"type": "doc", "content": [{"type": "paragraph", "content": [text, shown]}]}


class Tables(Comments):
    """Each comment is a table of thirty cells, as a build server writes them."""

    def body(self, text: Any, shown: Any) -> Any:
        cell = {"type": "tableCell", "attrs": {}, "content": [{"type": "paragraph", "content": [text]}]}
        row = {"type": "tableRow", "content": [cell] * 6}
        return json.loads(json.dumps({"type": "doc", "content": [{"type": "table", "content": [row] * 5}, shown]}))


async def read(comments: Comments, *, full: bool) -> Issue:
    attachments = [{"id": "7", "filename": "1.pdf", "size": 5, "created": "2026-05-23T14:47:28.592+0000"}]
    site = Cloud(cast(Any, comments), OPTIONS)
    listed = issue_json(comment={"comments": [], "total": 1_000_000}, attachment=attachments)
    issues, failed = await site._complete([listed], full=full)
    assert not failed
    return issues[0]


def held(comments: tuple[Comment, ...]) -> int:
    return sum(sys.getsizeof(str(comment.body)) for comment in comments)


async def test_an_issue_of_very_many_long_comments_takes_a_bounded_amount_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jira allows 5,000 comments of 32 kB, and a page has fifty issues: they took gigabytes, at each sweep."""
    monkeypatch.setattr(client, "MAX_COMMENTS_BYTES", 100_000)
    issue = await read(Comments(2_000, 500), full=True)
    assert len(issue.comments) == 500
    assert held(issue.comments) < 200_000
    documents = parts(issue, PROJECT, Rules(), OPTIONS)
    texts = [document(part, issue, None) for part in documents if part.attachment is None]
    assert [entry.code for entry in texts if isinstance(entry, Unreadable)] == ["too_large", "too_large"]


async def test_a_listing_holds_no_texts_of_comments_and_shows_the_same_access() -> None:
    listed, whole = [await read(Comments(1_000, 120), full=full) for full in (False, True)]
    assert held(listed.comments) < 30_000 < held(whole.comments)
    assert [part.listed for part in parts(listed, PROJECT, Rules(), OPTIONS)] == [
        part.listed for part in parts(whole, PROJECT, Rules(), OPTIONS)
    ]
    assert all(
        isinstance(document(part, whole, None), Document)
        for part in parts(whole, PROJECT, Rules(), OPTIONS)
        if part.attachment is None
    )


async def test_comments_of_very_many_small_parts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects that tables are made of take twelve times the memory of their JSON, and counted as text: an issue
    with 400 small tables was too large."""
    monkeypatch.setattr(client, "MAX_COMMENTS_BYTES", 100_000)
    issue = await read(Tables(9, 50), full=True)
    assert all(
        isinstance(document(part, issue, None), Document)
        for part in parts(issue, PROJECT, Rules(), OPTIONS)
        if part.attachment is None
    )


async def test_very_many_public_comments_do_not_take_the_place_of_restricted_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Customers write public comments of a request: the agents' own comments were no longer found."""
    monkeypatch.setattr(client, "MAX_COMMENTS_BYTES", 100_000)
    issue = await read(Comments(2_000, 200, internal=5), full=True)
    public, internal = [
        document(part, issue, None) for part in parts(issue, PROJECT, Rules(), OPTIONS) if part.attachment is None
    ]
    assert isinstance(public, Unreadable)
    assert isinstance(internal, Document)
    assert "aaa199" in internal.content


NAMES = {name: name for name in ("", "a.png", "b.txt")}


@pytest.mark.parametrize("body", [None, "!a.png! and [^b.txt]", ["odd"], {"type": "media", "attrs": {"type": "file"}}])
def test_a_comment_without_its_text_shows_the_same_files(body: object) -> None:
    comment = said(body=body)
    assert _Shown.of([without_text(comment, NAMES)]) == _Shown.of([comment])
    assert _Shown.of([without_text(packed(comment)[0], NAMES)]) == _Shown.of([comment])


def test_a_comment_of_very_many_invented_names_takes_no_more_memory_without_its_text() -> None:
    """A text of 32 kB became 4 MB."""
    comment = without_text(said(body="!a.png!" + "".join(f"!{n:x}!" for n in range(6_000))), NAMES)
    assert size_of([*comment.body.shown]) < 1_000
    assert _Shown.of([comment]).names == {"a.png"}


async def test_several_issues_of_very_many_comments_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty issues of 32 MB each were in memory together."""
    monkeypatch.setattr(room, "MAX_HELD_BYTES", 300_000)
    requested: list[int] = []

    async def read_all(numbers: Sequence[int]) -> list[Issue]:
        requested.append(len(numbers))
        return [await read(Comments(2_000, 100), full=True) for _ in numbers]

    issues = [issue async for _, some in in_portions(range(4), read_all) for issue in some]
    assert [len(issue.comments) for issue in issues] == [100] * 4
    assert requested == [4, 2, 1, 1, 1, 1]


async def test_comments_that_come_with_their_issues_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data Center returns an issue with all of its comments."""
    monkeypatch.setattr(room, "MAX_HELD_BYTES", 300_000)
    made = Comments(2_000, 100)
    comments = {"comments": [made._comment(n) for n in range(100)], "total": 100}
    requested: list[int] = []

    async def read_all(numbers: Sequence[int]) -> list[Issue]:
        requested.append(len(numbers))
        return (
            await Cloud(cast(Any, made), OPTIONS)._complete([issue_json(comment=comments)] * len(numbers), full=True)
        )[0]

    issues = [issue async for _, some in in_portions(range(4), read_all) for issue in some]
    assert requested == [4, 2, 1, 1, 1, 1]
    assert all(
        isinstance(document(part, issues[0], None), Document) for part in parts(issues[0], PROJECT, Rules(), OPTIONS)
    )
