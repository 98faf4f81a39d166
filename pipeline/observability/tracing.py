"""Traces, by OpenTelemetry: the only place that knows its SDK, which is imported only where a collector is named.

Off (no ``OTEL_EXPORTER_OTLP_ENDPOINT``) every function here is a look at one variable. On, a span names what was done,
on which document, how large it was and how it ended; never content, a title, a question, a person or the text of an
exception, which may quote any of them. docs/traces.md lists the spans.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import structlog

from pipeline.installed import is_installed

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace import Link, SpanContext, Tracer
    from opentelemetry.trace import Span as Recorded

log = structlog.get_logger()

Attributes = Mapping[str, str | int | float | bool]
Kind = Literal["internal", "server", "client", "producer", "consumer"]

HEADER = "traceparent"
"""The W3C's, in Kafka as in HTTP. What vendors put into ``tracestate`` is not carried."""
FLUSH_SECONDS = 1.5
"""How long a stopping process waits for its last spans at most, even if the collector has an outage."""
COMPLAIN_SECONDS = 60.0
"""An outage of the collector is logged once a minute."""
MOST_LINKS = 128
"""OpenTelemetry's own limit."""
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_tracer: Tracer | None = None


class Span(AbstractContextManager["Span"]):
    """An operation; inside a ``with`` it is the current span and the parent of others. This base class is used when
    nothing is recorded: it does nothing."""

    traceparent: str | None = None
    """The value of the header."""
    trace_id: str | None = None
    recorded = False
    gathers = False
    """Messages that are sent meanwhile begin traces of their own, linked to this one: a page of a hundred documents
    does not belong to the trace of one of them."""

    def note(self, attributes: Attributes) -> None:
        """Add attributes."""

    def rename(self, name: str) -> None:
        """Change the name, once more is known."""

    def failed(self, error: BaseException | str) -> None:
        """Record a failure by its type: an exception's text may quote content."""

    def end(self) -> None:
        """End the operation. Repeats are harmless."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _Open(Span):
    def __init__(self, span: Recorded, *, gathers: bool) -> None:
        self._span = span
        self._token: Token[Span] | None = None
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"
        self.recorded = span.is_recording()
        self.gathers = gathers

    @property
    def context(self) -> SpanContext:
        return self._span.get_span_context()

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def failed(self, error: BaseException | str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", error if isinstance(error, str) else type(error).__name__)
        self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()

    def __enter__(self) -> Span:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.failed(error)
        elif error is not None:  # a cancellation is no failure
            self.note({"penstock.outcome": "cancelled"})
        if self._token is not None:
            try:
                _CURRENT.reset(self._token)
            except ValueError:  # a generator was closed by another task than it ran in, whose current span is not ours
                log.debug("span_closed_elsewhere")
        self.end()


OFF = Span()
_CURRENT: ContextVar[Span] = ContextVar("span", default=OFF)


def on() -> bool:
    return _tracer is not None


def current() -> Span:
    return _CURRENT.get()


def begin(
    name: str,
    kind: Kind = "internal",
    *,
    parent: Span | str | None = None,
    links: Iterable[Span | str] = (),
    attributes: Attributes | None = None,
    gathers: bool = False,
) -> Span:
    """A span that the caller ends, by a ``with`` or by ``end``. parent: a span, or the value of a ``traceparent``
    header; None: the current one; an invalid value (``""``) begins a trace. links: further causes of it."""
    if _tracer is None:
        return OFF
    from opentelemetry import trace
    from opentelemetry.context import Context

    above = _context(current() if parent is None else parent)
    under = Context() if above is None else trace.set_span_in_context(trace.NonRecordingSpan(above), Context())
    return _Open(
        _tracer.start_span(
            name, under, trace.SpanKind[kind.upper()], attributes, _links(links), record_exception=False
        ),
        gathers=gathers,
    )


def _context(of: Span | str) -> SpanContext | None:
    from opentelemetry.trace import SpanContext, TraceFlags

    if isinstance(of, _Open):
        return of.context
    match = _TRACEPARENT.fullmatch(of.strip()) if isinstance(of, str) else None
    if match is None or (match[1] == "00" and match[5]):
        return None
    return SpanContext(int(match[2], 16), int(match[3], 16), is_remote=True, trace_flags=TraceFlags(int(match[4], 16)))


def _links(of: Iterable[Span | str]) -> list[Link]:
    from opentelemetry.trace import Link

    return [Link(context) for cause in of if (context := _context(cause)) is not None][:MOST_LINKS]


# A process

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether OpenTelemetry's own variables ask for traces. Spans leave by OTLP over HTTP with protobuf; another
    protocol is refused with a line in the log."""
    exporters = environment.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or "otlp" not in exporters
    if is_off or not any(environment.get(name, "").strip() for name in _VARIABLES):
        return False
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        log.error("traces_off", reason="spans leave by http/protobuf only: see OTEL_EXPORTER_OTLP_PROTOCOL")
        return False
    if not is_installed("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk"):
        log.error("traces_off", reason="OpenTelemetry is not installed: pip install 'penstock[trace]'")
        return False
    return True


