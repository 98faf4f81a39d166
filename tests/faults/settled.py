"""What each person is shown once the sources are quiet, against what the sources say."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping

import httpx

from query.model import MODES
from tests.faults import tally
from tests.faults.offices import GROUPS_SECONDS, POLL_SECONDS, SWEEP_SECONDS, Offices
from tests.faults.readers import Readers
from tests.faults.world import World

PIPELINE_SECONDS = 120.0
"""A killed worker's session (6 s), a breaker's longest pause (30 s), and one document's being set aside (60 s)."""
PATIENCE_SECONDS = 2 * (SWEEP_SECONDS + GROUPS_SECONDS + POLL_SECONDS) + PIPELINE_SECONDS
SLOWEST = "seconds from the last fault until everybody was shown what the sources say, at most"


async def shown_is_what_the_sources_say(world: World, readers: Readers, offices: Offices, word: str) -> None:
    """Wait until every person is shown exactly that, over HTTP in every mode and over MCP.

    Raises AssertionError, naming the differences, when it does not come about within PATIENCE_SECONDS.
    """
    began = time.monotonic()
    differences = ["nobody could ask yet"]
    while differences:
        assert time.monotonic() - began < PATIENCE_SECONDS, _report(differences, world)
        await asyncio.sleep(0.5)
        try:
            differences = await _differences(readers, offices, word)
        except httpx.HTTPError as error:
            differences = [f"the query service cannot answer: {error}"]
    tally.DONE[SLOWEST] = max(tally.DONE[SLOWEST], round(time.monotonic() - began))


async def _differences(readers: Readers, offices: Offices, word: str) -> list[str]:
    expected = offices.expected()
    differences: list[str] = []
    for person, texts in expected.items():
        for mode in MODES:
            differences += _compare(f"{person}, HTTP, {mode}", await readers.search(person, word, mode), texts, word)
            if differences:
                return differences
        by_id = await readers.over_mcp(person, word)
        differences += _compare_texts(f"{person}, MCP", by_id, texts, word)
    return differences


def _compare(where: str, shown: Mapping[str, str], expected: Mapping[str, str], word: str) -> list[str]:
    """Everything shown must be expected; of what is expected, this scenario's documents must be shown."""
    asked_for = {key for key, text in expected.items() if word in text.split()}
    differences = [f"lost: {key} is not shown to {where}" for key in sorted(asked_for - shown.keys())]
    differences += [f"leaked or undead: {key} is shown to {where}" for key in sorted(shown.keys() - expected.keys())]
    for key in sorted(shown.keys() & expected.keys()):
        if shown[key] and _marker(expected[key]) not in shown[key]:
            differences.append(f"stale: {key} is shown to {where} as it was before")
    return differences


def _compare_texts(where: str, shown: Mapping[str, str], expected: Mapping[str, str], word: str) -> list[str]:
    """MCP names documents by id: they are told apart by the marker that each text has."""
    markers = {_marker(text) for text in expected.values()}
    asked_for = {_marker(text) for text in expected.values() if word in text.split()}
    seen = {_marker(text) for text in shown.values()}
    return [f"lost: {marker} is not shown to {where}" for marker in sorted(asked_for - seen)] + [
        f"leaked, undead or stale: {marker} is shown to {where}" for marker in sorted(seen - markers)
    ]


_MARKER = re.compile(r"\bmark\w+x\d+\b")


def text_with_marker(word: str, number: int) -> str:
    """One short paragraph: one chunk, whatever the chunker does. ``word`` is every document's of the scenario."""
    return f"{word} notes on matter {number} with the marker mark{word}x{number} and nothing else to say."


def _marker(text: str) -> str:
    [marker] = set(_MARKER.findall(text))
    return str(marker)


def _report(differences: list[str], world: World) -> str:
    for difference in differences:
        tally.FOUND[difference.partition(":")[0]] += 1
    return "\n".join([f"{len(differences)} differences:", *differences[:10], world.signs()])
