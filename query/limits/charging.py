"""Charging the current request for what it costs, wherever that is: tokens, money, and bytes that it has stored."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

Charge = Callable[[int, float, int], None]
"""Receives tokens of the chat model, money, and bytes that are stored."""
UUID_BYTES = 16

_charge: ContextVar[Charge | None] = ContextVar("charge", default=None)


def charge_to(account: Charge | None) -> None:
    """Charge use to an account from now on, in this task and the tasks that it starts. None: charge nobody."""
    _charge.set(account)


def bytes_of(*texts: str | None) -> int:
    """Return how many bytes these texts take in a table."""
    return sum(len(text.encode("utf-8", "replace")) for text in texts if text)


def charge(*, tokens: int = 0, money: float = 0.0, stored: int = 0) -> None:
    """Charge use to the current account, if any. stored: bytes of rows that stay until their retention ends."""
    if (account := _charge.get()) is not None:
        account(tokens, money, stored)
