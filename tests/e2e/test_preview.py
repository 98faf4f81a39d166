"""``penstock preview`` on real services: what an edit takes away is reported before it is published, and only then."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.test_cli import answer, run, search_ids
from tests.support.space import Space

QUESTION = "How long are logs retained?"


async def test_an_edit_that_loses_an_answer_fails_and_another_passes(space: Space, tmp_path: Path) -> None:
    space.start("detect", "vectors", "keywords")
    folder = tmp_path / "handbook"
    folder.mkdir()
    logs = folder / "logs.md"
    logs.write_text("# Logs\n\nLogs are retained for ninety days. They are stored in two places.\n")
    (folder / "tea.md").write_text("# Tea\n\nThe kettle is in the kitchen on the second floor.\n")
    answer(space, "ingest", str(folder), "--wait")
    added = run(space, "golden", "add", QUESTION, "--document", f"folder/{logs}", "--anchor", "ninety days")
    assert added.returncode == 0, added.stderr

    unchanged = run(space, "preview", str(folder), "--json")
    assert unchanged.returncode == 0, unchanged.stderr
    assert {d["state"] for d in json.loads(unchanged.stdout)["documents"]} == {"unchanged"}

    (folder / "tea.md").write_text("# Tea\n\nThe kettle is in the kitchen on the third floor.\n")
    harmless = run(space, "preview", str(folder), "--json")
    assert harmless.returncode == 0, harmless.stderr
    report = json.loads(harmless.stdout)
    assert (report["embedded"], report["questions"], report["findings"]) == (1, 1, [])

    logs.write_text("# Logs\n\nLogs are stored in two places.\n")
    harmful = run(space, "preview", str(logs), "--json")
    assert harmful.returncode == 1, harmful.stderr
    [finding] = json.loads(harmful.stdout)["findings"]
    assert (finding["kind"], finding["question"]) == ("lost", QUESTION)
    assert run(space, "preview", str(logs), "--markdown").stdout.startswith("### Preview of this edit: answers would")

    logs.unlink()
    deleted = run(space, "preview", str(folder), "--json")
    assert deleted.returncode == 1, deleted.stderr
    assert {d["state"] for d in json.loads(deleted.stdout)["documents"]} == {"changed", "deleted"}

    assert search_ids(space, QUESTION)[0] == "logs.md", "the index is as it was"
    assert answer(space, "audit")["clean"]
