"""Which class a kind of connector is; imported when it is needed, and not before."""

from __future__ import annotations

import importlib
from typing import cast

from connectors.source import Source
from pipeline.core.errors import Misconfigured

BUILT_IN = {
    "folder": "connectors.folder.source:Folder",
    "confluence": "connectors.confluence.source:Confluence",
    "google-drive": "connectors.google_drive.source:GoogleDrive",
    "slack": "connectors.slack.connector:Slack",
    "uploads": "connectors.uploads.source:Uploads",
    "git": "connectors.git.source:Git",
}


def source_class(kind: str) -> type[Source]:
    """Of a built-in kind, or of ``package.module:Class``. Raises Misconfigured with one line."""
    path = BUILT_IN.get(kind, kind)
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        known = ", ".join(sorted(BUILT_IN))
        raise Misconfigured(f"kind {kind!r}: one of {known}, or package.module:Class of your own")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise Misconfigured(f"kind {kind!r}: {module} cannot be imported ({error})") from error
    if not isinstance(found, type) or not hasattr(found, "Options") or not hasattr(found, "slim"):
        raise Misconfigured(f"kind {kind!r}: {module} has no class {name} that is a source (connectors/source.py)")
    return cast("type[Source]", found)
