"""How items of Graph are read.

Recorded payloads: microsoftgraph/microsoft-graph-docs-contrib (api-reference/v1.0/api/sitepage-get.md and
resources/sitepage.md, CC BY 4.0), trimmed.
"""

from __future__ import annotations

from typing import Any

import pytest

from connectors.sharepoint.content import PAGE, author, is_draft, modified_at, page_parts, revision_of, type_of

FILE: dict[str, Any] = {
    "id": "01ABC",
    "name": "notes.txt",
    "size": 12,
    "eTag": '"{F45354CB-D634-45DF-8B88-2B4E96A1DC45},8"',
    "webUrl": "https://contoso.sharepoint.com/notes.txt",
    "file": {"mimeType": "text/plain", "hashes": {"quickXorHash": "a"}},
    "lastModifiedDateTime": "2023-04-16T10:01:41Z",
    "lastModifiedBy": {"user": {"displayName": "Rahul Mittal", "email": "rahmit@contoso.com"}},
    "parentReference": {"driveId": "d", "id": "01FOLDER"},
}


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "notes.png", "file": {"mimeType": "image/png"}},
        {"file": None, "folder": {"childCount": 1}},
        {"deleted": {"state": "deleted"}},
        {"package": {"type": "oneNote"}},
        {"remoteItem": {"id": "01REMOTE"}},
        {"name": "page.aspx", "file": {"mimeType": "application/octet-stream"}},
    ],
)
def test_what_has_no_text_is_no_document(changed: dict[str, Any]) -> None:
    item = {name: value for name, value in {**FILE, **changed}.items() if value is not None}
    assert type_of(item, is_pages_library=False) is None
    assert type_of(FILE, is_pages_library=False) is not None


def test_a_page_is_one_only_in_the_library_of_pages() -> None:
    page = {**FILE, "name": "Home.aspx", "file": {"mimeType": "application/octet-stream"}}
    assert type_of(page, is_pages_library=True) is PAGE
    assert type_of({**page, "deleted": {}}, is_pages_library=True) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"eTag": '"{F45354CB-D634-45DF-8B88-2B4E96A1DC45},9"'},
        {"size": 13},
        {"name": "other.txt"},
        {"lastModifiedDateTime": "2023-04-16T10:01:42Z"},
        {"parentReference": {"driveId": "d", "id": "01OTHER"}},
        {"malware": {"description": "EICAR"}},
    ],
)
def test_a_revision_changes_with_what_is_published(changed: dict[str, Any]) -> None:
    assert revision_of({**FILE, **changed}, "d") != revision_of(FILE, "d")


def test_a_revision_does_not_depend_on_what_the_log_of_changes_leaves_out() -> None:
    from_log = {**FILE, "file": {"mimeType": "text/plain"}}
    assert revision_of({**FILE, "cTag": "c", "shared": {}}, "d") == revision_of(from_log, "d")


def test_an_author_and_a_time_are_read_if_they_are_there() -> None:
    assert author(FILE) == "Rahul Mittal"
    assert author({}) is None
    assert modified_at(FILE) is not None
    assert modified_at({"lastModifiedDateTime": "soon"}) is None


@pytest.mark.parametrize(
    ("version", "expected"), [("1.0", False), ("0.4", True), ("2.1", True), (None, False), ("7", False)]
)
def test_a_minor_version_is_a_draft(version: str | None, expected: bool) -> None:
    assert is_draft(version) is expected


LAYOUT = {
    "horizontalSections": [
        {
            "layout": "twoColumns",
            "columns": [
                {"width": 4, "webparts": [{"@odata.type": "#oneDrive.textWebPart", "innerHtml": "<p>First.</p>"}]},
                {
                    "width": 4,
                    "webparts": [
                        {
                            "@odata.type": "#microsoft.graph.standardWebPart",
                            "webPartType": "d1d91016-032f-456d-98a4-721247c305e8",
                            "data": {
                                "title": "Events",
                                "serverProcessedContent": {
                                    "htmlStrings": [{"key": "html", "value": "<b>Third.</b>"}],
                                    "searchablePlainTexts": [{"key": "title", "value": "Second & more."}],
                                },
                            },
                        }
                    ],
                },
            ],
        }
    ],
    "verticalSection": {"webparts": [{"innerHtml": "<p>Last.</p>"}]},
}


def test_the_web_parts_of_a_page_are_read_in_their_order() -> None:
    parts = ["<p>First.</p>", "<p>Second &amp; more.</p>", "<b>Third.</b>", "<p>Last.</p>"]
    assert list(page_parts({"canvasLayout": LAYOUT})) == parts


@pytest.mark.parametrize(
    "layout",
    [
        None,
        {},
        {"horizontalSections": None},
        {"horizontalSections": [None, {}, {"columns": [None, {}, {"webparts": [None, 7, {}, {"innerHtml": " "}]}]}]},
        {
            "verticalSection": {
                "webparts": [{"data": {"serverProcessedContent": {"htmlStrings": [None, {"value": 7}]}}}]
            }
        },
        {"verticalSection": {"webparts": [{"data": None}, {"data": {"serverProcessedContent": None}}]}},
    ],
)
def test_a_page_without_text_has_no_parts(layout: Any) -> None:
    assert list(page_parts({"canvasLayout": layout})) == []
