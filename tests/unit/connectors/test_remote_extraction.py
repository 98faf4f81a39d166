"""Requests to the extraction service."""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.extraction import extract_file
from connectors.extraction.settings import ExtractionSettings
from pipeline.core.errors import Deferred


async def test_the_name_of_a_file_that_is_half_of_a_character_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of one attachment stopped the instance of its source, where a service reads the files."""
    monkeypatch.setattr("connectors.extraction.remote.PATIENCE_SECONDS", 0)
    file = tmp_path / "a"
    file.write_bytes(b"%PDF-1.7")
    settings = ExtractionSettings(url="http://127.0.0.1:9")
    with pytest.raises(Deferred, match="cannot be reached"):
        await extract_file(file, "\ud800.pdf", "application/\ud800", settings=settings)
