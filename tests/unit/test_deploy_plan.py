"""The capacity model: what it says of sizes that were measured, and how it must move."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pipeline.cli.plan import plan as command
from pipeline.plan import Prices, Wanted, graph_bytes, plan, row_bytes

GUIDE = Path(__file__).parents[2] / "docs" / "scaling.md"
BIG = Wanted(2_000_000, changes_per_hour=10_000, queries_per_second=500)


@pytest.mark.parametrize(
    ("dimensions", "quantisation", "measured"),
    [(1536, "halfvec", 4098), (384, "halfvec", 1171), (1536, "binary", 503), (384, "binary", 350)],
)
def test_a_graph_is_as_large_as_pgvector_made_it(dimensions: int, quantisation: str, measured: int) -> None:
    assert graph_bytes(dimensions, quantisation) == pytest.approx(measured, rel=0.03)  # type: ignore[arg-type]


def test_a_row_is_as_large_as_postgres_made_it() -> None:
    assert row_bytes(1_535, 1_536) == pytest.approx(6_254 + 106, rel=0.05)


def test_fifty_million_chunks() -> None:
    p = plan(BIG)
    assert p.chunks == 50_000_000
    assert p.graph_gb == pytest.approx(205, rel=0.01)
    assert plan(replace(BIG, quantisation="binary")).graph_gb == pytest.approx(25, rel=0.05)
    assert p.postgres_nodes == 1
    assert plan(replace(BIG, node_memory_gb=128)).postgres_nodes == 2
    assert plan(replace(BIG, quantisation="binary", node_memory_gb=128)).postgres_nodes == 1
    assert p.load_cost == pytest.approx(2_600)


@given(
    st.builds(
        Wanted,
        documents=st.integers(1, 10**8),
        chunks_per_document=st.floats(0.1, 1_000),
        changes_per_hour=st.floats(0, 10**6),
        queries_per_second=st.floats(0, 10**4),
    )
)
def test_twice_as_much_never_needs_less(wanted: Wanted) -> None:
    less = plan(wanted)
    more = plan(
        replace(
            wanted, documents=wanted.documents * 2, changes_per_hour=wanted.changes_per_hour * 2,
            queries_per_second=wanted.queries_per_second * 2,
        )
    )  # fmt: skip
    for field in less.__slots__:  # type: ignore[attr-defined]
        assert getattr(more, field) >= getattr(less, field), field
    assert less.partitions >= max(less.detect, less.vectors, less.keywords), "a process without a partition idles"


def test_cost_is_what_the_prices_make_of_it() -> None:
    assert plan(BIG, Prices(0, 0, 0, 0)).cost_a_month == 0
    one = plan(BIG, Prices(1, 0, 0, 0))
    assert one.cost_a_month == one.query_processors + one.store_processors + one.detect + one.vectors + one.keywords


@pytest.mark.parametrize("wrong", [replace(BIG, dimensions=4_001), replace(BIG, documents=0)])
def test_what_cannot_be_is_refused(wrong: Wanted) -> None:
    with pytest.raises(ValueError, match=r"dimensions|more than nothing"):
        plan(wrong)


def test_the_guide_shows_what_the_command_says() -> None:
    app = typer.Typer()
    app.command()(command)
    [(line, shown)] = re.findall(r"^\$ penstock plan (.+)\n((?:.+\n)+?)```$", GUIDE.read_text(), re.M)
    assert CliRunner().invoke(app, line.split()).stdout == shown


def test_the_command_says_it_in_words_and_as_json() -> None:
    app = typer.Typer()
    app.command()(command)
    run = CliRunner().invoke
    said = run(app, ["--documents", "2000000"])
    assert said.exit_code == 0
    assert "50,000,000 chunks" in said.stdout
    told = json.loads(run(app, ["--documents", "2000000", "--json"]).stdout)
    assert told["graph_gb"] == pytest.approx(204.8)
    refused = run(app, ["--documents", "5", "--dimensions", "5000"])
    assert (refused.exit_code, "4,000" in refused.output) == (2, True)
