"""Checks of every deployment file: the code must know the names in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import query.settings
from cli.main import app
from connectors.declared import VARIABLE
from connectors.extraction.settings import ExtractionSettings
from connectors.uploads.options import UploadsQuota
from pipeline.runtime import settings
from pipeline.runtime.credentials import SECRETS_DIR

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
BESIDE_SETTINGS = {"PENSTOCK_HOME", "PENSTOCK_DIST", "PENSTOCK_PRODUCERS", SECRETS_DIR, VARIABLE}
"""Read from the environment without a part of the settings."""
STOP_SECONDS = 28.0


@cache
def known_variables() -> frozenset[str]:
    """Every environment variable that a part of the settings reads."""
    whole = (settings.Settings, query.settings.QuerySettings)  # made of parts
    parts = [*(part for part in settings.Part.__subclasses__() if part not in whole), ExtractionSettings]
    assert len(parts) > 10
    named = {f"{part.model_config['env_prefix']}{field}".upper() for part in parts for field in part.model_fields}  # type: ignore[attr-defined]
    return frozenset(named | BESIDE_SETTINGS)


def unknown(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("PENSTOCK_") and name not in known_variables())


def assert_settings_take(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All settings load with these values."""
    with monkeypatch.context() as patch:
        for name in known_variables():
            patch.delenv(name, raising=False)
        patch.setenv("PENSTOCK_HOME", "nowhere")
        for name, value in environment.items():
            patch.setenv(name, value)
        settings.load()
        query.settings.load()
        ExtractionSettings()
        UploadsQuota.load()


def assert_is_a_command(arguments: list[str]) -> None:
    """``penstock ARGUMENTS`` is a command, and a worker that there is."""
    name, *rest = arguments
    group = get_command(app)
    command = group.get_command(group.make_context("penstock", [name]), name)  # type: ignore[attr-defined]
    assert command is not None, f"no command {name}"
    if isinstance(command, TyperGroup):
        command = command.commands[rest.pop(0)]
    if name == "worker":
        assert rest[0] in {"detect", "vectors", "keywords", "analysis", "connectors", "canary"}
    for option in (word for word in rest if word.startswith("--")):
        assert any(option in parameter.opts for parameter in command.params), f"{name} has no {option}"


def interpolated(text: str, given: Mapping[str, str]) -> str:
    """As Compose does it: ``${NAME}``, ``${NAME:-default}``, ``${NAME:?message}``."""

    def value(results: re.Match[str]) -> str:
        name, operator, rest = results.groups()
        return given.get(name) or (rest if operator == ":-" else "")

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", value, text)
