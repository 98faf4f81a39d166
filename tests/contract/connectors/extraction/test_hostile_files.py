"""Files that are made to break their reader end with the right error, within the reader's limits."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from connectors.extraction import Extracted, Unreadable, extract_file, sandbox
from tests.support.connectors.extraction_kit import SMALL, Extract
from tests.support.connectors.hostile_files import HOSTILE, Hostile
from tests.support.connectors.hostile_office import MEGABYTE, fetching_docx
from tests.support.connectors.pdf_files import Line, Sheet, typeset
from tests.support.waiting import until


@pytest.fixture
def extract(tmp_path: Path) -> Extract:
    return Extract(tmp_path)


@asynccontextmanager
async def memory_watched() -> AsyncIterator[Callable[[], tuple[int, int]]]:
    """Yields what tells how much this process has grown, and how large its children were, at most; in bytes."""
    me = psutil.Process()
    before, grown, largest = me.memory_info().rss, 0, 0

    async def look() -> None:
        nonlocal grown, largest
        while True:
            grown = max(grown, me.memory_info().rss - before)
            for child in await asyncio.to_thread(me.children, recursive=True):
                try:
                    if "connectors.extraction.process" in child.cmdline():
                        largest = max(largest, child.memory_info().rss)
                except psutil.Error:
                    continue
            await asyncio.sleep(0.02)

    looking = asyncio.create_task(look())
    try:
        yield lambda: (grown, largest)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def outcome(path: Path, name: str) -> Extracted | Unreadable:
    try:
        return await extract_file(path, name, settings=SMALL)
    except Unreadable as error:
        return error


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
async def test_a_hostile_file_has_its_expected_outcome_within_the_memory_limits(
    hostile: Hostile, extract: Extract, tmp_path: Path
) -> None:
    (tmp_path / "given").write_bytes(hostile.build())
    async with memory_watched() as cost:
        ended = await outcome(tmp_path / "given", hostile.name)
        grown, largest = cost()
    assert (ended.code if isinstance(ended, Unreadable) else "text") in hostile.ends_as, ended
    assert len(str(ended)) < 300 if isinstance(ended, Unreadable) else len(ended.text.encode()) <= 4 * MEGABYTE
    assert grown < 128 * MEGABYTE
    assert largest <= SMALL.memory_bytes
    assert (await extract("after.pdf", typeset([Sheet([Line(72, 700, "Still here")])]))).text == "Still here"


async def test_addresses_in_a_document_are_never_fetched(extract: Extract) -> None:
    requests = []
    server = await asyncio.start_server(lambda reader, writer: (requests.append(1), writer.close()), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert (await extract("a.docx", fetching_docx(f"http://127.0.0.1:{port}"))).text == "Harmless words.\n"
    assert requests == []


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.create_connection(('127.0.0.1', {port}))",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
    ],
)
def test_the_python_audit_hook_forbids_connections_and_subprocesses(attempt: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        attempt = attempt.format(port=listening.getsockname()[1])
        free = subprocess.run([sys.executable, "-c", attempt], check=False, capture_output=True)
        assert free.returncode == 0, "or the test proves nothing"
        confined = f"from pipeline.runtime import confinement; confinement.forbid(); {attempt}"
        done = subprocess.run([sys.executable, "-c", confined], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "PermissionError" in done.stderr


async def test_extraction_runs_a_limited_number_of_processes_and_ends_them_on_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"marks {tmp_path.name}"
    monkeypatch.setattr(sandbox, "PROGRAM", (sys.executable, "-c", f"import time; time.sleep(1000)  # {mark}"))
    (tmp_path / "a.pdf").write_bytes(typeset([Sheet()]))

    def running() -> int:
        count = 0
        for child in psutil.Process().children():
            try:
                count += child.status() != psutil.STATUS_ZOMBIE and mark in " ".join(child.cmdline())
            except psutil.Error:
                continue
        return count

    settings = SMALL.model_copy(update={"at_once": 3})
    tasks = [asyncio.create_task(extract_file(tmp_path / "a.pdf", "a.pdf", settings=settings)) for _ in range(8)]
    await until(lambda: running() == 3)
    await asyncio.sleep(0.3)
    assert running() == 3
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await until(lambda: running() == 0)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "nonsense",
        '{"family": "word"}',
        "[" * 100_000,
        "[" * 10_000,
        '{"code": "mine", "message": "x"}',
        '{"code": "vanished", "message": "x"}',
        '{"media_type": "text/plain"}',
        '{"media_type": "text/html", "title": null, "author": null, "metadata": {}}\nx',
        '{"media_type": "text/plain", "title": null, "author": null, "metadata": {"pages": {}}}\nx',
        '{"media_type": "text/plain", "title": null, "author": null, "metadata": {"pages": NaN}}\nx',
        '{"media_type": "text/plain", "title": null, "author": null, "metadata": {}}\n\udcff',
        '{"media_type": "text/plain", "title": null, "author": null, "metadata": {}}\n' + "x" * (4 * MEGABYTE + 1),
    ],
)
async def test_malformed_output_of_an_extraction_process_counts_as_a_crash(
    extract: Extract, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str
) -> None:
    _make_reader_print(monkeypatch, tmp_path, answer)
    assert (await extract.refused("a.pdf", typeset([Sheet()]))).code == "crashed"


async def test_output_of_a_compromised_extraction_process_can_only_set_text_and_plain_metadata(
    extract: Extract, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would have given the document another ``path`` and ``size``, or metadata that cannot be published."""
    said = {"path": "/etc/passwd", "size": 10**400, "pages": 3, "sent_at": "2026-11-23T20:00:00+00:00", "x": []}
    head = {"media_type": "text/plain", "title": "a\nb\u202e", "author": None, "metadata": said, "acl_tags": ["all"]}
    _make_reader_print(monkeypatch, tmp_path, json.dumps(head) + "\nwords\x00")
    extracted = await extract("a.pdf", typeset([Sheet()]))
    assert extracted == Extracted(
        "words", "text/plain", "a b", None, {"pages": 3, "sent_at": "2026-11-23T20:00:00+00:00"}
    )


def _make_reader_print(monkeypatch: pytest.MonkeyPatch, folder: Path, answer: str) -> None:
    (folder / "answer").write_bytes(answer.encode("utf-8", "surrogateescape"))
    program = f"import sys; sys.stdout.buffer.write(open({str(folder / 'answer')!r}, 'rb').read())"
    monkeypatch.setattr(sandbox, "PROGRAM", (sys.executable, "-c", program))
