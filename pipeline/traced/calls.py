"""A call of a service outside: a span, or a log line where no span is kept, with its sizes, its time and its end.

Never what was sent or answered, and no address beyond the host: paths and queries name documents and people.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter

import structlog

from pipeline import tracing
from pipeline.tracing import Attributes, Kind, Span

log = structlog.get_logger()


class Call:
    """What is learned of a call while it lasts."""

    def __init__(self) -> None:
        self.sent: int | None = None
        """Bytes of the request's body, as far as is known …"""
        self.received: int | None = None
        """… and of the answer's."""
        self.facts: dict[str, str | int | float | bool] = {}
        """By the names of OpenTelemetry's conventions where they have one."""


@contextmanager
def call(service: str, name: str, attributes: Attributes, *, kind: Kind = "client") -> Iterator[Call]:
    """service: bounded ("embedding", "chat", "rerank", "elasticsearch", "source"). name: of the span, bounded too.
    attributes: known before. kind: "internal" for a model in this process, which is no call and leaves no line."""
    call = Call()
    span = tracing.begin(name, kind, attributes=attributes)
    began, outcome = perf_counter(), "ok"
    try:
        yield call
    except GeneratorExit:  # whoever read the answer has left
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
                "external_call", service=service, outcome=outcome, ms=round(1000 * (perf_counter() - began), 1),
                **known, **facts,
            )  # fmt: skip


def _short(attribute: str) -> str:
    return attribute.removeprefix("penstock.").replace(".", "_")


def embeddings(model: str, inputs: int, host: str | None = None) -> AbstractContextManager[Call]:
    """host: None: the model is in this process."""
    about = _model("embeddings", model, host) | {"penstock.inputs": inputs}
    return call("embedding", f"embeddings {model}", about, kind="client" if host else "internal")


def rerank(model: str, inputs: int, host: str) -> AbstractContextManager[Call]:
    about = _model("rerank", model, host) | {"penstock.inputs": inputs}
    return call("rerank", f"rerank {model}".rstrip(), about)


def chat(model: str, host: str) -> AbstractContextManager[Call]:
    return call("chat", f"chat {model}", _model("chat", model, host))


def bulk(index: str, operations: int) -> AbstractContextManager[Call]:
    about: Attributes = {
        "db.system.name": "elasticsearch", "db.operation.name": "bulk", "db.collection.name": index,
        "db.operation.batch.size": operations,
    }  # fmt: skip
    return call("elasticsearch", f"bulk {index}", about)


def source(name: str, method: str, host: str) -> AbstractContextManager[Call]:
    """name: the connector's."""
    about = {"penstock.source": name, "http.request.method": method, "server.address": host}
    return call("source", f"{method} {name}", about)


def _model(operation: str, model: str, host: str | None) -> dict[str, str | int | float | bool]:
    named: dict[str, str | int | float | bool] = {"gen_ai.operation.name": operation, "gen_ai.request.model": model}
    return named | ({"server.address": host} if host else {})


def statement(operation: str, table: str, rows: int) -> Span:
    """Of Postgres; a span alone, for the database has a log of its own."""
    about: Attributes = {
        "db.system.name": "postgresql", "db.operation.name": operation, "db.collection.name": table,
        "db.operation.batch.size": rows,
    }  # fmt: skip
    return tracing.begin(f"{operation} {table}", "client", attributes=about)
