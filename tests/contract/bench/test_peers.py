"""bench.peers on a trivial peer, over a real Postgres and the real embedding server: what it measures and judges."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.peers import steps, table
from bench.peers.__main__ import _one
from bench.peers.environments import Peer
from bench.peers.library import Library, Row
from bench.peers.trial import Embedding, Trial
from bench.zero_cost import zero_cost
from deploy.local.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.slow]
DOCUMENTS = 5


@pytest.fixture(scope="module")
def embedding() -> Iterator[Embedding]:
    with zero_cost() as address:
        yield Embedding(address)


def trivial(variant: str) -> Peer:
    return Peer(f"trivial-{variant or 'good'}", "Trivial", "tests.support.deploy.trivial_peer", variant)


def run(stack: Stack, embedding: Embedding, folder: Path, variant: str, *, cases: bool) -> dict[str, Any]:
    dsn = stack.endpoints()["postgres"]["dsn"]
    with Trial.of(trivial(variant), Path(sys.executable), folder, dsn, embedding) as trial:
        result = steps.measure(trial, DOCUMENTS)
        return result | ({"cases": steps.cases(trial)} if cases else {})


def test_a_working_peer_is_measured_and_judged(stack: Stack, embedding: Embedding, tmp_path: Path) -> None:
    output = run(stack, embedding, tmp_path, "", cases=True)
    assert output["edit_reembedded_per_document"] == 1
    assert (output["deletes_gone"], output["deleted_rows_left"]) == (True, 0)
    assert output["insert_paragraph_reembedded"] == 1
    assert output["embedded_at_first"] <= output["chunks"]  # headings are alike
    assert output["rss_mb"] > 0
    cases = output["cases"]
    assert {letter for letter, case in cases.items() if not case["right"]} == {"e"}
    assert cases["a"]["embedded"] == cases["c"]["embedded"] == 1
    assert (cases["b"]["embedded"], cases["f"]["embedded"], cases["g"]["embedded"]) == (0, 0, 0)
    assert "503" in cases["c"]["error_meanwhile"]
    assert cases["c"]["embedded_meanwhile"] == cases["c"]["gone_meanwhile"] == 0
    assert cases["d"]["by_itself"]
    assert "429" in cases["e"]["error"]  # it does not try again of itself
    assert cases["e"]["right_after_another_run"]
    assert cases["g"]["rows_written"] == 0


def test_rows_left_after_deletes_are_reported(stack: Stack, embedding: Embedding, tmp_path: Path) -> None:
    output = run(stack, embedding, tmp_path, "hoarder", cases=False)
    assert output["deletes_gone"] is False
    assert output["deleted_rows_left"] > 1
    grid = table.measures({"hoarder": output, "absent": {"failed": "no such package"}})
    assert [len(row) for row in grid] == [len(grid[0])] * 3
    assert f"no, {output['deleted_rows_left']} stay" in grid[1]
    assert grid[2][:2] == ["absent", "failed: no such package"]
    assert len(table.for_page(grid).splitlines()) == 4


def test_a_peer_that_does_not_start_is_named_with_the_reason(
    stack: Stack, embedding: Embedding, tmp_path: Path
) -> None:
    result = _one(trivial("broken"), tmp_path, stack.endpoints()["postgres"]["dsn"], embedding, DOCUMENTS)
    assert result.keys() == {"failed"}
    assert "nothing works here" in result["failed"]


def test_a_peers_store_is_judged_by_its_rows(tmp_path: Path) -> None:
    library = Library(tmp_path)
    library.fill(1)
    [name] = library.some(0)
    text = library.text(name)
    half = len(text) // 2
    good = [Row(name, text[: half + 9], "staff"), Row(name, text[half:], "staff")]
    assert library.faults(good) == {}
    assert "lacks" in library.faults(good[:1])[name]
    assert "lacks" in library.faults([])[name]
    assert library.faults([*good, Row(name, "words of another time", "staff")]) == {name: "has a row of another text"}
    assert library.faults([good[0], Row(name, text[half:], "board")]) == {name: "has a row with other readers"}
    assert library.faults([good[0], Row(name, text[half:], "staff", False)]) == {name: "has a row without a vector"}
    assert library.faults([*good, Row("00/99999.md", "x", "staff")]) == {"00/99999.md": "is gone but has rows"}
