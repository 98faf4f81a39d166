"""Elasticsearch in memory: versions, conflicts, tombstones that are forgotten, and bulks that land late.

A request lands whether or not its sender still lives, and whether or not it still waits for the answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticsearch import ConnectionError as UnreachableError
from elasticsearch import ConnectionTimeout

if TYPE_CHECKING:
    from tests.simulation.world import Process, World

GC_DELETES_SECONDS = 600.0
"""index.gc_deletes (pipeline.stores.elasticsearch.GC_DELETES): how long a deleted entry's version is remembered."""
REQUEST_SECONDS = 30.0


@dataclass
class Entry:
    """One entry; ``body`` None: deleted."""

    version: int
    body: dict[str, Any] | None
    deleted_at: float = 0.0


class Index:
    """The entries and deletes of the server."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def standing(self) -> dict[str, dict[str, Any]]:
        """Every entry that a refreshed search finds."""
        return {id_: entry.body for id_, entry in self.entries.items() if entry.body is not None}

    def apply(self, action: str, meta: dict[str, Any], body: dict[str, Any] | None, now: float) -> dict[str, Any]:
        """One operation of a bulk; returns its answer."""
        id_, version = meta["_id"], meta["version"]
        there = self.entries.get(id_)
        if there is not None and there.body is None and now - there.deleted_at > GC_DELETES_SECONDS:
            there = None
            del self.entries[id_]
        assert meta["version_type"] in ("external", "external_gte")
        gte = meta["version_type"] == "external_gte"
        if there is not None and (there.version > version if gte else there.version >= version):
            reason = f"[{id_}]: version conflict, current version [{there.version}] is higher than [{version}]"
            return {"status": 409, "error": {"type": "version_conflict_engine_exception", "reason": reason}}
        self.entries[id_] = Entry(version, body, now)
        stood = there is not None and there.body is not None
        if action == "delete":
            return {"status": 200, "result": "deleted"} if stood else {"status": 404, "result": "not_found"}
        return {"status": 200, "result": "updated"} if stood else {"status": 201, "result": "created"}


Operation = tuple[str, dict[str, Any], dict[str, Any] | None]
"""One action of a bulk: its kind, the entry's id and version, and its body."""


def operations_of(lines: Sequence[bytes]) -> list[Operation]:
    """A bulk's operations as the server reads them."""
    results: list[Operation] = []
    for operation in lines:
        first, _, rest = operation.partition(b"\n")
        ((action, meta),) = json.loads(first).items()
        results.append((action, meta, json.loads(rest) if rest else None))
    return results


class Elasticsearch:
    """The part of the client that the product uses."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world: World = process.world
        self.indices = self

    async def bulk(self, *, operations: Sequence[bytes], **_: Any) -> dict[str, Any]:
        process, world, loop = self._process, self._world, asyncio.get_running_loop()
        await self._reach("bulk")
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        late = world.faults.delay("a bulk is late")

        def lands() -> None:
            items = [{op[0]: world.index.apply(*op, loop.time())} for op in operations_of(operations)]
            if late and not process.alive:
                world.tally["bulk of a dead worker landed"] += 1
            if not answer.done():
                answer.set_result({"items": items})

        if late:
            world.last_late = max(world.last_late, loop.time() + late)
            loop.call_later(late, lands)
        else:
            lands()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                result = await answer
        except TimeoutError:
            raise ConnectionTimeout("no answer in time") from None
        if world.faults.happens("an answer of elasticsearch is lost"):
            raise ConnectionTimeout("no answer in time")
        await process.alive_and_awake()
        return result

    async def refresh(self, *, index: str) -> dict[str, Any]:
        await self._reach("refresh")
        return {"_shards": {"total": 1, "successful": 1, "failed": 0}}

    async def exists(self, *, index: str) -> bool:
        await self._reach("exists")
        return bool(index)

    def options(self, **_: Any) -> Elasticsearch:
        return self

    async def open_point_in_time(self, *, index: str, keep_alive: str) -> dict[str, str]:
        await self._reach("open_point_in_time")
        return {"id": f"{index} {keep_alive}"}

    async def close_point_in_time(self, *, id: str) -> None:
        await self._reach(f"close {id}")

    async def search(
        self, *, size: int, query: Mapping[str, Any] | None = None, search_after: Sequence[Any] | None = None, **_: Any
    ) -> dict[str, Any]:
        """Sorted by document and id; the highest version as the aggregation that the product asks for."""
        await self._reach("search")
        results = [
            (body["document_id"], id_, entry.version, body)
            for id_, entry in self._world.index.entries.items()
            if (body := entry.body) is not None and (query is None or _matches(query, body))
        ]
        results.sort(key=lambda hit: hit[:2])
        after = tuple(search_after) if search_after is not None else ("", "")
        hits = [
            {"_id": id_, "_version": version, "_source": body, "sort": [document, id_]}
            for document, id_, version, body in results
            if (document, id_) > after
        ]
        highest = max((version for _, _, version, _ in results), default=None)
        return {
            "hits": {"hits": hits[:size], "total": {"value": len(results)}},
            "aggregations": {"highest": {"value": highest}},
        }

    async def _reach(self, doing: str) -> None:
        try:
            await self._process.reach("elasticsearch", doing)
        except ConnectionError as error:
            raise UnreachableError("Elasticsearch is away") from error


def _matches(query: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    """The kinds of query that the product asks about entries, each of which names its document."""
    ((kind, what),) = query.items()
    match kind:
        case "term" | "terms":
            ((name, expected),) = what.items()
            return bool(body[name] == expected if kind == "term" else body[name] in expected)
        case "range":
            ((name, bounds),) = what.items()
            return body[name] > bounds.get("gt", "") and ("lte" not in bounds or body[name] <= bounds["lte"])
        case "bool":
            return any(_matches(part, body) for part in what["should"] if "bool" not in part)
    raise AssertionError(f"the simulation does not know this query: {query}")
