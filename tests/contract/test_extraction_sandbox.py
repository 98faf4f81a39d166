"""What native code can do that has taken over a reader, with the rights of an ordinary user: nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from pptx import Presentation

from connectors.extraction import confine, sandbox, seccomp
from tests.extraction_kit import SMALL, Extract, saved
from tests.hostile_office import plain_docx
from tests.pdf_files import Line, Sheet, typeset

ATTACKER = """
import ctypes, json, mmap, os, signal, socket, struct, sys

mode, folder, tcp, udp = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
kind = sys.argv[5] if len(sys.argv) > 5 else "mail"
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = libc.mmap.restype = ctypes.c_long
from connectors.extraction import confine, process, seccomp
from connectors.extraction.limits import Limits
read, readable = process.prepared(kind)

signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
libc.prctl(4, 1, 0, 0, 0)  # changing the user has made it private
seccomp.refuse([seccomp.Call("unshare")])  # as containers do it
kept = ctypes.create_string_buffer(b"in the memory of the parent")
parent, number = os.getpid(), seccomp._NUMBERS
machine = seccomp._MACHINES.index(os.uname().machine)
if child := os.fork():
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))

if mode != "free":
    confine.limit(Limits())
    confine.confine(readable)
if mode == "read":
    sys.stdout.write(json.dumps(process.answer(read, sys.stdin.buffer, Limits())))
    sys.stdout.flush()
    os._exit(0)

def call(name, *arguments):
    return libc.syscall(number[name][machine], *arguments)

def connect(family, kind, address):
    one = libc.socket(family, kind, 0)
    return -1 if one < 0 else libc.connect(one, address, len(address))

def address(port):
    return struct.pack("=HH4B8x", socket.AF_INET, socket.htons(port), 127, 0, 0, 1)

def unix(path):
    return struct.pack("=H", socket.AF_UNIX) + path.encode() + b"\\0"

def read_parent():
    here = ctypes.create_string_buffer(len(kept))
    of = lambda there: struct.pack("=QQ", there, len(kept))
    return call("process_vm_readv", parent, of(ctypes.addressof(here)), 1, of(ctypes.addressof(kept)), 1, 0)

def forked():
    one = libc.fork()
    if one == 0:
        os._exit(0)
    return one

def threaded():
    routine = ctypes.cast(libc.getpid, ctypes.c_void_p)
    return -libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, routine, None)

def traced():
    done = libc.ptrace(16, parent, None, None)  # PTRACE_ATTACH
    if done == 0:
        os.waitpid(parent, 0x40000000)
        libc.ptrace(17, parent, None, None)
    return done

def executed():
    if mode == "free":
        one = os.fork()
        if one:
            return os.waitstatus_to_exitcode(os.waitpid(one, 0)[1])
    return libc.execve(b"/bin/true", (ctypes.c_char_p * 2)(b"true", None), None)

def opened(path, flags=os.O_RDONLY):
    return libc.open(path.encode(), flags, 0o600)

tries = {
    "connect by TCP": lambda: connect(socket.AF_INET, socket.SOCK_STREAM, address(tcp)),
    "connect by UDP": lambda: connect(socket.AF_INET, socket.SOCK_DGRAM, address(udp)),
    "connect by a Unix socket": lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, unix(folder + "/socket")),
    "read another file": lambda: opened("/etc/passwd"),
    "read a file of its user": lambda: opened(folder + "/secret"),
    "read the code that runs": lambda: opened(process.__file__),
    "write a file": lambda: opened(folder + "/planted", os.O_CREAT | os.O_WRONLY),
    "write where all may": lambda: opened("/tmp", os.O_TMPFILE | os.O_RDWR),
    "make a folder": lambda: libc.mkdir((folder + "/made").encode(), 0o700),
    "remove a file": lambda: libc.unlink((folder + "/removed").encode()),
    "change a file's rights": lambda: libc.chmod((folder + "/mine").encode(), 0o777),
    "look whether a file is there": lambda: libc.access(b"/etc/passwd", os.F_OK),
    "fork": forked,
    "start a program": executed,
    "start a thread": threaded,
    "trace its parent": traced,
    "read its parent's memory": read_parent,
    "open its parent's memory": lambda: opened(f"/proc/{parent}/mem", os.O_RDWR),
    "read its parent's environment": lambda: opened(f"/proc/{parent}/environ"),
    "signal its parent": lambda: libc.kill(parent, signal.SIGUSR1),
    "make memory executable": lambda: libc.mmap(None, 4096, 7, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0),
    "make a file in memory": lambda: libc.memfd_create(b"a", 0),
    "be private no more": lambda: libc.prctl(4, 1, 0, 0, 0),
    "stop the clock": lambda: libc.setitimer(0, bytes(32), None),
}
ended = {}
for name, one in tries.items():
    ctypes.set_errno(0)
    ended[name] = "done" if one() >= 0 else os.strerror(ctypes.get_errno())
