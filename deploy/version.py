"""The version of Penstock. It stands in pyproject.toml; what cannot read it there holds a copy.

``python -m deploy.version NUMBER`` sets it and writes all copies and the chart; without a number, it writes them again.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from deploy.helm.__main__ import write as write_chart

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"\d+\.\d+\.\d+")
COPIES: tuple[tuple[str, str], ...] = (
    ("docker-compose.yml", r"^  image: penstock:(\S+)$"),
    ("deploy/kubernetes/base/kustomization.yaml", r"name: penstock, newTag: ([^\s}]+)}"),
    ("deploy/kubernetes/overlays/production/kustomization.yaml", r"newName: acme/penstock, newTag: ([^\s,]+),"),
    ("deploy/kubernetes/overlays/production/kustomization.yaml", r"inspect acme/penstock:([^\s`]+)`"),
    ("packages/typescript/package.json", r'^  "version": "([^"]+)"'),
    ("packages/typescript/package-lock.json", r'"name": "penstock-client",\n +"version": "([^"]+)"'),
    ("docs/clients.md", rf"penstock-client-({NUMBER.pattern})\.tgz"),
)
"""Files that hold a copy, and the pattern whose group is the copy. The chart's files are written by deploy.helm."""


def current(root: Path = ROOT) -> str:
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return str(project["version"])


def stale(root: Path = ROOT) -> list[str]:
    """The files whose copies differ from the version, or that hold none where one is expected."""
    version = current(root)
    return [
        file
        for file, pattern in COPIES
        if set(re.findall(pattern, (root / file).read_text("utf-8"), re.M)) != {version}
    ]


def write(root: Path = ROOT, number: str | None = None) -> None:
    """Set the version where a number is given, and write the copies."""
    if number is not None:
        project = root / "pyproject.toml"
        text = re.sub(r'^version = "[^"]+"', f'version = "{number}"', project.read_text("utf-8"), count=1, flags=re.M)
        project.write_text(text, "utf-8")
    version = current(root)
    for file, pattern in COPIES:
        text = (root / file).read_text("utf-8")
        (root / file).write_text(re.sub(pattern, lambda match: _replaced(match, version), text, flags=re.M), "utf-8")


def _replaced(match: re.Match[str], version: str) -> str:
    start, end = match.start(1) - match.start(), match.end(1) - match.start()
    return match[0][:start] + version + match[0][end:]


if __name__ == "__main__":
    if len(sys.argv) > 2 or not all(NUMBER.fullmatch(number) for number in sys.argv[1:]):
        sys.exit("error: give a version such as 0.2.0, or nothing")
    write(number=sys.argv[1] if len(sys.argv) == 2 else None)
    write_chart()
