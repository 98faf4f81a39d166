"""People who ask over HTTP and MCP: all the time while faults happen, and once more when everything has settled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import httpx
import psycopg

from query.embedding.embedders import QueryEmbedder
from query.http.serve import serving
from query.model import MODES
from query.settings import AuthSettings, QuerySettings, ServeSettings
from tests.faults import tally
from tests.faults.history import History, Query, Revocation
from tests.faults.offices import CLOSED_BY_MEMBERSHIP, TENANT
from tests.faults.world import World
from tests.support.query.http_kit import DEVELOPMENT, as_
from tests.support.query.mcp_kit import connected
from tests.support.space import Space

MAX_RESULTS = 100
"""What one search may return: more than one scenario has documents."""
MCP_RESULTS = 50
PAUSE_SECONDS = 0.2
SEARCH_SECONDS = 40.0
"""What is shown is compared here, not how fast: the processes of a scenario and its servers share two processors."""
ANSWER_SECONDS = 30.0

_ACCEPTED = """
    SELECT d.source || '/' || d.external_id, extract(epoch FROM d.access_observed_at)::float8,
        extract(epoch FROM d.deleted_floor)::float8
    FROM documents d WHERE d.tenant = %s AND d.source || '/' || d.external_id = ANY(%s)
"""
_MEMBERS = """
    SELECT source, principal, extract(epoch FROM observed_at)::float8 FROM memberships
    WHERE tenant = %s AND principal = ANY(%s)
"""


class Readers:
    """The query service as people use it. It reads the stores directly: the wires are the workers'."""

    def __init__(self, address: str, client: httpx.AsyncClient) -> None:
        self._address = address
        self._client = client

    async def search(self, person: str, query: str, mode: str = "hybrid") -> dict[str, dict[str, Any]]:
        """key → what is shown of the document, over HTTP; of one that is only named as saying the same, its place.

        Raises httpx.HTTPError when the service cannot answer, or answers with half of its stores.
        """
        response = await self._client.post(
            "/v1/search",
            json={"query": query, "top": MAX_RESULTS, "mode": mode},
            headers=_headers(person),
        )
        response.raise_for_status()
        answer = response.json()
        if answer["degraded"]:
            raise httpx.TransportError("; ".join(answer["degraded"]))
        shown: dict[str, dict[str, Any]] = {}
        for result in answer["results"]:
            for place in result["also"]:
                shown.setdefault(_key(place), place)
        return shown | {_key(result): result for result in answer["results"]}

    async def document(self, person: str, id_: str) -> dict[str, Any]:
        """A whole document over HTTP. Raises httpx.HTTPError."""
        response = await self._client.get(f"/v1/documents/{id_}", headers=_headers(person))
        response.raise_for_status()
        return dict(response.json())

    async def over_mcp(self, person: str, query: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """What ``search`` over MCP shows of each document, and what ``fetch`` shows of it; that one is asked for those
        whose passages hold the query.

        Raises httpx.HTTPError when the service cannot answer.
        """
        shown: list[tuple[dict[str, Any], dict[str, Any]]] = []
        async with connected(self._address, headers=_headers(person)) as client:
            answer = await client.call_tool("search", {"query": query, "limit": MCP_RESULTS})
            found = answer.structured_content
            if not isinstance(found, dict):
                raise httpx.TransportError("search over MCP cannot answer now")
            for result in found["results"]:
                fetched: dict[str, Any] = {}
                if query in result["text"].split():
                    document = await client.call_tool("fetch", {"id": result["id"]})
                    if isinstance(document.structured_content, dict):
                        fetched = document.structured_content
                shown.append((result, fetched))
        return shown


@asynccontextmanager
async def readers(space: Space, embedders: QueryEmbedder) -> AsyncIterator[Readers]:
    settings = QuerySettings(
        serve=ServeSettings(port=0, requests_per_minute=1_000_000, search_seconds=SEARCH_SECONDS, **DEVELOPMENT),
        auth=AuthSettings(),
    )
    async with (
        serving(space.settings, settings, embedders=embedders) as (address, service),
        httpx.AsyncClient(base_url=address, timeout=ANSWER_SECONDS) as client,
    ):
        async with asyncio.timeout(60):
            await service.following.warm.wait()
        yield Readers(address, client)


class Reading:
    """Asks as everybody in turn until it is stopped, and notes when the ledger accepts what was revoked."""

    def __init__(self, world: World, readers: Readers, history: History, word: str, persons: Sequence[str]) -> None:
        self._world, self._space, self._readers, self._history = world, world.space, readers, history
        self._word, self._persons = word, persons
        self._clock_offset = time.time() - time.monotonic()
        self.stopped = False
        """Set to end ``run`` after the question under way."""

    async def run(self, rng: Random) -> None:
        while not self.stopped:
            with suppress(psycopg.Error):
                await self._note_acceptances()
            person, mode = rng.choice(self._persons), rng.choice(MODES)
            start = time.monotonic()
            try:
                shown = await self._readers.search(person, self._word, mode)
            except httpx.HTTPError:
                tally.DONE["questions asked while nothing could answer"] += 1
            else:
                tally.DONE["queries"] += 1
                self._history.queries.append(Query(person, f"HTTP, {mode}", start, time.monotonic(), frozenset(shown)))
            await asyncio.sleep(PAUSE_SECONDS)

    async def _note_acceptances(self) -> None:
        """A revocation is accepted when the ledger's stamp of what it concerns is later than the revocation: stamps are
        taken before the source is read, so that reading saw it."""
        waiting = self._history.awaiting_acceptance()
        if not waiting:
            return
        documents = {
            key: (access, deleted)
            for key, access, deleted in await self._space.query(_ACCEPTED, TENANT, [r.register[0] for r in waiting])
        }
        members = {
            (source, principal): observed
            for source, principal, observed in await self._space.query(
                _MEMBERS, TENANT, sorted({r.register[1] for r in waiting})
            )
        }
        now = time.monotonic()
        for revocation in waiting:
            # A stamp of a clock that is ahead may be that of something that was read before.
            completed = revocation.completed + self._clock_offset + self._world.connectors_ahead_seconds
            if is_accepted(revocation, completed, documents, members):
                revocation.accepted = now
                tally.DONE["revocations followed to their acceptance"] += 1


def is_accepted(
    revocation: Revocation,
    completed: float,
    documents: Mapping[str, tuple[float | None, float | None]],
    members: Mapping[tuple[str, str], float],
) -> bool:
    """Whether the ledger's stamps are those of something that was read after the revocation.

    completed: when it was completed, seconds since 1970, as the stamps are. documents: (access, delete) by key.
    members: by source and person.
    """
    key, person = revocation.register
    source = key.partition("/")[0]
    access, deleted = documents.get(key, (None, None))
    is_deleted = deleted is not None and deleted > completed
    if revocation.kind == "remove":
        return is_deleted
    if (source, revocation.kind) in CLOSED_BY_MEMBERSHIP:
        return members.get((source, person), 0.0) > completed
    return is_deleted or (access is not None and access > completed)


def _headers(person: str) -> dict[str, str]:
    return as_(person, TENANT)


def _key(place: Mapping[str, str]) -> str:
    return f"{place['source']}/{place['external_id']}"
