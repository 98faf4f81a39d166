"""The worker of the connectors as operators have it: declared in a file, asked by commands, told by events, killed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer

from cli.stack import _connectors, _runs_too_few
from connectors.declared import VARIABLE
from connectors.fakes.notes import SECRET, TOKEN, Note, NotesPlayground, NotesService, app
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured
from pipeline.core.publication import publications_of
from pipeline.kafka.stopping import stop_consumer
from pipeline.runtime.http_server import served
from tests.support.processes import run_penstock
from tests.support.space import KEY_ENDS, PROJECT, Space
from tests.support.waiting import until

pytestmark = pytest.mark.stack

PAGE = 100


@dataclass
class Desk:
    """A space, its file of connectors, and a notes service for each of them."""

    space: Space
    file: Path
    plays: dict[str, NotesPlayground]

    def start(self, *names: str) -> None:
        self.space.start(*names)

    async def penstock(self, *arguments: str, within_seconds: float = 180) -> tuple[int, Any]:
        return await self.space.penstock("connector", *arguments, "--json", within_seconds=within_seconds)

    async def documents(self, name: str) -> int:
        [(n,)] = await self.space.query(
            "SELECT count(*) FROM documents WHERE source = %s AND deleted_at IS NULL AND version IS NOT NULL", name
        )
        return int(n)

    until = staticmethod(until)

    async def searchable(self, words: str, principal: str = NotesPlayground.inside) -> list[str]:
        _, response = await self.space.penstock("search", words, "--as", principal, "--json")
        return [result["external_id"] for result in response["results"] if words.split()[-1] in result["text"]]

    async def address(self, name: str) -> str:
        [(address,)] = await self.space.query("SELECT address FROM connectors WHERE source = %s", name)
        return str(address)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> int:
        request = urllib.request.Request(f"{await self.address('small')}{path}", body, dict(headers))

        def send() -> int:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        return await asyncio.to_thread(send)


@pytest.fixture
async def desk(stack: Stack, tmp_path: Path) -> AsyncIterator[Desk]:
    """Two connectors, ``small`` and ``large``; their polls and sweeps are hours apart: what happens was asked for."""
    async with AsyncExitStack() as opened:
        space = await opened.enter_async_context(Space.create(stack, tmp_path))
        plays, text = {}, ""
        for name in ("small", "large"):
            service = NotesService(page_size=PAGE if name == "large" else 3)
            url = await opened.enter_async_context(served(app(service)))
            plays[name] = NotesPlayground(service, url)
            text += f'[connector.{name}]\nkind = "examples.notes:Notes"\nurl = "{url}"\npoll_seconds = 9000\n'
            text += "sweep_seconds = 9000\ngroups_seconds = 9000\n"
            space.environment |= {f"PENSTOCK_{name.upper()}_TOKEN": TOKEN, f"PENSTOCK_{name.upper()}_SECRET": SECRET}
        digest = hashlib.sha256(b"key of the intranet").hexdigest()
        text += (
            f'[key.intranet]\nexpires = {KEY_ENDS}\nsha256 = "{digest}"\ntenant = "default"\nmay = ["conversations"]\n'
        )
        file = tmp_path / "connectors.toml"
        file.write_text(text)
        space.environment["PENSTOCK_CONNECTORS_FILE"] = str(file)
        yield Desk(space, file, plays)


def fill(play: NotesPlayground, count: int) -> None:
    for n in range(count):
        id_ = f"note-{n:05}"
        play.service.notes[id_] = Note(id_, "book", f"Note {n}", f"Some words of note number {n}, and no more.", 1)


@pytest.mark.slow
async def test_an_edit_of_one_source_is_searchable_while_another_is_crawled(desk: Desk) -> None:
    for name in ("alpha", "beta"):
        await desk.plays["small"].write(name, f"All about {name}.")
    fill(desk.plays["large"], 10_000)
    desk.start("detect", "vectors", "keywords", "connectors")

    async def under_way() -> bool:
        return await desk.documents("small") == 2 and await desk.documents("large") > 300

    await desk.until(under_way)
    desk.plays["small"].sent()
    await desk.plays["small"].write("alpha", "Now it is about a numbat.")
    [event] = desk.plays["small"].sent()
    assert await desk.post("/v1/events/small", event.body, event.headers) == 200

    async def is_searchable() -> bool:
        return await desk.searchable("numbat") == ["alpha"]

    await desk.until(is_searchable)
    assert await desk.documents("large") < 10_000, "the crawl was over before the edit was searchable: nothing is shown"


async def test_events_need_a_valid_signature_and_keys_permit_only_their_actions(desk: Desk) -> None:
    desk.start("connectors")
    await desk.until(lambda: has_address(desk))
    await desk.plays["small"].write("alpha", "All about alpha.")
    [event] = desk.plays["small"].sent()

    async def taken() -> bool:
        """503 until the instance has begun: the service sends it again."""
        return await desk.post("/v1/events/small", event.body, event.headers) == 200

    await desk.until(taken)
    assert await desk.post("/v1/events/small", event.body, {}) == 401
    assert await desk.post("/v1/events/small", b"{}", event.headers) == 401
    assert await desk.post("/v1/events/nobody", event.body, event.headers) == 404
    assert await desk.post("/v1/events/small", b" " * (1024 * 1024 + 1), event.headers) == 413
    assert await desk.post("/v1/conversations", b"{}", {"authorization": "Bearer wrong"}) == 401
    assert await desk.post("/v1/conversations", b"{}", {"authorization": "Bearer key of the intranet"}) == 422
    assert await desk.post("/v1/uploads", b"{}", {"authorization": "Bearer key of the intranet"}) == 404
    scraped = await asyncio.to_thread(get, f"http://127.0.0.1:{desk.space.ports['connectors']}/metrics")
    assert 'penstock_connector_events_total{outcome="refused",source="small"} 2.0' in scraped
    assert SECRET not in (log := desk.space.log("connectors"))
    assert TOKEN not in log


async def has_address(desk: Desk) -> bool:
    rows = await desk.space.query("SELECT 1 FROM connectors WHERE source = 'small' AND address <> ''")
    return bool(rows)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
async def test_a_killed_worker_resumes_and_publishes_at_most_one_page_again(desk: Desk) -> None:
    fill(desk.plays["large"], 3_000)
    for _ in range(2):
        before = await cursor(desk)
        desk.start("connectors")
        await desk.until(lambda before=before: moved(desk, before))
        desk.space.kill("connectors")
    desk.start("detect", "connectors")
    await desk.until(lambda: complete(desk, 3_000))
    published = await count(desk.space, "documents.backfill.v1")
    assert 3_000 <= published <= 3_000 + 2 * PAGE


@pytest.mark.slow
async def test_of_two_workers_one_runs_an_instance_and_the_other_takes_over_when_it_is_killed(desk: Desk) -> None:
    fill(desk.plays["large"], 3_000)
    await desk.plays["small"].write("alpha", "All about alpha.")
    names = ["connectors", "connectors#2"]
    desk.start("detect", *names)
    await desk.until(lambda: moved(desk, None))
    await desk.until(lambda: has_address(desk))
    address = await desk.address("large")
    [holder] = [name for name in names if address in desk.space.log(name)]
    [other] = [name for name in names if name != holder]
    before = await desk.documents("large")
    desk.space.kill(holder)
    assert before < 3_000, "the crawl was over before the worker was killed: nothing is shown"

    async def is_taken_over() -> bool:
        return all([await desk.address(name) in desk.space.log(other) for name in ("small", "large")])

    await desk.until(is_taken_over)
    await desk.until(lambda: complete(desk, 3_000))
    assert 3_000 <= await count(desk.space, "documents.backfill.v1") <= 3_001 + PAGE
    desk.plays["small"].sent()
    await desk.plays["small"].write("alpha", "Now it is about a numbat.")
    [event] = desk.plays["small"].sent()
    assert await desk.post("/v1/events/small", event.body, event.headers) == 200

    async def is_read() -> bool:
        rows = await desk.space.query("SELECT 1 FROM connector_items WHERE source = 'small' AND revision = '2'")
        return bool(rows)

    await desk.until(is_read)


async def cursor(desk: Desk) -> object:
    rows = await desk.space.query("SELECT full_cursor FROM connectors WHERE source = 'large'")
    return rows[0][0] if rows else None


async def moved(desk: Desk, before: object) -> bool:
    return await cursor(desk) not in (None, before)


async def complete(desk: Desk, expected: int) -> bool:
    return await desk.documents("large") == expected


async def count(space: Space, topic: str) -> int:
    kafka = space.settings.kafka
    consumer = AIOKafkaConsumer(f"{kafka.topic_prefix}{topic}", bootstrap_servers=kafka.bootstrap)
    await consumer.start()
    try:
        return sum((await consumer.end_offsets(consumer.assignment())).values())
    finally:
        await stop_consumer(consumer)


@pytest.mark.slow
async def test_connector_commands_run_locally_or_through_the_running_worker(desk: Desk) -> None:
    play = desk.plays["small"]
    for n in range(40):
        await play.write(f"n{n:02}", f"All about number {n}.")
    assert (await desk.penstock("check", "small"))[0] == 0
    code, result = await desk.penstock("run", "small")
    assert (code, result["where"], result["ok"]) == (0, "here", True)
    assert result["outcomes"]["load"]["upserted"] == 40, "the load began before it was asked for, and said nothing new"
    assert len(publications_of(result["token"])) == 40, "nobody has accepted them"
    assert (await desk.penstock("list"))[1][0]["state"] == "not running"
    code, [status] = await desk.penstock("status", "small")
    assert (code, status["documents"], status["published"]["upserted"]) == (1, 40, 40)

    desk.start("detect", "connectors")
    play.service.notes["n00"].text = "Edited, and nothing tells of it."
    code, result = await desk.penstock("run", "small", "--document", "n00")
    assert (code, result["outcomes"]["document"]["upserted"]) == (0, 1)
    assert result["where"] not in (None, "here")
    code, [status] = await desk.penstock("status", "small")
    assert (code, status["state"], status["address"].startswith("http://127.0.0.1:")) == (0, "following", True)

    for n in range(5, 40):
        await play.remove(f"n{n:02}")
    play.service.first_known_change = len(play.service.history)
    code, result = await desk.penstock("run", "small", "--sweep")
    assert code == 1
    assert "35 of 40" in result["problems"][0]
    assert (await desk.penstock("status", "small"))[0] == 1, "a guard waits for a word"
    code, result = await desk.penstock("run", "small", "--allow-mass-delete")
    assert (code, result["outcomes"]["allow_mass_delete"]["deleted"]) == (0, 35)

    assert (await desk.penstock("pause", "small"))[0] == 0
    code, out, errors = await run_command(desk.space, "connector", "run", "small")
    assert (code, out) == (1, "")
    assert "small is paused: run `penstock connector resume small`" in errors
    assert (await desk.penstock("resume", "small"))[0] == 0
    code, result = await desk.penstock("run", "small", "--full")
    assert (code, result["outcomes"]["full"]["unchanged"]) == (0, 5)

    desk.space.environment["PENSTOCK_SMALL_TOKEN"] = "wrong"
    code, [checked] = await desk.penstock("check", "small")
    assert (code, checked["ok"], checked["problems"][0]["code"]) == (1, False, "denied")
    code, out, errors = await run_command(desk.space, "connector", "status", "nobody")
    assert (code, "declares no connector 'nobody' (known: small, large)" in errors) == (1, True)


async def run_command(space: Space, *arguments: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(partial(run_penstock, *arguments, env=space.environment))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
async def test_penstock_up_starts_the_connectors_worker_only_if_connectors_are_declared(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")  # what _connectors() sets there is taken back with it
    monkeypatch.delenv(VARIABLE)
    monkeypatch.chdir(tmp_path)
    assert _connectors() == ("connectors",)
    assert os.environ[VARIABLE] == str(desk.file)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "elsewhere.toml"))
    assert _connectors() == ()
    (tmp_path / "elsewhere.toml").write_text("[connector.x]")
    with pytest.raises(Misconfigured, match=r"\[connector\.x\] kind"):
        _connectors()

    local = Stack(desk.space.home)
    worker = await asyncio.to_thread(
        local.start_worker, "connectors", env={**desk.space.environment, "PYTHONPATH": str(PROJECT)}
    )
    try:
        assert worker.ready
        monkeypatch.setenv(VARIABLE, str(desk.file))
        assert worker.connectors == {"small", "large"}
        assert not _runs_too_few(worker)
        with desk.file.open("a") as file:
            file.write('[connector.new]\nkind = "examples.notes:Notes"\n')
        assert _runs_too_few(worker), "`up` said that everything was running, and nothing read the file again"
        _, status = await desk.space.penstock("status", "--json")
        assert [(worker["name"], worker["ready"]) for worker in status["workers"]] == [("connectors", True)]
        await desk.until(lambda: has_address(desk))
    finally:
        await asyncio.to_thread(local.stop, "connectors")
    [(worker_left,)] = await desk.space.query("SELECT worker FROM connectors WHERE source = 'small'")
    assert worker_left is None, "a worker that is told to stop leaves its instances in good order"
