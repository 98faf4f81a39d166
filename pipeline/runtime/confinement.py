"""Takes all rights from a process that reads hostile input, by Landlock, seccomp and resource limits.

Landlock (landlock(7); Linux 5.13 and later): a process gives up access to files, TCP ports and other processes. A
restriction holds for the thread that makes it, for what that thread starts, and for ever. It also prevents the process
from looking into others: memory, environment and descriptors under ``/proc`` ask for the same right as a debugger.

seccomp (seccomp(2)): which system calls a process may still make. A filter holds for ever, and for all it starts.
Filters are programs of the classic BPF machine (linux/filter.h), assembled here instruction by instruction.
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

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System call numbers, which are the same on every architecture."""
_VERSION = 1 << 0
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

# linux/landlock.h
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_FILE_RIGHTS_SINCE = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE, 5: 1 << 15}
"""Rights to files by the ABI version that introduced them: the first thirteen; linking and renaming between folders;
truncating; device control."""
_NETWORK, _NETWORK_SINCE = 0b11, 4
"""Binding and connecting TCP."""
_SCOPES, _SCOPES_SINCE = 0b11, 6
"""Abstract Unix sockets, and signals, of processes outside."""

READ = _READ_FILE | _READ_DIR
RUN = READ | _EXECUTE
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
CHANGE = ~(_EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK)
"""All rights except executing and making devices (a device node opens the disk itself) and sockets."""


def abi() -> int:
    """Return the version of the kernel's Landlock; 0 if there is none, it is switched off, or it may not be used
    here."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))))


def restrict(allowed: Iterable[tuple[Path, int]] = ()) -> None:
    """Refuse everything that this kernel's Landlock can refuse, except ``allowed``: files and folders (with everything
    below them) and the rights to each. Paths that do not exist are skipped. Raises OSError."""
    version = abi()
    if version < 1:
        raise OSError("this kernel has no Landlock")
    files = sum(bits for since, bits in _FILE_RIGHTS_SINCE.items() if since <= version)
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
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        done = libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        _check(done, "landlock_add_rule")
    finally:
        os.close(descriptor)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _check(result: int, call: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_MACHINES = tuple(_AUDIT_ARCH)
_X32 = 0x40000000
"""On x86_64, numbers from here on are the same calls in the x32 convention."""

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
    "ioctl": (16, 29),
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
    "socketpair": (53, 199),
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
"""Offsets in ``struct seccomp_data``. The arguments follow from offset 16, 64 bits each, the lower half first."""

_TMPFILE, _PATH = 0o20000000, 0o10000000  # asm-generic/fcntl.h, the same on both architectures
_NOT_FOR_READING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND | _TMPFILE | _PATH


@dataclass(frozen=True, slots=True)
class Call:
    """A system call, with a condition on the lower 32 bits of one of its arguments."""

    name: str
    argument: int = 0
    without: int = 0
    """Bits that must not be set."""
    one_of: tuple[int, ...] = ()
    """Values that the argument may have. Empty: any value."""


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
"""Calls for memory, time and open descriptors. No new executable memory, thread, process or signal."""
READING = (
    Call("openat", 2, without=_NOT_FOR_READING),
    *map(Call, ("newfstatat", "readlink", "readlinkat", "getdents64")),
)
"""Calls that open files for reading; Landlock restricts which ones. (They reveal whether a path exists.)"""
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
"""Calls that no OCR program needs: for the network, other processes and the kernel's administration; for leaving its
session, by which it is killed; for the rights, owners, attributes and times of files and the scheduling of other
processes, which Landlock does not restrict; and for shared memory, semaphores and queues, which others may use and
which outlive the program."""
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET (linux/sched.h)."""
_CLONE_PARENT = 0x8000
"""The new process becomes a child of the caller's parent, which never waits for it: its number is taken until that
parent ends."""
_STREAM, _CLOSE, _DO_NOT_WAIT = 1, 0o2000000, 0o4000
"""SOCK_STREAM, SOCK_CLOEXEC and SOCK_NONBLOCK (linux/net.h), the same on both architectures."""
_STREAMS = (_STREAM, _STREAM | _CLOSE, _STREAM | _DO_NOT_WAIT, _STREAM | _CLOSE | _DO_NOT_WAIT)
"""Pairs of sockets that lead to each other alone. From a pair of datagrams, each message may go to any other socket
that has a path, with open files in it: Landlock knows no right to that."""
_TERMINAL_AND_PIPE_REQUESTS = (
    0x5401,  # TCGETS
    0x802C542A,  # TCGETS2, by which newer C libraries recognise a terminal
    0x540F,  # TIOCGPGRP
    0x5413,  # TIOCGWINSZ
    0x541B,  # FIONREAD
    0x5421,  # FIONBIO
    0x5450,  # FIONCLEX
    0x5451,  # FIOCLEX
)
"""Requests of ioctl (asm-generic/ioctls.h, the same on both architectures) that programs make of any descriptor. Others
change the attributes of a file that is open for reading only, such as FS_IOC_SETFLAGS."""


