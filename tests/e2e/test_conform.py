"""A law that nothing breaks proves nothing: connectors that are broken on purpose are found out."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.conform import conversations
from connectors.conform.conversations import LAWS
from connectors.conform.run import ALL_LAWS, conform_on
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured
from tests.support.space import PROJECT, Space

pytestmark = pytest.mark.stack

BROKEN = {
    "SkipsAPage": ("first-crawl", "did not arrive"),
    "IsNeverSure": ("no-change", "although nothing had changed"),
    "SeesNoChanges": ("edit", "of one edit the poll published nothing"),
    "NamesByTitle": ("move", "a move was published as a delete"),
    "NeverDeletes": ("delete", "still there"),
    "ListsWithoutRestrictions": ("slim-is-full", "with another access"),
    "RemembersMembers": ("member-removed", "can still be read by the removed member"),
    "BelievesAnybody": ("webhook-doubled", "without its signature was accepted"),
    "ReadsAhead": ("stamps", "before they were stamped"),
    "BelievesItsListing": ("truncated-listing", "was not looked for by name"),
}


@pytest.fixture(scope="module")
def space(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    opened = Space.create(stack, tmp_path_factory.mktemp("conform"))
    with asyncio.Runner() as runner:
        space = runner.run(opened.__aenter__())
        try:
            space.start("detect")
            yield space
        finally:
            runner.run(opened.__aexit__(None, None, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
async def test_conform_detects_each_broken_connector(space: Space, name: str) -> None:
    law, why = BROKEN[name]
    [verdict] = await conform_on(space.settings, f"tests.support.connectors.broken_notes:{name}", [law])
    assert not verdict.holds
    assert why in verdict.why


async def test_conform_ends_at_once_when_the_sources_own_code_fails(space: Space) -> None:
    """Each law waited for 90 s, and said the same."""
    kind = "tests.support.connectors.broken_notes"
    async with asyncio.timeout(60):
        [verdict] = await conform_on(space.settings, f"{kind}:CannotLoad")
        assert (verdict.law, verdict.holds) == ("first-crawl", False)
        assert "the source failed (full: KeyError at broken_notes.py:" in verdict.why
        assert isinstance(verdict.fault, KeyError)
        [verdict] = await conform_on(space.settings, f"{kind}:CannotLoad", ["crash", "stamps"])
        assert (verdict.law, verdict.holds) == ("crash", False)
        [verdict] = await conform_on(space.settings, f"{kind}:CountsRevisions")
        assert verdict.why == "the first load failed (full: revision of Document is int: return text, or None)"
    code, result = await space.penstock("connector", "conform", f"{kind}:CannotLoad", "--json")
    assert (code, len(result["laws"])) == (1, 1)


async def test_the_conform_command_reports_verdicts_and_leaves_no_rows(space: Space) -> None:
    laws = ["--law", "member-removed", "--law", "slim-is-full"]
    code, result = await space.penstock(
        "connector", "conform", "tests.support.connectors.broken_notes:RemembersMembers", *laws, "--json"
    )
    assert (code, result["conforms"]) == (1, False)
    assert [(law["law"], law["holds"]) for law in result["laws"]] == [("member-removed", False), ("slim-is-full", True)]
    code, result = await space.penstock("connector", "conform", "examples.notes:Notes", *laws, "--json")
    assert (code, result["conforms"]) == (0, True)
    code, result = await space.penstock("connector", "conform", "slack", "--law", "slack-429", "--json")
    assert (code, [law["law"] for law in result["laws"]]) == (0, ["slack-429"])
    assert result["laws"][0]["why"].endswith("(https://github.com/MODSetter/SurfSense/issues/115)")
    assert await space.query("SELECT 1 FROM connectors") == []
    assert await space.query("SELECT 1 FROM connector_items") == []


@pytest.mark.slow
async def test_a_new_source_passes_conform_as_it_is_written(space: Space, tmp_path: Path) -> None:
    async def penstock(*arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "cli.main", "connector", *arguments),
            env={**space.environment, "PYTHONPATH": str(PROJECT)},
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    code, output = await penstock("new", "old_tickets")
    assert code == 0, output
    assert "penstock connector conform old_tickets.source:OldTickets" in output
    code, output = await penstock("conform", "old_tickets.source:OldTickets")
    assert (code, output.count("✓")) == (0, len(ALL_LAWS)), output
    code, output = await penstock("new", "old_tickets")
    assert (code, "exists already" in output) == (1, True), output
    assert (await penstock("new", "json"))[0] == 1


@pytest.mark.slow
async def test_the_guides_source_of_changes_by_time_conforms(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (PROJECT / "docs" / "connectors" / "your-own.md").read_text()
    [block] = [block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "updated_since" in block]
    (tmp_path / "guide_by_time.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    verdicts = await conform_on(space.settings, "guide_by_time:Tickets")
    assert [verdict.line() for verdict in verdicts if not verdict.holds] == []
    assert len(verdicts) == len(ALL_LAWS)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
async def test_the_conversations_intake_conforms_to_its_laws(space: Space, law: str) -> None:
    [verdict] = await conform_on(space.settings, "conversations", [law])
    assert verdict.holds, verdict.why
    for table in ("pairs", "mentions", "members", "floors", "chunks"):
        assert await space.query(f"SELECT 1 FROM conversation_{table}") == [], "a tenant is thrown away afterwards"


@pytest.mark.slow
async def test_the_conversations_laws_fail_without_a_worker(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "PATIENCE_SECONDS", 2.0)
    async with Space.create(stack, tmp_path) as without_workers:
        [verdict] = await conform_on(without_workers.settings, "conversations", ["taken"])
    assert not verdict.holds
    assert "0 pairs are stored instead of 2" in verdict.why


async def test_an_unknown_law_or_a_kind_without_playground_is_misconfigured(space: Space) -> None:
    with pytest.raises(Misconfigured, match="no law is called 'gravity'"):
        await conform_on(space.settings, "examples.notes:Notes", ["gravity"])
    with pytest.raises(Misconfigured, match="has no playground"):
        await conform_on(space.settings, "tests.support.connectors.runner_kit:WorldSource")
