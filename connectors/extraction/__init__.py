"""Extracts text, title and author from a file, independently of its source.

``await extract_file(path, name)`` reads a file; anything but plain text is read by a separate process, under limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connectors.extraction.result import Extracted, Unreadable
    from connectors.extraction.sandbox import extract_file
    from connectors.extraction.settings import ExtractionSettings

__all__ = ["Extracted", "ExtractionSettings", "Unreadable", "extract_file"]

_MODULES = {
    "Extracted": "result",
    "ExtractionSettings": "settings",
    "Unreadable": "result",
    "extract_file": "sandbox",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the reading process starts for every document and needs none of
    them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
