"""Compares what each person is shown, once the sources do not change any more, with what the sources contain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from pipeline.core.normalise import normalise
from query.model import MODES
from tests.faults import tally
from tests.faults.marker import marker_of
from tests.faults.model import outcome
from tests.faults.query_client import QueryClient
from tests.faults.simulated_sources import GROUPS_SECONDS, POLL_SECONDS, SWEEP_SECONDS, SimulatedSources
from tests.faults.world import World
from tests.support.pipeline.oracle import assert_equal, document_id
from topics.messages import DocumentUpserted

PIPELINE_SECONDS = 120.0
"""A killed worker's session (6 s), a breaker's longest pause (30 s), and one document's being set aside (60 s)."""
PATIENCE_SECONDS = 2 * (SWEEP_SECONDS + GROUPS_SECONDS + POLL_SECONDS) + PIPELINE_SECONDS
SLOWEST = "seconds from the last fault until everybody was shown what the sources say, at most"


async def wait_until_shown_as_expected(
    world: World, client: QueryClient, sources: SimulatedSources, words: Sequence[str]
) -> None:
    """Wait until every person is shown exactly the expected documents, over HTTP in every mode and over MCP; then
    compare every field that is stored or shown of each document with its newest event.

    words: the words of the scenarios whose documents must be found. Raises AssertionError with the differences after
    PATIENCE_SECONDS.
    """
    began = time.monotonic()
    differences = ["nothing was read yet"]
    while differences:
        assert time.monotonic() - began < PATIENCE_SECONDS, _report(differences, world)
        await asyncio.sleep(0.5)
        try:
            differences = await _differences(client, sources, words)
        except httpx.HTTPError as error:
            differences = [f"the query service cannot answer: {error}"]
    tally.DONE[SLOWEST] = max(tally.DONE[SLOWEST], round(time.monotonic() - began))
    await _check_every_field(client, sources, words, await _wait_until_stored_as_published(world))


async def _wait_until_stored_as_published(world: World) -> dict[str, DocumentUpserted]:
    """Wait until the ledger and both stores hold exactly the outcome of all events; returns it by key."""
    while True:
        events = await world.document_events()  # before it has settled: a later one may not be accepted yet
        await world.wait_until_settled(PATIENCE_SECONDS)
        said = {
            key: document for key, events_of_one in events.items() if (document := outcome(events_of_one)) is not None
        }
        try:
            await assert_equal(world.space, said.values(), vector=world.model.vector)
        except AssertionError:
            if await world.document_events() == events:  # else a connector has published meanwhile
                raise
        else:
            return said


async def _differences(client: QueryClient, sources: SimulatedSources, words: Sequence[str]) -> list[str]:
    expected = sources.expected()
    for person, texts in expected.items():
        for word in words:
            for mode in MODES:
                shown = {
                    key: str(result.get("text", ""))
                    for key, result in (await client.search(person, word, mode)).items()
                }
                if differences := _compare(f"{person}, HTTP, {mode}", shown, texts, word):
                    return differences
            over_mcp = [fetched["text"] for _, fetched in await client.over_mcp(person, word) if fetched]
            if differences := _compare_texts(f"{person}, MCP", over_mcp, texts, word):
                return differences
    return []


def _compare(where: str, shown: Mapping[str, str], expected: Mapping[str, str], word: str) -> list[str]:
    """Return the differences: everything shown must be expected, and expected documents of this scenario must be
    shown."""
    own = {key for key, text in expected.items() if word in text.split()}
    differences = [f"lost: {key} is not shown to {where}" for key in sorted(own - shown.keys())]
    differences += [f"leaked or undead: {key} is shown to {where}" for key in sorted(shown.keys() - expected.keys())]
    for key in sorted(shown.keys() & expected.keys()):
        if shown[key] and marker_of(expected[key]) not in shown[key]:
            differences.append(f"stale: {key} is shown to {where} as it was before")
    return differences


def _compare_texts(where: str, shown: Sequence[str], expected: Mapping[str, str], word: str) -> list[str]:
    """Return the differences as ``_compare`` does, for results over MCP, which are recognised by the marker of each
    text."""
    markers = {marker_of(text) for text in expected.values()}
    own = {marker_of(text) for text in expected.values() if word in text.split()}
    seen = {marker_of(text) for text in shown}
    return [f"lost: {marker} is not shown to {where}" for marker in sorted(own - seen)] + [
        f"leaked, undead or stale: {marker} is shown to {where}" for marker in sorted(seen - markers)
    ]


async def _check_every_field(
    client: QueryClient, sources: SimulatedSources, words: Sequence[str], said: Mapping[str, DocumentUpserted]
) -> None:
    """Compare what is shown of each document over HTTP and MCP with its newest event, and the fields of that event with
    the source."""
    for source in sources.sources.values():
        for page in source.pages.values():
            if page.shown and source.member:
                source.check(page, said[source.key(page)])
    for person, word in [(person, word) for person in sources.expected() for word in words]:
        for key, result in (await client.search(person, word)).items():
            if word in result.get("text", "").split():  # others are compared with their own scenario
                _fields_of(key, result, said[key])
                if said[key].media_type == "text/markdown":
                    assert result["headings"] == [], f"{key} has no heading, and is shown under {result['headings']}"
                document = await client.document(person, result["document_id"])
                _fields_of(key, document, said[key])
                assert document["text"] == normalise(said[key].content, said[key].media_type)[0], key
        for result, fetched in await client.over_mcp(person, word):
            if fetched:
                [key] = [key for key, message in said.items() if str(document_id(message)) == result["id"]]
                _fields_over_mcp(key, result, said[key])
                _fields_over_mcp(key, fetched, said[key])


def _fields_of(key: str, shown: Mapping[str, Any], message: DocumentUpserted) -> None:
    modified = message.source_modified_at
    expected = {
        "document_id": str(document_id(message)),
        "external_id": message.external_id,
        "source": message.source,
        "title": message.title,
        "source_url": message.source_url,
        "author": message.author,
        "media_type": normalise("", message.media_type)[1],
        "source_modified_at": modified and modified.isoformat(),
    }
    _same(key, {name: shown[name] for name in expected}, expected)


def _fields_over_mcp(key: str, shown: Mapping[str, Any], message: DocumentUpserted) -> None:
    modified = message.source_modified_at
    metadata = {
        "source": message.source,
        "author": message.author,
        "media_type": normalise("", message.media_type)[1],
        "source_modified_at": modified and modified.isoformat(),
    }
    expected = {
        "id": str(document_id(message)),
        "title": " ".join(message.title.split()),
        "url": message.source_url or f"urn:uuid:{document_id(message)}",
        "metadata": {name: value for name, value in metadata.items() if value},
    }
    metadata_shown = {name: value for name, value in shown["metadata"].items() if name != "also"}
    _same(key, {**{name: shown[name] for name in expected}, "metadata": metadata_shown}, expected)


def _same(key: str, shown: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    wrong = [name for name in expected if shown[name] != expected[name]]
    assert not wrong, f"{key}: " + "; ".join(
        f"{name} is shown as {shown[name]!r}, not {expected[name]!r}" for name in wrong
    )


def _report(differences: list[str], world: World) -> str:
    for difference in differences:
        tally.VIOLATIONS[difference.partition(":")[0].partition(" ")[0].rstrip(",")] += 1
    return "\n".join([f"{len(differences)} differences:", *differences[:10], world.worker_logs()])
