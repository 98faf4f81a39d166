"""A connector's state is the same word in `status`, on the page, in `why` and in `penstock connector`."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product
from typing import Any

from connectors.operate import Row, condition
from pipeline.diagnosis.connector_status import ConnectorRow, state_of
from pipeline.diagnosis.story_model import Source

ACTIVITIES: tuple[dict[str, dict[str, Any]], ...] = (
    {},
    {"sweep": {"state": "waiting", "reason": "429"}},
    {"sweep": {"state": "waiting", "reason": "429"}, "changes": {"state": "needs attention", "reason": "401"}},
)
GUARDS = (None, {"missing": 5, "published": 6})
SILENCES = (None, 1.0, 15.0, 15.1)
BOTH = (True, False)


def test_every_command_shows_the_same_connector_state() -> None:
    for paused, removed, loaded, guard, activities, silent in product(BOTH, BOTH, BOTH, GUARDS, ACTIVITIES, SILENCES):
        at = datetime.now(UTC)
        state, reason = state_of(
            ConnectorRow("acme", "slack", "slack", paused, removed, loaded, guard, activities, {}, silent)
        )
        row = Row(
            "slack",
            paused,
            "done",
            at if loaded else None,
            guard,
            activities,
            {},
            [],
            None,
            None,
            silent,
            removed_at=at if removed else None,
        )
        assert condition(row) == (state, reason)
        source = Source("acme", "slack", "slack", paused, loaded, guard, activities, silent, removed=removed)
        assert source.state == state
        if state in ("needs attention", "waiting"):
            assert source.problem == reason
