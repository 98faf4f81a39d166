"""Whom the request that is worked on is charged to. What spends says so here, wherever it is called from."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

Charge = Callable[[int, float], None]
"""Given tokens of the chat model, and money."""

_charge: ContextVar[Charge | None] = ContextVar("charge", default=None)


def charge_to(whom: Charge | None) -> None:
    """From now on, in this task and those that it starts. None: nobody, for the service asks for itself."""
    _charge.set(whom)


def charge(*, tokens: int = 0, money: float = 0.0) -> None:
    if (whom := _charge.get()) is not None:
        whom(tokens, money)
