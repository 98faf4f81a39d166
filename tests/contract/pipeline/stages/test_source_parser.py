"""Source code is parsed in a process that a text may crash or take over without harm to anything else."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from pipeline.core.chunking import chunk, code
from pipeline.core.model import ChunkParams
from pipeline.stages.source_parser import SourceParser, _blocks

TEXT = "import os\n\n\ndef first():\n    return 1\n\n\ndef second():\n    return 2\n"
BLANK_LINES = code.cut_at_blank_lines(TEXT)

PROLOGUE = """
import ctypes, os, re, sys
from dataclasses import replace
from pipeline.core.chunking import code
from pipeline.core.chunking.units import Block
from pipeline.stages import source_parser_process as process
real = code.parse
sys.argv[1:] = sys.argv[-1:]
"""


def taken_over(by: str) -> SourceParser:
    """A parser whose process runs this code first."""
    return SourceParser((sys.executable, "-c", f"{PROLOGUE}\n{by}\nprocess.main()"))


@pytest.fixture
def parser() -> Iterator[SourceParser]:
    parser = SourceParser()
    yield parser
    parser.close()


def results(parser: SourceParser, *texts: str) -> list[str]:
    """The headings of the only block of each text."""
    try:
        return [" ".join(parser.parse(text, "text/x-python", 200)[0].headings) for text in texts]
    finally:
        parser.close()


def test_the_process_finds_the_same_blocks_as_the_parser_itself(parser: SourceParser) -> None:
    sample = Path(code.__file__).read_text()
    for media_type in code.GRAMMARS:
        assert parser.parse(sample, media_type, 40) == code.parse(sample, media_type, 40), media_type
    assert len(parser.parse(sample, "text/x-python", 40)) > 50


def test_an_empty_text_has_no_blocks_and_is_no_failure(parser: SourceParser) -> None:
    with capture_logs() as logs:
        assert parser.parse("", "text/x-python", 40) == code.parse("", "text/x-python", 40) == []
    assert logs == []


def test_a_text_that_crashes_the_parser_is_cut_at_its_blank_lines_and_the_next_is_parsed() -> None:
    parser = taken_over(
        "code.parse = lambda text, *rest: ctypes.string_at(0) if 'crash' in text else real(text, *rest)"
    )
    text = TEXT + "# crash\n"
    try:
        with capture_logs() as logs:
            assert parser.parse(text, "text/x-python", 200) == code.cut_at_blank_lines(text)
        assert parser.parse(TEXT, "text/x-python", 200) == code.parse(TEXT, "text/x-python", 200)
        params = ChunkParams(target=40, min_tokens=16, max_tokens=60)
        chunks = chunk(
            text, "text/x-python", params=params, count_tokens=lambda t: [9] * len(t), parse_code=parser.parse
        )
    finally:
        parser.close()
    assert "".join(c.text for c in chunks).replace("\n", "") == text.replace("\n", "")
    assert [log["event"] for log in logs] == ["source_code_unparsed"]
    assert "SIGSEGV" in logs[0]["reason"]


def test_a_crash_that_does_not_happen_again_changes_no_chunks() -> None:
    parser = taken_over(
        "attempts, fork = [], os.fork\n"
        "os.fork = lambda: (attempts.append(1), fork())[1]\n"
        "code.parse = lambda *a: ctypes.string_at(0) if len(attempts) == 1 else real(*a)"
    )
    try:
        assert parser.parse(TEXT, "text/x-python", 200) == code.parse(TEXT, "text/x-python", 200) != BLANK_LINES
    finally:
        parser.close()


def test_a_text_that_never_ends_is_cut_at_its_blank_lines() -> None:
    parser = taken_over(
        "process.LIMITS = replace(process.LIMITS, cpu_seconds=1)\n"
        "def parse(*_):\n    while True: pass\n"
        "code.parse = parse"
    )
    with capture_logs() as logs:
        assert parser.parse(TEXT, "text/x-python", 200) == BLANK_LINES
    parser.close()
    assert len(logs) == 1
    assert "time or memory" in logs[0]["reason"]


def test_a_text_that_takes_the_parser_over_and_ignores_its_alarm_is_ended_by_the_process() -> None:
    """The worker alone ended it; after the death of the worker, it and the process stayed for ever."""
    stubborn = """
import signal, time

def parse(*_):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        time.sleep(1)

