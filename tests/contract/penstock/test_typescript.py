"""The TypeScript client: generated from docs/openapi.json, type-checked, and run on the real service."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.contract.penstock.conftest import QueryService
from tests.contract.penstock.test_examples import QUESTION, output
from tests.support.query.http_kit import TOKEN_FILE
from tests.support.query.typescript import PACKAGE, build, npm
from tests.support.space import PROJECT

pytestmark = pytest.mark.stack


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("typescript"))


def test_the_committed_types_equal_newly_generated_ones(package: Path) -> None:
    committed = PACKAGE / "src" / "openapi.ts"
    assert (package / "src" / "openapi.ts").read_text() == committed.read_text(), "stale: npm run generate"


def test_the_transport_retries_renews_and_reports_as_documented(package: Path) -> None:
    summary = npm(package, "test", "--ignore-scripts")  # which has been built
    assert "# fail 0" in summary
    assert "# skipped 0" in summary


@pytest.mark.asyncio(loop_scope="session")
async def test_the_example_is_type_checked_and_searches_and_asks(service: QueryService, package: Path) -> None:
    """As in a project that has installed the package."""
    project = package.parents[1] / "project"
    modules = project / "node_modules"
    modules.mkdir(parents=True)
    (modules / "penstock-client").symlink_to(package)
    (modules / "@types").symlink_to(package / "node_modules" / "@types")
    shutil.copy(PROJECT / "examples" / "ask.ts", project)
    (project / "package.json").write_text('{"type": "module"}')
    options = ("--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022", "--types", "node")
    await output("node", str(package / "node_modules" / "typescript" / "bin" / "tsc"), *options, "ask.ts", at=project)
    lines = (await output("node", "ask.js", service.url, str(TOKEN_FILE), QUESTION, at=project)).splitlines()
    assert lines[0].endswith("  Rules (https://wiki.example/harbour.md)")
    assert any(re.fullmatch(r"The harbour opens at nine\. \[\d]", line) for line in lines)
    assert any(re.fullmatch(r"\[\d] Rules, https://wiki\.example/harbour\.md", line) for line in lines)
    assert lines[-1].startswith("not-found: ")


def test_both_packages_have_one_version_and_the_lock_file_no_address() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    described = json.loads((PACKAGE / "package.json").read_text())
    locked = json.loads((PACKAGE / "package-lock.json").read_text())["packages"]
    assert (described["version"], described["license"]) == (project["version"], project["license"])
    assert [name for name, entry in locked.items() if "resolved" in entry or (name and "integrity" not in entry)] == []
    pins = {**described["dependencies"], **described["devDependencies"]}
    assert {name: locked[f"node_modules/{name}"]["version"] for name in pins} == pins
