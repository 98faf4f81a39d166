"""What each person is shown once the sources are quiet, against what the sources say."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from pipeline.core.normalise import normalise
from query.model import MODES
from tests.faults import tally
from tests.faults.model import outcome
from tests.faults.offices import GROUPS_SECONDS, POLL_SECONDS, SWEEP_SECONDS, Offices
from tests.faults.readers import Readers
from tests.faults.world import World
from tests.support.pipeline.oracle import assert_equal, document_id
from topics.messages import DocumentUpserted

PIPELINE_SECONDS = 120.0
"""A killed worker's session (6 s), a breaker's longest pause (30 s), and one document's being set aside (60 s)."""
PATIENCE_SECONDS = 2 * (SWEEP_SECONDS + GROUPS_SECONDS + POLL_SECONDS) + PIPELINE_SECONDS
SLOWEST = "seconds from the last fault until everybody was shown what the sources say, at most"


async def shown_is_what_the_sources_say(world: World, readers: Readers, offices: Offices, words: Sequence[str]) -> None:
    """Wait until every person is shown exactly that, over HTTP in every mode and over MCP; then compare every field
    that is stored or shown of each document with the newest event of it.

    words: of the scenarios whose documents must be found. Raises AssertionError, naming the differences, when it does
    not come about within PATIENCE_SECONDS.
    """
    began = time.monotonic()
    differences = ["nobody could ask yet"]
    while differences:
        assert time.monotonic() - began < PATIENCE_SECONDS, _report(differences, world)
        await asyncio.sleep(0.5)
        try:
            differences = await _differences(readers, offices, words)
        except httpx.HTTPError as error:
            differences = [f"the query service cannot answer: {error}"]
    tally.DONE[SLOWEST] = max(tally.DONE[SLOWEST], round(time.monotonic() - began))
    await _every_field_is_shown(readers, offices, words, await _stored_as_published(world))


async def _stored_as_published(world: World) -> dict[str, DocumentUpserted]:
    """Each document as its events say it is, once the ledger and both stores hold exactly that."""
    while True:
        events = await world.document_events()  # before it has settled: a later one may not be accepted yet
        await world.settled(PATIENCE_SECONDS)
        said = {key: document for key, of_one in events.items() if (document := outcome(of_one)) is not None}
        try:
            await assert_equal(world.space, said.values(), vector=world.model.vector)
        except AssertionError:
            if await world.document_events() == events:  # else a connector has published meanwhile
                raise
        else:
            return said


async def _differences(readers: Readers, offices: Offices, words: Sequence[str]) -> list[str]:
    expected = offices.expected()
    for person, texts in expected.items():
        for word in words:
            for mode in MODES:
                shown = {
                    key: str(result.get("text", ""))
                    for key, result in (await readers.search(person, word, mode)).items()
                }
                if differences := _compare(f"{person}, HTTP, {mode}", shown, texts, word):
                    return differences
            over_mcp = [fetched["text"] for _, fetched in await readers.over_mcp(person, word) if fetched]
            if differences := _compare_texts(f"{person}, MCP", over_mcp, texts, word):
                return differences
    return []


def _compare(where: str, shown: Mapping[str, str], expected: Mapping[str, str], word: str) -> list[str]:
    """Everything shown must be expected; of what is expected, this scenario's documents must be shown."""
    asked_for = {key for key, text in expected.items() if word in text.split()}
    differences = [f"lost: {key} is not shown to {where}" for key in sorted(asked_for - shown.keys())]
    differences += [f"leaked or undead: {key} is shown to {where}" for key in sorted(shown.keys() - expected.keys())]
    for key in sorted(shown.keys() & expected.keys()):
        if shown[key] and _marker(expected[key]) not in shown[key]:
            differences.append(f"stale: {key} is shown to {where} as it was before")
    return differences


