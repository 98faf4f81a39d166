"""Takes from the reading process all rights that it does not need: Landlock, seccomp and resource limits.

Landlock (landlock(7); Linux 5.13 and later): a process gives up access to files, TCP ports and other processes. A
restriction holds for the thread that makes it, for what that thread starts, and for ever. It also prevents the process
from looking into others: memory, environment and descriptors under ``/proc`` ask for the same right as a debugger.

seccomp (seccomp(2)): which system calls a process may still make. A filter holds for ever, and for all it starts.
Filters are programs of the classic BPF machine (linux/filter.h), made here instruction by instruction.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from connectors.extraction.limits import Limits

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls; their numbers are the same on every architecture."""
_VERSION = 1 << 0
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

# linux/landlock.h
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_FILES_SINCE = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE, 5: 1 << 15}
"""Rights to files, by the ABI that brought them: the first thirteen; linking and renaming between folders; truncating;
device control."""
_NETWORK, _NETWORK_SINCE = 0b11, 4
"""Binding and connecting TCP."""
_SCOPES, _SCOPES_SINCE = 0b11, 6
"""Abstract Unix sockets, and signals, of processes outside."""

READ = _READ_FILE | _READ_DIR
RUN = READ | _EXECUTE
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
CHANGE = ~(_EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK)
"""Everything but executing, and making devices (a disk's node opens that disk) and sockets."""


