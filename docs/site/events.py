"""Reference of the log's events: the names that the code declares, and the pages that say what to do about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from docs.site.markdown import code, table
from pipeline.observability.events import LogEvent

DOCS = Path(__file__).parents[1]


def document() -> str:
    pages = {path: path.read_text() for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "adr"}
    return table(
        ("event", "explained in"), ((code(event), ", ".join(_naming(event, pages))) for event in get_args(LogEvent))
    )


def _naming(event: str, pages: dict[Path, str]) -> Iterator[str]:
    for path, text in pages.items():
        if f"`{event}`" in text:
            relative = path.relative_to(DOCS)
            yield f"[{relative.with_suffix('')}](../{relative})"
