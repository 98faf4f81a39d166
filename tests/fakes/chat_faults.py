"""The faults of the fake chat model, and its counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.fakes import faults

UNSUPPORTED = "The committee awarded the contract to Zephyr Dynamics for 94 million euros."


@dataclass
class Faults(faults.Faults):
    cut: int = 0
    """Next n answers: the connection closes in the middle of the text."""
    stall: int = 0
    """Next n answers: nothing more comes after the middle of the text."""
    unfinished: int = 0
    """Next n streams end tidily in the middle, without a finish_reason."""
    error_event: int = 0
    """Next n streams: an error in the middle, as an event."""
    empty: int = 0
    """Next n answers have no text."""
    garbage: int = 0
    """Next n streams hold events that are no JSON."""
    too_long: bool = False
    """400 context_length_exceeded."""
    finish_reason: str = "stop"
    token_seconds: float = 0.0
    obey: Literal["nothing", "unmarked", "sloppy", "everything"] = "nothing"
    """The instructions in the user's message that the model follows. unmarked: those outside the marked quotations;
    sloppy: a line that only looks like an end of a quotation ends it, a line that looks like a turn of a chat begins
    one; everything: those in quotations too."""
    hallucinate: bool = False
    """Adds a sentence that no passage supports, with a citation of the first."""
    wrong_citation: int | None = None
    """Every citation names this number."""
    uncited: bool = False
    rewrite: str | None = None
    """The answer where a question should be completed."""
    say: str | None = None
    """The whole answer, whatever was asked."""


@dataclass
class Stats(faults.Stats):
    prompt_tokens: int = 0
    answer_tokens: int = 0