code.parse = parse
process.LIMITS, process.GRACE_SECONDS = replace(process.LIMITS, wall_seconds=1), 1
"""
    parser = taken_over(stubborn)
    with capture_logs() as logs:
        assert parser.parse(TEXT, "text/x-python", 200) == BLANK_LINES
    parser.close()
    assert [line["reason"] for line in logs] == ["it needs too much time or memory (SIGKILL)"]


@pytest.mark.parametrize(
    "blocks",
    [
        "[]",
        "[Block(1, 9, False)]",
        "[Block(0, 9, False), Block(7, 9, False), Block(6, 9, False)]",
        "[Block(0, 9, False), Block(10**6, 9, False)]",
        "[Block(0, 99, False)]",
        "[Block(0, 9, False, ('x' * 1000,))]",
        "[Block(0, 9, False, (), ((5, 3),))]",
        "[Block(0, 9, False, (), ((0, 10**6),))]",
        "[Block(0, 9, False, (), (('a', 3),))]",
        "[Block('0', 9, False)]",
    ],
)
def test_a_result_that_no_parser_would_have_is_not_believed(blocks: str) -> None:
    parser = taken_over(f"code.parse = lambda *_: {blocks}")
    with capture_logs() as logs:
        assert parser.parse(TEXT, "text/x-python", 200) == BLANK_LINES
    parser.close()
    assert logs[0]["reason"] == "its result is invalid"


@pytest.mark.parametrize("part", ["[0,0,true,0],", "[[],[]],", "[],", "0,", "["])
def test_a_result_of_very_many_parts_takes_no_memory_of_the_worker(part: str) -> None:
    """Millions of errors in 32 MiB took 15 GB, and so ended detect for all tenants whenever it read the document."""
    data = f'{{"contexts": [[[], []]], "blocks": [{part * (20 * 1024**2 // len(part))}'.encode()
    with TemporaryFile() as file:
        file.write(data)
        with pytest.raises(ValueError, match="parts"):
            _blocks(file, "x" * 1024**2)


def test_reading_a_result_ends_at_its_first_error() -> None:
    data = f'{{"contexts": [{"[]," * 10_000}[]], "blocks": [{"[]," * 10_000}[]]}}'.encode()
    with TemporaryFile() as file:
        file.write(data)
        with pytest.raises(ValidationError) as caught:
            _blocks(file, "x" * 10_000)
    assert caught.value.error_count() < 10


def test_a_text_of_nothing_but_short_statements_is_parsed(parser: SourceParser) -> None:
    assert len(parser.parse("a\n" * 20_000, "text/x-python", 200)) == 20_000


def test_a_text_that_takes_the_parser_over_reaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native calls, which no check of Python's sees."""
    monkeypatch.setenv("PENSTOCK_SECRET", "s3cr3t")
    secret = tmp_path / "secret"
    secret.write_text("s3cr3t")
    attempts = f"""
libc = ctypes.CDLL(None, use_errno=True)
libc.fork, libc.kill, libc.open, libc.socket
def parse(text, *_):
    attempts = {{
        "file": lambda: libc.open({str(secret).encode()!r}, 0),
        "write": lambda: libc.open({str(tmp_path / "new").encode()!r}, 0o101, 0o600),
        "environment": lambda: libc.open(b"/proc/{os.getpid()}/environ", 0),
        "memory": lambda: libc.open(b"/proc/%d/mem" % os.getppid(), 0),
        "network": lambda: libc.socket(2, 1, 0),
        "process": lambda: libc.fork(),
        "signal": lambda: libc.kill({os.getpid()}, 0),
    }}
    succeeded = [name for name, attempt in attempts.items() if attempt() >= 0]
    return [Block(0, 9, False, ("succeeded:", *succeeded, *(v for v in os.environ.values() if "s3cr3t" in v)))]
code.parse = parse
"""
    assert results(taken_over(attempts), TEXT) == ["succeeded:"]
    assert not (tmp_path / "new").exists()


def test_the_process_keeps_nothing_of_one_text_for_the_next() -> None:
    """They may be those of two tenants. The process that all are forked from searches its own memory."""
    searching = """
fork = os.fork
def search():
    global seen
    seen = False
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            area, rights = line.split()[:2]
            if rights.startswith("rw") and "[v" not in line:
                start, end = (int(part, 16) for part in area.split("-"))
                memory.seek(start)
                seen = seen or re.search(rb"s3cr[3]t_name", memory.read(end - start)) is not None
    return fork()
os.fork = search
code.parse = lambda *_: [Block(0, 9, False, ("seen" if seen else "unseen",))]
"""
    text = "def s3cr3t_name():\n    pass\n"
    assert results(taken_over(searching), text, text, TEXT) == ["unseen"] * 3


def test_the_process_is_started_again_after_its_end(parser: SourceParser) -> None:
    expected = parser.parse(TEXT, "text/x-python", 200)
    assert parser._process is not None
    os.kill(parser._process.pid, signal.SIGKILL)
    assert parser.parse(TEXT, "text/x-python", 200) == expected


def test_the_process_ends_when_nobody_can_send_it_requests(parser: SourceParser) -> None:
    """So it does not outlive a worker that was killed."""
    parser.parse(TEXT, "text/x-python", 200)
    assert parser._process is not None
    assert parser._connection is not None
    parser._connection.close()
    assert parser._process.wait(timeout=60) == 0
