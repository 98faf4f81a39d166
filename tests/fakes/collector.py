"""A collector of traces: OTLP over HTTP, protobuf, as https://opentelemetry.io/docs/specs/otlp/ says.

``async with FakeCollector() as collector: … collector.endpoint, collector.spans``. What is malformed is refused, and
counted under its status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.fakes.faults import Fake, Faults, Refusal, Stats

PROTOBUF = "application/x-protobuf"
KINDS = {
    Span.SPAN_KIND_INTERNAL: "internal",
    Span.SPAN_KIND_SERVER: "server",
    Span.SPAN_KIND_CLIENT: "client",
    Span.SPAN_KIND_PRODUCER: "producer",
    Span.SPAN_KIND_CONSUMER: "consumer",
}


@dataclass(frozen=True)
class CollectedSpan:
    """A span. Ids are hexadecimal, as headers write them."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    """``""``: it begins the trace."""
    links: tuple[tuple[str, str], ...]
    """(trace, span) each."""
    attributes: dict[str, Any]
    failed: bool

    def has(self, **attributes: object) -> bool:
        known = {name.replace(".", "_"): value for name, value in self.attributes.items()}
        return attributes.items() <= known.items()


class FakeCollector(Fake[Faults, Stats]):
    def __init__(self) -> None:
        super().__init__(["/v1/traces"], Faults(), Stats())
        self.spans: list[CollectedSpan] = []
        self.raw: list[bytes] = []
        """Every request's body, decompressed: what must not leave the house is looked for here."""

    @property
    def endpoint(self) -> str:
        """For ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
        return self.address

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != PROTOBUF:
            raise Refusal(415, "protobuf is taken here")
        body = await request.read()  # aiohttp undoes the compression
        message = ExportTraceServiceRequest()
        try:
            message.ParseFromString(body)
        except DecodeError as error:
            raise Refusal(400, "no ExportTraceServiceRequest") from error
        collected = [
            _collected(_values(resource.resource.attributes), span)
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        self.raw.append(body)
        self.spans += collected
        return web.Response(body=ExportTraceServiceResponse().SerializeToString(), content_type=PROTOBUF)

    # What a test asks

    def of(self, trace: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.trace == trace]

    def named(self, name: str, **attributes: object) -> list[CollectedSpan]:
        """attributes: by their names with ``_`` for ``.``."""
        return [span for span in self.spans if span.name == name and span.has(**attributes)]

    def above(self, span: CollectedSpan) -> list[CollectedSpan]:
        """Its parent, that one's parent, and so on to the one that began the trace."""
        by_id = {item.id: item for item in self.of(span.trace)}
        line: list[CollectedSpan] = []
        while span.parent in by_id:
            span = by_id[span.parent]
            line.append(span)
        return line


def _collected(resource: dict[str, Any], span: Span) -> CollectedSpan:
    if len(span.trace_id) != 16 or len(span.span_id) != 8 or len(span.parent_span_id) not in (0, 8):
        raise Refusal(400, "an id has another length")
    if not span.name or span.end_time_unix_nano < span.start_time_unix_nano or span.kind not in KINDS:
        raise Refusal(400, "a span without a name, a kind or an end")
    return CollectedSpan(
        resource["service.name"],
        span.name,
        KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        _values(span.attributes),
        span.status.code == Status.STATUS_CODE_ERROR,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    value: AnyValue = pair.value
    return getattr(value, value.WhichOneof("value") or "string_value")
