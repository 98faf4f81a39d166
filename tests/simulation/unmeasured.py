"""Stands for the product's metrics, of which nobody reads more than one."""

from __future__ import annotations

from types import TracebackType
from typing import Any


class Instrument:
    """A counter, gauge or histogram, and each of its children."""

    def __init__(self) -> None:
        self.count = 0.0
        """All that it was increased by."""

    def labels(self, *_: object, **__: object) -> Instrument:
        return self

    __call__ = labels

    def inc(self, amount: float = 1.0) -> None:
        self.count += amount

    def nothing(self, *_: object, **__: object) -> None:
        return None

    set = observe = dec = remove = clear = set_function = nothing

    def __enter__(self) -> Instrument:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        return None


class Unmeasured:
    """All instruments that somebody asks for."""

    def __getattr__(self, name: str) -> Any:
        instrument = Instrument()
        setattr(self, name, instrument)
        return instrument
