"""Kubernetes' own programs, built with Go: ``python -m deploy.cluster.programs [NAME …]`` makes them ready.

The versions and hashes of all sources are in ``tools/`` and ``score/`` (go.mod, go.sum), two modules because kube-score
needs an older version of Kubernetes' types. What was built is kept until one of these files changes. The first build of
kube-apiserver takes a quarter of an hour on one processor; the others share most of its packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.local.lock import exclusive
from deploy.local.tools import run, show
from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings

HERE = Path(__file__).parent
BUILD_SECONDS = 3 * 3600
"""For the slowest machine on which somebody waits for it; seen: 22 minutes on a busy processor."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program and the package of Go that it is."""

    name: str
    module: str
    """The folder of the module that pins it."""
    package: str


PROGRAMS = {
    program.name: program
    for program in (
        Program("kube-apiserver", "tools", "k8s.io/kubernetes/cmd/kube-apiserver"),
        Program("kubectl", "tools", "k8s.io/kubernetes/cmd/kubectl"),
        Program("etcd", "tools", "go.etcd.io/etcd/server/v3"),
        Program("helm", "tools", "helm.sh/helm/v4/cmd/helm"),
        Program("kube-score", "score", "github.com/zegl/kube-score/cmd/kube-score"),
    )
}


@dataclass(frozen=True, slots=True)
class Definitions:
    """Custom resource definitions out of a module of Go."""

    module: str
    version: str
    hash: str
    files: tuple[str, ...]


DEFINITIONS = (
    Definitions(
        "github.com/kedacore/keda/v2",
        "v2.21.0",
        "h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps=",
        ("config/crd/bases/keda.sh_scaledobjects.yaml", "config/crd/bases/keda.sh_triggerauthentications.yaml"),
    ),
    Definitions(
        "github.com/cilium/cilium",
        "v1.20.2",
        "h1:dqiEGIcXc+gqCLYG/l7VCFJ8GHyb4HUrwbZOpkX5dL8=",
        ("pkg/k8s/apis/cilium.io/client/crds/v2/ciliumnetworkpolicies.yaml",),
    ),
)


def kubernetes_version() -> str:
    """The version of the API server, such as ``v1.37.2``."""
    match = re.search(
        r"^require k8s\.io/kubernetes (v\S+)$|^\tk8s\.io/kubernetes (v\S+)$", _pins("tools"), re.MULTILINE
    )
    assert match is not None
    return match[1] or match[2]


def find(name: str) -> Path | None:
    """The program, if it is built from today's pins."""
    path = _folder(PROGRAMS[name].module) / name
    return path if os.access(path, os.X_OK) else None


def require(name: str) -> Path:
    """The program, built now if need be. Raises Misconfigured with one line."""
    return find(name) or _build(PROGRAMS[name])


def definitions() -> list[Path]:
    """Files with the definitions of KEDA's and Cilium's objects. Raises Misconfigured."""
    return [path for pinned in DEFINITIONS for path in _fetched(pinned)]


def _cache() -> Path:
    return settings.dist() / "cluster"


def _pins(module: str) -> str:
    return (HERE / module / "go.mod").read_text() + (HERE / module / "go.sum").read_text()


def _folder(module: str) -> Path:
    return _cache() / f"{module}-{hashlib.sha256(_pins(module).encode()).hexdigest()[:12]}"


def _build(program: Program) -> Path:
    folder = _folder(program.module)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(_cache() / f"{program.name}.lock"), tempfile.TemporaryDirectory(dir=_cache()) as scratch:
        if (path := find(program.name)) is not None:
            return path  # another process was faster
        target = Path(scratch) / program.name
        version = f"-X k8s.io/component-base/version.gitVersion={kubernetes_version()}"
        options = ["-trimpath", "-buildvcs=false", f"-ldflags=-s -w {version}", "-o", str(target)]
        _go(["build", *options, program.package], HERE / program.module, BUILD_SECONDS)
        target.rename(folder / program.name)
    for replaced in _cache().glob(f"{program.module}-*"):
        if replaced != folder:
            shutil.rmtree(replaced, ignore_errors=True)
    return folder / program.name


def _fetched(pinned: Definitions) -> list[Path]:
    folder = _cache() / f"{pinned.module.replace('/', '-')}-{pinned.version}"
    paths = [folder / Path(name).name for name in pinned.files]
    if all(path.exists() for path in paths):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    module = f"{pinned.module}@{pinned.version}"
    fetched = json.loads(_go(["mod", "download", "-json", module], folder, 600))
    if fetched["Sum"] != pinned.hash:
        raise Misconfigured(f"{module} has the hash {fetched['Sum']}, not {pinned.hash}")
    for name, path in zip(pinned.files, paths, strict=True):
        path.write_bytes((Path(fetched["Dir"]) / name).read_bytes())
    return paths


def _go(arguments: list[str], folder: Path, seconds: float) -> str:
    """Run Go in a folder. Returns what it printed. Raises Misconfigured with its last line."""
    if shutil.which("go") is None:
        raise Misconfigured(
            "Kubernetes' programs are built with Go, which is not on the PATH: install Go 1.26 or later"
        )
    late = f"go {arguments[0]} did not end within {seconds:.0f} s"
    done = run(["go", *arguments], seconds=seconds, late=late, at=folder, environment={"CGO_ENABLED": "0"})
    if done.returncode != 0:
        raise Misconfigured(f"go {arguments[0]} failed: {(done.stderr.strip() or 'no output').splitlines()[-1][:300]}")
    return done.stdout


def look(*names: str) -> Iterator[tuple[str, Path]]:
    """Each program and where it is. Raises Misconfigured when one cannot be built."""
    for name in names or tuple(PROGRAMS):
        if name not in PROGRAMS:
            raise Misconfigured(f"{name} is none of {', '.join(PROGRAMS)}")
        yield name, require(name)


if __name__ == "__main__":
    sys.exit(show(lambda: look(*sys.argv[1:])))
