"""The screen of ``penstock status`` for a healthy system, for one that is half down, and for one that needs an
operator."""

from __future__ import annotations

import copy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from cli.status_screen import line, screen
from pipeline.diagnosis import health
from pipeline.diagnosis.problems import is_ready, problems

WELL: dict[str, Any] = {
    "at": "2026-11-21T12:00:00+00:00",
    "services": {
        "kafka": {"url": "127.0.0.1:9092", "pid": 1, "ready": True},
        "postgres": {"url": "postgresql://me:secret-canary@127.0.0.1:5432/penstock", "pid": 2, "ready": True},
        "elasticsearch": {"url": "http://127.0.0.1:9200", "pid": 3, "ready": True},
    },
    "workers": [
        {
            "name": name,
            "pid": 4,
            "ready": True,
            "waiting_for": None,
            "reason": None,
            "stages": [
                {
                    "stage": name,
                    "ready": True,
                    "in_flight": 3,
                    "waiting_for": None,
                    "reason": None,
                    "waiting_seconds": None,
                }
            ],
        }
        for name in ("detect", "vectors", "keywords")
    ],
    "query": {"url": "http://127.0.0.1:8080", "pid": 5, "ready": True},
    "machine": {"ready": True},
    "stages": [
        {"stage": "detect", "members": 2, "hosts": ["10.0.0.1"], "lag": {"live": 4, "backfill": 900}},
        {"stage": "vectors", "members": 1, "hosts": ["10.0.0.1"], "lag": {"live": 0, "backfill": 0}},
        {"stage": "keywords", "members": 1, "hosts": ["10.0.0.1"], "lag": {"live": 0, "backfill": 0}},
    ],
    "generations": [
        {
            "name": "g1",
            "state": "active",
            "model": "words",
            "dimensions": 64,
            "filled": None,
            "documents": None,
            "waiting": 5,
        },
        {
            "name": "g2",
            "state": "building",
            "model": "others",
            "dimensions": 384,
            "filled": 250,
            "documents": 1000,
            "waiting": 750,
        },
    ],
    "freshness": {
        "objective_seconds": 300,
        "window_seconds": 900.0,
        "documents": 12,
        "p50": 1.5,
        "p99": 8.0,
        "by_source": [{"source": "wiki", "documents": 12, "p50": 1.5, "p99": 8.0}],
    },
    "pending": {
        "vectors": {"documents": 5, "failing": 0, "more": False, "oldest_seconds": 3.0},
        "keywords": {"documents": 0, "failing": 0, "more": False, "oldest_seconds": None},
        "oldest_seconds": 3.0,
    },
    "dead_letters": {"waiting": 0, "more": False, "by_code": []},
    "skipped": [{"source": "folder", "code": "broken", "documents": 2}],
    "connectors": [
        {
            "tenant": "acme",
            "source": "wiki",
            "kind": "confluence",
            "state": "following",
            "reason": None,
            "last_success_at": "2026-11-21T11:59:00+00:00",
            "last_sweep_at": None,
            "published": 7,
            "next_at": "2026-11-21T12:01:30+00:00",
        },
    ],
    "audit": {
        "last": {
            "generation": "g1",
            "scope": "background",
            "finished_at": "2026-11-21T11:00:00+00:00",
            "documents": 40,
            "differing": 0,
        },
        "divergent_documents": 0,
        "by": [],
    },
    "embedding": [{"purpose": "document", "tokens": 120_000, "cost": 1.25}],
    "producers": {"mode": "enforce", "enrolled": 3, "refused_in_a_day": 2},
    "webhooks": [{"webhook": "shop", "tenant": "acme", "state": "working", "reason": None, "waiting": 3, "parked": 0}],
    "canaries": [{"source": "wiki", "found_seconds_ago": {"vectors": 12.0, "keywords": 11.0}}],
    "extraction": {"files": "confined", "kernel": "Landlock 7, seccomp", "of": "the connectors worker"},
    "away": [],
}


def text(response: dict[str, Any], width: int = 160) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as shown:
        console.print(screen(response))
    return shown.get()


def changed_report(**parts: Any) -> dict[str, Any]:
    return {**copy.deepcopy(WELL), **parts}


def test_the_status_of_a_healthy_system_fits_one_screen() -> None:
    shown = text(WELL)
    assert problems(WELL) == []
    assert is_ready(WELL)
    assert len(shown.splitlines()) <= 50
    for expected_lines in (
        "all is well",
        "postgresql://127.0.0.1:5432/penstock",
        "3 records in progress",
        "all sources",
        "8.0 s",
        "900",
        "250 of 1000 documents (25%)",
        "60 s ago",
        "in 90 s",
        "none waits",
        "clean, background of g1, 60 min ago",
        "2 documents cannot be read at their source (folder: broken 2)",
        "120000 tokens of documents, 1.25",
        "wiki 12 s ago",
        "3 enrolled, signatures: enforce, 2 records refused since yesterday",
    ):
        assert expected_lines in shown, expected_lines


def test_a_status_is_not_ready_while_the_machine_is_not_ready() -> None:
    assert not is_ready(changed_report(machine={"ready": False}, workers=[]))


def test_the_status_shows_no_password() -> None:
    assert "secret-canary" not in text(WELL) + line(WELL)


