"""The public package: its names and their shapes, which change as docs/public-api.md promises, and its own check.

python -m tests.unit.test_public_api > tests/golden/public-api.txt      # after a change that the changelog names
"""

from __future__ import annotations

import enum
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from penstock.packages import INTERNAL

ROOT = Path(__file__).parents[2]
MODULES = (
    "penstock.client",
    "penstock.extract",
    "penstock.langchain",
    "penstock.llamaindex",
    "penstock.rerank",
    "penstock.source",
    "penstock.testing",
    "penstock.wire",
)
GOLDEN = ROOT / "tests" / "golden" / "public-api.txt"


def listing() -> str:
    """Every public name with what a caller depends on: parameters, fields, methods, values."""
    lines: list[str] = []
    for module in MODULES:
        public = importlib.import_module(module)
        for name in sorted(public.__all__):
            value = getattr(public, name)
            lines.append(f"{module}.{name}{_of(value)}")
            if isinstance(value, type):
                lines += [f"    {line}" for line in _members(value)]
    return "\n".join(lines) + "\n"


@cache
def public_names() -> frozenset[str]:
    return frozenset(name for module in MODULES for name in importlib.import_module(module).__all__)


def _of(value: Any) -> str:
    if isinstance(value, type):
        ancestors = [kind.__name__ for kind in value.__mro__[1:] if kind.__name__ in public_names()]
        return f"({', '.join(ancestors)})" if ancestors else ""
    if inspect.isfunction(value):
        return _signature(value)
    return f": {value.name}" if hasattr(value, "name") else ""


def _members(kind: type) -> Iterator[str]:
    if issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            if name not in _of_other_libraries(kind):
                default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
                yield f"{name}: {default}"
        return
    if is_dataclass(kind):
        for part in fields(kind):
            is_required = part.default is MISSING and part.default_factory is MISSING
            yield f"{part.name}: {part.type}{'' if is_required else ' = …'}"
    elif "__init__" in vars(kind) and vars(kind)["__init__"].__name__ == "__init__":  # else typing's own, of a Protocol
        yield f"__init__{_signature(vars(kind)['__init__'])}"
    for name, member in sorted(vars(kind).items()):
        if not name.startswith("_") and inspect.isfunction(member):
            yield f"{name}{_signature(member)}"


def _of_other_libraries(kind: type[BaseModel]) -> set[str]:
    """Fields that a model has from a class of another library, such as LangChain's."""
    others = [base for base in kind.__mro__ if issubclass(base, BaseModel) and not _is_ours(base)]
    return {name for base in others for name in base.model_fields}


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("penstock", *INTERNAL)


def _signature(function: Any) -> str:
    """The parameters and their types; of a default only that there is one."""
    signature = inspect.signature(function)
    parameters = [p if p.default is p.empty else p.replace(default=Ellipsis) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters)).replace("'", "").replace("Ellipsis", "…")


def test_public_names_and_their_shapes_equal_the_golden_file() -> None:
    """A changed line is a change for others: the changelog names it, and the version grows (docs/public-api.md)."""
    stale = "python -m tests.unit.test_public_api > tests/golden/public-api.txt; name the change in CHANGELOG.md"
    assert listing().splitlines() == GOLDEN.read_text().splitlines(), stale


def test_no_public_name_is_an_enumeration_that_could_grow_silently() -> None:
    for module in MODULES:
        public = importlib.import_module(module)
        assert not [name for name in public.__all__ if isinstance(getattr(public, name), enum.EnumMeta)]


def penstock(path: list[Path], *arguments: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command, or a program, with these folders before ours on the path."""
    start = ["-c", program] if program else ["-m", "penstock", *arguments]
    return subprocess.run(
        [sys.executable, "-P", *start],
        env={"PYTHONPATH": ":".join(map(str, [*path, ROOT])), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("other", ["query/__init__.py", "query.py", "cli/__init__.py", "topics.py"])
def test_a_module_that_hides_one_of_ours_is_named_in_one_line(tmp_path: Path, other: str) -> None:
    """An empty folder called `query` on PYTHONPATH ended every command with a traceback."""
    place = tmp_path / other
    place.parent.mkdir(exist_ok=True)
    place.touch()
    done = penstock([tmp_path], "--help")
    name = other.partition("/")[0].removesuffix(".py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {place} hides Penstock's own package {name!r}: rename it, or take its folder off PYTHONPATH\n"
    )


@pytest.mark.parametrize("module", ["penstock.client", "penstock.source", "penstock.wire"])
def test_a_program_that_hides_one_of_our_modules_reads_which(tmp_path: Path, module: str) -> None:
    (tmp_path / "connectors.py").touch()
    done = penstock([tmp_path], program=f"import {module}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {tmp_path / 'connectors.py'} hides Penstock's own")


def test_a_folder_without_modules_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "query").mkdir()
    done = penstock([tmp_path], "--version")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_path_that_leads_to_our_own_folder_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(ROOT)
    done = penstock([tmp_path / "link"], "--version")
    assert (done.returncode, done.stderr) == (0, "")


if __name__ == "__main__":
    sys.stdout.write(listing())
