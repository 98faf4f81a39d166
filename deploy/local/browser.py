"""A Chromium for the page's tests and screenshots: ``python -m deploy.local.browser`` finds one, or installs Debian's.

``$PENSTOCK_CHROMIUM`` names one; else it is looked for on the PATH; else, as root on a Debian, its package is installed
by apt-get (with a typeface, for the screenshots). Playwright's own download is not used: it comes from elsewhere.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from deploy.local.tools import console, run_debian, show
from pipeline.core.errors import Misconfigured

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
PACKAGES = ("chromium", "fonts-inter")


def find() -> Path | None:
    """The browser to use; None: there is none. Raises Misconfigured when the one that was named is not there."""
    if named := os.environ.get("PENSTOCK_CHROMIUM"):
        path = shutil.which(named)
        if path is None:
            raise Misconfigured(f"PENSTOCK_CHROMIUM names {named}, which cannot be run: correct it, or unset it")
        return Path(path)
    path = next(filter(None, map(shutil.which, NAMES)), None)
    return Path(path) if path else None


def require() -> Path:
    """Raises Misconfigured with one line."""
    path = find()
    if path is None:
        raise Misconfigured(
            "no Chromium was found: `apt-get install chromium` (as root `make test` does it),"
            " or name one with PENSTOCK_CHROMIUM"
        )
    return path


def install() -> None:
    """Debian's packages, by apt-get. Raises Misconfigured with the line that says why not."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return
    run_debian(apt, "update", "-qq")
    run_debian(apt, "install", "-y", "-qq", "--no-install-recommends", *PACKAGES)


def look() -> Iterator[tuple[str, Path]]:
    """Raises Misconfigured when there is no browser in the end."""
    if find() is None:
        with console.status("installing Chromium (apt-get)"):
            install()
    yield "browser", require()


if __name__ == "__main__":
    sys.exit(show(look))
