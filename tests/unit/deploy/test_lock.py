"""requirements/*.txt: what is installed, by hashes. A wrong one is refused by pip itself."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from deploy import lock
from tests.support.space import PROJECT

FILES = {file.stem: file.read_text() for file in lock.FOLDER.glob("*.txt")}
KNOWN = lock.pins(lock.CONSTRAINTS.read_text()) | {lock.name(pin): pin for pin in lock.ALONE}


def test_the_requirements_files_contain_exactly_the_pins_of_constraints_txt() -> None:
    assert set(FILES) == {"image", "model", "build", "develop"}
    together = [lock.pins(text) for name, text in FILES.items() if name != "build"]
    assert sum(map(len, together)) == len(set().union(*together)), "a package stands in two files"
    locked = {name: pin for text in FILES.values() for name, pin in lock.pins(text).items()}
    assert locked == KNOWN, "constraints.txt and requirements/ disagree: run python -m deploy.lock"


def test_every_dependency_of_pyproject_toml_is_pinned_in_its_requirements_file() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    image, model, build = (set(lock.pins(FILES[name])) for name in ("image", "model", "build"))
    assert {lock.name(line) for line in lock.requirements(project["project"], *lock.IMAGE_EXTRAS)} <= image
    assert set(lock.MODEL_EXTRAS) <= image | model
    assert {lock.name(line) for line in project["build-system"]["requires"]} <= build
    everything = {lock.name(line) for line in lock.requirements(project["project"], *extras)}
    assert everything <= set(KNOWN), "pin it in constraints.txt, then python -m deploy.lock"


def test_an_extra_of_extras_has_the_requirements_of_them_all() -> None:
    extras = {"a": ["penstock[b, c]", "one>=1"], "b": ["two"], "c": ["penstock[b]", "three[x]==3"], "d": ["four"]}
    project = {"name": "penstock", "dependencies": ["zero"], "optional-dependencies": extras}
    assert sorted(lock.requirements(project, "a")) == ["one>=1", "three[x]==3", "two", "zero"]
    assert lock.requirements(project) == ["zero"]


def test_an_upgrade_keeps_the_constraints_that_uv_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --quiet and -o, uv writes the file and prints nothing: what it printed replaced the file."""

    def compiled(requirements: Iterable[str], *options: str) -> str:
        if "-o" in options:
            Path(options[1]).write_text("pump==2.0\n")
        return "\n".join(requirements) if "--generate-hashes" in options else ""

    monkeypatch.setattr(lock, "resolve", compiled)
    monkeypatch.setattr(lock, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(lock, "FOLDER", tmp_path / "requirements")
    assert lock.main("--upgrade", "pump") == 0
    assert lock.CONSTRAINTS.read_text() == "pump==2.0\n"
    assert (lock.FOLDER / "develop.txt").read_text() == "pump==2.0\n"


def test_a_file_that_was_added_to_a_locked_version_later_is_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package's publisher may add a file to a version of years ago, and pip may prefer it."""
    index = {"pump": "pump==1.0 \\\n    --hash=sha256:aa", "valve": "valve==3.0 \\\n    --hash=sha256:bb"}

    def compiled(requirements: Iterable[str], *options: str) -> str:
        named = requirements if "--generate-hashes" in options else ()
        return "\n".join(index.get(lock.name(line), line) for line in named)

    monkeypatch.setattr(lock, "resolve", compiled)
    monkeypatch.setattr(lock, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(lock, "FOLDER", tmp_path / "requirements")
    lock.CONSTRAINTS.write_text("pump==1.0\nvalve==3.0\n")
    assert lock.main() == 0
    index["pump"] += " \\\n    --hash=sha256:cc"
    index["valve"] = "valve==4.0 \\\n    --hash=sha256:dd"
    lock.CONSTRAINTS.write_text("pump==1.0\nvalve==4.0\n")
    capsys.readouterr()
    assert lock.main() == 0
    written = (lock.FOLDER / "develop.txt").read_text()
    assert written == "pump==1.0 \\\n    --hash=sha256:aa\nvalve==4.0 \\\n    --hash=sha256:dd\n"
    assert [line.split(" in the index")[0] for line in capsys.readouterr().err.splitlines()] == [
        "warning: the files of pump==1.0"
    ]


def test_every_pin_has_hashes_and_no_url() -> None:
    for text in FILES.values():
        blocks = re.split(r"\n(?=\S)", text.strip())
        assert all(re.fullmatch(r"[\w.-]+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", block) for block in blocks)


def test_setup_and_the_image_install_nothing_without_a_hash() -> None:
    makefile, dockerfile = (PROJECT / "Makefile").read_text(), (PROJECT / "deploy/Dockerfile").read_text()
    [setup] = re.findall(r"^\t\$\(PIP\) (.*requirements.*)$", makefile, re.M)
    assert set(re.findall(r"(\w+)\.txt", setup)) == set(FILES)
    assert "--no-deps" in makefile.split("PIP :=")[1].splitlines()[0]
    assert "--require-hashes --only-binary=:all:" in setup
    assert 'INSTALL="install --require-hashes --only-binary=:all: --no-deps --no-compile"' in dockerfile
    installs = re.findall(r"pip (?:--python \S+ )?(install .*|\$INSTALL .*|wheel .*)", dockerfile)
    assert all(line.startswith("$INSTALL") or "--no-deps" in line for line in installs)


@pytest.mark.heavy
@pytest.mark.parametrize("changed", [False, True])
def test_pip_refuses_a_package_whose_hash_changed(tmp_path: Path, changed: bool) -> None:
    wheel = tmp_path / "index" / "pump-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as zipped:
        zipped.writestr("pump.py", "")
        zipped.writestr("pump-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pump\nVersion: 1.0\n")
        zipped.writestr("pump-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        zipped.writestr("pump-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "image.txt").write_text(f"pump==1.0 \\\n    --hash=sha256:{digest}\n")
    if changed:
        with zipfile.ZipFile(wheel, "a") as zipped:
            zipped.writestr("more.py", "")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--require-hashes", "--only-binary=:all:", "--no-index", "--find-links", str(wheel.parent)),
            *("--target", str(tmp_path / "target"), "-r", str(tmp_path / "image.txt")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (tmp_path / "target" / "pump.py").exists() is not changed
    assert (done.returncode != 0) is changed
    assert ("DO NOT MATCH" in done.stderr) is changed
