"""Write the Helm chart from the manifests of deploy/kubernetes: ``python -m deploy.helm``."""

from __future__ import annotations

import sys

from deploy.helm.chart import files
from deploy.helm.source import CHART


def write() -> int:
    """Write the chart; returns the number of its files."""
    written = files()
    for path, text in written.items():
        file = CHART / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for left_over in {*CHART.glob("templates/*")} - {CHART / path for path in written}:
        left_over.unlink()
    return len(written)


if __name__ == "__main__":
    sys.stdout.write(f"{write()} files of {CHART.name}\n")
