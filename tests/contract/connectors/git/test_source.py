"""The git source over real repositories: crawl, edit, rename, delete, restore, forced pushes, and hostile ones."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import shutil
import stat
import subprocess
import traceback
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import SecretStr

from connectors.git import content
from connectors.git.client import Mirror, RunningGit
from connectors.git.options import basic
from connectors.git.playground import WEBHOOK_SECRET, Backend, certificate, playing
from connectors.git.source import Git
from connectors.replay import REMEMBERED
from connectors.source import CursorExpired, Document, Gone, Refused, Request, Unreadable
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.runtime.http_server import served
from tests.support.connectors.git_kit import Repository, listed, pages, texts
from tests.support.connectors.pdf_files import pdf_of
from tests.support.connectors.reading import changed, everything

LONG = "\n\n".join(f"Paragraph {n} about pumps and valves in hall {n}." for n in range(20))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


# What is there


async def test_a_first_crawl_reads_every_text_file_with_its_access_author_and_time(repository: Repository) -> None:
    repository.push({"readme.md": "# Pumps\n\nAll of them.", "src/pump.py": "def pump():\n    return 1\n"})
    repository.push({"notes/über.txt": "grün", "logo.png": b"\x89PNG\x00", ".github/x.yml": "a: 1", "empty.md": ""})
    template = "https://git.example.com/wiki/blob/{branch}/{path}"
    source = repository.source(source_url=template)
    entries = await everything(source)
    assert sorted(entries) == ["notes/über.txt", "readme.md", "src/pump.py"]
    readme = entries["readme.md"]
    assert isinstance(readme, Document)
    assert (readme.title, readme.media_type, readme.author) == ("Pumps", "text/markdown", "Ada Author")
    assert (readme.acl_tags, readme.required_tags, readme.version) == (["team"], [], None)
    assert abs((datetime.now(UTC) - readme.source_modified_at).total_seconds()) < 60
    assert readme.metadata["path"] == "readme.md"
    assert entries["src/pump.py"].media_type == "text/x-python"
    assert entries["notes/über.txt"].source_url == "https://git.example.com/wiki/blob/main/notes/%C3%BCber.txt"
    assert await listed(source) == {name: entry.revision for name, entry in entries.items()}
    assert [group async for group in source.groups()] == [group async for group in source.groups(["team"])]
    assert [group async for group in source.groups(["other"])] == []
    assert await source.check() == []


async def test_a_crawl_resumes_after_a_page_despite_a_rename_meanwhile(repository: Repository) -> None:
    repository.push({f"{name}.md": f"{LONG} {name}" for name in "abcdefg"})
    source = repository.source(page_documents=3)
    first, *_ = [page async for page in source.full(None)]
    repository.move("f.md", "0.md")
    repository.push()
    rest = await pages(repository.source(page_documents=3), first.cursor)
    assert [[entry.external_id for entry in page.entries] for page in (first, *rest)] == [
        ["a.md", "b.md", "c.md"],
        ["d.md", "e.md", "f.md"],
        ["g.md"],
    ]
    assert rest[0].entries[2].metadata["path"] == "0.md"


async def test_an_empty_repository_has_no_documents_until_its_first_commit(repository: Repository) -> None:
    source = repository.source()
    cursor = await source.start()
    assert await everything(source) == {}
    assert await listed(source) == {}
    assert await changed(source, cursor) == ({}, {"commit": None})
    commit = repository.push({"a.md": "one"})
    changes, cursor = await changed(source, cursor)
    assert (texts(changes), cursor) == ({"a.md": "one"}, {"commit": commit})


async def test_a_repository_that_lost_its_branch_raises_instead_of_reporting_deletions(repository: Repository) -> None:
    repository.push({"a.md": "one"})
    source = repository.source()
    assert list(await listed(source)) == ["a.md"]
    repository.work.git("update-ref", "-d", "refs/heads/main", at=repository.work.remote)
    for again in (source, repository.source(folder="lost")):
        with pytest.raises(Retryable, match="no branch any more"):
            await listed(again)
    with pytest.raises(Retryable):
        await source.fetch(["a.md"])
    repository.work.git("push", "--quiet", str(repository.work.remote), "HEAD:other")
    with pytest.raises(Misconfigured, match="no branch main"):
        await listed(repository.source(branch="main"))


async def test_a_branch_missing_only_in_the_first_response_is_retryable(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing in the first answer, there in the second: no setting of anybody's is wrong."""
    repository.push({"a.md": LONG})
    source = repository.source()
    answers = [b""]
    ask = Mirror._remote

    async def gone_at_first(mirror: Mirror, *arguments: str, seconds: float) -> bytes:
        return answers.pop() if answers else await ask(mirror, *arguments, seconds=seconds)

    monkeypatch.setattr(Mirror, "_remote", gone_at_first)
    with pytest.raises(Retryable, match="only at the second request"):
        await everything(source)
    assert list(await everything(source)) == ["a.md"]


