"""Lineage of loads, audits and migrations, by the real commands and workers, as a receiver validates it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connectors.fakes.notes import SECRET, TOKEN, Note, NotesService, app
from deploy.local.stack import Stack
from pipeline.runtime.http_server import served
from tests.fakes.lineage import FakeLineage, rows
from tests.fakes.server import serving as embedding_server
from tests.support.space import Space
from tests.support.waiting import until

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@dataclass
class House:
    space: Space
    receiver: FakeLineage

    async def penstock(self, *arguments: str) -> Any:
        code, printed = await self.space.penstock(*arguments, "--json")
        assert code == 0, printed
        return printed


@pytest.fixture
async def house(stack: Stack, tmp_path: Path) -> AsyncIterator[House]:
    async with AsyncExitStack() as opened:
        model = await opened.enter_async_context(embedding_server())
        embedding = {"provider": "openai", "base_url": model.url, "model": "text-embedding-3-large", "dimensions": 64}
        space = await opened.enter_async_context(Space.create(stack, tmp_path, embedding=embedding))
        receiver = await opened.enter_async_context(FakeLineage())
        notes = NotesService(
            notes={f"n{n}": Note(f"n{n}", "book", "A note", f"Text {n}.", n) for n in range(7)}, writes=7
        )
        url = await opened.enter_async_context(served(app(notes)))
        file = tmp_path / "connectors.toml"
        file.write_text(f'[connector.notes]\nkind = "examples.notes:Notes"\nurl = "{url}"\ntenant = "acme"\n')
        space.environment |= {
            "PENSTOCK_NOTES_TOKEN": TOKEN,
            "PENSTOCK_NOTES_SECRET": SECRET,
            "PENSTOCK_CONNECTORS_FILE": str(file),
            "PENSTOCK_AUDIT_DOCUMENTS_PER_SECOND": "1000",
            "OPENLINEAGE_URL": receiver.address,
        }
        yield House(space, receiver)


async def test_loads_audits_and_migrations_report_their_runs(house: House, tmp_path: Path) -> None:
    space, receiver = house.space, house.receiver
    folder = tmp_path / "notes"
    folder.mkdir()
    for n in range(5):
        (folder / f"n{n}.md").write_text(f"# Note {n}\n\nIt says {n}.\n")
    space.start("detect", "vectors", "keywords")
    loaded = await house.penstock("ingest", str(folder), "--acl", "staff", "--wait")

    began, ended = receiver.of("load.default.folder")
    assert (began["eventType"], ended["eventType"]) == ("START", "COMPLETE")
    table, index = "chunks_g1", f"{space.settings.elasticsearch.index_prefix}chunks-g1"
    assert rows(ended) == {"documents": 5, table: loaded["chunks"], index: loaded["chunks"]}
    assert [(i["namespace"], i["name"]) for i in ended["inputs"]] == [("file", str(folder))]
    database = next(output["name"].partition(".")[0] for output in ended["outputs"])
    assert space.settings.postgres.dsn.get_secret_value().count(database) == 1
    assert all("@" not in output["namespace"] for output in ended["outputs"])

    # A connector's load is a part of the connector's run, which ends when the worker stops.
    space.start("connectors")
    await until(lambda: "COMPLETE" in receiver.states("load.acme.notes"))
    [_, ended] = receiver.of("load.acme.notes")
    assert rows(ended) == {"documents": 7}
    assert await asyncio.to_thread(space.stop, "connectors") == 0  # the receiver is in this process
    connector = receiver.of("connector.acme.notes")
    assert [event["eventType"] for event in connector] == ["START", "COMPLETE"]
    assert ended["run"]["facets"]["parent"]["run"]["runId"] == connector[0]["run"]["runId"]
    await space.until(
        "SELECT count(*) FROM index_state s JOIN documents d ON d.id = s.document_id WHERE s.seq >= s.want_seq", 24
    )

    # Differences are results of an audit, not failures of it.
    assert await space.execute(f"DELETE FROM {table} WHERE id = (SELECT id FROM {table} LIMIT 1)") == 1
    code, _ = await space.penstock("audit", "--json")
    assert code == 1
    [began, ended] = receiver.of("audit.g1")
    assert (began["eventType"], ended["eventType"]) == ("START", "COMPLETE")
    failed = {
        (dataset["name"].rpartition(".")[2], assertion["assertion"])
        for dataset in ended["inputs"]
        for assertion in dataset.get("inputFacets", {}).get("dataQualityAssertions", {"assertions": []})["assertions"]
        if not assertion["success"]
    }
    assert failed == {(table, "no missing chunks")}

    built = await house.penstock("generation", "build", "--chunk-tokens", "100", "--wait", "--yes")
    [began, ended] = receiver.of("generation.build")
    assert (began["eventType"], ended["eventType"]) == ("START", "COMPLETE")
    assert set(rows(ended).values()) == {built["chunks"]}
    assert {i["name"].rpartition(".")[2] for i in ended["inputs"]} == {"documents", table}

    # What is searched comes from the stores of another generation; no rows are written.
    for job, generation in (("cutover", built["generation"]), ("rollback", "g1")):
        await house.penstock("generation", job, *(["--no-evaluation"] if job == "cutover" else []))
        [began, ended] = receiver.of(f"generation.{job}")
        assert (began["eventType"], ended["eventType"]) == ("START", "COMPLETE")
        assert [output["name"] for output in ended["outputs"]] == [f"{database}.readers.chunks"]
        assert rows(ended) == {"chunks": None}
        stores = {f"chunks_{generation}", index.replace("g1", generation)}
        assert {i["name"].rpartition(".")[2] for i in ended["inputs"]} == {"documents", *stores}

    await until(lambda: "COMPLETE" in receiver.states("audit.g1.background"))
    rounds: dict[str, list[str]] = {}
    for event in receiver.of("audit.g1.background"):
        rounds.setdefault(event["run"]["runId"], []).append(event["eventType"])
    assert ["START", "COMPLETE"] in rounds.values()
    for name in ("vectors", "keywords"):
        assert await asyncio.to_thread(space.stop, name) == 0
    assert [receiver.states(f"worker.{name}") for name in ("vectors", "keywords")] == [["START", "COMPLETE"]] * 2
    assert receiver.problems == []


async def test_a_load_that_fails_reports_why_and_a_receiver_that_is_away_delays_none(
    house: House, tmp_path: Path
) -> None:
    (tmp_path / "a.md").write_text("# A\n\nText.\n")
    with pytest.raises(AssertionError, match="1 of 1 documents are not searchable"):  # no worker runs
        await house.penstock("ingest", str(tmp_path / "a.md"), "--wait", "--timeout", "0.1")
    [_, ended] = house.receiver.of("load.default.folder")
    assert ended["eventType"] == "FAIL"
    assert "1 of 1 documents are not searchable" in ended["run"]["facets"]["errorMessage"]["message"]
    house.receiver.faults.hang = 1_000
    async with asyncio.timeout(60):
        assert (await house.penstock("ingest", str(tmp_path / "a.md")))["published"] == 1
