"""The keyword store: chunk entries in Elasticsearch, ordered by the ledger's seq."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal
from uuid import UUID

from elasticsearch import ApiError, AsyncElasticsearch, NotFoundError

from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.core.retry import backoff, classify_es_item
from pipeline.observability.tracing import trace_bulk
from pipeline.stores.elasticsearch import error_type, translated
from pipeline.stores.refresh import Refresher

MAX_REQUEST_BYTES = 1_000_000
"""As fast as 10 MiB (measured: noise), within what proxies take by default, and not enough to hold up the event loop
(aiohttp warns of bodies above 2**20 bytes, which -W error turns into a failed connection)."""
MAX_REQUEST_OPERATIONS = 1_000
PATIENT_AT_ONCE = 3
"""Concurrent backfill requests of one process. The server handles its queue in order: behind a megabyte from each of
eight lanes the first live edits took five to six seconds, behind three of them three and a half (docs/performance.md).
Three keep two processors busy."""
RETRY_SECONDS = 20.0
"""How long one ``apply`` waits in all for an overloaded server before it gives the work back."""
BACKOFF_BASE, BACKOFF_CAP = 0.5, 8.0
PRIMARY_WAIT = "10s"
"""How long the server waits for a shard that is moving; its default, a minute, is longer than our request timeout."""
PAGE = 1_000


@dataclass(frozen=True, slots=True)
class Write:
    """One operation. ``version`` is the seq of the ledger that asks for it; no ``body``: delete."""

    index: str
    id: UUID
    version: int
    body: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one Write: done, lost to a newer version, or impossible."""

    result: Literal["written", "stale", "refused"]
    newer_version: int | None = None
    """The version that a stale Write lost to, where the server named it."""
    reason: str = ""
    """Why it was refused: the server's error type and the field, never its text (it quotes content)."""
    removed: bool = field(default=False, compare=False)
    """A delete removed an entry."""
    unsure: bool = field(default=False, compare=False)
    """An earlier request with the same operation had no certain response, and may still arrive."""


@dataclass(frozen=True, slots=True)
class _Operation:
    position: int
    write: Write
    lines: bytes


