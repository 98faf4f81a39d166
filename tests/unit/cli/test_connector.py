"""Options of ``penstock connector``."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.connector import check, connector
from pipeline.core.errors import Misconfigured


@pytest.mark.parametrize(("options", "tenant"), [((), "acme"), (("--tenant", "other"), "other")])
def test_a_connector_is_removed_from_the_tenant_that_its_file_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], tenant: str
) -> None:
    @asynccontextmanager
    async def wire() -> AsyncIterator[tuple[None, None]]:
        yield None, None

    async def tenant_of(_pool: None, _name: str, tenant: str | None) -> str:
        raise Misconfigured(f"the tenant is {tenant}")

    monkeypatch.setattr("cli.withdraw.wire", wire)
    monkeypatch.setattr("connectors.withdraw.tenant_of", tenant_of)
    file = tmp_path / "elsewhere.toml"
    file.write_text('[connector.desk]\nkind = "confluence"\ntenant = "acme"\n')
    done = CliRunner().invoke(connector, ["remove", "desk", "--file", str(file), *options])
    assert str(done.exception) == f"the tenant is {tenant}"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_check_prints_a_traceback_on_a_terminal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    """Its text may quote what the source holds, and what is no terminal is kept: by cron, or in a log."""

    async def check_all(*_: object, on_fault: Callable[[BaseException], None]) -> dict[str, list[str]]:
        on_fault(KeyError("the salary of Ann"))
        return {"desk": []}

    monkeypatch.setattr("connectors.operate.check_all", check_all)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    file = tmp_path / "connectors.toml"
    file.write_text('[connector.desk]\nkind = "confluence"\n')
    check(name=None, file=file, json_output=False)
    assert ("the salary of Ann" in capsys.readouterr().err) == is_terminal