def _compare_texts(where: str, shown: Sequence[str], expected: Mapping[str, str], word: str) -> list[str]:
    """MCP names documents by id: they are told apart by the marker that each text has."""
    markers = {_marker(text) for text in expected.values()}
    asked_for = {_marker(text) for text in expected.values() if word in text.split()}
    seen = {_marker(text) for text in shown}
    return [f"lost: {marker} is not shown to {where}" for marker in sorted(asked_for - seen)] + [
        f"leaked, undead or stale: {marker} is shown to {where}" for marker in sorted(seen - markers)
    ]


async def _every_field_is_shown(
    readers: Readers, offices: Offices, words: Sequence[str], said: Mapping[str, DocumentUpserted]
) -> None:
    """What people are shown of a document, over HTTP and MCP, against the newest event of it; and that one's title,
    author, media type and time against its source."""
    for office in offices.offices.values():
        for page in office.pages.values():
            if page.shown and office.member:
                office.check(page, said[office.key(page)])
    for person, word in [(person, word) for person in offices.expected() for word in words]:
        for key, result in (await readers.search(person, word)).items():
            if word in result.get("text", "").split():  # the others are looked at with their own scenario
                _fields_of(key, result, said[key])
                if said[key].media_type == "text/markdown":
                    assert result["headings"] == [], f"{key} has no heading, and is shown under {result['headings']}"
                document = await readers.document(person, result["document_id"])
                _fields_of(key, document, said[key])
                assert document["text"] == normalise(said[key].content, said[key].media_type)[0], key
        for result, fetched in await readers.over_mcp(person, word):
            if fetched:
                [key] = [key for key, message in said.items() if str(document_id(message)) == result["id"]]
                _fields_over_mcp(key, result, said[key])
                _fields_over_mcp(key, fetched, said[key])


def _fields_of(key: str, shown: Mapping[str, Any], message: DocumentUpserted) -> None:
    modified = message.source_modified_at
    wanted = {
        "document_id": str(document_id(message)),
        "external_id": message.external_id,
        "source": message.source,
        "title": message.title,
        "source_url": message.source_url,
        "author": message.author,
        "media_type": normalise("", message.media_type)[1],
        "source_modified_at": modified and modified.isoformat(),
    }
    _same(key, {name: shown[name] for name in wanted}, wanted)


def _fields_over_mcp(key: str, shown: Mapping[str, Any], message: DocumentUpserted) -> None:
    modified = message.source_modified_at
    metadata = {
        "source": message.source,
        "author": message.author,
        "media_type": normalise("", message.media_type)[1],
        "source_modified_at": modified and modified.isoformat(),
    }
    wanted = {
        "id": str(document_id(message)),
        "title": " ".join(message.title.split()),
        "url": message.source_url or f"urn:uuid:{document_id(message)}",
        "metadata": {name: value for name, value in metadata.items() if value},
    }
    metadata_shown = {name: value for name, value in shown["metadata"].items() if name != "also"}
    _same(key, {**{name: shown[name] for name in wanted}, "metadata": metadata_shown}, wanted)


def _same(key: str, shown: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    wrong = [name for name in wanted if shown[name] != wanted[name]]
    assert not wrong, f"{key}: " + "; ".join(
        f"{name} is shown as {shown[name]!r}, not {wanted[name]!r}" for name in wrong
    )


_MARKER = re.compile(r"\bmark\w+x\d+\b")


def text_with_marker(word: str, number: int) -> str:
    """One short paragraph: one chunk, whatever the chunker does. ``word`` is every document's of the scenario."""
    return f"{word} notes on matter {number} with the marker mark{word}x{number} and nothing else to say."


def _marker(text: str) -> str:
    [marker] = set(_MARKER.findall(text))
    return str(marker)


def _report(differences: list[str], world: World) -> str:
    for difference in differences:
        tally.FOUND[difference.partition(":")[0].partition(" ")[0].rstrip(",")] += 1
    return "\n".join([f"{len(differences)} differences:", *differences[:10], world.signs()])