class Keywords:
    """Law: after ``apply``, each entry is as the Write of the highest version says. Repeats are harmless.

    A delete's version is remembered for ``index.gc_deletes`` only: a caller that may be slower than that has to compare
    with the ledger again after writing, and ``pipeline.stages.keywords`` undoes a write that may arrive later.
    """

    def __init__(self, es: AsyncElasticsearch, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._es = es
        self._retry_seconds = retry_seconds
        self._refreshers: dict[str, Refresher] = {}
        self._patient = asyncio.Semaphore(PATIENT_AT_ONCE)

    async def apply(
        self, writes: Sequence[Write], *, patient: bool = False, send_before: float = math.inf
    ) -> list[Outcome]:
        """Write and delete, in as few requests as fit. Returns one Outcome a Write, in order. patient: at most
        PATIENT_AT_ONCE such requests run at a time. send_before: on time.monotonic(); no request is sent after it.

        Raises Retryable when the server is away or stays overloaded: the outcome of all writes is then unknown, and
        sending all of them again is right. Raises Misconfigured when an index is missing or access is refused.
        """
        outcomes: dict[int, Outcome] = {}
        patience = _Patience(self._retry_seconds, send_before)
        places = self._patient if patient else nullcontext()
        for operations in _requests(_operation(n, write) for n, write in enumerate(writes)):
            await self._send(operations, outcomes, patience, places)
        return [outcomes[n] for n in range(len(writes))]

    async def _send(
        self,
        operations: list[_Operation],
        outcomes: dict[int, Outcome],
        patience: _Patience,
        places: AbstractAsyncContextManager[None],
    ) -> None:
        """Send one request, and again the items that an overloaded server put off. places: a running request holds
        one; a request that waits for its next try holds none."""
        unsure = False
        while operations:
            try:
                async with places:
                    patience.require_time()
                    answers = await self._bulk(operations)
            except _TooLarge:
                if len(operations) == 1:
                    outcomes[operations[0].position] = Outcome("refused", reason="request_too_large")
                    return
                half = len(operations) // 2
                await self._send(operations[:half], outcomes, patience, places)
                await self._send(operations[half:], outcomes, patience, places)
                return
            except Retryable as error:
                if not isinstance(error.__cause__, ApiError):
                    raise  # no answer: whether it was done is unknown
                unsure = unsure or not isinstance(error, Deferred)  # a 429 was not done; a 503 or 504 may have been
                await patience.wait(error)
                continue
            put_off: list[_Operation] = []
            for operation, answer in zip(operations, answers, strict=True):
                outcome = _outcome(operation.write, answer)
                if outcome is None:
                    put_off.append(operation)
                else:
                    outcomes[operation.position] = replace(outcome, unsure=True) if unsure else outcome
            operations = put_off
            if operations:
                await patience.wait(
                    Deferred(
                        f"write to {operations[0].write.index}: Elasticsearch puts off {len(operations)} writes",
                        service="elasticsearch",
                    )
                )

    async def _bulk(self, operations: Sequence[_Operation]) -> list[Mapping[str, Any]]:
        """The answer to each operation, in order."""
        index = operations[0].write.index
        with translated(f"write to {index}"), trace_bulk(index, len(operations)) as measured:
            measured.sent = sum(len(operation.lines) + 1 for operation in operations)
            try:
                response = await self._es.bulk(
                    operations=[operation.lines for operation in operations],  # type: ignore[misc]  # bytes go as is
                    include_source_on_error=False,
                    timeout=PRIMARY_WAIT,
                )
            except ApiError as error:
                if error.status_code == 413:
                    raise _TooLarge from error
                raise
        return [next(iter(item.values())) for item in response["items"]]

    async def refreshed(self, index: str, *, patient: bool = False) -> None:
        """Return once a refresh that started after this call has finished: searches then see what was applied before.

        Callers share refreshes: at most two a second on average, and one where all callers are patient and others
        still write. Raises Retryable or Misconfigured.
        """
        await self._refresher(index).refreshed(patient=patient)

    def writing(self, index: str) -> AbstractContextManager[None]:
        """Around ``apply`` and ``refreshed``: patient callers wait for the others while any of them still writes."""
        return self._refresher(index).writing()

    def _refresher(self, index: str) -> Refresher:
        if (refresher := self._refreshers.get(index)) is None:
            refresher = self._refreshers[index] = Refresher(self._es, index)
        return refresher

    async def get(self, index: str, id: UUID) -> tuple[int, dict[str, Any]] | None:
        """An entry's version and body as they stand now, refreshed or not."""
        with translated(f"read {index}"):
            try:
                entry = await self._es.get(index=index, id=str(id))
            except NotFoundError as error:
                if error_type(error.body) == "index_not_found_exception":
                    raise
                return None
        return entry["_version"], entry["_source"]

    async def versions(self, index: str, document_id: UUID) -> dict[UUID, int]:
        """Every entry of a document that a search finds → its version. One consistent view, however many there are."""
        query = {"term": {"document_id": str(document_id)}}
        with translated(f"search {index}"):
            first = await self._es.search(
                index=index,
                query=query,
                source=False,
                version=True,
                size=PAGE,
                track_total_hits=PAGE + 1,
                allow_partial_search_results=False,
            )
            if first["hits"]["total"]["value"] <= PAGE:
                return _versions(first["hits"]["hits"])
            pit: str = (await self._es.open_point_in_time(index=index, keep_alive="1m"))["id"]
            try:
                return await self._page(query, pit)
            finally:
                await self._es.close_point_in_time(id=pit)

    async def _page(self, query: Mapping[str, Any], pit: str) -> dict[UUID, int]:
        versions: dict[UUID, int] = {}
        after: list[Any] | None = None
        while True:
            page = await self._es.search(
                query=query,
                pit={"id": pit, "keep_alive": "1m"},
                source=False,
                version=True,
                size=PAGE,
                sort=[{"_shard_doc": "asc"}],
                search_after=after,
                track_total_hits=False,
                allow_partial_search_results=False,
            )
            hits = page["hits"]["hits"]
            versions |= _versions(hits)
            if len(hits) < PAGE:
                return versions
            after = hits[-1]["sort"]

    async def count(self, index: str) -> int:
        """Entries that a search finds."""
        with translated(f"count {index}"):
            return int((await self._es.count(index=index))["count"])

    async def highest_version(self, index: str) -> int:
        """The highest version of any entry that a search finds, 0 when empty: the ledger's seq must be above it."""
        with translated(f"search {index}"):
            answer = await self._es.search(
                index=index,
                size=0,
                aggs={"highest": {"max": {"field": "_version"}}},
                allow_partial_search_results=False,
            )
        return int(answer["aggregations"]["highest"]["value"] or 0)

    async def aclose(self) -> None:
        for refresher in self._refreshers.values():
            await refresher.aclose()
        await self._es.close()


class _TooLarge(Exception):
    """The server answered 413: the request has to be divided."""


class _Patience:
    """The waiting that one ``apply`` may do, shared by its requests."""

    def __init__(self, seconds: float, send_before: float) -> None:
        self._left = seconds
        self._send_before = send_before
        self._attempt = 0

    def require_time(self) -> None:
        """Raise Retryable when it is too late to send."""
        if monotonic() > self._send_before:
            raise Retryable("write to Elasticsearch: the claim is too old, it is made again", service="elasticsearch")

    async def wait(self, why: Retryable) -> None:
        """Sleep before the next try; raise ``why`` when the time is used up."""
        delay = backoff(
            self._attempt,
            base=BACKOFF_BASE,
            cap=BACKOFF_CAP,
            retry_after=why.retry_after,
            random=random.random(),  # noqa: S311  (jitter)
        )
        if delay > self._left:
            raise why
        self._attempt += 1
        self._left -= delay
        await asyncio.sleep(delay)


def _operation(position: int, write: Write) -> _Operation:
    action = {
        "_index": write.index,
        "_id": str(write.id),
        "version": write.version,
        # "gte": a repeat at the same seq passes; an older seq loses.
        "version_type": "external_gte",
    }
    lines = [{"delete": action}] if write.body is None else [{"index": action}, write.body]
    text = "\n".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines)
    return _Operation(position, write, text.encode())


