"""docker-compose.yml as Docker Compose itself reads it (`docker compose config`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local import compose
from tests.support.deploy.deploy_kit import DEPLOY, ROOT

FILE = ROOT / "docker-compose.yml"


def config(file: Path, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """With the example's variables, and a value for each password."""
    example = (DEPLOY / "image/example.env").read_text()
    (tmp_path / "env").write_text(re.sub(r"^(\w+_PASSWORD)=$", r"\1=given", example, flags=re.M))
    given = (f"--project-directory={ROOT}", f"--env-file={tmp_path / 'env'}", f"--file={file}", "--profile=*")
    return subprocess.run(
        [compose.require(), *given, "config", *options],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_compose_accepts_the_file_without_a_warning(tmp_path: Path) -> None:
    done = config(FILE, tmp_path, "--format=json")
    assert (done.returncode, done.stderr) == (0, "")
    services: dict[str, Any] = json.loads(done.stdout)["services"]
    assert services.keys() == yaml.safe_load(FILE.read_text())["services"].keys()


def test_every_service_of_our_image_can_build_it(tmp_path: Path) -> None:
    """`docker compose up -d --build` looked for its own image in a registry first, and one service alone failed."""
    services: dict[str, Any] = json.loads(config(FILE, tmp_path, "--format=json").stdout)["services"]
    ours = {name: service.get("build") for name, service in services.items() if service["image"].startswith("penstock")}
    assert len(ours) > 10
    assert {json.dumps(build, sort_keys=True) for build in ours.values()} == {
        json.dumps(ours["migrate"], sort_keys=True)
    }
    assert ours["migrate"]["dockerfile"] == "deploy/Dockerfile"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("restart: on-failure", "restrat: on-failure"), ("condition: service_healthy", "condition: fine")],
)
def test_compose_refuses_a_misspelt_key_or_value(right: str, wrong: str, tmp_path: Path) -> None:
    changed = tmp_path / "docker-compose.yml"
    changed.write_text(FILE.read_text().replace(right, wrong, 1))
    assert config(changed, tmp_path, "--quiet").returncode != 0


def test_a_missing_password_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [compose.require(), f"--file={FILE}", "--env-file=/dev/null", "config", "--quiet"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert "see deploy/image/example.env" in done.stderr