def abi() -> int:
    """The kernel's version of Landlock; 0: there is none, it is switched off, or it may not be used here."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))))


def restrict(allowed: Iterable[tuple[Path, int]] = ()) -> None:
    """Everything that this kernel's Landlock can refuse is refused, but for ``allowed``: files and folders (with all
    beneath them), each with the rights it keeps. What does not exist is passed over. Raises OSError."""
    version = abi()
    if version < 1:
        raise OSError("this kernel has no Landlock")
    files = sum(bits for since, bits in _FILES_SINCE.items() if since <= version)
    attributes = struct.pack("=Q", files)
    if version >= _NETWORK_SINCE:
        attributes += struct.pack("=Q", _NETWORK)
    if version >= _SCOPES_SINCE:
        attributes += struct.pack("=Q", _SCOPES)
    libc = _libc()
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    _check(ruleset, "landlock_create_ruleset")
    try:
        for path, rights in allowed:
            _allow(libc, ruleset, path, rights & files)
        _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        _check(libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not path.is_dir():
            rights &= _OF_A_FILE
        rule = struct.pack("=Qi", rights, descriptor)
        done = libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        _check(done, "landlock_add_rule")
    finally:
        os.close(descriptor)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_MACHINES = tuple(_AUDIT_ARCH)
_X32 = 0x40000000
"""On x86_64 numbers from here on mean the same calls again, by another convention."""

_NUMBERS: dict[str, tuple[int | None, int | None]] = {  # x86_64, aarch64 (asm/unistd.h); None: there is no such call
    "accept": (43, 202),
    "accept4": (288, 242),
    "acct": (163, 89),
    "add_key": (248, 217),
    "bind": (49, 200),
    "bpf": (321, 280),
    "brk": (12, 214),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "clone": (56, 220),
    "clone3": (435, 435),
    "close": (3, 57),
    "connect": (42, 203),
    "delete_module": (176, 106),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "fanotify_init": (300, 262),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fcntl": (72, 25),
    "file_setattr": (469, 469),
    "finit_module": (313, 273),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "fstat": (5, 80),
    "futex": (202, 98),
    "futimesat": (261, None),
    "getdents64": (217, 61),
    "getpid": (39, 172),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "init_module": (175, 105),
    "inotify_add_watch": (254, 27),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lchown": (94, None),
    "listen": (50, 201),
    "lookup_dcookie": (212, 18),
    "lremovexattr": (198, 15),
    "lseek": (8, 62),
    "lsetxattr": (189, 6),
    "madvise": (28, 233),
    "migrate_pages": (256, 238),
    "mmap": (9, 222),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mprotect": (10, 226),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mremap": (25, 216),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "munmap": (11, 215),
    "name_to_handle_at": (303, 264),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "openat": (257, 56),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "reboot": (169, 142),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_yield": (24, 124),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "setsid": (112, 157),
    "settimeofday": (164, 170),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "sigaltstack": (131, 132),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vhangup": (153, 58),
    "write": (1, 64),
    "writev": (20, 66),
}
_SECCOMP = (317, 277)
_SET_MODE_FILTER, _GET_ACTION_AVAIL, _ALL_THREADS = 1, 2, 1 << 0

_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000  # linux/seccomp.h
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
_NUMBER, _ARCH = 0, 4
"""Offsets in ``struct seccomp_data``; its arguments are 64 bits each from 16 on, the lower half first."""

_TMPFILE, _PATH = 0o20000000, 0o10000000  # asm-generic/fcntl.h, the same on both architectures
_NOT_FOR_READING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND | _TMPFILE | _PATH


@dataclass(frozen=True, slots=True)
class Call:
    """A system call, with what is asked of one of its arguments (the lower 32 bits)."""

    name: str
    argument: int = 0
    without: int = 0
    """Bits that must not be set."""
    one_of: tuple[int, ...] = ()
    """Empty: any value."""


COMPUTING = (
    *map(
        Call,
        (
            "read",
            "readv",
            "write",
            "writev",
            "lseek",
            "close",
            "fstat",
            "brk",
            "munmap",
            "mremap",
            "madvise",
            "futex",
            "rt_sigaction",
            "rt_sigprocmask",
            "rt_sigreturn",
            "sigaltstack",
            "clock_gettime",
            "clock_getres",
            "clock_nanosleep",
            "nanosleep",
            "gettimeofday",
            "getrandom",
            "getrusage",
            "getpid",
            "gettid",
            "sched_yield",
            "sched_getaffinity",
            "exit",
            "exit_group",
        ),
    ),
    Call("mmap", 2, without=mmap.PROT_EXEC),
    Call("mprotect", 2, without=mmap.PROT_EXEC),
    Call("fcntl", 1, one_of=(fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL)),
)
"""Memory, time, and what is open already. No new executable memory, no thread, no process, no signal."""
READING = (
    Call("openat", 2, without=_NOT_FOR_READING),
    *map(Call, ("newfstatat", "readlink", "readlinkat", "getdents64")),
)
"""Opening files for reading; which ones is Landlock's to say. (Whether a path exists can be found out so.)"""
FOREIGN = tuple(
    map(
        Call,
        (
            "socket",
            "connect",
            "bind",
            "listen",
            "accept",
            "accept4",
            "ptrace",
            "process_vm_readv",
            "process_vm_writev",
            "process_madvise",
            "kcmp",
            "pidfd_open",
            "pidfd_getfd",
            "pidfd_send_signal",
            "move_pages",
            "bpf",
            "perf_event_open",
            "userfaultfd",
            "io_uring_setup",
            "io_uring_enter",
            "io_uring_register",
            "keyctl",
            "add_key",
            "request_key",
            "mount",
            "umount2",
            "mount_setattr",
            "move_mount",
            "open_tree",
            "fsopen",
            "fsconfig",
            "fsmount",
            "fspick",
            "pivot_root",
            "chroot",
            "unshare",
            "setns",
            "name_to_handle_at",
            "open_by_handle_at",
            "fanotify_init",
            "personality",
            "acct",
            "quotactl",
            "swapon",
            "swapoff",
            "reboot",
            "syslog",
            "vhangup",
            "sethostname",
            "setdomainname",
            "settimeofday",
            "lookup_dcookie",
            "init_module",
            "finit_module",
            "delete_module",
            "kexec_load",
            "kexec_file_load",
            "chmod",
            "fchmod",
            "fchmodat",
            "fchmodat2",
            "chown",
            "fchown",
            "lchown",
            "fchownat",
            "setxattr",
            "lsetxattr",
            "fsetxattr",
            "setxattrat",
            "removexattr",
            "lremovexattr",
            "fremovexattr",
            "removexattrat",
            "utime",
            "utimes",
            "futimesat",
            "utimensat",
            "file_setattr",
            "setsid",
            "setpgid",
            "sched_setaffinity",
            "sched_setattr",
            "sched_setparam",
            "sched_setscheduler",
            "ioprio_set",
            "migrate_pages",
            "process_mrelease",
            "shmget",
            "shmat",
            "shmctl",
            "semget",
            "semop",
            "semtimedop",
            "semctl",
            "msgget",
            "msgsnd",
            "msgrcv",
            "msgctl",
            "mq_open",
            "mq_unlink",
            "inotify_add_watch",
        ),
    )
)
"""What no program that recognises text needs: network, other processes, the kernel's own affairs; leaving its session,
by which it is ended; rights, owners, attributes and times of files, and when and where others run, which Landlock does
not guard; and shared memory, semaphores and queues, which others may use and which stay when it has ended."""
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET (linux/sched.h)."""


def is_available() -> bool:
    """Whether filters can be made for this machine, and the kernel takes them (Linux 4.14 and later)."""
    if not sys.platform.startswith("linux") or platform.machine() not in _MACHINES or struct.calcsize("P") != 8:
        return False
    action = ctypes.c_uint32(_KILL)
    return _seccomp(_GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0


def allow_only(calls: Iterable[Call]) -> None:
    """Every other call fails with EPERM. Raises OSError."""
    _install([*_head(), *_rules(calls, _ALLOW), _instruction(_RETURN, _ERRNO | errno.EPERM)])


def refuse(calls: Iterable[Call]) -> None:
    """These fail with EPERM, and so does clone into new namespaces. There is no clone3, whose flags lie in memory where
    no filter sees them: the C libraries use clone then. Of resource limits it may change its own alone. A priority
    stays as it is, though whoever asks for another is told that it was set: programs that lower their own go on. All
    other calls are allowed. Raises OSError."""
    cloning = [
        *_rules([Call("clone", 0, without=_NEW_NAMESPACES)], _ALLOW),
        *_rules([Call("clone3")], _ERRNO | errno.ENOSYS),
    ]
    limiting = [
        *_rules([Call("prlimit64", 0, one_of=(0,))], _ALLOW),
        *_rules([Call("setpriority")], _ERRNO),
    ]
    _install([*_head(), *cloning, *limiting, *_rules(calls, _ERRNO | errno.EPERM), _instruction(_RETURN, _ALLOW)])


def _head() -> list[bytes]:
    """Calls by the convention of another architecture have other numbers: whoever makes one is killed."""
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_IF_EQUAL, _AUDIT_ARCH[platform.machine()], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if platform.machine() == "x86_64":
        program += [_instruction(_IF_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, _KILL)]
    return program


def _rules(calls: Iterable[Call], verdict: int) -> list[bytes]:
    machine = _MACHINES.index(platform.machine())
    program: list[bytes] = []
    for call in calls:
        if (number := _NUMBERS[call.name][machine]) is None:
            continue
        rule = _rule(call, verdict)
        program += [_instruction(_IF_EQUAL, number, 0, len(rule)), *rule]
    return program


def _rule(call: Call, verdict: int) -> list[bytes]:
    """What is done once the number is known. It always ends with a verdict: the number is no longer loaded."""
    if not call.without and not call.one_of:
        return [_instruction(_RETURN, verdict)]
    rule = [_instruction(_LOAD, 16 + 8 * call.argument)]
    if call.without:
        rule += [_instruction(_IF_ANY_BIT, call.without, 0, 1), _instruction(_RETURN, _ERRNO | errno.EPERM)]
    for value in call.one_of:
        rule += [_instruction(_IF_EQUAL, value, 0, 1), _instruction(_RETURN, verdict)]
    return [*rule, _instruction(_RETURN, _ERRNO | errno.EPERM if call.one_of else verdict)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """``struct sock_filter``; the jumps count instructions to pass over."""
    return struct.pack("=HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _install(instructions: list[bytes]) -> None:
    code = b"".join(instructions)
    program = _Program(len(instructions), code)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if (result := _seccomp(_SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program))) != 0:
        reason = os.strerror(ctypes.get_errno()) if result < 0 else "a thread refuses"
        raise OSError(ctypes.get_errno(), f"seccomp: {reason}")


def _seccomp(operation: int, flags: int, argument: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    number = _SECCOMP[_MACHINES.index(platform.machine())]
    return int(libc.syscall(number, ctypes.c_uint(operation), ctypes.c_uint(flags), argument))


GRACE_SECONDS = 5
"""Beyond its wall-clock limit it ends itself, should whoever started it have died."""
_PR_SET_DUMPABLE = 4
_CAPABILITY_VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3 (linux/capability.h): two sets of three masks of 32 bits, all empty here."""
_THREADS = Path("/proc/self/task")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FORBIDDEN = (
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "urllib.Request",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "pty.spawn",
)
"""Audit events of CPython (docs.python.org, "Audit events table")."""
_OF_THE_SYSTEM = (
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libexec",
    "/usr/local/bin",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/ghostscript",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
    "/dev/urandom",
    "/dev/zero",
    "/var/cache/fontconfig",
    "/var/lib/ghostscript",
)
"""What programs that recognise text run and read. Neither ``/etc``, ``/home`` nor ``/opt`` as a whole: secrets lie
there."""
_SHARED = (Path("/usr/share"), Path("/usr/local/share"))
_DATA = ("tessdata*", "tesseract*", "ghostscript*", "fonts*", "fontconfig*", "color", "poppler*", "zoneinfo")
"""Folders in a ``share`` that such programs read. In ``~/.local/share`` there are keyrings beside them."""
_OF_PYTHON = ("bin", "lib/python3*", "lib/lib*", "lib64/python3*", "lib64/lib*")


