"""An Elasticsearch that keeps users and API keys, for the secured stack: ``python -m`` makes one.

The small distribution has the security module, but not the analyzers that its own index of users names. This is the
same distribution (its files are links, not copies) with a plugin of ours that brings them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deploy.local import dist, maven
from deploy.local.lock import exclusive
from deploy.local.plugins import build_plugin
from deploy.local.tools import show
from pipeline.runtime import settings

EMAIL = Path(__file__).parent / "email"
LAYOUT = 2
"""Version of the folder: raise it when a plugin changes."""


def folder() -> Path:
    return settings.dist() / f"elasticsearch-users-{dist.VERSIONS['elasticsearch']}-{LAYOUT}"


def require() -> Path:
    """The distribution's folder, made now if need be. Raises Misconfigured with one line."""
    place = folder()
    if not place.exists():
        dist.require()
        place.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(place.with_name(f"{place.name}.lock")), tempfile.TemporaryDirectory(dir=place.parent) as made:
            if not place.exists():  # nobody else was faster
                _assemble(Path(made)).rename(place)
    return place


def _assemble(work: Path) -> Path:
    whole = work / "elasticsearch"
    shutil.copytree(dist.elasticsearch_home(), whole, copy_function=os.link)
    jars = work / "jars"
    jars.mkdir()
    compiler = maven.copy(f"org.eclipse.jdt:ecj:{dist.VERSIONS['ecj']}", jars)
    build_plugin(EMAIL, whole, compiler, work / "classes")
    return whole


def look() -> Iterator[tuple[str, Path]]:
    """Raises Misconfigured when it cannot be made."""
    yield "Elasticsearch with users", require()


if __name__ == "__main__":
    sys.exit(show(look))
