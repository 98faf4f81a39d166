"""A generation for tests without a database."""

from __future__ import annotations

from typing import Any

from pipeline.core.model import ChunkParams, Generation

_FIELDS: dict[str, Any] = {
    "name": "g1",
    "state": "active",
    "model": "words",
    "revision": "",
    "dimensions": 8,
    "input_window": 254,
    "params": ChunkParams(),
    "document_prefix": "",
    "query_prefix": "",
    "chunk_table": "chunks_g1",
    "keyword_index": "chunks-g1",
}


def generation(**differences: Any) -> Generation:
    return Generation(**{**_FIELDS, **differences})
