"""Measures one and more workers of a stage on the same load: what further processes on other partitions add.

python -m bench.scaling [--documents 500] [--quick] [--json FILE]      # → bench/results/scaling.json
python -m bench.scaling --model-ms 2000                                # one and four workers of vectors

The workers of one store run, are ready, and are stopped in their tracks (SIGSTOP) while new documents pass detect; then
they continue, and the time counts until their store has everything. So only that stage works meanwhile, and its start
is not measured. The other store's worker is stopped.

Two workers share the machine's processors with Postgres, Elasticsearch and Kafka: on two processors the ratio says how
much of them one worker left unused, on more it would say how far the stage scales. ``processor_s`` is what each process
took: that the sum hardly grows is what says that two workers do no work twice.

With ``--model-ms``, each request to the model takes that long, so that the workers wait for it and not for a processor:
the ratio then says how far the stage scales.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench import processors
from bench.ingest import CHUNKS, Run, write
from bench.prose import WORDS_A_CHUNK, text
from bench.running import started
from deploy.local import workers

RESULTS = Path(__file__).parent / "results" / "scaling.json"
STORES = ("vectors", "keywords")
MODEL_DOCUMENTS = 2_000
"""Documents of a batch with ``--model-ms``: enough for many rounds of requests by four workers."""
POLL_SECONDS = 0.05
STALLED_SECONDS = 300.0

console = Console(highlight=False)


def until(run: Run, statement: str, expected: int) -> None:
    """Wait until the statement returns the expected count. Raises TimeoutError after STALLED_SECONDS."""
    deadline = time.monotonic() + STALLED_SECONDS
    while run.sql(statement) != [(expected,)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {STALLED_SECONDS:.0f} s not yet {expected}: {statement}")
        time.sleep(POLL_SECONDS)


def settled(store: str) -> str:
    return f"SELECT count(*) FROM index_state WHERE store = '{store}' AND seq >= want_seq"


def instances(run: Run, store: str, count: int) -> dict[str, int]:
    """Start ``count`` workers of a store and wait until they are ready. Returns their pids by name."""
    started = [workers.start(run.folder, store, instance=n, env=run.environment, wait=True) for n in range(count)]
    return {worker.name: worker.pid for worker in started if worker.pid is not None}


def measure(run: Run, servers: Mapping[str, int], store: str, count: int, batch: int, documents: int) -> dict[str, Any]:
    """Measure the batch-th batch of documents with ``count`` workers. servers: pids of the other processes, by name."""
    processes = instances(run, store, count)
    until(run, settled(store), batch * documents)
    chunks = int(run.sql("SELECT coalesce(sum(cardinality(chunk_ids)), 0) FROM manifests")[0][0])
    held = [psutil.Process(pid) for pid in processes.values()]
    for process in held:
        process.suspend()
    try:
        for n in range(batch * documents, (batch + 1) * documents):
            write(run.library / f"{n:06}.md", text(n, CHUNKS * WORDS_A_CHUNK))
        run.penstock("ingest", str(run.library), "--acl", "staff")
        until(run, f"SELECT count(*) FROM index_state WHERE store = '{store}'", (batch + 1) * documents)
        chunks = int(run.sql("SELECT sum(cardinality(chunk_ids)) FROM manifests")[0][0]) - chunks
        everyone = {**servers, **processes}
        before = processors.seconds(everyone)
    finally:
        for process in held:
            process.resume()
    began = time.perf_counter()
    until(run, settled(store), (batch + 1) * documents)
    seconds = time.perf_counter() - began
    return {
        "workers": count,
        "seconds": round(seconds, 2),
        "chunks": chunks,
        "chunks_per_s": round(chunks / seconds),
        "processor_s": processors.spent(before, processors.seconds(everyone)),
    }


def compare(run: Run, documents: int, stores: Sequence[str], counts: Sequence[int]) -> dict[str, Any]:
    """Return, for each store, a row for each number of workers, and the last number's ratio to the first."""
    # Read first: later some workers are stopped, and `penstock status` exits with 1.
    servers = {name: pid for name, pid in run.processes().items() if name not in STORES}
    result: dict[str, Any] = {}
    batch = 0
    for store in stores:
        for other in {*STORES} - {store}:
            workers.stop(run.folder, other)
        rows = []
        for count in counts:
            rows.append(measure(run, servers, store, count, batch, documents))
            batch += 1
        for n in range(1, max(counts)):
            workers.stop(run.folder, f"{store}-{n}")
        ratio = rows[-1]["chunks_per_s"] / rows[0]["chunks_per_s"]
        result[store] = {"ratio": round(ratio, 2), "runs": rows}
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--documents", type=int, help=f"of each batch (500; {MODEL_DOCUMENTS} with --model-ms)")
    parser.add_argument("--model-ms", type=float, default=0.0, help="the time that the model takes for a request")
    parser.add_argument("--quick", action="store_true", help="100 documents")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    options = parser.parse_args(arguments)
    slow = options.model_ms > 0
    documents = options.documents or (100 if options.quick else MODEL_DOCUMENTS if slow else 500)
    load = os.getloadavg()[0]
    with started("bench-scaling", Run, latency_ms=options.model_ms) as run:
        result = compare(run, documents, STORES[:1] if slow else STORES, (1, 4) if slow else (1, 2))
    table = Table("store", "workers", "chunks/s", "ratio", title=f"{documents} documents, {os.cpu_count()} processors")
    for store, of in result.items():
        for row in of["runs"]:
            table.add_row(
                store, str(row["workers"]), str(row["chunks_per_s"]), str(of["ratio"]) if row["workers"] > 1 else ""
            )
    console.print(table)
    whole = {
        "model_ms": options.model_ms,
        "documents": documents,
        "cpus": os.cpu_count(),
        "load_before": round(load, 1),
        **result,
    }
    options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
