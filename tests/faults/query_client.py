"""Clients that search over HTTP and MCP, while faults happen and after everything has settled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from random import Random
from typing import Any

import httpx
import psycopg

from query.embedding.embedders import QueryEmbedder
from query.http.serve import serving
from query.model import MODES
from query.settings import AuthSettings, QuerySettings, RetrievalSettings, ServeSettings
from tests.faults import tally
from tests.faults.history import Certificate, History, Query, Revocation
from tests.faults.marker import markers_in
from tests.faults.simulated_sources import CLOSED_BY_MEMBERSHIP, TENANT
from tests.faults.world import World
from tests.support.query.http_kit import DEVELOPMENT, as_
from tests.support.query.mcp_kit import connected
from tests.support.space import Space

MAX_RESULTS = 100
"""The most results of one search: more than a scenario has documents."""
MCP_RESULTS = 50
PAUSE_SECONDS = 0.2
SEARCH_SECONDS = 40.0
"""The time limit of a search. It is long because the tests compare results, not times, on two shared processors."""
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


class QueryClient:
    """A client of the query service, which reads the stores directly: only the workers use the proxies."""

    def __init__(self, address: str, client: httpx.AsyncClient) -> None:
        self._address = address
        self._client = client

    async def search(self, person: str, query: str, mode: str = "hybrid") -> dict[str, dict[str, Any]]:
        """Search over HTTP. Returns by key what is shown of each document; for one that is only listed as a duplicate,
        its source and external id. Raises httpx.HTTPError as ``respond`` does."""
        return shown_in(await self.respond(person, query, mode))

    async def respond(self, person: str, query: str, mode: str) -> dict[str, Any]:
        """Search over HTTP. Returns the response.

        Raises httpx.HTTPError if the service cannot answer, or answers with only one of its stores.
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
        return dict(answer)

    async def document(self, person: str, id_: str) -> dict[str, Any]:
        """Fetch a whole document over HTTP. Raises httpx.HTTPError."""
        response = await self._client.get(f"/v1/documents/{id_}", headers=_headers(person))
        response.raise_for_status()
        return dict(response.json())

    async def over_mcp(self, person: str, query: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Search over MCP. Returns each result of ``search`` with the result of ``fetch`` for it, which is empty for
        those whose passages do not contain the query.

        Raises httpx.HTTPError if the service cannot answer.
        """
        shown: list[tuple[dict[str, Any], dict[str, Any]]] = []
        async with connected(self._address, headers=_headers(person)) as client:
            answer = await client.call_tool("search", {"query": query, "limit": MCP_RESULTS})
            response = answer.structured_content
            if not isinstance(response, dict):
                raise httpx.TransportError("search over MCP cannot answer now")
            for result in response["results"]:
                fetched: dict[str, Any] = {}
                if query in result["text"].split():
                    document = await client.call_tool("fetch", {"id": result["id"]})
                    if isinstance(document.structured_content, dict):
                        fetched = document.structured_content
                shown.append((result, fetched))
        return shown


def shown_in(response: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by key what a response shows of each document."""
    shown: dict[str, dict[str, Any]] = {}
    for result in response["results"]:
        for place in result["also"]:
            shown.setdefault(_key(place), place)
    return shown | {_key(result): result for result in response["results"]}


@asynccontextmanager
async def query_client(space: Space, embedders: QueryEmbedder) -> AsyncIterator[QueryClient]:
    settings = QuerySettings(
        # The cosines of made-up vectors mean nothing, and a worker that calibrates would let them turn questions away.
        retrieval=RetrievalSettings(cosine_floor=-1),
        serve=ServeSettings(port=0, requests_per_minute=1_000_000, search_seconds=SEARCH_SECONDS, **DEVELOPMENT),
        auth=AuthSettings(),
    )
    async with (
        serving(space.settings, settings, embedders=embedders) as (address, service),
        httpx.AsyncClient(base_url=address, timeout=ANSWER_SECONDS) as client,
    ):
        async with asyncio.timeout(60):
            await service.following.warm.wait()
        yield QueryClient(address, client)


class QueryLoop:
    """Searches as random persons until it is stopped, and records when the ledger accepts revocations."""

    def __init__(self, world: World, client: QueryClient, history: History, word: str, persons: Sequence[str]) -> None:
        self._world, self._space, self._client, self._history = world, world.space, client, history
        self._word, self._persons = word, persons
        self._clock_offset = time.time() - time.monotonic()
        self.stopped = False
        """Set to end ``run`` after the current query."""

    async def run(self, rng: Random) -> None:
        while not self.stopped:
            with suppress(psycopg.Error):
                await self._note_acceptances()
            person, mode = rng.choice(self._persons), rng.choice(MODES)
            start = time.monotonic()
            try:
                response = await self._client.respond(person, self._word, mode)
            except httpx.HTTPError:
                tally.DONE["questions asked while nothing could answer"] += 1
            else:
                tally.DONE["queries"] += 1
                end, shown = time.monotonic(), shown_in(response)
                markers = {key: markers_in(str(result.get("text", ""))) for key, result in shown.items()}
                texts = {key: next(iter(named)) for key, named in markers.items() if len(named) == 1}
                certificates = {of["source"]: self._certificate(of) for of in response["freshness"]}
                self._history.queries.append(
                    Query(person, f"HTTP, {mode}", start, end, frozenset(shown), texts, certificates)
                )
            await asyncio.sleep(PAUSE_SECONDS)

    def _certificate(self, shown: Mapping[str, Any]) -> Certificate:
        times = [shown[name] and datetime.fromisoformat(shown[name]) for name in ("complete_until", "access_until")]
        complete, access = (time and time.timestamp() - self._clock_offset for time in times)
        tally.DONE["certificates with a time"] += complete is not None
        return Certificate(complete, access)

    async def _note_acceptances(self) -> None:
        """Record the accepted revocations: those that are older than the ledger's stamp of what they concern. Stamps
        are taken before the source is read, so that read saw the revocation."""
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
            # The stamp of a clock that is ahead may belong to an earlier read.
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
    """Whether the ledger holds what was read after the revocation.

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
