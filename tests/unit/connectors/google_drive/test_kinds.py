"""How Drive's files are read, and by what their kinds are recognised."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest

from connectors.google_drive.content import (
    Download,
    TextExport,
    author,
    conversion,
    metadata,
    modified_at,
    revision_of,
    size,
    version,
    without_pictures,
)

FILE: dict[str, Any] = {
    "id": "1",
    "name": "notes.txt",
    "mimeType": "text/plain",
    "md5Checksum": "a",
    "headRevisionId": "r",
    "version": "7",
    "modifiedTime": "2026-11-21T12:00:00.000Z",
    "parents": ["p"],
    "driveId": "d",
    "webViewLink": "https://x.example/1",
    "lastModifyingUser": {"displayName": "Ines", "emailAddress": "ines@example.com"},
    "size": "12",
    "capabilities": {"canDownload": True},
}


@pytest.mark.parametrize(
    ("mime_type", "name", "results"),
    [
        ("application/vnd.google-apps.document", "Plan", TextExport),
        ("application/vnd.google-apps.presentation", "Deck", TextExport),
        ("application/vnd.google-apps.spreadsheet", "Prices", Download),
        ("application/pdf", "a.pdf", Download),
        ("application/msword", "a.doc", Download),
        ("text/x-anything", "a", Download),
        ("application/json", "a.json", Download),
        ("application/octet-stream", "README.MD", Download),
        ("application/zip", "really.docx", Download),
        ("", "notes.txt", Download),
        ("application/octet-stream", "README", type(None)),
        ("application/zip", "all.zip", type(None)),
        ("image/png", "a.png", type(None)),
        ("video/mp4", "a.mp4", type(None)),
        ("application/vnd.google-apps.folder", "a.txt", type(None)),
        ("application/vnd.google-apps.shortcut", "a.txt", type(None)),
        ("application/vnd.google-apps.form", "Form", type(None)),
        ("application/vnd.google-apps.drawing", "Drawing", type(None)),
        ("application/vnd.google-apps.something-new", "New", type(None)),
    ],
)
def test_the_mime_type_and_name_decide_how_a_file_is_read(mime_type: str, name: str, results: type) -> None:
    assert type(conversion({"mimeType": mime_type, "name": name})) is results


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other.txt"},
        {"md5Checksum": "b"},
        {"modifiedTime": "2026-11-21T13:00:00.000Z"},
        {"parents": ["q"]},
        {"lastModifyingUser": {"displayName": "Otto"}},
        {"capabilities": {"canDownload": False}},
        {"mimeType": "text/markdown"},
        {"webViewLink": "https://x.example/2"},
        {"clientEncryptionDetails": {"encryptionState": "encrypted"}},
        {"driveId": "e"},
    ],
)
def test_a_change_of_a_published_field_changes_the_revision(change: dict[str, Any]) -> None:
    assert revision_of({**FILE, **change}) != revision_of(FILE)


@pytest.mark.parametrize(
    "change",
    [{"version": "8"}, {"permissionIds": ["1", "2"]}, {"hasAugmentedPermissions": True}, {"viewedByMe": True}],
)
def test_changes_of_access_and_views_do_not_change_the_revision(change: dict[str, Any]) -> None:
    assert revision_of({**FILE, **change}) == revision_of(FILE)


def test_embedded_images_are_removed_from_markdown_but_their_descriptions_stay() -> None:
    pictures = "[image1]: <data:image/png;base64,AAAA>\n\n[image2]: <data:image/jpeg;base64,BB>"
    text = f"Before ![a map][image1] after ![][image2].\n\n{pictures}"
    assert without_pictures(text) == "Before a map after .\n\n\n"
    other = "![kept](https://x.example/a.png) [image1] [note]: <https://x.example>\n"
    assert without_pictures(other) == other


@pytest.mark.parametrize("text", ["![" * 400_000, "[image1]: <data:image/\n" * 40_000])
def test_pictures_that_have_no_end_are_searched_in_linear_time(text: str) -> None:
    began = process_time()
    assert without_pictures(text) == text
    assert process_time() - began < 2


def test_author_version_size_and_metadata_are_read_from_a_file() -> None:
    assert author(FILE) == "Ines"
    assert author({**FILE, "owners": [{"emailAddress": "boss@example.com"}]}) == "boss@example.com"
    assert author({}) is None
    assert (version(FILE), size(FILE), version({}), size({})) == (7, 12, None, None)
    assert modified_at({"modifiedTime": "nonsense"}) is None
    assert metadata(FILE) == {"mime_type": "text/plain", "drive_id": "d", "folder_id": "p"}
