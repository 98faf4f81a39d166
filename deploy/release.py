"""``python -m deploy.release FOLDER``: what a release consists of, made from the commit that is checked out.

Two builds of one commit are byte for byte the same, wherever, whenever and under whichever umask, locale and time zone
they are made, with the versions of requirements/. docs/release.md says how a user verifies one.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from deploy.local.maven import sha256
from deploy.version import ROOT, current, stale
from pipeline.core.errors import Misconfigured, PenstockError

SUMS = "SHA256SUMS"
DESCRIPTION = "A streaming ingestion pipeline that keeps a company's knowledge searchable"


def release(folder: Path, *, with_image: bool, allow_dirty: bool = False, root: Path = ROOT) -> list[Path]:
    """Make all parts in ``folder``, whose content is replaced; returns the files. Raises Misconfigured where something
    that is needed is missing, before anything is changed."""
    commit = _git(root, "rev-parse", "HEAD")
    if not allow_dirty and _git(root, "status", "--porcelain"):
        raise Misconfigured("there are uncommitted changes, and a release is made from a commit: commit them first")
    if with_image and not _has_engine():
        raise Misconfigured("no container engine answers here (docker with buildx): --no-image leaves the image out")
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _git(root, "log", "-1", "--format=%ct", commit))
    with tempfile.TemporaryDirectory() as made:
        tree, parts = Path(made) / "tree", Path(made) / "parts"
        parts.mkdir()
        _export(root, commit, tree)
        if files := stale(tree):
            raise Misconfigured(f"{files[0]} holds another version than pyproject.toml: run python -m deploy.version")
        version = current(tree)
        _distributions(tree, parts, epoch)
        chart(tree / "deploy" / "chart", parts / f"penstock-{version}.tgz", epoch)
        _run(tree, epoch, sys.executable, "-m", "deploy.sbom", str(parts / f"penstock-{version}.cdx.json"))
        if with_image:
            image(tree, parts / f"penstock-{version}.oci.tar", version, commit, epoch)
        (parts / SUMS).write_text("".join(f"{sha256(file)}  {file.name}\n" for file in sorted(parts.iterdir())))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return [Path(shutil.copy(file, folder)) for file in sorted(parts.iterdir())]


def chart(source: Path, target: Path, epoch: int) -> None:
    """The chart as ``helm package`` would make it, but for the times, owners and order of its files."""
    with (
        target.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(f"penstock/{path.relative_to(source).as_posix()}")
            content = path.read_bytes()
            entry.size, entry.mtime, entry.mode = len(content), epoch, 0o644
            archive.addfile(entry, io.BytesIO(content))


def image(tree: Path, target: Path, version: str, commit: str, epoch: int) -> None:
    """The image as an OCI archive. What Debian's archive has changed since is changed in it, too."""
    labels = {
        "org.opencontainers.image.title": "penstock",
        "org.opencontainers.image.description": DESCRIPTION,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.revision": commit,
    }
    output = f"type=oci,dest={target},name=penstock:{version},rewrite-timestamp=true"
    _run(
        tree,
        epoch,
        *("docker", "buildx", "build", "--file", "deploy/Dockerfile", "--provenance=false", "--sbom=false"),
        *("--build-arg", f"SOURCE_DATE_EPOCH={epoch}", "--output", output),
        *(word for name, value in labels.items() for word in ("--label", f"{name}={value}")),
        ".",
    )


def _has_engine() -> bool:
    try:
        return subprocess.run(["docker", "buildx", "inspect"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _distributions(tree: Path, parts: Path, epoch: int) -> None:
    build = (sys.executable, "-m", "hatchling", "build", "-d", str(parts))
    _run(tree, epoch, *build, "-t", "sdist", "-t", "wheel")
    _run(tree / "packages" / "testing", epoch, *build, "-t", "wheel")


def _export(root: Path, commit: str, tree: Path) -> None:
    """The files of the commit, and nothing that only this folder has."""
    packed = subprocess.run(
        ["git", "-C", str(root), "-c", "tar.umask=0022", "archive", "--format=tar", commit],
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tree, filter="tar")


def _run(folder: Path, epoch: int, *command: str) -> None:
    """Run a program in an environment that has no influence. Raises PenstockError with what it says."""
    fixed = {"SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **fixed, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        umask=0o022,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it says nothing"]
        raise PenstockError(f"{' '.join(command[:4])} … failed: {said[0]}")


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Misconfigured(f"{root} is no checkout of git: a release is made from a commit") from error
    return done.stdout.strip()


def main(
    folder: Annotated[Path, typer.Argument(help="Where the parts are written; its content is replaced.")],
    with_image: Annotated[bool, typer.Option("--image/--no-image", help="Build the image, with docker buildx.")] = True,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Make it although there are uncommitted changes, without them.")
    ] = False,
) -> None:
    """Make wheels, sdist, chart, bill of materials, image and checksums of the commit that is checked out."""
    try:
        files = release(folder, with_image=with_image, allow_dirty=allow_dirty)
    except PenstockError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    for file in files:
        typer.echo(f"{sha256(file)[:16]}  {file.stat().st_size:>12,}  {file.name}")
    if not with_image:
        typer.echo("The image was left out (--no-image).", err=True)


if __name__ == "__main__":
    typer.run(main)
