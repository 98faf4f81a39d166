"""The guide's manifest asks for what the connector needs, and for nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import SecretStr

from connectors.slack import SlackOptions
from connectors.slack.events import reaction
from connectors.slack.source import required_scopes
from connectors.source import Reaction

GUIDE = (Path(__file__).parents[4] / "docs/connectors/slack.md").read_text()


def listed(under: str) -> list[str]:
    match = re.search(rf"^ +{under}:\n((?: +- \S+\n)+)", GUIDE, re.MULTILINE)
    assert match is not None
    return [line.strip(" -") for line in match[1].splitlines()]


def test_the_guides_manifest_has_exactly_the_scopes_that_check_requires() -> None:
    assert listed("bot") == sorted(required_scopes(SlackOptions(token=SecretStr("x"))))


def test_the_connector_handles_every_event_in_the_guides_manifest() -> None:
    bodies = {
        "message": {"ts": "1.000000"},
        "subteam_created": {},
        "subteam_updated": {},
        "user_change": {},
        "team_join": {},
    }
    for event in listed("bot_events"):
        kind = event.partition(".")[0]
        results, effect = reaction(
            {"type": "event_callback", "event": {"type": kind, "channel": "C1", "user": "U1", **bodies.get(kind, {})}}
        )
        assert results != Reaction() or effect is not None, event


def test_the_guide_explains_every_option() -> None:
    options = set(SlackOptions.model_fields) - {"token", "signing_secret", "app_token"}
    table = GUIDE.partition("## Options")[2]
    assert {name for name in options if f"`{name}`" not in table} == set()
