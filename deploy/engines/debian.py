"""Debian roots made by mmdebstrap: the one in which the Docker engine runs, and the base of the stand-in images.

Both come from the mirror that this machine's own apt uses, through its proxy, and trust the authorities that this
machine trusts. A root is built in a scratch folder and renamed when it is whole.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from deploy.local.tools import NO_QUESTIONS, debian_mirror, run, run_debian
from pipeline.core.errors import Misconfigured

SECONDS = 900
ENGINE_SUITE = "trixie"
"""The first Debian whose Compose reads docker-compose.yml; its engine is newer than CVE-2024-29018."""
ENGINE_PACKAGES = (
    *("docker.io", "docker-cli", "docker-compose", "docker-buildx", "tini"),
    *("mount", "iproute2", "iptables", "nftables", "ca-certificates", "curl"),
)
BASE_PACKAGES = ("usr-is-merged", "ca-certificates", "netbase", "tzdata")
MERGED = ("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",)
"""Merges /usr before packages are unpacked. Otherwise Debian's usrmerge does it, which brings all of Perl."""
UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var/cache/apt", "var/lib/apt/lists")
"""Folders whose contents are removed, as in slim images."""
UNUSED_PYTHON = ("test", "tests", "idle_test", "__pycache__", "site-packages", "config-*", "*.a", "_tkinter.*")
NO_CACHES = """\
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
DPkg::Post-Invoke {"rm -f /var/cache/apt/archives/*.deb";};
"""
"""Configuration of apt in images of Debian: it leaves nothing in a layer that only the next apt would need."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_INSTALLING = threading.Lock()
LAYOUT = 1
"""Version of both roots: raise it when their packages or their arrangement change."""


def engine_root(folder: Path) -> Path:
    """The root with Docker, Compose and Buildx, made now if need be. Raises Misconfigured."""
    return _root(folder / f"engine-{ENGINE_SUITE}-{LAYOUT}", ENGINE_SUITE, ENGINE_PACKAGES)


def base_archive(folder: Path) -> Path:
    """A tar archive for ``docker import``, made now if need be: this machine's Debian, with the Python that runs this
    program as ``/usr/local/bin/python``, and pip. ``make setup`` showed that this Python can install what is pinned.
    Raises Misconfigured."""
    archive = folder / _base_name()
    if not archive.exists():
        with tempfile.TemporaryDirectory(dir=folder, prefix=".base-") as made:
            packages = ("python3", "python3-venv") if _is_debians() else _libraries()
            root = _root(Path(made) / "root", _suite(), (*BASE_PACKAGES, *packages), MERGED)
            _arrange_debians_python(root) if _is_debians() else _copy_python(root)
            (root / "etc/pip.conf").write_text(_pip_configuration())
            _make_slim(root)
            scratch = Path(made) / archive.name
            _run("tar", "--create", "--numeric-owner", "--file", str(scratch), "--directory", str(root), ".")
            scratch.rename(archive)
    return archive


def _base_name() -> str:
    return f"base-{_suite()}-python{platform.python_version()}-{LAYOUT}.tar"


def _suite() -> str:
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "")


def _is_debians() -> bool:
    return sys.base_prefix == "/usr"


def remove(folder: Path) -> None:
    """Remove roots and archives that an interrupted run or an older layout left."""
    current = {f"engine-{ENGINE_SUITE}-{LAYOUT}", _base_name()}
    for pattern in ("engine-*", "base-*", ".base-*", ".engine-*"):
        for path in folder.glob(pattern):
            if path.name not in current:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _proxies() -> list[str]:
    options = _run("apt-config", "dump", "--format", '%f "%v";%n', "Acquire::http::Proxy", "Acquire::https::Proxy")
    return [line for line in options.splitlines() if '""' not in line]


def _root(place: Path, suite: str, packages: Sequence[str], more: Sequence[str] = ()) -> Path:
    if place.exists():
        return place
    _install_mmdebstrap()
    options = ['APT::Install-Recommends "false"', 'Acquire::Retries "3"', *_proxies()]
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as made:
        scratch = Path(made) / "root"
        _run(
            *("mmdebstrap", "--quiet", "--mode=root", "--format=directory", "--variant=apt"),
            *("--components=main", f"--include={','.join(packages)}", "--dpkgopt=force-unsafe-io"),
            *more,
            *(f"--aptopt={option}" for option in options),
            *(suite, str(scratch), debian_mirror()),
        )
        shutil.copy(CERTIFICATES, scratch / CERTIFICATES.relative_to("/"))
        scratch.rename(place)
    return place


VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def _install_mmdebstrap() -> None:
    """Both roots are made at the same time, and apt runs once at a time."""
    with _INSTALLING:
        if shutil.which("mmdebstrap") is None:
            run_debian("apt-get", "update", "-qq")
            run_debian("apt-get", "install", "-y", "-qq", "--no-install-recommends", "mmdebstrap")


def _arrange_debians_python(root: Path) -> None:
    """Arrange Debian's Python as in the vendor's image: in /usr/local/bin, with a pip that may install and remove
    there."""
    for name in ("python", "python3"):
        (root / "usr/local/bin" / name).symlink_to(f"/usr/bin/python{VERSION}")
    (root / f"usr/lib/python{VERSION}/EXTERNALLY-MANAGED").unlink()
    [wheel] = (root / "usr/share/python-wheels").glob("pip-*.whl")
    inside = f"/usr/share/python-wheels/{wheel.name}"
    _run("chroot", str(root), "python3", f"{inside}/pip", "install", "--quiet", "--no-index", inside)


def _copy_python(root: Path) -> None:
    """Copy this Python as in the vendor's image: without tests, static libraries, and symbols for debugging."""
    source, target = Path(sys.base_prefix), root / "usr/local"
    unused = shutil.ignore_patterns(*UNUSED_PYTHON)
    shutil.copytree(_standard_library(), target / "lib" / f"python{VERSION}", symlinks=True, ignore=unused)
    for library in source.glob("lib/libpython*.so*"):
        shutil.copy2(library, target / "lib", follow_symlinks=False)
    program = target / "bin" / f"python{VERSION}"
    shutil.copy2((source / "bin" / program.name).resolve(), program)
    for name in ("python", "python3"):
        (target / "bin" / name).symlink_to(program.name)
    if (strip := shutil.which("strip")) is not None:
        binaries = [program, *target.rglob("*.so"), *(target / "lib").glob("libpython*.so.*")]
        _run(strip, "--strip-unneeded", *(str(path) for path in binaries if not path.is_symlink()))
    _run("chroot", str(root), "ldconfig")
    _run("chroot", str(root), "/usr/local/bin/python3", "-m", "ensurepip", "--default-pip")


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _libraries() -> list[str]:
    """Debian's packages with the libraries that this Python and its modules are linked with. Raises Misconfigured."""
    program = Path(sys.base_prefix) / "bin" / f"python{VERSION}"
    modules = [path for path in _standard_library().glob("lib-dynload/*.so") if not path.name.startswith("_tkinter.")]
    linked = _run("ldd", str(program), *(str(path) for path in modules))
    paths = sorted(set(re.findall(r"=> (/(?:usr/)?lib/\S+)", linked)))
    listed = subprocess.run(["dpkg-query", "--search", *paths], capture_output=True, text=True, check=False).stdout
    missed = [path for path in paths if path not in listed]
    if missed:  # dpkg knows a file by the path in its package: /lib has become a link to /usr/lib
        others = [path.removeprefix("/usr") if path.startswith("/usr") else f"/usr{path}" for path in missed]
        listed += _run("dpkg-query", "--search", *others)
    return sorted({line.partition(":")[0] for line in listed.splitlines() if ": " in line})


