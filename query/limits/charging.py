"""Charging the current request for tokens and money, wherever they are spent."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

Charge = Callable[[int, float], None]
"""Receives tokens of the chat model and money."""

_charge: ContextVar[Charge | None] = ContextVar("charge", default=None)


def charge_to(account: Charge | None) -> None:
    """Charge use to an account from now on, in this task and the tasks that it starts. None: charge nobody."""
    _charge.set(account)


def charge(*, tokens: int = 0, money: float = 0.0) -> None:
    """Charge use to the current account, if any."""
    if (account := _charge.get()) is not None:
        account(tokens, money)
