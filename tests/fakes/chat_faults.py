"""What goes wrong with the fake chat model, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

UNSUPPORTED = "The committee awarded the contract to Zephyr Dynamics for 94 million euros."


@dataclass
class Faults:
    """What goes wrong. A number of requests counts down as they are spoilt; the rest stays until changed."""

    throttle: int = 0
    """Next n requests: 429 rate_limit_exceeded."""
    throttle_headers: dict[str, str] = field(default_factory=lambda: {"retry-after": "1"})
    errors: int = 0
    """Next n requests: error_status."""
    error_status: int = 503
    hang: int = 0
    """Next n requests: no answer until the client goes away."""
    disconnect: int = 0
    """Next n requests: the connection closes without an answer."""
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
    not_json: int = 0
    """Next n answers are a proxy's HTML page with status 200."""
    garbage: int = 0
    """Next n streams hold events that are no JSON."""
    quota: bool = False
    """429 insufficient_quota."""
    too_long: bool = False
    """400 context_length_exceeded."""
    finish_reason: str = "stop"
    latency_seconds: float = 0.0
    """Until the first token."""
    token_seconds: float = 0.0
    obey: Literal["nothing", "unmarked", "sloppy", "everything"] = "nothing"
    """Which instructions in the user's message are followed. unmarked: those outside the marked quotations; sloppy: a
    line that only looks like an end of a quotation ends it, a line that looks like a turn of a chat begins one;
    everything: those in quotations too."""
    hallucinate: bool = False
    """Adds a sentence that no passage supports, with a citation of the first."""
    wrong_citation: int | None = None
    """Every citation names this number."""
    uncited: bool = False
    say: str | None = None
    """The whole answer, whatever was asked."""


@dataclass
class Stats:
    requests: int = 0
    open: int = 0
    """Being answered now."""
    left: int = 0
    """Clients that went away before the end."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
