"""The extras of pyproject.toml: what a part of Penstock imports is in its extra, and a missing part is named."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from cli.extras import MARKERS, require
from cli.main import COMMANDS, NEEDS
from deploy.lock import name, pins, requirements
from tests.unit.test_imports import imported, sources

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

PARTS = {
    "": (
        "penstock.client",
        "penstock.command",
        "penstock.source",
        "penstock.wire",
        "cli.main",
        *(f"cli.{command.partition(':')[0]}" for command in COMMANDS.values()),
    ),
    "worker": ("pipeline.stream.worker", "pipeline.analysis.worker", "pipeline.analysis.conflicts", "cli.setup"),
    "query": (
        "query.http.serve",
        "query.mcp.transports",
        "query.service",
        "query.standing.task",
        "pipeline.embedding.choose",
    ),
    "connectors": (
        "connectors.worker",
        "connectors.extraction.service",
        "connectors.extraction.process",
        "connectors.airbyte.source",
        "connectors.confluence.source",
        "connectors.database.source",
        "connectors.folder.source",
        "connectors.git.source",
        "connectors.github.source",
        "connectors.google_drive.source",
        "connectors.jira.source",
        "connectors.objects.source",
        "connectors.website.source",
        "connectors.sharepoint.source",
        "connectors.slack.source",
        "connectors.uploads.source",
        "connectors.folder.connector",
    ),
    "langchain": ("penstock.langchain",),
    "llamaindex": ("penstock.llamaindex",),
    "conform": (
        "connectors.conform.run",
        "connectors.airbyte.playground",
        "connectors.confluence.playground",
        "connectors.database.playground",
        "connectors.folder.playground",
        "connectors.git.playground",
        "connectors.github.playground",
        "connectors.google_drive.playground",
        "connectors.jira.playground",
        "connectors.objects.playground",
        "connectors.website.playground",
        "connectors.sharepoint.playground",
        "connectors.slack.playground",
        "connectors.uploads.playground",
        "connectors.fakes.notes",
        "penstock.testing",
    ),
}
"""Extra → the modules in which its processes begin. "": what is always installed, of which only what is imported at
once counts: what its functions import belongs to the extras that a command requires first."""
ELSEWHERE = {
    "cli": "the commands: each requires its own extras",
    "connectors.conform": "the contract suite",
    "connectors.fakes": "the contract suite",
    "pipeline.core.chunking": "only detect and the sinks cut text",
    "pipeline.core.html": "only detect and connectors read HTML",
    "pipeline.embedding.local": "the extra local",
    "pipeline.embedding.convert": "the extra local",
    "pipeline.observability.lineage": "the extra lineage",
    "pipeline.observability.tracing": "the extra trace",
    "query.answers.openai_chat": "the extra chat",
    "query.evaluation.measures": "the extra eval",
    "query.rerank.cross_encoder": "the extra rerank",
}
"""Modules that a part reaches and does not need, and why. A part that contains one reads it all the same."""
OWN = {
    "worker": ("pipeline.core.chunking", "pipeline.core.html"),
    "connectors": ("pipeline.core.html",),
    "conform": ("connectors.conform", "connectors.fakes", "pipeline.core.html"),
}
TESTING = ("connectors", "aiohttp", "graphql-core")
"""Requirements of the distribution penstock-testing (packages/testing/hatch_build.py): an extra, and libraries."""
TRANSITIVE = {
    "anyio": "httpx",
    "h11": "uvicorn",
    "httpcore": "httpx",
    "mcp-types": "mcp",
    "psycopg-pool": "psycopg",
    "pydantic-core": "pydantic",
    "yarl": "aiohttp",
}
"""Imported, and installed by a package that cannot do without it."""
OPTIONAL = {
    "gigatoken": "tiktoken counts in its place",
    "paramiko": "the extra objects",
    "sqlalchemy": "the extra database",
    "tokenizers": "of local models, in pipeline.embedding.tokens",
}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


class _WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if is_type_checking(node) else self.generic_visit(node)


class _AtOnce(_WithoutTypes):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        return None

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        return None


@cache
def names(path: Path, *, at_once: bool) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(full for _, full in imported((_AtOnce() if at_once else _WithoutTypes()).visit(tree)))


def reached(part: str) -> Iterator[tuple[str, str]]:
    """(module, library) of everything that the modules of a part import."""
    modules, ours = sources(), {"penstock", "topics", "pipeline", "connectors", "query", "canary", "cli", "deploy"}
    elsewhere = ELSEWHERE.keys() - set(OWN.get(part, ())) if part else ()
    todo, seen = list(PARTS[part]), set()
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for full in names(modules[module], at_once=not part):
            if full.split(".")[0] not in ours:
                if full.split(".")[0] not in sys.stdlib_module_names:
                    yield module, full.split(".")[0]
                continue
            target = full
            while target not in modules and target:
                target = target.rpartition(".")[0]
            is_playground = target.endswith(".playground") and part != "conform"
            if target and not is_playground and not any(target == e or target.startswith(f"{e}.") for e in elsewhere):
                todo.append(target)


def installed(*extras: str) -> set[str]:
    return {name(line) for line in requirements(PROJECT, *extras)}


@pytest.mark.heavy
@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_libraries_of_its_extra(part: str) -> None:
    known = packages_distributions()
    allowed = installed(TESTING[0]) | {*TESTING[1:]} if part == "conform" else installed(*([part] if part else []))
    missing = []
    for module, library in sorted(set(reached(part))):
        candidates = {name(distribution) for distribution in known.get(library, [library])}
        candidates |= {TRANSITIVE[c] for c in candidates if c in TRANSITIVE}
        if not candidates & allowed and not candidates & OPTIONAL.keys():
            missing.append(f"{module} imports {library}: not in the extra {part or 'of nothing'}")
    assert missing == []


def test_tests_of_the_imports_would_see_a_library_that_is_missing() -> None:
    assert ("pipeline.stream.consume", "faust") in set(reached("worker"))
    assert "faust-streaming" not in installed("query")


def test_libraries_of_one_purpose_are_only_in_the_extra_of_it() -> None:
    for library, extras in {
        "ir-measures": {"eval"},
        "openai": {"chat"},
        "gigatoken": {"worker"},
        "openlineage-python": {"lineage"},
        "paramiko": {"objects"},
        "s3fs": {"objects"},
        "opentelemetry-sdk": {"trace"},
        "onnxruntime": {"rerank"},
        "tiktoken": {"worker", "query"},
    }.items():
        assert {e for e in EXTRAS if e not in ("all", "dev") and library in installed(e)} == extras, library
        assert library not in installed()
        assert library in installed("all")


@pytest.mark.parametrize("part", ["worker", "connectors"])
def test_a_part_that_reads_html_has_the_parser_that_beautifulsoup_finds_by_name(part: str) -> None:
    """The worker dead-lettered every HTML document where only its extra was installed."""
    assert '"lxml"' in (ROOT / "pipeline" / "core" / "html.py").read_text()
    assert "lxml" in installed(part)


def test_all_is_every_extra_but_tools_of_development_and_libraries_of_clients() -> None:
    assert installed("all") == installed(*(EXTRAS.keys() - {"dev", "conform", "langchain", "llamaindex"}))


def test_the_image_pins_every_library_of_its_extras() -> None:
    from deploy.lock import FOLDER, IMAGE_EXTRAS

    assert installed(*IMAGE_EXTRAS) <= pins((FOLDER / "image.txt").read_text()).keys()


def test_every_command_names_the_extras_that_it_needs() -> None:
    assert NEEDS.keys() == COMMANDS.keys()
    assert {extra for needs in NEEDS.values() for extra in needs} <= MARKERS.keys() <= EXTRAS.keys()


@pytest.mark.heavy
@pytest.mark.parametrize("extra", sorted(MARKERS.keys() - {"conform"}))
def test_the_marker_of_an_extra_is_installed_by_no_other(extra: str) -> None:
    distributions = {name(d) for d in packages_distributions()[MARKERS[extra]]}
    assert distributions <= installed(extra)
    assert {e for e in MARKERS if distributions & installed(e)} == {extra}


RUN = "from penstock.command import main; main()"


def run_without(libraries: list[str], *arguments: str, program: str = RUN) -> subprocess.CompletedProcess[str]:
    """``penstock``, or another program, in a process that cannot import these libraries."""
    program = f"""
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {json.dumps(libraries)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from importlib import util
found = util.find_spec
util.find_spec = lambda name, *more: None if name.split(".")[0] in {json.dumps(libraries)} else found(name, *more)
sys.argv = ["penstock", *{json.dumps(arguments)}]
{program}
"""
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


@cache
def outside_base() -> tuple[str, ...]:
    """The modules of all libraries that only extras install."""
    base = pins((ROOT / "constraints.txt").read_text()).keys() - closure()
    return tuple(sorted(m for m, ds in packages_distributions().items() if {name(d) for d in ds} <= base))


@cache
def closure() -> frozenset[str]:
    """The distributions that are installed without any extra."""
    from importlib.metadata import distribution

    from packaging.requirements import Requirement

    todo, seen = list(requirements(PROJECT)), set()
    while todo:
        requirement = Requirement(todo.pop())
        if name(requirement.name) not in seen and (requirement.marker is None or requirement.marker.evaluate()):
            seen.add(name(requirement.name))
            todo += [r for r in distribution(requirement.name).requires or () if "extra ==" not in r]
    return frozenset(seen)


def test_help_of_every_command_needs_no_extra() -> None:
    done = run_without(list(outside_base()), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f" {command} " in done.stdout for command in COMMANDS)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("arguments", "extras"),
    [
        (("serve",), "query"),
        (("worker", "detect"), "worker"),
        (("worker", "analysis"), "worker,query"),
        (("worker", "connectors"), "connectors"),
        (("worker", "canary"), "worker,query"),
        (("migrate",), "worker"),
        (("dead", "list"), "worker"),
        (("trail",), "worker"),
        (("eval", "."), "eval,query,worker"),
        (("up",), "local,worker,query"),
        (("search", "pumps", "--as", "ann"), "query"),
        (("connector", "list"), "connectors"),
        (("connector", "conform", "folder"), "connectors"),
    ],
)
def test_a_command_without_its_extra_ends_with_one_line_that_names_it(
    tmp_path: Path, arguments: tuple[str, ...], extras: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))  # where no service runs
    done = run_without(list(outside_base()), *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: this needs a part of Penstock that is not installed: pip install 'penstock[{extras}]'\n"
    )


@pytest.mark.heavy
def test_help_of_one_command_needs_no_extra() -> None:
    for arguments in (("serve",), ("trail", "head"), ("extract", "serve"), ("up",)):
        done = run_without(list(outside_base()), *arguments, "--help")
        assert (done.returncode, done.stderr) == (0, ""), arguments


def test_programs_that_publish_or_are_sources_need_no_extra() -> None:
    program = "import penstock.source, penstock.wire; penstock.source.Document; penstock.wire.encode"
    done = run_without(list(outside_base()), program=program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.heavy
def test_asking_the_query_service_needs_no_extra_and_a_missing_library_is_named() -> None:
    base = run_without(
        list(outside_base()), program="import penstock.client; penstock.client.AsyncClient('http://x', 't')"
    )
    assert (base.returncode, base.stderr) == (0, "")
    for extra in ("langchain", "llamaindex"):
        done = run_without(list(outside_base()), program=f"import penstock.{extra}")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].endswith(f": pip install 'penstock[{extra}]'")


@pytest.mark.heavy
def test_no_module_of_the_wheel_needs_the_contract_suite_at_once() -> None:
    """A template in the wheel did, and the image, which imports every module, could not be built."""
    suite = ("connectors.conform", "connectors.fakes")
    needing = [
        module
        for module, path in sources().items()
        if not module.startswith(("bench", *suite)) and not module.endswith(".playground")
        if any(full.startswith(suite) for full in names(path, at_once=True))
    ]
    assert needing == ["penstock.testing"], "which says what to install"


def test_a_playground_without_the_contract_suite_says_what_to_install() -> None:
    program = "import sys; sys.modules['connectors.conform'] = None; import penstock.testing"
    done = run_without([], program=program)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("pip install 'penstock[conform]'")


def test_planning_needs_no_extra() -> None:
    done = run_without(list(outside_base()), "plan", "--documents", "1000", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["chunks"] == 25_000


def test_an_extra_whose_library_has_been_imported_is_installed() -> None:
    """faust replaces its own module, and commands that ran in the same process failed."""
    import faust  # noqa: F401

    require("worker")
