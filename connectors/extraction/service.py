"""`penstock extract serve`: reads files for connectors, over HTTP. It has no secret, calls nothing and stores nothing.

``POST /v1/extract?name=…&media_type=…&ocr=…`` takes a file's bytes and responds in the format of ``answer``: with the
text, or the reason why there is none. ``/livez``, ``/readyz``, ``/status`` and ``/metrics`` are the same as in other
processes."""

from __future__ import annotations

import asyncio
import errno
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from io import FileIO
from time import perf_counter
from typing import Any, NamedTuple

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from connectors.extraction import answer
from connectors.extraction.remote import LATER, MAX_NAME_CHARACTERS, NOW, PATH
from connectors.extraction.result import Extracted, Unreadable
from connectors.extraction.sandbox import AnyJob, Job, read_or_job
from connectors.extraction.settings import WAIT_SECONDS, ExtractionSettings, confinement
from connectors.extraction.turns import Turns, reader
from pipeline.core.errors import Misconfigured
from pipeline.observability.labels import counter
from pipeline.observability.metrics import PortMetrics
from pipeline.runtime.http_server import KeyedLimit, address_key, served
from pipeline.runtime.settings import PortSettings

log = structlog.get_logger()

BYTES_PER_SECOND = 2**20
"""A client that sends or receives more slowly is disconnected, after ``body_seconds``."""
BUSY_RETRY_SECONDS = 2
"""The Retry-After of a response that says that the service is busy."""
SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)


class OutcomeLabels(NamedTuple):
    outcome: str


