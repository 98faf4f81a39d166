"""Runs a whole system for a benchmark: servers, workers and the query service in a separate state folder, with
bench.zero_cost as its model, so that the pipeline is measured."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import psycopg

from bench.zero_cost import DIMENSIONS, MODEL, zero_cost
from pipeline.core.graph import GRAPH_FROM_ROWS
from pipeline.runtime.home import DEVELOPMENT_FILE, development_token, home

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
CODE = Path(__file__).resolve().parents[1]
"""The folder whose code is measured, whatever the environment has installed."""
GRAPH_WAIT_SECONDS = 1_800.0
FOR_LONG = {"PENSTOCK_ELASTICSEARCH_SECOND_COMPILER": "true"}
"""Settings for measurements of a system that runs for months."""


class Running:
    """A running system: its home, its processes and their use of resources."""

    def __init__(self, folder: Path, embedding: str, more: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.library = folder / "library"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(CODE),
            "PENSTOCK_HOME": str(folder),
            "PENSTOCK_EMBEDDING_PROVIDER": "openai",
            "PENSTOCK_EMBEDDING_BASE_URL": f"{embedding}/v1",
            "PENSTOCK_EMBEDDING_API_KEY": "none",
            "PENSTOCK_EMBEDDING_MODEL": MODEL,
            "PENSTOCK_EMBEDDING_DIMENSIONS": str(DIMENSIONS),
            "PENSTOCK_SERVE_REQUESTS_PER_MINUTE": "100000",
            **(more or {}),
        }

    code: Path | None = None
    """The folder in which commands, and so workers, run; None: the current one."""

    def command(self, *arguments: str) -> None:
        """Run a command of ``penstock`` whose output is for people."""
        subprocess.run([PENSTOCK, *arguments], env=self.environment, cwd=self.code, check=True, stdout=sys.stderr)

    def penstock(self, *arguments: str) -> Any:
        process = subprocess.run(
            [PENSTOCK, *arguments, "--json"], env=self.environment, stdout=subprocess.PIPE, check=False
        )
        if process.returncode:
            raise SystemExit(f"`penstock {' '.join(arguments)}` ended with {process.returncode}")
        return json.loads(process.stdout)

    def ingest(self) -> Mapping[str, Any]:
        """Run ``penstock ingest``. Return its report, and ``whole_s``: the seconds of the whole process."""
        began = time.perf_counter()
        me = f"user:{getpass.getuser()}"  # the principal of this benchmark's searches
        report = self.penstock("ingest", str(self.library), "--acl", "staff", "--acl", me, "--wait")
        return {**report, "whole_s": round(time.perf_counter() - began, 2)}

    def bearer(self) -> dict[str, str]:
        """Return the headers of a request as the local user."""
        return {"Authorization": f"Bearer {development_token(self.folder / DEVELOPMENT_FILE)}"}

    def endpoint(self, service: str, key: str) -> str:
        return str(json.loads((self.folder / "endpoints.json").read_text())[service][key])

    def sql(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.endpoint("postgres", "dsn"), autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters or None)
            return cursor.fetchall() if cursor.description else []

    def graphs(self) -> list[tuple[str, bool]]:
        """Return the name of each HNSW index of the vectors, and whether it is usable."""
        return self.sql(
            "SELECT c.relname, i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am a"
            " ON a.oid = c.relam WHERE i.indrelid = 'chunks_g1'::regclass AND a.amname = 'hnsw'"
        )

    def outside(self) -> int:
        """Count the rows that wait outside of the graph."""
        return int(self.sql("SELECT count(*) FROM chunks_g1 WHERE NOT in_graph")[0][0])

    def is_graph_settled(self) -> bool:
        """Whether every row is in a graph. No row of a small table enters one."""
        return self._is_small() or (not self.outside() and any(valid for _, valid in self.graphs()))

    def settle_graph(self) -> float:
        """Wait until every row is in a graph; returns the seconds."""
        began = time.perf_counter()
        while not self.is_graph_settled():
            if time.perf_counter() - began > GRAPH_WAIT_SECONDS:
                raise SystemExit(f"no graph over all rows within {GRAPH_WAIT_SECONDS:.0f} s: {self.graphs()}")
            time.sleep(0.5)
        return round(time.perf_counter() - began, 1)

    def _is_small(self) -> bool:
        # Without the limit, two of them a second took a third of two processors from the graph of a million rows.
        counted = "SELECT count(*) < %s FROM (SELECT FROM chunks_g1 LIMIT %s) counted"
        return bool(self.sql(counted, GRAPH_FROM_ROWS, GRAPH_FROM_ROWS)[0][0])

    def memory(self) -> dict[str, int]:
        """Return the resident memory of each worker in MiB."""
        return {
            worker["name"]: round(psutil.Process(worker["pid"]).memory_info().rss / 2**20)
            for worker in self.penstock("status")["workers"]
        }


R = TypeVar("R", bound=Running)


@contextmanager
def running(name: str, more: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Run an empty system while the block runs, and remove it afterwards. more: further settings."""
    with started(name, partial(Running, more=more)) as run:
        yield run


@contextmanager
def started(
    name: str, make: Callable[[Path, str], R], *, latency_ms: float = 0.0, words: int | None = None
) -> Iterator[R]:
    """Run an empty system while the block runs, and remove it afterwards. make: describes it, given its folder and the
    address of its model. latency_ms: the time that the model takes for a request. words: the dimensions of its vectors,
    if they are those of the words (bench.load_corpus)."""
    folder = home() / name
    shutil.rmtree(folder, ignore_errors=True)
    with zero_cost(latency_ms, words) as address:
        run = make(folder, address)
        try:
            run.command("up")
            run.library.mkdir(parents=True)
            yield run
        finally:
            run.command("down")
            shutil.rmtree(folder, ignore_errors=True)


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "load": os.getloadavg()[0],
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def percentile(values: list[float], share: float) -> float | None:
    """Return the value below which that share lies; None if there are no values."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else None


def spread(values: list[float]) -> dict[str, float | int | None]:
    return {
        "count": len(values),
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": round(max(values), 2) if values else None,
    }
