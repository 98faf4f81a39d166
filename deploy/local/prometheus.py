"""Prometheus and Alertmanager for the tests: ``python -m deploy.local.prometheus`` finds them, or unpacks Debian's.

``$PENSTOCK_PROMETHEUS`` and ``$PENSTOCK_ALERTMANAGER`` name folders with the programs of each; else they are looked for
on the PATH; else Debian's packages are downloaded by apt-get and unpacked among the local servers. They are not
installed: that would start services.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deploy.local.tools import run_debian, show, unpack_debian
from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings

Program = Literal["prometheus", "promtool", "alertmanager", "amtool"]


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    """Debian's name."""
    variable: str
    """Names a folder with the programs."""
    programs: Mapping[Program, tuple[str, ...]]
    """Their file names; Debian's may differ from the project's."""
    data: str = ""
    """A folder that the programs read and name absolutely. Unpacked, they read it below the folder they run in."""

    @property
    def folder(self) -> Path:
        """Where the package is unpacked."""
        return settings.dist() / self.name

    def executable(self, program: Program, folder: Path) -> Path | None:
        paths = [folder / name for name in self.programs[program]]
        return next((path for path in paths if os.access(path, os.X_OK)), None)


PACKAGES = (
    Package("prometheus", "PENSTOCK_PROMETHEUS", {"prometheus": ("prometheus",), "promtool": ("promtool",)}),
    Package(
        "prometheus-alertmanager",
        "PENSTOCK_ALERTMANAGER",
        {"alertmanager": ("alertmanager", "prometheus-alertmanager"), "amtool": ("amtool",)},
        data="/usr/share/prometheus/alertmanager",
    ),
)


def package_of(program: Program) -> Package:
    return next(package for package in PACKAGES if program in package.programs)


def find(program: Program) -> Path | None:
    """The one to use; None: there is none. Raises Misconfigured when the one that was named is not there."""
    package = package_of(program)
    if named := os.environ.get(package.variable):
        path = package.executable(program, Path(named))
        if path is None:
            raise Misconfigured(
                f"{package.variable} names {named}, where there is no {program}: correct it, or unset it"
            )
        return path
    on_path = next(filter(None, map(shutil.which, package.programs[program])), None)
    return Path(on_path) if on_path else package.executable(program, package.folder / "usr" / "bin")


def require(program: Program) -> Path:
    """The one to use, unpacked now if need be. Raises Misconfigured with one line."""
    package = package_of(program)
    if find(program) is None:
        unpack(package)
    path = find(program)
    if path is None:
        raise Misconfigured(
            f"no {program} was found: `apt-get install {package.name}` (and stop the service that it starts),"
            f" or name a folder that has it with {package.variable}"
        )
    return path


def unpack(package: Package) -> None:
    """Debian's package, into its folder. Raises Misconfigured with the line that says why not."""

    def is_there() -> bool:
        return all(package.executable(program, package.folder / "usr" / "bin") for program in package.programs)

    def download(apt: str, work: Path) -> None:
        try:
            run_debian(apt, "download", "-qq", package.name, at=work)
        except Misconfigured:
            if os.geteuid() != 0:
                raise
            run_debian(apt, "update", "-qq")
            run_debian(apt, "download", "-qq", package.name, at=work)

    def arrange(whole: Path) -> None:
        if package.data:
            _relocate(whole / "usr" / "bin", package.data)

    unpack_debian(package.folder, is_there, download, arrange)


def _relocate(programs: Path, data: str) -> None:
    """Make the path of a folder in programs relative, by as many bytes: ``/usr/share`` becomes ``usr//share``."""
    relative = data.lstrip("/").replace("/", "//", 1)
    for program in programs.iterdir():
        program.write_bytes(program.read_bytes().replace(data.encode(), relative.encode()))


def run_folder(program: Program) -> Path:
    """The folder in which a program has to run, so that it reads what belongs to its package."""
    return require(program).parents[2]


def look() -> Iterator[tuple[str, Path]]:
    """Raises Misconfigured when one of them is not there in the end."""
    for package in PACKAGES:
        for program in package.programs:
            yield program, require(program)


if __name__ == "__main__":
    sys.exit(show(look))
