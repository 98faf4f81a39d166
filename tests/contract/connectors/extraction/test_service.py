"""Files read by a service of its own: what it gives, what it refuses, and what its callers believe of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from connectors import worker
from connectors.extract import extract
from connectors.extraction import (
    Extracted,
    ExtractionSettings,
    Unreadable,
    answer,
    extract_file,
    remote,
    sandbox,
    service,
    settings,
)
from connectors.folder import content as folder
from connectors.runner import sweep
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.observability.metrics import EXTRACTION_STATES, Metrics
from pipeline.runtime import confinement
from tests.support.connectors.extraction_kit import SMALL
from tests.support.connectors.hostile_office import MEGABYTE, plain_docx
from tests.support.connectors.pdf_files import Line, Sheet, encrypted_pdf, typeset
from tests.support.waiting import until

PDF = typeset([Sheet([Line(72, 700, "Travel policy")])], title="Trips")
OCTETS = {"content-type": "application/octet-stream"}


def given(url: str, **more: object) -> ExtractionSettings:
    return SMALL.model_copy(update={"url": url, **more})


def hanging_reader(mark: str) -> tuple[str, ...]:
    """A reader that never ends."""
    return (sys.executable, "-c", f"import time; time.sleep(1000)  # {mark}")


def running(mark: str) -> int:
    count = 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            count += child.status() != psutil.STATUS_ZOMBIE and mark in " ".join(child.cmdline())
    return count


@pytest.fixture
async def at() -> AsyncIterator[str]:
    async with service.serving(SMALL.model_copy(update={"port": 0})) as address:
        yield address


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a service that does not come back."""
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.0)


