"""Dead letters that need no replay are set aside by the real command, on a real ledger."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import Result
from typer.testing import CliRunner

from cli.main import app
from deploy.local.stack import Stack
from pipeline.diagnosis import ledger
from pipeline.diagnosis.vitals import Vitals
from pipeline.ledger import letters
from pipeline.ledger.letters import Filter
from pipeline.observability.metrics import Metrics
from pipeline.stages.stage import Incoming
from tests.support.query.library import Library, WordEmbedder

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

WHY = "a test run of the wiki"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        yield library


@pytest.fixture
def home(library: Library, tmp_path: Path) -> Path:
    library.write_home(tmp_path)
    return tmp_path


async def make_dead_letters(library: Library, tenant: str, *names: str, value: bytes | None = b"{broken") -> list[str]:
    """Ids of new letters of these documents."""
    records = []
    for name in names:
        library.offset += 1
        key = f"{tenant}/wiki/{name}".encode()
        records.append(Incoming("documents", 0, library.offset, key, value, [], "live"))
    await library.detect.handle(records)
    return [f"documents:0:{record.offset}" for record in records]


async def penstock(home: Path, *arguments: str) -> Result:
    """The real command, in this process: a new one for each takes seconds."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["dead", *arguments], env={"PENSTOCK_HOME": str(home)})


async def answer(home: Path, *arguments: str) -> Any:
    done = await penstock(home, *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


async def waiting_letter_counts(library: Library) -> tuple[float | None, int]:
    """How many letters wait, by the metric behind the alert and by the page's tab."""
    metrics = Metrics()
    async with library.pool.connection() as connection:
        await Vitals(library.pool, library.settings.kafka, {}, metrics, every_seconds=0.05).look(connection)
    async with library.pool.connection() as connection:
        shown = await ledger.dead_letters(connection)
    value = metrics.registry.get_sample_value("penstock_waiting_dead_letters", {"stage": "detect"})
    return value, shown["waiting"]


async def test_a_dismissed_dead_letter_is_no_longer_counted_but_stays_listed(
    library: Library, tenant: str, home: Path
) -> None:
    mine, other = await make_dead_letters(library, tenant, "a.md", "b.md")
    before, shown_before = await waiting_letter_counts(library)
    response = await answer(home, "dismiss", mine, "--reason", WHY, "--by", "ann")
    assert response == [{"id": mine, "changed": True, "would_change": True, "reason": None}]
    after, shown_after = await waiting_letter_counts(library)
    assert before is not None
    assert (after, shown_after) == (before - 1, shown_before - 1)
    assert [letter["id"] for letter in await answer(home, "list", "--tenant", tenant)] == [other]
    [kept] = await answer(home, "list", "--tenant", tenant, "--dismissed")
    assert kept["id"] == mine
    assert {k: kept["dismissed"][k] for k in ("by", "reason")} == {"by": "ann", "reason": WHY}
    assert len(await answer(home, "list", "--tenant", tenant, "--all")) == 2
    assert f"[dismissed by ann: {WHY}]" in (await penstock(home, "list", "--tenant", tenant, "--dismissed")).stdout


async def test_undoing_a_dismissal_makes_the_dead_letter_wait_again_and_both_are_in_the_trail(
    library: Library, tenant: str, home: Path
) -> None:
    [mine] = await make_dead_letters(library, tenant, "a.md")
    await answer(home, "dismiss", mine, "--reason", WHY, "--by", "ann")
    undone = await penstock(home, "dismiss", mine, "--undo", "--by", "bob", "--reason", "it was no test")
    assert (undone.exit_code, undone.stdout) == (0, "1 of 1 dead letters set to waiting\n")
    [waiting] = await answer(home, "list", "--tenant", tenant)
    assert waiting["dismissed"] is None
    async with library.pool.connection() as connection:
        trail = await letters.trail(connection, mine)
    assert [(record.action, record.by, record.reason) for record in trail] == [
        ("dismissed", "ann", WHY),
        ("undone", "bob", "it was no test"),
    ]
    assert trail[0].at < trail[1].at


async def test_a_new_failure_of_the_same_document_is_a_new_dead_letter(
    library: Library, tenant: str, home: Path
) -> None:
    [first] = await make_dead_letters(library, tenant, "a.md")
    await answer(home, "dismiss", first, "--reason", WHY)
    record = Incoming("documents", 0, int(first.split(":")[2]), f"{tenant}/wiki/a.md".encode(), b"{broken", [], "live")
    await library.detect.handle([record])  # the same record once more, as after a rewind: it stays judged
    assert await answer(home, "list", "--tenant", tenant) == []
    [second] = await make_dead_letters(library, tenant, "a.md")
    assert [letter["id"] for letter in await answer(home, "list", "--tenant", tenant)] == [second]


async def test_dead_letters_are_dismissed_in_bulk_by_a_filter(library: Library, tenant: str, home: Path) -> None:
    broken = await make_dead_letters(library, tenant, "a.md", "b.md", "c.md")
    [none] = await make_dead_letters(library, tenant, "d.md", value=None)
    chosen = ("dismiss", "--all", "--tenant", tenant, "--code", "no_value", "--reason", WHY)

    refused = await penstock(home, *chosen)
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    tried = await penstock(home, *chosen, "--dry-run")
    assert tried.exit_code == 0
    assert tried.stdout == f"  {none}\n1 dead letters would be dismissed; nothing was changed\n"
    assert len(await answer(home, "list", "--tenant", tenant)) == 4

    assert [letter["changed"] for letter in await answer(home, *chosen, "--yes")] == [True]
    assert {letter["id"] for letter in await answer(home, "list", "--tenant", tenant)} == set(broken)
    assert await answer(home, *chosen, "--yes") == []  # nothing is left to dismiss
    await answer(home, "dismiss", "--all", "--tenant", tenant, "--undo", "--yes")
    assert len(await answer(home, "list", "--tenant", tenant)) == 4


async def test_dead_letters_that_cannot_be_dismissed_are_named_and_the_others_dismissed(
    library: Library, tenant: str, home: Path
) -> None:
    replayed, before, mine = await make_dead_letters(library, tenant, "a.md", "b.md", "c.md")
    async with library.pool.connection() as connection:
        await letters.mark_replayed(connection, [(replayed, None)])
    await answer(home, "dismiss", before, "--reason", "earlier", "--by", "bob")
    done = await penstock(home, "dismiss", replayed, before, "no:such:1", mine, "--reason", WHY)
    assert done.exit_code == 1
    assert done.stdout == "1 of 4 dead letters dismissed\n"
    assert done.stderr.splitlines() == [
        f"unchanged: {replayed}: it was replayed already",
        f"unchanged: {before}: it was dismissed before, by bob: earlier",
        "error: no:such:1: no dead letter has this id",
    ]
    assert (await penstock(home, "dismiss", mine, "--reason", "again")).exit_code == 0  # repeats are harmless
    async with library.pool.connection() as connection:
        assert (await letters.get(connection, [mine]))[mine].dismissed_reason == WHY
        assert await letters.ids(connection, Filter(tenant=tenant)) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give the ids"),
        (("a:0:1", "--all", "--reason", "x"), "give the ids"),
        (("a:0:1", "--code", "invalid", "--reason", "x"), "need --all"),
        (("a:0:1",), "--reason"),
        (("a:0:1", "--reason", "x" * 501), "at most 500"),
        (("a:0:1", "--reason", "x", "--by", " "), "--by"),
    ],
)
async def test_wrong_arguments_of_dead_dismiss_are_rejected_with_advice(
    home: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = await penstock(home, "dismiss", *arguments)
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())


