"""seccomp (seccomp(2)): which system calls a process may still make. A filter holds for ever, and for all it starts.

Filters are programs of the classic BPF machine (linux/filter.h), made here instruction by instruction.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_MACHINES = tuple(_AUDIT_ARCH)
_X32 = 0x40000000
"""On x86_64 numbers from here on mean the same calls again, by another convention."""

_NUMBERS: dict[str, tuple[int | None, int | None]] = {  # x86_64, aarch64 (asm/unistd.h); None: there is no such call
    "accept": (43, 202), "accept4": (288, 242), "acct": (163, 89), "add_key": (248, 217), "bind": (49, 200),
    "bpf": (321, 280), "brk": (12, 214), "chmod": (90, None), "chown": (92, None), "chroot": (161, 51),
    "clock_getres": (229, 114), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "clone": (56, 220),
    "clone3": (435, 435), "close": (3, 57), "connect": (42, 203), "delete_module": (176, 106), "exit": (60, 93),
    "exit_group": (231, 94), "fanotify_init": (300, 262), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54), "fcntl": (72, 25), "file_setattr": (469, 469),
    "finit_module": (313, 273), "fremovexattr": (199, 16), "fsconfig": (431, 431), "fsetxattr": (190, 7),
    "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433), "fstat": (5, 80), "futex": (202, 98),
    "futimesat": (261, None), "getdents64": (217, 61), "getpid": (39, 172), "getrandom": (318, 278),
    "getrusage": (98, 165), "gettid": (186, 178), "gettimeofday": (96, 169), "init_module": (175, 105),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219), "lchown": (94, None),
    "listen": (50, 201), "lookup_dcookie": (212, 18), "lremovexattr": (198, 15), "lseek": (8, 62),
    "lsetxattr": (189, 6), "madvise": (28, 233), "mmap": (9, 222), "mount": (165, 40), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "move_pages": (279, 239), "mprotect": (10, 226), "mremap": (25, 216), "munmap": (11, 215),
    "name_to_handle_at": (303, 264), "nanosleep": (35, 101), "newfstatat": (262, 79), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "openat": (257, 56), "perf_event_open": (298, 241), "personality": (135, 92),
    "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pivot_root": (155, 41),
    "process_madvise": (440, 440), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "quotactl": (179, 60), "read": (0, 63), "readlink": (89, None), "readlinkat": (267, 78),
    "readv": (19, 65), "reboot": (169, 142), "removexattr": (197, 14), "removexattrat": (466, 466),
    "request_key": (249, 218), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123), "sched_yield": (24, 124), "setdomainname": (171, 162), "sethostname": (170, 161),
    "setns": (308, 268), "setpgid": (109, 154), "setsid": (112, 157), "settimeofday": (164, 170), "setxattr": (188, 5),
    "setxattrat": (463, 463), "sigaltstack": (131, 132), "socket": (41, 198), "swapoff": (168, 225),
    "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
    "utime": (132, None), "utimensat": (280, 88), "utimes": (235, None), "vhangup": (153, 58), "write": (1, 64),
    "writev": (20, 66),
}  # fmt: skip
_SECCOMP = (317, 277)
_SET_MODE_FILTER, _GET_ACTION_AVAIL, _ALL_THREADS = 1, 2, 1 << 0
_PR_SET_NO_NEW_PRIVS = 38

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
    *map(Call, ("read", "readv", "write", "writev", "lseek", "close", "fstat", "brk", "munmap", "mremap", "madvise",
                "futex", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "clock_gettime",
                "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "getrandom", "getrusage", "getpid",
                "gettid", "sched_yield", "sched_getaffinity", "exit", "exit_group")),
    Call("mmap", 2, without=mmap.PROT_EXEC), Call("mprotect", 2, without=mmap.PROT_EXEC),
    Call("fcntl", 1, one_of=(fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL)),
)  # fmt: skip
"""Memory, time, and what is open already. No new executable memory, no thread, no process, no signal."""
READING = (
    Call("openat", 2, without=_NOT_FOR_READING), *map(Call, ("newfstatat", "readlink", "readlinkat", "getdents64")),
)  # fmt: skip
"""Opening files for reading; which ones is Landlock's to say. (Whether a path exists can be found out so.)"""
FOREIGN = tuple(map(Call, (
    "socket", "connect", "bind", "listen", "accept", "accept4", "ptrace", "process_vm_readv", "process_vm_writev",
    "process_madvise", "kcmp", "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "move_pages", "bpf",
    "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "keyctl", "add_key",
    "request_key", "mount", "umount2", "mount_setattr", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount",
    "fspick", "pivot_root", "chroot", "unshare", "setns", "name_to_handle_at", "open_by_handle_at", "fanotify_init",
    "personality", "acct", "quotactl", "swapon", "swapoff", "reboot", "syslog", "vhangup", "sethostname",
    "setdomainname", "settimeofday", "lookup_dcookie", "init_module", "finit_module", "delete_module", "kexec_load",
    "kexec_file_load", "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "setxattr",
    "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat", "utime",
    "utimes", "futimesat", "utimensat", "file_setattr", "setsid", "setpgid",
)))  # fmt: skip
"""What no program that recognises text needs: network, other processes, the kernel's own affairs; leaving its session,
by which it is ended; and rights, owners, attributes and times of files, which Landlock does not guard."""
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
    no filter sees them: the C libraries use clone then. All others are allowed. Raises OSError."""
    cloning = [
        *_rules([Call("clone", 0, without=_NEW_NAMESPACES)], _ALLOW), *_rules([Call("clone3")], _ERRNO | errno.ENOSYS),
    ]  # fmt: skip
    _install([*_head(), *cloning, *_rules(calls, _ERRNO | errno.EPERM), _instruction(_RETURN, _ALLOW)])


def _head() -> list[bytes]:
    """Calls by the convention of another architecture have other numbers: whoever makes one is killed."""
    program = [
        _instruction(_LOAD, _ARCH), _instruction(_IF_EQUAL, _AUDIT_ARCH[platform.machine()], 1, 0),
        _instruction(_RETURN, _KILL), _instruction(_LOAD, _NUMBER),
    ]  # fmt: skip
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
