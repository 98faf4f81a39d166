"""The traces of Kafka's records: a message carries the trace context in a header, and its consequences continue it.

Each document has a trace of its own, from the source to both stores. A batch of many is one piece of work, in a trace
of its own, linked to each of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID, uuid5

import structlog

from pipeline.core.identity import DOCUMENTS
from pipeline.observability import tracing
from pipeline.observability.tracing import HEADER, OFF, Attributes, Span, begin
from topics.codec import Headers
from topics.messages import AnyMessage, DocumentMessage
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, INDEX_BACKFILL, INDEX_LIVE

OF_DOCUMENTS = tuple(topic.name for topic in (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, INDEX_LIVE, INDEX_BACKFILL))
"""Topics whose keys name a document. The keys of the other topics name people."""
_KEY = re.compile(r"([\w.:@ -]{1,200})/([\w.:@ -]{1,200})/.", re.DOTALL)
"""Tenant, source and something more. A record with another key is no document's, and its key is not quoted."""


class Received(Protocol):
    """``pipeline.stages.stage.Incoming``."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Headers: ...


@dataclass(slots=True)
class _Batch:
    """The spans of a batch's records, in order, by their keys: several events of one document are folded."""

    by_key: dict[str, list[Span]] = field(default_factory=dict)
    by_document: dict[UUID, list[Span]] = field(default_factory=dict)


_NONE = _Batch()
_BATCH: ContextVar[_Batch] = ContextVar("batch", default=_NONE)


@contextmanager
def batch(stage: str, records: Sequence[Received], *, tries: int) -> Iterator[Span]:
    """A stage's work on these records as the current span. The span of a single record is part of that record's trace.
    tries: the number of attempts that failed before."""
    with structlog.contextvars.bound_contextvars(**_shared(records)):
        if not tracing.on():
            yield OFF
            return
        made = _Batch()
        about: Attributes = {"penstock.stage": stage, **({"penstock.tries": tries} if tries else {})}
        many = OFF
        if len(records) > 1:
            many = begin(
                f"process {stage}",
                "consumer",
                parent="",
                links=[_header(r) for r in records],
                gathers=True,
                attributes={
                    **about,
                    "messaging.system": "kafka",
                    "messaging.operation.type": "process",
                    "messaging.batch.message_count": len(records),
                },
            )
        spans = [_one(record, about, many) for record in records]
        for record, span in zip(records, spans, strict=True):
            key, document = _key(record), _document(record)
            made.by_key.setdefault(key, []).append(span)
            if document is not None:
                made.by_document.setdefault(document, []).append(span)
        token = _BATCH.set(made)
        try:
            with many if many is not OFF else spans[0] as whole:
                yield _Whole(whole, spans)
        finally:
            _BATCH.reset(token)
            for span in spans:
                span.end()


class _Whole(Span):
    """A failure of a batch is one of each of its records."""

    def __init__(self, whole: Span, spans: Sequence[Span]) -> None:
        self._all = [whole, *(span for span in spans if span is not whole)]

    def failed(self, error: BaseException | str) -> None:
        for span in self._all:
            span.failed(error)

    def note(self, attributes: Attributes) -> None:
        for span in self._all:
            span.note(attributes)


def _one(record: Received, about: Attributes, many: Span) -> Span:
    attributes = {
        **about,
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": record.topic,
        "messaging.destination.partition.id": str(record.partition),
        "messaging.kafka.offset": record.offset,
        "messaging.message.body.size": len(record.value or b""),
        **_names(record),
    }
    return begin(
        f"process {record.topic}",
        "consumer",
        parent=_header(record),
        links=[many] if many is not OFF else (),
        attributes=attributes,
    )


def of(record: Received) -> Span | str:
    """The parent of a record's consequences: the span that works on it, else the context in its header."""
    spans = _BATCH.get().by_key.get(_key(record))
    return spans[-1] if spans else _header(record)


def note(document: UUID, attributes: Attributes) -> None:
    """Add attributes to a document's own span in this batch."""
    for span in _BATCH.get().by_document.get(document, ()):
        span.note(attributes)


class Sending:
    """A message on its way. See ``pipeline.kafka.producer.Sending``."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        return self._span.traceparent

    def ended(self, size: int, error: BaseException | None) -> None:
        self._span.note({"messaging.message.body.size": size})
        if error is not None:
            self._span.failed(error)
        self._span.end()


def sending(topic: str, message: AnyMessage) -> Sending | None:
    """The span of sending one message: it continues the trace of the record that the message follows from; where
    several were folded, the last one's, linked to the others'."""
    if not tracing.on():
        return None
    attributes: dict[str, str] = {
        "messaging.system": "kafka",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
        "penstock.event": message.kind,
        "penstock.tenant": message.tenant,
        "penstock.source": message.source,
    }
    if isinstance(message, DocumentMessage):
        attributes["penstock.document.id"] = str(uuid5(DOCUMENTS, message.key))
        attributes |= {"penstock.generation": str(g)} if (g := getattr(message, "generation", None)) else {}
    above = tracing.current()
    led = _BATCH.get().by_key.get(message.key) if isinstance(message, DocumentMessage) else None
    parent, links = (led[-1], led[:-1]) if led else ("", [above]) if above.gathers else (above, [])
    return Sending(begin(f"send {topic}", "producer", parent=parent, links=links, attributes=attributes))


def in_log(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that adds the current trace id to a line; to a line about a document, that document's."""
    if tracing.on():
        spans = _spans_of(line.get("document")) or [tracing.current()]
        if (trace := spans[-1].trace_id) is not None:
            line.setdefault("trace_id", trace)
    return line


def _spans_of(document: object) -> list[Span] | None:
    by_document = _BATCH.get().by_document
    try:
        return by_document.get(UUID(document)) if by_document and isinstance(document, str) else None
    except ValueError:
        return None


def _header(record: Received) -> str:
    return next((value.decode("latin-1") for name, value in record.headers if name == HEADER and value), "")


def _key(record: Received) -> str:
    return (record.key or b"").decode("utf-8", "replace")


def _is_of_document(record: Received) -> bool:
    return record.topic.endswith(OF_DOCUMENTS) and _KEY.match(_key(record)) is not None


def _document(record: Received) -> UUID | None:
    return uuid5(DOCUMENTS, _key(record)) if _is_of_document(record) else None


def _names(record: Received) -> Mapping[str, str]:
    """Attributes that name the record's document, tenant and source; empty where the key names no document."""
    key = _KEY.match(_key(record)) if _is_of_document(record) else None
    if key is None:
        return {}
    document = str(uuid5(DOCUMENTS, _key(record)))
    return {"penstock.tenant": key[1], "penstock.source": key[2], "penstock.document.id": document}


def _shared(records: Sequence[Received]) -> dict[str, str]:
    """The fields of every log line of a batch: the tenant that all records share, and the document of a single one."""
    first = _names(records[0])
    if not first:
        return {}
    if len(records) == 1:
        return {"tenant": first["penstock.tenant"], "document": first["penstock.document.id"]}
    beginning = f"{first['penstock.tenant']}/".encode()
    return {"tenant": first["penstock.tenant"]} if all((r.key or b"").startswith(beginning) for r in records) else {}
