"""An extractor of text from files of another format, offered in the group ``penstock.extractors`` (docs/plugins.md)."""

from __future__ import annotations

from penstock.packages import check

check()

from connectors.extraction.limits import Limits  # noqa: E402
from connectors.extraction.result import Extracted  # noqa: E402
from connectors.extraction.result import Unreadable as UnreadableFile  # noqa: E402

__all__ = ["Extracted", "Limits", "UnreadableFile"]
