"""Whether an address is safe to show as a link, and to send a credential to. Pure."""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit

_OPENABLE = re.compile(r"https?://[^\x00-\x1f\x7f]+|file://(?:localhost)?(?:/[^\x00-\x1f\x7f/\\]+)+/?", re.IGNORECASE)
"""The addresses that may be links. ``file`` addresses come from the folder connector, and are opened on the reader's
machine; one with a host, or with an empty part in its path (``file:////host/share``), would make Windows connect to
another machine. No control characters: browsers drop tabs and line ends within an address, and so run
``java\\tscript:``."""


_HIDDEN = re.compile(
    "[\x80-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]+"
)
"""Characters that are not displayed (Unicode's Default_Ignorable_Code_Point, controls, ends of lines and annotations),
or that reverse what is: models read them, and people see another address."""


def openable(address: str | None) -> str | None:
    """The address if it may be shown as a link, otherwise None: other schemes (``javascript:``, ``data:``) may run
    code. What is not displayed of it is percent-encoded, as browsers send it."""
    if address is None or not _OPENABLE.fullmatch(address):
        return None
    return address if address.isascii() else _HIDDEN.sub(lambda hidden: quote(hidden[0]), address)


def is_https_or_local(address: str) -> bool:
    """Whether what is sent to this address is encrypted, or stays on this machine. Raises ValueError for what is no
    address."""
    parts = urlsplit(address)
    return parts.scheme == "https" or parts.hostname in ("127.0.0.1", "::1", "localhost")
