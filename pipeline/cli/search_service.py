"""The local stack's running query service, asked in the command's place: it holds the model and its connections, which
a process of its own would spend two seconds on.

Nothing here may import what takes long (``pipeline.settings`` and ``query`` take a third of a second each).
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from pipeline.core.errors import Misconfigured
from pipeline.home import DEVELOPMENT_FILE, ENDPOINTS_FILE, development_token, home

PATIENCE_SECONDS = 30.0
"""A search's whole budget (query/budget.py) and more."""
WHERE = frozenset({"PENSTOCK_HOME", "PENSTOCK_DIST"})
"""Variables that say where the stack is, and nothing of how to search."""


def ask(asked: Mapping[str, Any], *, tenant: str, principal: str) -> dict[str, Any] | None:
    """What the service answers to ``POST /v1/search``. asked: the body; moments are datetimes.

    None: none runs, it does not believe its own user, or it does not answer this well; then the command works it
    out by itself, and says in its own words what is wrong. So it does where anything is set in its environment, which
    may be set otherwise for the service, and for names that a header cannot carry as they are.
    """
    if any(name.startswith(("PENSTOCK_", "OTEL_")) and name not in WHERE for name in os.environ):
        return None
    if not _is_plain(tenant) or not _is_plain(principal):
        return None
    place = urlsplit(_address())
    if place.hostname is None:
        return None
    try:
        token = development_token(home() / DEVELOPMENT_FILE)
    except (FileNotFoundError, Misconfigured):
        return None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=PATIENCE_SECONDS)
    headers = {
        "Content-Type": b"application/json", "Authorization": f"Bearer {token}".encode(),
        "X-Penstock-Tenant": tenant.encode(), "X-Penstock-As": principal.encode(),
    }  # fmt: skip
    try:
        connection.request("POST", "/v1/search", json.dumps(asked, default=datetime.isoformat), headers)
        answer = connection.getresponse()
        told = answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return dict(json.loads(told)) if answer.status == 200 else None


def _is_plain(name: str) -> bool:
    """A header keeps it as it is. An empty one would stand for somebody else."""
    return name != "" and name.isprintable() and name == name.strip()


def _address() -> str:
    """http://host:port, or "" where no service runs."""
    try:
        written = json.loads((home() / ENDPOINTS_FILE).read_text())
    except FileNotFoundError:
        return ""
    return str(written.get("serve", {}).get("url", ""))
