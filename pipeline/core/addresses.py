"""Where a person opens a document: an address that is safe to show as a link. Pure."""

from __future__ import annotations

import re

_OPENABLE = re.compile(r"https?://[^\x00-\x1f\x7f]+|file://(?:localhost)?(?:/[^\x00-\x1f\x7f/\\]+)+/?", re.IGNORECASE)
"""``file``: what the folder connector reads, on the machine of whoever opens it; a host, or an empty part of the path
(``file:////host/share``), would have Windows ask another machine. Browsers drop tabs and line ends within an address,
and run what is left of ``java\\tscript:``."""


def openable(address: str | None) -> str | None:
    """The address, or None where it is of any other scheme (``javascript:``, ``data:`` and the like) or of none."""
    return address if address is not None and _OPENABLE.fullmatch(address) else None
