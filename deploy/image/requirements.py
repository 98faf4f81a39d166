"""Prints what the image installs before Penstock itself: the dependencies of pyproject.toml, and for the model its
own. Run by the Dockerfile: ``requirements.py yes|no``."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

MODEL = ("ctranslate2", "safetensors", "tokenizers")
"""Of the extra ``local``: what runs the model. The rest of it is a development stack's."""


def requirements(pyproject: str, *, local_model: bool) -> list[str]:
    """As pip takes them."""
    project = tomllib.loads(pyproject)["project"]
    local = [line for line in project["optional-dependencies"]["local"] if re.split(r"[^\w-]", line)[0] in MODEL]
    return [*project["dependencies"], *(local if local_model else ())]


if __name__ == "__main__":
    for line in requirements(Path("pyproject.toml").read_text(), local_model=sys.argv[1:] == ["yes"]):
        sys.stdout.write(f"{line}\n")
