"""Metadata of documents that have a path."""

from __future__ import annotations

from connectors.source import MetadataKeys
from topics.messages import Metadata

PATH_KEYS: MetadataKeys = {"path": "keyword", "folder": "keyword", "extension": "keyword", "size": "number"}
MAX_FOLDERS = 20
"""The most folders that are named, from the outermost on: together they are longer than the path by their number."""
MAX_ENDING_CHARACTERS = 200


def path_metadata(path: str, size: int) -> Metadata:
    """Return ``path``, ``size`` (bytes), ``extension`` and ``folder`` of a file. path: with ``/``, relative to the
    root. A file in ``a/b`` has the folders ``a`` and ``a/b``, so that a filter by a folder matches everything below."""
    values: Metadata = {"path": path, "size": size, "extension": extension(path)}
    if above := folders(path):
        values["folder"] = [*above]
    return values


def extension(path: str) -> str:
    """Return the ending of a file's name in lower case, without its dot: ``pdf``; empty if it has none."""
    name = path.rpartition("/")[2]
    return name.rpartition(".")[2].lower()[:MAX_ENDING_CHARACTERS] if "." in name.lstrip(".") else ""


def folders(path: str) -> list[str]:
    """Return the folders above a file, the outermost first."""
    parts = [part for part in path.split("/")[:-1] if part]
    return ["/".join(parts[: n + 1]) for n in range(min(len(parts), MAX_FOLDERS))]