def _pip_configuration() -> str:
    """The index that this machine installs from, and the authorities that it trusts."""
    names = {"index-url": "PIP_INDEX_URL", "trusted-host": "PIP_TRUSTED_HOST", "timeout": "PIP_DEFAULT_TIMEOUT"}
    options = {name: os.environ[variable] for name, variable in names.items() if variable in os.environ}
    lines = [f"{name} = {value}" for name, value in {"cert": str(CERTIFICATES), **options}.items()]
    return "\n".join(["[global]", *lines, ""])


def _make_slim(root: Path) -> None:
    for name in UNUSED:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir(parents=True)
    for folder in list((root / "usr").rglob("__pycache__")):
        shutil.rmtree(folder)
    (root / "etc/apt/apt.conf.d/docker-clean").write_text(NO_CACHES)


def _run(*command: str) -> str:
    """Raises Misconfigured with the last line of the error."""
    try:
        late = f"{command[0]} did not end within {SECONDS} s"
        done = run(command, seconds=SECONDS, late=late, environment=NO_QUESTIONS)
    except FileNotFoundError as error:
        raise Misconfigured(f"{command[0]} is not there: this needs a Debian machine") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise Misconfigured(f"{command[0]} failed: {' / '.join(lines[-3:])[:600]}")
    return done.stdout
