"""Parts of others, in a distribution that is really built and installed."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploy.environments import UV, outside_the_tree, run
from tests.support.space import PROJECT

PARTS = PROJECT / "tests" / "support" / "plugins"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python in whose environment the distribution is installed, and which borrows Penstock and its libraries."""
    folder = tmp_path_factory.mktemp("plugins")
    wheels = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(*wheels, "--wheel-dir", str(folder), str(PARTS))
    run(str(UV), "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
    program = folder / "venv" / "bin" / "python"
    [wheel] = folder.glob("*.whl")
    run(str(UV), "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(program), str(wheel))
    [packages] = (folder / "venv" / "lib").glob("python3*/site-packages")
    (packages / "borrowed.pth").write_text(f"{PROJECT}\n{sysconfig.get_path('purelib')}\n")
    return str(program)


def result_of(python: str, program: str, folder: Path) -> Any:
    done = subprocess.run(
        [python, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**outside_the_tree(), "PENSTOCK_EXTRACTION_UNCONFINED": "allow"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.heavy
def test_a_source_of_an_installed_distribution_is_a_kind_like_the_built_in_ones(python: str, tmp_path: Path) -> None:
    (tmp_path / "connectors.toml").write_text('[connector.desk]\nkind = "acme-tickets"\nurl = "https://desk.acme"\n')
    program = """
import json
from pathlib import Path
from connectors.declared import load, source_class
from penstock.source import Context, Misconfigured
made = load(Path("connectors.toml")).plan("desk").make(Context(name="desk", tenant="t", memory=None, folder=Path(".")))
refused = []
for kind in ("acme-number", "acme-other"):
    try:
        source_class(kind)
    except Misconfigured as error:
        refused.append(str(error))
print(json.dumps([type(made).__module__, made.options.url, *refused]))
"""
    module, url, no_class, unknown = result_of(python, program, tmp_path)
    assert (module, url) == ("acme_parts", "https://desk.acme")
    assert no_class == (
        "kind 'acme-number': its entry point is no class that implements a source (penstock.source.Source)"
    )
    assert "one of acme-number, acme-tickets, airbyte" in unknown


@pytest.mark.heavy
def test_a_reranker_of_an_installed_distribution_orders_passages(python: str, tmp_path: Path) -> None:
    program = """
import asyncio, json
from query.rerank.guarded import open_reranker
from query.settings import RerankSettings
from pipeline.core.errors import Misconfigured
async def main():
    reranker = await open_reranker(RerankSettings(plugin="by-length"))
    scores = list(await reranker.rerank("q", ["aa", "a"], tenant="t"))
    await reranker.aclose()
    refused = []
    for settings in (RerankSettings(plugin="absent"), RerankSettings(plugin="other"),
                     RerankSettings(plugin="by-length", url="http://127.0.0.1:9/rerank")):
        try:
            await open_reranker(settings)
        except Misconfigured as error:
            refused.append(str(error))
    return [reranker.model, scores, *refused]
print(json.dumps(asyncio.run(main())))
"""
    model, scores, absent, other, both = result_of(python, program, tmp_path)
    assert (model, scores) == ("by-length", [2.0, 1.0])
    assert absent.startswith("'absent' in the group penstock.rerankers: acme_parts.nowhere:Absent cannot be imported")
    assert other == (
        "no installed distribution offers 'other' in the group penstock.rerankers (offered: absent, by-length)"
    )
    assert both == "PENSTOCK_RERANK_URL and PENSTOCK_RERANK_PLUGIN are both set: choose one"


@pytest.mark.heavy
def test_an_extractor_of_an_installed_distribution_reads_its_format_in_the_confined_process(
    python: str, tmp_path: Path
) -> None:
    (tmp_path / "a.shout").write_text("PUMPS\n")
    (tmp_path / "b.SHOUT").write_text("quiet\n")
    (tmp_path / "c.pdf").write_text("PUMPS, AND NO PDF\n")
    program = """
import asyncio, json
from pathlib import Path
from connectors.extract import extract
from penstock.source import UnreadableFile, extract_file
async def main():
    read = await extract_file(Path("a.shout"), "a.shout")
    try:
        await extract_file(Path("b.SHOUT"), "b.SHOUT")
    except UnreadableFile as error:
        refused = [error.code, str(error)]
    own = await extract_file(Path("c.pdf"), "c.pdf")
    return [read.text, read.title, read.metadata, refused, own.text, extract(b"PUMPS", "d.shout").text]
print(json.dumps(asyncio.run(main())))
"""
    assert result_of(python, program, tmp_path) == [
        *("pumps\n", "Shouted", {"pages": 1}, ["broken", "is not shouted"]),
        *("PUMPS, AND NO PDF\n", "pumps"),
    ]
