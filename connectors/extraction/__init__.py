"""A file → text, title and author. Knows nothing of where the file came from.

``await extract_file(path, name)`` reads it; what is not plain text is read by a process of its own, under limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connectors.extraction.result import Extracted, Unreadable
    from connectors.extraction.sandbox import extract_file
    from connectors.extraction.settings import ExtractionSettings

__all__ = ["Extracted", "ExtractionSettings", "Unreadable", "extract_file"]

_WHERE = {
    "Extracted": "result",
    "ExtractionSettings": "settings",
    "Unreadable": "result",
    "extract_file": "sandbox",
}


def __getattr__(name: str) -> Any:
    """Loaded when first asked for: the reading process needs none of it, and starts once a document."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
