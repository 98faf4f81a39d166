"""Prometheus and promtool for the tests: ``python -m deploy.local.prometheus`` finds them, or unpacks Debian's.

``$PENSTOCK_PROMETHEUS`` names a folder with both; else they are looked for on the PATH; else Debian's package is
downloaded by apt-get and unpacked among the local servers. It is not installed: that would start a service.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from deploy.local.lock import exclusive
from deploy.local.tools import run_debian, show
from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings

PACKAGE = "prometheus"

Program = Literal["prometheus", "promtool"]
PROGRAMS: tuple[Program, ...] = ("prometheus", "promtool")


def folder() -> Path:
    """Where the package is unpacked."""
    return settings.dist() / PACKAGE


def find(program: Program) -> Path | None:
    """The one to use; None: there is none. Raises Misconfigured when the one that was named is not there."""
    if named := os.environ.get("PENSTOCK_PROMETHEUS"):
        path = Path(named) / program
        if not os.access(path, os.X_OK):
            raise Misconfigured(
                f"PENSTOCK_PROMETHEUS names {named}, where there is no {program}: correct it, or unset it"
            )
        return path
    if on_path := shutil.which(program):
        return Path(on_path)
    unpacked = folder() / "usr" / "bin" / program
    return unpacked if os.access(unpacked, os.X_OK) else None


def require(program: Program) -> Path:
    """The one to use, unpacked now if need be. Raises Misconfigured with one line."""
    if find(program) is None:
        unpack()
    path = find(program)
    if path is None:
        raise Misconfigured(
            f"no {program} was found: `apt-get install prometheus` (and stop the service that it starts),"
            " or name a folder that has it with PENSTOCK_PROMETHEUS"
        )
    return path


def unpack() -> None:
    """Debian's package, into ``folder()``. Raises Misconfigured with the line that says why not."""
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg")
    if apt is None or dpkg is None:
        return
    place = folder()
    place.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(place.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=place.parent) as made:
        work = Path(made)
        if all(os.access(place / "usr" / "bin" / program, os.X_OK) for program in PROGRAMS):
            return  # somebody else was faster
        try:
            run_debian(apt, "download", "-qq", PACKAGE, at=work)
        except Misconfigured:
            if os.geteuid() != 0:
                raise
            run_debian(apt, "update", "-qq")
            run_debian(apt, "download", "-qq", PACKAGE, at=work)
        whole = work / "whole"
        [package] = work.glob("*.deb")
        run_debian(dpkg, "-x", str(package), str(whole), at=work)
        shutil.rmtree(place, ignore_errors=True)
        whole.rename(place)


def look() -> Iterator[tuple[str, Path]]:
    """Raises Misconfigured when one of them is not there in the end."""
    for program in PROGRAMS:
        yield program, require(program)


if __name__ == "__main__":
    sys.exit(show(look))
