"""Penstock as it is installed: wheels built from this tree, each in an environment without the tree."""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.deploy.environments import PIP, build_wheel, run
from tests.support.space import PROJECT

PACKAGES = ("penstock", "topics", "pipeline", "connectors", "query", "canary", "cli", "deploy")
FILES = ("pyproject.toml", "README.md", "LICENSE")

EXPANSION = """
-- Every table that there is gets a column: who reads or writes rows by their order or by `*` would stumble over it.
DO $$
DECLARE
    stored regclass;
BEGIN
    FOR stored IN
        SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'public' AND c.relkind = 'r' ORDER BY c.relname
    LOOP
        EXECUTE format('ALTER TABLE %s ADD COLUMN next_tier text NOT NULL DEFAULT ''plain''', stored);
    END LOOP;
END $$;
CREATE TABLE next_things (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, document_id uuid REFERENCES documents);
CREATE INDEX documents_next_tier ON documents (next_tier) WHERE next_tier <> 'plain';
"""


@dataclass(frozen=True, slots=True)
class Installed:
    version: str
    python: Path
    packages: Path
    """The folder with its modules."""

    @property
    def penstock(self) -> Path:
        return self.python.parent / "penstock"


def install(folder: Path, change: Callable[[Path], None] | None = None) -> Installed:
    """Build a wheel of this tree, or of a copy that ``change`` was made to, and install it into an environment of its
    own below ``folder``. What it depends on is borrowed from ours: nothing is downloaded."""
    tree = PROJECT
    if change is not None:
        tree = folder / "tree"
        copy_tree(tree, change)
    build_wheel(tree, folder / "wheel")
    [wheel] = (folder / "wheel").glob("*.whl")
    if change is not None:
        shutil.rmtree(tree)
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    run(*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    packages = folder / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A folder named in a .pth file is searched, and the .pth files in it are not read: not the one to our own tree.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    version = re.fullmatch(r"penstock-(.+)-py3-none-any\.whl", wheel.name)
    assert version is not None, wheel.name
    return Installed(version.group(1), python, packages)


def is_of_testing(file: Path) -> bool:
    """Whether a file of a package belongs to penstock-testing. file: relative to the tree."""
    package, *rest = file.parts
    return package == "connectors" and (rest[0] in ("conform", "fakes") or file.name == "playground.py")


def copy_tree(tree: Path, change: Callable[[Path], None]) -> None:
    """A copy of this tree at ``tree``, and ``change`` made to it."""
    for package in PACKAGES:
        shutil.copytree(PROJECT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy2(PROJECT / file, tree)
    change(tree)


def next_version(tree: Path) -> None:
    """Change what a version may change: its number, a migration that adds, a field in every message, outer and
    inner."""

    def edit(file: str, old: str, new: str) -> None:
        path = tree / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} no longer has {old!r} once"
        path.write_text(text.replace(old, new))

    version = 'version = "'
    [line] = [line for line in (tree / "pyproject.toml").read_text().splitlines() if line.startswith(version)]
    major, minor, _ = line.removeprefix(version).rstrip('"').split(".")
    edit("pyproject.toml", line, f'version = "{major}.{int(minor) + 1}.0"')
    (tree / "pipeline" / "stores" / "migrations" / "9000_next.sql").write_text(EXPANSION)
    last = '    """When the source was *about to be* read. Grows per source."""\n'
    edit("topics/messages.py", last, last + '    next_tier: str = "gold"\n    """New."""\n')
