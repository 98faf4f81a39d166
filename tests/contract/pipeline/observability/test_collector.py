"""Spans as a collector receives them, and collectors that are away, slow or broken: nothing of ours waits for them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.collector import FakeCollector

PROJECT = Path(__file__).parents[4]
WORK = """
import sys
from pipeline.observability import tracing
from pipeline.observability.metrics import configure_logging
import structlog
configure_logging()
with tracing.running("detect"):
    for n in range(int(sys.argv[1])):
        with tracing.begin("outer", attributes={"n": n}), tracing.begin("inner", "client") as inner:
            inner.failed("Gone")
structlog.get_logger().info("over")
"""


async def work(endpoint: str, *, spans: int = 3, **environment: str) -> list[dict[str, object]]:
    """The log of a process that works and stops; it has a minute."""
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", WORK, str(spans)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50", **environment},
    )
    return [json.loads(line) for line in ended.stderr.splitlines()]


async def test_the_last_spans_of_a_process_reach_the_collector_compressed_or_not() -> None:
    async with FakeCollector() as collector:
        [over] = await work(collector.endpoint, OTEL_EXPORTER_OTLP_COMPRESSION="gzip")
        await work(collector.endpoint, OTEL_SERVICE_NAME="mine")
    assert over["event"] == "over"
    outer, inner = collector.named("outer", n=0), collector.named("inner")
    assert [span.service for span in outer] == ["penstock-detect", "mine"]
    assert len(inner) == 6
    assert all(span.failed and span.attributes == {"error.type": "Gone"} for span in inner)
    assert [above.id for above in collector.above(inner[0])] == [outer[0].id]
    assert collector.stats.statuses == {"200": collector.stats.requests}


async def test_the_sampler_of_the_standard_variables_is_used() -> None:
    async with FakeCollector() as collector:
        await work(collector.endpoint, OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0")
    assert collector.spans == []


@pytest.mark.parametrize("fault", ["hang", "errors", "disconnect", "not_json", "throttle"])
async def test_a_failing_collector_ends_no_process_and_causes_few_log_lines(fault: str) -> None:
    async with FakeCollector() as collector:
        setattr(collector.faults, fault, 1_000)
        output = await work(collector.endpoint, spans=2_000)
    assert output[-1]["event"] == "over"
    assert {line["event"] for line in output[:-1]} <= {"spans_lost", "Queue full, dropping Span."}
    assert len(output) <= 5


async def test_an_unreachable_collector_causes_few_log_lines() -> None:
    output = await work("http://127.0.0.1:1", spans=2_000, OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert output[-1]["event"] == "over"
    assert len(output) <= 5
