"""Parts of a trace: spans and their parents, a batch's records, requests and calls; and disabled tracing does
nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid5

import httpx
import pytest
import structlog
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import LogCapture, capture_logs

from pipeline.core.identity import DOCUMENTS, document_id
from pipeline.observability import traced_records as records
from pipeline.observability import tracing
from pipeline.observability.traced_http import Traced
from pipeline.stages.stage import Incoming
from topics.messages import DocumentUpserted, IdentityChanged, IndexHint
from topics.registry import DOCUMENTS_LIVE, IDENTITIES, INDEX_LIVE

PROJECT = Path(__file__).parents[4]
ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = ABOVE[:-1] + "0"
AT = datetime(2026, 1, 2, tzinfo=UTC)

Made = Callable[[], list[ReadableSpan]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Spans that are over, in the order of their ends."""
    monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
    kept = InMemorySpanExporter()
    with tracing.recording("test", SimpleSpanProcessor(kept)):
        yield lambda: list(kept.get_finished_spans())


def of(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    [matching] = [span for span in spans if span.name == name]
    return matching


def ids(traceparent: str | None) -> tuple[int, int]:
    _, trace, span, _ = (traceparent or "").split("-")
    return int(trace, 16), int(span, 16)


def own(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def record(key: str, traceparent: str = "", *, topic: str = "x.documents.live.v1", offset: int = 0) -> Incoming:
    headers = [("ce_id", b"1"), *([("traceparent", traceparent.encode())] if traceparent else [])]
    return Incoming(topic, 3, offset, key.encode(), b"12345", headers, "live")


def hint(external_id: str) -> IndexHint:
    id_ = str(document_id("acme", "wiki", external_id))
    return IndexHint(
        tenant="acme", source="wiki", external_id=external_id, observed_at=AT, document_id=id_, generation="g1"
    )


# Off


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


EVERYTHING = "import connectors.worker, pipeline.stream.worker, query.http.serve"
TRACES = """
import sys
from pipeline.observability import tracing
with tracing.running("detect"):
    with tracing.begin("a") as span, tracing.trace_bulk("chunks", 3):
        span.note({"b": 1})
    assert span is tracing.OFF and span.traceparent is None
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("imports", "environment"),
    [
        (EVERYTHING, {}),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}),
    ],
    ids=["nothing set", "disabled", "another way out"],
)
def test_without_tracing_the_opentelemetry_sdk_is_not_imported(imports: str, environment: dict[str, str]) -> None:
    ended = run(f"{imports}\n{TRACES}", **environment)
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["[]"]), ended.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_tracing_is_enabled_where_the_standard_variables_name_a_collector(
    environment: dict[str, str], *, expected: bool
) -> None:
    assert tracing.is_enabled(environment) is expected


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_extra_for_traces_a_process_runs_and_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "is_installed", lambda *modules: missing not in modules)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    with capture_logs() as logs, tracing.running("query"), tracing.begin("search") as span:
        assert not span.recorded
    assert [(line["event"], "penstock[trace]" in line["reason"]) for line in logs] == [("traces_off", True)]


@pytest.mark.parametrize(
    "variable",
    ["OTEL_BSP_SCHEDULE_DELAY=0", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=4096", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=x"],
)
def test_an_invalid_opentelemetry_variable_disables_tracing_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(*variable.split("="))
    with capture_logs() as logs, tracing.running("test"):
        assert not tracing.on()
    assert [(line["event"], line["log_level"], line["reason"].partition(":")[0]) for line in logs] == [
        ("traces_off", "error", "ValueError")
    ]


def test_without_tracing_messages_carry_no_trace_header() -> None:
    assert records.sending(INDEX_LIVE.name, hint("a.md")) is None


# Spans


def test_a_span_continues_the_trace_of_a_traceparent_header(made: Made) -> None:
    with tracing.begin("outer", parent=ABOVE) as outer, tracing.begin("inner"):
        assert tracing.current().trace_id == outer.trace_id
    outside, inside = of(made(), "outer"), of(made(), "inner")
    assert (outside.parent.trace_id, outside.parent.span_id) == ids(ABOVE)
    assert inside.parent.span_id == outside.context.span_id
    assert ids(outer.traceparent) == own(outside)
    assert tracing.current() is tracing.OFF


@pytest.mark.parametrize(
    "header",
    ["", "nonsense", ABOVE.upper(), ABOVE + "-x", "ff" + ABOVE[2:], ABOVE.replace("b7ad6b7169203331", "0" * 16)],
)
def test_an_invalid_traceparent_header_begins_a_new_trace(made: Made, header: str) -> None:
    tracing.begin("a", parent=header).end()
    assert of(made(), "a").parent is None


def test_a_traceparent_header_of_a_later_version_is_understood(made: Made) -> None:
    tracing.begin("a", parent="cc" + ABOVE[2:] + "-what-may-come").end()
    assert of(made(), "a").context.trace_id == ids(ABOVE)[0]


def test_an_unsampled_trace_is_not_recorded_and_is_passed_on_unsampled(made: Made) -> None:
    with tracing.begin("a", parent=UNSAMPLED) as span:
        assert not span.recorded
        assert (span.traceparent or "").endswith("-00")
        assert span.trace_id == UNSAMPLED[3:35]
    assert made() == []


def test_a_span_names_the_type_of_an_exception_and_not_its_message(made: Made) -> None:
    with pytest.raises(ValueError), tracing.begin("a"):
        raise ValueError("the salary of Ann")
    span = of(made(), "a")
    assert span.attributes == {"error.type": "ValueError"}
    assert not span.status.is_ok
    assert (span.status.description, span.events) == (None, ())


async def test_a_generator_that_another_task_closes_ends_its_span(made: Made) -> None:
    import asyncio

    async def pieces() -> Any:
        with tracing.begin("stream"):
            yield 1

    stream = pieces()
    await asyncio.create_task(anext(stream))
    await asyncio.create_task(stream.aclose())
    assert of(made(), "stream").attributes == {"penstock.outcome": "cancelled"}
    assert tracing.current() is tracing.OFF


# Records


def test_a_single_record_is_processed_in_its_own_trace(made: Made) -> None:
    with records.batch("detect", [record("acme/wiki/a.md", ABOVE)], tries=0), tracing.begin("inner"):
        pass
    span = of(made(), "process x.documents.live.v1")
    assert (span.parent.trace_id, span.parent.span_id) == ids(ABOVE)
    assert of(made(), "inner").parent.span_id == span.context.span_id
    attributes = span.attributes
    assert attributes["penstock.document.id"] == str(document_id("acme", "wiki", "a.md"))
    assert attributes["penstock.tenant"] == "acme"
    assert attributes["penstock.stage"] == "detect"
    assert attributes["messaging.message.body.size"] == 5
    assert "a.md" not in str(attributes)


def test_a_batch_has_its_own_trace_linked_to_that_of_each_document(made: Made) -> None:
    other = ABOVE.replace("0af7651916cd43dd", "1" * 16)
    batch = [record("acme/wiki/a.md", ABOVE), record("acme/wiki/b.md", other), record("acme/wiki/c.md")]
    with records.batch("vectors", batch, tries=2), tracing.begin("inner"):
        pass
    whole = of(made(), "process vectors")
    assert whole.parent is None
    assert [(link.context.trace_id, link.context.span_id) for link in whole.links] == [ids(ABOVE), ids(other)]
    assert whole.attributes["messaging.batch.message_count"] == 3
    assert of(made(), "inner").context.trace_id == whole.context.trace_id
    each = [span for span in made() if span.name == "process x.documents.live.v1"]
    assert {span.context.trace_id for span in each} == {ids(ABOVE)[0], ids(other)[0], each[2].context.trace_id}
    assert [own_link.context.span_id for span in each for own_link in span.links] == [whole.context.span_id] * 3
    assert {span.attributes["penstock.tries"] for span in each} == {2}


def test_a_message_sent_for_a_record_continues_the_records_trace_within_a_batch(made: Made) -> None:
    with records.batch("detect", [record("acme/wiki/a.md", ABOVE), record("acme/wiki/b.md")], tries=0):
        sent = records.sending(INDEX_LIVE.name, hint("a.md"))
    assert sent is not None
    sent.ended(100, None)
    span = of(made(), "send index.live.v1")
    assert ids(sent.traceparent) == own(span)
    assert span.context.trace_id == ids(ABOVE)[0]
    assert span.attributes["penstock.generation"] == "g1"
    assert span.attributes["messaging.message.body.size"] == 100


def test_a_hint_for_folded_events_continues_the_newest_trace_and_links_the_others(made: Made) -> None:
    other = ABOVE.replace("0af7651916cd43dd", "1" * 16)
    with records.batch("detect", [record("acme/wiki/a.md", other), record("acme/wiki/a.md", ABOVE)], tries=0):
        sent = records.sending(INDEX_LIVE.name, hint("a.md"))
        assert sent is not None
        sent.ended(1, None)
    span = of(made(), "send index.live.v1")
    assert span.context.trace_id == ids(ABOVE)[0]  # the newest's
    assert [link.context.trace_id for link in span.links] == [ids(other)[0]]


def test_messages_published_for_a_page_have_separate_traces_linked_to_the_page(made: Made) -> None:
    with tracing.begin("publish", gathers=True):
        for name in ("a.md", "b.md"):
            sent = records.sending(INDEX_LIVE.name, hint(name))
            assert sent is not None
            sent.ended(1, None)
    page = of(made(), "publish")
    sends = [span for span in made() if span.name.startswith("send")]
    assert len({span.context.trace_id for span in (page, *sends)}) == 3
    assert [link.context.span_id for span in sends for link in span.links] == [page.context.span_id] * 2


def test_a_documents_outcome_is_recorded_in_its_own_trace(made: Made) -> None:
    batch = [record("acme/wiki/a.md", ABOVE), record("acme/wiki/b.md")]
    with records.batch("detect", batch, tries=0):
        records.note(document_id("acme", "wiki", "b.md"), {"penstock.outcome": "unchanged"})
    outcomes = [span.attributes.get("penstock.outcome") for span in made() if span.name.startswith("process x")]
    assert sorted(outcomes, key=str) == [None, "unchanged"]


def test_spans_contain_no_principal_and_no_unparsable_key(made: Made) -> None:
    batch = [
        record("acme/wiki/ann@example.org", topic="x.identities.v1"),
        record("acme/ann@example.org", topic="x.conversations.live.v1"),
        record("what Ann earns\n/is/nobody's business", topic="x.documents.live.v1"),
    ]
    with records.batch("identities", batch, tries=0):
        message = IdentityChanged(
            tenant="acme", source="wiki", observed_at=AT, principal="ann@example.org", groups=["staff"]
        )
        sent = records.sending(IDENTITIES.name, message)
        assert sent is not None
        sent.ended(1, None)
    body = "".join(span.to_json() for span in made())
    assert "ann@example.org" not in body
    assert "earns" not in body
    assert str(uuid5(DOCUMENTS, "acme/wiki/ann@example.org")) not in body


def test_a_failed_delivery_is_traced_by_its_error_type_without_document_content(made: Made) -> None:
    document = DocumentUpserted(
        tenant="acme",
        source="wiki",
        external_id="a.md",
        observed_at=AT,
        version=1,
        title="Salaries",
        content="What Ann earns",
        media_type="text/plain",
        acl_tags=["staff"],
    )
    sent = records.sending(DOCUMENTS_LIVE.name, document)
    assert sent is not None
    sent.ended(7, RuntimeError("What Ann earns"))
    span = of(made(), "send documents.live.v1")
    assert span.attributes["error.type"] == "RuntimeError"
    assert "Ann" not in span.to_json()
    assert "Salaries" not in span.to_json()


# The log


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    kept = LogCapture()
    before = structlog.get_config()["processors"]
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, records.in_log, kept])
    try:
        yield kept.entries
    finally:
        structlog.configure(processors=before)


def test_a_log_line_carries_the_trace_id_of_the_document_it_is_about(made: Made, lines: list[Any]) -> None:
    log = structlog.get_logger()
    batch = [record("acme/wiki/a.md", ABOVE), record("acme/wiki/b.md")]
    with records.batch("vectors", batch, tries=0):
        log.info("chunk_refused", document=str(document_id("acme", "wiki", "a.md")))
        log.info("another")
    about, whole = lines
    assert about["trace_id"] == ABOVE[3:35]
    assert whole["trace_id"] == f"{of(made(), 'process vectors').context.trace_id:032x}"
    assert [line["tenant"] for line in lines] == ["acme", "acme"]


def test_log_lines_carry_tenant_and_document_without_tracing_too(lines: list[Any]) -> None:
    with records.batch("vectors", [record("acme/wiki/a.md")], tries=0):
        structlog.get_logger().info("said")
    structlog.get_logger().info("after")
    said, after = lines
    assert (said["tenant"], said["document"]) == ("acme", str(document_id("acme", "wiki", "a.md")))
    assert "trace_id" not in said
    assert not {"tenant", "document"} & set(after)


SAYS = """
import asyncio, logging, threading, warnings
from uuid import UUID
import structlog
from pipeline.core.errors import Retryable
from pipeline.observability.metrics import configure_logging
configure_logging()
log = structlog.get_logger()
class Row:
    def __repr__(self): return "SECRET"
def fails():
    try:
        raise KeyError("SECRET")
    except KeyError as error:
        raise ValueError("SECRET") from error
log.info("plain", row=Row(), id=UUID(int=7))
try:
    try: open("/nowhere/SECRET")
    except OSError as error: raise Retryable("the disk is away") from error
except Retryable: log.exception("ours")
try: fails()
except ValueError: log.exception("caught")
try: fails()
except ValueError: logging.getLogger("a.library").exception("its own words\\nof two lines")
logging.getLogger("a.library").error("Crashed reason=%r after %d s", ValueError("SECRET"), 3)
logging.getLogger("a.library").error("Crashed %(reason)s", {"reason": ValueError("SECRET")})
warnings.warn("mind", stacklevel=1)
thread = threading.Thread(target=fails); thread.start(); thread.join()
async def forgets():
    asyncio.get_running_loop().create_task(asyncio.to_thread(fails))
    await asyncio.sleep(0.2)
asyncio.run(forgets())
fails()
"""


def test_every_log_line_is_one_json_object_without_exception_messages() -> None:
    ended = run(SAYS)
    assert ended.returncode == 1
    assert ended.stdout == ""
    body = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [line["event"] for line in body][:4] == ["plain", "ours", "caught", "its own words\nof two lines"]
    assert [line["event"] for line in body][4:6] == ["Crashed reason='ValueError' after 3 s", "Crashed ValueError"]
    assert {"level", "timestamp", "event"} <= set.intersection(*(set(line) for line in body))
    assert body[0]["row"] == "Row"
    assert body[0]["id"] == "00000000-0000-0000-0000-000000000007"
    assert [cause["type"] for cause in body[2]["exception"]] == ["ValueError", "KeyError"]
    ours, theirs = body[1]["exception"]
    assert (ours["reason"], theirs["code"]) == ("the disk is away", 2)
    assert [line["event"] for line in body if line["level"] == "critical"] == ["crashed", "crashed"]
    assert "never retrieved" in ended.stderr
    assert "SECRET" not in ended.stderr


# Calls and requests


def test_an_external_call_is_logged_with_its_sizes_and_host() -> None:
    with capture_logs() as logs, tracing.trace_embeddings("large", 3, "api.example.org") as call:
        call.sent, call.received = 1_000, 24_000
        call.facts["gen_ai.usage.input_tokens"] = 99
    [line] = logs
    assert line.pop("ms") >= 0
    assert line == {
        "event": "external_call",
        "log_level": "info",
        "service": "embedding",
        "outcome": "ok",
        "bytes_sent": 1_000,
        "bytes_received": 24_000,
        "gen_ai_operation_name": "embeddings",
        "gen_ai_request_model": "large",
        "server_address": "api.example.org",
        "inputs": 3,
        "gen_ai_usage_input_tokens": 99,
    }


def test_a_failed_external_call_is_logged_with_its_error_type_and_a_local_model_is_not() -> None:
    with capture_logs() as logs:
        with pytest.raises(TimeoutError), tracing.trace_bulk("chunks-1", 5):
            raise TimeoutError("SECRET")
        with tracing.trace_embeddings("MiniLM", 1):
            pass
    assert [(line["service"], line["outcome"]) for line in logs] == [("elasticsearch", "TimeoutError")]
    assert "SECRET" not in str(logs)


def test_an_external_call_that_is_traced_is_not_logged(made: Made) -> None:
    with capture_logs() as logs, tracing.trace_rerank("best", 50, "rerank.example.org") as call:
        call.sent = 10
    assert logs == []
    span = of(made(), "rerank best")
    assert span.attributes["penstock.bytes_sent"] == 10
    assert span.kind.name == "CLIENT"


def served() -> FastAPI:
    app = FastAPI()

    @app.get("/v1/documents/{id}")
    async def document(id: str) -> str:
        with tracing.begin("work"):
            return id

    app.add_middleware(Traced, quiet={"/readyz"})
    return app


async def get(path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served()), base_url="http://test") as client:
        return await client.get(path, headers=headers)


async def test_a_request_is_a_span_in_the_callers_trace_and_its_response_carries_the_trace_id(made: Made) -> None:
    answer = await get("/v1/documents/of-ann", traceparent=ABOVE)
    assert answer.headers["trace-id"] == ABOVE[3:35]
    request, work = of(made(), "GET /v1/documents/{id}"), of(made(), "work")
    assert (request.parent.trace_id, request.parent.span_id) == ids(ABOVE)
    assert work.parent.span_id == request.context.span_id
    assert request.kind.name == "SERVER"
    assert request.attributes["http.response.status_code"] == 200
    assert "of-ann" not in request.to_json()


async def test_health_checks_are_not_traced_and_unknown_paths_are_not_in_span_names(made: Made) -> None:
    assert "trace-id" not in (await get("/readyz")).headers
    assert made() == []
    await get("/of-ann")
    [span] = made()
    assert span.name == "GET"
    assert span.attributes["http.response.status_code"] == 404


async def test_without_tracing_a_response_has_no_trace_id_header() -> None:
    assert "trace-id" not in (await get("/v1/documents/7", traceparent=ABOVE)).headers