def _requests(operations: Iterable[_Operation]) -> Iterator[list[_Operation]]:
    """Cut into requests of at most MAX_REQUEST_BYTES and MAX_REQUEST_OPERATIONS; a larger single one goes alone."""
    request: list[_Operation] = []
    size = 0
    for operation in operations:
        length = len(operation.lines) + 1
        if request and (size + length > MAX_REQUEST_BYTES or len(request) == MAX_REQUEST_OPERATIONS):
            yield request
            request, size = [], 0
        request.append(operation)
        size += length
    if request:
        yield request


_UNUSABLE = ("index_not_found_exception", "index_closed_exception")
_CURRENT = re.compile(r"current version \[(\d+)\]")
_FIELD = re.compile(r"(?:field|introduction of) \[([\w.]{1,100})\]")


def _outcome(write: Write, answer: Mapping[str, Any]) -> Outcome | None:
    """The outcome of one item of a bulk response; None when the item must be sent again. Raises Misconfigured."""
    status, kind = int(answer["status"]), error_type(answer)
    if kind in _UNUSABLE:  # whatever its status: a delete's 404 is a success only where the index is there
        # Of this index alone, so no service is named: another one that is being built goes on.
        raise Misconfigured(f"write to {write.index}: {kind}; run `penstock rebuild keywords`")
    reason = str(answer["error"].get("reason", "")) if kind else ""
    match classify_es_item(status, "index" if write.body is not None else "delete"):
        case "ok":
            return Outcome("written", removed=answer.get("result") == "deleted")
        case "stale":
            current = _CURRENT.search(reason)
            return Outcome("stale", newer_version=int(current[1]) if current else None)
        case "retry":
            return None
        case "poison":
            field = _FIELD.search(reason)
            return Outcome("refused", reason=f"{kind}: {field[1]}" if field else kind)
        case "misconfigured":
            raise Misconfigured(
                f"write to {write.index}: Elasticsearch refuses ({status} {kind}): is the index blocked? Else check the"
                " privileges of PENSTOCK_ELASTICSEARCH_API_KEY or _USERNAME",
                service="elasticsearch",
            )


def _versions(hits: Sequence[Mapping[str, Any]]) -> dict[UUID, int]:
    return {UUID(hit["_id"]): hit["_version"] for hit in hits}
