"""Issues of very many long comments."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest

from connectors.jira import client
from connectors.jira.client import Cloud
from connectors.jira.content import document, parts, without_text
from connectors.jira.model import Comment, Issue, Rules
from connectors.source import Document, Unreadable
from tests.unit.connectors.jira.test_model import OPTIONS, PROJECT, make

PER_PAGE = 50


class Comments:
    """Answers requests for the comments of an issue, without end."""

    name = "tracker"

    def __init__(self, characters: int, number: int) -> None:
        self._text, self._number = "a" * characters, number

    async def json(self, _method: str, _path: str, *, params: dict[str, Any], **_: object) -> Any:
        start = int(params["startAt"])
        numbers = range(start, min(start + PER_PAGE, self._number))
        return {"comments": [self._comment(n) for n in numbers], "total": self._number}

    def _comment(self, number: int) -> Any:
        shown = {"type": "media", "attrs": {"type": "file", "alt": f"{number}.pdf"}}
        text = {"type": "text", "text": f"{self._text}{number}"}
        comment = {"id": str(number), "created": "2026-05-23T14:47:28.592+0000", "jsdPublic": number % 2 == 0}
        return comment | {"body": {"type": "doc", "content": [{"type": "paragraph", "content": [text, shown]}]}}


async def read(comments: Comments, *, full: bool) -> Issue:
    attachments = [{"id": "7", "filename": "1.pdf", "size": 5, "created": "2026-05-23T14:47:28.592+0000"}]
    site = Cloud(cast(Any, comments), OPTIONS)
    row = {
        "id": "10100",
        "key": "ENG-1",
        "fields": {
            "summary": "A",
            "project": {"id": "10000", "key": "ENG"},
            "updated": "2026-05-23T14:47:28.592+0000",
            "comment": {"comments": [], "total": 1_000_000},
            "attachment": attachments,
        },
    }
    issues, failed = await site._complete([row], full=full)
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


@pytest.mark.parametrize("body", [None, "!a.png! and [^b.txt]", ["odd"], {"type": "media", "attrs": {"type": "file"}}])
def test_a_comment_without_its_text_shows_the_same_files(body: object) -> None:
    from connectors.jira.content import _Shown
    from tests.unit.connectors.jira.test_model import said

    comment = said(body=body)
    assert _Shown.of([without_text(comment)]) == _Shown.of([comment])
    assert make()
