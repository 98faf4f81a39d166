"""The built wheels with one extra each, in a fresh environment: that part of Penstock runs on the real local stack.

Packages come from where this machine's pip and uv are configured to take them, in the pinned versions.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from deploy.local.stack import Stack
from pipeline.runtime.home import DEVELOPMENT_FILE, ENDPOINTS_FILE
from pipeline.runtime.settings import dist
from query.auth.authenticator import local_user
from tests.fakes.openai import FakeOpenAI
from tests.support.deploy.environments import UV, Environment, build, install, outside_the_tree, run
from tests.support.query.http_kit import bearer
from tests.support.space import PROJECT, Space, now
from topics.messages import DocumentUpserted, IdentityChanged
from topics.registry import IDENTITIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LARGEST_QUERY_MEGABYTES = 200
EXAMPLES = {"": "ask.py", "langchain": "ask_langchain.py", "llamaindex": "ask_llamaindex.py"}
"""Extra → the program that asks the query service with it and the base alone."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> dict[str, Environment]:
    folder = tmp_path_factory.mktemp("environments")
    extras = ("", "worker", "query", "connectors", "conform", "langchain", "llamaindex")
    return {
        extra: install(folder / (extra or "base"), wheels, f"penstock[{extra}]" if extra else "penstock")
        for extra in extras
    }


@asynccontextmanager
async def stored(stack: Stack, folder: Path) -> AsyncIterator[Space]:
    """A library whose model is served over HTTP, so that no part of Penstock needs the local one."""
    async with FakeOpenAI(model="small", dimensions=64, api_key="key") as model:
        embedding = {"provider": "openai", "base_url": model.url, "api_key": "key", "model": "small", "dimensions": 64}
        async with Space.create(stack, folder, embedding=embedding) as space:
            yield space


def clean(space: Space) -> dict[str, str]:
    """The space's environment, without what leads to the source tree or sets anything else."""
    kept = {name: value for name, value in outside_the_tree().items() if not name.startswith("PENSTOCK_")}
    return {**kept, "PENSTOCK_HOME": str(space.home), "PENSTOCK_DIST": str(dist())}


def command(environment: Environment, space: Space, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [environment.penstock, *arguments],
        env=clean(space),
        cwd=space.home,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def start(environment: Environment, space: Space, *names: str) -> None:
    space.environment = {**clean(space), "PENSTOCK_STREAM_SESSION_TIMEOUT_SECONDS": "10"}
    space.start(*names, python=environment.python, program=("-P", "-m", "penstock"))


@asynccontextmanager
async def served(environment: Environment, space: Space) -> AsyncIterator[str]:
    """The query service in an environment, in development mode; yields its address."""
    with (space.home / "serve.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(environment.penstock, "serve", "--port", "0"),
            env={**clean(space), "PENSTOCK_SERVE_DEVELOPMENT": "true"},
            cwd=space.home,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 90)).decode()
        assert line, (space.home / "serve.log").read_text()[-3000:]
        yield line.split()[-1]
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)


