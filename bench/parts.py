"""The parts that `python -m bench` runs, in this order, with their full and quick arguments."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    name: str
    """Key of its result in latest.json."""
    module: str
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    """The arguments. Each part also takes ``--json FILE``."""
    prints: bool = False
    """The part takes ``--json`` alone and prints its result."""
    stack: bool = False
    """The part needs a running local stack; others start what they need."""


def _load(documents: int, *, quick: int) -> Part:
    return Part(f"ingest_{documents}", "bench.ingest", ("--documents", str(documents)), ("--documents", str(quick)))


PARTS = (
    Part("chunking", "bench.chunking"),
    Part("embedding_client", "bench.embedding_client", (), ("--quick",)),
    _load(100, quick=20),
    _load(1_000, quick=100),
    _load(5_000, quick=200),
    Part("burst", "bench.burst", (), ("--chunks", "1000"), prints=True),
    Part("freshness", "bench.freshness", (), ("--seconds", "30", "--backfill", "2000", "--documents", "300"), True),
    Part("query", "bench.query", (), ("--quick",), stack=True),
    Part("starts", "bench.starts", (), ("--quick",), stack=True),
    Part("scaling", "bench.scaling", (), ("--quick",)),
    Part(
        "hour",
        "bench.freshness",
        ("--seconds", "3600", "--rate", "25", "--backfill", "20000"),
        ("--seconds", "20", "--rate", "10", "--backfill", "500", "--documents", "300"),
        True,
    ),
)
MAIN_LOAD = "ingest_1000"
"""The load that peers are compared with: 1,000 documents, about 9,000 chunks."""
