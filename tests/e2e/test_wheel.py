"""The wheel by itself, without the source tree: everything that it needs is in it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from pipeline.runtime.home import DEVELOPMENT_FILE
from pipeline.runtime.settings import dist
from tests.support.deploy.environments import outside_the_tree
from tests.support.deploy.wheels import PACKAGES, Installed, install, is_of_testing
from tests.support.query.http_kit import bearer
from tests.support.space import PROJECT, Space, now
from topics.messages import DocumentUpserted, IdentityChanged
from topics.registry import IDENTITIES

pytestmark = [pytest.mark.stack, pytest.mark.slow]

ELSEWHERE = ("tests", "bench", "docs", "examples")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory.mktemp("wheel"))


def run(installed: Installed, space: Space, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [installed.penstock, *arguments],
        env=environment(space),
        cwd=space.home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def environment(space: Space) -> dict[str, str]:
    """Return the environment of the installed command. It uses the files that are fetched and converted once, such as
    the local model, of the present one."""
    kept = {name: value for name, value in space.environment.items() if not name.startswith("PYTHON")}
    return {**kept, "PENSTOCK_DIST": str(dist()), "PENSTOCK_SERVE_DEVELOPMENT": "true"}


def test_the_wheel_contains_exactly_the_files_of_the_packages(installed: Installed) -> None:
    ours = {
        file.relative_to(PROJECT)
        for package in PACKAGES
        for file in (PROJECT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not is_of_testing(file.relative_to(PROJECT))
    }
    there = {
        file.relative_to(installed.packages)
        for package in PACKAGES
        for file in (installed.packages / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert there == ours
    assert not [name for name in ELSEWHERE if (installed.packages / name).exists()]


def test_the_image_finds_every_module_of_the_wheel(installed: Installed, tmp_path: Path) -> None:
    """A template in the wheel imported the contract suite, which the image does not contain, and nothing was built."""
    compiled = subprocess.run(
        [installed.python, PROJECT / "deploy" / "image" / "bytecode.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**outside_the_tree(), "PYTHONPYCACHEPREFIX": str(tmp_path / "cache"), "PENSTOCK_HOME": str(tmp_path)},
        timeout=240,
    )
    assert compiled.returncode == 0, compiled.stderr[-2000:]
    assert "not in the image: penstock_testing" in compiled.stdout


async def test_the_installed_wheel_runs_without_the_source_tree(installed: Installed, space: Space) -> None:
    where = subprocess.run(
        [installed.python, "-c", "import pipeline, query; print(pipeline.__file__, query.__file__)"],
        cwd=space.home,
        env=environment(space),
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(PROJECT) + os.sep not in where.stdout, "the source tree is not used"
    assert run(installed, space, "--version").stdout == f"penstock {installed.version}\n"
    for command in ("--help", "migrate --help", "worker --help", "dead --help", "audit --help"):
        output = run(installed, space, *command.split())
        assert output.returncode == 0, f"{command}: {output.stderr}"
        assert "Usage: penstock" in output.stdout
    migrated = run(installed, space, "migrate")
    assert (migrated.returncode, migrated.stdout) == (0, "Everything is up to date.\n"), migrated.stderr

    await asyncio.to_thread(start_from, installed, space, "detect", "vectors", "keywords")
    page = DocumentUpserted(
        tenant="default",
        source="wiki",
        external_id="wheel.md",
        observed_at=now(),
        version=1,
        title="Wheels",
        content="# Wheels\n\nA heron was painted on every wheel.\n",
        media_type="text/markdown",
        acl_tags=("readers",),
    )
    ann = IdentityChanged(tenant="default", source="wiki", principal="ann", observed_at=now(), groups=["readers"])
    await space.publish(ann, topic=IDENTITIES)
    await space.publish(page)
    await space.settled([page])
    process = await asyncio.create_subprocess_exec(
        installed.penstock,
        "serve",
        "--port",
        "0",
        env=environment(space),
        cwd=space.home,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        url = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1]
        async with httpx.AsyncClient(
            base_url=url, headers=bearer(space.home / DEVELOPMENT_FILE), timeout=60, trust_env=False
        ) as client:
            async with asyncio.timeout(60):  # who is in which group comes by a topic of its own
                results: list[str] = []
                while not results:
                    answer = await client.post(
                        "/v1/search", json={"query": "heron on a wheel"}, headers={"X-Penstock-As": "ann"}
                    )
                    assert answer.status_code in (200, 503), answer.text
                    results = [result["external_id"] for result in answer.json().get("results", ())]
            assert results == ["wheel.md"]
            start = await client.get("/")
            assert start.status_code == 200
            assert "<title>" in start.text
            assert (await client.get("/openapi.json")).status_code == 200
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


def start_from(installed: Installed, space: Space, *names: str) -> None:
    space.start(
        *names, python=str(installed.python), program=("-P", "-m", "cli.main"), env={"PENSTOCK_DIST": str(dist())}
    )
