"""Decisions of `make engines` that need no engine: stand-ins, when a container is as it should be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.engines import images
from deploy.engines.stack import _what_is_missing, write_settings
from tests.support.deploy.deploy_kit import ROOT

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def test_every_third_party_image_but_grafana_has_a_stand_in_that_the_override_names() -> None:
    assert set(images.third_party(SERVICES).values()) - set(images.STAND_INS) == {"grafana/grafana"}
    changed = images.override(SERVICES, stand_ins=True)["services"]
    assert changed["kafka"] == {"image": "penstock-stand-in/kafka", "pull_policy": "never"}
    assert changed["detect"]["build"]["args"] == {"PYTHON": images.PYTHON_TAG}
    assert images.left_out(SERVICES, stand_ins=True) == ["grafana"]


def test_pulled_images_are_used_as_they_are_named() -> None:
    changed = images.override(SERVICES, stand_ins=False)["services"]
    assert "kafka" not in changed
    assert changed["detect"] == {"build": {"network": "host"}}
    assert images.left_out(SERVICES, stand_ins=False) == []


@pytest.mark.parametrize("name", images.STAND_INS)
def test_a_stand_in_copies_only_files_and_contexts_that_there_are(name: str) -> None:
    stand_in = images.STAND_INS[name]
    folder = Path(images.__file__).parent / "stand_ins" / stand_in.folder
    text = (folder / "Dockerfile").read_text()
    assert set(re.findall(r"^COPY --from=(\w+)", text, re.M)) == set(stand_in.contexts)
    assert all((folder / file).stat().st_mode & 0o111 for file in re.findall(r"^COPY (\w\S+) ", text, re.M))


def container(status: str, code: int = 0, health: str | None = None) -> dict[str, Any]:
    state = {"Status": status, "Running": status == "running", "ExitCode": code}
    if health is not None:
        state["Health"] = {"Status": health}
    return {"State": state, "Config": {"Labels": {"com.docker.compose.service": "it"}}}


@pytest.mark.parametrize(
    ("state", "missing"),
    [
        (container("running", health="healthy"), ""),
        (container("exited"), ""),
        (container("exited", 1), "it is exited (1)"),
        (container("running"), "it is running"),
        (container("running", health="starting"), "it is starting"),
        (container("exited", health="healthy"), "it is exited"),
    ],
)
def test_a_service_is_ready_when_healthy_and_a_step_when_it_ended_well(state: dict[str, Any], missing: str) -> None:
    assert _what_is_missing(state) == missing


def test_the_settings_of_a_run_have_new_passwords_that_only_root_can_read(tmp_path: Path) -> None:
    key = write_settings(tmp_path / "one")
    assert key != write_settings(tmp_path / "two")
    env = tmp_path / "one/env"
    assert env.stat().st_mode & 0o777 == 0o600
    passwords = re.findall(r"^\w+_PASSWORD=(.*)$", env.read_text(), re.M)
    assert len(set(passwords)) == len(passwords) > 10
    assert key not in (tmp_path / "one/keys.toml").read_text()
