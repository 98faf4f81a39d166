"""Plugins of ours for the local Elasticsearch, each compiled from one Java file by Eclipse's compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

from deploy.local import dist
from pipeline.core.errors import Misconfigured


def build_plugin(source: Path, elasticsearch: Path, compiler: Path, classes: Path) -> None:
    """Build a plugin into ``elasticsearch/plugins``. source: a folder with the Java file and the plugin's descriptors.
    classes: a folder to work in, which does not exist yet. Raises Misconfigured."""
    lib = elasticsearch / "lib"
    name = f"penstock-{source.name}"
    plugin = elasticsearch / "plugins" / name
    plugin.mkdir(parents=True)
    classpath = [*lib.glob("elasticsearch-plugin-*.jar"), *lib.glob("lucene-*.jar")]
    run(
        [
            str(dist.java()),
            "-jar",
            str(compiler),
            "-source",
            "21",
            "-target",
            "21",
            "-proc:none",
            "-nowarn",
            "-classpath",
            os.pathsep.join(map(str, classpath)),
            "-d",
            str(classes),
            *map(str, source.glob("*.java")),
        ],
        f"compiling Elasticsearch's plugin {name}",
    )
    with zipfile.ZipFile(plugin / f"{name}.jar", "w") as jar:
        for file in classes.rglob("*.class"):
            jar.write(file, file.relative_to(classes))
    shutil.copy(source / "named_components.json", plugin)
    descriptor = (source / "stable-plugin-descriptor.properties").read_text()
    (plugin / "stable-plugin-descriptor.properties").write_text(
        descriptor.replace("@ELASTICSEARCH@", dist.VERSIONS["elasticsearch"])
    )


def run(argv: Sequence[str], doing: str) -> None:
    """Raises Misconfigured with the last line of what it printed."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        raise Misconfigured(f"{doing} failed: {lines[-1][:300]}")
