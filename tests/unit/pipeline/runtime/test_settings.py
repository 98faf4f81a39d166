"""Settings that have a default in the state folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings
from pipeline.runtime.home import TRAIL_FILE, made_secret
from pipeline.runtime.settings import TrailSettings, load, misspelt


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_TRAIL_KEY", raising=False)
    return tmp_path


def test_the_key_of_the_trail_is_the_local_stacks_unless_one_is_set(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TrailSettings().key is None
    made_secret(home / TRAIL_FILE)
    key = TrailSettings().key
    assert key is not None
    assert key.get_secret_value() == (home / TRAIL_FILE).read_text().strip()
    monkeypatch.setenv("PENSTOCK_TRAIL_KEY", "x" * 32)
    assert TrailSettings().key.get_secret_value() == "x" * 32  # type: ignore[union-attr]
    monkeypatch.setenv("PENSTOCK_TRAIL_KEY", "")
    assert TrailSettings().key is None


def test_a_key_of_the_trail_that_others_can_read_is_refused(home: Path) -> None:
    made_secret(home / TRAIL_FILE)
    (home / TRAIL_FILE).chmod(0o644)
    with pytest.raises(Misconfigured, match="only its owner"):
        TrailSettings()


def test_a_misspelt_protection_is_reported_and_a_connectors_secret_is_not() -> None:
    set_ = ("PENSTOCK_PRODUCER", "PENSTOCK_TRIAL", "PENSTOCK_TRAIL", "PENSTOCK_WIKI_TOKEN", "PENSTOCK_HOME", "PATH")
    assert misspelt(set_) == {"PENSTOCK_PRODUCER": "PENSTOCK_PRODUCERS", "PENSTOCK_TRIAL": "PENSTOCK_TRAIL"}


@pytest.mark.parametrize("everybody", ['["0.0.0.0/0"]', '["10.0.0.1", "::/0"]'])
def test_a_network_of_all_addresses_is_no_trusted_proxy(
    home: Path, monkeypatch: pytest.MonkeyPatch, everybody: str
) -> None:
    monkeypatch.setenv("PENSTOCK_PORTS_TRUSTED_PROXIES", everybody)
    with pytest.raises(Misconfigured, match=r"TRUSTED_PROXIES.*every client would be a proxy"):
        load()
    monkeypatch.setenv("PENSTOCK_PORTS_TRUSTED_PROXIES", '["10.0.0.1", "10.20.4.0/28"]')
    assert load().ports.trusted_proxies == ("10.0.0.1", "10.20.4.0/28")


def test_a_secret_file_that_only_a_connector_reads_keeps_no_process_from_starting(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "PENSTOCK_WIKI_CERTIFICATE").write_bytes(b"\xff\xfe")
    (tmp_path / "PENSTOCK_TRIAL").write_text("required")
    monkeypatch.setenv("PENSTOCK_SECRETS_DIR", str(tmp_path))
    monkeypatch.setattr(settings, "_EXAMINED", set())
    with capture_logs() as logged:
        load()
        load()
    assert [(entry["event"], entry["name"]) for entry in logged] == [("setting_unknown", "PENSTOCK_TRIAL")]
