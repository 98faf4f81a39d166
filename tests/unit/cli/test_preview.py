"""``penstock preview``: which files are read, what is printed, and the exit codes."""

from __future__ import annotations

import json
import subprocess
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from cli import preview
from cli.main import app
from cli.preview_files import BadPath, Proposal, in_folders, since_revision
from cli.preview_show import as_markdown, as_text
from pipeline.core.errors import PenstockError

PASSAGE = {"document_id": "1", "external_id": "a.md", "source": "wiki", "title": "A", "source_url": None}
MOVED = {"source": "wiki", "external_id": "a.md", "anchor": "ninety days", "before": 1, "after": None}


def report(*findings: dict[str, Any]) -> dict[str, Any]:
    document = {"path": "a.md", "state": "changed", "chunks": 1, "new": 1, "removed": 1}
    counts = {"questions": 3, "affected": 1, "skipped": 0, "embedded": 1, "took_ms": 1500.0}
    fails = any(finding["kind"] != "changed" for finding in findings)
    return {"documents": [document], **counts, "findings": list(findings), "fails": fails}


def finding(kind: str = "lost", question: str = "How long?", excerpt: str = "ninety days") -> dict[str, Any]:
    before, after = {**PASSAGE, "excerpt": excerpt}, {**PASSAGE, "excerpt": "thirty days"}
    moved = [] if kind == "changed" else [MOVED]
    return {
        "question": question,
        "kind": kind,
        "moved": moved,
        "before": [before],
        "after": [after],
        "contradictions": [],
    }


