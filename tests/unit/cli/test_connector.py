"""Options of ``penstock connector``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.connector import connector
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