sys.stdout.write(json.dumps(ended))
sys.stdout.flush()
os._exit(0)
"""


Attack = Callable[..., dict[str, Any]]


@pytest.fixture
def extract(tmp_path: Path) -> Extract:
    return Extract(tmp_path)


@pytest.fixture
def attack() -> Iterator[Attack]:
    """Runs ATTACKER as an ordinary user, whose parent has something to lose."""
    with (
        tempfile.TemporaryDirectory() as name,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        folder = Path(name)
        folder.chmod(0o777)
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(folder / "socket"))
        unix.listen()
        (folder / "socket").chmod(0o777)
        (folder / "secret").write_text("a token")

        def attack(mode: str, kind: str = "mail", document: bytes = b"") -> dict[str, Any]:
            for mine in ("mine", "removed"):
                (folder / mine).touch()
                if os.geteuid() == 0:
                    os.chown(folder / mine, 65534, 65534)
            ports = [str(tcp.getsockname()[1]), str(udp.getsockname()[1])]
            done = subprocess.run(
                [sys.executable, "-c", ATTACKER, mode, name, *ports, kind], check=False, capture_output=True,
                input=document,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr.decode()
            told = json.loads(done.stdout)
            assert isinstance(told, dict)
            return told

        yield attack


def test_code_that_has_taken_over_a_reader_reaches_nothing_and_nobody(attack: Attack) -> None:
    free = attack("free")
    assert {name for name, ended in free.items() if ended != "done"} == set(), "or the test proves nothing"
    confined = attack("confined")
    assert {name for name, ended in confined.items() if ended == "done"} == set()
    assert set(confined.values()) == {"Operation not permitted"}


def test_where_a_reader_needs_files_of_its_own_it_opens_no_others(attack: Attack) -> None:
    """A PDF's reader looks up the character maps of Chinese, Japanese and Korean fonts."""
    confined = attack("confined", "pdf")
    assert {name for name, ended in confined.items() if ended == "done"} == set()
    assert confined["read another file"] == "Permission denied"


def pdf() -> bytes:
    sheet = Sheet([Line(72, 700, "Travel policy")])
    sheet.grid(72, 600, [100, 100], [["City", "Rate"], ["Oslo", "120"]])
    return typeset([sheet], title="Café")


def xlsx() -> bytes:
    book = openpyxl.Workbook()
    book["Sheet"].append(["City", "Rate"])
    book["Sheet"].append(["Oslo", 120])
    return saved(book)


def pptx() -> bytes:
    deck = Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[0])
    slide.shapes.title.text = "Travel policy"
    return saved(deck)


def mail() -> bytes:
    message = EmailMessage()
    message["Subject"] = "Übersicht"
    message["From"] = "ada@example.org"
    message.set_content("<p>Seen in <b>Москва</b></p>", subtype="html", charset="koi8-r")
    return bytes(message)


@pytest.mark.parametrize(
    ("kind", "document", "expected"),
    [("pdf", pdf(), "| Oslo | 120 |"), ("office", plain_docx(), None), ("word", plain_docx(), "Harmless words."),
     ("sheets", xlsx(), "| Oslo | 120 |"), ("slides", pptx(), "Travel policy"), ("mail", mail(), "**Москва**")],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_every_format_is_read_by_an_ordinary_user_whose_container_refuses_namespaces(
    attack: Attack, kind: str, document: bytes, expected: str | None
) -> None:
    told = attack("read", kind, document)
    if expected is None:
        assert told == {"family": "word"}
    else:
        assert expected in told.get("text", ""), told


async def test_a_reader_that_cannot_be_confined_reads_nothing_unless_a_setting_allows_it(
    extract: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = confine.Confinement(landlock=0, seccomp=True)
    monkeypatch.setattr(sandbox, "available", lambda: nothing)
    error = await extract.refused("a.pdf", pdf())
    assert error.code == "unconfined"
    assert "no Landlock" in str(error)
    assert "Oslo" in (await extract("a.pdf", pdf(), SMALL.model_copy(update={"unconfined": "allow"}))).text


@pytest.mark.parametrize("call", ["landlock_create_ruleset", "seccomp"])
async def test_a_kernel_that_refuses_when_asked_to_confine_leaves_the_file_unread(
    extract: Extract, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As in a container whose own filter knows no such call."""
    number = {"landlock_create_ruleset": 444, "seccomp": 317 if os.uname().machine == "x86_64" else 277}[call]
    program = (
        f"from connectors.extraction import process, seccomp; seccomp._NUMBERS['refused'] = ({number}, {number});"
        " seccomp.refuse([seccomp.Call('refused')]); process.main()"
    )
    monkeypatch.setattr(sandbox, "PROGRAM", (sys.executable, "-c", program))
    assert (await extract.refused("a.pdf", pdf())).code == "unconfined"
    assert "Oslo" in (await extract("a.pdf", pdf(), SMALL.model_copy(update={"unconfined": "allow"}))).text


def test_what_ocr_starts_gets_no_namespace_of_its_own() -> None:
    program = """
import ctypes, os, subprocess, threading
from connectors.extraction import seccomp
seccomp.refuse(seccomp.FOREIGN)
libc, machine = ctypes.CDLL(None, use_errno=True), seccomp._MACHINES.index(os.uname().machine)
for name, first in (("clone", 0x10000000 | 17), ("clone3", 0)):
    made = libc.syscall(seccomp._NUMBERS[name][machine], ctypes.c_ulong(first), 0, 0, 0, 0)
    if made == 0:
        os._exit(0)
    print(name, "done" if made > 0 else os.strerror(ctypes.get_errno()))
one = threading.Thread(target=lambda: subprocess.run(["true"], check=True))
one.start(), one.join()
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert told == {"clone": "Operation not permitted", "clone3": "Function not implemented"}, done.stderr
    assert done.stderr == "", "threads and programs start all the same"


def test_system_calls_have_the_numbers_of_the_kernels_headers() -> None:
    headers = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")
    if not all(header.is_file() for header in headers):
        pytest.skip("the kernel's headers are not installed")
    ours = [{name: pair[n] for name, pair in seccomp._NUMBERS.items() if pair[n] is not None} for n in (0, 1)]
    for header, numbers in zip(headers, ours, strict=True):
        theirs = {
            {"fstatat": "newfstatat"}.get(name, name): int(number)
            for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
        }
        newer = {name: number for name, number in numbers.items() if number > max(theirs.values())}  # than the headers
        assert numbers == {name: newer.get(name, theirs.get(name)) for name in numbers}
