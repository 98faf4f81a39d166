"""Shared parts of the tests of extraction."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from connectors.extraction import Extracted, ExtractionSettings, Unreadable, extract_file
from tests.support.connectors.hostile_office import MEGABYTE

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "nobody", "in", "a", "meadow"]
SMALL = ExtractionSettings(memory_bytes=512 * MEGABYTE, cpu_seconds=20, wall_seconds=60, at_once=2)


def prose(tag: str, lines: int) -> list[str]:
    return [f"{tag}{n} " + " ".join(WORDS[(n + k) % len(WORDS)] for k in range(6)) for n in range(lines)]


class Extract:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def __call__(
        self, name: str, data: bytes, settings: ExtractionSettings = SMALL, media_type: str | None = None
    ) -> Extracted:
        path = self._folder / "stored"
        path.write_bytes(data)
        return await extract_file(path, name, media_type, settings=settings)

    async def refused(self, name: str, data: bytes, settings: ExtractionSettings = SMALL) -> Unreadable:
        with pytest.raises(Unreadable) as caught:
            await self(name, data, settings)
        assert "\n" not in str(caught.value)
        return caught.value


def saved(made: object) -> bytes:
    file = io.BytesIO()
    made.save(file)  # type: ignore[attr-defined]
    return file.getvalue()