def worker(**changes: Any) -> list[dict[str, Any]]:
    stage = {"stage": "vectors", "in_flight": 9, "waiting_for": "embeddings", "reason": "429", "waiting_seconds": 40.0}
    return [
        {"name": "vectors", "pid": 4, "ready": True, "waiting_for": None, "reason": None, "stages": [stage], **changes}
    ]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"services": {**WELL["services"], "kafka": {"url": None, "pid": None, "ready": False}}}, "kafka is down"),
        ({"workers": worker(waiting_for="embeddings", reason="429")}, "vectors is stalled"),
        ({"workers": worker(ready=False)}, "vectors is not ready"),
        ({"query": {"url": "http://x", "pid": 5, "ready": False}}, "the query service is not ready"),
        ({"stages": [{"stage": "detect", "members": 0, "hosts": [], "lag": {"live": 3}}]}, "no worker reads detect's"),
        ({"freshness": {**WELL["freshness"], "p99": 420.0}}, "changes take 7 min at p99"),
        ({"dead_letters": {"waiting": 10_000, "more": True, "by_code": []}}, "more than 10000 dead letters wait"),
        ({"pending": {**WELL["pending"], "oldest_seconds": 4000.0}}, "the oldest pending document waits for 67 min"),
        ({"connectors": [{**WELL["connectors"][0], "state": "needs attention"}]}, "connector wiki: needs attention"),
        ({"audit": {**WELL["audit"], "divergent_documents": 2}}, "2 documents differ"),
        (
            {"canaries": [{"source": "wiki", "found_seconds_ago": {"vectors": 900.0}}]},
            "the canary of wiki is not found",
        ),
        ({"skipped": [{"source": "folder", "code": "unconfined", "documents": 3}]}, "3 files wait for a connectors"),
    ],
)
def test_every_problem_is_named_in_the_first_line_of_the_status(parts: dict[str, Any], says: str) -> None:
    report = changed_report(**parts)
    assert len(problems(report)) == 1
    assert says in problems(report)[0]
    assert says in text(report).splitlines()[0]
    assert says in line(report)


def test_a_machine_that_cannot_confine_extraction_is_not_a_problem_by_itself() -> None:
    report = changed_report(extraction={"files": "refused", "kernel": "no Landlock, seccomp", "of": "this machine"})
    assert problems(report) == []
    assert "refused (no Landlock, seccomp), reported by this machine" in text(report)


def test_an_unreachable_extraction_service_is_a_problem() -> None:
    report = changed_report(
        extraction={"files": "unreachable", "kernel": "x:1 cannot be reached", "of": "the connectors worker"}
    )
    assert problems(report) == ["the extraction service does not answer"]
    assert "x:1 cannot be reached" in text(report)


@pytest.mark.parametrize(
    ("answer", "of"),
    [
        (b'{"extraction": {"files": "refused", "kernel": "no Landlock, no seccomp"}}', "the connectors worker"),
        (b'{"stages": []}', "this machine"),
        (b"[]", "this machine"),
    ],
)
async def test_the_extraction_status_comes_from_the_connectors_worker_if_it_reports_one(answer: bytes, of: str) -> None:
    class Status(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/status"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    async def this_machine() -> dict[str, str]:
        return {"files": "confined", "kernel": "Landlock, seccomp"}

    with ThreadingHTTPServer(("127.0.0.1", 0), Status) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        one = {"name": "connectors", "ready": True, "health": f"http://127.0.0.1:{server.server_port}"}
        extraction = await health._extraction([{"name": "detect", "ready": True, "health": ""}, one], this_machine)
        server.shutdown()
    assert extraction["of"] == of
    assert (extraction["kernel"] == "no Landlock, no seccomp") is (of == "the connectors worker")


def test_the_status_shows_what_a_stage_is_waiting_for() -> None:
    shown = text(changed_report(workers=worker(waiting_for="embeddings", reason="429")))
    assert "waiting for embeddings" in shown
    assert "vectors for 40 s: 429" in shown


def test_unavailable_parts_of_the_status_are_named_and_the_others_shown() -> None:
    nothing = changed_report(
        stages=None,
        generations=None,
        freshness=None,
        pending=None,
        dead_letters=None,
        connectors=None,
        audit=None,
        embedding=None,
        producers=None,
        canaries=None,
        away=["Kafka at 127.0.0.1:9: refused"],
    )
    shown = text(nothing)
    assert "parts of the system do not answer" in shown
    assert "Kafka at 127.0.0.1:9: refused" in shown
    assert "query" in shown
    assert "lag ?  pending ?  oldest ?  fresh p50/p99 ?  dead ?" in line(nothing)


def test_control_sequences_in_names_do_not_reach_the_terminal() -> None:
    evil = {**WELL["connectors"][0], "source": "\x1b[2Jwiki", "reason": "[red]x[/]\x1b]0;t\x07", "state": "waiting"}
    shown = text(changed_report(connectors=[evil]))
    assert "\x1b" not in shown
    assert "[red]x[/]" in shown


def test_lines_are_shortened_to_fit_a_narrow_terminal() -> None:
    assert all(len(row) <= 60 for row in text(WELL, width=60).splitlines())


def test_a_paused_webhook_and_parked_events_are_problems() -> None:
    shop = {
        "webhook": "shop",
        "tenant": "acme",
        "state": "paused",
        "reason": "it wants no more",
        "waiting": 9,
        "parked": 0,
    }
    drive = {**shop, "webhook": "drive", "state": "working", "parked": 2}
    shown = text(changed_report(webhooks=[shop, drive]))
    assert "webhook shop is paused" in shown
    assert "2 events of webhook drive are parked" in shown
    assert "shop paused (9 wait), drive working (9 wait, 2 parked)" in shown
    assert "webhooks" not in text(changed_report(webhooks=[]))
    assert "webhooks" not in text(changed_report(webhooks=None))