async def test_only_the_configured_branch_is_read(repository: Repository) -> None:
    repository.push({"a.md": "main"})
    repository.work.git("checkout", "--quiet", "-b", "wiki")
    repository.work.write("a.md", "wiki")
    repository.work.git("commit", "--quiet", "--all", "--message", "x")
    repository.work.git("push", "--quiet", str(repository.work.remote), "HEAD:wiki")
    assert texts(await everything(repository.source(branch="wiki"))) == {"a.md": "wiki"}
    assert texts(await everything(repository.source(folder="other"))) == {"a.md": "main"}


# What changes


async def test_changes_without_a_new_commit_are_empty(repository: Repository) -> None:
    repository.push({"a.md": "one"})
    source = repository.source()
    cursor = await source.start()
    assert await changed(source, cursor) == ({}, cursor)
    commit = repository.push({"logo.png": b"\x89PNG\x00"})
    assert await changed(source, cursor) == ({"logo.png": Gone("logo.png")}, {"commit": commit})


async def test_an_edited_a_new_and_a_deleted_file_are_changes(repository: Repository) -> None:
    repository.push({"a.md": "one", "b.md": "two", "c.md": "three"})
    source = repository.source()
    before, cursor = await listed(source), await source.start()
    repository.push({"a.md": "one and more"})
    commit = repository.push({"b.md": None, "d.md": "four"})
    changes, cursor = await changed(source, cursor)
    assert texts(changes) == {"a.md": "one and more", "b.md": "gone", "d.md": "four"}
    assert cursor == {"commit": commit}
    after = await listed(source)
    assert sorted(after) == ["a.md", "c.md", "d.md"]
    assert (before["a.md"] != after["a.md"], before["c.md"] == after["c.md"]) == (True, True)
    assert texts({entry.external_id: entry for entry in await source.fetch(["b.md", "c.md", "x", "c.md"])}) == {
        "b.md": "gone",
        "c.md": "three",
        "x": "gone",
    }


async def test_changes_come_in_pages_and_resume_at_a_cursor_after_a_crash(repository: Repository) -> None:
    repository.push({"z.md": "last"})
    cursor = await repository.source().start()
    repository.push({f"{n}.md": f"text {n}" for n in range(7)})
    page = await anext(repository.source(page_documents=3).changes(cursor))
    repository.push({"0.md": "text 0 again", "6.md": "text 6 again"})
    changes, last = await changed(repository.source(page_documents=3), page.cursor)
    assert [entry.external_id for entry in page.entries] == ["0.md", "1.md", "2.md"]
    assert texts(changes)["0.md"] == "text 0 again"
    assert texts(changes)["6.md"] == "text 6 again"
    assert sorted(changes) == ["0.md", "3.md", "4.md", "5.md", "6.md"]
    assert await changed(repository.source(), last) == ({}, last)


async def test_a_renamed_file_keeps_its_id_across_edits_restarts_and_loss_of_the_mirror(repository: Repository) -> None:
    repository.push({"a.md": LONG, "b.md": "other"})
    source = repository.source()
    before, cursor = await listed(source), await source.start()
    repository.move("a.md", "deep/er/new name.md")
    repository.push({"deep/er/new name.md": f"{LONG}\n\nAnd one more."})
    changes, cursor = await changed(source, cursor)
    assert list(changes) == ["a.md"]
    assert changes["a.md"].metadata["path"] == "deep/er/new name.md"
    assert changes["a.md"].content.endswith("one more.")
    repository.move("deep/er/new name.md", "third.md")
    repository.push({"a.md": "A new file of the old name."})
    for folder in ("state", "lost"):
        again = repository.source(folder=folder)
        changes, _ = await changed(again, cursor)
        assert changes.pop("a.md").metadata["path"] == "third.md"
        assert changes.pop("deep/er/new name.md") == Gone("deep/er/new name.md")
        assert [(entry.metadata["path"], name.startswith("a.md@")) for name, entry in changes.items()] == [
            ("a.md", True)
        ]
        after = await listed(again)
        assert len(after) == 3
        assert after["a.md"] != before["a.md"]


