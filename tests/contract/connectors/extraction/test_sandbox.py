"""Native code that has taken over a reader can do nothing with the rights of an ordinary user."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from pptx import Presentation

from connectors.extraction import sandbox
from connectors.extraction.limits import Limits
from pipeline.runtime import confinement
from tests.support.connectors.extraction_kit import SMALL, Extract, saved
from tests.support.connectors.hostile_office import plain_docx
from tests.support.connectors.pdf_files import Line, Sheet, typeset

ATTACKER = """
import ctypes, json, mmap, os, signal, socket, struct, sys

mode, folder, tcp, udp = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
kind = sys.argv[5] if len(sys.argv) > 5 else "mail"
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = libc.mmap.restype = ctypes.c_long
from pipeline.runtime import confinement; from connectors.extraction import process
from connectors.extraction.limits import Limits
read, readable = process.prepare(kind)

signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
libc.prctl(4, 1, 0, 0, 0)  # changing the user has made it private
confinement.refuse([confinement.Call("unshare")])  # as containers do it
kept = ctypes.create_string_buffer(b"in the memory of the parent")
parent, number = os.getpid(), confinement._NUMBERS
machine = confinement._MACHINES.index(os.uname().machine)
if child := os.fork():
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))

if mode != "free":
    confinement.limit(Limits())
    confinement.confine(readable)
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
                [sys.executable, "-c", ATTACKER, mode, name, *ports, kind],
                check=False,
                capture_output=True,
                input=document,
            )
            assert done.returncode == 0, done.stderr.decode()
            output = json.loads(done.stdout)
            assert isinstance(output, dict)
            return output

        yield attack


def test_a_compromised_reader_reaches_no_file_network_or_process(attack: Attack) -> None:
    free = attack("free")
    assert {name for name, ended in free.items() if ended != "done"} == set(), "or the test proves nothing"
    confined = attack("confined")
    assert {name for name, ended in confined.items() if ended == "done"} == set()
    assert set(confined.values()) == {"Operation not permitted"}


