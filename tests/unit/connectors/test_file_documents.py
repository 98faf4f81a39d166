"""Documents that are made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.file_documents import document_from_file
from connectors.source import Document, Unreadable


async def test_the_text_of_a_file_becomes_a_document(tmp_path: Path) -> None:
    file = tmp_path / "download"
    file.write_text("# Printer\n\nIt is repaired.\n")
    entry = await document_from_file(file, "printer.md", external_id="7", acl_tags=["staff"], metadata={"size": 3})
    assert isinstance(entry, Document)
    assert (entry.external_id, entry.media_type, entry.metadata["size"]) == ("7", "text/markdown", 3)
    assert "It is repaired." in entry.content


async def test_a_file_without_text_stays_listed_under_its_access(tmp_path: Path) -> None:
    file = tmp_path / "download"
    file.write_bytes(b"\x7fELF" + bytes(100))
    entry = await document_from_file(file, "printer", external_id="7", acl_tags=["staff"], revision="1")
    assert entry == Unreadable(external_id="7", code="binary", message=entry.message, acl_tags=["staff"], revision="1")
    assert entry.message.startswith("printer ")


async def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await document_from_file(tmp_path / "none", "none.txt", external_id="7", acl_tags=["staff"])