class Unconfined(Exception):
    """The kernel does not let a process confine itself. The text says what is missing."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """What this machine's kernel offers. Whether it can be used is only certain once a process has used it."""

    landlock: int
    """The version of its ABI; 0: none."""
    seccomp: bool

    @property
    def is_complete(self) -> bool:
        return self.landlock > 0 and self.seccomp

    def __str__(self) -> str:
        of_files = f"Landlock {self.landlock}" if self.landlock else "no Landlock"
        return f"{of_files}, {'seccomp' if self.seccomp else 'no seccomp'}"


@cache
def available() -> Confinement:
    return Confinement(abi(), is_available())


def limit(limits: Limits, *, may_start_programs: bool = False) -> None:
    """What it may use up. may_start_programs: OCR is several processes; each inherits all of this."""
    wanted = [
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.written_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
    ]
    if not may_start_programs:
        wanted.append((resource.RLIMIT_NPROC, 0))  # neither processes nor threads (does not hold for root)
    for what, most in wanted:
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(ValueError, OSError):  # macOS knows some of these by name only
            resource.setrlimit(what, (most, most))
    with suppress(OSError):  # where memory runs out it is the one to go, not who started it
        _OOM_SCORE.write_text("1000")
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds + GRACE_SECONDS)


def confine(readable: Sequence[Path] = ()) -> None:
    """From here on it computes on what it has open, and nothing else: no file but those below ``readable``, no network,
    no process or thread, no signal, no look at another process. All that it needs is imported before. Raises
    Unconfined."""
    _require_one_thread()
    _be_private()
    try:
        restrict([(path, READ) for path in readable])
        _give_up_capabilities()
        allow_only([*COMPUTING, *(READING if readable else ())])
    except OSError as error:
        raise Unconfined(str(error)) from error