async def test_deleting_and_restoring_a_renamed_file_use_its_first_id(
    repository: Repository,
) -> None:
    repository.push({"a.md": LONG})
    source = repository.source()
    repository.move("a.md", "b.md")
    await listed(source)
    repository.push()
    await listed(source)
    cursor = await source.start()
    repository.push({"b.md": None})
    await listed(source)
    changes, cursor = await changed(source, cursor)
    assert changes == {"a.md": Gone("a.md")}
    repository.push({"b.md": LONG})
    changes, _ = await changed(source, cursor)
    assert texts(changes) == {"a.md": LONG}


async def test_two_files_that_swap_names_keep_their_ids(repository: Repository) -> None:
    repository.push({"a.md": LONG, "b.md": LONG.replace("pumps", "cranes").replace("valves", "hooks")[::-1]})
    source = repository.source()
    await listed(source)
    cursor = await source.start()
    repository.move("a.md", "tmp.md")
    repository.push()
    await listed(source)
    repository.move("b.md", "a.md")
    repository.move("tmp.md", "b.md")
    repository.push()
    changes, _ = await changed(source, cursor)
    assert {name: entry.metadata["path"] for name, entry in changes.items()} == {"a.md": "b.md", "b.md": "a.md"}


async def test_a_forced_push_expires_the_cursor_and_keeps_ids(repository: Repository) -> None:
    repository.push({"a.md": LONG, "b.md": "two"})
    source = repository.source()
    repository.move("a.md", "c.md")
    await listed(source)
    repository.push()
    cursor = await source.start()
    repository.work.git("reset", "--quiet", "--hard", "HEAD~1")
    repository.move("a.md", "c.md")
    repository.push({"b.md": "another two"}, "Another history")
    with pytest.raises(CursorExpired):
        await changed(source, cursor)
    assert texts(await everything(source)) == {"a.md": LONG, "b.md": "another two"}
    with pytest.raises(CursorExpired):
        await changed(repository.source(folder="lost"), cursor)
    assert texts(await everything(repository.source(folder="lost"))) == {"a.md": LONG, "b.md": "another two"}
    with pytest.raises(CursorExpired):
        await changed(source, {"commit": "0" * 40})


async def test_a_merge_is_read_as_the_changes_it_made_to_the_branch(repository: Repository) -> None:
    repository.push({"a.md": "one", "b.md": "two"})
    source = repository.source()
    cursor = await source.start()
    work = repository.work
    work.git("checkout", "--quiet", "-b", "side")
    work.write("c.md", "three")
    work.git("add", "--all")
    work.git("commit", "--quiet", "--message", "Side", GIT_AUTHOR_NAME="Sid Side")
    work.git("checkout", "--quiet", "main")
    work.write("a.md", "one more")
    work.git("commit", "--quiet", "--all", "--message", "Main")
    work.git("merge", "--quiet", "--no-edit", "side")
    repository.push()
    changes, _ = await changed(source, cursor)
    assert texts(changes) == {"a.md": "one more", "c.md": "three"}
    assert (changes["a.md"].author, changes["c.md"].author) == ("Ada Author", "Sid Side")


