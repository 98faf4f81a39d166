"""The traces of Kafka's records: the context goes with a message in its header, and on from what it led to.

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
"""Topics whose keys name a document. Those of the others name people."""
_KEY = re.compile(r"([\w.:@ -]{1,200})/([\w.:@ -]{1,200})/.", re.DOTALL)
"""Tenant, source and something more. What has another key is no document's record, and is not quoted."""


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
    """A stage's work on these records, current inside. Of one record it is part of that record's trace. tries: that
    failed before."""
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
    """The span that works on a record, or what its header says: the parent of what becomes of it."""
    spans = _BATCH.get().by_key.get(_key(record))
    return spans[-1] if spans else _header(record)


def note(document: UUID, attributes: Attributes) -> None:
    """Say in a document's own trace what became of it in this batch."""
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
    """Of one message: it continues the trace of the record that it follows from; where several were folded, the last
    one's, linked to the others'."""
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
    """structlog's: a line that is written while something is done names its trace; one about a document, that one's."""
    if tracing.on():
        spans = _of_named(line.get("document")) or [tracing.current()]
        if (trace := spans[-1].trace_id) is not None:
            line.setdefault("trace_id", trace)
    return line


def _of_named(document: object) -> list[Span] | None:
    found = _BATCH.get().by_document
    try:
        return found.get(UUID(document)) if found and isinstance(document, str) else None
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
    """Which document's it is, and whose; nothing where the key names none."""
    found = _KEY.match(_key(record)) if _is_of_document(record) else None
    if found is None:
        return {}
    document = str(uuid5(DOCUMENTS, _key(record)))
    return {"penstock.tenant": found[1], "penstock.source": found[2], "penstock.document.id": document}


def _shared(records: Sequence[Received]) -> dict[str, str]:
    """What every log line of a batch may say: the tenant that all of its records name, and the document of one."""
    first = _names(records[0])
    if not first:
        return {}
    if len(records) == 1:
        return {"tenant": first["penstock.tenant"], "document": first["penstock.document.id"]}
    beginning = f"{first['penstock.tenant']}/".encode()
    return {"tenant": first["penstock.tenant"]} if all((r.key or b"").startswith(beginning) for r in records) else {}
