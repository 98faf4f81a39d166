"""The command's entry point: it begins in a package whose name is Penstock's own, so that no other module can be loaded
in its place, and checks the internal packages before it loads them."""

from __future__ import annotations

import sys

from penstock.packages import check


def main() -> None:
    try:
        check()
    except ImportError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    from cli.main import main as run

    run()
