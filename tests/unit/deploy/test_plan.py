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

from cli.plan import plan as command
from pipeline.maintenance import plan as capacity
from pipeline.maintenance.plan import Prices, Workload, entry_vector_bytes, graph_bytes, plan, row_bytes

GUIDE = Path(__file__).parents[3] / "docs" / "scaling.md"
BIG = Workload(2_000_000, changes_per_hour=10_000, queries_per_second=500)


RESULTS = Path(__file__).parents[3] / "bench" / "results"
SIZED = json.loads((RESULTS / "sizing.json").read_text())
LOAD = json.loads((RESULTS / "query_load.json").read_text())
SEARCHED = json.loads((RESULTS / "query.json").read_text())


@pytest.mark.parametrize("dimensions", [384, 1_536])
def test_the_models_graph_size_matches_the_measured_one(dimensions: int) -> None:
    measured = SIZED["dimensions"][str(dimensions)]
    assert graph_bytes(dimensions, "halfvec") == pytest.approx(measured["graph_bytes"], rel=0.03)
    assert graph_bytes(dimensions, "binary") == pytest.approx(measured["bit_graph_bytes"], rel=0.05)


@pytest.mark.parametrize("dimensions", [384, 1_536])
def test_the_models_cost_of_a_vector_in_elasticsearch_matches_the_measured_one(dimensions: int) -> None:
    measured = SIZED["elasticsearch"][str(dimensions)]
    memory, disk = entry_vector_bytes(dimensions)
    assert memory == pytest.approx(measured["memory_bytes"], rel=0.04)
    assert disk == pytest.approx(measured["disk_bytes"], rel=0.01)
    server = capacity.ENTRY_SERVER_SECONDS + dimensions * capacity.ENTRY_SERVER_SECONDS_PER_DIMENSION
    assert 1000 * server == pytest.approx(measured["server_ms"], rel=0.05)
    search = capacity.SHARD_SECONDS + dimensions * capacity.SHARD_SECONDS_PER_DIMENSION
    assert 1000 * search == pytest.approx(measured["search_ms"], rel=0.05)
    client = dimensions * capacity.ENTRY_CLIENT_SECONDS_PER_DIMENSION
    assert 1000 * client == pytest.approx(measured["client_ms"], rel=0.1)


def test_the_models_row_size_matches_the_measured_one() -> None:
    for dimensions in (384, 1_536):
        sketch = dimensions / 8 + capacity.index_entry_bytes(dimensions)  # the measured rows have none
        measured = SIZED["dimensions"][str(dimensions)]["row_bytes"] + sketch
        assert row_bytes(SIZED["characters"], dimensions) == pytest.approx(measured, rel=0.05)
    assert pytest.approx(SIZED["dimensions"]["1536"]["key_bytes"], rel=0.05) == capacity.KEY_BYTES


def test_the_models_ledger_and_keyword_index_sizes_match_the_measured_ones() -> None:
    library = SIZED["library"]
    ledger = capacity.LEDGER_DOCUMENT_BYTES + library["chunks_per_document"] * capacity.LEDGER_CHUNK_BYTES
    assert ledger == pytest.approx(library["ledger_bytes_per_document"], rel=0.05)
    assert pytest.approx(library["body_share"], rel=0.05) == capacity.BODY_SHARE
    assert pytest.approx(library["keyword_share"], rel=0.05) == capacity.KEYWORD_SHARE


def test_the_models_rates_match_the_measured_ones() -> None:
    """Texts of a chunk were shorter there: what counts is characters a second."""
    shorter = SIZED["library"]["text_bytes_per_chunk"] / Workload(1).chunk_characters
    detect, keywords = (LOAD["chunks"] / LOAD["seconds_to_load"][item] * shorter for item in ("detect", "keywords"))
    assert pytest.approx(detect, rel=0.05) == capacity.DETECT_CHUNKS_PER_SECOND
    assert pytest.approx(keywords, rel=0.05) == capacity.KEYWORDS_CHUNKS_PER_SECOND
    graph = SIZED["dimensions"]["1536"]
    assert pytest.approx(1000 / graph["ms_per_row_added"], rel=0.05) == capacity.VECTORS_ROWS_PER_SECOND
    assert pytest.approx(1000 / graph["ms_per_row_built"], rel=0.05) == capacity.BUILT_ROWS_PER_SECOND
    plain = LOAD["chunks"] / LOAD["seconds_to_load"]["vectors"] / 4
    assert pytest.approx(plain, rel=0.05) == capacity.ROWS_WITHOUT_GRAPH_PER_SECOND


def test_the_models_cost_of_a_search_matches_the_measured_one() -> None:
    largest = SEARCHED["sizes"][-1]
    service = largest["searches"]["100 %"]["service_cpu_ms_per_request"] / 1_000
    assert pytest.approx(service, rel=0.05) == capacity.SERVICE_SECONDS_PER_QUERY
    whole = SEARCHED["machine"]["cores"] / largest["crowds"]["per_second"]
    assert whole - service < capacity.STORES_SECONDS_PER_QUERY < whole