def is_available() -> bool:
    """Whether this module has filters for this machine, and the kernel accepts them (Linux 4.14 and later)."""
    if not sys.platform.startswith("linux") or platform.machine() not in _MACHINES or struct.calcsize("P") != 8:
        return False
    action = ctypes.c_uint32(_KILL)
    return _seccomp(_GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0


def allow_only(calls: Iterable[Call]) -> None:
    """Make every other call fail with EPERM. Raises OSError."""
    _install([*_head(), *_rules(calls, _ALLOW), _instruction(_RETURN, _ERRNO | errno.EPERM)])


def refuse(calls: Iterable[Call]) -> None:
    """Make these calls fail with EPERM, and clone into new namespaces or for another parent too; all others are
    allowed. clone3 fails with ENOSYS, because a filter cannot see its flags, which are in memory: C libraries then use
    clone. A process may change its own resource limits only, ask terminals and pipes only, and make only such pairs of
    sockets as lead nowhere else. Setting a priority has no effect but reports success, because programs that lower
    their own would otherwise fail. Raises OSError."""
    cloning = [
        *_rules([Call("clone", 0, without=_NEW_NAMESPACES | _CLONE_PARENT)], _ALLOW),
        *_rules([Call("clone3")], _ERRNO | errno.ENOSYS),
    ]
    limiting = [
        *_rules([Call("prlimit64", 0, one_of=(0,))], _ALLOW),
        *_rules([Call("ioctl", 1, one_of=_TERMINAL_AND_PIPE_REQUESTS)], _ALLOW),
        *_rules([Call("socketpair", 1, one_of=_STREAMS)], _ALLOW),
        *_rules([Call("setpriority")], _ERRNO),
    ]
    _install([*_head(), *cloning, *limiting, *_rules(calls, _ERRNO | errno.EPERM), _instruction(_RETURN, _ALLOW)])


def _head() -> list[bytes]:
    """The start of every filter: a call in the convention of another architecture, with other numbers, kills the
    process."""
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
    """The instructions after a call's number has matched. They always return a verdict: the number is no longer
    loaded."""
    if not call.without and not call.one_of:
        return [_instruction(_RETURN, verdict)]
    rule = [_instruction(_LOAD, 16 + 8 * call.argument)]
    if call.without:
        rule += [_instruction(_IF_ANY_BIT, call.without, 0, 1), _instruction(_RETURN, _ERRNO | errno.EPERM)]
    for value in call.one_of:
        rule += [_instruction(_IF_EQUAL, value, 0, 1), _instruction(_RETURN, verdict)]
    return [*rule, _instruction(_RETURN, _ERRNO | errno.EPERM if call.one_of else verdict)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode a ``struct sock_filter``; jumps count the instructions to skip."""
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
"""So long after its wall-clock limit the process ends itself, in case its parent has died."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_CAPABILITY_VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3 (linux/capability.h): two sets of three masks of 32 bits, all empty here."""
_THREADS = Path("/proc/self/task")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FORBIDDEN_EVENTS = (
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
_SYSTEM_PATHS = (
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
"""Files and folders that OCR programs run and read. Not ``/etc``, ``/home`` or ``/opt`` as a whole, which hold
secrets."""
_SHARE_FOLDERS = (Path("/usr/share"), Path("/usr/local/share"))
_DATA_PATTERNS = ("tessdata*", "tesseract*", "ghostscript*", "fonts*", "fontconfig*", "color", "poppler*", "zoneinfo")
"""Folders in a ``share`` folder that OCR programs read. Not all of them: ``~/.local/share`` also holds keyrings."""
_PYTHON_PATTERNS = ("bin", "lib/python3*", "lib/lib*", "lib64/python3*", "lib64/lib*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """The resources that a reading process may use."""

    memory_bytes: int
    """RLIMIT_AS."""
    cpu_seconds: int
    """RLIMIT_CPU."""
    wall_seconds: int
    """Wall-clock time after which the process and its whole session are killed."""
    written_bytes: int
    """RLIMIT_FSIZE: the largest file it may write."""
    open_files: int
    """RLIMIT_NOFILE."""


class Unconfined(Exception):
    """The kernel does not let a process confine itself. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """The confinement that this machine's kernel offers. Only a process that uses it learns whether it works."""

    landlock: int
    """The version of the Landlock ABI; 0: none."""
    seccomp: bool

    @property
    def is_complete(self) -> bool:
        return self.landlock > 0 and self.seccomp

    def __str__(self) -> str:
        landlock = f"Landlock {self.landlock}" if self.landlock else "no Landlock"
        return f"{landlock}, {'seccomp' if self.seccomp else 'no seccomp'}"


@cache
def available() -> Confinement:
    return Confinement(abi(), is_available())


def limit(limits: ResourceLimits, *, may_start_programs: bool = False) -> None:
    """Limit the resources of this process. may_start_programs: OCR runs several processes, which inherit the limits."""
    limited = [
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.written_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
    ]
    if not may_start_programs:
        limited.append((resource.RLIMIT_NPROC, 0))  # neither processes nor threads (does not hold for root)
    for kind, most in limited:
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(ValueError, OSError):  # macOS knows some of these by name only
            resource.setrlimit(kind, (most, most))
    with suppress(OSError):  # when memory runs out, the kernel is to kill this process, not its parent
        _OOM_SCORE.write_text("1000")
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds + GRACE_SECONDS)


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread ends that started it. Whoever has taken it over may ignore its
    alarm, and after the death of its parent nobody would be left to end it. (A program that it executes may undo
    this.)"""
    with suppress(OSError, AttributeError):  # AttributeError: macOS has no prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def confine(readable: Sequence[Path] = ()) -> None:
    """Leave this process nothing but computing on its open descriptors and reading files below ``readable``: no
    network, process, thread or signal, and no access to another process. It has to import everything that it needs
    before. Raises Unconfined."""
    _require_one_thread()
    _be_private()
    try:
        restrict([(path, READ) for path in readable])
        _drop_capabilities()
        allow_only([*COMPUTING, *(READING if readable else ())])
    except OSError as error:
        raise Unconfined(str(error)) from error


def confine_program(program: Path, folder: Path) -> None:
    """Confine this process for a program that it will execute, and everything that the program starts: it may run and
    read the system's programs and libraries, the program's own environment and some data folders, write ``folder``
    alone, and use no network. Raises Unconfined."""
    _require_one_thread()
    installed = [*map(Path, _SYSTEM_PATHS), *_matching(_SHARE_FOLDERS, _DATA_PATTERNS), *_program_folders(program)]
    try:
        restrict([*((path, RUN) for path in installed), (folder, CHANGE), (Path(os.devnull), CHANGE)])
        _drop_capabilities()
        refuse(FOREIGN)
    except OSError as error:
        raise Unconfined(str(error)) from error


def forbid() -> None:
    """Have CPython refuse network and programs, where the kernel cannot confine. Native code is not stopped by this."""
    _be_private()
    sys.addaudithook(_refuse)


def _program_folders(program: Path) -> list[Path]:
    """Return the folders of a program and of the target of its links, their data folders, and the environment that it
    is in: a virtual one, with the Python it was made from, or one of conda."""
    folders = list(dict.fromkeys([program.parent, program.resolve().parent]))
    paths = [*folders, *_matching([folder.parent / "share" for folder in folders], _DATA_PATTERNS)]
    for folder in folders:
        if (folder.parent / "pyvenv.cfg").is_file():
            paths += [folder.parent, *_matching([(folder / "python").resolve().parent.parent], _PYTHON_PATTERNS)]
        elif (folder.parent / "conda-meta").is_dir():
            paths += [folder.parent / "lib"]
    return paths


def _matching(folders: Sequence[Path], patterns: Sequence[str]) -> list[Path]:
    return [path for folder in folders for pattern in patterns for path in folder.glob(pattern)]


def _require_one_thread() -> None:
    """Raise Unconfined if there is another thread: Landlock confines only the thread that requests it."""
    try:
        count = len(os.listdir(_THREADS))
    except OSError as error:
        raise Unconfined("its threads cannot be counted (no /proc)") from error
    if count != 1:
        raise Unconfined(f"it has {count} threads")


def _drop_capabilities() -> None:
    """Drop all capabilities, so that a process of root, and the program that it executes, may do no more than one of an
    ordinary user. (PR_SET_NO_NEW_PRIVS, which ``restrict`` sets, keeps programs from regaining any.) Raises OSError."""
    _check(_libc().capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)), "capset")


def _be_private() -> None:
    """Close the memory and descriptors of this process to other processes of its user."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _refuse(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _FORBIDDEN_EVENTS:
        raise PermissionError(f"a reading process may not do this: {event}")
