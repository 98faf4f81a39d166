"""The source on a real process that speaks Airbyte's protocol, and misbehaves as programs do."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog

from connectors.airbyte.program import Program
from connectors.airbyte.source import Airbyte
from connectors.conform.memory_runner import InMemory, MemoryRunner
from connectors.declared import options
from connectors.fakes import airbyte
from connectors.set_aside import SetAside
from connectors.source import Context, CursorExpired, Document, Gone, Unreadable
from pipeline.core.errors import Misconfigured, Retryable

STREAM = {"title": "{title}", "text": "{body}", "acl": ["team.name"]}
SECRET = "s3cret-token"


@dataclass
class Desk:
    """A service, its program, and sources that run it."""

    folder: Path
    records: dict[str, dict[str, dict[str, Any]]] = field(default_factory=lambda: {"notes": {}, "files": {}})
    faults: dict[str, Any] = field(default_factory=dict)
    lineage: str = "first"
    token: str = SECRET
    memory: InMemory = field(default_factory=InMemory)
    opened: list[Airbyte] = field(default_factory=list)
    revision: int = 0

    @property
    def service(self) -> Path:
        return self.folder / "service.json"

    def save(self, **faults: Any) -> None:
        self.faults = faults
        records = {name: [*stream.values()] for name, stream in self.records.items()}
        content = {"records": records, "lineage": self.lineage, "token": self.token, "faults": faults}
        self.service.write_text(json.dumps(content))

    def put(self, *ids: str, stream: str = "notes", **values: Any) -> None:
        for id_ in ids:
            self.revision += 1
            record = {"id": id_, "title": id_.title(), "body": f"About {id_}.", "team": {"name": "staff"}, **values}
            self.records[stream][id_] = {**record, "changed": self.revision}
        self.save(**self.faults)

    def remove(self, id_: str, stream: str = "notes") -> None:
        del self.records[stream][id_]
        self.save(**self.faults)

    def source(self, stream: Mapping[str, Any] | None = None, **more: Any) -> Airbyte:
        table = {
            "program": [sys.executable, airbyte.__file__],
            "streams": {"notes": {**STREAM, **(stream or {})}},
            **more,
        }
        config = json.dumps({"data": str(self.service), "token": SECRET})
        (self.folder / "state").mkdir(exist_ok=True)
        context = Context(
            name="desk", tenant="t", memory=self.memory, folder=self.folder / "state", set_aside=SetAside()
        )
        source = Airbyte(options(Airbyte, table, "desk", {"PENSTOCK_DESK_CONFIG": config}), context)
        source.page_documents = 3
        self.opened.append(source)
        return source

    def runner(self, stream: Mapping[str, Any] | None = None, **more: Any) -> MemoryRunner:
        source = self.source(stream, **more)
        return MemoryRunner(source, source.context.set_aside)

    def stored(self, statement: str) -> list[Any]:
        with sqlite3.connect(self.folder / "state" / "records.sqlite") as file:
            return file.execute(statement).fetchall()

    def left(self) -> list[str]:
        """Return the folders of runs that are still there."""
        return [path.name for path in (self.folder / "state").glob("run-*")]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    desk.save()
    yield desk
    for source in desk.opened:
        await source.close()
    assert desk.left() == []


FULL = {"sync": "full_refresh"}
BOTH = {"streams": {"notes": STREAM, "files": STREAM}}


async def test_records_become_documents_and_an_incremental_stream_is_continued(desk: Desk) -> None:
    desk.put("a", "b", "c", "d", body="Hello.")
    runner = desk.runner()
    assert await runner.full()
    assert set(runner.published) == {"notes/a", "notes/b", "notes/c", "notes/d"}
    assert runner.published["notes/a"].acl_tags == ["staff"]
    desk.put("b", body="Edited.")
    desk.save(dies_after=1)  # more than what is new would end the program
    assert await runner.changes()
    assert runner.published["notes/b"].content == "Edited."
    assert runner.status == ""


async def test_a_record_with_a_deletion_marker_withdraws_its_document_by_the_next_poll(desk: Desk) -> None:
    desk.put("a", "b")
    runner = desk.runner()
    await runner.full()
    desk.put("a", _ab_cdc_deleted_at="2026-11-21T08:30:00Z", body=None)
    await runner.changes()
    assert (set(runner.published), runner.deleted) == ({"notes/b"}, ["notes/a"])
    assert desk.stored("SELECT row FROM records WHERE id = 'notes/a'") == [(None,)]


async def test_what_a_full_refresh_does_not_show_any_more_is_deleted_by_a_sweep_only(desk: Desk) -> None:
    desk.put("a", "b", "c")
    runner = desk.runner(FULL)
    await runner.full()
    desk.remove("b")
    await runner.changes()
    assert "notes/b" in runner.published
    await runner.sweep()
    assert (set(runner.published), runner.deleted) == ({"notes/a", "notes/c"}, ["notes/b"])


async def test_nothing_of_a_deleted_record_is_left_on_disk_while_its_connector_runs(desk: Desk) -> None:
    desk.put("a", "b", body="Zebulon Quartermaine " * 500)
    runner = desk.runner()
    await runner.full()
    for id_ in ("a", "b"):
        desk.put(id_, _ab_cdc_deleted_at="2026-11-21T08:30:00Z", body=None)
    await runner.changes()
    assert runner.deleted == ["notes/a", "notes/b"]
    files = [path for path in (desk.folder / "state").iterdir() if path.is_file()]
    assert [path.name for path in files if b"Quartermaine" in path.read_bytes()] == []


async def test_a_full_refresh_that_shows_nothing_deletes_nothing_without_an_operator(desk: Desk) -> None:
    desk.put(*(f"note-{number:02}" for number in range(30)))
    runner = desk.runner(FULL)
    await runner.full()
    desk.records["notes"].clear()
    desk.save()
    await runner.sweep()
    assert len(runner.published) == 30
    assert "none is deleted" in runner.status


async def test_an_incremental_stream_is_read_again_from_its_beginning_and_loses_what_is_gone(desk: Desk) -> None:
    desk.put("a", "b")
    runner = desk.runner({"reread_seconds": 0})
    await runner.full()
    desk.remove("a")
    await runner.sweep()
    assert "notes/a" in runner.published  # an incremental stream says nothing of it
    runner.source = desk.source({"reread_seconds": 0.001})
    await runner.sweep()
    assert (set(runner.published), runner.deleted) == ({"notes/b"}, ["notes/a"])


@pytest.mark.parametrize("state", ["stream", "global", "legacy"])
async def test_states_of_all_kinds_are_handed_back_and_survive_a_restart(desk: Desk, state: str) -> None:
    desk.put("a", "b", "c")
    desk.save(state=state)
    await desk.runner(**BOTH).full()
    desk.put("d")
    desk.save(state=state, dies_after=1)  # of a program that reads everything again
    cursor = await desk.source(**BOTH).start()
    assert cursor["change"] == 4


async def test_a_state_is_never_ahead_of_the_records_before_it(desk: Desk) -> None:
    desk.put("a", "b", "c", "d", "e")
    desk.save(dies_after=3)
    source = desk.source()
    with pytest.raises(Retryable, match="exit code 3"):
        await source.start()
    [(state,)] = desk.stored("SELECT state FROM states")
    assert json.loads(state)["stream"]["stream_state"]["changed"] == 2
    assert desk.stored("SELECT count(*) FROM records") == [(3,)]
    desk.save()
    runner = desk.runner()
    await runner.full()
    assert len(runner.published) == 5


async def test_when_the_file_is_lost_the_cursor_expires_and_everything_is_read_again(desk: Desk) -> None:
    desk.put("a", "b")
    source = desk.source()
    cursor = await source.start()
    for path in (desk.folder / "state").glob("records.sqlite*"):
        path.unlink()
    source = desk.source()
    with pytest.raises(CursorExpired, match="made anew"):
        [page async for page in source.changes(cursor)]
    assert len([entry async for page in source.full(None) for entry in page.entries]) == 2


async def test_states_that_the_service_does_not_know_any_more_lose_nothing(desk: Desk) -> None:
    desk.put("a", "b")
    runner = desk.runner()
    await runner.full()
    desk.lineage = "second"
    desk.put("b", body="Edited.")
    await runner.changes()
    assert runner.published["notes/b"].content == "Edited."


async def test_a_stream_that_is_refused_is_set_aside_and_the_others_are_read(desk: Desk) -> None:
    desk.put("a", "b")
    desk.put("x", "y", stream="files")
    runner = desk.runner(**BOTH)
    await runner.full()
    desk.remove("b")
    desk.remove("y", stream="files")
    desk.put("a", body="Edited.")
    desk.save(refused_streams=["files"])
    await runner.changes()
    await runner.sweep()
    assert runner.published["notes/a"].content == "Edited."
    assert {"files/x", "files/y"} <= set(runner.published)
    assert "stream files is set aside" in runner.status
    assert "403: this account may not read the stream" in runner.status
    desk.save()
    await runner.sweep()
    assert "files/y" not in runner.published
    assert runner.set_aside.problems("s") == []


async def test_a_stream_that_is_absent_for_a_while_keeps_its_documents(desk: Desk) -> None:
    desk.put("a")
    desk.put("x", stream="files")
    runner = desk.runner(**BOTH)
    await runner.full()
    desk.save(hidden_streams=["files"])
    runner.source = desk.source(**BOTH)
    await runner.sweep()
    assert set(runner.published) == {"notes/a", "files/x"}
    desk.save()
    runner.source = desk.source(**BOTH)
    await runner.sweep()
    assert set(runner.published) == {"notes/a", "files/x"}


async def test_a_program_that_says_nothing_about_its_streams_is_believed_when_it_ends_well(desk: Desk) -> None:
    desk.put("a", "b", "c")
    runner = desk.runner(FULL)
    desk.save(silent=True)
    await runner.full()
    desk.remove("b")
    desk.save(silent=True, dies_after=1)
    await runner.sweep()
    assert len(runner.published) == 3
    desk.save(silent=True)
    await runner.sweep()
    assert len(runner.published) == 2


async def test_a_huge_record_is_refused_with_one_line_and_deletes_nothing(desk: Desk) -> None:
    desk.put("a", "b", "c")
    runner = desk.runner(FULL, max_record_bytes=2_000)
    await runner.full()
    desk.put("b", body="x" * 5_000)
    desk.put("d")
    await runner.changes()
    await runner.sweep()
    assert set(runner.published) == {"notes/a", "notes/b", "notes/c", "notes/d"}
    [line] = [line for line in runner.status.splitlines() if "records of stream notes" in line]
    assert "max_record_bytes" in line
    desk.put("b", body="short")
    await runner.changes()
    assert runner.published["notes/b"].content == "short"
    assert "max_record_bytes" not in runner.status


@pytest.mark.parametrize("value", ["[" * 1_500 + "]" * 1_500, "[" * 700 + "]" * 700, "1" * 5_000])
async def test_a_record_that_python_refuses_stops_no_other(desk: Desk, value: str) -> None:
    """The author of one value stopped the reading of all streams, and so every revocation in them."""
    desk.put("a", "b", "c")
    edit = desk.folder / "edit.sed"
    edit.write_text(f's/"VALUE"/{value}/')
    program = f'{sys.executable} {airbyte.__file__} "$@" | sed -f {edit}'
    runner = desk.runner(FULL, program=["sh", "-c", program, "sh"])
    await runner.full()
    desk.put("b", team="VALUE")
    desk.put("c", team={"name": "others"})
    await runner.changes()
    assert runner.published["notes/c"].acl_tags == ["others"]
    assert [line for line in runner.status.splitlines() if "records of stream notes" in line]


async def test_a_record_without_its_key_is_refused_and_the_others_are_read(desk: Desk) -> None:
    desk.put("a", "b")
    desk.put("c", id=None)
    desk.put("d", id=1.5)
    runner = desk.runner()
    await runner.full()
    assert set(runner.published) == {"notes/a", "notes/b"}
    assert "a record has no id, which is part of its id" in runner.status
    assert "no whole number and no text" in runner.status


async def test_a_record_whose_access_cannot_be_read_is_closed(desk: Desk) -> None:
    desk.put("a", "b")
    runner = desk.runner()
    await runner.full()
    desk.put("a", team={"name": {"not": "a tag"}})
    desk.put("b", team=None)
    await runner.changes()
    assert [document.acl_tags for document in runner.published.values()] == [[], []]
    assert "bad_access" in runner.status


async def test_a_broken_message_ends_the_run_and_what_follows_it_is_read_again(desk: Desk) -> None:
    desk.put("a", "b", "c", "d")
    desk.save(breaks_after=3)
    source = desk.source()
    with pytest.raises(Retryable, match="two parts of the program"):
        await source.start()
    desk.save()
    runner = desk.runner()
    await runner.full()
    assert len(runner.published) == 4


async def test_a_program_that_hangs_is_ended_with_all_its_processes(desk: Desk) -> None:
    pid_file = desk.folder / "child"
    desk.put("a")
    desk.save(hangs=str(pid_file))
    source = desk.source(silence_seconds=3)
    with pytest.raises(Retryable, match="wrote nothing for 3 s"):
        await source.start()
    await assert_ended(int(pid_file.read_text()))


async def test_a_source_that_is_cancelled_ends_its_program_with_all_its_processes(desk: Desk) -> None:
    pid_file = desk.folder / "child"
    desk.save(hangs=str(pid_file))
    running = asyncio.create_task(desk.source().start())
    while not (pid_file.exists() and pid_file.read_text()):
        await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await assert_ended(int(pid_file.read_text()))


ENDLESS = """
import os, signal
if os.fork() == 0:
    if DAEMON:
        os.setsid()  # beyond the signals for the group, with the same output
    signal.alarm(30)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
