"""What the page says of a connector is what `penstock connector status` says."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product
from typing import Any

from connectors.operate import Row
from connectors.operate import condition as as_the_command_says
from query.pipeline_parts import condition


def test_a_connectors_state_is_the_word_that_the_command_uses() -> None:
    activities: tuple[dict[str, dict[str, Any]], ...] = (
        {},
        {"sweep": {"state": "waiting", "reason": "429"}},
        {"sweep": {"state": "waiting", "reason": "429"}, "changes": {"state": "needs attention", "reason": "401"}},
    )
    guards = (None, {"missing": 5, "published": 6})
    silences = (None, 1.0, 15.0, 15.1)
    for paused, loaded, guard, active, silent in product((True, False), (True, False), guards, activities, silences):
        at = datetime.now(UTC) if loaded else None
        row = Row("slack", paused, "done", at, guard, active, {}, [], None, None, silent)
        mine = condition(paused=paused, loaded=loaded, guard=guard, activities=active, silent_seconds=silent)
        assert mine == as_the_command_says(row)