@contextmanager
def running(process: str) -> Iterator[None]:
    """Record traces inside, where ``is_enabled``. process: its name in traces (``penstock-PROCESS``, unless
    ``OTEL_SERVICE_NAME`` is set).

    On leaving, the last spans are sent for FLUSH_SECONDS at most. Nothing raises here, whatever a collector does.
    """
    made = _sending(process) if _tracer is None and is_enabled() else None
    if made is None:
        yield
        return
    processor, tracer = made
    try:
        with _current(tracer):
            yield
    finally:
        # In a thread that a process need not wait for: the library's own patience is half a minute.
        flushing = threading.Thread(target=processor.shutdown, name="flush spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)


def _sending(process: str) -> tuple[BatchSpanProcessor, Tracer] | None:
    """The processor that sends spans to the collector; None, and a line in the log, where the library refuses one of
    its variables."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    processor: BatchSpanProcessor | None = None
    try:
        processor = BatchSpanProcessor(_exporter())
        return processor, _made(process, processor)
    except Exception as error:  # noqa: BLE001 # the library's own, of many kinds
        log.error("traces_off", reason=f"{type(error).__name__}: OpenTelemetry refuses one of the variables OTEL_…")
        if processor is not None:
            processor.shutdown()  # type: ignore[no-untyped-call]
        return None


@contextmanager
def recording(process: str, processor: Any) -> Iterator[None]:
    """Give spans to the SDK's ``SpanProcessor`` inside."""
    with _current(_made(process, processor)):
        yield


@contextmanager
def _current(tracer: Tracer) -> Iterator[None]:
    global _tracer  # one a process, like the log
    _tracer = tracer
    try:
        yield
    finally:
        _tracer = None


def _made(process: str, processor: Any) -> Tracer:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    attributes = {} if named else {"service.name": f"penstock-{process}"}
    instance = {"service.instance.id": f"{socket.gethostname()}-{os.getpid()}"}
    # Not the library's global provider: what other libraries would trace by it (a search's body, a tool's arguments)
    # is content.
    provider = TracerProvider(resource=Resource.create({**attributes, **instance}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider.get_tracer("penstock")


def _exporter() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # every try, and what a server answered

    class Exporter(SpanExporter):
        """Spans that cannot be handed over are lost, and counted in one line a minute."""

        def __init__(self) -> None:
            self._inner = OTLPSpanExporter()
            self._lost = 0
            self._said = -COMPLAIN_SECONDS

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = self._inner.export(spans)
            except Exception as error:  # noqa: BLE001 # whatever a collector does: it is said, and disturbs nothing
                self._complain(len(spans), type(error).__name__)
                return SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS:
                self._complain(len(spans), "the collector did not take them")
            return result

        def _complain(self, spans: int, reason: str) -> None:
            self._lost += spans
            if time.monotonic() - self._said >= COMPLAIN_SECONDS:
                log.warning("spans_lost", spans=self._lost, reason=reason)
                self._lost, self._said = 0, time.monotonic()

        def shutdown(self) -> None:
            self._inner.shutdown()  # type: ignore[no-untyped-call]

    return Exporter()


class Call:
    """The measurements of a running call."""

    def __init__(self) -> None:
        self.sent: int | None = None
        """Bytes of the request's body; None: not known."""
        self.received: int | None = None
        """Bytes of the response's body; None: not known."""
        self.facts: dict[str, str | int | float | bool] = {}
        """Further attributes, by their names in OpenTelemetry's conventions where there is one."""


@contextmanager
def trace_call(service: str, name: str, attributes: Attributes, *, kind: Kind = "client") -> Iterator[Call]:
    """service: bounded ("embedding", "chat", "rerank", "elasticsearch", "source"). name: of the span, bounded too.
    attributes: known before. kind: "internal" for a model in this process, which is no call and leaves no line."""
    call = Call()
    span = begin(name, kind, attributes=attributes)
    began, outcome = perf_counter(), "ok"
    try:
        yield call
    except GeneratorExit:  # the reader of the response has left
        outcome = "cancelled"
        raise
    except Exception as error:
        outcome = type(error).__name__
        span.failed(error)
        raise
    except BaseException:
        outcome = "cancelled"
        raise
    finally:
        sizes = {"bytes_sent": call.sent, "bytes_received": call.received}
        known = {name: size for name, size in sizes.items() if size is not None}
        span.note({**call.facts, **{f"penstock.{name}": size for name, size in known.items()}})
        if outcome == "cancelled":
            span.note({"penstock.outcome": outcome})
        span.end()
        if kind == "client" and not span.recorded:
            facts = {_short(name): fact for name, fact in {**attributes, **call.facts}.items()}
            log.info(
                "external_call",
                service=service,
                outcome=outcome,
                ms=round(1000 * (perf_counter() - began), 1),
                **known,
                **facts,
            )


def _short(attribute: str) -> str:
    return attribute.removeprefix("penstock.").replace(".", "_")


def trace_embeddings(model: str, inputs: int, host: str | None = None) -> AbstractContextManager[Call]:
    """host: None: the model is in this process."""
    about = _model("embeddings", model, host) | {"penstock.inputs": inputs}
    return trace_call("embedding", f"embeddings {model}", about, kind="client" if host else "internal")


def trace_rerank(model: str, inputs: int, host: str) -> AbstractContextManager[Call]:
    about = _model("rerank", model, host) | {"penstock.inputs": inputs}
    return trace_call("rerank", f"rerank {model}".rstrip(), about)


def trace_chat(model: str, host: str) -> AbstractContextManager[Call]:
    return trace_call("chat", f"chat {model}", _model("chat", model, host))


def trace_bulk(index: str, operations: int) -> AbstractContextManager[Call]:
    about: Attributes = {
        "db.system.name": "elasticsearch",
        "db.operation.name": "bulk",
        "db.collection.name": index,
        "db.operation.batch.size": operations,
    }
    return trace_call("elasticsearch", f"bulk {index}", about)


def trace_source_request(name: str, method: str, host: str) -> AbstractContextManager[Call]:
    """name: the connector's."""
    about = {"penstock.source": name, "http.request.method": method, "server.address": host}
    return trace_call("source", f"{method} {name}", about)


def _model(operation: str, model: str, host: str | None) -> dict[str, str | int | float | bool]:
    named: dict[str, str | int | float | bool] = {"gen_ai.operation.name": operation, "gen_ai.request.model": model}
    return named | ({"server.address": host} if host else {})


def trace_statement(operation: str, table: str, rows: int) -> Span:
    """The span of a statement in Postgres. It leaves no line in our log, because the database has its own."""
    about: Attributes = {
        "db.system.name": "postgresql",
        "db.operation.name": operation,
        "db.collection.name": table,
        "db.operation.batch.size": rows,
    }
    return begin(f"{operation} {table}", "client", attributes=about)
