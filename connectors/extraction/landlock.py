"""Landlock (landlock(7); Linux 5.13 and later): a process gives up access to files, TCP ports and other processes.

A restriction holds for the thread that makes it, for what that thread starts, and for ever. It also keeps the process
from looking into others: memory, environment and descriptors under ``/proc`` ask for the same right as a debugger.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

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
CHANGE = ~_EXECUTE
"""Everything but executing."""


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
