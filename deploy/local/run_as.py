"""Start a server under a user it accepts, then become it: ``python -I -S run_as.py MODE PATH... -- ARGV...``.

Postgres and Elasticsearch refuse to run as root, and Postgres' initdb refuses a user id without a name. Modes:

- ``drop``: as root, go on as ``nobody``. Where nobody cannot reach a PATH (everything lies under a closed home such as
  /root, say), the two capabilities that let it pass file permissions are kept, and no other. No permission of any
  folder on the way is widened.
- ``alias``: go on in a user namespace in which the calling user is ``nobody`` and so has a name. Files stay the
  caller's.

Standard library only: the script runs on its own, as root, with none of our packages on its path. It never returns.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import sys

# linux/prctl.h, linux/securebits.h, linux/capability.h, linux/sched.h
PR_SET_SECUREBITS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 28, 47, 2
SECBIT_NO_SETUID_FIXUP = 1 << 2
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
CAPABILITY_VERSION_3 = 0x20080522
CLONE_NEWUSER = 0x10000000


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def nobody() -> tuple[int, int]:
    """User and group id of ``nobody``."""
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        return 65534, 65534
    return entry.pw_uid, entry.pw_gid


def reachable_by_others(path: str) -> bool:
    """Whether a user who neither owns anything here nor is in any group may read the path (and enter each folder)."""
    path = os.path.realpath(path)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    if folder != path and not os.stat(path).st_mode & 0o004:
        return False
    while True:
        if not os.stat(folder).st_mode & 0o001:
            return False
        if folder == os.path.dirname(folder):
            return True
        folder = os.path.dirname(folder)


def drop(paths: list[str]) -> None:
    """Root → nobody. Raises OSError when this root may not (a container with few capabilities)."""
    uid, gid = nobody()
    keep = sys.platform == "linux" and not all(map(reachable_by_others, paths))
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    if keep:
        # Without this bit the kernel clears the capabilities on setuid, and ignores them in access(2) later.
        _call("prctl", PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
    os.setresuid(uid, uid, uid)
    if keep:
        mask = 1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH
        _call("capset", ctypes.byref(_Header(CAPABILITY_VERSION_3, 0)), (_Data * 2)(_Data(mask, mask, mask), _Data()))
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            _call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def alias() -> None:
    """Go on as ``nobody`` of a new user namespace, which is the calling user outside. Raises OSError if forbidden."""
    uid, gid = os.geteuid(), os.getegid()
    alias_uid, alias_gid = nobody()
    _call("unshare", CLONE_NEWUSER)
    for file, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{alias_uid} {uid} 1"),
        ("gid_map", f"{alias_gid} {gid} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as target:
            target.write(line)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]  # prctl is variadic
    if getattr(libc, name)(*words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main() -> None:
    mode, *rest = sys.argv[1:]
    split = rest.index("--")
    paths, argv = rest[:split], rest[split + 1 :]
    try:
        if mode == "drop":
            drop(paths)
        else:
            alias()
    except OSError as error:
        why = {
            "drop": "FATAL: this root may not start a server as nobody: run as an ordinary user",
            "alias": f"FATAL: user id {os.geteuid()} has no name, which initdb needs: add it to /etc/passwd",
        }[mode]
        sys.exit(f"{why} ({error})")
    os.execv(argv[0], argv)  # noqa: S606


if __name__ == "__main__":
    main()