def run_on_terminal(home: Path, typed: bytes, *arguments: str) -> tuple[int, str]:
    """Exit code, and all that the terminal showed."""
    terminal, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "cli.main", "dead", *arguments],
        env={**os.environ, "PENSTOCK_HOME": str(home), "COLUMNS": "200"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        os.write(terminal, typed)
        shown = b""
        while True:
            try:
                more = os.read(terminal, 4096)
            except OSError:  # the other end is closed
                break
            if not more:
                break
            shown += more
        os.close(terminal)
    return process.returncode, shown.decode()


async def test_on_a_terminal_a_bulk_dismissal_asks_for_confirmation(library: Library, tenant: str, home: Path) -> None:
    ids = await make_dead_letters(library, tenant, "a.md", "b.md")
    chosen = ("dismiss", "--all", "--tenant", tenant, "--reason", WHY)
    code, shown = run_on_terminal(home, b"n\n", *chosen)
    assert code == 1
    assert "Dismiss 2 letters?" in shown
    assert all(id_ in shown for id_ in ids)
    assert "nothing was changed" in shown
    assert len(await answer(home, "list", "--tenant", tenant)) == 2
    code, shown = run_on_terminal(home, b"y\n", *chosen)
    assert code == 0
    assert "2 of 2 dead letters dismissed" in shown
    assert await answer(home, "list", "--tenant", tenant) == []
