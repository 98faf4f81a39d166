"""Where this installation keeps its state. Apart from the settings: a command that only asks the running service needs
no more than this."""

from __future__ import annotations

import os
from pathlib import Path

ENDPOINTS_FILE = "endpoints.json"
"""In the state folder: where the running local stack's services are."""


def home() -> Path:
    """The one state folder: ``$PENSTOCK_HOME``, default ``.penstock`` in the current folder."""
    return Path(os.environ.get("PENSTOCK_HOME", ".penstock")).absolute()
