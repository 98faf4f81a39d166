"""Remove from installed packages what nothing reads at run time: a step of deploy/Dockerfile. Argument: the folder.

That is the symbols of compiled modules (67 MB in one of the local model alone), tests, and the sources of extensions.
Needs ``strip``.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCES = frozenset({".pyi", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".h", ".hpp", ".a"})
UNUSED = (
    *("PIL/_avif.*", "pillow.libs/libavif-*"),
    *("PIL/_imagingft.*", "pillow.libs/libfreetype-*", "pillow.libs/libharfbuzz-*"),
    *("lxml/objectify.*", "lxml/html/diff.*", "lxml/html/_difflib.*"),
    *("numpy/f2py/*", "numpy/_core/_simd.*", "numpy/_core/_*_tests.*"),
    *("elasticsearch/dsl/*", "elasticsearch/esql/*"),
    *("sqlalchemy/testing/*", "sqlalchemy/testing/*/*"),
    *("pygments/lexers/[!_p]*", "pygments/lexers/_*_builtins.py"),
)
"""Parts of packages: a format of pictures that no document holds, fonts to draw with, another way to read XML, the
comparison of pages, a compiler, what numpy tests itself with, another way to write queries, a kit for tests, and the
colours of nearly all languages but Python."""
SERVICES = frozenset({"s3", "sts", "sso", "sso-oidc"})
"""Services of Amazon whose descriptions are kept: object stores, and logins to them. There are 400 others."""
LOAD = 1
"""Type of a program header: a segment that is mapped."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    [folder] = arguments
    files = [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
    before = sum(path.stat().st_size for path in files)
    for path in files:
        if is_removed(path.relative_to(folder)):
            path.unlink()
        elif ".so" in path.suffixes:
            strip(path)
    after = sum(path.stat().st_size for path in files if path.exists())
    sys.stdout.write(f"{folder}: {before / 1e6:.0f} MB, now {after / 1e6:.0f}\n")
    return 0


def is_removed(path: Path) -> bool:
    """path: below ``site-packages`` or any folder above it."""
    is_unused = any(path.match(pattern) for pattern in UNUSED) or is_other_service(path)
    return path.suffix in SOURCES or is_test(path) or is_unused


def is_test(path: Path) -> bool:
    """Tests and their data; other modules of a folder ``tests`` are imported by some packages."""
    return "tests" in path.parts[:-1] and (path.name.startswith("test_") or "data" in path.parts)


def is_other_service(path: Path) -> bool:
    """The description of a service of Amazon that nothing calls: ``botocore/data/SERVICE/…``."""
    return path.match("botocore/data/*/*/*") and path.parts[-3] not in SERVICES


def strip(path: Path) -> None:
    """Remove the symbols that are needed neither for loading nor for linking. A file whose segments would then not be
    aligned, and which the loader would refuse, stays as it is: that happens where patchelf has changed it."""
    stripped = path.with_name(f"{path.name}.stripped")
    subprocess.run(["strip", "--strip-unneeded", "-o", stripped, path], check=True)
    if aligned(stripped.read_bytes()):
        stripped.chmod(path.stat().st_mode)
        stripped.replace(path)
    else:
        stripped.unlink()


def aligned(elf: bytes) -> bool:
    """A 64-bit, little-endian ELF file can be mapped: each segment's offset and address agree within a page."""
    [table] = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    for at in range(table, table + size * count, size):
        kind, _flags, offset, address, *_, alignment = struct.unpack_from("<IIQQQQQQ", elf, at)
        if kind == LOAD and (offset - address) % alignment:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