async def test_a_damaged_or_lost_mirror_is_fetched_again(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.git.client.PATIENCE_SECONDS", 0)
    repository.push({"a.md": "one"})
    source = repository.source()
    await listed(source)
    cursor = await source.start()
    shutil.rmtree(tmp_path / "state" / "mirror.git")
    repository.push({"b.md": "two"})
    assert texts((await changed(source, cursor))[0]) == {"b.md": "two"}
    for pack in (tmp_path / "state" / "mirror.git" / "objects").rglob("*"):
        if pack.is_file():
            pack.chmod(0o600)
            pack.write_bytes(b"damaged")
    fresh = repository.source()
    for _ in range(3):
        try:
            entries = await everything(fresh)
            break
        except Retryable:
            continue
    assert texts(entries) == {"a.md": "one", "b.md": "two"}


async def test_a_file_moved_during_a_listing_has_the_access_of_its_new_path(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.git.source.LISTED_PER_PAGE", 2)
    repository.push({f"{name}.md": f"{LONG} {name}" for name in "abc"})
    source = repository.source(rules=[{"paths": ["secret/"], "acl_tags": ["few"]}])
    listing = source.slim()
    first = await anext(listing)
    repository.move("c.md", "secret/0.md")
    repository.push()
    rest = [entry async for batch in listing for entry in batch]
    assert [(item.external_id, item.acl_tags) for item in (*first, *rest)] == [
        ("a.md", ["team"]),
        ("b.md", ["team"]),
        ("c.md", ["few"]),
    ]


async def test_ssh_uses_only_the_configured_key_known_hosts_and_options(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no ssh server here: a program of its name writes down what it is told, and runs what it should run."""
    repository.push({"a.md": "one"})
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "ssh"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/args\nfor last; do :; done\nexec sh -c "$last"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent")
    source = repository.source(
        url=f"git@git.example.com:{repository.folder}/remote.git",
        ssh_key_file="/keys/one key",
        known_hosts_file="/keys/known hosts",
    )
    assert texts(await everything(source)) == {"a.md": "one"}
    lines = (tmp_path / "args").read_text().splitlines()
    assert lines[:4] == ["-F", "none", "-i", "/keys/one key"]
    assert {"StrictHostKeyChecking=yes", "BatchMode=yes", "IdentitiesOnly=yes"} <= set(lines)
    assert {'UserKnownHostsFile="/keys/known hosts"', "GlobalKnownHostsFile=/dev/null"} <= set(lines)
    assert "git@git.example.com" in lines
    assert await source.check() == []


# Who may read


async def test_the_access_file_is_read_again_for_every_read(repository: Repository, tmp_path: Path) -> None:
    repository.push({"docs/a.md": "one", "docs/hr/b.md": "two", "c.md": "three"})
    file = tmp_path / "access.toml"
    file.write_text(
        'acl_tags = ["team"]\n[[rules]]\npaths = ["docs/hr/"]\nacl_tags = ["hr"]\nrequired_tags = ["in"]\n'
        '[members]\nteam = ["a@x"]\nhr = ["b@x"]\n'
    )
    repository.options = {"url": repository.options["url"], "access_file": str(file)}
    source = repository.source()
    entries = await everything(source)
    assert {name: (entry.acl_tags, entry.required_tags) for name, entry in entries.items()} == {
        "docs/a.md": (["team"], []),
        "c.md": (["team"], []),
        "docs/hr/b.md": (["hr"], ["in"]),
    }
    assert {group.tag: group.members async for group in source.groups()} == {"team": ["a@x"], "hr": ["b@x"]}
    assert [problem.message for problem in await source.check()] == [
        "the tag 'in' has no members: list them in members"
    ]
    file.write_text("acl_tags = []")
    assert [entry.acl_tags async for batch in source.slim() for entry in batch] == [[], [], []]
    assert [problem.code for problem in await source.check()] == ["nobody"]
    for wrong in ("acl_tags = [", "rules = 1", "acl_tags = ['a']\nunknown = 1"):
        file.write_text(wrong)
        with pytest.raises(Misconfigured, match=r"access\.toml"):
            await listed(source)
    file.unlink()
    with pytest.raises(Misconfigured, match=r"access\.toml.*cannot be read"):
        await source.fetch(["c.md"])
    assert [problem.path for problem in await source.check()] == ["access_file"]


async def test_a_push_event_without_a_valid_signature_or_token_is_refused(repository: Repository) -> None:
    source = repository.source(webhook_secret=WEBHOOK_SECRET)
    body = b'{"ref": "refs/heads/main"}'
    signature = "sha256=" + hmac.new(WEBHOOK_SECRET.encode(), body, hashlib.sha256).hexdigest()
    for headers in ({"x-hub-signature-256": signature}, {"x-gitlab-token": WEBHOOK_SECRET}):
        assert (await source.on_event(Request(headers, {}, body))).changes
    for headers in (
        {},
        {"x-hub-signature-256": signature[:-1] + "0x"},
        {"x-gitlab-token": "ö"},
        {"x-gitlab-token": ""},
    ):
        with pytest.raises(Refused):
            await source.on_event(Request(headers, {}, body))
    with pytest.raises(Refused):
        await repository.source().on_event(Request({"x-gitlab-token": ""}, {}, body))


async def test_an_empty_webhook_secret_refuses_every_event(repository: Repository) -> None:
    """As a variable of Compose that nobody has set leaves it."""
    source, body = repository.source(webhook_secret=""), b"{}"
    signature = "sha256=" + hmac.new(b"", body, hashlib.sha256).hexdigest()
    for headers in ({}, {"x-gitlab-token": ""}, {"x-hub-signature-256": signature}):
        with pytest.raises(Refused):
            await source.on_event(Request(headers, {}, body))


async def test_a_replayed_push_event_is_ignored_even_after_a_restart(
    repository: Repository,
) -> None:
    source = repository.source(webhook_secret=WEBHOOK_SECRET)
    first, second = (signed_push(f'{{"ref": "refs/heads/main", "after": "{n:040}"}}'.encode()) for n in range(2))
    assert [(await source.on_event(push)).changes for push in (first, first, second, first)] == [
        True,
        False,
        True,
        False,
    ]
    again = repository.source(webhook_secret=WEBHOOK_SECRET)
    assert [(await again.on_event(push)).changes for push in (second, first)] == [False, False]
    for n in range(REMEMBERED):
        await again.on_event(signed_push(f"{n}".encode()))
    assert len(repository.memory.values["events"]) == REMEMBERED


async def test_a_push_event_that_could_not_be_recorded_is_handled_when_it_is_sent_again(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, push = repository.source(webhook_secret=WEBHOOK_SECRET), signed_push(b"{}")

    async def away(name: str, value: object) -> None:
        raise Retryable("Postgres is away")

    with monkeypatch.context() as patched:
        patched.setattr(repository.memory, "put", away)
        with pytest.raises(Retryable):
            await source.on_event(push)
    assert (await source.on_event(push)).changes


def signed_push(body: bytes) -> Request:
    signature = "sha256=" + hmac.new(WEBHOOK_SECRET.encode(), body, hashlib.sha256).hexdigest()
    return Request({"x-hub-signature-256": signature}, {}, body)


# What is hostile, or odd


async def test_hostile_symlinks_submodules_hooks_and_attributes_have_no_effect(
    repository: Repository, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("canary-of-the-host")
    proof = tmp_path / "pwned"
    work = repository.work
    repository.push({"a.md": "one"})
    os.symlink(secret, work.folder / "link.md")
    os.symlink("/etc", work.folder / "etc")
    os.symlink("../../../../../../etc/passwd", work.folder / "up.md")
    work.write(".gitmodules", f'[submodule "x"]\n\tpath = x\n\turl = ext::sh -c "touch {proof}"\n')
    work.write(".gitattributes", "*.md filter=evil diff=evil merge=evil\n*.py filter=lfs\n")
    work.write("big.py", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    work.write("hooks/post-checkout", f"#!/bin/sh\ntouch {proof}\n")
    work.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},x")
    repository.work.git("add", "--all", "--force")
    work.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},x")
    work.git("commit", "--quiet", "--message", "Hostile")
    work.git("push", "--quiet", str(work.remote), "HEAD:main")
    for name in ("post-upload-pack", "post-checkout", "reference-transaction", "post-index-change"):
        hook = tmp_path / "state" / "mirror.git" / "hooks" / name
        hook.parent.mkdir(parents=True, exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {proof}\n")
        hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    shutil.move(str(tmp_path / "state" / "mirror.git" / "hooks"), str(tmp_path / "hooks"))
    source = repository.source()
    await listed(source)
    shutil.copytree(tmp_path / "hooks", tmp_path / "state" / "mirror.git" / "hooks", dirs_exist_ok=True)
    cursor = await source.start()
    work.git("commit", "--quiet", "--allow-empty", "--message", "Again")
    work.git("push", "--quiet", str(work.remote), "HEAD:main")
    await changed(source, cursor)
    results = texts(await everything(source))
    assert sorted(results) == ["a.md", "big.py", "hooks/post-checkout"]
    assert "canary" not in str(results)
    assert not proof.exists()


async def test_git_configuration_and_environment_of_the_machine_are_ignored(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = tmp_path / "pwned"
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        f'[core]\n\tfsmonitor = "touch {proof}"\n[url "ext::touch {proof}"]\n\tinsteadOf = file\n'
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / ".gitconfig"))
    monkeypatch.setenv("GIT_DIR", str(home))
    monkeypatch.setenv("GIT_TRACE", str(tmp_path / "trace"))
    repository.push({"a.md": "one"})
    assert texts(await everything(repository.source())) == {"a.md": "one"}
    assert not proof.exists()
    assert not (tmp_path / "trace").exists()


async def test_files_with_unusual_names_are_documents_like_any_other(repository: Repository) -> None:
    work = repository.work
    names = [
        "-rf.md",
        "a b.md",
        "tab\tand\nline.md",
        'quote".md',
        "emoji-🙂.md",
        "%41.md",
        ":(top)x.md",
        "*.md",
        "back\\slash.md",
    ]
    for number, name in enumerate(names):
        work.write(name, f"text {number}")
    with open(os.fsencode(work.folder) + b"/latin-\xe9.md", "wb") as file:
        file.write(b"latin")
    blob = work.git("hash-object", "-w", "a b.md")
    repository.push()
    long = "x" * 200
    work.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{'/'.join([long] * 12)}.md")
    work.git("commit", "--quiet", "--message", "Long")
    work.git("push", "--quiet", str(work.remote), "HEAD:main")
    source = repository.source(source_url="https://x/{path}")
    entries = await everything(source)
    assert set(names) <= set(entries)
    assert len(entries) == len(names) + 2
    assert all(len(name) <= 2000 and name.encode() for name in entries)
    (odd,) = [entry for entry in entries.values() if entry.content == "latin"]
    assert odd.metadata["path"] == "latin-\\xe9.md"
    assert odd.source_url == "https://x/latin-%E9.md"
    assert await listed(source) == {name: entry.revision for name, entry in entries.items()}
    assert {entry.external_id for entry in await source.fetch(list(entries))} == set(entries)
    again = repository.source()
    assert list(await listed(again)) == list(entries)


async def test_too_large_binary_and_broken_files_are_unreadable_entries(repository: Repository) -> None:
    repository.push(
        {
            "huge.txt": "x" * (5 * 1024 * 1024),
            "data.unknown": b"\x00\x01\x02",
            "broken.pdf": b"%PDF-1.4\nnothing",
            "manual.pdf": pdf_of(["\n".join(["How to run them."] * 20)], title="Pumps"),
            "a.md": "one",
            "odd.txt": b"coding: undefined \xff",
        }
    )
    source = repository.source(max_file_bytes=6 * 1024 * 1024)
    entries = await everything(source)
    codes = {name: entry.code for name, entry in entries.items() if isinstance(entry, Unreadable)}
    assert codes.keys() == {"huge.txt", "data.unknown", "broken.pdf", "odd.txt"}
    assert (codes["huge.txt"], codes["data.unknown"], codes["odd.txt"]) == ("too_large", "binary", "encoding")
    assert "How to run them." in entries["manual.pdf"].content
    assert await listed(source) == {name: entry.revision for name, entry in entries.items()}
    small = repository.source(max_file_bytes=100)
    assert texts(await everything(small))["manual.pdf"] == "too_large"


async def test_a_repository_beyond_the_size_limit_is_refused(repository: Repository, tmp_path: Path) -> None:
    repository.push({"noise.bin": os.urandom(3_000_000), "a.md": "one"})
    with pytest.raises(Misconfigured, match="max_repository_bytes"):
        await listed(repository.source(max_repository_bytes=1_000_000))
    await asyncio.sleep(0)
    assert not (tmp_path / "state" / "mirror.git").exists()


def push_trees_within_trees(repository: Repository, mode: str, depth: int) -> None:
    """Push a commit of 10 ** depth paths, which are a few trees, and one that removes them again."""
    work = repository.work
    repository.push({"a.md": "one"})
    entry = f"{mode} blob {work.git('rev-parse', 'HEAD:a.md')}"
    for _ in range(depth):
        rows = "".join(f"{entry}\t{n}\n" for n in range(10))
        made = subprocess.run(["git", "mktree"], cwd=work.folder, check=True, capture_output=True, input=rows.encode())
        entry = f"040000 tree {made.stdout.decode().strip()}"
    bomb = work.git("commit-tree", entry.split()[-1], "-p", "HEAD", "-m", "Bomb")
    work.git("push", "--quiet", str(work.remote), f"{bomb}:main")
    after = work.git("commit-tree", "HEAD^{tree}", "-p", bomb, "-m", "Nothing to see")
    work.git("push", "--quiet", str(work.remote), f"{after}:refs/heads/after")


async def test_a_commit_of_endless_trees_in_the_history_takes_no_more_than_the_memory_of_git(
    repository: Repository,
) -> None:
    """It ended the process of all connectors: git took gigabytes for a repository of some kilobytes."""
    push_trees_within_trees(repository, "100644", 6)
    small = repository.source(branch="after", max_memory_bytes=64 * 1024**2)
    with pytest.raises(Misconfigured, match=r"max_memory_bytes = 67,108,864: raise it, or set authors = false"):
        await listed(small)
    without = repository.source(branch="after", max_memory_bytes=64 * 1024**2, authors=False)
    assert texts(await everything(without)) == {"a.md": "one"}


async def test_a_commit_whose_renames_are_costly_to_find_is_read(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that git compares with one another, each with each, stopped the reading of the repository for good."""

    def lot(folder: str) -> dict[str, str | bytes | None]:
        return {f"{folder}/{n}.bin": "".join(f"{folder} {n} {line}\n" for line in range(400)) for n in range(400)}

    monkeypatch.setattr("connectors.git.history.RENAMES_SECONDS", 0.2)
    repository.push({"a.md": "one", **lot("left")})
    source = repository.source(authors=False)
    cursor = await source.start()
    assert texts(await everything(source)) == {"a.md": "one"}
    repository.move("a.md", "moved.md")
    repository.push({**dict.fromkeys(lot("left")), **lot("right"), "b.md": "two"})
    assert cursor is not None
    assert texts((await changed(source, cursor))[0])["b.md"] == "two"
    assert texts(await everything(source)) == {"a.md": "one", "b.md": "two"}


async def test_a_tree_of_too_many_links_is_refused_like_one_of_files(repository: Repository) -> None:
    push_trees_within_trees(repository, "120000", 2)
    with pytest.raises(Misconfigured, match="more than 99 files"):
        await listed(repository.source(max_files=99))
    assert texts(await everything(repository.source(max_files=100))) == {}


async def test_a_tree_of_few_files_with_very_long_paths_is_refused(repository: Repository) -> None:
    """Some kilobytes of trees took gigabytes of the process of all connectors: each path has 2,000 letters."""
    work = repository.work
    repository.push({"a.md": "one"})
    entries = "".join(f"100644 blob {work.git('rev-parse', 'HEAD:a.md')}\t{n}.md\n" for n in range(600))
    for name in "abcdefgh":
        made = subprocess.run(
            ["git", "mktree"], cwd=work.folder, check=True, capture_output=True, input=entries.encode()
        )
        entries = f"040000 tree {made.stdout.decode().strip()}\t{250 * name}\n"
    long = work.git("commit-tree", entries.split()[2], "-p", "HEAD", "-m", "Long")
    work.git("push", "--quiet", str(work.remote), f"{long}:main")
    with pytest.raises(Misconfigured, match="or very long paths: raise max_files"):
        await listed(repository.source(max_files=600))
    assert len(await listed(repository.source())) == 600


async def test_a_missing_remote_is_reported_as_misconfigured(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.git.client.PATIENCE_SECONDS", 0)
    source = repository.source(url=f"file://{repository.folder}/nowhere.git")
    with pytest.raises(Misconfigured, match="git ls-remote: fatal"):
        await source.start()
    (problem,) = await source.check()
    assert (problem.path, problem.code) == ("url", "invalid")
    (problem, _) = await repository.source(url="git@127.0.0.1:x/y.git").check()
    assert problem.path == "ssh"


# Over https, by git's own server


@pytest.fixture
async def remote(repository: Repository, tmp_path: Path) -> AsyncIterator[tuple[Backend, Repository]]:
    token = basic("x-access-token", SecretStr("canary-token"))
    backend = Backend(tmp_path, f"Basic {token}")
    async with served(backend, tls=certificate(tmp_path)) as url:
        repository.options |= {"url": f"{url}/remote.git", "ca_file": str(tmp_path / "certificate.pem")}
        repository.options |= {"token": "canary-token"}
        yield backend, repository


async def test_https_sends_the_token_and_raises_retryable_errors_for_429_and_500(
    remote: tuple[Backend, Repository], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, repository = remote
    repository.push({"a.md": "one"})
    source = repository.source()
    cursor = await source.start()
    repository.push({"b.md": "two"})
    assert texts((await changed(source, cursor))[0]) == {"b.md": "two"}
    assert all("authorization" in headers for _, headers in backend.requests)
    monkeypatch.setattr("connectors.git.client.PATIENCE_SECONDS", 0)
    backend.throttled = 1
    with pytest.raises(Deferred, match="429"):
        await source.start()
    backend.failing = 1
    with pytest.raises(Retryable, match="500"):
        await source.start()
    assert (await source.start())["commit"] is not None


async def test_a_redirect_is_refused_without_sending_the_token_to_its_target(
    remote: tuple[Backend, Repository], tmp_path: Path
) -> None:
    backend, repository = remote
    repository.push({"a.md": "one"})
    other = Backend(tmp_path)
    (tmp_path / "other").mkdir()
    async with served(other, tls=certificate(tmp_path / "other")) as url:
        backend.redirect = url
        with pytest.raises(Misconfigured):
            await repository.source().start()
    assert other.requests == []


async def test_a_certificate_of_an_unknown_authority_is_refused(remote: tuple[Backend, Repository]) -> None:
    backend, repository = remote
    with pytest.raises(Misconfigured, match="certificate"):
        await repository.source(ca_file=None).start()
    assert backend.requests == []


async def test_the_token_is_in_no_argument_error_log_or_file(
    remote: tuple[Backend, Repository],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, repository = remote
    repository.push({"a.md": "one"})
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    real = asyncio.create_subprocess_exec

    async def watching(*arguments, **options):
        seen.extend(map(str, arguments))
        return await real(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watching)
    source = repository.source()
    assert texts(await everything(source)) == {"a.md": "one"}
    encoded = basic("x-access-token", SecretStr("canary-token"))
    backend.authorization = "Basic other"
    with pytest.raises(Misconfigured) as caught:
        await source.start()
    seen += traceback.format_exception(caught.value, chain=True)
    seen += [repr(vars(source)), *(record.getMessage() for record in caplog.records)]
    seen += [str(await source.check()), repr(source)]
    for place, _, names in os.walk(tmp_path / "state"):
        seen += [(Path(place) / name).read_bytes().decode("latin-1") for name in names]
    assert len(seen) > 50
    assert [text for text in seen if "canary-token" in text or encoded in text] == []


async def test_cancellation_leaves_no_git_process_behind(remote: tuple[Backend, Repository], tmp_path: Path) -> None:
    _, repository = remote
    repository.push({"a.md": "one"})
    hanging = asyncio.Event()

    async def hangs(scope, receive, send) -> None:
        if scope["type"] == "http":
            hanging.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            raise ConnectionAbortedError
        await Backend(tmp_path)(scope, receive, send)

    async with served(hangs, tls=(tmp_path / "certificate.pem", tmp_path / "key.pem")) as url:
        source = repository.source(url=f"{url}/remote.git")
        starting = asyncio.create_task(source.start())
        await asyncio.wait_for(hanging.wait(), 60)
        children = {child for child in _children() if "git" in _command(child)}
        assert children
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        async with asyncio.timeout(30):
            while {child for child in children if "git" in _command(child)}:
                await asyncio.sleep(0.01)


def _children() -> set[str]:
    return {name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid() and _is_ours(name)}


def _is_ours(pid: str) -> bool:
    try:
        while pid not in ("0", "1"):
            if pid == str(os.getpid()):
                return True
            pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return False
    return False


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def test_the_playground_writes_moves_and_signals_changes() -> None:
    async with playing() as playground:
        repository_id = await playground.write("one", LONG)
        assert len(playground.sent()) == 1
        assert playground.sent() == []
        await playground.move("one")
        assert await playground.write("one", LONG + "\n\nMore.") == repository_id
        assert isinstance(Git.playground, type(playing))


async def test_a_mirror_that_is_removed_while_it_is_read_is_read_again(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep removes the mirror of a wiki that is no longer listed, and changes may be reading it."""
    repository.push({"readme.md": "# Pumps"})
    source, copy = repository.source(), content._copy_blob

    async def remove_first(git: RunningGit, to: Path, blob: str) -> None:
        shutil.rmtree(to.parent)
        await copy(git, to, blob)

    with monkeypatch.context() as patched:
        patched.setattr(content, "_copy_blob", remove_first)
        with pytest.raises(Retryable, match="the mirror was removed while it was read"):
            await everything(source)
    assert list(await everything(source)) == ["readme.md"]