def git(folder: Path, *arguments: str) -> None:
    named = ["-c", "user.name=ann", "-c", "user.email=ann@example.org"]
    subprocess.run(["git", "-C", str(folder), *named, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-b", "main")
    (tmp_path / "docs").mkdir()
    for name in ("kept", "changed", "deleted"):
        (tmp_path / "docs" / f"{name}.md").write_text(f"# {name}\n\nThe text.\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "checkout", "-b", "edit")
    (tmp_path / "docs" / "changed.md").write_text("# Changed\n\nAnother text.\n")
    (tmp_path / "docs" / "deleted.md").unlink()
    git(tmp_path, "commit", "-am", "second")
    (tmp_path / "docs" / "new.md").write_text("# New\n\nA text.\n")
    return tmp_path


def described(proposal: Proposal) -> dict[str, tuple[str, bool]]:
    return {file.path: (file.title, file.content is None) for file in proposal.files}


def test_with_git_only_files_that_differ_are_read(repository: Path) -> None:
    assert described(since_revision([repository], None, "main")) == {
        "docs/changed.md": ("Changed", False),
        "docs/deleted.md": ("", True),
        "docs/new.md": ("New", False),
    }


def test_what_the_other_branch_has_changed_meanwhile_is_no_part_of_the_edit(repository: Path) -> None:
    git(repository, "stash", "--include-untracked")
    git(repository, "checkout", "main")
    (repository / "docs" / "kept.md").write_text("# Kept\n\nTheirs.\n")
    git(repository, "commit", "-am", "theirs")
    git(repository, "checkout", "edit")
    assert described(since_revision([repository], None, "main")).keys() == {"docs/changed.md", "docs/deleted.md"}


def test_paths_are_relative_to_the_root(repository: Path) -> None:
    docs = repository / "docs"
    assert described(since_revision([docs], docs, "main")).keys() == {"changed.md", "deleted.md", "new.md"}
    proposal = in_folders([docs / "kept.md", docs / "gone.md"], repository)
    assert described(proposal) == {"docs/kept.md": ("kept", False), "docs/gone.md": ("", True)}
    assert (proposal.folders, in_folders([docs], None).folders) == ([], [str(docs)])


@pytest.mark.parametrize("revision", ["nowhere", "--output=x"])
def test_a_wrong_revision_is_refused(repository: Path, revision: str) -> None:
    with pytest.raises(BadPath):
        since_revision([repository], None, revision)
    ended = CliRunner().invoke(app, ["preview", str(repository), f"--git={revision}"])
    assert (ended.exit_code, len(ended.stderr.splitlines())) == (2, 1)


def run(monkeypatch: pytest.MonkeyPatch, file: Path, result: dict[str, Any], *options: str) -> Any:
    monkeypatch.setattr(preview, "_here", lambda body, *who: result)
    file.write_text("# A\n\nThe text.\n")
    return CliRunner().invoke(app, ["preview", str(file), *options])


@pytest.mark.parametrize(("kind", "code"), [("lost", 1), ("uncited", 1), ("contradicts", 1), ("changed", 0)])
def test_the_exit_code_says_whether_an_answer_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, code: int
) -> None:
    ended = run(monkeypatch, tmp_path / "a.md", report(finding(kind)), "--json")
    assert ended.exit_code == code
    assert json.loads(ended.stdout)["findings"][0]["kind"] == kind


def test_a_folder_of_this_machine_is_named_by_its_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(preview, "_here", lambda body, *who: sent.append(body) or report())
    (tmp_path / "a.md").write_text("# A\n\nThe text.\n")
    assert CliRunner().invoke(app, ["preview", str(tmp_path)]).exit_code == 0
    assert CliRunner().invoke(app, ["preview", str(tmp_path), "--root", str(tmp_path)]).exit_code == 0
    first, second = sent
    assert first["documents"][0]["external_id"] == str(tmp_path / "a.md")
    assert (first["folders"], second["folders"]) == ([str(tmp_path)], [""])
    assert "external_id" not in second["documents"][0]


def test_the_text_shows_what_is_lost_and_what_takes_its_place() -> None:
    assert as_text(report(finding())).splitlines() == [
        "changed    a.md  1 new, 1 removed",
        "3 questions, 1 of them affected; 1 text embedded; 1.5 s",
        "",
        "lost: How long?",
        '  wiki/a.md "ninety days": was at rank 1, not found any more',
        "  - A: ninety days",
        "  + A: thirty days",
    ]


def test_a_comment_contains_no_markup_of_the_documents() -> None:
    comment = as_markdown(
        report(finding(question="Is *this* [a](https://evil.example) @team #12 <b>?", excerpt="![x](y)"))
    )
    assert "### Preview of this edit: answers would be lost" in comment
    assert "**Is \\*this\\* \\[a\\]\\(https:\u200b//evil.example\\) @\u200bteam \\#\u200b12 \\<b\\>?**" in comment
    assert "before: A: \\!\\[x\\]\\(y\\)" in comment


def test_options_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    for options in (["--json", "--markdown"], ["--url", "http://127.0.0.1:1", "--as", "ann"]):
        assert CliRunner().invoke(app, ["preview", str(tmp_path), *options]).exit_code == 2


class Service(BaseHTTPRequestHandler):
    """A query service that answers every request in the same way."""

    status, body = 200, b"{}"
    requests: ClassVar[list[tuple[str, str | None, dict[str, Any]]]] = []

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, self.headers["Authorization"], sent))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (200, report(), 0),
        (200, report(finding()), 1),
        (422, {"detail": "no"}, 2),
        (503, {"detail": "busy"}, 1),
        (502, "", 1),
    ],
)
def test_a_service_makes_the_preview_with_the_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, body: Any, code: int
) -> None:
    monkeypatch.setattr(Service, "status", status)
    monkeypatch.setattr(Service, "body", json.dumps(body).encode() if body else b"<html>")
    monkeypatch.setattr(Service, "requests", [])
    (tmp_path / "a.md").write_text("# A\n\nThe text.\n")
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        ended = CliRunner().invoke(
            app, ["preview", str(tmp_path / "a.md"), "--url", url, "--json"], env={"PENSTOCK_TOKEN": "secret-token"}
        )
    assert isinstance(ended.exception, PenstockError) == (code == 1 and status != 200)
    assert ended.exit_code == code
    assert "secret-token" not in f"{ended.output}{ended.exception}"
    [(path, authorization, sent)] = Service.requests
    assert (path, authorization) == ("/v1/previews", "Bearer secret-token")
    assert sent["documents"][0]["content"] == "# A\n\nThe text.\n"