def confine_program(program: Path, folder: Path) -> None:
    """For a program that this process becomes, and all that it starts: the system's programs and libraries, the
    program's own environment and a few named folders of data may be run and read, ``folder`` alone may be written. No
    network. Raises Unconfined."""
    _require_one_thread()
    installed = [*map(Path, _OF_THE_SYSTEM), *_found(_SHARED, _DATA), *_around(program)]
    try:
        restrict([*((path, RUN) for path in installed), (folder, CHANGE), (Path(os.devnull), CHANGE)])
        _give_up_capabilities()
        refuse(FOREIGN)
    except OSError as error:
        raise Unconfined(str(error)) from error


def forbid() -> None:
    """Where it cannot be confined and may run all the same: CPython itself refuses. Native code passes it."""
    _be_private()
    sys.addaudithook(_refuse)


def _around(program: Path) -> list[Path]:
    """The folders of a program and of what its links lead to, the data beside them, and the environment of its own
    (virtual, with the Python that it was made from, or conda's) in which it is."""
    folders = list(dict.fromkeys([program.parent, program.resolve().parent]))
    found = [*folders, *_found([folder.parent / "share" for folder in folders], _DATA)]
    for folder in folders:
        if (folder.parent / "pyvenv.cfg").is_file():
            found += [folder.parent, *_found([(folder / "python").resolve().parent.parent], _OF_PYTHON)]
        elif (folder.parent / "conda-meta").is_dir():
            found += [folder.parent / "lib"]
    return found


def _found(folders: Sequence[Path], patterns: Sequence[str]) -> list[Path]:
    return [path for folder in folders for pattern in patterns for path in folder.glob(pattern)]


def _require_one_thread() -> None:
    """Landlock holds for the thread that asks for it."""
    try:
        count = len(os.listdir(_THREADS))
    except OSError as error:
        raise Unconfined("its threads cannot be counted (no /proc)") from error
    if count != 1:
        raise Unconfined(f"it has {count} threads")


def _give_up_capabilities() -> None:
    """Where it runs as root: neither it nor the program that it becomes may do what an ordinary user may not. (With
    PR_SET_NO_NEW_PRIVS, which ``restrict`` sets, no program gives anything back.) Raises OSError."""
    _check(_libc().capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)), "capset")


def _be_private() -> None:
    """Neither its memory nor its descriptors are open to other processes of its user."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _refuse(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _FORBIDDEN:
        raise PermissionError(f"a reading process may not do this: {event}")
