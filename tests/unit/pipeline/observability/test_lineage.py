"""Lineage events of a process of its own, as a receiver gets them over HTTP and validates them; receivers that are
away or broken; and disabled lineage does nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.observability import lineage
from pipeline.observability.metrics import Metrics
from tests.fakes.lineage import FakeLineage, problems_of, rows

PROJECT = Path(__file__).parents[4]
WORK = """
import asyncio, sys
from pipeline.core.errors import Retryable
from pipeline.observability import lineage
from pipeline.observability.metrics import Metrics, configure_logging
configure_logging()
lineage.FLUSH_SECONDS = 50.0
metrics = Metrics()
wiki = lineage.Dataset("file", "/notes")
rules = lineage.Assertion("no missing chunks", 0), lineage.Assertion("no orphan chunks", 2)
stores = [
    lineage.Dataset("postgres://db:5432", "penstock.public.chunks_g1"),
    lineage.Dataset("elasticsearch://es:9200", "chunks-g1"),
]
with lineage.running(metrics.lineage):
    with lineage.job("connector.acme.wiki", "CONNECTOR") as parent:
        with lineage.job("load.acme.wiki", "LOAD", inputs=[wiki], outputs=stores, parent=parent) as run:
            run.wrote(113, 2525)
        for error in (Retryable("Postgres is away"), ValueError("the text of a document"), KeyboardInterrupt()):
            try:
                with lineage.job(f"audit.{type(error).__name__}", "AUDIT") as run:
                    run.inputs = [lineage.Dataset("file", "/notes", assertions=rules)]
                    raise error
            except BaseException:
                pass
for sample in next(iter(metrics.lineage.collect())).samples:
    if sample.name.endswith("_total"):
        print(sample.labels["outcome"], int(sample.value))
print([name for name in sys.modules if name.startswith("openlineage")] == [])
"""


async def work(folder: Path, **environment: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The output of a process, and its log. It has a minute."""
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", WORK],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(PROJECT), "HOME": str(folder), **environment},
    )
    return ended.stdout.splitlines(), [json.loads(line) for line in ended.stderr.splitlines()]


async def test_runs_reach_a_receiver_in_order_and_fit_the_published_schemas(tmp_path: Path) -> None:
    async with FakeLineage() as receiver:
        printed, logs = await work(tmp_path, OPENLINEAGE_URL=receiver.address, OPENLINEAGE_NAMESPACE="prod")
    assert (receiver.problems, printed, logs) == ([], ["sent 10", "False"], [])
    assert [(event["job"]["name"], event["eventType"]) for event in receiver.events] == [
        ("connector.acme.wiki", "START"),
        ("load.acme.wiki", "START"),
        ("load.acme.wiki", "COMPLETE"),
        ("audit.Retryable", "START"),
        ("audit.Retryable", "FAIL"),
        ("audit.ValueError", "START"),
        ("audit.ValueError", "FAIL"),
        ("audit.KeyboardInterrupt", "START"),
        ("audit.KeyboardInterrupt", "ABORT"),
        ("connector.acme.wiki", "COMPLETE"),
    ]
    assert {event["job"]["namespace"] for event in receiver.events} == {"prod"}
    assert len({event["run"]["runId"] for event in receiver.events}) == 5
    assert len({event["run"]["runId"] for event in receiver.of("load.acme.wiki")}) == 1
    started, completed = receiver.of("load.acme.wiki")
    assert rows(started) == {"chunks_g1": None, "chunks-g1": None}
    assert rows(completed) == {"chunks_g1": 113, "chunks-g1": 2525}
    assert [(i["namespace"], i["name"]) for i in completed["inputs"]] == [("file", "/notes")]
    parent = completed["run"]["facets"]["parent"]
    assert parent["run"]["runId"] == receiver.of("connector.acme.wiki")[0]["run"]["runId"]
    assert parent["job"] == {"namespace": "prod", "name": "connector.acme.wiki", "facets": {}}
    ours, foreign = (receiver.of(f"audit.{name}")[1] for name in ("Retryable", "ValueError"))
    assert ours["run"]["facets"]["errorMessage"]["message"] == "Postgres is away"
    assert foreign["run"]["facets"]["errorMessage"]["message"] == "ValueError"
    tested = ours["inputs"][0]["inputFacets"]["dataQualityAssertions"]["assertions"]
    assert [(t["assertion"], t["success"], t["actual"]) for t in tested] == [
        ("no missing chunks", True, "0"),
        ("no orphan chunks", False, "2"),
    ]