line = b'{"type": "LOG", "log": {"level": "INFO", "message": "m"}}' + bytes([10])
record = b'{"type": "RECORD", "record": {"stream": "s", "data": {"x": 1}, "emitted_at": 1}}' + bytes([10])
while True:
    os.write(1, record + line * 1000)
"""


@pytest.mark.parametrize("is_daemon", [False, True])
async def test_a_run_of_a_program_that_writes_without_end_and_ignores_requests_to_end_is_over(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_daemon: bool
) -> None:
    """It hung for ever, and with it its source: nobody read the output that was waited for."""
    monkeypatch.setattr("connectors.airbyte.program.END_SECONDS", 0.5)
    program = (sys.executable, "-c", ENDLESS.replace("DAEMON", str(is_daemon)))
    run = Program(desk.source(program=program).options, desk.folder).run("read")
    assert isinstance(run, AsyncGenerator)
    async with asyncio.timeout(20):
        assert await anext(run)
        await asyncio.sleep(0.5)  # while the pipe fills up
        await run.aclose()


async def assert_ended(pid: int) -> None:
    async with asyncio.timeout(20):
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            await asyncio.sleep(0.05)


async def test_a_configuration_that_the_program_replaces_is_stored_sealed(desk: Desk) -> None:
    desk.put("a")
    desk.save(rotates_to="another-token")
    await desk.source().start()
    desk.token = "another-token"
    desk.save()
    assert [problem async for problem in _problems(desk.source())] == []
    await desk.source().start()
    assert "another-token" not in json.dumps(desk.memory.stored)


async def _problems(source: Airbyte) -> AsyncIterator[str]:
    for problem in await source.check():
        yield problem.code


async def test_secrets_and_content_reach_neither_errors_nor_logs(desk: Desk) -> None:
    desk.put("a", body="Nobody may log this.")
    desk.token = "the service has another one"
    desk.save()
    source = desk.source()
    with structlog.testing.capture_logs() as logs:
        with pytest.raises(Misconfigured) as raised:
            await source.start()
        problems = await source.check()
    shown = f"{raised.value} {problems} {logs}"
    assert "the token *** has expired" in shown
    assert "401" in shown
    assert SECRET not in shown
    assert str(desk.service) not in shown


async def test_files_of_a_run_are_readable_for_this_user_only_and_the_environment_is_small(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = desk.folder / "seen.json"
    script = desk.folder / "spy.py"
    script.write_text(
        "import json, os, stat, sys\n"
        "files = [a for a in sys.argv if a.endswith('.json') and 'run-' in a]\n"
        "modes = {os.path.basename(f): stat.S_IMODE(os.stat(f).st_mode) for f in files}\n"
        "folder = stat.S_IMODE(os.stat(os.path.dirname(files[0])).st_mode) if files else None\n"
        "if 'read' in sys.argv:\n"
        "    leads = os.getsid(0) == os.getpid()\n"
        f"    open({str(seen)!r}, 'w').write(json.dumps([modes, folder, dict(os.environ), leads]))\n"
        f"os.execv(sys.executable, [sys.executable, {airbyte.__file__!r}, *sys.argv[1:]])\n"
    )
    monkeypatch.setenv("PENSTOCK_POSTGRES_PASSWORD", "ours")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example")
    desk.put("a")
    source = desk.source(program=[sys.executable, str(script)], pass_environment=["HTTPS_PROXY"])
    await source.start()
    modes, folder, environment, leads = json.loads(seen.read_text())
    assert modes == {"config.json": 0o600, "catalog.json": 0o600}
    assert (folder, leads) == (0o700, True)
    assert environment["HTTPS_PROXY"] == "http://proxy.example"
    assert set(environment) <= {
        "PATH",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "TZ",
        "HOME",
        "TMPDIR",
        "PYTHONUNBUFFERED",
        "HTTPS_PROXY",
    }
    assert (desk.folder / "state" / "records.sqlite").stat().st_mode & 0o077 == 0


async def test_files_of_a_run_that_was_killed_are_removed_by_the_next(desk: Desk) -> None:
    desk.put("a")
    left = desk.folder / "state" / "run-killed"
    left.mkdir(parents=True)
    (left / "config.json").write_text(SECRET)
    await desk.source().start()
    assert not left.exists()


async def test_check_names_what_is_wrong(desk: Desk) -> None:
    async def messages(source: Airbyte) -> str:
        return "\n".join(problem.message for problem in await source.check())

    members = {"members": {"staff": ["ann@acme.example"]}}
    desk.put("a")
    assert await messages(desk.source()) == ""
    assert "the program has files, notes" in await messages(desk.source(streams={}))
    unknown = await messages(desk.source(streams={"tickets": STREAM}))
    assert "streams.tickets: the program has no such stream, but files, notes" in unknown
    assert "no field subject" in await messages(desk.source({"title": "{subject}"}))
    assert "'incremental'" in await messages(desk.source(streams={"files": {**STREAM, "sync": "incremental"}}))
    fixed = {"streams": {"notes": {"title": "t", "text": "t"}}, "acl_tags": ["staff", "board"]}
    assert "nobody holds the tag 'board'" in await messages(desk.source(**fixed, **members))
    assert "cannot be started (No such file" in await messages(desk.source(program=["/nowhere/source-desk"]))
    desk.save(no_key=True)
    assert "names no primary key" in await messages(desk.source())
    desk.token = "another"
    desk.save()
    assert "cannot connect: 401 for https://desk.example/?token=***" in await messages(desk.source())


async def test_a_changed_declaration_reads_the_stream_again(desk: Desk) -> None:
    desk.put("a", "b")
    runner = desk.runner()
    await runner.full()
    runner.source = desk.source({"text": "{title}: {body}"})
    await runner.changes()
    await runner.sweep()
    assert runner.published["notes/a"].content == "A: About a."


async def test_fetch_knows_what_exists_what_is_gone_and_what_is_not_known(desk: Desk) -> None:
    desk.put("a")
    desk.put("b", team={"name": 1.5})
    desk.save(refused_streams=["files"])
    source = desk.source(**BOTH)
    entries = {entry.external_id: entry for entry in await source.fetch(["notes/a", "notes/b", "notes/z", "files/x"])}
    assert isinstance(entries["notes/a"], Document)
    assert isinstance(entries["notes/b"], Unreadable)
    assert isinstance(entries["notes/z"], Gone)
    assert "files/x" not in entries


async def test_entries_carry_the_time_at_which_the_program_was_started(desk: Desk) -> None:
    desk.put("a", "b", "c", "d")
    source = desk.source()
    pages = [page async for page in source.full(None)]
    times = {entry.read_at for page in pages for entry in page.entries}
    assert len(times) == 1
    listed = {entry.read_at for page in [page async for page in source.slim()] for entry in page}  # type: ignore[union-attr]
    assert None not in times | listed
    assert max(times) < min(listed)  # type: ignore[type-var]
