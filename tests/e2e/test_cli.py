"""The commands as a newcomer types them, on real services, with input that is good, bad and worse."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run_penstock
from tests.support.space import Space

WORKERS = ("detect", "vectors", "keywords")


def run(space: Space, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_penstock(*arguments, env=space.environment)


def answer(space: Space, *arguments: str) -> Any:
    process = run(space, *arguments, "--json")
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def search_ids(space: Space, query: str, *options: str) -> list[str]:
    """File names of the results, best first."""
    return [Path(r["external_id"]).name for r in answer(space, "search", query, *options)["results"]]


@pytest.fixture
def working(space: Space) -> Space:
    space.start(*WORKERS)
    return space


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "turbine.md").write_text("# Turbine service\n\nThe turbine blades are inspected every spring.\n")
    (folder / "dam.md").write_text("# Dam safety\n\nSeepage through the dam wall is measured daily.\n")
    (folder / "copy-1.txt").write_text("The spillway opens when the reservoir is full.\n")
    (folder / "copy-2.txt").write_text("The spillway opens when the reservoir is full.\n")
    return folder


async def test_an_ingested_folder_is_searchable_and_follows_every_change(working: Space, folder: Path) -> None:
    loaded = answer(working, "ingest", str(folder), "--wait")
    assert {k: loaded[k] for k in ("published", "unchanged", "indexed", "dead", "chunks")} == {
        "published": 4,
        "unchanged": 0,
        "indexed": 4,
        "dead": 0,
        "chunks": 4,
    }
    assert search_ids(working, "when are the blades of a turbine looked at?")[0] == "turbine.md"

    again = answer(working, "ingest", str(folder), "--wait")
    assert (again["published"], again["unchanged"], again["embedded"]) == (0, 4, 0)

    (folder / "copy-1.txt").unlink()
    assert answer(working, "ingest", str(folder), "--wait")["embedded"] == 0
    assert [n for n in search_ids(working, "spillway reservoir full") if n.startswith("copy")] == ["copy-2.txt"]

    (folder / "dam.md").write_text("# Dam safety\n\nThe gallery of the dam is inspected on foot.\n")
    token = answer(working, "ingest", str(folder))["token"]
    at_least = "--at-least", token, "--wait-seconds", "30"
    assert search_ids(working, "gallery inspected on foot", *at_least)[0] == "dam.md"
    assert answer(working, "ask", "How is the gallery inspected?", *at_least)["at_least"]["applied"] is True

    (folder / ".penstock.toml").write_text('acl = ["engineers"]\n')
    assert answer(working, "ingest", str(folder), "--wait")["embedded"] == 0
    assert search_ids(working, "turbine blades") == []
    assert search_ids(working, "turbine blades", "--tag", "engineers")[0] == "turbine.md"
    assert search_ids(working, "turbine blades", "--tag", "engineers", "--tenant", "other") == []

    (folder / ".penstock.toml").write_text("acl = []\n")
    nobody = run(working, "ingest", str(folder), "--wait")
    assert nobody.returncode == 0
    assert search_ids(working, "turbine blades", "--tag", "engineers") == []
    why = answer(working, "why", str(folder / "turbine.md"))
    assert why["searchable"] is False
    assert "access" in why["reason"] or "nobody" in why["reason"]


@pytest.mark.slow
async def test_two_tenants_with_equal_tags_do_not_see_each_other(working: Space, folder: Path) -> None:
    answer(working, "ingest", str(folder / "turbine.md"), "--acl", "staff", "--tenant", "one", "--wait")
    answer(working, "ingest", str(folder / "dam.md"), "--acl", "staff", "--tenant", "two", "--wait")
    for mode in ("hybrid", "vector", "keyword"):
        for tenant, own in (("one", "turbine.md"), ("two", "dam.md")):
            names = search_ids(working, "turbine dam", "--tag", "staff", "--tenant", tenant, "--mode", mode)
            assert set(names) <= {own}


@pytest.mark.slow
async def test_unreadable_files_are_reported_and_the_others_indexed(working: Space, folder: Path) -> None:
    (folder / "empty.txt").touch()
    (folder / "binary.txt").write_bytes(os.urandom(4096) + b"\x00")
    (folder / "latin.txt").write_bytes("Die Böschung wird jährlich geprüft, die Mauer täglich.\n".encode("latin-1") * 5)
    (folder / "line.txt").write_text("One line about sediment and silt. " * 30_000)
    with (folder / "huge.txt").open("wb") as huge:
        huge.write(b"x" * 50_000_000)
    loaded = run(working, "ingest", str(folder), "--wait", "--json")
    assert loaded.returncode == 0, loaded.stderr
    result = json.loads(loaded.stdout)
    assert result["dead"] == 0
    assert result["indexed"] >= 5
    for name in ("empty.txt", "binary.txt", "huge.txt"):
        assert sum(name in line for line in loaded.stderr.splitlines()) == 1, loaded.stderr
    assert search_ids(working, "sediment and silt")[0] == "line.txt"
    assert search_ids(working, "turbine blades")[0] == "turbine.md"


@pytest.mark.slow
async def test_ten_thousand_files_are_searchable_by_keyword_without_the_vectors_worker(
    working: Space, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for n in range(10_000):
        (folder / f"{n}.txt").write_text(f"number {n}\n")
    working.stop("vectors")
    assert answer(working, "ingest", str(folder))["published"] == 10_000
    waiting = "SELECT 10000 - count(*) FROM index_state WHERE store = 'keywords' AND seq >= want_seq"
    deadline = time.monotonic() + 200
    while (await working.query(waiting))[0][0]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)
    assert search_ids(working, "number 7777", "--mode", "keyword")[0] == "7777.txt"
    assert await working.query("SELECT count(*) FROM dead_letters") == [(0,)]


WRONG_ARGUMENTS: Sequence[tuple[list[str], int, str]] = (
    (["ingest", "no/such/folder"], 2, "does not exist"),
    (["ingest", "README.md", "--acl", ""], 2, "cannot be empty"),
    (["ingest", "README.md", "--acl", "folder/staff"], 2, "write 'staff'"),
    (["ingest", "README.md", "--required", "nda"], 2, "--required needs --acl"),
    (["watch", "README.md", "--acl", "staff", "--required", "folder/nda"], 2, "write 'nda'"),
    (["why", "no/such/document"], 1, "no/such/document"),
    (["worker", "nonsense"], 2, "'nonsense' is not one of"),
    (["search", " "], 2, ""),
)


async def test_wrong_arguments_are_reported_without_a_traceback(space: Space) -> None:
    for arguments, code, says in WRONG_ARGUMENTS:
        process = run(space, *arguments)
        assert (arguments, process.returncode) == (arguments, code), process.stderr
        assert says in process.stderr
        assert "Traceback" not in process.stderr


async def test_ingest_without_services_fails_with_one_line(space: Space, folder: Path) -> None:
    space.environment |= {"PENSTOCK_POSTGRES_DSN": "postgresql://postgres@127.0.0.1:1/penstock"}
    process = run(space, "ingest", str(folder))
    assert process.returncode == 1
    assert len(process.stderr.strip().splitlines()) == 1, process.stderr
