"""Write NAME.lock for each peer's NAME.txt: ``python -m bench.peers.lock [NAME …]``.

A lock names every package that the peer's environment gets, with the hashes of its wheels for Linux. Nothing else is
installed: neither a file nor a dependency that the index has got since. The index is uv's (``UV_DEFAULT_INDEX`` names
another); no address is written.
"""

from __future__ import annotations

import re
import sys
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

from packaging.markers import Marker

from deploy.lock import resolve

HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13")
FITTING = re.compile(
    r"-(?:cp31[123]-cp31[123]|cp3\d+-abi3|(?:\w+\.)*py3\w*(?:\.\w+)*-none)-(?:any|\S*manylinux\S*_(?:x86_64|aarch64))\.whl$"
)
"""The end of the name of a wheel for CPython 3.11 to 3.13 and Linux with glibc."""


def locked(compiled: str) -> str:
    """The text of a lock, of uv's pylock.toml. Raises SystemExit for a package without a wheel for Linux."""
    blocks = []
    for package in tomllib.loads(compiled)["packages"]:
        marker = package.get("marker")
        if marker and not _holds(Marker(marker)):
            continue
        pin = f"{package['name']}=={package['version']}" + (f" ; {marker}" if marker else "")
        hashes = sorted(wheel["hashes"]["sha256"] for wheel in package.get("wheels", ()) if _fits(wheel))
        if not hashes:
            raise SystemExit(f"error: {pin} has no wheel for Linux")
        blocks.append(" \\\n".join([pin, *(f"    --hash=sha256:{sha256}" for sha256 in hashes)]) + "\n")
    return "".join(blocks)


def _holds(marker: Marker) -> bool:
    return any(
        marker.evaluate(
            {
                "sys_platform": "linux",
                "platform_system": "Linux",
                "os_name": "posix",
                "platform_machine": machine,
                "python_version": version,
                "python_full_version": f"{version}.0",
            }
        )
        for machine, version in product(("x86_64", "aarch64"), PYTHONS)
    )


def _fits(wheel: dict[str, Any]) -> bool:
    return FITTING.search(wheel["url"]) is not None


def main(*names: str) -> int:
    options = ("--universal", "--only-binary", ":all:", "--format", "pylock.toml")
    for requirements in sorted(HERE.glob("*.txt")):
        if not names or requirements.stem in names:
            compiled = resolve(requirements.read_text().splitlines(), *options, python=PYTHONS[0])
            requirements.with_suffix(".lock").write_text(locked(compiled))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
