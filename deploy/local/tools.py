"""Finds and installs the tools of tests and of the local stack: output, and Debian's apt-get and dpkg."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from deploy.local.lock import exclusive
from pipeline.core.errors import Misconfigured

DEBIAN_SECONDS = 600
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
NO_QUESTIONS = {"DEBIAN_FRONTEND": "noninteractive"}
console = Console(stderr=True, highlight=False)


def show(find: Callable[[], Iterator[tuple[str, Path]]]) -> int:
    """Print ``name: path`` for every tool that ``find`` yields, on stderr. Returns the exit code: 1 when it raises
    Misconfigured."""
    try:
        for name, path in find():
            console.print(f"{name}: {path}", soft_wrap=True)
    except Misconfigured as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    return 0


def debian_mirror() -> str:
    """The address from which this machine's apt installs Debian's packages. Raises Misconfigured."""
    options = ("indextargets", "--format", "$(ORIGIN) $(CODENAME) $(REPO_URI)")
    listed = subprocess.run(["apt-get", *options], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        origin, codename, address = line.split(" ", 2)
        if origin == "Debian" and codename and "-" not in codename:
            return address
    raise Misconfigured("apt knows no mirror of Debian: this needs a Debian machine, and `apt-get update` once")


def run(
    command: Sequence[str | Path],
    *,
    seconds: float,
    late: str,
    at: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program that asks nothing, with these variables in addition to this process's. Raises Misconfigured, with
    the message ``late``, when it does not end in time; its exit code is the caller's to judge."""
    try:
        return subprocess.run(
            command,
            cwd=at,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise Misconfigured(late) from error


def run_debian(*command: str, at: Path | None = None) -> None:
    """Run apt-get or dpkg without questions, in the folder ``at``. Raises Misconfigured with the line that says why it
    failed."""
    name = f"{Path(command[0]).name} {command[1]}"
    done = run(
        command,
        seconds=DEBIAN_SECONDS,
        late=f"{name} did not end within {DEBIAN_SECONDS} s: is the network there?",
        at=at,
        environment=NO_QUESTIONS,
    )
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if line.startswith("E:")]
        raise Misconfigured(f"{name} failed: {(errors or lines)[-1][:300]}")


def download_debian(apt: str, work: Path, suite: str, package: str) -> None:
    """Put the package of a suite that need not be this machine's into the folder ``work``, which gets lists of its own.
    Raises Misconfigured."""
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True, exist_ok=True)
    (work / "sources.list").write_text(f"deb [signed-by={KEYRING}] {debian_mirror()} {suite} main\n")
    options = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "",
    }
    arguments = [f"--option={name}={value}" for name, value in options.items()]
    run_debian(apt, "update", "-qq", *arguments, at=work)
    run_debian(apt, "download", "-qq", *arguments, package, at=work)


def unpack_debian(
    place: Path,
    is_there: Callable[[], bool],
    download: Callable[[str, Path], None],
    arrange: Callable[[Path], None] = lambda _: None,
) -> None:
    """Unpack a package of Debian, which needs no root, as the folder ``place``. Does nothing if ``is_there`` once no
    other process unpacks it, or where there is no apt-get. download: puts the package into a folder, with the apt-get
    that it is given. arrange: changes what was unpacked before it takes its place. Raises Misconfigured."""
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg")
    if apt is None or dpkg is None:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(place.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=place.parent) as made:
        if is_there():
            return  # somebody else was faster
        work = Path(made)
        download(apt, work)
        [package] = work.glob("*.deb")
        whole = work / "whole"
        run_debian(dpkg, "-x", str(package), str(whole), at=work)
        arrange(whole)
        shutil.rmtree(place, ignore_errors=True)
        whole.rename(place)
