"""A release: two builds are byte for byte the same, its parts fit together, and the version stands in one place."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from deploy.cluster import programs
from deploy.release import SUMS, chart
from deploy.version import ROOT, current

HISTORY = {"CHANGELOG.md", "docs/upgrade.md", "bench/results/peers.json"}
"""Files that name versions of the past."""
WHEN = "2026-02-03T04:05:06+00:00"


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.com", "-c", "commit.gpgsign=false")
    done = run(folder, "git", *who, *arguments, GIT_AUTHOR_DATE=WHEN, GIT_COMMITTER_DATE=WHEN)
    assert done.returncode == 0, done.stderr


def checkout(folder: Path, *, umask: int) -> Path:
    """This tree, changes included, as a commit of a checkout of its own. Nothing of its files' modes and times is the
    same as elsewhere."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    before = os.umask(umask)
    try:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)
                if os.access(ROOT / name, os.X_OK):
                    (folder / name).chmod(0o777 & ~umask)
        git(folder, "init", "--quiet")
        git(folder, "add", "--all", "--force")
        git(folder, "commit", "--quiet", "--message", "all")
    finally:
        os.umask(before)
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("first"), umask=0o022)


@pytest.fixture(scope="module")
def parts(first: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The parts of a release by name, without the image."""
    folder = tmp_path_factory.mktemp("dist") / "dist"
    made = run(first, sys.executable, "-m", "deploy.release", str(folder), "--no-image", TZ="UTC", LC_ALL="C")
    assert made.returncode == 0, made.stderr
    return {file.name: file for file in folder.iterdir()}


@pytest.mark.slow
def test_a_second_build_elsewhere_under_another_umask_locale_and_time_zone_is_the_same_bytes(
    parts: dict[str, Path], tmp_path: Path
) -> None:
    second = checkout(tmp_path / "a longer path" / "second", umask=0o077)
    made = run(
        second,
        "bash",
        "-c",
        f"umask 077; exec {sys.executable} -m deploy.release ../dist --no-image",
        TZ="Asia/Tokyo",
        LC_ALL="tr_TR.UTF-8",
        LANG="tr_TR.UTF-8",
        PYTHONHASHSEED="7",
    )
    assert made.returncode == 0, made.stderr
    again = {file.name: file.read_bytes() for file in (second.parent / "dist").iterdir()}
    assert again.keys() == parts.keys()
    assert [name for name in again if again[name] != parts[name].read_bytes()] == []


@pytest.mark.slow
def test_a_release_consists_of_these_parts_and_its_sums_are_right(parts: dict[str, Path]) -> None:
    version = current()
    assert set(parts) == {
        f"penstock-{version}-py3-none-any.whl",
        f"penstock-{version}.tar.gz",
        f"penstock_testing-{version}-py3-none-any.whl",
        f"penstock-{version}.tgz",
        f"penstock-{version}.cdx.json",
        SUMS,
    }
    sums = dict(line.split("  ")[::-1] for line in parts[SUMS].read_text().splitlines())
    assert sums == {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in parts.items() if name != SUMS}


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_is_the_released_wheel(parts: dict[str, Path], tmp_path: Path) -> None:
    version = current()
    with tarfile.open(parts[f"penstock-{version}.tar.gz"]) as archive:
        times = {member.mtime for member in archive}
        archive.extractall(tmp_path, filter="data")
    assert len(times) == 1
    made = run(
        tmp_path / f"penstock-{version}",
        sys.executable,
        *("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)),
        SOURCE_DATE_EPOCH=str(int(times.pop())),
    )
    assert made.returncode == 0, made.stderr
    wheel = f"penstock-{version}-py3-none-any.whl"
    assert (tmp_path / wheel).read_bytes() == parts[wheel].read_bytes()


@pytest.mark.slow
def test_the_chart_holds_the_files_of_the_repository_and_helm_reads_it(parts: dict[str, Path], tmp_path: Path) -> None:
    packed = parts[f"penstock-{current()}.tgz"]
    with tarfile.open(packed) as archive:
        names = [member.name for member in archive]
        assert {(member.uid, member.mode, member.uname) for member in archive} == {(0, 0o644, "")}
    source = ROOT / "deploy" / "chart"
    assert names == sorted(f"penstock/{file.relative_to(source)}" for file in source.rglob("*") if file.is_file())
    helm = programs.find("helm")
    if helm is None:
        pytest.skip("helm is built by make test-programs")
    shown = run(tmp_path, str(helm), "show", "chart", str(packed))
    assert f"version: {current()}\n" in shown.stdout, shown.stderr
    rendered = run(tmp_path, str(helm), "template", "penstock", str(packed))
    assert "kind: Deployment" in rendered.stdout, rendered.stderr


@pytest.mark.slow
def test_the_bill_of_materials_has_no_time_and_a_number_that_follows_from_its_content(parts: dict[str, Path]) -> None:
    bill = json.loads(parts[f"penstock-{current()}.cdx.json"].read_text())
    assert "timestamp" not in bill["metadata"]
    assert bill["metadata"]["component"]["version"] == current()
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f-]{21}", bill["serialNumber"])


@pytest.mark.slow
def test_uncommitted_changes_and_a_missing_engine_are_refused_before_anything_is_replaced(
    first: Path, tmp_path: Path
) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "before").touch()
    command = (sys.executable, "-m", "deploy.release", str(tmp_path / "dist"))
    (first / "new.txt").touch()
    try:
        dirty = run(first, *command, "--no-image")
    finally:
        (first / "new.txt").unlink()
    assert (dirty.returncode, dirty.stderr.startswith("error: there are uncommitted changes")) == (1, True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").symlink_to(shutil.which("git") or "")
    without = run(first, *command, PATH=str(tmp_path / "bin"))
    assert (without.returncode, without.stderr.startswith("error: no container engine answers")) == (1, True)
    assert [file.name for file in (tmp_path / "dist").iterdir()] == ["before"]


def test_a_chart_is_the_same_bytes_whatever_the_times_modes_and_order_of_its_files(tmp_path: Path) -> None:
    packed = []
    for n, order in enumerate((("Chart.yaml", "templates/a.yaml"), ("templates/a.yaml", "Chart.yaml"))):
        source = tmp_path / str(n)
        for file in order:
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_text(f"name: {file}\n")
            (source / file).chmod(0o600 + n)
            os.utime(source / file, (n, n))
        chart(source, tmp_path / f"{n}.tgz", 1_700_000_000)
        packed.append((tmp_path / f"{n}.tgz").read_bytes())
    assert packed[0] == packed[1]
    chart(source, tmp_path / "later.tgz", 1_700_000_001)
    assert (tmp_path / "later.tgz").read_bytes() != packed[0]


@pytest.mark.heavy
def test_a_bill_of_materials_is_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    bills = []
    for seed in ("1", "2"):
        made = run(
            ROOT, sys.executable, "-m", "deploy.sbom", str(tmp_path / seed), PYTHONHASHSEED=seed, TZ="Asia/Tokyo"
        )
        assert made.returncode == 0, made.stderr
        bills.append((tmp_path / seed).read_bytes())
    assert bills[0] == bills[1]


@pytest.mark.heavy
def test_the_version_stands_in_one_place_and_every_copy_is_written_from_it(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree", umask=0o022)
    set_to = run(tree, sys.executable, "-m", "deploy.version", "7.8.9")
    assert set_to.returncode == 0, set_to.stderr
    old = re.compile(rf"(?<![\d.]){re.escape(current())}(?![\d.])")
    left = [
        f"{file.relative_to(tree)}: {line.strip()[:100]}"
        for file in sorted(tree.rglob("*"))
        if file.is_file() and ".git" not in file.parts and str(file.relative_to(tree)) not in HISTORY
        for line in file.read_bytes().decode("utf-8", "replace").splitlines()
        if old.search(line) and "penstock" in line.lower()
    ]
    assert left == []
    changed = run(tree, "git", "diff", "--name-only").stdout.split()
    assert "deploy/chart/Chart.yaml" in changed
    assert "packages/typescript/package-lock.json" in changed
    run(tree, sys.executable, "-m", "deploy.version", current())
    assert run(tree, "git", "status", "--porcelain").stdout == "", "the copies of this tree are not written anew"