@pytest.mark.stack
async def test_workers_query_and_the_command_run_with_their_extras_alone(
    environments: dict[str, Environment], stack: Stack, tmp_path: Path
) -> None:
    async with stored(stack, tmp_path) as space:
        worker, query, base = environments["worker"], environments["query"], environments[""]
        migrated = command(worker, space, "migrate")
        assert (migrated.returncode, migrated.stdout) == (0, "Everything is up to date.\n"), migrated.stderr
        await asyncio.to_thread(start, worker, space, "detect", "vectors", "keywords")
        page = DocumentUpserted(
            tenant="default",
            source="wiki",
            external_id="wheel.py",
            observed_at=now(),
            version=1,
            title="Wheels",
            content='def heron() -> str:\n    """A heron is painted on every wheel."""\n    return "heron"\n',
            media_type="text/x-python",
            acl_tags=("readers", f"user:{local_user()}"),
        )
        ann = IdentityChanged(tenant="default", source="wiki", principal="ann", observed_at=now(), groups=["readers"])
        await space.publish(ann, topic=IDENTITIES)
        await space.publish(page)
        await space.settled([page])
        for arguments in (("status", "--json"), ("dead", "list", "--json"), ("audit", "--json"), ("budget", "--json")):
            done = command(worker, space, *arguments)
            assert json.loads(done.stdout) is not None, done.stderr
            assert "Traceback" not in done.stderr

        alone = await asyncio.to_thread(command, query, space, "search", "heron on a wheel", "--as", "ann", "--json")
        assert [r["external_id"] for r in json.loads(alone.stdout)["results"]] == ["wheel.py"], alone.stderr
        why = await asyncio.to_thread(command, query, space, "why", "wheel.py", "--json")
        assert why.returncode == 0, why.stderr
        assert [
            (await asyncio.to_thread(command, base, space, *arguments)).stderr
            for arguments in (("search", "heron", "--as", "ann"), ("status",))
        ] == [
            "error: this needs a part of Penstock that is not installed: pip install 'penstock[query]'\n",
            "error: this needs a part of Penstock that is not installed: pip install 'penstock[worker]'\n",
        ]

        async with served(query, space) as url:
            headers = {**bearer(space.home / DEVELOPMENT_FILE), "X-Penstock-As": "ann"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
                answer = await client.post("/v1/search", json={"query": "heron on a wheel"})
                assert [result["external_id"] for result in answer.json()["results"]] == ["wheel.py"], answer.text
                assert (await client.get("/")).status_code == 200
                initialise = {
                    "jsonrpc": "2.0",
                    "id": 1,
                    "method": "initialize",
                    "params": {
                        "protocolVersion": "2025-06-18",
                        "capabilities": {},
                        "clientInfo": {"name": "test", "version": "1"},
                    },
                }
                mcp = await client.post(
                    "/mcp", json=initialise, headers={"Accept": "application/json, text/event-stream"}
                )
                assert mcp.status_code == 200, mcp.text
            endpoints = json.loads((space.home / ENDPOINTS_FILE).read_text())
            (space.home / ENDPOINTS_FILE).write_text(json.dumps({**endpoints, "serve": {"url": url}}))
            over_http = await asyncio.to_thread(command, base, space, "search", "heron on a wheel", "--as", "ann")
            assert over_http.returncode == 0, over_http.stderr
            assert "Wheels" in over_http.stdout
            for extra, example in EXAMPLES.items():
                program = (environments[extra].python, "-P", str(PROJECT / "examples" / example))
                arguments = (url, str(space.home / DEVELOPMENT_FILE), "heron on a wheel")
                done = await asyncio.to_thread(run, *program, *arguments)
                assert "Wheels" in done.stdout, (extra, done.stdout)
        assert "evaluation_not_installed" in (space.home / "serve.log").read_text()


@pytest.mark.stack
async def test_the_worker_of_the_connectors_runs_with_its_extra_alone(
    environments: dict[str, Environment], stack: Stack, tmp_path: Path
) -> None:
    async with stored(stack, tmp_path / "space") as space:
        folder = tmp_path / "handbook"
        folder.mkdir()
        (folder / "leave.md").write_text("# Leave\n\nThirty days a year.\n")
        (folder / "page.html").write_text("<h1>Pumps</h1><p>Two of them.</p>")
        declared = space.home / "connectors.toml"
        declared.write_text(f'[connector.handbook]\nkind = "folder"\npaths = ["{folder}"]\nacl_tags = ["staff"]\n')
        connectors = environments["connectors"]
        listed = command(connectors, space, "connector", "list", "--json")
        assert [c["name"] for c in json.loads(listed.stdout)] == ["handbook"], listed.stderr
        await asyncio.to_thread(start, environments["worker"], space, "detect")
        await asyncio.to_thread(
            lambda: space.start(
                "connectors",
                python=connectors.python,
                program=("-P", "-m", "penstock"),
                env={"PENSTOCK_CONNECTORS_FILE": str(declared), "PENSTOCK_CONNECTORS_HTTP_PORT": "0"},
            )
        )
        await space.until("SELECT count(*) FROM documents WHERE source = 'handbook'", 2)
        ingested = command(connectors, space, "ingest", str(folder), "--acl", "staff", "--json")
        assert ingested.returncode == 0, ingested.stderr


@pytest.mark.stack
async def test_the_contract_suite_runs_with_its_extra(
    environments: dict[str, Environment], stack: Stack, tmp_path: Path
) -> None:
    async with stored(stack, tmp_path) as space:
        await asyncio.to_thread(start, environments["worker"], space, "detect")
        shipped = command(environments["connectors"], space, "connector", "conform", "folder")
        assert shipped.returncode == 1
        assert shipped.stderr.endswith("pip install 'penstock[conform]'\n")
        for kind in ("folder", "slack", "google-drive", "confluence"):
            conforms = await asyncio.to_thread(
                command, environments["conform"], space, "connector", "conform", kind, "--law", "edit", "--json"
            )
            assert json.loads(conforms.stdout)["conforms"] is True, conforms.stderr + conforms.stdout


def test_extras_install_what_they_need_and_no_more(environments: dict[str, Environment]) -> None:
    have = {extra: environment.distributions() for extra, environment in environments.items()}
    assert not have[""] & {"numpy", "aiokafka", "psycopg", "fastapi", "cryptography"}
    assert not have["query"] & {
        "scipy",
        "openai",
        "gigatoken",
        "awkward",
        "faust-streaming",
        "lxml",
        "opentelemetry-sdk",
    }
    assert not have["worker"] & {"scipy", "openai", "fastapi", "slack-sdk", "pdfplumber"}
    assert not have["connectors"] & {"scipy", "openai", "faust-streaming", "elasticsearch", "tree-sitter"}
    assert not have["langchain"] & {"numpy", "psycopg", "openai"}
    assert environments["query"].megabytes() < LARGEST_QUERY_MEGABYTES


def test_the_two_wheels_have_one_version_and_no_file_in_common(wheels: Path) -> None:
    files, versions = [], set()
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as opened:
            files.append({name for name in opened.namelist() if ".dist-info/" not in name})
        versions.add(wheel.name.split("-")[1])
    assert len(files) == 2
    assert not files[0] & files[1]
    assert len(versions) == 1
    source = {
        str(file.relative_to(PROJECT)) for file in (PROJECT / "connectors").rglob("*.py") if file.name != "__init__.py"
    }
    assert source <= files[0] | files[1]


def test_a_program_is_type_checked_against_the_installed_public_package(
    environments: dict[str, Environment], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from penstock.client import Client\n"
        "from penstock.source import Document, Page\n"
        "from penstock.wire import Record, encode\n"
        "page = Page([Document(external_id='1', title='t', content='c', acl_tags=['a'])], {})\n"
        "reveal_type(page.entries)\n"
        "reveal_type(encode)\n"
        "Document(external_id=1, title='t', content='c', acl_tags=['a'])\n"
        "reveal_type(Client('http://x').search('q').results[0].headings)\n"
        "Client('http://x').search('q', mode='fuzzy')\n"
    )
    mypy = (str(UV.with_name("mypy")), "--strict", "--python-executable", environments[""].python)
    checked = subprocess.run(
        [*mypy, "--cache-dir", str(tmp_path / "cache"), str(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=outside_the_tree(),
    )
    assert "Sequence[connectors.source.Document | connectors.source.Gone | connectors.source.Unreadable]" in (
        checked.stdout.replace("typing.", "")
    ), checked.stdout
    assert 'Argument "external_id" to "Document" has incompatible type "int"' in checked.stdout
    assert "-> topics.codec.Record" in checked.stdout
    assert 'Revealed type is "list[str]"' in checked.stdout.replace("builtins.", "")
    assert 'Argument "mode" to "search" of "Client" has incompatible type' in checked.stdout
    assert checked.stdout.count(": error:") == 2


def test_the_wheel_runs_without_being_installed(wheels: Path) -> None:
    """``uvx`` makes an environment for one run; `pipx run` does the same."""
    shown = run(
        *(str(UV), "tool", "run", "--find-links", str(wheels), "--constraints", str(PROJECT / "constraints.txt")),
        *("--from", "penstock", "penstock", "plan", "--documents", "1000", "--json"),
    )
    assert json.loads(shown.stdout)["chunks"] == 25_000