def test_an_event_that_does_not_fit_the_schemas_is_refused() -> None:
    event: dict[str, Any] = {
        "eventTime": "2026-01-02T00:00:00Z",
        "eventType": "START",
        "producer": "pkg:pypi/penstock@1",
        "schemaURL": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent",
        "run": {"runId": "0190b4de-51c5-7c0c-9a5f-1f0a6a3b6d11"},
        "job": {"namespace": "n", "name": "j"},
    }
    assert problems_of(event) == []
    facet = {"_producer": "pkg:x", "_schemaURL": event["schemaURL"].replace("OpenLineage.json", "Unknown.json")}
    assert len(problems_of({**event, "eventType": "BEGIN"})) >= 1
    assert len(problems_of({**event, "run": {"runId": 7}})) >= 1
    with pytest.raises(Exception, match="Unknown"):
        problems_of({**event, "run": {**event["run"], "facets": {"x": facet}}})


@pytest.mark.heavy
async def test_the_librarys_own_file_names_the_receiver(tmp_path: Path) -> None:
    (tmp_path / ".openlineage").mkdir()
    (tmp_path / ".openlineage" / "openlineage.yml").write_text(
        f"transport:\n  type: file\n  log_file_path: {tmp_path / 'events.jsonl'}\n  append: true\n"
    )
    printed, logs = await work(tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (printed[0], logs, len(events)) == ("sent 10", [], 10)
    assert [problem for event in events for problem in problems_of(event)] == []


@pytest.mark.heavy
async def test_a_file_in_the_current_folder_is_not_read(tmp_path: Path) -> None:
    """It would name files to write, and variables to send, for whoever may write there."""
    (tmp_path / "openlineage.yml").write_text(
        f"transport:\n  type: file\n  log_file_path: {tmp_path / 'events.jsonl'}\n  append: true\n"
        "facets:\n  environment_variables: [SECRET]\n"
    )
    assert (await work(tmp_path, SECRET="s"))[0][-1:] == ["True"]
    async with FakeLineage() as receiver:
        printed, _ = await work(tmp_path, SECRET="s", OPENLINEAGE_URL=receiver.address)
    assert printed[0] == "sent 10"
    assert not (tmp_path / "events.jsonl").exists()
    assert not any("environmentVariables" in event["run"]["facets"] for event in receiver.events)


@pytest.mark.heavy
async def test_a_console_shows_the_events_on_stderr_alone(tmp_path: Path) -> None:
    printed, events = await work(tmp_path, OPENLINEAGE__TRANSPORT__TYPE="console")
    assert (printed[0], [event["eventType"] for event in events][:3]) == ("sent 10", ["START", "START", "COMPLETE"])


@pytest.mark.heavy
@pytest.mark.parametrize("fault", ["errors", "disconnect", "hang", "nobody"])
async def test_a_receiver_that_fails_ends_no_process_and_causes_one_log_line(fault: str, tmp_path: Path) -> None:
    async with FakeLineage() as receiver:
        if fault != "nobody":
            setattr(receiver.faults, fault, 1_000)
        transport = {
            "type": "http",
            "url": "http://127.0.0.1:1" if fault == "nobody" else receiver.address,
            "timeout": 0.3,
            "retry": {"total": 0},
        }
        printed, logs = await work(tmp_path, OPENLINEAGE__TRANSPORT=json.dumps(transport))
    assert printed[0].startswith("lost ")
    assert [(line["event"], line["level"]) for line in logs] == [("lineage_lost", "warning")]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OPENLINEAGE_URL": "http://127.0.0.1:1", "OPENLINEAGE_DISABLED": "true"},
        {"OPENLINEAGE_NAMESPACE": "prod"},
        {"OPENLINEAGE_URL": ""},
    ],
)
async def test_without_a_receiver_the_library_is_not_imported(environment: dict[str, str], tmp_path: Path) -> None:
    assert await work(tmp_path, **environment) == (["True"], [])


def test_without_the_extra_a_process_runs_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lineage, "is_installed", lambda name: False)
    with capture_logs() as logs:
        assert not lineage.is_enabled({"OPENLINEAGE_URL": "http://lineage"}, tmp_path)
    assert [(line["event"], "penstock[lineage]" in line["reason"]) for line in logs] == [("lineage_off", True)]


def test_events_beyond_the_queue_are_lost_and_counted_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = {"type": "http", "url": "http://127.0.0.1:1", "timeout": 0.3, "retry": {"total": 0}}
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps(transport))
    monkeypatch.setattr(lineage, "QUEUE_EVENTS", 3)
    monkeypatch.setattr(lineage, "FLUSH_SECONDS", 0.0)
    metrics = Metrics()
    with capture_logs() as logs, lineage.running(metrics.lineage):
        for n in range(20):
            lineage.Run(f"job{n}", "LOAD").begin()
    assert metrics.registry.get_sample_value("penstock_lineage_events_total", {"outcome": "lost"}) >= 16
    assert [line["event"] for line in logs] == ["lineage_lost"]
    assert not lineage.is_on()
    for thread in threading.enumerate():  # it still reads the variables
        if thread.name == "lineage":
            thread.join(60)