class ServiceMetrics:
    """The service's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.ports = PortMetrics(r, "penstock_extraction")
        self.requests = counter(
            "penstock_extraction_requests",
            "Files received, by outcome: read, unreadable, busy (refused), slow (the file did not arrive, or its text "
            "was not fetched, in time), left (the client disconnected), refused (the request is not a connector's), "
            "failed",
            OutcomeLabels,
            registry=r,
        )
        self.seconds = Histogram(
            "penstock_extraction_seconds", "Time to read a file", buckets=SECONDS_BUCKETS, registry=r
        )
        self.accepted = Gauge(
            "penstock_extraction_pending_requests", "Files that are arriving, waiting or being read", registry=r
        )


class _RequestFailed(Exception):
    """A request ends without a text."""

    def __init__(self, outcome: str, status: int | None, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.status = status
        """None: the client is gone, so no response is sent."""


class _Reading:
    """Reads one file, in a thread."""

    def __init__(
        self, file: FileIO, name: str, media_type: str | None, settings: ExtractionSettings, *, recognises: bool
    ) -> None:
        """recognises: whether OCR recognises the text of a scanned PDF first."""
        self._what = file, name, media_type, settings
        self._recognises = recognises
        self._loop = asyncio.get_running_loop()
        self._job: AnyJob | None = None
        self._is_killed = False
        self.has_begun = asyncio.Event()
        self.seconds = 0.0

    def run(self) -> Extracted:
        """Raises Unreadable."""
        self._loop.call_soon_threadsafe(self.has_begun.set)
        began = perf_counter()
        try:
            job = read_or_job(*self._what)
            if isinstance(job, Extracted):
                return job
            if isinstance(job, Job):
                job.recognises = self._recognises
            self._job = job
            if self._is_killed:
                job.kill()
            return job.run()
        finally:
            self.seconds = perf_counter() - began

    def kill(self) -> None:
        self._is_killed = True
        if self._job is not None:
            self._job.kill()


class Extraction:
    """An ASGI application for one path. At most ``at_once`` files are read at a time, ``ocr_at_once`` more by OCR, and
    ``waiting`` more accepted.

    Law: clients of several addresses take turns. Each is a process of connectors, whose files may be made to take their
    whole time limit: they would keep those of all other processes, and the revocations behind them, from being read."""

    def __init__(self, settings: ExtractionSettings, metrics: ServiceMetrics) -> None:
        self._settings = settings.model_copy(update={"url": None})
        self._metrics = metrics
        self._turns = Turns(settings.at_once)
        self._ocr = Turns(settings.ocr_at_once)
        total = settings.at_once + settings.waiting + (settings.ocr_at_once if settings.ocr else 0)
        self._places = KeyedLimit(total, total - settings.waiting // 2)

    def close(self) -> None:
        self._turns.close()
        self._ocr.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, outcome = Request(scope, receive), "failed"
        try:
            outcome = await self._respond(request, send)
        except _RequestFailed as failure:
            outcome = failure.outcome
            if failure.status is not None:
                headers = {"Connection": "close"} | (
                    {"Retry-After": str(BUSY_RETRY_SECONDS)} if outcome == "busy" else {}
                )
                await PlainTextResponse(f"{failure}\n", failure.status, headers)(scope, receive, send)
        except ClientDisconnect:
            outcome = "left"
        except asyncio.CancelledError:  # the service stops
            outcome = "left"
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()
            self._metrics.accepted.set(self._places.taken)

    async def _respond(self, request: Request, send: Send) -> str:
        # A page in a browser sends this only after a preflight request (CORS), which is never answered with consent.
        if request.headers.get("content-type", "") != "application/octet-stream":
            raise _RequestFailed("refused", 415, "send a file's bytes as application/octet-stream")
        address = address_key(request.client.host if request.client else "")
        if self._places.lacks(address) is not None:
            raise _RequestFailed("busy", 503, "busy: retry shortly")
        self._places.take(address)
        reader.set(address)  # only in this request's task
        self._metrics.accepted.set(self._places.taken)
        try:
            with tempfile.TemporaryFile(buffering=0) as file:
                result = await self._extract(request, file)
            response = Response(answer.encode_result(result), media_type="application/octet-stream")
            try:
                async with asyncio.timeout(self._settings.body_seconds):
                    await response(request.scope, request.receive, send)
            except TimeoutError as error:
                raise _RequestFailed("slow", None, "the response was not fetched in time") from error
        finally:
            self._places.give(address)
        return "unreadable" if isinstance(result, Unreadable) else "read"

    async def _extract(self, request: Request, file: FileIO) -> Extracted | Unreadable:
        if not await self._receive(request, file):
            most = self._settings.max_file_bytes
            return Unreadable("too_large", f"is larger than {most:,} bytes, the limit of the extraction service")
        try:
            return await self._read(request, file)
        except Unreadable as error:
            return error

    async def _receive(self, request: Request, file: FileIO) -> bool:
        """Receive the file. Return False if it is too large: the rest of its body is discarded, because a client that
        is disconnected does not read the response. Raises _RequestFailed and ClientDisconnect."""
        most, size = self._settings.max_file_bytes, 0
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                async for piece in request.stream():
                    size += len(piece)
                    if size <= most and await asyncio.to_thread(file.write, piece) != len(piece):
                        raise OSError(errno.ENOSPC, "the disk is full")
        except TimeoutError as error:
            seconds = self._settings.body_seconds
            raise _RequestFailed("slow", 408, f"the file did not arrive within {seconds:g} s") from error
        return size <= most

    async def _read(self, request: Request, file: FileIO) -> Extracted:
        """Read the file, with OCR if it needs it and the client does not ask for that later. Raises Unreadable,
        _RequestFailed and ClientDisconnect."""
        ocr = request.query_params.get("ocr") if self._settings.ocr else LATER
        if ocr != NOW:
            try:
                return await self._read_in_turn(request, file, self._turns, recognises=False)
            except Unreadable as error:
                if error.code != "needs_ocr" or ocr == LATER:
                    raise
        return await self._read_in_turn(request, file, self._ocr, recognises=True)

    async def _read_in_turn(self, request: Request, file: FileIO, turns: Turns, *, recognises: bool) -> Extracted:
        """Read the file when it is the client's turn, or stop when the client disconnects. Raises Unreadable,
        _RequestFailed and ClientDisconnect."""
        name = request.query_params.get("name", "")[-MAX_NAME_CHARACTERS:]
        media_type = request.query_params.get("media_type", "")[:MAX_NAME_CHARACTERS] or None
        file.seek(0)
        reading = _Reading(file, name, media_type, self._settings, recognises=recognises)
        future: Future[Extracted] = turns.submit(reading.run)
        result = asyncio.wrap_future(future)
        turn = asyncio.create_task(reading.has_begun.wait())
        leaving = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({turn, leaving}, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not (turn.done() or leaving.done()) and future.cancel():
                raise _RequestFailed("busy", 503, "busy: retry shortly")
            either: set[asyncio.Future[Any]] = {result, leaving}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise ClientDisconnect
            return await result
        finally:
            turn.cancel()
            leaving.cancel()
            if not future.cancel():  # its thread is free only when its processes have ended
                reading.kill()
                await asyncio.gather(result, return_exceptions=True)
                self._metrics.seconds.observe(reading.seconds)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def app(settings: ExtractionSettings, metrics: ServiceMetrics) -> Starlette:
    extraction = Extraction(settings, metrics)

    async def healthy(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def status(_: Request) -> Response:
        return JSONResponse(confinement())

    async def metrics_page(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        extraction.close()

    return Starlette(
        routes=[
            Route(PATH, extraction, methods=["POST"]),
            Route("/livez", healthy),
            Route("/readyz", healthy),
            Route("/status", status),
            Route("/metrics", metrics_page),
        ],
        lifespan=lifespan,
    )


@asynccontextmanager
async def serving(settings: ExtractionSettings) -> AsyncIterator[str]:
    """Run the service and yield its address. Raises Misconfigured."""
    host, port, metrics = settings.host, settings.port, ServiceMetrics()
    # Built without reading the environment: the service reads no secrets. Only ``_receive`` limits the time for a body.
    bounds = PortSettings.model_construct(body_seconds=settings.body_seconds, bytes_per_second=BYTES_PER_SECOND)
    try:
        async with served(
            app(settings, metrics), host, port, bounds=bounds, metrics=metrics.ports, name="extraction"
        ) as address:
            yield address
    except OSError as error:
        raise Misconfigured(
            f"{host}:{port} cannot be listened on ({error.strerror or error}): set PENSTOCK_EXTRACTION_HOST and"
            " PENSTOCK_EXTRACTION_PORT (0: any)"
        ) from error


async def run(settings: ExtractionSettings, on_ready: Callable[[str], None]) -> None:
    """Run the service until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(settings) as address:
        on_ready(address)
        log.info("service_started", address=address, extraction=confinement(), at_once=settings.at_once)
        await stop.wait()
        log.info("service_stopping")
