"""Imports point one way, the core is pure, and faust stays in its folder."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("topics", "pipeline", "connectors", "query", "canary", "cli", "deploy", "penstock", "bench")

LAYERS: tuple[tuple[str, ...], ...] = (
    ("topics",),
    ("pipeline.core",),
    ("pipeline.installed",),
    ("pipeline.observability",),
    ("pipeline.runtime",),
    ("pipeline.kafka", "pipeline.stores", "pipeline.embedding"),
    ("pipeline.ledger",),
    ("pipeline.trail",),
    ("pipeline.stages",),
    ("pipeline.audit", "pipeline.conversations", "pipeline.generations"),
    ("pipeline.maintenance",),
    ("pipeline.analysis",),
    ("pipeline.diagnosis",),
    ("pipeline.stream", "query", "connectors"),
    ("canary",),
    ("deploy",),
    ("cli",),
    ("penstock",),
    ("bench",),
)
"""A module may import from the layers above its own line and from its own package; of the last match, the longest
counts. The packages on one line do not know each other."""

IMPURE = frozenset(
    {
        "aiofiles",
        "aiohttp",
        "aiokafka",
        "anyio",
        "asyncio",
        "concurrent",
        "elasticsearch",
        "faust",
        "fcntl",
        "glob",
        "httpx",
        "importlib",
        "io",
        "logging",
        "mode",
        "multiprocessing",
        "openai",
        "os",
        "pathlib",
        "prometheus_client",
        "psutil",
        "psycopg",
        "psycopg_pool",
        "pydantic_settings",
        "random",
        "requests",
        "secrets",
        "shutil",
        "signal",
        "socket",
        "sqlite3",
        "ssl",
        "structlog",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "time",
        "urllib.request",
        "watchfiles",
    }
)
"""Modules with I/O, clocks or random numbers, whose results pipeline.core takes as arguments."""
CLOCK = frozenset({"now", "utcnow", "today"})
FAUST = frozenset({"faust", "mode"})


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@functools.cache
def place(module: str) -> tuple[int, str] | None:
    """Layer and package of a module of ours; None if it is not ours. KeyError: ours, but in no layer."""
    if module.split(".")[0] not in PACKAGES or module == "pipeline":  # pipeline: a folder of packages, without code
        return None
    results = [
        (len(package), n, package) for n, line in enumerate(LAYERS) for package in line if within(module, package)
    ]
    if not results:
        raise KeyError(module)
    _, layer, package = max(results)
    return layer, package


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported anywhere in a module, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            else:
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(module: str, tree: ast.Module) -> list[str]:
    """One line for each import (or use of the clock) that ``module`` must not have."""
    mine = place(module)
    assert mine is not None
    layer, package = mine
    results = []
    for line, name in imported(tree):
        where = f"{module}:{line} imports {name}"
        if name.startswith("."):
            results.append(f"{where}: say the full name")
            continue
        theirs = place(name)
        if theirs is not None and theirs[1] != package and theirs[0] >= layer:
            results.append(f"{where}: {package} must not know {theirs[1]}")
        if name.split(".")[0] in FAUST and not within(module, "pipeline.stream"):
            results.append(f"{where}: faust lives in pipeline.stream only")
        if package == "pipeline.core" and any(within(name, impure) for impure in IMPURE):
            results.append(f"{where}: the core has no I/O, no clock and no dice")
    if package == "pipeline.core":
        results += [
            f"{module}:{node.lineno} reads the clock ({node.attr})"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in CLOCK
        ]
    return results


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Three tests read the whole source tree."""
    return ast.parse(path.read_text())


def sources() -> dict[str, Path]:
    results = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            results[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del results["pipeline"]
    return results


def test_imports_follow_the_layers() -> None:
    modules = sources()
    assert {"topics.codec", "pipeline.core.model", "pipeline.stream.consume"} <= set(modules)
    assert [line for module, path in sorted(modules.items()) for line in violations(module, parsed(path))] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("topics.codec", "import pipeline.core.errors"),
        ("topics.codec", "from pipeline.runtime import settings"),
        ("pipeline.core.fold", "from pipeline.kafka.producer import Producer"),
        ("pipeline.core.fold", "from pipeline.runtime.settings import load"),
        ("pipeline.core.fold", "from pipeline.stores import postgres"),
        ("pipeline.core.fold", "import os"),
        ("pipeline.core.fold", "import os.path as p"),
        ("pipeline.core.fold", "def f():\n    import psycopg"),
        ("pipeline.core.fold", "from time import monotonic"),
        ("pipeline.core.fold", "from urllib.request import urlopen"),
        ("pipeline.core.fold", "import datetime\nx = datetime.datetime.now()"),
        ("pipeline.core.chunking.cut", "from asyncio import sleep"),
        ("pipeline.core.chunking.cut", "from . import units"),
        ("pipeline.runtime.settings", "from pipeline.embedding import port"),
        ("pipeline.stores.keywords", "from pipeline.embedding.port import Embedder"),
        ("pipeline.stores.keywords", "from pipeline.ledger import work"),
        ("pipeline.embedding.local", "import pipeline.stages.detect"),
        ("pipeline.ledger.work", "if TYPE_CHECKING:\n    from pipeline.stream.worker import Worker"),
        ("pipeline.stages.detect", "import faust"),
        ("pipeline.stages.detect", "from cli import main"),
        ("pipeline.kafka.client", "from query import retrieve"),
        ("query.retrieval.search", "from canary import watch"),
        ("connectors.folder.scan", "from query import retrieve"),
        ("connectors.folder.scan", "from pipeline.stream import consume"),
        ("connectors.folder.scan", "from mode import Service"),
        ("query.http", "from pipeline.stream import consume"),
        ("query.http", "from connectors.folder import scan"),
        ("query", "from cli.main import app"),
        ("deploy.local.stack", "from cli.main import app"),
        ("cli.main", "from bench import demo"),
    ],
)
def test_a_forbidden_import_is_reported(module: str, source: str) -> None:
    assert len(violations(module, ast.parse(source))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("topics.codec", "from topics.messages import MESSAGES\nimport pydantic"),
        ("pipeline.core.fold", "from pipeline.core.model import Chunk\nfrom datetime import datetime\nimport hashlib"),
        ("pipeline.core.fold", "import urllib.parse\nfrom topics.messages import DocumentUpserted"),
        ("pipeline.stores.keywords", "from pipeline.runtime.settings import load\nfrom pipeline.core import model"),
        ("pipeline.stages.detect", "from topics.codec import decode\nimport pipeline.ledger.work, pipeline.stores"),
        ("pipeline.stream.worker", "import faust\nfrom pipeline.stages import detect"),
        ("connectors.folder.scan", "from pipeline.kafka.producer import Producer\nfrom connectors import protocol"),
        ("query.http", "from pipeline.ledger import generations"),
        ("cli.main", "from query import http\nfrom connectors import folder\nfrom deploy.local import stack"),
    ],
)
def test_an_allowed_import_is_not_reported(module: str, source: str) -> None:
    assert violations(module, ast.parse(source)) == []


@pytest.mark.heavy
def test_only_the_stack_commands_import_the_local_stack() -> None:
    users = {
        module
        for module, path in sources().items()
        if module.split(".")[0] not in ("deploy", "bench")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and within(node.module or "", "deploy") and module != "cli.stack"
    }
    assert users == set()


def test_every_package_belongs_to_a_layer() -> None:
    assert all(place(package) is not None for package in PACKAGES if package != "pipeline")
    assert place("json") is None
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"docs", "tests"}
    assert folders <= set(PACKAGES)