@asynccontextmanager
async def impostor(reply: Callable[[bytes], bytes]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Whatever listens in the service's place: its address, and the heads of the requests that it got."""
    heads: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            heads.append(head := await reader.readuntil(b"\r\n\r\n"))
            if b"chunked" in head.lower():
                await reader.readuntil(b"0\r\n\r\n")
            writer.write(reply(head))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


def fixed_response(body: bytes, *headers: str, status: str = "200 OK") -> Callable[[bytes], bytes]:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return lambda _: "\r\n".join([*lines, "", ""]).encode() + body


async def read(tmp_path: Path, url: str, data: bytes = PDF, name: str = "a.pdf", **more: object) -> Extracted:
    (tmp_path / "stored").write_bytes(data)
    return await extract_file(tmp_path / "stored", name, settings=given(url, **more))


# What it gives


async def test_the_extraction_service_gives_the_same_result_as_a_local_process(at: str, tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(PDF)
    own = await extract_file(tmp_path / "own", "a.pdf", settings=SMALL)
    assert await read(tmp_path, at) == own
    assert (own.text, own.title) == ("Travel policy", "Trips")
    assert (await read(tmp_path, at, plain_docx(), "a.docx")).text == "Harmless words.\n"
    assert (await read(tmp_path, at, plain_docx(), "Größe % &?/..\u202e.docx")).text == "Harmless words.\n"


@pytest.mark.parametrize(
    ("data", "name", "code"),
    [
        (encrypted_pdf(), "a.pdf", "encrypted"),
        (PDF[: len(PDF) // 2], "a.pdf", "truncated"),
        (b"PK\x03\x04 nothing", "a.docx", None),
        (PDF + bytes(3 * MEGABYTE), "a.pdf", "too_large"),
    ],
    ids=["encrypted", "cut", "broken", "large"],
)
async def test_a_file_that_gives_no_text_is_refused_for_the_same_reason(
    tmp_path: Path, data: bytes, name: str, code: str | None
) -> None:
    async with service.serving(SMALL.model_copy(update={"port": 0, "max_file_bytes": 2 * MEGABYTE})) as at:
        with pytest.raises(Unreadable) as caught:
            await read(tmp_path, at, data, name)
    assert caught.value.code == code or code is None
    assert caught.value.code != "unconfined"


async def test_plain_text_is_read_locally_without_the_service(tmp_path: Path) -> None:
    assert (await read(tmp_path, "http://127.0.0.1:1", b"# Plan\n", "a.md")).text == "# Plan\n"


async def test_synchronous_extraction_uses_the_service(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "from_environment", lambda: given(at))
    monkeypatch.setattr(sandbox, "PROGRAM", ("/nowhere",))
    with pytest.raises(Retryable):
        await asyncio.to_thread(extract, PDF, "a.pdf")  # the service here cannot start its reader
    monkeypatch.undo()
    monkeypatch.setattr(sandbox, "from_environment", lambda: given(at))
    assert (await asyncio.to_thread(extract, PDF, "a.pdf")).text == "Travel policy"


# A service that does not do its work


async def test_a_file_is_read_once_its_service_is_back(tmp_path: Path) -> None:
    async with service.serving(SMALL.model_copy(update={"port": 0})) as at:
        port = int(at.rpartition(":")[2])
    reading = asyncio.create_task(read(tmp_path, at))
    await asyncio.sleep(0.3)
    assert not reading.done()
    async with service.serving(SMALL.model_copy(update={"port": port})):
        assert (await reading).text == "Travel policy"


@pytest.mark.usefixtures("impatient")
async def test_an_unreachable_service_defers_the_file(tmp_path: Path) -> None:
    with pytest.raises(Deferred, match=r"^the extraction service 127\.0\.0\.1:1 cannot be reached") as caught:
        await read(tmp_path, "http://127.0.0.1:1")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("impatient")
async def test_a_folder_file_is_deferred_while_the_extraction_service_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "from_environment", lambda: given("http://127.0.0.1:1"))
    file = tmp_path.resolve() / "a.pdf"
    file.write_bytes(PDF)
    with pytest.raises(Deferred, match="extraction service"):
        await asyncio.to_thread(folder.read, str(file), file.stat())


@pytest.mark.usefixtures("impatient")
async def test_a_service_that_hangs_times_out_and_its_connection_is_closed(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass
        closed.set()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        short = {"wall_seconds": 0, "body_seconds": 0.1}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(settings, "WAIT_SECONDS", -9.5)  # 0.7 s in all
            with pytest.raises(Deferred, match=r"did not answer within 0\.7 s"):
                await read(tmp_path, url, **short)
        await closed.wait()


async def test_a_cancelled_extraction_closes_its_connection_to_the_service(tmp_path: Path) -> None:
    got, closed = asyncio.Event(), asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.set()
        while await reader.read(65536):
            pass
        closed.set()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        task = asyncio.create_task(read(tmp_path, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        await got.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed.wait()


async def test_a_busy_services_retry_after_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = fixed_response(b"busy", "Retry-After: 999999999", status="503 Service Unavailable")
    monkeypatch.setattr(settings, "WAIT_SECONDS", -9.0)  # 2 s in all
    async with impostor(reply) as (url, heads):
        with pytest.raises(Deferred, match="is busy") as caught:
            await read(tmp_path, url, wall_seconds=0, body_seconds=0.5)
    assert caught.value.retry_after == remote.LONGEST_PAUSE_SECONDS
    assert len(heads) == 1


@pytest.mark.usefixtures("impatient")
async def test_a_file_refused_by_a_busy_service_is_sent_again(tmp_path: Path) -> None:
    """By then more time has passed than an unreachable service is given."""
    busy, text = (
        fixed_response(b"", "Retry-After: 0", status="503 Service Unavailable"),
        fixed_response(HEAD + b"words"),
    )
    replies = iter([busy, busy, text])
    async with impostor(lambda head: next(replies)(head)) as (url, heads):
        assert (await read(tmp_path, url)).text == "words"
    assert len(heads) == 3


@pytest.mark.usefixtures("impatient")
async def test_a_503_without_retry_after_defers_the_file(tmp_path: Path) -> None:
    async with impostor(fixed_response(b"", status="503 Service Unavailable")) as (url, heads):
        with pytest.raises(Deferred, match="not ready"):
            await read(tmp_path, url)
    assert len(heads) == 1


# A service that somebody has taken over, or that is another program

HEAD = b'{"media_type": "text/plain", "title": null, "author": null, "metadata": {}}\n'


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "reply",
    [
        fixed_response(b""),
        fixed_response(b"<html>Welcome to nginx</html>"),
        fixed_response(b"[" * 10_000 + b"\n"),
        fixed_response(b'{"code": "vanished", "message": "x"}\n'),
        fixed_response(b'{"code": ["x"], "message": "x"}\n'),
        fixed_response(b'{"family": "word"}\n'),
        fixed_response(HEAD),
        fixed_response(HEAD + b" \n\x00 "),
        fixed_response(HEAD + b"\xff"),
        fixed_response(HEAD + b"x" * (4 * MEGABYTE + 1)),
        fixed_response(b" " * (answer.MAX_HEAD_BYTES + 1) + b"\n"),
        fixed_response(HEAD.replace(b"{}", b'{"pages": 1e400}') + b"x"),
        fixed_response(HEAD.replace(b"{}", b"[]") + b"x"),
        fixed_response(HEAD.replace(b"{}", b'{"pages": ' + b"9" * 5000 + b"}") + b"x"),
        fixed_response(HEAD.replace(b"plain", b"html") + b"<script>"),
        fixed_response(HEAD + b"x", "Content-Encoding: gzip"),
        fixed_response(HEAD + b"x", status="404 Not Found"),
        fixed_response(HEAD + b"x", status="204 No Content"),
        fixed_response(HEAD + b"x", "Location: http://169.254.169.254/", status="307 Temporary Redirect"),
        lambda _: b"HTTP/1.1 200 \r\ntransfer-encoding:chunked\r\n\r\n" + 6 * (b"100000\r\n" + bytes(2**20) + b"\r\n"),
        lambda _: b"HTTP/1.1 200 OK\r\nX: " + b"x" * MEGABYTE,
        lambda _: b"\x00" * 1000,
        lambda _: b"",
    ],
)
async def test_an_invalid_response_of_the_service_defers_the_file(
    tmp_path: Path, reply: Callable[[bytes], bytes]
) -> None:
    async with impostor(reply) as (url, heads):
        with pytest.raises(Deferred, match=r"^the extraction service 127\.0\.0\.1:\d+ ") as caught:
            await read(tmp_path, url)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert len(heads) == 1, "or it was asked again, or somebody else was"


async def test_only_the_text_and_plain_metadata_of_a_services_response_are_used(tmp_path: Path) -> None:
    said = {"path": "/etc/passwd", "external_id": "b", "acl_tags": ["everybody"], "pages": 2, "ocr": True}
    head = {"media_type": "text/plain", "title": "T\n\x07itle", "author": 7, "metadata": said, "acl_tags": ["all"]}
    body = json.dumps(head).encode() + b"\nwo\x00rds"
    async with impostor(fixed_response(body, "Set-Cookie: a=b")) as (url, heads):
        results = [await read(tmp_path, url) for _ in range(2)]
    assert results == 2 * [Extracted("words", "text/plain", "T itle", None, {"pages": 2, "ocr": True})]
    assert b"cookie" not in b"".join(heads).lower()


async def test_parsing_a_response_takes_little_memory(tmp_path: Path) -> None:
    """As JSON alone, 4 MB of empty lists took 500 MB."""
    import tracemalloc

    head = HEAD.replace(b"{}", b'{"x": [' + b"[]," * 5000 + b"[]]}")
    data = head + b"[]," * (answer.MAX_TEXT_BYTES // 3)
    tracemalloc.start()
    try:
        assert isinstance(answer.read(data), Extracted)
        assert tracemalloc.get_traced_memory()[1] < 32 * MEGABYTE
    finally:
        tracemalloc.stop()


async def test_proxy_variables_of_the_environment_are_ignored(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with impostor(fixed_response(b"")) as (proxy, heads):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        assert (await read(tmp_path, at)).text == "Travel policy"
    assert heads == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "extraction:8070",
        "ftp://a",
        "http://",
        "http://a:b@c",
        "http://a/v1",
        "http://a?b",
        "http://a:0",
        "http://[",
        "http://a:99999",
    ],
)
def test_an_invalid_service_address_is_misconfigured_and_not_quoted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_EXTRACTION_URL", url)
    settings.from_environment.cache_clear()
    try:
        with pytest.raises(Misconfigured, match=r"PENSTOCK_EXTRACTION\w*: ") as caught:
            settings.from_environment()
    finally:
        settings.from_environment.cache_clear()
    assert "a:b" not in str(caught.value)


# Callers that somebody has taken over, and the many


async def test_the_service_refuses_files_beyond_its_limit_of_pending_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"marks {tmp_path.name}"
    monkeypatch.setattr(sandbox, "PROGRAM", hanging_reader(mark))
    few = SMALL.model_copy(update={"port": 0, "at_once": 1, "waiting": 1})
    async with service.serving(few) as at, httpx.AsyncClient(base_url=at, timeout=60) as client:

        async def post() -> httpx.Response:
            return await client.post("/v1/extract?name=a.pdf", content=PDF, headers=OCTETS)

        held = [asyncio.create_task(post()) for _ in range(2)]
        while "penstock_extraction_pending_requests 2.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.02)
        refused = await post()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert running(mark) <= 1
        for item in held:
            item.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await until(lambda: running(mark) == 0)
        while "penstock_extraction_pending_requests 0.0" not in (text := (await client.get("/metrics")).text):
            await asyncio.sleep(0.02)
        assert 'penstock_extraction_requests_total{outcome="busy"} 1.0' in text


async def test_slow_files_of_one_process_delay_another_process_by_a_single_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were read in the order of their arrival, and took all places: a file of another process that waited for
    half a minute was refused, and came behind all others again."""
    order, go_on = list[str](), threading.Event()

    class Job:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self) -> Extracted:
            go_on.wait(20)
            order.append(self.name)
            return Extracted("text", "text/plain", None, None, {})

        def kill(self) -> None:
            go_on.set()

    monkeypatch.setattr(service, "read_or_job", lambda file, name, *_: Job(name))
    few = SMALL.model_copy(update={"port": 0, "at_once": 1, "waiting": 8})
    async with service.serving(few) as at, AsyncExitStack() as stack:

        async def post(client: httpx.AsyncClient, name: str) -> int:
            response = await client.post("/v1/extract", params={"name": name}, content=PDF, headers=OCTETS)
            return response.status_code

        flooding, other = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=at, timeout=60, transport=httpx.AsyncHTTPTransport(local_address=address))
            )
            for address in ("127.0.0.2", "127.0.0.3")
        ]
        flood = [asyncio.create_task(post(flooding, "slow.pdf")) for _ in range(9)]
        await until(lambda: sum(task.done() for task in flood) == 4)  # half of the places that wait are for others
        waiting = asyncio.create_task(post(other, "other.pdf"))
        while "penstock_extraction_pending_requests 6.0" not in (await other.get("/metrics")).text:
            await asyncio.sleep(0.02)
        go_on.set()
        assert await waiting == 200
        assert sorted(await asyncio.gather(*flood)) == [200] * 5 + [503] * 4
    assert order.index("other.pdf") == 1


async def test_scans_hold_no_thread_of_the_service_or_its_client_in_which_other_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "ocrmypdf"
    program.parent.mkdir()
    program.write_text(f"""#!/bin/sh
        while ! test -e {program.parent}/go; do sleep 0.05; done
        for made; do true; done
        cp {program.parent}/recognised.pdf "$made"
    """)
    program.chmod(0o755)
    (program.parent / "recognised.pdf").write_bytes(typeset([Sheet([Line(72, 700, "What the scan says")])]))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    scan = typeset([Sheet(picture=True)])
    some = SMALL.model_copy(update={"port": 0, "at_once": 1, "ocr": True})
    async with service.serving(some) as at, httpx.AsyncClient(base_url=at, timeout=60) as older:

        async def extracted(name: str, data: bytes) -> str:
            (tmp_path / name).write_bytes(data)
            return (await extract_file(tmp_path / name, name, settings=given(at, at_once=1, ocr=True))).text

        waiting = [asyncio.create_task(extracted(f"scan-{number}.pdf", scan)) for number in range(2)]
        unaware = asyncio.create_task(older.post("/v1/extract", params={"name": "a.pdf"}, content=scan, headers=OCTETS))
        await asyncio.sleep(0.5)
        assert "Travel policy" in await extracted("other.pdf", PDF)
        assert "Travel policy" in (await older.post("/v1/extract", content=PDF, headers=OCTETS)).text
        assert not any(task.done() for task in (*waiting, unaware))
        (program.parent / "go").touch()
        assert await asyncio.gather(*waiting) == ["What the scan says"] * 2
        assert "What the scan says" in (await unaware).text, "a client of an earlier version has it read in one request"


async def test_a_client_that_sends_too_slowly_times_out_while_others_are_served(tmp_path: Path) -> None:
    hasty = SMALL.model_copy(update={"port": 0, "body_seconds": 0.5, "at_once": 1, "waiting": 1})
    async with service.serving(hasty) as at:
        port = int(at.rpartition(":")[2])
        _, slow_head = await asyncio.open_connection("127.0.0.1", port)
        slow_head.write(b"POST /v1/extract HTTP/1.1\r\nHost: a\r\nX")
        reader, slow_body = await asyncio.open_connection("127.0.0.1", port)
        slow_body.write(
            b"POST /v1/extract HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n"
            b"Content-Length: 1000\r\n\r\nx"
        )
        async with httpx.AsyncClient(base_url=at) as client:
            assert (await client.post("/v1/extract?name=a.pdf", content=PDF, headers=OCTETS)).status_code == 200
        assert (await reader.readline()).split()[1] == b"408"
        for writer in (slow_head, slow_body):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_file_beyond_the_limit_is_refused_and_never_stored_whole(tmp_path: Path, chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield bytes(MEGABYTE)

    async with (
        service.serving(SMALL.model_copy(update={"port": 0, "max_file_bytes": MEGABYTE})) as at,
        httpx.AsyncClient(base_url=at) as client,
    ):
        content = pieces() if chunked else bytes(8 * MEGABYTE)
        response = await client.post("/v1/extract?name=a.pdf", content=content, headers=OCTETS)
    with pytest.raises(Unreadable) as caught:
        answer.read(response.content)
    assert caught.value.code == "too_large"


async def test_a_browser_page_of_another_origin_cannot_submit_files(at: str) -> None:
    """A page of another origin may send forms and plain text without permission."""
    async with httpx.AsyncClient(base_url=at) as client:
        for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""):
            response = await client.post("/v1/extract", content=PDF, headers={"content-type": kind})
            assert response.status_code == 415
        response = await client.options("/v1/extract", headers={"origin": "http://evil", **OCTETS})
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers
        for path in ("/v1/extract", "/docs", "/openapi.json", "/v1/extract/../../etc/passwd"):
            assert (await client.get(path)).status_code in (404, 405)


async def test_malformed_output_of_a_reader_fails_only_its_own_file(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "PROGRAM", (sys.executable, "-c", 'print(\'{"code": "vanished", "message": 1}\')'))
    with pytest.raises(Unreadable) as caught:
        await read(tmp_path, at)
    assert caught.value.code == "crashed"
    monkeypatch.undo()
    assert (await read(tmp_path, at)).text == "Travel policy"


# Where readers cannot be confined


async def test_the_service_reads_files_again_once_it_can_confine_its_readers(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = confinement.Confinement(landlock=0, seccomp=True)
    monkeypatch.setattr(sandbox, "available", lambda: nothing)
    monkeypatch.setattr(settings, "available", lambda: nothing)
    with pytest.raises(Unreadable) as caught:
        await read(tmp_path, at)
    assert caught.value.code == "unconfined"
    condition = await remote.condition(given(at))
    assert condition["files"] == "refused"
    assert condition["kernel"] == f"no Landlock, seccomp, at {at.removeprefix('http://')}"
    monkeypatch.undo()
    assert (await remote.condition(given(at)))["files"] == "confined"
    assert sweep.condition is remote.condition, "what a sweep asks before it reads them again"  # type: ignore[attr-defined]


async def test_the_workers_metric_follows_the_state_of_the_extraction_service(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alerts rely on exactly one state having the value 1."""
    metrics, service_status = Metrics(), dict[str, str]()

    async def states(url: str) -> dict[str, float | None]:
        monkeypatch.setattr(remote, "from_environment", lambda: given(url))
        await worker._update_extraction(metrics, service_status)
        value = metrics.registry.get_sample_value
        return {state: value("penstock_extraction", {"files": state}) for state in EXTRACTION_STATES}

    nothing = dict.fromkeys(EXTRACTION_STATES, 0.0)
    assert await states(at) == nothing | {"confined": 1.0}
    assert await states("http://127.0.0.1:1") == nothing | {"unreachable": 1.0}
    assert (service_status["files"], "127.0.0.1:1 cannot be reached" in service_status["kernel"]) == (
        "unreachable",
        True,
    )
    assert await states(at) == nothing | {"confined": 1.0}


@pytest.mark.parametrize(
    "reply",
    [
        fixed_response(b"{}"),
        fixed_response(b'{"files": "fine", "kernel": "x"}'),
        fixed_response(b"[" * 10_000),
        fixed_response(b'{"files": ["confined"], "kernel": "x"}'),
        fixed_response(bytes(20_000)),
        fixed_response(b"", status="500 No"),
        fixed_response(b'"', "Location: /", status="302 Found"),
        lambda _: b"",
    ],
)
async def test_a_service_with_an_invalid_status_response_counts_as_unreachable(
    reply: Callable[[bytes], bytes],
) -> None:
    async with impostor(reply) as (url, _):
        condition = await remote.condition(given(url))
    assert condition["files"] == "unreachable"
    assert len(condition["kernel"]) < 300


async def test_the_services_kernel_description_is_cut_to_one_short_line() -> None:
    body = json.dumps({"files": "confined", "kernel": "x\n\x1b[31m" * 500}).encode()
    async with impostor(fixed_response(body)) as (url, _):
        condition = await remote.condition(given(url))
    assert condition["files"] == "confined"
    assert len(condition["kernel"]) < 150
    assert condition["kernel"].isprintable()


# The process


def test_the_service_runs_without_any_other_service_login_or_secret(tmp_path: Path) -> None:
    """It reads none where there are some, and opens nothing of the folders where they lie."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "PENSTOCK_POSTGRES_PASSWORD").write_text("hunter2")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "endpoints.json").write_text('{"kafka": {"bootstrap": "hunter2"}}')
    program = """
import sys
folder, opened = sys.argv.pop(1), []
def hook(event, arguments):
    if event == "open" and str(arguments[0]).startswith(folder):
        opened.append(arguments[0])
    if event == "socket.connect":
        opened.append(arguments[1])
sys.addaudithook(hook)
from cli.main import main
try:
    main()
finally:
    print("opened", opened)
    others = ("psycopg", "aiokafka", "elasticsearch", "openai", "pipeline.kafka.client", "pipeline.stores.postgres")
    print("loaded", [one for one in others if one in sys.modules])
"""
    environment = {
        "PATH": os.environ["PATH"],
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "PENSTOCK_SECRETS_DIR": str(tmp_path / "secrets"),
        "PENSTOCK_KAFKA_BOOTSTRAP": "127.0.0.1:1",
        "PENSTOCK_POSTGRES_DSN": "no dsn at all",
        "PENSTOCK_EXTRACTION_AT_ONCE": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), "extract", "serve", "--port", "0"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
    )
    assert process.stdout is not None
    try:
        address = next(line.strip() for line in process.stdout if line.startswith("http://"))
        assert address.startswith("http://127.0.0.1:")
        for path in ("/livez", "/readyz", "/metrics"):
            assert httpx.get(f"{address}{path}").status_code == 200
        assert httpx.get(f"{address}/status").json()["files"] == "confined"
        response = httpx.post(f"{address}/v1/extract?name=a.pdf", content=PDF, headers=OCTETS, timeout=60)
        extracted = answer.read(response.content)
        assert isinstance(extracted, Extracted)
        assert extracted.text == "Travel policy"
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert re.search(r"^opened \[\]$", rest, re.MULTILINE), rest
    assert re.search(r"^loaded \[\]$", rest, re.MULTILINE), rest
    assert "hunter2" not in rest
    assert "policy" not in rest, "content in a log"


def test_a_port_in_use_is_reported_with_the_name_of_its_setting(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", "extract", "serve", "--port", port],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "PENSTOCK_EXTRACTION_PORT" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_kernel_kills_a_reader_before_its_parent_when_memory_runs_out() -> None:
    program = (
        "from pipeline.runtime import confinement; from connectors.extraction.limits import Limits;"
        "confinement.limit(Limits()); print(open('/proc/self/oom_score_adj').read())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1000"
