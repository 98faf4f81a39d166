"""The Prometheus of the tests, and the message if there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local import prometheus
from deploy.local.tools import show
from pipeline.core.errors import Misconfigured


def make(folder: Path, name: str, text: str = "") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is on the PATH but what stands in this folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}")
    monkeypatch.setenv("PENSTOCK_DIST", str(tmp_path / "dist"))
    monkeypatch.delenv("PENSTOCK_PROMETHEUS", raising=False)
    return folder


def test_a_prometheus_named_by_the_environment_precedes_the_path_and_the_unpacked_one(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = make(tmp_path / "dist" / "prometheus" / "usr" / "bin", "promtool")
    assert prometheus.require("promtool") == unpacked
    on_path = make(bare, "promtool")
    assert prometheus.require("promtool") == on_path
    named = make(tmp_path / "mine", "promtool")
    monkeypatch.setenv("PENSTOCK_PROMETHEUS", str(tmp_path / "mine"))
    assert prometheus.require("promtool") == named


def test_a_prometheus_named_by_the_environment_that_is_missing_is_misconfigured(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(bare, "promtool")
    monkeypatch.setenv("PENSTOCK_PROMETHEUS", str(tmp_path))
    with pytest.raises(Misconfigured, match=r"PENSTOCK_PROMETHEUS names .* where there is no promtool"):
        prometheus.require("promtool")


def test_a_missing_prometheus_without_debian_is_reported_with_what_to_do(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(prometheus.look) == 1
    assert capsys.readouterr().err.startswith("error: no prometheus was found: `apt-get install prometheus`")


def test_an_error_of_apt_get_is_reported(bare: Path, tmp_path: Path) -> None:
    make(bare, "dpkg")
    make(bare, "apt-get", "echo 'E: Unable to locate package prometheus' >&2; exit 100")
    with pytest.raises(Misconfigured, match="failed: E: Unable to locate package prometheus"):
        prometheus.require("promtool")
    assert not list((tmp_path / "dist").glob("tmp*"))
