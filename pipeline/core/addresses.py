"""Checking that a document's address is safe to show as a link. Pure."""

from __future__ import annotations

import re

_OPENABLE = re.compile(r"https?://[^\x00-\x1f\x7f]+|file://(?:localhost)?(?:/[^\x00-\x1f\x7f/\\]+)+/?", re.IGNORECASE)
"""The addresses that may be links. ``file`` addresses come from the folder connector, and are opened on the reader's
machine; one with a host, or with an empty part in its path (``file:////host/share``), would make Windows connect to
another machine. No control characters: browsers drop tabs and line ends within an address, and so run
``java\\tscript:``."""


def openable(address: str | None) -> str | None:
    """The address if it may be shown as a link, otherwise None: other schemes (``javascript:``, ``data:``) may run
    code."""
    return address if address is not None and _OPENABLE.fullmatch(address) else None
