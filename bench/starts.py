"""Measures how long commands and workers take to start: ``python -m bench.starts [--quick] [--json FILE]``.

On the running local stack (``penstock up``). A command is timed from exec to its end; a worker, one more of its kind
beside the stack's own, from exec until it answers /readyz, its place in the consumer group included. Medians of five
(--quick: of one), and each one's processor time, which tells the same on a loaded machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.machine import description
from deploy.local.service import HOST, free_port

COMMANDS = {
    "penstock --version": ("--version",),
    "penstock search": ("search", "how is a document found", "--json"),
    "penstock search --tag, without the service": ("search", "how is a document found", "--tag", "staff", "--json"),
}
WORKERS = ("detect", "vectors", "keywords")
PATIENCE_SECONDS = 90.0
RESULTS = Path(__file__).parent / "results" / "starts.json"


def program(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "cli.main", *arguments]


def command(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Run a command. Return the seconds from exec to its end, and those of the processor."""
    before = os.times()
    began = time.perf_counter()
    subprocess.run(program(*arguments), stdout=subprocess.DEVNULL, check=True)
    took, after = time.perf_counter() - began, os.times()
    return took, sum(after[2:4]) - sum(before[2:4])


def worker(name: str) -> tuple[float, float]:
    """Start a worker, or the query service (``serve``). Return the seconds from exec to /readyz, and those of the
    processor."""
    port = free_port()
    arguments = ("serve", "--port", str(port)) if name == "serve" else ("worker", name)
    environment = {
        **os.environ,
        "PENSTOCK_STREAM_HEALTH_PORT": str(port),
        "PENSTOCK_SERVE_DEVELOPMENT": "true",
    }
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = subprocess.Popen(program(*arguments), env=environment, stdout=log, stderr=log)
        try:
            while not is_ready(port):
                if process.poll() is not None or time.perf_counter() - began > PATIENCE_SECONDS:
                    log.seek(0)
                    raise SystemExit(f"{name} did not become ready: {log.read().decode(errors='replace')[-500:]}")
                time.sleep(0.01)
            took = time.perf_counter() - began
            return took, sum(psutil.Process(process.pid).cpu_times()[:2])
        finally:
            process.terminate()
            process.wait()


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def measured(start: Callable[[], tuple[float, float]], times: int) -> dict[str, Any]:
    runs = [start() for _ in range(times)]
    return {
        "seconds": round(median(took for took, _ in runs), 3),
        "processor_seconds": round(median(spent for _, spent in runs), 3),
        "slowest": round(max(took for took, _ in runs), 3),
    }


def main(times: int, written: Path) -> None:
    report: dict[str, Any] = {"machine": description(), "times": times, "commands": {}, "workers": {}}
    for name, arguments in COMMANDS.items():
        report["commands"][name] = measured(lambda arguments=arguments: command(arguments), times)  # type: ignore[misc]
    for name in (*WORKERS, "serve"):
        report["workers"][name] = measured(lambda name=name: worker(name), times)  # type: ignore[misc]
    report["search_command_s"] = report["commands"]["penstock search"]["seconds"]
    report["worker_start_s"] = max(row["seconds"] for row in report["workers"].values())
    report["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    written.parent.mkdir(exist_ok=True)
    written.write_text(json.dumps(report, indent=2) + "\n")
    for what in ("commands", "workers"):
        for name, row in report[what].items():
            print(f"{name:44} {row['seconds']:7.2f} s, of the processor {row['processor_seconds']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once each")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    main(1 if options.quick else 5, options.json)
