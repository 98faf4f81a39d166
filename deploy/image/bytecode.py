"""Write the bytecode of what Penstock's processes import, and of nothing else: a step of deploy/Dockerfile.

Compiling all that is installed would double the size of every package. Importing every module also shows that the image
lacks none of ours, and that what deploy/image/slim.py changed can be loaded. Bytecode is valid whatever the time of its
source, because the times of a release's files are rewritten (deploy/release.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import py_compile
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from pkgutil import walk_packages

PROGRAMS = ("deploy.alertmanager", "deploy.certificates", "deploy.roles.kafka")
"""All else in the package deploy is for development."""


def main() -> int:
    """Returns the exit code: 1 when a module of ours is missing."""
    own = {package for package, names in packages_distributions().items() if "penstock" in names}
    left_out: set[str] = set()
    for package in sorted(own - {"deploy"}):
        paths = importlib.import_module(package).__path__
        for module in walk_packages(paths, f"{package}.", onerror=_ignore):
            if not module.name.endswith("__main__"):
                _import(module.name, own, left_out)
    for name in PROGRAMS:
        _import(name, own, left_out)
    _compile_again()
    sys.stdout.write(f"{len(sys.modules)} modules compiled; not in the image: {', '.join(sorted(left_out)) or '-'}\n")
    return 0


def _import(name: str, own: set[str], left_out: set[str]) -> None:
    """A module of an extra that the image does without names a package that is not there."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] in own:
            raise
        left_out.add(error.name)


def _compile_again() -> None:
    """Write all bytecode that the imports have left anew, without the times of its sources; also of modules that could
    not be imported."""
    roots = [sys.pycache_prefix] if sys.pycache_prefix else [folder for folder in sys.path if os.path.isdir(folder)]
    for cached in sorted({path for root in roots for path in Path(root).rglob("*.pyc")}):
        source = importlib.util.source_from_cache(str(cached))
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(source, str(cached), doraise=True, invalidation_mode=mode)


def _ignore(_package: str) -> None:
    """walk_packages imports packages itself; _import, which follows, reports their errors."""


if __name__ == "__main__":
    sys.exit(main())