def test_plan_of_fifty_million_chunks() -> None:
    p = plan(BIG)
    assert p.chunks == 50_000_000
    assert p.graph_gb == pytest.approx(30, rel=0.05)
    halfvecs = replace(BIG, chosen_quantisation="halfvec")
    assert plan(halfvecs).graph_gb == pytest.approx(205, rel=0.01)
    assert plan(halfvecs).postgres_nodes == 1
    assert plan(replace(halfvecs, node_memory_gb=128)).postgres_nodes == 2
    assert plan(replace(BIG, node_memory_gb=128)).postgres_nodes == 1
    assert p.load_cost == pytest.approx(2_600)


def test_a_graph_that_is_built_with_care_takes_longer() -> None:
    sketches, short, careful = (
        plan(replace(BIG, dimensions=dimensions, chosen_quantisation=of))
        for dimensions, of in ((1_536, "binary"), (1_023, "halfvec"), (1_536, "halfvec"))
    )
    usual_hours = short.graph_hours / capacity.SHORT_BUILD
    assert careful.graph_hours == pytest.approx(usual_hours * capacity.CAREFUL_BUILD)
    assert sketches.graph_hours == pytest.approx(usual_hours * capacity.SKETCHES_BUILD)
    assert careful.vectors > short.vectors >= sketches.vectors


def test_plan_of_a_thousand_million_chunks_in_elasticsearch() -> None:
    p = plan(Workload(40_000_000, vectors="elasticsearch"))
    assert p.chunks == 1_000_000_000
    assert p.graph_gb == pytest.approx(256, rel=0.01)
    assert p.keyword_memory_gb == pytest.approx(2 * p.graph_gb)
    assert (p.keyword_nodes, p.postgres_nodes) == (3, 1)
    assert plan(Workload(40_000_000, vectors="elasticsearch", keyword_replicas=0)).keyword_nodes == 2
    in_postgres = plan(Workload(40_000_000))
    assert in_postgres.postgres_nodes == 3
    assert p.keyword_disk_gb > in_postgres.keyword_disk_gb, "the entries carry the vectors"
    assert p.postgres_disk_gb < in_postgres.postgres_disk_gb, "without a graph"


@given(
    st.builds(
        Workload,
        vectors=st.sampled_from(["pgvector", "elasticsearch"]),
        documents=st.integers(1, 10**8),
        chunks_per_document=st.floats(0.1, 1_000),
        changes_per_hour=st.floats(0, 10**6),
        queries_per_second=st.floats(0, 10**4),
    )
)
def test_a_doubled_workload_never_needs_fewer_resources(workload: Workload) -> None:
    less = plan(workload)
    more = plan(
        replace(
            workload,
            documents=workload.documents * 2,
            changes_per_hour=workload.changes_per_hour * 2,
            queries_per_second=workload.queries_per_second * 2,
        )
    )
    for field in less.__slots__:  # type: ignore[attr-defined]
        assert getattr(more, field) >= getattr(less, field), field
    assert less.partitions >= max(less.detect, less.vectors, less.keywords), "a process without a partition idles"


def test_the_monthly_cost_is_the_sum_of_resources_times_prices() -> None:
    assert plan(BIG, Prices(0, 0, 0, 0)).cost_a_month == 0
    one = plan(BIG, Prices(1, 0, 0, 0))
    assert one.cost_a_month == one.query_processors + one.store_processors + one.detect + one.vectors + one.keywords
    whole = plan(BIG)
    parts = (whole.cost_processors, whole.cost_memory, whole.cost_disk, whole.cost_tokens)
    assert whole.cost_a_month == pytest.approx(sum(parts))
    assert min(parts) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        replace(BIG, dimensions=4_001, chosen_quantisation="halfvec"),
        replace(BIG, dimensions=4_097, vectors="elasticsearch"),
        replace(BIG, documents=0),
    ],
)
def test_an_impossible_workload_is_refused(wrong: Workload) -> None:
    with pytest.raises(ValueError, match=r"dimensions|more than nothing"):
        plan(wrong)


def test_each_example_in_the_guide_shows_the_output_of_the_command() -> None:
    app = typer.Typer()
    app.command()(command)
    examples = re.findall(r"^\$ penstock plan (.+)\n((?:.+\n)+?)```$", GUIDE.read_text(), re.M)
    assert len(examples) == 2
    for line, shown in examples:
        assert CliRunner().invoke(app, line.split()).stdout == shown


def test_the_plan_command_prints_text_or_json_and_refuses_invalid_options() -> None:
    app = typer.Typer()
    app.command()(command)
    run = CliRunner().invoke
    said = run(app, ["--documents", "2000000"])
    assert said.exit_code == 0
    assert "50,000,000 chunks" in said.stdout
    output = json.loads(run(app, ["--documents", "2000000", "--json"]).stdout)
    assert output["graph_gb"] == pytest.approx(29.26, rel=0.01)
    assert "--vectors elasticsearch" in run(app, ["--documents", "40000000"]).stdout
    refused = run(app, ["--documents", "5", "--dimensions", "5000", "--quantisation", "halfvec"])
    assert (refused.exit_code, "4,000" in refused.output) == (2, True)
