"""Measures Penstock and its peers on this machine, and puts them through the same cases.

    python -m bench.peers [--documents 1000] [--only NAME]... [--resume] [--json]     # → bench/results/peers.json

Each peer is run in its best documented configuration by a small driver (bench/peers/NAME.py) in a virtual environment
of its own; the model is bench.zero_cost, which counts the texts; rows are read in Postgres, which has no vector index.
Environments, the server's data and logs are in $PENSTOCK_HOME/peers (or --folder). docs/peers.md explains the method.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
import psycopg
from rich.console import Console

from bench.peers import steps, table
from bench.peers.driver import DriverFailed
from bench.peers.environments import PEERS, NotInstalled, Peer, python_of
from bench.peers.trial import Embedding, Trial
from bench.zero_cost import zero_cost
from deploy.local.stack import Stack
from pipeline.runtime.settings import home

RESULTS = Path(__file__).parents[1] / "results" / "peers.json"
stderr = Console(stderr=True, highlight=False)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and drivers end with it
    options = _arguments()
    chosen = [peer for peer in PEERS if not options.only or peer.name in options.only]
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    earlier = (
        known.get("peers", {})
        if known.get("documents") == options.documents and (options.only or options.resume)
        else {}
    )
    if options.resume:
        chosen = [peer for peer in chosen if "failed" in earlier.get(peer.name, {"failed": ""})]
    if options.show:
        _show(known, options)
        return
    folder = (options.folder or home() / "peers").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    whole: dict[str, Any] = {"documents": options.documents, "machine": _machine(), "peers": earlier}
    with _server(folder, "postgres") as postgres, zero_cost() as address:
        for peer in chosen:
            whole["peers"][peer.name] = _one(
                peer, folder, postgres["dsn"], Embedding(address), options.documents, with_cases=not options.no_cases
            )
            options.results.write_text(json.dumps(whole, indent=1) + "\n")
    _show(whole, options)
    if any("failed" in whole["peers"][peer.name] for peer in chosen):
        raise SystemExit(1)


def _show(whole: Mapping[str, Any], options: argparse.Namespace) -> None:
    measures, cases = table.measures(whole["peers"]), table.cases(whole["peers"])
    if options.json:
        print(json.dumps(whole))
    elif options.markdown:
        print(f"{table.for_page(measures)}\n\n{table.for_page(cases)}")
    else:
        out = Console(highlight=False, width=max(180, Console().width))
        out.print(table.for_terminal(measures, f"{whole['documents']} documents"))
        out.print(table.for_terminal(cases, "Texts embedded, and whether the store is right afterwards"))


def _one(
    peer: Peer, folder: Path, dsn: str, embedding: Embedding, documents: int, *, with_cases: bool = True
) -> dict[str, Any]:
    """Return a peer's results, or {"failed": the reason} if it fails; the others are then run all the same."""
    try:
        python = python_of(peer, folder, stderr.print)
        with ExitStack() as stack:
            elasticsearch = stack.enter_context(_server(folder, "elasticsearch"))["url"] if peer.keywords else ""
            trial = stack.enter_context(Trial.of(peer, python, folder, dsn, embedding, elasticsearch=elasticsearch))
            stderr.print(f"{peer.name}: measuring")
            result = {
                "versions": trial.process.hello["versions"],
                "at": _now(),
                "load": round(os.getloadavg()[0], 1),
                **steps.measure(trial, documents),
            }
            stderr.print(f"{peer.name}: {result['first_load_chunks_per_s']} chunks/s")
            return result | ({"cases": steps.cases(trial)} if with_cases else {})
    except (DriverFailed, NotInstalled, psycopg.Error) as error:
        reason = str(error).splitlines()[0]
    except Empty:
        reason = f"its driver did not greet (log: {folder / 'logs' / peer.name}.log)"
    stderr.print(f"{peer.name} failed: {reason}")
    return {"failed": reason}


@contextmanager
def _server(folder: Path, name: str) -> Iterator[Mapping[str, Any]]:
    """Run this server of the local stack alone while the block runs, with its data in the folder. Yield its
    endpoints."""
    stack = Stack(folder / name, die_with_parent=True)
    stack.up(services=(name,))
    try:
        yield stack.endpoints()[name]
    finally:
        stack.down()


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "at": _now(),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000)
    parser.add_argument(
        "--only",
        action="append",
        choices=[peer.name for peer in PEERS],
        metavar="NAME",
        help="this peer; may be repeated; the others' results are kept",
    )
    parser.add_argument("--no-cases", action="store_true", help="only load, edits and deletes: two minutes a peer")
    parser.add_argument("--resume", action="store_true", help="only those that have no result of this size yet")
    parser.add_argument("--folder", type=Path, help="environments, the server's data, logs; $PENSTOCK_HOME/peers")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="the tables as docs/peers.md has them")
    parser.add_argument("--show", action="store_true", help="measure nothing: show the results that are there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