def test_a_compromised_pdf_reader_opens_no_files_but_its_own(attack: Attack) -> None:
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
    [
        ("pdf", pdf(), "| Oslo | 120 |"),
        ("office", plain_docx(), None),
        ("word", plain_docx(), "Harmless words."),
        ("sheets", xlsx(), "| Oslo | 120 |"),
        ("slides", pptx(), "Travel policy"),
        ("mail", mail(), "**Москва**"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_format_is_read_by_an_ordinary_user_whose_container_refuses_namespaces(
    attack: Attack, kind: str, document: bytes, expected: str | None
) -> None:
    outcome = attack("read", kind, document)
    if expected is None:
        assert outcome == {"family": "word"}
    else:
        assert expected in outcome.get("text", ""), outcome


async def test_a_reader_that_cannot_be_confined_reads_only_if_a_setting_allows_it(
    extract: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = confinement.Confinement(landlock=0, seccomp=True)
    monkeypatch.setattr(sandbox, "available", lambda: nothing)
    error = await extract.refused("a.pdf", pdf())
    assert error.code == "unconfined"
    assert "no Landlock" in str(error)
    assert "Oslo" in (await extract("a.pdf", pdf(), SMALL.model_copy(update={"unconfined": "allow"}))).text


@pytest.mark.parametrize("call", ["landlock_create_ruleset", "seccomp"])
async def test_a_file_is_not_read_if_the_kernel_refuses_the_confinement_calls(
    extract: Extract, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As in a container whose own filter knows no such call."""
    number = {"landlock_create_ruleset": 444, "seccomp": 317 if os.uname().machine == "x86_64" else 277}[call]
    program = (
        "from pipeline.runtime import confinement; from connectors.extraction import process;"
        f" confinement._NUMBERS['refused'] = ({number}, {number});"
        " confinement.refuse([confinement.Call('refused')]); process.main()"
    )
    monkeypatch.setattr(sandbox, "PROGRAM", (sys.executable, "-c", program))
    assert (await extract.refused("a.pdf", pdf())).code == "unconfined"
    assert "Oslo" in (await extract("a.pdf", pdf(), SMALL.model_copy(update={"unconfined": "allow"}))).text


STUBBORN_READER = """
import signal, sys, time
from connectors.extraction import process

def read(file, limits):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    sys.stdout.write("taken over")
    sys.stdout.flush()
    while True:
        time.sleep(1)

process.prepare = lambda kind: (read, [])
process.main()
"""


def test_a_compromised_reader_that_ignores_its_alarm_ends_with_its_worker() -> None:
    """It stayed for ever: it needs no processor time while it sleeps, and nobody was left to end it."""
    limits = json.dumps(asdict(Limits()))
    worker = (
        "import subprocess, sys, time;"
        " reader = subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True);"
        " print(reader.pid, flush=True, file=sys.stderr); time.sleep(600)"
    )
    command = [sys.executable, "-c", worker, "-c", STUBBORN_READER, "mail", limits, "required"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        reader = int(process.stderr.readline())
        try:
            assert process.stdout.read(10) == b"taken over"
            process.kill()
            ended, _, _ = select.select([process.stdout], [], [], 30)
            assert ended, "it is still running"
            assert process.stdout.read() == b""
        finally:
            process.kill()
            with suppress(ProcessLookupError):
                os.kill(reader, signal.SIGKILL)


def test_processes_started_by_ocr_cannot_create_namespaces() -> None:
    program = """
import ctypes, os, subprocess, threading
from pipeline.runtime import confinement
confinement.refuse(confinement.FOREIGN)
libc, machine = ctypes.CDLL(None, use_errno=True), confinement._MACHINES.index(os.uname().machine)
for name, first in (("clone", 0x10000000 | 17), ("clone3", 0)):
    made = libc.syscall(confinement._NUMBERS[name][machine], ctypes.c_ulong(first), 0, 0, 0, 0)
    if made == 0:
        os._exit(0)
    print(name, "done" if made > 0 else os.strerror(ctypes.get_errno()))
one = threading.Thread(target=lambda: subprocess.run(["true"], check=True))
one.start(), one.join()
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    output = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert output == {"clone": "Operation not permitted", "clone3": "Function not implemented"}, done.stderr
    assert done.stderr == "", "threads and programs start all the same"


OCR_ATTACKER = """
import ctypes, fcntl, json, os, resource, signal, socket, stat, sys, tempfile
from pathlib import Path

mode, folder, parent = sys.argv[1], sys.argv[2], os.getpid()
from pipeline.runtime import confinement
libc, machine = ctypes.CDLL(None, use_errno=True), confinement._MACHINES.index(os.uname().machine)
libc.syscall.restype = ctypes.c_long
if sys.argv[3] == "user" and os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
def state():
    return [resource.getrlimit(resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)]
before = state()
if child := os.fork():
    _, status = os.waitpid(child, 0)
    sys.stdout.write("," + json.dumps(state() == before) + "]")
    sys.exit(os.waitstatus_to_exitcode(status))
if mode == "confined":
    confinement.confine_program(Path("/bin/true"), Path(folder))

def call(name, *arguments):
    return libc.syscall(confinement._NUMBERS[name][machine], *arguments)

def device():
    os.mknod(folder + "/device", stat.S_IFCHR | 0o600, os.makedev(1, 8))
    with open(folder + "/device", "rb") as opened:
        opened.read(1)

def segment():
    made = call("shmget", 0, 4096, 0o600)
    if made >= 0:
        call("shmctl", made, 0, None)
    return made

def attributes():
    # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS: chattr, which needs no right to write
    os.mkdir(folder + "/own")
    flags, opened = bytearray(8), os.open(folder + "/own", os.O_RDONLY)
    fcntl.ioctl(opened, 0x80086601, flags)
    flags[0] |= 0x40  # FS_NODUMP_FL
    fcntl.ioctl(opened, 0x40086602, flags)

def foundling():
    # CLONE_PARENT: a child of the parent, which does not know of it
    made = call("clone", ctypes.c_ulong(0x8000 | signal.SIGCHLD), 0, 0, 0, 0)
    if made == 0:
        os._exit(0)
    return made

def datagram():
    # what a log daemon or a service manager takes from anybody who may write its socket
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    socket.send_fds(ends[0], [b"a line"], [0], 0, sys.argv[4])

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
tries = {
    "change the attributes of a folder": attributes,
    "leave its parent a dead process": foundling,
    "open a device by a node of its own": device,
    "take its parent's open files": lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE, (soft - 1, hard)),
    "take its parent's turn": lambda: os.sched_setscheduler(parent, os.SCHED_IDLE, os.sched_param(0)),
    "bind its parent to a processor": lambda: os.sched_setaffinity(parent, os.sched_getaffinity(parent)),
    "leave shared memory": segment,
    "send a message to a program outside": datagram,
    "watch a folder that it may not read": lambda: call("inotify_add_watch", libc.inotify_init(), b"/tmp", 0x100),
}
ended = {}
for name, one in tries.items():
    ctypes.set_errno(0)
    try:
        done = one()
    except OSError as error:
        done = -1
    ended[name] = "refused" if isinstance(done, int) and done < 0 else "done"
if mode == "confined":
    libc.setpriority(0, parent, 7)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
sys.stdout.write("[" + json.dumps(ended))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("who", ["user", "root"])
def test_compromised_ocr_makes_no_device_and_changes_nothing_of_its_parent(who: str) -> None:
    """In a container that runs as root, a node of a disk opens that disk; and a limit ends whom no signal reaches."""
    if who == "root" and os.geteuid() != 0:
        pytest.skip("only root can try what root may")

    def attacked(mode: str) -> tuple[dict[str, str], bool]:
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory() as outside,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log,
        ):
            for path in (folder, outside):
                Path(path).chmod(0o777)
            log.bind(f"{outside}/log")
            Path(f"{outside}/log").chmod(0o777)
            program = [sys.executable, "-c", OCR_ATTACKER, mode, folder, who, f"{outside}/log"]
            output = json.loads(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
        return output[0], output[1]

    free, unchanged = attacked("free")
    possible = {name for name, ended in free.items() if ended == "done"}
    assert {"open a device by a node of its own"} >= set(free) - possible, "or the test proves nothing"
    assert not unchanged
    confined, unchanged = attacked("confined")
    assert {name for name, ended in confined.items() if ended == "done"} == set()
    assert unchanged


HEADERS = {
    "x86_64": """
read 0, write 1, close 3, fstat 5, lseek 8, mmap 9, mprotect 10, munmap 11, brk 12, rt_sigaction 13, rt_sigprocmask 14,
rt_sigreturn 15, ioctl 16, readv 19, writev 20, sched_yield 24, mremap 25, madvise 28, shmget 29, shmat 30, shmctl 31,
nanosleep 35, getpid 39, socket 41, connect 42, accept 43, bind 49, listen 50, socketpair 53, clone 56, exit 60, semget
64, semop 65, semctl 66, msgget 68, msgsnd 69, msgrcv 70, msgctl 71, fcntl 72, readlink 89, chmod 90, fchmod 91, chown
92, fchown 93, lchown 94, gettimeofday 96, getrusage 98, ptrace 101, syslog 103, setpgid 109, setsid 112, sigaltstack
131, utime 132, personality 135, setpriority 141, sched_setparam 142, sched_setscheduler 144, vhangup 153, pivot_root
155, chroot 161, acct 163, settimeofday 164, mount 165, umount2 166, swapon 167, swapoff 168, reboot 169, sethostname
170, setdomainname 171, init_module 175, delete_module 176, quotactl 179, gettid 186, setxattr 188, lsetxattr 189,
fsetxattr 190, removexattr 197, lremovexattr 198, fremovexattr 199, futex 202, sched_setaffinity 203, sched_getaffinity
204, lookup_dcookie 212, getdents64 217, semtimedop 220, clock_gettime 228, clock_getres 229, clock_nanosleep 230,
exit_group 231, utimes 235, mq_open 240, mq_unlink 241, kexec_load 246, add_key 248, request_key 249, keyctl 250,
ioprio_set 251, inotify_add_watch 254, migrate_pages 256, openat 257, fchownat 260, futimesat 261, newfstatat 262,
readlinkat 267, fchmodat 268, unshare 272, move_pages 279, utimensat 280, accept4 288, perf_event_open 298,
fanotify_init 300, prlimit64 302, name_to_handle_at 303, open_by_handle_at 304, setns 308, process_vm_readv 310,
process_vm_writev 311, kcmp 312, finit_module 313, sched_setattr 314, getrandom 318, kexec_file_load 320, bpf 321,
userfaultfd 323, pidfd_send_signal 424, io_uring_setup 425, io_uring_enter 426, io_uring_register 427, open_tree 428,
move_mount 429, fsopen 430, fsconfig 431, fsmount 432, fspick 433, pidfd_open 434, clone3 435, pidfd_getfd 438,
process_madvise 440, mount_setattr 442, process_mrelease 448, fchmodat2 452, setxattrat 463, removexattrat 466,
file_setattr 469
""",
    "aarch64": """
setxattr 5, lsetxattr 6, fsetxattr 7, removexattr 14, lremovexattr 15, fremovexattr 16, lookup_dcookie 18, fcntl 25,
inotify_add_watch 27, ioctl 29, ioprio_set 30, umount2 39, mount 40, pivot_root 41, chroot 51, fchmod 52, fchmodat 53,
fchownat 54, fchown 55, openat 56, close 57, vhangup 58, quotactl 60, getdents64 61, lseek 62, read 63, write 64, readv
65, writev 66, readlinkat 78, newfstatat 79, fstat 80, utimensat 88, acct 89, personality 92, exit 93, exit_group 94,
unshare 97, futex 98, nanosleep 101, kexec_load 104, init_module 105, delete_module 106, clock_gettime 113, clock_getres
114, clock_nanosleep 115, syslog 116, ptrace 117, sched_setparam 118, sched_setscheduler 119, sched_setaffinity 122,
sched_getaffinity 123, sched_yield 124, sigaltstack 132, rt_sigaction 134, rt_sigprocmask 135, rt_sigreturn 139,
setpriority 140, reboot 142, setpgid 154, setsid 157, sethostname 161, setdomainname 162, getrusage 165, gettimeofday
169, settimeofday 170, getpid 172, gettid 178, mq_open 180, mq_unlink 181, msgget 186, msgctl 187, msgrcv 188, msgsnd
189, semget 190, semctl 191, semtimedop 192, semop 193, shmget 194, shmctl 195, shmat 196, socket 198, socketpair 199,
bind 200, listen 201, accept 202, connect 203, brk 214, munmap 215, mremap 216, add_key 217, request_key 218, keyctl
219, clone 220, mmap 222, swapon 224, swapoff 225, mprotect 226, madvise 233, migrate_pages 238, move_pages 239,
perf_event_open 241, accept4 242, prlimit64 261, fanotify_init 262, name_to_handle_at 264, open_by_handle_at 265, setns
268, process_vm_readv 270, process_vm_writev 271, kcmp 272, finit_module 273, sched_setattr 274, getrandom 278, bpf 280,
userfaultfd 282, kexec_file_load 294, pidfd_send_signal 424, io_uring_setup 425, io_uring_enter 426, io_uring_register
427, open_tree 428, move_mount 429, fsopen 430, fsconfig 431, fsmount 432, fspick 433, pidfd_open 434, clone3 435,
pidfd_getfd 438, process_madvise 440, mount_setattr 442, process_mrelease 448, fchmodat2 452, setxattrat 463,
removexattrat 466, file_setattr 469
""",
}
"""The numbers of the kernel's own headers: ``asm/unistd_64.h`` and ``asm-generic/unistd.h`` of Linux 6.1, and for the
four later calls, which have one number everywhere, those of 6.17. Numbers are never changed."""


def headers(machine: str) -> dict[str, int]:
    pairs = (entry.split() for entry in HEADERS[machine].replace("\n", " ").split(","))
    return {name: int(number) for name, number in pairs}


@pytest.mark.parametrize("machine", confinement._MACHINES)
def test_system_call_numbers_match_the_kernel_headers(machine: str) -> None:
    n = confinement._MACHINES.index(machine)
    ours = {name: pair[n] for name, pair in confinement._NUMBERS.items() if pair[n] is not None}
    assert ours == headers(machine)


@pytest.mark.parametrize(
    ("machine", "file"), [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")]
)
def test_the_copied_kernel_headers_match_the_installed_ones(machine: str, file: str) -> None:
    header = Path("/usr/include") / file
    text = header.read_text() if header.is_file() else ""
    matches = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)
    theirs = {"newfstatat" if name == "fstatat" else name: int(number) for name, number in matches}
    differing = {name: theirs[name] for name, number in headers(machine).items() if theirs.get(name, number) != number}
    assert differing == {}
